"""Smaller caches out of a larger one, and what tells two caches apart."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.cache.diff import diff
from pipeline.cache.info import as_text, info
from pipeline.cache.manifest import read_manifest, sealed_text
from pipeline.cache.reader import Cache
from pipeline.cache.subset import Choice, subset
from pipeline.cache.verify import verify
from pipeline.errors import CacheError, CacheMismatchError
from pipeline.records import CapturedSample
from tests.support import caches

SPLITS = ((20, 30, 40, 50, 660), (70, 5, 6, 7, 100, 9), (400, 20, 30, 40, 600), (3, 3, 3, 3, 3))


@pytest.fixture(scope="module")
def split_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four shards of two layers and the final state; one sample in five is held out."""
    shards = [caches.captured(lengths, seed, final=True) for seed, lengths in enumerate(SPLITS)]
    return caches.write_cache(tmp_path_factory.mktemp("cache") / "split", shards, caches.manifest(4, final=True))


def samples(cache: Path) -> dict[str, CapturedSample]:
    opened = Cache.open(cache)
    return {str(name): opened.read(i, final=opened.manifest.final) for i, name in enumerate(opened.index.sample_id)}


def equal(a: CapturedSample, b: CapturedSample) -> bool:
    same = a.tokens.sample_id == b.tokens.sample_id and a.tokens.split == b.tokens.split
    same &= np.array_equal(a.tokens.input_ids, b.tokens.input_ids) and np.array_equal(a.tokens.spans, b.tokens.spans)
    return bool(same) and all(caches.same_bits(state, b.hidden[layer]) for layer, state in a.hidden.items())


def test_layers_are_linked_and_the_cache_is_what_a_capture_of_them_gives(split_cache: Path, tmp_path: Path) -> None:
    subset(split_cache, tmp_path / "out", Choice(layer_ids=(4,), final=False))
    shards = [caches.captured(lengths, seed, final=True) for seed, lengths in enumerate(SPLITS)]
    direct = caches.write_cache(tmp_path / "direct", shards, caches.manifest(4, layer_ids=(4,)))
    assert Cache.open(tmp_path / "out").digest() == Cache.open(direct).digest()
    assert diff(tmp_path / "out", direct) == []
    assert verify(tmp_path / "out", full=True) == []
    name = "shards/00002/hidden.zarr/layer_4/c/0/0"
    assert (tmp_path / "out" / name).samefile(split_cache / name)
    assert samples(tmp_path / "out")["chat-1-2"].hidden.keys() == {4}


