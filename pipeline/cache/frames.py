"""Chunks of which a part can be read: a `lossless` chunk is many zstd frames, and its file says where each one ends.

A short sample has a few rows of a chunk, and they lie in every plane of it (codec.py). Each plane is cut into frames of some tokens; one
after another they unpack to the whole chunk, with a zstd that goes on after a frame. A table between the last chunk and the index has, by
chunk and frame, two little-endian uint32: the bytes of the frame, and the crc32c of the chunk up to the frame's end, so that a run of
frames is checked without the others. A crc32c of the table ends it. Files without one, as earlier versions wrote them, are read by
whole chunks.
"""

from typing import NamedTuple

import google_crc32c
import numpy as np
import zstandard
from numpy.typing import NDArray

from pipeline.cache.layout import CHUNK_TOKENS, ArraySpec
from pipeline.errors import CacheCorruptError

CRC_BYTES = 4

LEVEL_1 = zstandard.ZstdCompressionParameters.from_level(1, hash_log=8)
"""With a smaller table, which finds fewer repetitions: the planes of states have next to none, and what level 1 takes for them costs time,
both ways, and space."""

NO_CODING = zstandard.ZstdCompressionParameters.from_level(-1)
"""Finds repetitions, and leaves other bytes as they are."""

NOISE = 0.99
"""A plane of which level 1 leaves more than this is a mantissa of noise: it goes ten times as fast without coding, to the same size."""

Frames = NDArray[np.uint32]
"""[n, 2], by frame: its bytes, and the crc32c of its chunk up to its end."""


class Run(NamedTuple):
    """Frames that lie together: where in the file, and the crc32c of their chunk up to their begin and up to their end."""

    offset: int
    size: int
    crc_before: int
    crc: int


class FrameTable:
    """Of an array's file, for all of its chunks."""

    def __init__(self, data: bytes, chunks: NDArray[np.uint64], spec: ArraySpec, where: str) -> None:
        """`chunks`: (offset, bytes) of every one. Raises `CacheCorruptError` unless the table is intact and its frames fill them."""
        body, crc = data[:-CRC_BYTES], data[-CRC_BYTES:]
        if len(data) != table_bytes(spec, len(chunks)) or crc_bytes(google_crc32c.value(body)) != crc:
            raise CacheCorruptError(f"{where}: its table of frames was altered. Capture the shard again.")
        frames = np.frombuffer(body, "<u4").reshape(-1, spec.frames, 2)
        offset, size = chunks.astype(np.int64).T
        ends = offset[:, None] + frames[:, :, 0].cumsum(axis=1, dtype=np.int64)
        if (ends[:, -1] + CRC_BYTES != offset + size).any():
            raise CacheCorruptError(f"{where}: its table of frames does not fit its chunks. Capture the shard again.")
        self._spec = spec
        self._offsets = np.concatenate((offset[:, None], ends), axis=1)
        self._crcs = np.concatenate((np.zeros((len(chunks), 1), np.uint32), frames[:, :, 1]), axis=1)

    def runs(self, chunk: int, first: int, num_tokens: int) -> list[Run]:
        """The frames with a chunk's tokens first.., plane by plane."""
        frames_of_plane = CHUNK_TOKENS // self._spec.frame_tokens
        begin, count = first // self._spec.frame_tokens, frames_with(self._spec, first, num_tokens)
        if count == frames_of_plane:  # then the planes lie together
            starts, length = [0], self._spec.frames
        else:
            starts, length = list(range(begin, self._spec.frames, frames_of_plane)), count
        offsets, crcs = self._offsets[chunk].tolist(), self._crcs[chunk].tolist()
        return [Run(offsets[at], offsets[at + length] - offsets[at], crcs[at], crcs[at + length]) for at in starts]


def frames_with(spec: ArraySpec, first: int, num_tokens: int) -> int:
    """How many frames of a plane have a chunk's tokens first.. in them."""
    return -(-(first + num_tokens) // spec.frame_tokens) - first // spec.frame_tokens


def pack_frames(planes: NDArray[np.uint8], spec: ArraySpec) -> list[bytes]:
    """The frames of a chunk's `planes` uint8 [n, 512 · width], plane by plane."""
    level_1, no_coding = (zstandard.ZstdCompressor(compression_params=parameters).compress for parameters in (LEVEL_1, NO_CODING))
    packed: list[bytes] = []
    for pieces in planes.reshape(len(planes), spec.frames // len(planes), -1):
        first = level_1(pieces[0].data)  # tells of the others: values do not change their kind within a chunk
        pack = no_coding if len(first) > NOISE * pieces[0].size else level_1
        packed += [first, *(pack(piece.data) for piece in pieces[1:])]
    return packed


def table_bytes(spec: ArraySpec, chunks: int) -> int:
    return 8 * spec.frames * chunks + CRC_BYTES if spec.frames else 0


def pack_table(chunks: list[Frames], spec: ArraySpec) -> bytes:
    """The table of all chunks' frames; nothing for a codec without."""
    if not spec.frames:
        return b""
    data = np.concatenate(chunks).astype("<u4").tobytes()
    return data + crc_bytes(google_crc32c.value(data))


def crc_bytes(crc: int) -> bytes:
    return crc.to_bytes(CRC_BYTES, "little")
