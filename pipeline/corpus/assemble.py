"""Parts to one corpus: the account of all rows, ids that are unique, digests, and the files that readers see.

A few passes over the parts, one part at a time, so that memory grows with the corpus by the hashes of `duplicates.py` alone.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from hashlib import sha256
from io import IOBase
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.corpus.chat import TEMPLATE_ERROR
from pipeline.corpus.duplicates import DUPLICATE, Choice, batches, rows_of
from pipeline.corpus.parts import piece_id, place_id, read_account
from pipeline.corpus.places import NOT_LOCATED
from pipeline.corpus.prepared import DROPPED_FILE, SAMPLES_FILE
from pipeline.corpus.rows import BROKEN
from pipeline.corpus.samples import SPECIAL
from pipeline.corpus.schema import PART, SAMPLES
from pipeline.corpus.select import NO_SUPERVISED, TOO_FEW, TRAIN
from pipeline.corpus.sources import Part
from pipeline.errors import CorpusError, TemplateError
from pipeline.runtime.files import atomic_file

ROW = -1  # stands for a piece where a whole row is meant
TEMPLATE_REASONS = (NO_SUPERVISED, NOT_LOCATED, TEMPLATE_ERROR)


@dataclass(slots=True)
class Totals:
    """The account of all rows, and an example of each reason, as words.

    rows = kept + Σ dropped. `left_out` counts, by reason, further samples that kept rows could have given; `special` the samples of each
    kind in `SPECIAL`.
    """

    rows: int = 0
    samples: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    left_out: Counter[str] = field(default_factory=Counter)
    special: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    @property
    def kept(self) -> int:
        return self.rows - self.dropped.total()

    def drop(self, part: Part, row: int, reason: str, detail: str) -> None:
        self.dropped[reason] += 1
        self.examples.setdefault(reason, f"{part.source.name} row {row}" + (f": {detail}" if detail else ""))

    def reasons(self) -> str:
        return "; ".join(f"{reason} × {n} (such as {self.examples[reason]})" for reason, n in self.dropped.most_common())

    def counts(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "kept": self.kept,
            "dropped": dict(self.dropped),
            "samples": self.samples,
            "left_out": dict(self.left_out),
            **{name: self.special[name] for name in SPECIAL},
        }


def part_is_whole(path: Path, part: Part) -> bool:
    """Whether `path` holds the finished samples of `part`."""
    try:
        with pa.memory_map(str(path)) as stream:
            schema = pa.ipc.open_file(stream).schema
            return bool(schema.equals(PART)) and read_account(schema).rows == part.num_rows
    except (OSError, ValueError, TypeError, KeyError):  # pyarrow's ArrowInvalid is a ValueError
        return False


def account_for(parts: Sequence[tuple[Part, Path]], choice: Choice, folder: Path) -> Totals:
    """Write the list of all rows, and further pieces of kept ones, that gave no sample; and count."""
    totals = Totals()
    originals = np.unique(choice.originals)
    places = rows_of(parts, originals)
    with atomic_file(folder / DROPPED_FILE) as stream:
        for part, first, batch in batches(parts):
            account, keep = read_account(batch.schema), choice.keep[first : first + batch.num_rows]
            totals.rows += account.rows
            totals.samples += int(keep.sum())
            flags = batch.column("flags").to_numpy()[keep]
            totals.special += Counter({name: int(((flags >> bit) & 1).sum()) for bit, name in enumerate(SPECIAL)})
            lost = [(row, ROW, reason, detail) for row, reason, detail in account.dropped] + [(*piece,) for piece in account.left_out]
            if not keep.all():
                repeats = choice.originals[np.searchsorted(choice.repeats, first + np.flatnonzero(~keep))]
                found = np.searchsorted(originals, repeats)
                details = [
                    f"the same tokens as {parts[number][0].source.name} row {row}"
                    for number, row in zip(*(place[found].tolist() for place in places), strict=True)
                ]
                lost += _repeats(batch, keep, details)
            for row, piece, reason, detail in sorted(lost):
                line = {"source": part.source.name, "row": row, "reason": reason, "detail": detail}
                if piece == ROW:
                    totals.drop(part, row, reason, detail)
                else:
                    totals.left_out[reason] += 1
                    line["piece"] = piece
                stream.write(json.dumps(line).encode() + b"\n")
    return totals


def _repeats(batch: pa.RecordBatch, keep: NDArray[np.bool_], details: Sequence[str]) -> list[tuple[int, int, str, str]]:
    """Samples of a part that are not kept: as rows where no sample of the row is kept, else as pieces."""
    rows, pieces = (batch.column(name).to_numpy() for name in ("row", "piece"))
    partly = set(rows[keep].tolist())
    lost: dict[tuple[int, int], tuple[int, int, str, str]] = {}
    for row, piece, detail in zip(rows[~keep].tolist(), pieces[~keep].tolist(), details, strict=True):
        place = (row, piece if row in partly else ROW)
        lost.setdefault(place, (*place, DUPLICATE, detail))
    return list(lost.values())


def check_usable(totals: Totals, template_name: str, folder: Path) -> None:
    """Raise `CorpusError` when no row gave a sample; a `TemplateError` when that is the template's doing."""
    if totals.kept:
        return
    if not totals.rows:
        raise CorpusError("the corpus holds no row; expected one JSON object a line. Check the paths in data.train_ds.input_cfg.")
    listed = f"All are listed in {folder / DROPPED_FILE}."
    by_template = sum(totals.dropped[reason] for reason in TEMPLATE_REASONS)
    if by_template and not totals.dropped[TOO_FEW]:
        raise TemplateError(
            f"chat template {template_name}: not one of {by_template} chats got a supervised token, expected each assistant turn to. "
            f"{totals.reasons()}. {listed} Choose another template or other arguments in model.target, "
            f"or put generation marks into the template."
        )
    hint = "Files whose lines are no JSON objects need `type` in their entry of input_cfg: json, parquet, text, …. "
    advice = hint if 2 * totals.dropped[BROKEN] > totals.rows else ""
    raise CorpusError(f"none of {totals.rows} rows gave a sample: {totals.reasons()}. {advice}{listed}")


