"""Every kind of damage to every kind of file is refused, and the message names the file."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from pipeline.cache.layout import MANIFEST
from pipeline.cache.manifest import read_manifest, sealed_text
from pipeline.cache.reader import Cache
from pipeline.cache.verify import verify
from pipeline.errors import CacheCorruptError, CacheError
from tests.support import caches

DATA = "shards/00001/hidden.zarr/layer_4/c/0/0"
SAMPLES = "shards/00001/samples.arrow"
FILES = [
    MANIFEST,
    "index.arrow",
    SAMPLES,
    "shards/00001/committed.json",
    "shards/00001/hidden.zarr/zarr.json",
    "shards/00001/hidden.zarr/layer_4/zarr.json",
    DATA,
    "target/bundle.safetensors",
    "target/bundle.json",
    "target/tokenizer/tokenizer.json",
]


@pytest.fixture
def cache(small_cache: Path, tmp_path: Path) -> Path:
    return shutil.copytree(small_cache, tmp_path / "c")


def use(cache: Path) -> None:
    """All that training does with a cache."""
    opened = Cache.open(cache)
    opened.bundle()
    assert opened.tokenizer_dir
    for i in range(len(opened)):
        opened.read(i)


def refused(cache: Path, name: str) -> None:
    with pytest.raises(CacheError, match=re.escape(str(cache / name))):
        use(cache)
    assert name in {fault.file for fault in verify(cache, full=True)}


@pytest.mark.parametrize("name", [name for name in FILES if name != "index.arrow"])
def test_deleted(cache: Path, name: str) -> None:
    (cache / name).unlink()
    refused(cache, name)
    assert name in {fault.file for fault in verify(cache)}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("cut", [1, None], ids=str)
def test_cut(cache: Path, name: str, cut: int | None) -> None:
    size = (cache / name).stat().st_size
    os.truncate(cache / name, 0 if cut is None else max(0, size - cut))
    refused(cache, name)
    assert name in {fault.file for fault in verify(cache)}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0.0, 0.43, 1.0], ids=str)
def test_one_byte_flipped(cache: Path, name: str, place: float) -> None:
    data = bytearray((cache / name).read_bytes())
    data[round(place * (len(data) - 1))] ^= 0x10
    (cache / name).write_bytes(data)
    refused(cache, name)


def test_samples_cut_at_a_batch_boundary(cache: Path) -> None:
    # The file of a shard has one batch: cut after it, before the footer, it would read well as a stream.
    data = (cache / SAMPLES).read_bytes()
    footer = int.from_bytes(data[-10:-6], "little")
    cut = data[8 : len(data) - 10 - footer]
    assert pa.ipc.open_stream(cut).read_all().num_rows == len(caches.SHARDS[1])
    (cache / SAMPLES).write_bytes(data[: 8 + len(cut)])
    refused(cache, SAMPLES)


@pytest.mark.parametrize("name", ["shards/00001", "shards/00001/hidden.zarr/layer_4", "target"])
def test_folder_deleted(cache: Path, name: str) -> None:
    shutil.rmtree(cache / name)
    with pytest.raises(CacheCorruptError, match=re.escape(str(cache / name))):
        use(cache)
    assert any(fault.file.startswith(name) for fault in verify(cache))


def test_a_shard_put_in_the_place_of_another(cache: Path) -> None:
    shutil.rmtree(cache / "shards/00001")
    shutil.copytree(cache / "shards/00002", cache / "shards/00001")
    with pytest.raises(CacheCorruptError, match="00001"):
        use(cache)
    assert any("belongs to shard 2" in fault.problem for fault in verify(cache))


def test_data_of_another_array_in_its_place(cache: Path) -> None:
    # Same size in codec raw: only checksums can tell, and those of the chunks fit.
    raw = caches.write_cache(cache.parent / "raw", caches.small_shards(), caches.manifest(codec="raw"))
    shutil.copy(raw / DATA.replace("layer_4", "layer_1"), raw / DATA)
    use(raw)
    assert [fault.file for fault in verify(raw, full=True)] == [DATA]


def test_an_open_cache_is_looked_through_as_far_as_it_is(cache: Path) -> None:
    shutil.rmtree(cache / "shards/00002")
    (cache / MANIFEST).write_bytes(sealed_text(caches.manifest()))
    assert verify(cache, full=True) == []
    with pytest.raises(CacheError, match="2 of 3 shards are captured"):
        Cache.open(cache)


def _outside(cache: Path, name: str) -> Path:
    moved = cache.parent / "outside"
    (cache / name).rename(moved)
    return moved


@pytest.mark.parametrize("link", [os.symlink, os.link], ids=["symlink", "hard link"])
def test_links_out_of_the_cache(cache: Path, link: Callable[[Path, Path], None]) -> None:
    link(_outside(cache, DATA), cache / DATA)
    if link is os.symlink:
        refused(cache, DATA)
    else:
        use(cache)  # a file of its own, by another name too


@pytest.mark.parametrize("name", ["shards/00001", "shards/00001/hidden.zarr", "target", "shards"])
def test_folders_that_are_links_out_of_the_cache(cache: Path, name: str) -> None:
    (cache / name).symlink_to(_outside(cache, name), target_is_directory=True)
    with pytest.raises(CacheCorruptError, match="leads out of the cache"):
        use(cache)
    assert any("leads out of the cache" in fault.problem for fault in verify(cache))


def test_names_in_a_manifest_cannot_lead_out_either(cache: Path) -> None:
    (cache.parent / "secret").write_text("x")
    found = read_manifest(cache)
    assert found.target_files is not None
    files = {**found.target_files, "../../secret": found.target_files["bundle.json"]}
    (cache / MANIFEST).write_bytes(sealed_text(found.model_copy(update={"target_files": files})))
    with pytest.raises(CacheCorruptError, match="leads out of the cache"):
        use(cache)


def test_the_cache_itself_may_be_reached_through_a_link(cache: Path) -> None:
    (cache.parent / "link").symlink_to(cache)
    use(cache.parent / "link")
    assert verify(cache.parent / "link", full=True) == []
