"""The batches of a rank, in the order of training, read ahead.

Threads read ahead (the cache's decompression releases the GIL); they change when a batch is ready, never what is in it.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from pipeline.draft.batch import BatchShape, collate
from pipeline.records import CapturedSample, DraftBatch, TokenSample
from pipeline.train.divide import Division, Rows, divide
from pipeline.train.order import GlobalBatch, Order, Position

Item = TypeVar("Item")
Made = TypeVar("Made")

Source = Callable[[Sequence[int]], list[CapturedSample]]
"""Samples by number, with their hidden states: from the cache, or from a forward of the live target."""

Draw = Callable[[TokenSample, int], NDArray[np.int64]]
"""Anchors of a sample, ascending, the nth time (from 0) that it is trained on. Without weights that is the epoch."""

Prefixes = Callable[[TokenSample, int, NDArray[np.int64]], NDArray[np.int64]]
"""How many slots of each anchor's block are visible, for an objective that draws that, the nth time too."""

Ready = Callable[[int, Sequence[int]], None]
"""Called with the epoch and the samples of each global batch before any of them is read, by all ranks and in the caller's thread."""

BOUND_SHARE, BOUND_SECONDS = 0.2, 10.0
"""Of the time, and in all, spent waiting for data: where both are reached, it is said. A run of seconds is not worth a word."""


@dataclass(frozen=True, eq=False, slots=True)
class Reading:
    """The samples of a micro-batch, before any draft has a say: `cycles` says how many times each was drawn before, `rows` which of them,
    by their places, lie one after another in each row."""

    samples: Sequence[CapturedSample]
    cycles: Sequence[int]
    rows: Rows

    def batch(self, draw: Draw, shape: BatchShape, prefixes: Prefixes | None) -> DraftBatch:
        """As the draft of `shape` sees it, with its own anchors, and visible prefixes where its objective draws them."""
        anchors = [draw(sample.tokens, cycle) for sample, cycle in zip(self.samples, self.cycles, strict=True)]
        visible = None
        if prefixes is not None:
            drawn = zip(self.samples, self.cycles, anchors, strict=True)
            visible = [prefixes(sample.tokens, cycle, at) for sample, cycle, at in drawn]
        return collate(self.samples, anchors, shape, self.rows, visible)


def read(source: Source, batch: GlobalBatch, rows: Rows) -> Reading:
    """The samples of `rows`, which holds places in the global batch."""
    places = [place for row in rows for place in row]
    counted = iter(range(len(places)))
    return Reading(
        source(batch.samples[places].tolist()) if places else [],
        batch.cycles[places].tolist(),
        [list(islice(counted, len(row))) for row in rows],
    )


class Feed:
    """The micro-batches of one rank, one after another without end, from a position on.

    `num_workers` threads keep at most twice their number of micro-batches ready; with 0, each is read when it is asked
    for (and by the caller's thread, which a live target needs). `waited_seconds` sums the time that the caller waited.
    """

    def __init__(
        self,
        source: Source,
        draw: Draw,
        shape: BatchShape,
        num_workers: int,
        ready: Ready | None = None,
        prefixes: Prefixes | None = None,
    ) -> None:
        self.waited_seconds = 0.0
        self._source, self._draw, self._shape, self._num_workers = source, draw, shape, num_workers
        self._ready, self._prefixes = ready, prefixes

    def micro_batches(self, order: Order, start: Position, division: Division, dp_rank: int) -> Iterator[DraftBatch]:
        """`num_micro_batches` batches for each optimizer step from `start` on, on the CPU unless the source's samples lie elsewhere."""

        def wanted() -> Iterator[tuple[GlobalBatch, Rows]]:
            position = start
            while True:
                batch = order.global_batch(position)
                if self._ready is not None:
                    begin = time.perf_counter()
                    self._ready(position.epoch, batch.samples.tolist())
                    self.waited_seconds -= time.perf_counter() - begin  # work, not waiting
                for rows in divide(batch.num_tokens, division)[dp_rank]:
                    yield batch, rows
                position = order.after(position)

        batches = read_ahead(lambda item: self._make(*item), wanted(), self._num_workers)
        while True:
            begin = time.perf_counter()
            batch = next(batches)
            self.waited_seconds += time.perf_counter() - begin
            yield batch

    def _make(self, batch: GlobalBatch, rows: Rows) -> DraftBatch:
        return read(self._source, batch, rows).batch(self._draw, self._shape, self._prefixes)


def num_micro_batches(order: Order, position: Position, division: Division) -> int:
    """Batches of the optimizer step at `position`, the same on all ranks."""
    return len(divide(order.global_batch(position).num_tokens, division)[0])


def bound_by_reading(waited: float, seconds: float, num_workers: int) -> str | None:
    """A sentence for a run that `waited` for the cache for that many of its `seconds`; None while that does not matter."""
    if waited <= max(BOUND_SECONDS, BOUND_SHARE * seconds):
        return None
    return (
        f"this run is bound by reading: {waited / seconds:.0%} of its time so far went by waiting for samples. Raise data.num_workers "
        f"({num_workers}), put the cache on a faster disk, or capture it with capture.codec=raw, which needs no unpacking."
    )


def read_ahead(make: Callable[[Item], Made], items: Iterable[Item], num_workers: int) -> Iterator[Made]:
    """`make` of every item, in their order, by `num_workers` threads that keep at most twice their number ready; with 0, when asked for."""
    if num_workers == 0:
        yield from map(make, items)
        return
    waiting = iter(items)
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="feed")
    try:
        ready = deque(pool.submit(make, item) for item in islice(waiting, 2 * num_workers))
        while ready:
            made = ready.popleft().result()
            ready.extend(pool.submit(make, item) for item in islice(waiting, 1))
            yield made
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
