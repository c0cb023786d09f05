"""Which samples make a shard, and which of a shard are forwarded together. Pure functions of lengths.

Neither depends on ranks, so that what was captured on eight ranks is resumed on three, and a shard that was begun anew
comes out the same to the byte.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Segments: TypeAlias = Sequence[Sequence[tuple[int, int]]]


def plan_shards(num_tokens: NDArray[np.integer], shard_tokens: int) -> list[range]:
    """Consecutive samples, as many as fit into `shard_tokens`; a longer sample is a shard of its own.

    `num_tokens` [n] are the samples' lengths in corpus order. The ranges are not empty and cover 0..n-1 in order.
    """
    _check(num_tokens, "shard_tokens", shard_tokens)
    return list(_shards(num_tokens.tolist(), shard_tokens))


def plan_segments(num_tokens: NDArray[np.integer], shard_tokens: int, segments: Segments | None) -> list[Sequence[int]]:
    """Samples of every shard, ascending: those of `plan_shards`, taken for each segment by itself; `None` is one segment of everything.

    A segment is what one capture or one append brought, as ranges [start, end) of samples. Shards of an earlier segment stay as they
    are when more is added. Raises `ValueError` unless every sample is in one segment.
    """
    if segments is None:
        return list(plan_shards(num_tokens, shard_tokens))
    members = [np.concatenate([np.arange(start, end) for start, end in ranges]) for ranges in segments]
    if not np.array_equal(np.sort(np.concatenate(members)), np.arange(len(num_tokens))):
        raise ValueError(f"the segments {segments} do not cover {len(num_tokens)} samples once each")
    return [numbers[shard.start : shard.stop].tolist() for numbers in members for shard in plan_shards(num_tokens[numbers], shard_tokens)]


def stored_order(num_tokens: NDArray[np.integer]) -> list[int]:
    """Positions of a shard's samples in the order in which they are forwarded and stored, whatever the size of batches."""
    return [int(position) for position in np.argsort(num_tokens, kind="stable")]


def plan_batches(num_tokens: NDArray[np.integer], batch_tokens: int) -> list[list[int]]:
    """Batches of one shard: samples sorted by (length, position), as many as fit into `batch_tokens` when padded to the longest.

    `num_tokens` [n] are the lengths of the shard's samples; what comes out are positions 0..n-1, each once. A sample
    longer than `batch_tokens` is a batch of its own.
    """
    _check(num_tokens, "batch_tokens", batch_tokens)
    order = stored_order(num_tokens)
    lengths = num_tokens.tolist()
    batches: list[list[int]] = []
    for position in order:
        # Lengths ascend, so the newest sample is the longest of its batch.
        if batches and (len(batches[-1]) + 1) * lengths[position] <= batch_tokens:
            batches[-1].append(position)
        else:
            batches.append([position])
    return batches


def shards_of_part(num_shards: int, part: int, of: int) -> range:
    """Shard numbers of part `part` (1 .. of): consecutive, so that parts of two divisions overlap where their shares of the whole do."""
    return range((part - 1) * num_shards // of, part * num_shards // of)


def _shards(lengths: list[int], shard_tokens: int) -> Iterator[range]:
    start = held = 0
    for position, length in enumerate(lengths):
        if position > start and held + length > shard_tokens:
            yield range(start, position)
            start, held = position, 0
        held += length
    if start < len(lengths):
        yield range(start, len(lengths))


def _check(num_tokens: NDArray[np.integer], name: str, budget: int) -> None:
    if num_tokens.ndim != 1 or (len(num_tokens) and int(num_tokens.min()) < 1):
        raise ValueError(f"num_tokens must be one list of lengths of at least 1, got shape {num_tokens.shape}")
    if budget < 1:
        raise ValueError(f"{name} is {budget}, expected at least 1")
