"""Which positions of a sample can start a block, and which of them an epoch trains on (DFLASH §3). Pure; no torch."""

from hashlib import blake2b
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Fit = Literal["full", "partial"]


def _last_anchor(num_tokens: NDArray[np.int64], block_size: int, fit: Fit) -> NDArray[np.int64]:
    """Largest position that fits; below 0 where none does. A partial block still needs one slot inside the sample."""
    return num_tokens - (block_size if fit == "full" else 2)


def usable_anchors(spans: NDArray[np.int32], num_tokens: int, block_size: int, fit: Fit, shift: int = 0) -> NDArray[np.int64]:
    """Positions of one sample that can start a block, ascending: supervised themselves, fitting, and with a supervised slot.

    `spans` int [n, 2], rows (start, length) of supervised tokens, ascending and disjoint, as in `TokenSample`. With `shift` 1 slot k
    predicts the token at anchor + 1 + k, so that a block has one label more.
    """
    supervised = np.zeros(num_tokens + 1, dtype=np.int64)
    for start, length in spans:
        supervised[start + 1 : start + length + 1] = 1
    before = np.cumsum(supervised)  # before[p]: supervised tokens at positions below p
    last = int(_last_anchor(np.asarray(num_tokens), block_size, fit))
    anchors = np.arange(max(last + 1, 0))
    ends = np.minimum(anchors + block_size + shift, num_tokens)
    return np.flatnonzero((supervised[anchors + 1] == 1) & (before[ends] > before[anchors + 1]))


def has_usable_anchor(
    spans: NDArray[np.int32], offsets: NDArray[np.int64], num_tokens: NDArray[np.int64], block_size: int, fit: Fit, shift: int = 0
) -> NDArray[np.bool_]:
    """Whether each of K samples has a usable anchor, from an index of many: bool [K].

    Spans of sample i are `spans[offsets[i] : offsets[i + 1]]` (`offsets` [K + 1]); `num_tokens` [K].
    """
    counts = np.diff(offsets)
    sample = np.repeat(np.arange(len(counts)), counts)
    spans = spans[offsets[0] : offsets[-1]]
    starts, lengths = spans[:, 0].astype(np.int64), spans[:, 1]
    # A span's first token is its best anchor: its next token is the nearest label, or else the next span's first one is.
    follows = np.zeros(len(spans), dtype=np.bool_)
    follows[:-1] = (sample[1:] == sample[:-1]) & (starts[1:] - starts[:-1] < block_size + shift)
    usable = (starts <= _last_anchor(num_tokens.astype(np.int64), block_size, fit)[sample]) & ((lengths >= 2) | follows)
    return np.bincount(sample[usable], minlength=len(counts)) > 0


def draw_anchors(seed: int, epoch: int, sample_id: str, usable: NDArray[np.int64], num_anchors: int) -> NDArray[np.int64]:
    """At most `num_anchors` of `usable`, without replacement, ascending.

    A pure function of its arguments: every usable anchor gets a random key from a counter-based generator that is keyed with
    (seed, epoch, sample_id), and the smallest keys win. No generator state, batch, rank or worker has a say.
    """
    if len(usable) <= num_anchors:
        return usable
    digest = blake2b(f"anchors/{seed}/{epoch}/{sample_id}".encode(), digest_size=16).digest()
    keys = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(len(usable))
    return np.sort(usable[np.argsort(keys, kind="stable")[:num_anchors]])


def draw_prefixes(seed: int, epoch: int, sample_id: str, anchors: NDArray[np.int64], block_size: int, base: float) -> NDArray[np.int64]:
    """How many slots of each block show their token (DFLASH §3, variable_prefix): l in min(2, B-1)..B-1, with a chance as base^l.

    A pure function of (seed, epoch, sample_id) and of each anchor's position: neither the other anchors nor anything else has a say.
    """
    if not len(anchors):
        return np.zeros(0, dtype=np.int64)
    digest = blake2b(f"prefixes/{seed}/{epoch}/{sample_id}".encode(), digest_size=16).digest()
    raw = np.random.Philox(key=int.from_bytes(digest, "little")).random_raw(int(anchors.max()) + 1)[anchors]
    lengths = np.arange(min(2, block_size - 1), block_size)
    chances = base ** (lengths - lengths[0]).astype(np.float64)
    below = np.cumsum(chances) / chances.sum()
    return lengths[np.searchsorted(below[:-1], (raw >> np.uint64(11)) * 2.0**-53, side="right")].astype(np.int64)
