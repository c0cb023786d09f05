"""Chunks of hidden states to bytes and back, and the index that finds them in an array's file.

Stock Zarr codecs, run by us: zarr-python's own pipeline reaches a quarter of the speed. A chunk is its little-endian bytes;
`lossless` first gathers the first byte of every value, then the second, … (the planes: sign and exponent of neighbouring
values are alike, mantissas are noise) and packs them with zstd in frames (frames.py); `int8` and `int4` round (lossy.py) and pack
the codes with zstd level 1. A crc32c ends every chunk. numpy, zstandard and Arrow release the interpreter lock in all of this but
the crc32c, which is 6 % of the time that unpacking takes; numcodecs' own shuffle does not, which is why it is not used (measured: 0.98×
on two threads).
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import google_crc32c
import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from pipeline.cache.frames import CRC_BYTES, Frames, Run, crc_bytes, frames_with, pack_frames
from pipeline.cache.layout import DTYPES, ArraySpec
from pipeline.cache.lossy import quantise
from pipeline.errors import CacheCorruptError

Bits = NDArray[Any]
"""Values of an array as unsigned integers of the same width: uint16 or uint32."""

INDEX_ENTRY_BYTES = 16


def bits_type(item_bytes: int) -> type[np.uint16] | type[np.uint32]:
    return np.uint16 if item_bytes == 2 else np.uint32


def bits_of(states: torch.Tensor) -> Bits:
    """The bits of `states` [S, H] (CPU, contiguous) as unsigned integers, without a copy."""
    as_integers: Any = torch.int16 if states.element_size() == 2 else torch.int32
    return states.view(as_integers).numpy().view(bits_type(states.element_size()))


def new_states(num_tokens: int, spec: ArraySpec) -> tuple[torch.Tensor, Bits]:
    """An unfilled tensor [num_tokens, width] of the array's dtype and a view of its bits to fill it through."""
    states = torch.empty((num_tokens, spec.width), dtype=DTYPES[spec.dtype].torch_dtype)
    return states, bits_of(states)


class StoredChunk(NamedTuple):
    """What is stored of a chunk, its crc32c included, and its frames, none with a codec that has none."""

    data: bytes
    frames: Frames


def encode_chunk(rows: Bits, spec: ArraySpec) -> StoredChunk:
    """`rows` is [512, width]."""
    if spec.codec == "raw":
        packed = [rows.astype(rows.dtype.newbyteorder("<"), copy=False).tobytes()]
    elif spec.lossy:
        codes: Any = quantise(rows, spec)  # the stubs do not know that Arrow takes any buffer
        # As bytes: the memoryview of a buffer that Arrow has packed keeps the length that it had before.
        packed = [pa.Codec("zstd", compression_level=1).compress(codes, asbytes=True)]
    else:
        packed = pack_frames(_split(rows), spec)
    _, *crcs = accumulate(packed, google_crc32c.extend, initial=0)
    frames = list(zip(map(len, packed), crcs, strict=True)) if spec.frames else []
    return StoredChunk(b"".join((*packed, crc_bytes(crcs[-1]))), np.array(frames, np.uint32).reshape(-1, 2))


def decode_chunk(stored: bytes | NDArray[np.uint8], spec: ArraySpec, where: str) -> NDArray[np.uint8]:
    """The bytes of a chunk, still in planes when the codec splits them, still quantised when it is lossy; `take_rows` puts planes
    together, `lossy.take_quantised` takes codes and scales apart.

    Raises `CacheCorruptError` when the crc32c or the size is wrong; `where` names file and chunk.
    """
    payload = np.frombuffer(stored, np.uint8, max(0, len(stored) - CRC_BYTES))
    _check(google_crc32c.value(payload), bytes(stored[len(payload) :]), where)
    if spec.codec != "raw":
        return _unpack(payload, spec.stored_bytes, where)
    if payload.size != spec.stored_bytes:
        raise CacheCorruptError(f"{where}: {payload.size} bytes, expected {spec.stored_bytes}. Capture the shard again.")
    return payload


