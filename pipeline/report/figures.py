"""Pictures of the report, each for a light and for a dark page."""

import io
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter

from pipeline.report.runs import Estimate, Row, Run, is_range

SHOWN = 6
"""Settings that a picture tells apart by name; the others are in grey."""


@dataclass(frozen=True)
class Theme:
    name: str
    text: str
    faint: str
    grid: str
    accent: str
    series: Sequence[str]


LIGHT = Theme("light", "#1d2329", "#9aa4ae", "#e3e7eb", "#0b6bcb", ("#0b6bcb", "#3f8fd9", "#78b1e4", "#6b7680", "#8f99a3", "#b3bbc3"))
DARK = Theme("dark", "#e4e8ec", "#68737d", "#2c343b", "#62b0f5", ("#62b0f5", "#4389c4", "#2f658f", "#aeb8c1", "#828d97", "#5d6871"))

Draw = Callable[[Figure, Theme], None]


def svg(draw: Draw, size: tuple[float, float], theme: Theme) -> str:
    with rc_context(_style(theme)):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure, theme)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    return stream.getvalue()


def png(draw: Draw, size: tuple[float, float], path: Path) -> None:
    with rc_context(_style(LIGHT)):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure, LIGHT)
        figure.savefig(path, dpi=130, facecolor="white")


def curves(rows: Sequence[Row], others: Sequence[Run], monitor: str) -> Draw:
    """The metric at the validations, and the training loss; the best settings over their seeds, everything else in grey."""

    def draw(figure: Figure, theme: Theme) -> None:
        left, right = figure.subplots(1, 2)
        for axes, key in ((left, monitor), (right, "loss")):
            for run in [*others, *(run for row in rows[SHOWN:] for run in row.runs)]:
                _line(axes, run.records, key, theme.faint, 0.6, None)
            for place, row in reversed(list(enumerate(rows[:SHOWN]))):
                for number, run in enumerate(row.runs):
                    width = 2.2 if place == 0 else 1.3
                    _line(axes, run.records, key, theme.series[place], width, f"{place + 1}" if number == 0 else None)
            axes.set_xlabel("optimizer step")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        left.set_title(f"{monitor} at each validation")
        right.set_title("training loss")
        _legend(figure, left)

    return draw


def slots(rows: Sequence[Row]) -> Draw:
    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        for place, row in reversed(list(enumerate(rows))):
            values = row.accuracy_by_slot
            color = theme.series[place] if place < SHOWN else theme.faint
            label = f"{place + 1}" if place < SHOWN else None
            axes.plot(range(1, len(values) + 1), values, marker="o", ms=3.5, lw=2.2 if place == 0 else 1.2, color=color, label=label)
        axes.set_title("held-out accuracy by slot")
        axes.set_xlabel("slot of the block")
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _legend(figure, axes)

    return draw


def pareto(rows: Sequence[Row], monitor: str, mode: str) -> Draw:
    """Acceptance against what a draft costs; the line joins those that no other setting beats in both."""
    timed = [row for row in rows if row.draft_seconds is not None]
    predicted = [row for row in timed if row.speedup is not None]
    sign = 1 if mode == "max" else -1

    def draw(figure: Figure, theme: Theme) -> None:
        panels = figure.subplots(1, 1 + bool(timed) + bool(predicted), squeeze=False)[0]
        _scatter(panels[0], [((row.parameters or 0) / 1e6, row) for row in rows], theme, sign)
        panels[0].set(xlabel="parameters of the draft (millions)", title=f"{monitor} against size")
        if timed:
            _scatter(panels[1], [((row.draft_seconds or 0) * 1e3, row) for row in timed], theme, sign)
            panels[1].set(xlabel="measured time of a block (ms)", title=f"{monitor} against time")
        if predicted:
            best = max(row.speedup or 0 for row in predicted)
            fastest = sorted(predicted, key=lambda row: -(row.speedup or 0))[:12]
            shown = [row for row in predicted if row in fastest]
            for place, row in enumerate(shown):
                color = theme.accent if row.speedup == best else theme.faint
                panels[2].barh(place, row.speedup or 0, color=color, height=0.62)
                panels[2].text((row.speedup or 0) + best * 0.015, place, f"{row.speedup:.2f}×", va="center", color=theme.text, fontsize=8.5)
            panels[2].axvline(1.0, color=theme.text, lw=0.8, ls=":")
            panels[2].set_yticks(range(len(shown)), [f"{rows.index(row) + 1}" for row in shown])
            panels[2].invert_yaxis()
            panels[2].set_xlim(0, max(1.05, best * 1.16))
            panels[2].set(title="predicted speed-up, by rank", xlabel="tokens a second, of the target alone")
            panels[2].grid(visible=False, axis="y")

    return draw


