"""Samples whose tokens occur more than once, and ids that do: found by hashes, in at most 32 bytes a sample.

Two samples are the same when all their tokens are, by 128 bits of them. Of those in one split the first is kept; a training sample that
a validation set has too is not kept, so that no draft is scored on what it was trained on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.corpus.select import TRAIN
from pipeline.corpus.sources import Part

DUPLICATE = "duplicate"
_COMPARED = 1 << 20  # samples that are compared at a time


@dataclass(frozen=True)
class Choice:
    """Which samples of the parts, in order, are kept, and what the others repeat.

    `keep` bool [n]. `repeats` int64 [d], ascending, are samples that occurred before, or that are for training and a validation set has;
    `originals` int64 [d] the sample that each repeats. They are not kept, or, unless duplicates are dropped, only known. `leaked`
    counts those that a validation set has. `repeated_ids` uint64, ascending, are hashes of ids that several kept samples have.
    """

    keep: NDArray[np.bool_]
    repeats: NDArray[np.int64]
    originals: NDArray[np.int64]
    leaked: int
    repeated_ids: NDArray[np.uint64]


def read_batch(path: Path) -> pa.RecordBatch:
    """What a part's file holds, mapped."""
    with pa.memory_map(str(path)) as stream:
        return pa.ipc.open_file(stream).get_batch(0)


def batches(parts: Sequence[tuple[Part, Path]]) -> Iterator[tuple[Part, int, pa.RecordBatch]]:
    """Each part with the number of its first sample and what its file holds."""
    first = 0
    for part, path in parts:
        batch = read_batch(path)
        yield part, first, batch
        first += batch.num_rows


def choose(parts: Sequence[tuple[Part, Path]], drop: bool) -> Choice:
    """Look for samples that occur more than once; `drop`: they are not kept."""
    num_samples = sum(batch.num_rows for _, _, batch in batches(parts))
    order, follows, codes, train = _same(parts, num_samples)
    places = np.flatnonzero(follows | np.append(follows[1:], False))
    members, group = order[places], np.cumsum(~follows[places]) - 1
    del order, follows
    training = codes[members] == train
    scored = np.zeros(int(group[-1]) + 1 if len(group) else 0, dtype=np.bool_)
    scored[group[~training]] = True
    # Members of a group are in the order of the corpus, so the first of each split is the first that unique finds.
    first = np.zeros(len(members), dtype=np.bool_)
    first[np.unique(group * (int(codes.max(initial=0)) + 1) + codes[members], return_index=True)[1]] = True
    leaked = training & scored[group]
    kept = first & ~leaked
    original = np.zeros(len(scored), dtype=np.int64)
    original[group[kept][::-1]] = members[kept][::-1]
    repeats, originals = members[~kept], original[group[~kept]]
    ascending = np.argsort(repeats)
    keep = np.ones(num_samples, dtype=np.bool_)
    keep[repeats] = not drop
    return Choice(keep, repeats[ascending], originals[ascending], int(leaked.sum()), _repeated_ids(parts, keep))


def _same(parts: Sequence[tuple[Part, Path]], num_samples: int) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.uint16], int]:
    """Samples ordered so that those with the same tokens are neighbours, else as in the corpus; whether each has the tokens of the one
    before it there; by sample a number for its split; and the number of training."""
    low, high = (np.empty(num_samples, dtype=np.uint64) for _ in range(2))
    codes = np.empty(num_samples, dtype=np.uint16)
    names = {TRAIN: 0}
    for _, first, batch in batches(parts):
        here = slice(first, first + batch.num_rows)
        low[here], high[here] = (batch.column(name).to_numpy() for name in ("content_low", "content_high"))
        codes[here] = [names.setdefault(str(name), len(names)) for name in batch.column("split").to_pylist()]
    order = np.argsort(low, kind="stable")
    follows = np.zeros(num_samples, dtype=np.bool_)
    for start in range(1, num_samples, _COMPARED):
        these = order[start : start + _COMPARED]
        before = order[start - 1 : start - 1 + len(these)]
        follows[start : start + len(these)] = (low[these] == low[before]) & (high[these] == high[before])
    return order, follows, codes, names[TRAIN]


def _repeated_ids(parts: Sequence[tuple[Part, Path]], keep: NDArray[np.bool_]) -> NDArray[np.uint64]:
    hashes, filled = np.empty(int(keep.sum()), dtype=np.uint64), 0
    for _, first, batch in batches(parts):
        found = batch.column("id_hash").to_numpy()[keep[first : first + batch.num_rows]]
        hashes[filled : filled + len(found)] = found
        filled += len(found)
    hashes.sort()
    return np.unique(hashes[1:][hashes[1:] == hashes[:-1]])


def rows_of(parts: Sequence[tuple[Part, Path]], samples: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """For samples, ascending: the number of the part that each is in, and its row."""
    numbers, rows = np.empty(len(samples), dtype=np.int64), np.empty(len(samples), dtype=np.int64)
    for number, (_, first, batch) in enumerate(batches(parts)):
        begin, end = np.searchsorted(samples, [first, first + batch.num_rows])
        numbers[begin:end] = number
        rows[begin:end] = batch.column("row").to_numpy()[samples[begin:end] - first]
    return numbers, rows
