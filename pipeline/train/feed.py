"""Which samples make which optimizer step, and the batches that carry them.

Everything about order is a pure function: a permutation for each (seed, epoch), global batches that are consecutive
pieces of it, and a division of a global batch over ranks and micro-batches that looks at lengths only. A position in
training is two integers, so a run goes on from where it stopped with the same samples on any number of ranks or threads.
Threads read ahead (the cache's decompression releases the GIL); they change when a batch is ready, never what is in it.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.records import CapturedSample, DraftBatch, Quantised, TokenSample

Item = TypeVar("Item")
Made = TypeVar("Made")

Source = Callable[[Sequence[int]], list[CapturedSample]]
"""Samples by index, with their hidden states: from the cache, or from a forward of the live target."""

Draw = Callable[[TokenSample, int], NDArray[np.int64]]
"""Anchors of a sample in an epoch: positions, ascending."""


@dataclass(frozen=True, slots=True)
class Position:
    """The place in training: `step` global batches of epoch `epoch` are done."""

    epoch: int = 0
    step: int = 0


@lru_cache(maxsize=2)
def epoch_order(seed: int, epoch: int, num_samples: int) -> NDArray[np.int64]:
    """A permutation of 0..num_samples-1, from raw generator bits only: NumPy keeps those the same in every version."""
    digest = blake2b(f"order/{seed}/{epoch}".encode(), digest_size=16).digest()
    keys = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(num_samples)
    order = np.argsort(keys, kind="stable").astype(np.int64)
    order.flags.writeable = False
    return order


@dataclass(frozen=True, eq=False, slots=True)
class Order:
    """The order of training: `indices` int64 [n] are the samples with a usable anchor, ascending; `num_tokens` [n] their lengths."""

    seed: int
    indices: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    global_batch_size: int

    @property
    def steps_per_epoch(self) -> int:
        """Global batches of an epoch. The last one may be smaller; it is neither dropped nor filled up."""
        return -(-len(self.indices) // self.global_batch_size)

    def after(self, position: Position) -> Position:
        """The position once the global batch at `position` is done."""
        if position.step + 1 < self.steps_per_epoch:
            return Position(position.epoch, position.step + 1)
        return Position(position.epoch + 1, 0)

    def micro_batches(self, position: Position, dp_size: int, accumulate: int) -> list[list[NDArray[np.int64]]]:
        """The global batch at `position`, by rank and micro-batch: indices of samples. Their union does not depend on `dp_size`."""
        order = epoch_order(self.seed, position.epoch, len(self.indices))
        start = position.step * self.global_batch_size
        rows = order[start : start + self.global_batch_size]
        return [[self.indices[rows[part]] for part in parts] for parts in divide(self.num_tokens[rows], dp_size, accumulate)]


def divide(num_tokens: NDArray[np.int64], dp_size: int, accumulate: int) -> list[list[NDArray[np.int64]]]:
    """Places 0..n-1 of a global batch, by rank and micro-batch.

    Longest first, samples are dealt to and fro over the ranks, which gives all ranks about the same work; neighbours in
    length then share a micro-batch, which keeps padding small. Ranks or micro-batches without a sample get an empty one.
    """
    longest_first = np.argsort(-num_tokens, kind="stable")
    place = np.arange(len(num_tokens)) % (2 * dp_size)
    rank_of = np.where(place < dp_size, place, 2 * dp_size - 1 - place)
    return [np.array_split(longest_first[rank_of == rank], accumulate) for rank in range(dp_size)]


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What a batch's size depends on besides its samples: target layers in the draft's order, B, H and the states' dtype."""

    layer_ids: tuple[int, ...]
    block_size: int
    hidden_size: int
    dtype: torch.dtype