def write_samples(parts: Sequence[tuple[Part, Path]], choice: Choice, folder: Path) -> dict[str, Any]:
    """`samples.arrow`. Returns its size, digests of ids, masks and splits, and the counts by split."""
    digests = {name: sha256() for name in ("lengths", "input_ids", "spans", "spans_of_samples", "splits")}
    by_split: dict[str, dict[str, int]] = {}
    with ExitStack() as stack:
        stream = stack.enter_context(atomic_file(folder / SAMPLES_FILE))
        with pa.ipc.new_file(cast(IOBase, stream), SAMPLES) as writer:
            for part, first, found in batches(parts):
                keep = choice.keep[first : first + found.num_rows]
                batch = found if keep.all() else found.filter(pa.array(keep))
                if not batch.num_rows:
                    continue
                writer.write_batch(_with_ids(batch, part, choice.repeated_ids))
                _digest(batch, digests)
                _count(batch, by_split)
        size = stream.tell()
    return {"bytes": size, "by_split": by_split, "digests": {name: digest.hexdigest() for name, digest in digests.items()}}


def check_splits(by_split: Mapping[str, Mapping[str, int]], wanted: Sequence[str], folder: Path) -> None:
    """Raise `CorpusError` when a split that was asked for by its own sources has no sample."""
    if missing := [name for name in wanted if name not in by_split]:
        found = ", ".join(f"{sums['samples']} in {name}" for name, sums in by_split.items())
        section = "data.train_ds and validation_ds.fraction" if TRAIN in missing else "data.validation_ds.datasets"
        raise CorpusError(f"no sample in {', '.join(missing)}; found {found}. Check {section}, and {folder / DROPPED_FILE}.")


def _with_ids(batch: pa.RecordBatch, part: Part, repeated: NDArray[np.uint64]) -> pa.RecordBatch:
    twice = np.isin(batch.column("id_hash").to_numpy(), repeated).tolist()
    columns = [cast(list[Any], batch.column(name).to_pylist()) for name in ("own_id", "row", "piece")]
    ids = [
        piece_id(place_id(part.source, row) if own is None or again else own, piece)
        for again, own, row, piece in zip(twice, *columns, strict=True)
    ]
    return pa.record_batch([pa.array(ids, pa.string()), *(batch.column(name) for name in SAMPLES.names[1:])], schema=SAMPLES)


def _digest(batch: pa.RecordBatch, digests: Mapping[str, Any]) -> None:
    """Digests run over values alone, so they do not depend on how samples are divided into batches."""
    masks, ids = cast("pa.ListArray[Any]", batch.column("loss_mask")), cast("pa.ListArray[Any]", batch.column("input_ids"))
    spans = cast(pa.StructArray, masks.flatten())
    counts = masks.value_lengths().to_numpy()
    digests["lengths"].update(batch.column("num_tokens").to_numpy().astype("<i4").tobytes())
    digests["input_ids"].update(ids.flatten().to_numpy().astype("<i4").tobytes())
    digests["spans"].update(np.stack([spans.field(name).to_numpy() for name in ("start", "length")], axis=1).astype("<i4").tobytes())
    digests["spans_of_samples"].update(counts.astype("<i4").tobytes())
    digests["splits"].update("".join(f"{split}\n" for split in batch.column("split").to_pylist()).encode())


def _count(batch: pa.RecordBatch, by_split: dict[str, dict[str, int]]) -> None:
    columns = (batch.column(name).to_pylist() for name in ("split", "num_tokens", "num_supervised", "flags"))
    for split, tokens, supervised, flags in zip(*columns, strict=True):
        sums = by_split.setdefault(split, {"samples": 0, "tokens": 0, "supervised": 0, "generated": 0})
        sums["samples"] += 1
        sums["tokens"] += tokens
        sums["supervised"] += supervised
        sums["generated"] += flags >> SPECIAL.index("generated") & 1
