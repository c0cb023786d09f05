"""Other masks or splits on the same states: samples.arrow alone changes."""

import shutil
from pathlib import Path

import pytest

from pipeline.cache.commit import reopen
from pipeline.cache.manifest import read_manifest
from pipeline.cache.reader import Cache
from pipeline.cache.verify import verify
from pipeline.capture.remask import remask
from pipeline.capture.run import capture
from pipeline.errors import CacheError, CacheMismatchError
from tests.unit.capture.conftest import capture_config
from tests.unit.target.conftest import lone_rank

OTHER_SPLIT = {"data__validation_ds__fraction": 0.5}


def hidden(cache: Path) -> dict[str, int]:
    return {str(path.relative_to(cache)): path.stat().st_ino for path in cache.rglob("hidden.zarr/**/*") if path.is_file()}


def test_another_split_and_back_again(copied: Path, captured: Path, tiny_target: Path, tmp_path: Path) -> None:
    cache, before = copied / "cache", hidden(copied / "cache")
    # Only the tokenizer is needed, and the cache has one.
    config = capture_config(cache / "target/tokenizer", copied, **OTHER_SPLIT)
    remask(config)
    assert hidden(cache) == before
    new = Cache.open(cache)
    assert new.manifest.totals is not None
    assert new.manifest.totals.samples_by_split["heldout"] > 12
    assert verify(cache, full=True) == []
    # It is what a capture with this split gives, and is accepted as such.
    shutil.copy(captured / "chats.jsonl", tmp_path)
    capture(capture_config(tiny_target, tmp_path, **OTHER_SPLIT), lone_rank())
    assert new.digest() == Cache.open(tmp_path / "cache").digest()
    capture(capture_config(tiny_target, copied, **OTHER_SPLIT), lone_rank())
    assert hidden(cache) == before
    remask(capture_config(cache / "target/tokenizer", copied))
    assert Cache.open(cache).digest() == Cache.open(captured / "cache").digest()


def test_interrupted_it_is_no_cache_until_it_is_run_again(copied: Path, tiny_target: Path) -> None:
    cache = copied / "cache"
    old = shutil.copytree(cache, copied / "old")
    config = capture_config(tiny_target, copied, **OTHER_SPLIT)
    remask(config)
    whole = Cache.open(cache).digest()
    # Killed between samples and marker of shard 1, after shard 0: both old still, but for the samples of shard 1.
    reopen(cache, read_manifest(cache), state="remasking")
    for shard in range(1, read_manifest(cache).num_shards):
        for name in ("samples.arrow", "committed.json")[1 if shard == 1 else 0 :]:
            shutil.copy(old / f"shards/{shard:05d}/{name}", cache / f"shards/{shard:05d}/{name}")
    for refused in (lambda: Cache.open(cache), lambda: capture(config, lone_rank())):
        with pytest.raises(CacheError, match="Run the same remask again"):
            refused()
    assert any("remask was interrupted" in fault.problem for fault in verify(cache))
    remask(config)
    assert Cache.open(cache).digest() == whole
    assert verify(cache, full=True) == []


def test_other_tokens_or_samples_are_refused(copied: Path, tiny_target: Path) -> None:
    before = (copied / "cache/manifest.json").read_bytes()
    for changes in ({"data__max_tokens": 60}, {"data__min_supervised_tokens": 30}, {"capture__shard_tokens": 999}):
        with pytest.raises(CacheMismatchError, match=r"(?s)states_identity.*A remask keeps the samples"):
            remask(capture_config(tiny_target, copied, **changes))
    assert (copied / "cache/manifest.json").read_bytes() == before


def test_nothing_outside_the_cache_is_written(copied: Path, tiny_target: Path) -> None:
    cache, outside = copied / "cache", copied / "outside"
    (cache / "shards/00001").rename(outside)
    (cache / "shards/00001").symlink_to(outside, target_is_directory=True)
    before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    with pytest.raises(CacheError, match="leads out of the cache"):
        remask(capture_config(tiny_target, copied, **OTHER_SPLIT))
    assert {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()} == before
    assert read_manifest(cache).state == "complete"
