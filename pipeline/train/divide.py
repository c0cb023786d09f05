"""A global batch, shared out: over ranks, a rank's share into micro-batches, a micro-batch into rows. Pure, by lengths alone.

All ranks get the same number of micro-batches, empty ones where need be, so that each of them runs the same collectives whatever it has.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Rows = list[list[int]]
"""Of one micro-batch: by row, places of samples in the global batch."""


@dataclass(frozen=True, slots=True)
class Division:
    """Over `dp_size` ranks, and in each into `accumulate` micro-batches, or as many as hold rows x longest row ≤ `micro_batch_tokens`.

    `pack_tokens`: rows are filled with samples up to that many tokens; None is one sample a row.
    """

    dp_size: int = 1
    accumulate: int = 1
    micro_batch_tokens: int | None = None
    pack_tokens: int | None = None


def divide(num_tokens: NDArray[np.int64], division: Division) -> list[list[Rows]]:
    """Places 0..n-1 of a global batch whose samples have `num_tokens` [n]: by rank, micro-batch and row.

    Longest first, samples are dealt to and fro over the ranks, which gives all ranks about the same work; neighbours in
    length then share a micro-batch, which keeps padding small. Ranks or micro-batches without a sample get an empty one.
    """
    dp_size = division.dp_size
    longest_first = np.argsort(-num_tokens, kind="stable")
    place = np.arange(len(num_tokens)) % (2 * dp_size)
    rank_of = np.where(place < dp_size, place, 2 * dp_size - 1 - place)
    ranks = [_micro_batches(longest_first[rank_of == rank], num_tokens.tolist(), division) for rank in range(dp_size)]
    most = max(len(rank) for rank in ranks)
    return [rank + [[] for _ in range(most - len(rank))] for rank in ranks]


def _micro_batches(share: NDArray[np.int64], num_tokens: Sequence[int], division: Division) -> list[Rows]:
    """At least one. `share`: places, the longest sample first."""
    if division.micro_batch_tokens is None:
        return [_rows(part.tolist(), num_tokens, division.pack_tokens) for part in np.array_split(share, division.accumulate)]
    rows = _rows(share.tolist(), num_tokens, division.pack_tokens)
    batches: list[Rows] = []
    longest = 0
    for row in sorted(rows, key=lambda row: -_length(row, num_tokens)):
        if not batches or (len(batches[-1]) + 1) * longest > division.micro_batch_tokens:
            batches.append([])
            longest = _length(row, num_tokens)
        batches[-1].append(row)
    return batches or [[]]


def _rows(places: Sequence[int], num_tokens: Sequence[int], pack_tokens: int | None) -> Rows:
    """One sample a row; or, packed, each into the first row with room for it (first-fit decreasing: `places` has the longest first)."""
    if pack_tokens is None:
        return [[place] for place in places]
    rows: Rows = []
    room: list[int] = []
    for place in places:
        length = num_tokens[place]
        row = next((row for row, left in enumerate(room) if left >= length), None)
        if row is None:
            rows.append([place])
            room.append(pack_tokens - length)
        else:
            rows[row].append(place)
            room[row] -= length
    return rows


def _length(row: Sequence[int], num_tokens: Sequence[int]) -> int:
    return sum(num_tokens[place] for place in row)
