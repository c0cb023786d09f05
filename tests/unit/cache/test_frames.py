"""Parts of lossless chunks: a cache so wide that a chunk has many frames."""

import shutil
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pyarrow as pa
import pytest

from pipeline.cache.codec import encode_chunk, pack_index, unpack_index
from pipeline.cache.frames import FrameTable, crc_bytes, pack_table
from pipeline.cache.layout import CHUNK_TOKENS, ArraySpec, array_data, shard_folder
from pipeline.cache.openfiles import ArrayFile
from pipeline.cache.reader import Cache
from pipeline.cache.verify import verify
from pipeline.errors import CacheCorruptError
from pipeline.records import CapturedSample
from tests.support import caches

WIDTH = 600
LENGTHS = (3, 700, 64, 1, 100, 512, 1500, 40)
DTYPES = ("bfloat16", "float32")


def wide(dtype: Any) -> list[CapturedSample]:
    return caches.captured(LENGTHS, dtype=dtype, final=True, hidden=WIDTH)


@pytest.fixture(scope="module", params=DTYPES)
def cache(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of one shard; read it, and copy it before damaging it."""
    described = caches.manifest(1, hidden_size=WIDTH, dtype=request.param, final=True)
    return caches.write_cache(tmp_path_factory.mktemp("wide") / request.param, [wide(request.param)], described)


def layer_4(cache: Path) -> Path:
    return shard_folder(cache, 0) / array_data("layer_4")


def test_samples_come_back_from_their_frames(cache: Path) -> None:
    opened = Cache.open(cache)
    for number in (6, 0, 3, 1, 7, 2, 5, 4, 6):
        expected, found = wide(opened.manifest.dtype)[number], opened.read(number, final=True)
        assert found.tokens.sample_id == expected.tokens.sample_id
        assert found.final is not None
        assert expected.final is not None
        assert caches.same_bits(found.final, expected.final)
        assert all(caches.same_bits(found.hidden[layer], expected.hidden[layer]) for layer in caches.LAYERS)
        cut = opened.read(number, (4,), max_tokens=33)
        assert caches.same_bits(cut.hidden[4], expected.hidden[4][:33])
    assert verify(cache, full=True) == []


def test_a_file_of_an_earlier_version_has_one_frame_a_chunk_and_no_table(cache: Path, tmp_path: Path) -> None:
    now = ArrayFile(layer_4(cache), Cache.open(cache).manifest.spec("layer_4"), sum(LENGTHS), layer_4(cache).stat().st_size)
    chunks = [pa.Codec("zstd", compression_level=1).compress(now.decode(chunk).tobytes(), asbytes=True) for chunk in range(len(now))]
    stored = [chunk + crc_bytes(google_crc32c.value(chunk)) for chunk in chunks]
    data = b"".join((*stored, pack_index([len(chunk) for chunk in stored])))
    (tmp_path / "old").write_bytes(data)
    old = ArrayFile(tmp_path / "old", now.spec, sum(LENGTHS), len(data))
    assert not any(part.runs for part in old.parts(0, sum(LENGTHS)))
    assert all(part.runs for part in now.parts(0, sum(LENGTHS)))
    for chunk in range(len(now)):
        assert np.array_equal(old.decode(chunk), now.decode(chunk))


def test_a_short_sample_reads_its_frames_alone(cache: Path) -> None:
    """Of 64 tokens of each plane: no more than 512 / 64 of a chunk for one that lies in one frame."""
    opened = Cache.open(cache)
    stored = layer_4(cache).stat().st_size / (-(-sum(LENGTHS) // CHUNK_TOKENS))
    opened.read(0, (4,))
    assert 0 < opened.bytes_read < 1.2 * stored / 8
    opened.read(1, (4,))  # rows 3 to 703, of nearly two chunks
    assert opened.bytes_read < 1.2 * stored * (1 + 1 + 4) / 8 + stored


def test_a_flipped_bit_is_an_error_for_those_that_read_it(cache: Path, tmp_path: Path) -> None:
    """Anywhere in the frames, their table and the index; of a chunk's own checksum, which `verify` compares, no sample is told."""
    copy = shutil.copytree(cache, tmp_path / "copy")
    data = layer_4(copy).read_bytes()
    chunks = -(-sum(LENGTHS) // CHUNK_TOKENS)
    entries = unpack_index(data[-16 * chunks - 4 :], len(data), "here").astype(int)
    ends = entries.sum(axis=1)
    places = [int(offset + share * (size - 5)) for offset, size in entries[:-1] for share in (0, 0.1, 0.5, 0.8, 1)]
    places += [int(ends[-1]) + step for step in (0, 5, 40, 130)] + [len(data) - 1, len(data) - 30]
    for place in places:
        damaged = bytearray(data)
        damaged[place] ^= 8
        layer_4(copy).write_bytes(damaged)
        opened = Cache.open(copy)
        with pytest.raises(CacheCorruptError, match="layer_4/c/0/0"):
            for number in range(len(LENGTHS)):
                opened.read(number, (4,))
        assert [fault.file for fault in verify(copy, full=True)] == [str(layer_4(copy).relative_to(copy))]
    damaged = bytearray(data)
    damaged[0] ^= 8  # in the first frame of the first plane: the first sample's, the second's, and no other's
    layer_4(copy).write_bytes(damaged)
    opened = Cache.open(copy)
    for number in range(len(LENGTHS)):
        if number < 2:
            with pytest.raises(CacheCorruptError, match="chunk 0: the checksum is wrong"):
                opened.read(number, (4,))
        else:
            opened.read(number, (4,))


def test_a_table_that_does_not_fit_is_an_error() -> None:
    spec = ArraySpec("layer_1", WIDTH, "bfloat16", "lossless")
    rows = np.random.default_rng(0).normal(9, 3, (CHUNK_TOKENS, WIDTH)).astype(np.uint16)
    chunk = encode_chunk(rows, spec)
    index = pack_index([len(chunk.data)])
    entries = unpack_index(index, len(chunk.data) + len(index), "here")
    table = pack_table([chunk.frames], spec)
    FrameTable(table, entries, spec, "file X")
    longer, other = chunk.frames.copy(), ArraySpec("layer_1", WIDTH, "float32", "lossless")
    longer[3, 0] += 1
    for data, expected in ((table[:-1], spec), (b"", spec), (table, other), (pack_table([longer], spec), spec)):
        with pytest.raises(CacheCorruptError, match="file X: its table of frames"):
            FrameTable(data, entries, expected, "file X")
