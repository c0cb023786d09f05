"""Chunks of hidden states to bytes and back, and the index that finds them in an array's file.

Stock Zarr codecs, run by us: zarr-python's own pipeline reaches a quarter of the speed. A chunk is its little-endian bytes;
`lossless` first gathers the first byte of every value, then the second, … (the planes: sign and exponent of neighbouring
values are alike, mantissas are noise) and packs them with zstd (frames.py); `int8` and `int4` round (lossy.py) and pack the
codes so. A crc32c ends every chunk. numpy, zstandard and Arrow release the interpreter lock in all of this; numcodecs' own
shuffle does not, which is why it is not used (measured: 0.98× on two threads).
"""

import struct
from typing import Any

import google_crc32c
import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.cache.frames import Packed, pack, wrong_size
from pipeline.cache.layout import CHUNK_TOKENS, DTYPES, ArraySpec
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
    # Rounded codes in one frame, which TensorStore wants; planes it cannot read in any case.
    payload = pack(quantise(rows, spec).reshape(1, -1), spec.stored_bytes) if spec.lossy else pack(_split(rows))
    return payload + _crc(payload)


class Chunk:
    """A stored chunk whose checksum has been compared. What is taken of it is unpacked then, and little else."""

    def __init__(self, stored: bytes | memoryview, spec: ArraySpec, where: str) -> None:
        """Raises `CacheCorruptError` when the crc32c or the size is wrong; `where` names file and chunk."""
        self.spec = spec
        self._payload = np.frombuffer(stored, np.uint8, max(0, len(stored) - CRC_BYTES))
        if _crc(self._payload) != stored[len(self._payload) :]:
            raise CacheCorruptError(f"{where}: the checksum is wrong, its bytes were altered. Capture the shard again.")
        self._packed = None if spec.codec == "raw" else Packed(self._payload.data, spec.stored_bytes, where)
        if self._packed is None and self._payload.size != spec.stored_bytes:
            raise wrong_size(self._payload.size, spec.stored_bytes, where)

    def take_rows(self, start: int, out: Bits) -> None:
        """Copy rows start.. into all of `out` [n, width]. Raises `CacheCorruptError` when they cannot be unpacked."""
        flat, begin, end = out.reshape(-1), start * self.spec.width, (start + len(out)) * self.spec.width
        if self._packed is None:
            flat[:] = self._payload.view(flat.dtype.newbyteorder("<"))[begin:end]
            return
        values = CHUNK_TOKENS * self.spec.width
        planes = [self._packed.part(k * values + begin, k * values + end) for k in range(self.spec.item_bytes)]
        flat[:] = planes[-1]
        for plane in planes[-2::-1]:
            flat <<= 8
            flat |= plane

    def stored_rows(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows start..stop as the Zarr array of a lossy codec has them, [n, stored_width]."""
        assert self._packed is not None
        width = self.spec.stored_width
        return self._packed.part(start * width, stop * width).reshape(-1, width)


def _split(rows: Bits) -> NDArray[np.uint8]:
    """Byte planes of `rows`, lowest first, [n, values]: what Zarr's shuffle does to little-endian values."""
    flat = rows.reshape(-1)
    planes = np.empty((rows.itemsize, flat.size), np.uint8)
    np.copyto(planes[0], flat, casting="unsafe")
    for k in range(1, rows.itemsize):
        np.right_shift(flat, 8 * k, out=planes[k], casting="unsafe")
    return planes


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
