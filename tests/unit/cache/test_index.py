import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.cache.layout import INDEX
from pipeline.cache.reader import Cache
from pipeline.errors import CacheCorruptError
from tests.support import caches


def test_columns_are_those_of_the_samples(small_cache: Path) -> None:
    index = Cache.open(small_cache).index
    shards = caches.small_shards()
    samples = [sample.tokens for shard in shards for sample in shard]
    assert index.sample_id.tolist() == [sample.sample_id for sample in samples]
    assert [index.sources[code] for code in index.source] == [sample.source for sample in samples]
    assert [index.splits[code] for code in index.split] == [sample.split for sample in samples]
    assert index.row.tolist() == [sample.row for sample in samples]
    assert index.num_tokens.tolist() == [sample.num_tokens for sample in samples]
    assert index.num_supervised.tolist() == [sample.num_supervised for sample in samples]
    assert index.shard.tolist() == [number for number, shard in enumerate(shards) for _ in shard]
    assert index.first_of_shard.tolist() == [0, 4, 6, 9]
    assert index.token_offset.tolist() == [0, 3, 703, 1215, 0, 1024, 0, 5, 11]
    for i, sample in enumerate(samples):
        assert np.array_equal(index.spans(i), sample.spans)


def test_splits_and_used_ids(tmp_path: Path) -> None:
    samples = caches.captured([8] * 12)
    samples[3].tokens.input_ids[2] = -1  # fed as an embedding: no token
    index = Cache.open(caches.write_cache(tmp_path, [samples[:7], samples[7:]], caches.manifest(2))).index
    assert index.of_split("heldout").tolist() == [4, 9]
    assert index.of_split("train").tolist() == [0, 1, 2, 3, 5, 6, 7, 8, 10, 11]
    assert index.of_split("nothing").tolist() == []
    ids = {token for sample in samples for token in sample.tokens.input_ids.tolist()} - {-1}
    assert np.flatnonzero(index.used_token_ids).tolist() == sorted(ids)


def test_a_missing_index_is_made_again_and_is_the_same(small_cache: Path, tmp_path: Path) -> None:
    cache = shutil.copytree(small_cache, tmp_path / "c")
    before = (cache / INDEX).read_bytes()
    (cache / INDEX).unlink()
    assert Cache.open(cache).read(5).tokens.sample_id == Cache.open(small_cache).read(5).tokens.sample_id
    assert (cache / INDEX).read_bytes() == before


def test_an_index_of_another_cache_is_refused(small_cache: Path, tmp_path: Path) -> None:
    other = caches.write_cache(tmp_path / "other", caches.small_shards()[::-1], caches.manifest())
    cache = shutil.copytree(small_cache, tmp_path / "c")
    shutil.copy(other / INDEX, cache / INDEX)
    with pytest.raises(CacheCorruptError, match=r"index\.arrow is not the index that the manifest records"):
        Cache.open(cache)


def test_shards_of_another_cache_are_refused_when_the_index_is_made_again(small_cache: Path, tmp_path: Path) -> None:
    other = caches.write_cache(tmp_path / "other", [caches.captured([9], seed=k) for k in (5, 6, 7)], caches.manifest())
    cache = shutil.copytree(small_cache, tmp_path / "c")
    shutil.rmtree(cache / "shards")
    shutil.copytree(other / "shards", cache / "shards")
    (cache / INDEX).unlink()
    with pytest.raises(CacheCorruptError, match="not those that the manifest was completed with"):
        Cache.open(cache)
