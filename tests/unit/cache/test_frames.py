import struct

import numcodecs
import numpy as np
import pyarrow as pa
import pytest
import zstandard
from numpy.typing import NDArray

from pipeline.cache.frames import FRAME_BYTES, SEEKABLE, Packed, pack
from pipeline.errors import CacheCorruptError

SIZES = (1, 100, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1, 3 * FRAME_BYTES + 7)


def sections_of(count: int, size: int) -> NDArray[np.uint8]:
    return np.random.default_rng(size).normal(100, 9, (count, size)).astype(np.uint8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 2, 4])
def test_any_part_comes_back(count: int, size: int) -> None:
    plain = sections_of(count, size)
    packed = Packed(memoryview(pack(plain)), count * size, "here")
    whole = plain.tobytes()
    edges = {0, 1, size - 1, size, count * size - 1, count * size, FRAME_BYTES - 1, FRAME_BYTES, FRAME_BYTES + 1}
    edges = {edge for edge in edges if 0 <= edge <= count * size}
    for begin in edges:
        for end in edges:
            if begin < end:
                assert packed.part(begin, end).tobytes() == whole[begin:end]


@pytest.mark.parametrize("size", SIZES)
def test_any_zstd_unpacks_the_whole(size: int) -> None:
    plain = sections_of(2, size)
    stored = pack(plain)
    assert bytes(numcodecs.Zstd().decode(stored)) == plain.tobytes()
    assert pa.Codec("zstd").decompress(stored, decompressed_size=plain.size, asbytes=True) == plain.tobytes()


def test_the_table_is_that_of_the_seekable_format() -> None:
    """Read as its specification says: from the end, number of frames, flags, magic number; before them each frame's two sizes."""
    plain = sections_of(2, FRAME_BYTES + 5)
    stored = pack(plain)
    frames, flags, magic = struct.unpack("<IBI", stored[-9:])
    assert (frames, flags, magic) == (4, 0, 0x8F92EAB1)
    sizes = struct.unpack(f"<{2 * frames}I", stored[-9 - 8 * frames : -9])
    assert stored[sum(sizes[::2]) :][:8] == struct.pack("<II", 0x184D2A5E, 8 * frames + 9)
    at, found = 0, b""
    for size, unpacked in zip(sizes[::2], sizes[1::2], strict=True):
        found += zstandard.ZstdDecompressor().decompress(stored[at : at + size])
        at, unpacked_before = at + size, len(found) - unpacked
        assert unpacked_before == len(found) - unpacked
    assert found == plain.tobytes()


def test_a_part_unpacks_the_frames_that_it_touches_alone() -> None:
    """A frame that cannot be unpacked is no matter to the others."""
    plain = sections_of(1, 3 * FRAME_BYTES)
    stored = bytearray(pack(plain))
    second = struct.unpack_from("<I", stored, len(stored) - 9 - 24)[0]
    stored[second : second + 4] = b"none"
    packed = Packed(memoryview(bytes(stored)), plain.size, "file X, chunk 7")
    assert packed.part(0, FRAME_BYTES).tobytes() == plain.tobytes()[:FRAME_BYTES]
    assert packed.part(2 * FRAME_BYTES, 3 * FRAME_BYTES).tobytes() == plain.tobytes()[2 * FRAME_BYTES :]
    for begin, end in ((FRAME_BYTES - 1, FRAME_BYTES + 1), (0, plain.size)):
        with pytest.raises(CacheCorruptError, match="file X, chunk 7: cannot be unpacked"):
            packed.part(begin, end)


@pytest.mark.parametrize("trailer", [b"", struct.pack("<IBI", 0, 0, SEEKABLE), struct.pack("<IBI", 2**32 - 1, 0, SEEKABLE)])
def test_bytes_without_a_table_are_one_frame(trailer: bytes) -> None:
    """As earlier versions and other Zarr writers make them; also where they happen to end like a table."""
    plain = sections_of(1, 5000)
    skipped = struct.pack("<II", 0x184D2A50, len(trailer)) + trailer if trailer else b""
    packed = Packed(memoryview(zstandard.ZstdCompressor().compress(plain.tobytes()) + skipped), plain.size, "here")
    assert packed.part(100, 300).tobytes() == plain.tobytes()[100:300]


def test_another_size_than_expected_is_an_error() -> None:
    plain = sections_of(1, 5000)
    for stored in (pack(plain), zstandard.ZstdCompressor().compress(plain.tobytes())):
        for size in (4999, 5001):
            with pytest.raises(CacheCorruptError, match="file X: "):
                Packed(memoryview(stored), size, "file X").part(0, 10)