def collate(samples: Sequence[CapturedSample], anchors: Sequence[NDArray[np.int64]], shape: BatchShape) -> DraftBatch:
    """One row a sample, padded on the right; one block an anchor, padding blocks repeat the row's last anchor and are invalid.

    Without samples it is the empty batch: one row whose only block is invalid, for a rank that must take part all the same.
    """
    rows, width = max(1, len(samples)), len(shape.layer_ids) * shape.hidden_size
    tokens = max([shape.block_size, *(s.tokens.num_tokens for s in samples)])
    blocks = max([1, *(len(a) for a in anchors)])
    device = next((state.device for sample in samples for state in sample.hidden.values()), torch.device("cpu"))
    quantised = _quantised(samples, tokens, shape) if samples and samples[0].quantised is not None else None
    input_ids = torch.zeros(rows, tokens, dtype=torch.int64)
    loss_mask = torch.zeros(rows, tokens, dtype=torch.bool)
    features = torch.zeros(rows, tokens, 0 if quantised else width, dtype=shape.dtype, device=device)
    placed = torch.zeros(rows, blocks, dtype=torch.int64)
    ends = torch.full((rows, blocks), tokens, dtype=torch.int64)
    valid = torch.zeros(rows, blocks, dtype=torch.bool)
    keeps_final = bool(samples) and all(s.final is not None for s in samples)
    final = torch.zeros(rows, tokens, shape.hidden_size, dtype=shape.dtype, device=device) if keeps_final else None
    for row, (sample, at) in enumerate(zip(samples, anchors, strict=True)):
        length = sample.tokens.num_tokens
        # -1 stands where a position is fed as an embedding: never an anchor or a label, but it must not index a table either.
        input_ids[row, :length] = torch.from_numpy(sample.tokens.input_ids.astype(np.int64)).clamp_(min=0)
        loss_mask[row, :length] = torch.from_numpy(sample.tokens.loss_mask)
        if quantised is None:
            torch.cat([sample.hidden[layer] for layer in shape.layer_ids], dim=-1, out=features[row, :length])
        if final is not None and sample.final is not None:
            final[row, :length] = sample.final
        ends[row] = length
        if len(at):
            placed[row] = int(at[-1])
            placed[row, : len(at)] = torch.from_numpy(at)
            valid[row, : len(at)] = True
    return DraftBatch(
        sample_ids=tuple(s.tokens.sample_id for s in samples),
        input_ids=input_ids,
        loss_mask=loss_mask,
        features=features,
        position_ids=torch.arange(tokens).expand(rows, tokens),
        anchors=placed,
        document_start=torch.zeros_like(placed),
        document_end=ends,
        block_valid=valid,
        final=final,
        quantised=quantised,
    )


def _quantised(samples: Sequence[CapturedSample], tokens: int, shape: BatchShape) -> Quantised:
    """[R, S, L, H] of samples of a lossy cache, padded with codes 0: about half the bytes of states to move to the device."""
    parts = [[(sample.quantised or {})[layer] for layer in shape.layer_ids] for sample in samples]
    first = parts[0][0]

    def padded(of: Callable[[Quantised], torch.Tensor]) -> torch.Tensor:
        whole = of(first).new_zeros(len(samples), tokens, len(shape.layer_ids), of(first).shape[-1])
        for row, layers in enumerate(parts):
            torch.stack([of(layer) for layer in layers], dim=1, out=whole[row, : len(layers[0].chunk)])
        return whole

    chunk, seen = torch.zeros(len(samples), tokens, dtype=torch.int64), 0
    for row, layers in enumerate(parts):
        chunk[row, : len(layers[0].chunk)] = layers[0].chunk + seen
        seen += len(layers[0].exponents)
    exponents = torch.cat([torch.stack([layer.exponents for layer in layers], dim=1) for layers in parts])
    return Quantised(padded(lambda q: q.codes), padded(lambda q: q.scales), exponents, chunk, first.group, first.dtype)


class Feed:
    """The micro-batches of one rank, one after another without end, from a position on.

    `num_workers` threads keep at most twice their number of micro-batches ready; with 0, each is read when it is asked
    for (and by the caller's thread, which a live target needs). `waited_seconds` sums the time that the caller waited.
    """

    def __init__(self, source: Source, draw: Draw, shape: BatchShape, num_workers: int) -> None:
        self.waited_seconds = 0.0
        self._source, self._draw, self._shape, self._num_workers = source, draw, shape, num_workers

    def micro_batches(self, order: Order, start: Position, dp_rank: int, dp_size: int, accumulate: int) -> Iterator[DraftBatch]:
        """`accumulate` batches for each optimizer step from `start` on, on the CPU unless the source's samples lie elsewhere."""

        def wanted() -> Iterator[tuple[int, NDArray[np.int64]]]:
            position = start
            while True:
                for indices in order.micro_batches(position, dp_size, accumulate)[dp_rank]:
                    yield position.epoch, indices
                position = order.after(position)

        batches = read_ahead(lambda item: self._make(*item), wanted(), self._num_workers)
        while True:
            begin = time.perf_counter()
            batch = next(batches)
            self.waited_seconds += time.perf_counter() - begin
            yield batch

    def _make(self, epoch: int, indices: NDArray[np.int64]) -> DraftBatch:
        samples = self._source(indices.tolist()) if len(indices) else []
        return collate(samples, [self._draw(sample.tokens, epoch) for sample in samples], self._shape)


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