def test_a_split(split_cache: Path, tmp_path: Path) -> None:
    subset(split_cache, tmp_path / "out", Choice(splits=("heldout",)))
    expected = {name: sample for name, sample in samples(split_cache).items() if sample.tokens.split == "heldout"}
    found = samples(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(equal(found[name], expected[name]) for name in found)
    assert all(sample.final is not None for sample in found.values())
    manifest = read_manifest(tmp_path / "out")
    assert manifest.num_shards == 2  # gathered, up to the size of the largest shard of the whole
    assert manifest.states_identity["subset"] == {"of": Cache.open(split_cache).digest(), "splits": ["heldout"], "num_samples": None}
    assert verify(tmp_path / "out", full=True) == []
    assert any("states_identity.subset: A" in line for line in diff(split_cache, tmp_path / "out"))


def test_fewer_samples_are_some_of_more(split_cache: Path, tmp_path: Path) -> None:
    sets = []
    for number in (3, 9, 21):
        subset(split_cache, tmp_path / str(number), Choice(num_samples=number))
        sets.append(set(samples(tmp_path / str(number))))
    assert [len(found) for found in sets] == [3, 9, 21]
    assert sets[0] < sets[1] < sets[2] == set(samples(split_cache))
    assert Cache.open(tmp_path / "21").digest() == Cache.open(split_cache).digest()


def test_taken_up_after_a_kill_and_refused_beside_something_else(split_cache: Path, tmp_path: Path) -> None:
    choice, out = Choice(splits=("heldout",)), tmp_path / "out"
    subset(split_cache, out, choice)
    digest = Cache.open(out).digest()
    kept = (out / "shards/00000/samples.arrow").stat().st_ino
    shutil.rmtree(out / "shards/00001")
    (out / "index.arrow").unlink()
    found = read_manifest(out)
    cleared = {"state": "open", "totals": None, "index": None, "index_content_sha256": None, "target_files": None}
    (out / "manifest.json").write_bytes(sealed_text(found.model_copy(update=cleared)))
    subset(split_cache, out, choice)
    assert Cache.open(out).digest() == digest
    assert (out / "shards/00000/samples.arrow").stat().st_ino == kept
    with pytest.raises(CacheMismatchError, match="subset"):
        subset(split_cache, out, Choice(splits=("train",)))
    (tmp_path / "full").mkdir()
    (tmp_path / "full/notes.txt").write_text("mine")
    with pytest.raises(CacheError, match="not empty and holds no cache"):
        subset(split_cache, tmp_path / "full", choice)
    with pytest.raises(CacheError, match="is the cache itself"):
        subset(split_cache, split_cache, choice)


def test_choices_of_what_is_not_there(split_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(CacheMismatchError, match=r"needs \[2\] as well"):
        subset(split_cache, tmp_path / "out", Choice(layer_ids=(2,)))
    with pytest.raises(CacheError, match=r"has the splits \['heldout', 'train'\], not \['test'\]|has the splits \['train', 'heldout'\]"):
        subset(split_cache, tmp_path / "out", Choice(splits=("test",)))
    with pytest.raises(CacheError, match="no sample"):
        subset(split_cache, tmp_path / "out", Choice(num_samples=0))
    assert not (tmp_path / "out").exists()


def test_a_target_file_that_leads_out_is_not_linked_in(split_cache: Path, tmp_path: Path) -> None:
    cache = shutil.copytree(split_cache, tmp_path / "c")
    (tmp_path / "secret").write_text("x")
    os.unlink(cache / "target/tokenizer/tokenizer.json")
    (cache / "target/tokenizer/tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CacheError, match="leads out of the cache"):
        subset(cache, tmp_path / "out", Choice(layer_ids=(1,)))


def test_info_of_a_complete_cache(split_cache: Path) -> None:
    found = info(split_cache)
    opened = Cache.open(split_cache)
    assert found["digest"] == opened.digest()
    assert found["state"] == "complete"
    assert found["shards"] == {"expected": 4, "present": 4, "missing": [], "unreadable": []}
    assert found["captured"] == {"samples": 21, "tokens": sum(map(sum, SPLITS)), "supervised": found["totals"]["supervised"]}
    on_disk = {
        "hidden.zarr": sum(path.stat().st_size for path in split_cache.glob("shards/*/hidden.zarr/**/*") if path.is_file()),
        "samples": sum(path.stat().st_size for path in split_cache.glob("shards/*/samples.arrow")),
        "bundle": sum(path.stat().st_size for path in split_cache.glob("target/**/*") if path.is_file()),
        "index": (split_cache / "index.arrow").stat().st_size,
        "markers": sum(path.stat().st_size for path in split_cache.glob("shards/*/committed.json")),
    }
    assert {name: found["bytes"][name] for name in on_disk} == on_disk
    assert found["raw_bytes"] == sum(map(sum, SPLITS)) * 3 * caches.HIDDEN * 2
    text = as_text(found)
    for words in (opened.digest(), "4 of 4", "heldout", "states_identity", "  tokenizer.template: c1", "layer_4"):
        assert words in text


def test_info_of_an_open_and_of_a_damaged_cache(split_cache: Path, tmp_path: Path) -> None:
    cache = shutil.copytree(split_cache, tmp_path / "c")
    (cache / "shards/00001/committed.json").unlink()
    (cache / "shards/00002/committed.json").write_text("{}")
    found = info(cache)
    assert found["digest"] is None
    assert found["shards"] == {"expected": 4, "present": 2, "missing": [1, 2], "unreadable": [2]}
    (cache / "manifest.json").write_bytes(sealed_text(caches.manifest(4, final=True)))
    found = info(cache)
    assert (found["state"], found["totals"]) == ("open", None)
    assert found["captured"]["samples"] == 10
    assert "2 of 4, missing 1, 2" in as_text(found)


def test_diff_names_fields_and_files(split_cache: Path, tmp_path: Path) -> None:
    assert diff(split_cache, split_cache) == []
    shards = [caches.captured(lengths, seed, final=True) for seed, lengths in enumerate(SPLITS)]
    shards[1] = caches.captured(SPLITS[1], seed=7, final=True)
    other = caches.write_cache(tmp_path / "other", shards[:3], caches.manifest(3, final=True, states_identity={"weights": "w2"}))
    lines = diff(split_cache, other)
    for expected in (
        'states_identity.weights: A "w1", B "w2"',
        "states_identity.max_tokens: A 2048, B (absent)",
        "num_shards: A 4, B 3",
        "shards/00003: in B, not there",
    ):
        assert expected in lines
    assert {line.split(":")[0] for line in lines if line.startswith("shards/00001")} == {
        f"shards/00001/{name}" for name in ("samples.arrow", *(f"hidden.zarr/{array}/c/0/0" for array in ("layer_1", "layer_4", "final")))
    }
    assert not any(line.startswith(("shards/00000", "shards/00002")) for line in lines)
