"""Bytes packed by zstd so that a part of them is unpacked without the rest: a short sample wants a few rows of a chunk.

They lie in frames of at most 32 KiB, one after another, and a last frame, which zstd skips, has their sizes: the Zstandard Seekable
Format (contrib/seekable_format in zstd's sources). zstd unpacks the whole, frame after frame; readers that stop after a frame do not.
"""

import struct
from bisect import bisect_left, bisect_right
from itertools import accumulate

import numpy as np
import pyarrow as pa
import zstandard
from numpy.typing import NDArray

from pipeline.errors import CacheCorruptError

FRAME_BYTES = 1 << 15
"""Less of it, and more frames are to be gone through; more, and more is unpacked that nobody asked for."""

PARAMETERS = zstandard.ZstdCompressionParameters.from_level(1, strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6)
"""Level 1 that hardly looks for repetitions: the planes of states have next to none, and what level 1 takes for them costs time, both
ways, and space. Rounded codes come out as with level 1."""

SKIPPABLE, SEEKABLE = 0x184D2A5E, 0x8F92EAB1
HEAD = struct.Struct("<II")  # magic number, bytes that follow
FOOT = struct.Struct("<IBI")  # frames, flags, magic number


def pack(sections: NDArray[np.uint8], frame_bytes: int = FRAME_BYTES) -> bytes:
    """`sections` uint8 [n, bytes], one after another, each in frames of its own. A frame that is the only one has no table."""
    compress = zstandard.ZstdCompressor(compression_params=PARAMETERS).compress
    pieces = [section[begin : begin + frame_bytes].data for section in sections for begin in range(0, len(section), frame_bytes)]
    frames = [compress(piece) for piece in pieces]
    if len(frames) == 1:
        return frames[0]
    sizes = [size for frame, piece in zip(frames, pieces, strict=True) for size in (len(frame), len(piece))]
    table = struct.pack(f"<{len(sizes)}I", *sizes) + FOOT.pack(len(frames), 0, SEEKABLE)
    return b"".join((*frames, HEAD.pack(SKIPPABLE, len(table)), table))


class Packed:
    """What `pack` has made, or anything that zstd has, which without a table is one frame."""

    def __init__(self, payload: memoryview, size: int, where: str) -> None:
        """`size`: bytes when unpacked. Raises `CacheCorruptError`, which names `where`, when the table says otherwise."""
        self._payload, self._where = payload, where
        self._packed, self._unpacked = _frames(payload) or ([0, len(payload)], [0, size])
        self._last, self._bytes = (0, 0), b""
        if self._unpacked[-1] != size:
            raise wrong_size(self._unpacked[-1], size, where)

    def part(self, begin: int, end: int) -> NDArray[np.uint8]:
        """Bytes begin..end of what was packed. Raises `CacheCorruptError` when they cannot be unpacked."""
        frames = bisect_right(self._unpacked, begin) - 1, bisect_left(self._unpacked, end)
        if frames != self._last:  # the planes of a chunk without a table are in the same frame
            self._last, self._bytes = frames, self._unpack(*frames)
        return np.frombuffer(self._bytes, np.uint8, end - begin, begin - self._unpacked[frames[0]])

    def _unpack(self, first: int, last: int) -> bytes:
        size = self._unpacked[last] - self._unpacked[first]
        frames = pa.py_buffer(self._payload[self._packed[first] : self._packed[last]])
        try:
            unpacked = pa.Codec("zstd").decompress(frames, decompressed_size=size, asbytes=True)
        except OSError as error:
            raise CacheCorruptError(f"{self._where}: cannot be unpacked ({error}). Capture the shard again.") from error
        if len(unpacked) != size:
            raise wrong_size(len(unpacked), size, self._where)
        return unpacked


def wrong_size(found: int, expected: int, where: str) -> CacheCorruptError:
    return CacheCorruptError(f"{where}: {found} bytes unpacked, expected {expected}. Capture the shard again.")


def _frames(payload: memoryview) -> tuple[list[int], list[int]] | None:
    """Where each frame starts, packed and unpacked, and where the last one ends; None without a table."""
    foot = len(payload) - FOOT.size
    if foot < HEAD.size:
        return None
    count, _, magic = FOOT.unpack_from(payload, foot)
    table = foot - 8 * count
    if magic != SEEKABLE or table < HEAD.size or HEAD.unpack_from(payload, table - HEAD.size) != (SKIPPABLE, len(payload) - table):
        return None
    sizes = struct.unpack_from(f"<{2 * count}I", payload, table)
    packed = list(accumulate(sizes[::2], initial=0))
    return (packed, list(accumulate(sizes[1::2], initial=0))) if packed[-1] == table - HEAD.size else None
