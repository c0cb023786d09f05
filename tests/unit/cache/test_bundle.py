import json
import os
from pathlib import Path

import pytest

from pipeline.cache.bundle import load_bundle, save_bundle
from pipeline.errors import CacheCorruptError
from tests.support import caches


@pytest.mark.parametrize("tied", [True, False])
def test_comes_back(tied: bool, tmp_path: Path) -> None:
    saved = caches.bundle(tied)
    save_bundle(tmp_path, saved)
    found = load_bundle(tmp_path)
    assert (found.head is found.embedding) == tied
    for name in ("embedding", "head", "final_norm"):
        assert caches.same_bits(getattr(found, name), getattr(saved, name))
    assert (found.config, found.final_logit_softcapping, found.output_multiplier) == (saved.config, 30.0, 1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle.json", "bundle.safetensors"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_who_may_read_it_is_for_the_umask_to_say(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        save_bundle(tmp_path, caches.bundle())
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {"bundle.json": mode, "bundle.safetensors": mode}


def test_the_same_bundle_is_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_bundle(tmp_path / name, caches.bundle(tied=False))
    for name in ("bundle.json", "bundle.safetensors"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_what_is_missing_cut_or_does_not_fit_is_named(tmp_path: Path) -> None:
    save_bundle(tmp_path, caches.bundle(tied=False))
    data = (tmp_path / "bundle.safetensors").read_bytes()
    (tmp_path / "bundle.safetensors").write_bytes(data[:-1])
    with pytest.raises(CacheCorruptError, match=r"bundle\.safetensors"):
        load_bundle(tmp_path)
    (tmp_path / "bundle.safetensors").unlink()
    with pytest.raises(CacheCorruptError, match=r"bundle\.safetensors"):
        load_bundle(tmp_path)
    save_bundle(tmp_path, caches.bundle(tied=True))
    value = json.loads((tmp_path / "bundle.json").read_text())
    (tmp_path / "bundle.json").write_text(json.dumps({**value, "tied": False}))
    with pytest.raises(CacheCorruptError, match="head"):
        load_bundle(tmp_path)
    (tmp_path / "bundle.json").write_text("[]")
    with pytest.raises(CacheCorruptError, match=r"bundle\.json"):
        load_bundle(tmp_path)
