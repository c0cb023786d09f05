import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pipeline.cache.layout import MANIFEST
from pipeline.cache.manifest import Manifest, check_identity, create_or_compare, parse_sealed, read_manifest, sealed_text
from pipeline.errors import CacheCorruptError, CacheError, CacheMismatchError, PipelineError
from tests.support import caches


def test_created_once_then_compared(tmp_path: Path) -> None:
    created = create_or_compare(tmp_path / "c", caches.manifest())
    assert created == caches.manifest()
    before = (tmp_path / "c" / MANIFEST).read_bytes()
    assert create_or_compare(tmp_path / "c", caches.manifest()) == created
    assert (tmp_path / "c" / MANIFEST).read_bytes() == before
    assert [path.name for path in (tmp_path / "c").iterdir() if path.is_file()] == [MANIFEST]


def test_a_complete_cache_is_still_the_same_cache(small_cache: Path) -> None:
    assert create_or_compare(small_cache, caches.manifest()).state == "complete"


def test_every_field_that_differs_is_named_with_both_values_and_what_to_do(tmp_path: Path) -> None:
    create_or_compare(tmp_path / "c", caches.manifest())
    states = {"weights": "w2", "tokenizer": {"files": "t1", "template": "c2"}, "max_tokens": 2048, "probe": "p"}
    with pytest.raises(CacheMismatchError) as caught:
        create_or_compare(tmp_path / "c", caches.manifest(states_identity=states, dtype="float32"))
    message = str(caught.value)
    assert 'states_identity.weights: cache "w1", run "w2"' in message
    assert 'states_identity.tokenizer.template: cache "c1", run "c2"' in message
    assert 'states_identity.probe: cache (absent), run "p"' in message
    assert 'dtype: cache "bfloat16", run "float32"' in message
    assert "differ in 4 field(s)" in message
    assert "capture into another folder" in message
    assert str(tmp_path / "c") in message


@pytest.mark.parametrize(
    "changes",
    [
        {"layer_ids": (4, 1)},
        {"hidden_size": 25},
        {"codec": "raw"},
        {"final": True},
        {"num_shards": 4},
        {"samples_identity": {"mask_rules": 2}},
    ],
    ids=str,
)
def test_each_field_counts(changes: dict[str, Any], tmp_path: Path) -> None:
    create_or_compare(tmp_path / "c", caches.manifest())
    with pytest.raises(CacheMismatchError, match=next(iter(changes))):
        create_or_compare(tmp_path / "c", caches.manifest(**{"num_shards": 3, **changes}))


def test_a_run_is_compared_in_the_fields_that_it_knows(small_cache: Path) -> None:
    found = read_manifest(small_cache)
    check_identity(small_cache, found, {"tokenizer": {"template": "c1", "files": "t1"}}, {"mask_rules": 1})
    with pytest.raises(CacheMismatchError, match=r"samples_identity\.mask_rules: cache 1, run 2") as caught:
        check_identity(small_cache, found, {"max_tokens": 2048}, {"mask_rules": 2})
    assert "The hidden states would fit" in str(caught.value)


def test_of_many_that_create_at_once_one_wins_and_the_others_compare(tmp_path: Path) -> None:
    def attempt(k: int) -> str:
        ours = caches.manifest(states_identity={"weights": str(k % 2)})
        try:
            return str(create_or_compare(tmp_path / "c", ours).states_identity["weights"])
        except CacheMismatchError:
            return "refused"

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(attempt, range(16)))
    winner = str(read_manifest(tmp_path / "c").states_identity["weights"])
    assert results == [winner if str(k % 2) == winner else "refused" for k in range(16)]
    assert [path.name for path in (tmp_path / "c").iterdir() if path.is_file()] == [MANIFEST]


def test_any_byte_changed_in_a_sealed_file_is_noticed() -> None:
    text = sealed_text(caches.manifest())
    assert parse_sealed(Manifest, text, Path("m")) == caches.manifest()
    for position in range(len(text)):
        damaged = bytearray(text)
        damaged[position] ^= 1
        with pytest.raises(PipelineError, match="m "):
            parse_sealed(Manifest, bytes(damaged), Path("m"))
    for cut in (b"", text[:-1], text[:40], text + b"\n"):
        with pytest.raises(CacheCorruptError):
            parse_sealed(Manifest, cut, Path("m"))


def test_an_edited_value_is_refused_though_the_json_is_fine(tmp_path: Path, small_cache: Path) -> None:
    cache = shutil.copytree(small_cache, tmp_path / "c")
    value = json.loads((cache / MANIFEST).read_text())
    value["states_identity"]["weights"] = "w2"
    (cache / MANIFEST).write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
    with pytest.raises(CacheCorruptError, match=r"manifest\.json was edited"):
        create_or_compare(cache, caches.manifest(states_identity={"weights": "w2"}))


def test_a_later_format_is_named(tmp_path: Path) -> None:
    later = caches.manifest().model_copy(update={"format_version": 2})
    with pytest.raises(CacheError, match="format version 2"):
        parse_sealed(Manifest, sealed_text(later), Path("m"))


def test_no_cache_and_a_lost_manifest_are_told_apart(tmp_path: Path, small_cache: Path) -> None:
    with pytest.raises(CacheError, match="is not a cache"):
        read_manifest(tmp_path)
    cache = shutil.copytree(small_cache, tmp_path / "c")
    (cache / MANIFEST).unlink()
    with pytest.raises(CacheCorruptError, match=r"manifest\.json is missing, though committed shards"):
        create_or_compare(cache, caches.manifest())
    assert not (cache / MANIFEST).exists()


def test_a_file_is_not_a_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CacheError, match="is not a cache"):
        read_manifest(tmp_path / "file")
