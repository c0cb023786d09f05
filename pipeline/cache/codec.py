"""Chunks of hidden states to bytes and back, and the index that finds them in an array's file.

Stock Zarr codecs, run by us: zarr-python's own pipeline reaches a quarter of the speed. A chunk is its little-endian bytes;
`lossless` first gathers the first byte of every value, then the second, … (the planes: sign and exponent of neighbouring
values are alike, mantissas are noise) and packs them with zstd level 1; `int8` and `int4` round (lossy.py) and pack the codes
with zstd level 1. A crc32c ends every chunk. numpy and Arrow release the
interpreter lock in all of this; numcodecs' own shuffle does not, which is why it is not used (measured: 0.98× on two threads).
"""

import struct
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from pipeline.cache.layout import DTYPES, ArraySpec
from pipeline.cache.lossy import quantise
from pipeline.errors import CacheCorruptError

Bits = NDArray[Any]
"""Values of an array as unsigned integers of the same width: uint16 or uint32."""

CRC_BYTES = 4
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


def encode_chunk(rows: Bits, spec: ArraySpec) -> bytes:
    """What is stored of a chunk, its crc32c included; `rows` is [512, width]."""
    if spec.codec == "raw":
        payload = rows.astype(rows.dtype.newbyteorder("<"), copy=False).tobytes()
        return payload + _crc(payload)
    plain: Any = quantise(rows, spec) if spec.lossy else _split(rows)  # the stubs do not know that Arrow takes any buffer
    # As bytes: the memoryview of a buffer that Arrow has packed keeps the length that it had before.
    payload = pa.Codec("zstd", compression_level=1).compress(plain, asbytes=True)
    return payload + _crc(payload)


def decode_chunk(stored: bytes, spec: ArraySpec, where: str) -> NDArray[np.uint8]:
    """The bytes of a chunk, still in planes when the codec splits them, still quantised when it is lossy; `take_rows` puts planes
    together, `lossy.take_quantised` takes codes and scales apart.

    Raises `CacheCorruptError` when the crc32c or the size is wrong; `where` names file and chunk.
    """
    payload = np.frombuffer(stored, np.uint8, max(0, len(stored) - CRC_BYTES))
    if _crc(payload) != stored[len(payload) :]:
        raise CacheCorruptError(f"{where}: the checksum is wrong, its bytes were altered. Capture the shard again.")
    if spec.codec != "raw":
        packed: Any = payload
        try:
            unpacked = pa.Codec("zstd", compression_level=1).decompress(packed, decompressed_size=spec.stored_bytes, asbytes=True)
        except OSError as error:
            raise CacheCorruptError(f"{where}: cannot be unpacked ({error}). Capture the shard again.") from error
        payload = np.frombuffer(unpacked, np.uint8)
    if payload.size != spec.stored_bytes:
        raise CacheCorruptError(f"{where}: {payload.size} bytes unpacked, expected {spec.stored_bytes}. Capture the shard again.")
    return payload


def take_rows(chunk: NDArray[np.uint8], spec: ArraySpec, start: int, out: Bits) -> None:
    """Copy rows start.. of a decoded chunk into all of `out` [n, width]."""
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
    """Byte planes, lowest first, of `rows`, one after the other: what Zarr's shuffle does to little-endian values."""
    flat = rows.reshape(-1)
    planes = np.empty((rows.itemsize, flat.size), np.uint8)
    np.copyto(planes[0], flat, casting="unsafe")
    for k in range(1, rows.itemsize):
        np.right_shift(flat, 8 * k, out=planes[k], casting="unsafe")
    return planes.reshape(-1)


def _crc(data: Any) -> bytes:
    return struct.pack("<I", google_crc32c.value(data))


def pack_index(sizes: list[int]) -> bytes:
    """The index at an array file's end: (offset, bytes) of every chunk as little-endian uint64, then a crc32c of it all.

    `sizes` counts the bytes of the chunks, which lie one after the other from the file's start.
    """
    entries = np.empty((len(sizes), 2), "<u8")
    entries[:, 1] = sizes
    entries[:, 0] = np.cumsum(entries[:, 1]) - entries[:, 1]
    data = entries.tobytes()
    return data + _crc(data)


def index_bytes(chunks: int) -> int:
    return chunks * INDEX_ENTRY_BYTES + CRC_BYTES


def unpack_index(data: bytes, file_bytes: int, where: str) -> NDArray[np.uint64]:
    """(offset, bytes) of every chunk, uint64 [n, 2]; `CacheCorruptError` unless it is intact and every chunk lies in the file."""
    body, crc = data[:-CRC_BYTES], data[-CRC_BYTES:]
    if _crc(body) != crc:
        raise CacheCorruptError(f"{where}: the checksum of its chunk index is wrong. Capture the shard again.")
    entries = np.frombuffer(body, "<u8").reshape(-1, 2).astype(np.uint64)
    limit = np.uint64(file_bytes - len(data))
    # Compared without adding first: an empty chunk is marked by 2**64 - 1 in both, which must not wrap into range.
    if (entries > limit).any() or (entries.sum(axis=1) > limit).any() or len(entries) == 0:
        raise CacheCorruptError(f"{where}: its chunk index points outside the file or misses a chunk. Capture the shard again.")
    return entries
