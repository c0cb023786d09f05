"""Training from a lossy cache: what is dequantised on the device is what the reader gives, and training is that of these states."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.bench.codecs import bench_codecs, relative_errors
from pipeline.cache.commit import commit_shard, complete
from pipeline.cache.layout import shard_files, shard_folder, target_folder
from pipeline.cache.manifest import PROGRESS_FIELDS, Manifest, create_or_compare
from pipeline.cache.reader import Cache
from pipeline.cache.recode import link_target, recode
from pipeline.cache.writer import ShardWriter
from pipeline.capture.run import capture
from pipeline.draft.batch import BatchShape, collate
from pipeline.errors import CacheError, CacheMismatchError, ConfigError
from pipeline.runtime.ranks import start_ranks
from pipeline.train.loop import train
from tests.support.caches import same_bits
from tests.support.tiny import write_chats
from tests.support.training import config, repeatable


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", 20, seed=5)


@pytest.fixture(scope="module")
def lossless(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, chats: Path) -> Path:
    """A folder whose cache is lossless; read it only."""
    folder = tmp_path_factory.mktemp("lossless")
    capture(config(folder, tiny_target, chats), start_ranks(1, None, 1))
    return folder


def _cache(folder: Path) -> Path:
    return next(path.parent for path in folder.rglob("manifest.json"))


def _dequantised(source: Path, out: Path) -> Path:
    """A raw cache of the states that a lossy one gives."""
    cache = Cache.open(source)
    fixed = {name: getattr(cache.manifest, name) for name in Manifest.model_fields if name not in PROGRESS_FIELDS}
    manifest = Manifest(**{**fixed, "codec": "raw"})
    create_or_compare(out, manifest)
    for shard in range(manifest.num_shards):
        with ShardWriter(out, shard, manifest, manifest.arrays) as writer:
            first, end = (int(cache.index.first_of_shard[shard + k]) for k in (0, 1))
            samples = [cache.read(number) for number in range(first, end)]
            for sample in samples:
                writer.append(sample)
            records = writer.close()
        commit_shard(out, shard, [sample.tokens for sample in samples], records)
    link_target(cache, out)
    complete(out)
    return out


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_the_same_run_as_from_the_dequantised_states(tmp_path: Path, tiny_target: Path, chats: Path, lossless: Path, codec: Any) -> None:
    rounded = tmp_path / codec
    recode(_cache(lossless), rounded, codec)
    exact = _dequantised(rounded, tmp_path / "dequantised")
    lines, weights = [], []
    for cache in (rounded, exact):
        log = tmp_path / f"run_{cache.name}"
        changes = {"data__cache": str(cache), "exp_manager__explicit_log_dir": str(log), "trainer__max_steps": 6, "data__num_workers": 1}
        assert train(config(tmp_path, tiny_target, chats, **changes), start_ranks(1, None, 1))
        lines.append(repeatable(log))
        weights.append((log / "export/model.safetensors").read_bytes())
    assert lines[0] == lines[1]
    assert weights[0] == weights[1]


def test_captured_in_a_lossy_codec_is_recoded_to_it(tmp_path: Path, tiny_target: Path, chats: Path, lossless: Path) -> None:
    captured = config(tmp_path / "captured", tiny_target, chats, capture__codec="int8")
    capture(captured, start_ranks(1, None, 1))
    source = _cache(lossless)
    recode(source, tmp_path / "out", "int8")
    digest = Cache.open(tmp_path / "out").digest()
    assert digest == Cache.open(_cache(tmp_path / "captured")).digest()
    assert digest != Cache.open(source).digest()
    # Again, after a kill that left a shard without its marker.
    (shard_folder(tmp_path / "out", 0) / "committed.json").unlink()
    manifest = Cache.open(source).manifest
    shutil.rmtree(tmp_path / "out" / "target")
    recode(source, tmp_path / "out", "int8")
    assert Cache.open(tmp_path / "out").digest() == digest
    assert {path.name for path in target_folder(tmp_path / "out").iterdir()} == {path.name for path in target_folder(source).iterdir()}
    assert all((shard_folder(tmp_path / "out", 0) / name).is_file() for name in shard_files(manifest.arrays))
    with pytest.raises(CacheMismatchError, match='codec: cache "int8", run "lossless"'):
        recode(source, tmp_path / "out", "lossless")
    with pytest.raises(CacheError, match="rounded a second time"):
        recode(tmp_path / "out", tmp_path / "other", "int4")


def test_batches_of_ragged_samples(lossless: Path, tmp_path: Path) -> None:
    recode(_cache(lossless), tmp_path / "int4", "int4")
    cache = Cache.open(tmp_path / "int4")
    layers = cache.manifest.layer_ids[::-1]
    numbers = [0, len(cache) - 1, 3]
    packed, plain = ([cache.read(n, layers, dequantise=now) for n in numbers] for now in (False, True))
    shape = BatchShape(layers, 4, cache.manifest.hidden_size, plain[0].hidden[layers[0]].dtype)
    anchors = [np.array([2, 5]), np.array([1]), np.zeros(0, np.int64)]
    cpu = torch.device("cpu")
    batch, expected = (collate(samples, anchors, shape).check().to(cpu) for samples in (packed, plain))
    assert batch.quantised is None
    assert same_bits(batch.features, expected.features)
    assert packed[0].hidden == {}


@pytest.mark.slow
def test_what_codecs_cost_is_measured_in_pairs(tmp_path: Path, tiny_target: Path, chats: Path, lossless: Path) -> None:
    log = tmp_path / "bench"
    changes = {"data__cache": str(_cache(lossless)), "exp_manager__explicit_log_dir": str(log), "trainer__max_steps": 3}
    settings, ranks = config(tmp_path, tiny_target, chats, **changes), start_ranks(1, None, 1)
    found = bench_codecs(settings, ranks, 2)
    assert found["seeds"] == [settings.trainer.seed, settings.trainer.seed + 1]
    for codec in ("int8", "int4"):
        mean, low, high = found["codecs"][codec]["accept_len_change"]
        pairs = zip(found["accept_len"][codec], found["accept_len"]["lossless"], strict=True)
        differences = [a - b for a, b in pairs]
        assert mean == pytest.approx(sum(differences) / 2)
        # Of two numbers the standard error is half their distance.
        assert high - low == pytest.approx(2 * 12.706 * abs(differences[0] - differences[1]) / 2, abs=1e-12)
        assert found["codecs"][codec]["relative_error"] == relative_errors(_cache(lossless), log / "caches" / codec)
    assert bench_codecs(settings, ranks, 2) == found
    with pytest.raises(ConfigError, match="two seeds or more"):
        bench_codecs(settings, ranks, 1)
