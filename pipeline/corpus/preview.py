"""What of a few rows is supervised, to look at: as text with its supervised stretches marked, or token by token."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.config.schema import Config
from pipeline.corpus.job import input_sets, reader_of
from pipeline.corpus.messages import Unusable
from pipeline.corpus.rows import Row
from pipeline.corpus.samples import SPECIAL, Account, Kept
from pipeline.corpus.sources import Source, divide, find_sources, read_part
from pipeline.errors import CorpusError

_SUPERVISED, _OTHER, _PLAIN = "\x1b[1;32m", "\x1b[2m", "\x1b[0m"


@dataclass(frozen=True)
class Looked:
    """A row, and the samples that it gives or why it gives none; `left_out` are (piece, reason, detail) of pieces that give none."""

    row: Row
    found: list[Kept] | Unusable
    left_out: list[tuple[int, str, str]]


def preview(config: Config, place: str | None, count: int, by_token: bool, colour: bool) -> str:
    """`count` samples from the beginning of the sources, or those of the row at `place` (NAME:ROW, or ROW of the first source).

    Only the rows that are shown are tokenised, and nothing is written. Raises `CorpusError` when there is no such row, or no sample.
    """
    reader, sources = reader_of(config), find_sources(input_sets(config.data))
    samples, lines = 0, []
    for source, row in _row_at(sources, place) if place is not None else _first_rows(sources):
        account = Account()
        found = reader.samples_of(row, source.split, account)
        looked = Looked(row, found, [(piece, reason, detail) for _, piece, reason, detail in account.left_out])
        lines.append(_described(reader.template.tokenizer, looked, by_token, colour))
        samples += 0 if isinstance(found, Unusable) else len(found)
        if samples >= count:
            break
    if not lines:
        raise CorpusError("the sources hold no row. Check the paths in data.train_ds.input_cfg.")
    legend = "supervised tokens are green" if colour else "supervised tokens are marked with *" if by_token else "⟦supervised⟧"
    return "\n\n".join([*lines, legend])


def _first_rows(sources: Sequence[Source]) -> Iterator[tuple[Source, Row]]:
    """A row of every source in turn, so that each is seen."""
    streams = [(source, (row for part in divide(source, source.given.max_rows) for row in read_part(part))) for source in sources]
    while streams:
        going = []
        for source, rows in streams:
            if (row := next(rows, None)) is not None:
                going.append((source, rows))
                yield source, row
        streams = going


def _row_at(sources: Sequence[Source], place: str) -> Iterator[tuple[Source, Row]]:
    name, _, number = place.rpartition(":")
    source = next((source for source in sources if name in ("", source.name)), None)
    if source is None or not number.isdecimal():
        names = ", ".join(source.name for source in sources[:10])
        raise CorpusError(f"{place} names no row: expected ROW, or NAME:ROW with NAME one of {names}")
    rows = 0
    for part in divide(source):
        rows += part.num_rows
        if int(number) < rows:
            yield from ((source, row) for row in read_part(part) if row.row == int(number))
            return
    raise CorpusError(f"{source.name} has {rows} rows, counted from 0; there is no row {number}.")


def _described(tokenizer: Any, looked: Looked, by_token: bool, colour: bool) -> str:
    where = f"{looked.row.source} row {looked.row.row}"
    if isinstance(looked.found, Unusable):
        return f"── {where}: left out, {_why(looked.found.reason, looked.found.detail)}"
    lines = []
    for kept in looked.found:
        tokens, supervised = len(kept.rendered.input_ids), kept.rendered.num_supervised
        kinds = "".join(f", {name.replace('_', ' ')}" for bit, name in enumerate(SPECIAL) if kept.flags >> bit & 1)
        piece = f" piece {kept.piece}" if len(looked.found) > 1 or looked.left_out else ""
        lines.append(f"── {where}{piece}, {kept.split}: {tokens} tokens, {supervised} supervised ({supervised / tokens:.0%}){kinds}")
        lines.append((_by_token if by_token else _as_text)(tokenizer, kept, colour))
    return "\n".join(
        [*lines, *(f"── {where} piece {piece}: left out, {_why(reason, detail)}" for piece, reason, detail in looked.left_out)]
    )


def _why(reason: str, detail: str) -> str:
    return reason + (f": {detail}" if detail else "")


def _as_text(tokenizer: Any, kept: Kept, colour: bool) -> str:
    ids, text, at = kept.rendered.input_ids, [], 0
    for start, length in kept.rendered.spans.tolist():
        text += [_marked(tokenizer, ids[at:start], False, colour), _marked(tokenizer, ids[start : start + length], True, colour)]
        at = start + length
    return "".join([*text, _marked(tokenizer, ids[at:], False, colour)])


def _by_token(tokenizer: Any, kept: Kept, colour: bool) -> str:
    ids = kept.rendered.input_ids
    mask = np.zeros(len(ids), dtype=np.bool_)
    for start, length in kept.rendered.spans.tolist():
        mask[start : start + length] = True
    lines = []
    for place, (token, supervised) in enumerate(zip(ids.tolist(), mask.tolist(), strict=True)):
        shown = repr(tokenizer.decode([token], clean_up_tokenization_spaces=False))
        line = f"{place:>6} {token:>7} {'*' if supervised else ' '} {shown}"
        lines.append(f"{_SUPERVISED}{line}{_PLAIN}" if colour and supervised else line)
    return "\n".join(lines)


def _marked(tokenizer: Any, ids: Any, supervised: bool, colour: bool) -> str:
    """Text of some tokens, without control characters, which could do more to a terminal than show themselves."""
    if not len(ids):
        return ""
    text = tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)
    text = "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
    if colour:
        return f"{_SUPERVISED if supervised else _OTHER}{text}{_PLAIN}"
    return f"⟦{text}⟧" if supervised else text
