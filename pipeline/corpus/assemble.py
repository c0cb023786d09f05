"""Parts to one corpus: ids that are unique, digests, the account of all rows, and the files that readers see.

Two passes over the parts, one at a time, so that memory does not grow with the corpus except by 8 bytes a row for the hashes of ids.
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
from pipeline.corpus.parts import Account, place_id, read_account
from pipeline.corpus.prepared import DROPPED_FILE, SAMPLES_FILE
from pipeline.corpus.schema import PART, SAMPLES
from pipeline.corpus.select import NO_SUPERVISED, TOO_FEW, TRAIN
from pipeline.corpus.sources import Part
from pipeline.corpus.turns import NOT_LOCATED
from pipeline.errors import CorpusError, TemplateError
from pipeline.runtime.files import atomic_file


@dataclass(slots=True)
class Totals:
    """The account of all rows, and an example of each reason, as words."""

    rows: int = 0
    kept: int = 0
    truncated: int = 0
    last_turn_only: int = 0
    answers_cut_short: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, part: Part, account: Account) -> None:
        self.rows += account.rows
        self.kept += account.rows - len(account.dropped)
        self.truncated += account.truncated
        self.last_turn_only += account.last_turn_only
        self.answers_cut_short += account.answers_cut_short
        for row, reason, detail in account.dropped:
            self.dropped[reason] += 1
            self.examples.setdefault(reason, f"{part.source.name} row {row}" + (f": {detail}" if detail else ""))

    def reasons(self) -> str:
        return "; ".join(f"{reason} × {n} (such as {self.examples[reason]})" for reason, n in self.dropped.most_common())


TEMPLATE_REASONS = (NO_SUPERVISED, NOT_LOCATED, TEMPLATE_ERROR)


def part_is_whole(path: Path, part: Part) -> bool:
    """Whether `path` holds the finished samples of `part`."""
    try:
        with pa.memory_map(str(path)) as stream:
            schema = pa.ipc.open_file(stream).schema
            return bool(schema.equals(PART)) and read_account(schema).rows == part.num_rows
    except (OSError, ValueError, TypeError, KeyError):  # pyarrow's ArrowInvalid is a ValueError
        return False


def account_for(parts: Sequence[tuple[Part, Path]], folder: Path) -> tuple[Totals, NDArray[np.uint64]]:
    """First pass: the list of dropped rows is written; the account, and the sorted hashes of ids that occur twice, are returned."""
    totals = Totals()
    hashes = [np.zeros(0, dtype=np.uint64)]
    with atomic_file(folder / DROPPED_FILE) as stream:
        for part, path in parts:
            batch = _read(path)
            account = read_account(batch.schema)
            totals.add(part, account)
            hashes.append(batch.column("id_hash").to_numpy().copy())
            for row, reason, detail in account.dropped:
                line = {"source": part.source.name, "row": row, "reason": reason, "detail": detail}
                stream.write(json.dumps(line).encode() + b"\n")
    ordered = np.sort(np.concatenate(hashes))
    return totals, np.unique(ordered[1:][ordered[1:] == ordered[:-1]])


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
    raise CorpusError(f"none of {totals.rows} rows gave a sample: {totals.reasons()}. {listed}")


def write_samples(parts: Sequence[tuple[Part, Path]], repeated: NDArray[np.uint64], folder: Path) -> dict[str, Any]:
    """Second pass: `samples.arrow`. Returns its size, digests of ids, masks and splits, and the counts by split."""
    digests = {name: sha256() for name in ("lengths", "input_ids", "spans", "spans_of_samples", "splits")}
    by_split: dict[str, dict[str, int]] = {}
    with ExitStack() as stack:
        stream = stack.enter_context(atomic_file(folder / SAMPLES_FILE))
        with pa.ipc.new_file(cast(IOBase, stream), SAMPLES) as writer:
            for part, path in parts:
                batch = _read(path)
                if not batch.num_rows:
                    continue
                writer.write_batch(_with_ids(batch, part, repeated))
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


def _read(path: Path) -> pa.RecordBatch:
    with pa.memory_map(str(path)) as stream:
        return pa.ipc.open_file(stream).get_batch(0)


def _with_ids(batch: pa.RecordBatch, part: Part, repeated: NDArray[np.uint64]) -> pa.RecordBatch:
    twice = np.isin(batch.column("id_hash").to_numpy(), repeated).tolist()
    rows: list[Any] = batch.column("row").to_pylist()
    own_ids = batch.column("own_id").to_pylist()
    ids = [place_id(part.source, row) if own is None or again else own for own, again, row in zip(own_ids, twice, rows, strict=True)]
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
    columns = (batch.column(name).to_pylist() for name in ("split", "num_tokens", "num_supervised"))
    for split, tokens, supervised in zip(*columns, strict=True):
        sums = by_split.setdefault(split, {"samples": 0, "tokens": 0, "supervised": 0})
        sums["samples"] += 1
        sums["tokens"] += tokens
        sums["supervised"] += supervised
