"""Hidden states to eight bits or about four a value, and what a reader needs to undo it.

A value is code · scale · 2^exponent. Exponents belong to a channel of a chunk: the mean exponent of its values, a measure that a few
massive tokens do not move. They bring outlier channels, of which every real target has some, to the size of the others,
exactly. What is left is rounded to multiples of a scale, one for each token and group of channels:

    scale = max(largest magnitude / 127, coarseness · root mean square), in bfloat16, rounded up

With coarseness 0 (`int8`) the codes use the whole range of a byte. With 0.24 (`int4`) they are small, and zstd, which packs them
in any case, is left with four bits a value: of all distributions with that root mean square the Gaussian has the most
entropy, log2(√(2πe) / 0.24) = 4.1 bits. A value that stands out gets a large code instead of making its group coarse, and
none is cut off. What is less than 2^-126, where bfloat16's normal numbers begin, of its channel's 2^exponent may become zero.

A chunk is bytes [1 + 512, H + 2·G]. Row 0: the exponents, int8 [H], then zeros. Row 1 + t, of token t: codes int8 [H], then
scales, bfloat16 [G], little-endian.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.cache.layout import CHUNK_TOKENS, DTYPES, ArraySpec
from pipeline.errors import HiddenStateError
from pipeline.records import Quantised

_REACH = 56
"""Most powers of two by which a channel's largest value may lie above its exponent, so that squares stay finite in float32."""


def quantise(rows: NDArray[np.uint16] | NDArray[np.uint32], spec: ArraySpec) -> NDArray[np.uint8]:
    """Bytes [1 + 512, H + 2·G] of a chunk, of which `rows` [512, H] are the bits. Raises `HiddenStateError` unless all are finite."""
    assert spec.lossy is not None
    width, group, groups = spec.width, spec.lossy.group, spec.num_groups
    values = _as_float32(rows, spec.dtype)
    exponents = _channel_exponents(values)
    levels = np.zeros((CHUNK_TOKENS, groups, group), np.float32)
    flat = levels.reshape(CHUNK_TOKENS, -1)
    np.multiply(values, _power_of_two(-exponents), out=flat[:, :width])
    largest = np.maximum(levels.max(axis=-1), -levels.min(axis=-1))
    if not np.isfinite(largest).all():
        raise HiddenStateError(f"{spec.name}: hidden states are not finite. Capture in bfloat16 or float32, or leave the sample out.")
    scale = largest / np.float32(127)
    if spec.lossy.coarseness:
        channels = np.minimum(width - group * np.arange(groups), group).astype(np.float32)
        rms = np.sqrt(np.einsum("tgc,tgc->tg", levels, levels) / channels)
        np.maximum(scale, np.float32(spec.lossy.coarseness) * rms, out=scale)
    scale_bits = (scale.view(np.uint32) + 0xFFFF) >> 16
    scale = (scale_bits << 16).view(np.float32)
    scale[scale == 0] = 1  # of groups that are all zero
    levels /= scale[..., None]
    np.rint(levels, out=levels)
    stored = np.zeros((spec.stored_rows, spec.stored_width), np.uint8)
    stored[0, :width] = exponents.astype(np.int8).view(np.uint8)
    np.copyto(stored[1:, :width].view(np.int8), flat[:, :width], casting="unsafe")
    stored[1:, width:] = np.ascontiguousarray(scale_bits.astype("<u2")).view(np.uint8)
    return stored


def take_quantised(chunks: list[NDArray[np.uint8]], first: int, num_tokens: int, spec: ArraySpec) -> Quantised:
    """`num_tokens` tokens from `first` on, counted from the beginning of the first of the decoded `chunks`, which hold them all."""
    assert spec.lossy is not None
    width = spec.width
    codes = np.empty((num_tokens, width), np.uint8)
    scales = np.empty((num_tokens, 2 * spec.num_groups), np.uint8)
    exponents = np.empty((len(chunks), width), np.uint8)
    done = 0
    for place, chunk in enumerate(chunks):
        rows = chunk.reshape(spec.stored_rows, spec.stored_width)
        start = 1 + (first if place == 0 else 0)
        part = rows[start : start + num_tokens - done]
        codes[done : done + len(part)] = part[:, :width]
        scales[done : done + len(part)] = part[:, width:]
        exponents[place] = rows[0, :width]
        done += len(part)
    scale_bits = scales.view("<u2").astype(np.int16)
    return Quantised(
        codes=torch.from_numpy(codes.view(np.int8)),
        scales=torch.from_numpy(scale_bits).view(torch.bfloat16),
        exponents=torch.from_numpy(exponents.view(np.int8)),
        chunk=torch.from_numpy((first + np.arange(num_tokens)) // CHUNK_TOKENS),
        group=spec.lossy.group,
        dtype=DTYPES[spec.dtype].torch_dtype,
    )


def _as_float32(rows: NDArray[np.uint16] | NDArray[np.uint32], dtype: str) -> NDArray[np.float32]:
    if dtype == "bfloat16":
        return (rows.astype(np.uint32) << 16).view(np.float32)
    return rows.view(np.float16 if dtype == "float16" else np.float32).astype(np.float32, copy=False)


def _channel_exponents(values: NDArray[np.float32]) -> NDArray[np.int32]:
    """int32 [H]: the mean exponent of each channel's values, zeros (rows that fill the chunk up are) and denormals left out."""
    biased = (values.view(np.uint32) >> 23).astype(np.uint8)  # the sign is cut off
    counted = np.maximum(np.count_nonzero(biased, axis=0), 1)
    mean = (biased.sum(axis=0, dtype=np.int64) + counted // 2) // counted
    highest = biased.max(axis=0).astype(np.int64)
    return np.asarray(np.clip(np.maximum(mean, highest - _REACH), 1, 247) - 127, np.int32)


def _power_of_two(exponents: NDArray[np.int32]) -> NDArray[np.float32]:
    return np.asarray((exponents + 127) << 23, np.int32).view(np.float32)
