import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import pipeline.cache.openfiles
from pipeline.cache.reader import Cache
from pipeline.errors import CacheMismatchError
from pipeline.records import CapturedSample
from tests.support import caches


def expect(found: CapturedSample, sample: CapturedSample, num_tokens: int | None = None) -> None:
    tokens = sample.tokens.prefix(num_tokens) if num_tokens else sample.tokens
    assert (found.tokens.sample_id, found.tokens.source, found.tokens.row) == (tokens.sample_id, tokens.source, tokens.row)
    assert found.tokens.split == tokens.split
    assert np.array_equal(found.tokens.input_ids, tokens.input_ids)
    assert np.array_equal(found.tokens.spans, tokens.spans)
    assert found.tokens.check()
    for layer, state in found.hidden.items():
        assert caches.same_bits(state, sample.hidden[layer][:num_tokens])


def all_samples() -> list[CapturedSample]:
    return [sample for shard in caches.small_shards() for sample in shard]


def test_every_sample_comes_back_in_any_order(small_cache: Path) -> None:
    cache, samples = Cache.open(small_cache), all_samples()
    assert len(cache) == len(samples)
    for i in [*range(len(samples)), *np.random.default_rng(0).permutation(len(samples)).tolist()]:
        found = cache.read(i)
        assert tuple(found.hidden) == caches.LAYERS
        assert found.final is None
        expect(found, samples[i])


def test_layers_come_in_the_order_asked_for_and_prefixes_are_prefixes(small_cache: Path) -> None:
    cache, samples = Cache.open(small_cache, [4]), all_samples()
    assert tuple(cache.read(0, (4, 1)).hidden) == (4, 1)
    for i, sample in enumerate(samples):
        for max_tokens in (1, 2, 511, 512, 513, 5000):
            found = cache.read(i, (4,), max_tokens=max_tokens)
            assert tuple(found.hidden) == (4,)
            assert found.tokens.num_tokens == min(max_tokens, sample.tokens.num_tokens)
            expect(found, sample, max_tokens)


def test_the_final_state_is_read_when_it_is_there(tmp_path: Path, small_cache: Path) -> None:
    samples = caches.captured([20, 600], final=True, dtype="float32")
    cache = Cache.open(caches.write_cache(tmp_path, [samples], caches.manifest(1, dtype="float32", final=True)), (1,), final=True)
    found = cache.read(1, (1,), final=True)
    assert found.final is not None
    assert samples[1].final is not None
    assert caches.same_bits(found.final, samples[1].final)
    expect(found, samples[1])
    with pytest.raises(CacheMismatchError, match=r"capture\.final=true"):
        Cache.open(small_cache, final=True)


def test_a_layer_that_the_cache_lacks_is_named(small_cache: Path) -> None:
    with pytest.raises(CacheMismatchError, match=r"holds the target layers \[1, 4\]; this run needs \[9\]"):
        Cache.open(small_cache, [1, 9])
    cache = Cache.open(small_cache, [1])
    with pytest.raises(CacheMismatchError, match=r"\[7\]"):
        cache.read(0, (7,))
    for i in (-1, len(cache)):
        with pytest.raises(IndexError):
            cache.read(i)


def test_many_threads_and_few_open_files(small_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline.cache.openfiles, "OPEN_ARRAYS", 2)
    cache, samples = Cache.open(small_cache), all_samples()
    order = np.random.default_rng(1).integers(0, len(samples), 300).tolist()
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(6) as pool:
        for i, found in zip(order, pool.map(cache.read, order), strict=True):
            expect(found, samples[i])
        # Two are kept open, and each thread may hold one an array for its last chunk.
        assert len(os.listdir("/proc/self/fd")) <= before + 2 + 7 * len(caches.LAYERS)


def test_a_forked_child_reads_what_its_parent_had_open(small_cache: Path) -> None:
    cache, samples = Cache.open(small_cache), all_samples()
    cache.read(1)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for i, sample in enumerate(samples):
                expect(cache.read(i), sample)
            code = 0
        finally:
            os._exit(code)
    for i, sample in enumerate(samples):
        expect(cache.read(i), sample)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_target_comes_with_it(small_cache: Path) -> None:
    cache = Cache.open(small_cache)
    assert caches.same_bits(cache.bundle().embedding, caches.bundle().embedding)
    assert (cache.tokenizer_dir / "tokenizer.json").read_text() == "{}"
