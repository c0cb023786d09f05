"""Damage of every kind mended: only what is faulty is captured again, and the digest is the one of before."""

import os
import shutil
from pathlib import Path

import pytest

from pipeline.cache.layout import INDEX
from pipeline.cache.manifest import read_manifest
from pipeline.cache.reader import Cache
from pipeline.cache.verify import verify
from pipeline.capture.repair import repair
from pipeline.errors import CacheCorruptError, CacheMismatchError
from tests.unit.capture.conftest import capture_config
from tests.unit.target.conftest import lone_rank

DATA = "hidden.zarr/layer_3/c/0/0"


def flip(path: Path, place: float = 0.4) -> None:
    data = bytearray(path.read_bytes())
    data[int(place * len(data))] ^= 1
    path.write_bytes(data)


def stamps(cache: Path) -> dict[str, int]:
    return {str(path.relative_to(cache)): path.stat().st_ino for path in (cache / "shards").rglob("*") if path.is_file()}


def test_every_kind_of_damage_at_once(copied: Path, captured: Path, tiny_target: Path) -> None:
    cache = copied / "cache"
    flip(cache / "shards/00000" / DATA)
    os.truncate(cache / "shards/00001/samples.arrow", 100)
    (cache / "shards/00002/committed.json").unlink()
    shutil.copytree(cache / "shards/00003", cache / "shards/00009")
    flip(cache / INDEX)
    flip(cache / "target/bundle.safetensors")
    before = stamps(cache)
    assert len(verify(cache, full=True)) >= 5
    repair(capture_config(tiny_target, copied), lone_rank())
    after = stamps(cache)
    assert {name.split("/")[1] for name, inode in after.items() if before.get(name) != inode} == {"00000", "00001", "00002"}
    assert not (cache / "shards/00009").exists()
    assert verify(cache, full=True) == []
    assert Cache.open(cache).digest() == Cache.open(captured / "cache").digest()
    assert read_manifest(cache) == read_manifest(captured / "cache")
    Cache.open(cache).bundle()


def test_a_sound_cache_is_left_alone(copied: Path, tiny_target: Path) -> None:
    cache = copied / "cache"
    before, manifest = stamps(cache), (cache / "manifest.json").read_bytes()
    repair(capture_config(tiny_target, copied), lone_rank())
    assert (stamps(cache), (cache / "manifest.json").read_bytes()) == (before, manifest)


def test_a_sound_shard_of_another_cache_is_found(copied: Path, captured: Path, tiny_target: Path, tmp_path: Path) -> None:
    """Same corpus, same shapes, other weights: every checksum inside the shard is right."""
    from pipeline.capture.run import capture
    from tests.support.tiny import write_target

    shutil.copy(captured / "chats.jsonl", tmp_path)
    capture(capture_config(write_target(tmp_path / "other", seed=3), tmp_path), lone_rank())
    cache = copied / "cache"
    shutil.rmtree(cache / "shards/00001")
    shutil.copytree(tmp_path / "cache/shards/00001", cache / "shards/00001")
    assert [fault.file for fault in verify(cache)] == ["shards/00001/committed.json"]
    repair(capture_config(tiny_target, copied), lone_rank())
    assert Cache.open(cache).digest() == Cache.open(captured / "cache").digest()


def test_nothing_is_removed_for_another_configuration_or_without_a_manifest(copied: Path, tiny_target: Path) -> None:
    cache = copied / "cache"
    flip(cache / "shards/00000" / DATA)
    before = stamps(cache)
    with pytest.raises(CacheMismatchError, match="max_tokens"):
        repair(capture_config(tiny_target, copied, data__max_tokens=40), lone_rank())
    manifest = (cache / "manifest.json").read_bytes()
    (cache / "manifest.json").unlink()
    with pytest.raises(CacheCorruptError, match=r"manifest\.json is missing"):
        repair(capture_config(tiny_target, copied), lone_rank())
    (cache / "manifest.json").write_bytes(manifest.replace(b'"final": false', b'"final": true'))
    with pytest.raises(CacheCorruptError, match="edited or damaged"):
        repair(capture_config(tiny_target, copied), lone_rank())
    assert stamps(cache) == before


@pytest.mark.parametrize("link", ["shards", "shards/00001"])
def test_nothing_outside_the_cache_is_removed(copied: Path, tiny_target: Path, link: str) -> None:
    cache, outside = copied / "cache", copied / "outside"
    (cache / link).rename(outside)
    (cache / link).symlink_to(outside, target_is_directory=True)
    kept = sorted(outside.rglob("*"))
    if link == "shards":
        with pytest.raises(CacheCorruptError, match="leads out of the cache"):
            repair(capture_config(tiny_target, copied), lone_rank())
    else:
        repair(capture_config(tiny_target, copied), lone_rank())
        assert verify(cache, full=True) == []
    assert sorted(outside.rglob("*")) == kept