def settings_grid(found: Sized) -> tuple[int, int]:
    """Rows and columns of panels of `settings_effects`."""
    count = min(len(found), 6)
    columns = count if count <= 4 else 3
    return -(-count // columns), columns


def settings_effects(found: Mapping[str, tuple[Mapping[Any, Estimate], float]], monitor: str) -> Draw:
    """By setting, the mean of the metric at each value, with its interval over all runs that have the value."""
    rows, columns = settings_grid(found)

    def draw(figure: Figure, theme: Theme) -> None:
        panels = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for place, axes in enumerate(panels.flat):
            if place >= len(found):
                axes.set_visible(False)
        for axes, (name, (levels, share)) in zip(panels.flat, found.items(), strict=False):
            numeric = is_range(levels)
            at = [float(value) for value in levels] if numeric else list(range(len(levels)))
            means = [level.mean for level in levels.values()]
            axes.errorbar(at, means, [level.half or 0 for level in levels.values()], fmt="o", color=theme.accent, ms=5, capsize=3, lw=1.2)
            if not numeric:
                labels = [short(value) for value in levels]
                room = 96 / columns / len(labels)  # letters, about
                crowded = any((len(one) + len(other)) / 2 + 1 > room for one, other in pairwise(labels))
                axes.set_xticks(at, labels, rotation=25 if crowded else 0, ha="right" if crowded else "center")
                axes.set_xlim(-0.5, len(levels) - 0.5)
            elif at[0] > 0 and at[-1] / at[0] > 30:
                axes.set_xscale("log")
                axes.xaxis.set_major_locator(LogLocator(numticks=5))
                axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")  # Matplotlib's own is math, which is not parsed here
                axes.xaxis.set_minor_formatter(NullFormatter())
            axes.set_title(f"{name.rpartition('.')[2]}\nexplains {share:.0%}", fontsize=9.5)
        for row in panels:
            row[0].set_ylabel(monitor)

    return draw


def short(value: Any) -> str:
    """A value as the label of a tick: of a long one its two ends."""
    text = f"{value:.3g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 24 else f"{text[:9]}…{text[-14:]}"


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    ordered = sorted(zip(labels, handles, strict=True), key=lambda pair: pair[0])
    if ordered:
        figure.legend([handle for _, handle in ordered], [label for label, _ in ordered], title="rank", loc="outside right upper")


def _scatter(axes: Axes, points: Sequence[tuple[float, Row]], theme: Theme, sign: int) -> None:
    best = [(x, row) for x, row in points if not any(_beats(other, (x, row), sign) for other in points)]
    best.sort(key=lambda point: point[0])
    axes.plot([x for x, _ in best], [row.value.mean for _, row in best], color=theme.accent, lw=1.2, zorder=1)
    for place, (x, row) in enumerate(points):
        color = theme.accent if (x, row) in best else theme.faint
        axes.errorbar(x, row.value.mean, row.value.half or 0, fmt="o", color=color, ms=5.5, capsize=2, lw=1, zorder=2)
        axes.annotate(
            f"{place + 1}",
            (x, row.value.mean),
            xytext=(6, 5 if place % 2 == 0 else -12),
            textcoords="offset points",
            color=theme.text,
            fontsize=8.5,
        )
    axes.margins(0.12)


def _beats(one: tuple[float, Row], other: tuple[float, Row], sign: int) -> bool:
    return one[0] <= other[0] and sign * (one[1].value.mean - other[1].value.mean) >= 0 and one[1] is not other[1]


def _line(axes: Axes, records: Sequence[Mapping[str, Any]], key: str, color: str, width: float, label: str | None) -> None:
    points = [(line["step"], line[key]) for line in records if line.get(key) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), color=color, lw=width, marker="o" if len(points) < 15 else None, ms=3, label=label)


def _style(theme: Theme) -> Any:
    return {
        "axes.axisbelow": True,
        "axes.edgecolor": theme.faint,
        "axes.facecolor": "none",
        "axes.grid": True,
        "axes.labelcolor": theme.text,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlecolor": theme.text,
        "axes.titlelocation": "left",
        "axes.titlesize": 10.5,
        "font.size": 9,
        "grid.color": theme.grid,
        "legend.frameon": False,
        "legend.labelcolor": theme.text,
        "svg.hashsalt": "report",
        "text.parse_math": False,  # what is swept may hold a $
        "text.color": theme.text,
        "xtick.color": theme.faint,
        "xtick.labelcolor": theme.text,
        "ytick.color": theme.faint,
        "ytick.labelcolor": theme.text,
    }
