"""Which samples make which optimizer step. Everything here is a pure function of seed, epoch and what the index knows of the samples.

A global batch is the same set of samples on any number of ranks and threads (`divide.py` shares it out), and a position in training is
two integers, so a run goes on from where it stopped with the same samples, on another number of ranks too.

    places of an epoch       a permutation of all samples, or with weights each entry's share from an endless stream of permutations
    rearranged               hybrid mode's first epoch: by windows of shards; otherwise by length, if asked for
    cut into global batches  by number of samples, or by tokens; the last one may be smaller, and is neither dropped nor filled up
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Position:
    """The place in training: `step` global batches of epoch `epoch` are done."""

    epoch: int = 0
    step: int = 0


@dataclass(frozen=True, eq=False, slots=True)
class Mixture:
    """`weights` of the entries, above 0; `entry` int64 [n], the entry that each sample came from. Every entry has a sample."""

    weights: tuple[float, ...]
    entry: NDArray[np.int64]

    def quotas(self) -> list[int]:
        """Samples of each entry in every epoch, n in all: shares by weight, rounded by largest remainder."""
        shares = np.array(self.weights) / sum(self.weights) * len(self.entry)
        quotas = np.floor(shares).astype(np.int64)
        missing = len(self.entry) - int(quotas.sum())
        quotas[np.argsort(quotas - shares, kind="stable")[:missing]] += 1
        return [int(quota) for quota in quotas]

    def counts(self) -> list[int]:
        """Samples that each entry has."""
        return [int(count) for count in np.bincount(self.entry, minlength=len(self.weights))]


@dataclass(frozen=True, eq=False, slots=True)
class Order:
    """The order of training: `indices` int64 [n] are the samples with a usable anchor, ascending; `num_tokens` [n] their lengths.

    A global batch has `batch_size` samples, or as many as fit into `batch_tokens` (a longer sample is one of its own). With
    `length_buckets` above 1 samples of like length meet in it. `windows` [n], in hybrid mode: the first epoch takes one window after the
    other, shuffled inside.
    """

    seed: int
    indices: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    batch_size: int | None
    batch_tokens: int | None = None
    length_buckets: int = 1
    mixture: Mixture | None = None
    windows: NDArray[np.int64] | None = None

    def steps(self, epoch: int) -> int:
        """Global batches of an epoch. By tokens, epochs may differ by some."""
        if self.batch_tokens is None and self.batch_size is not None:
            return -(-len(self.indices) // self.batch_size)
        return len(_plan(self, epoch).edges) - 1

    def after(self, position: Position) -> Position:
        """The position once the global batch at `position` is done."""
        if position.step + 1 < self.steps(position.epoch):
            return Position(position.epoch, position.step + 1)
        return Position(position.epoch + 1, 0)

    def global_batch(self, position: Position) -> "GlobalBatch":
        plan = _plan(self, position.epoch)
        rows = slice(plan.edges[position.step], plan.edges[position.step + 1])
        places = plan.places[rows]
        return GlobalBatch(self.indices[places], plan.cycles[rows], self.num_tokens[places])

    @property
    def settings(self) -> dict[str, Any]:
        """What the order depends on besides seed and data, as far as it was asked for: a run that goes on must have the same."""
        asked = {
            "global_batch_size": self.batch_size,
            "global_batch_tokens": self.batch_tokens,
            "length_buckets": self.length_buckets if self.length_buckets > 1 else None,
            "mixture": self.mixture and [list(pair) for pair in zip(self.mixture.weights, self.mixture.counts(), strict=True)],
        }
        return {name: value for name, value in asked.items() if value is not None}


@dataclass(frozen=True, eq=False, slots=True)
class GlobalBatch:
    """int64 [n] each: numbers of samples, how many times each was drawn before (which decides its anchors), lengths in tokens."""

    samples: NDArray[np.int64]
    cycles: NDArray[np.int64]
    num_tokens: NDArray[np.int64]


@dataclass(frozen=True, eq=False, slots=True)
class _Epoch:
    """Global batch s is `places[edges[s] : edges[s + 1]]`: places in `Order.indices`, with the `cycles` of `GlobalBatch`."""

    places: NDArray[np.int64]
    cycles: NDArray[np.int64]
    edges: list[int]


def permutation(key: str, n: int) -> NDArray[np.int64]:
    """A permutation of 0..n-1, from raw generator bits only: NumPy keeps those the same in every version."""
    digest = blake2b(key.encode(), digest_size=16).digest()
    keys = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(n)
    return np.argsort(keys, kind="stable").astype(np.int64)


def epoch_order(seed: int, epoch: int, num_samples: int) -> NDArray[np.int64]:
    """The permutation of an epoch."""
    return permutation(f"order/{seed}/{epoch}", num_samples)


@lru_cache(maxsize=3)  # readers are in the next epoch when the loop still is in this one
def _plan(order: Order, epoch: int) -> _Epoch:
    places = epoch_order(order.seed, epoch, len(order.indices))
    cycles = np.full(len(places), epoch, dtype=np.int64)
    if order.mixture is not None:
        drawn, cycles = _drawn(order.seed, epoch, order.mixture)
        places, cycles = drawn[places], cycles[places]
    by_length = order.length_buckets > 1
    if epoch == 0 and order.windows is not None:
        kept, by_length = np.argsort(order.windows[places], kind="stable"), False
    elif by_length:
        kept = np.argsort(_buckets(order.num_tokens, order.length_buckets)[places], kind="stable")
    else:
        kept = np.arange(len(places))
    places, cycles = places[kept], cycles[kept]
    edges = list(_edges(order.num_tokens[places], order.batch_size, order.batch_tokens))
    if by_length:  # shuffled as a whole
        batches = [np.arange(*pair) for pair in pairwise(edges)]
        shuffled = [batches[i] for i in permutation(f"batches/{order.seed}/{epoch}", len(batches))]
        kept = np.concatenate(shuffled)
        places, cycles = places[kept], cycles[kept]
        edges = [0, *np.cumsum([len(batch) for batch in shuffled]).tolist()]
    return _Epoch(places, cycles, edges)


def _drawn(seed: int, epoch: int, mixture: Mixture) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places and cycles of an epoch, entry by entry. Each entry goes on where the epoch before stopped, and is gone through again and
    again: of its samples none is drawn for the (k + 1)th time before all were drawn k times."""
    places, cycles = [], []
    for number, (quota, count) in enumerate(zip(mixture.quotas(), mixture.counts(), strict=True)):
        members = np.flatnonzero(mixture.entry == number)
        first, last = epoch * quota // count, -(-(epoch + 1) * quota // count)
        stream = [members[permutation(f"mixture/{seed}/{number}/{cycle}", count)] for cycle in range(first, last)]
        begin = epoch * quota - first * count
        places.append(np.concatenate([members[:0], *stream])[begin : begin + quota])
        cycles.append((epoch * quota + np.arange(quota)) // count)
    return np.concatenate(places), np.concatenate(cycles)


def _buckets(num_tokens: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The bucket of every sample, 0 for the shortest: all have about the same number of samples."""
    ranked = np.empty(len(num_tokens), dtype=np.int64)
    ranked[np.argsort(num_tokens, kind="stable")] = np.arange(len(num_tokens))
    return ranked * count // len(num_tokens)


def _edges(num_tokens: NDArray[np.int64], batch_size: int | None, batch_tokens: int | None) -> Iterator[int]:
    """Where global batches begin, and the end of the last."""
    if batch_tokens is None:
        yield from range(0, len(num_tokens), batch_size or 1)
        yield len(num_tokens)
        return
    ends = np.cumsum(num_tokens)
    start = 0
    while start < len(ends):
        yield start
        before = int(ends[start] - num_tokens[start])
        start = max(start + 1, int(np.searchsorted(ends, before + batch_tokens, side="right")))
    yield len(ends)
