"""Aligned text tables."""

from collections.abc import Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell; numbers to the right, floats with three decimals. One string, no final newline."""
    numeric = [bool(rows) and all(isinstance(row[i], int | float) for row in rows) for i in range(len(header))]
    cells = [list(header), *([f"{cell:.3f}" if isinstance(cell, float) else str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    lines = ["  ".join(c.rjust(w) if n else c.ljust(w) for c, w, n in zip(line, widths, numeric, strict=True)).rstrip() for line in cells]
    return "\n".join([lines[0], "-" * (sum(widths) + 2 * (len(widths) - 1)), *lines[1:]])