def unpack_rows(packed: NDArray[np.uint8], runs: Sequence[Run], spec: ArraySpec, first: int, out: Bits, where: str) -> None:
    """Fill `out` [n, width] with rows first.. of a chunk. `packed` are the frames that have them, `runs`, one after the other.

    Raises `CacheCorruptError`, which names `where`, when a checksum or a size is wrong.
    """
    begin = 0
    for run in runs:
        _check(google_crc32c.extend(run.crc_before, packed[begin : begin + run.size]), crc_bytes(run.crc), where)
        begin += run.size
    tokens = spec.frame_tokens * frames_with(spec, first, len(out))
    take_rows(_unpack(packed, tokens * spec.width * spec.item_bytes, where), spec, first % spec.frame_tokens, out)


def _check(crc: int, expected: bytes, where: str) -> None:
    if crc_bytes(crc) != expected:
        raise CacheCorruptError(f"{where}: the checksum is wrong, its bytes were altered. Capture the shard again.")


def _unpack(packed: Any, size: int, where: str) -> NDArray[np.uint8]:
    try:
        return np.frombuffer(pa.Codec("zstd").decompress(packed, decompressed_size=size, asbytes=True), np.uint8)
    except OSError as error:  # also when there is less, or more
        raise CacheCorruptError(f"{where}: cannot be unpacked to {size} bytes ({error}). Capture the shard again.") from error


def take_rows(chunk: NDArray[np.uint8], spec: ArraySpec, start: int, out: Bits) -> None:
    """Copy rows start.. of a decoded chunk, or of the same frames of all its planes, into all of `out` [n, width]."""
    flat, begin, end = out.reshape(-1), start * spec.width, (start + len(out)) * spec.width
    if spec.codec != "lossless":
        flat[:] = chunk.view(flat.dtype.newbyteorder("<"))[begin:end]
        return
    planes = chunk.reshape(spec.item_bytes, -1)[:, begin:end]
    flat[:] = planes[-1]
    for plane in planes[-2::-1]:
        flat <<= 8
        flat |= plane


def _split(rows: Bits) -> NDArray[np.uint8]:
    """Byte planes of `rows`, lowest first, [n, values]: what Zarr's shuffle does to little-endian values."""
    flat = rows.reshape(-1)
    planes = np.empty((rows.itemsize, flat.size), np.uint8)
    np.copyto(planes[0], flat, casting="unsafe")
    for k in range(1, rows.itemsize):
        np.right_shift(flat, 8 * k, out=planes[k], casting="unsafe")
    return planes


def pack_index(sizes: list[int]) -> bytes:
    """The index at an array file's end: (offset, bytes) of every chunk as little-endian uint64, then a crc32c of it all.

    `sizes` counts the bytes of the chunks, which lie one after the other from the file's start.
    """
    entries = np.empty((len(sizes), 2), "<u8")
    entries[:, 1] = sizes
    entries[:, 0] = np.cumsum(entries[:, 1]) - entries[:, 1]
    data = entries.tobytes()
    return data + crc_bytes(google_crc32c.value(data))


def index_bytes(chunks: int) -> int:
    return chunks * INDEX_ENTRY_BYTES + CRC_BYTES


def unpack_index(data: bytes, file_bytes: int, where: str) -> NDArray[np.uint64]:
    """(offset, bytes) of every chunk, uint64 [n, 2]; `CacheCorruptError` unless it is intact and every chunk lies in the file."""
    body, crc = data[:-CRC_BYTES], data[-CRC_BYTES:]
    if crc_bytes(google_crc32c.value(body)) != crc:
        raise CacheCorruptError(f"{where}: the checksum of its chunk index is wrong. Capture the shard again.")
    entries = np.frombuffer(body, "<u8").reshape(-1, 2).astype(np.uint64)
    limit = np.uint64(file_bytes - len(data))
    # Compared without adding first: an empty chunk is marked by 2**64 - 1 in both, which must not wrap into range.
    if (entries > limit).any() or (entries.sum(axis=1) > limit).any() or len(entries) == 0:
        raise CacheCorruptError(f"{where}: its chunk index points outside the file or misses a chunk. Capture the shard again.")
    return entries
