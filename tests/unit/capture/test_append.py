"""A cache that grows: by rows, by layers, by the final hidden state; what was there stays to the byte."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.cache.commit import reopen
from pipeline.cache.layout import array_data
from pipeline.cache.manifest import read_manifest, read_marker
from pipeline.cache.reader import Cache
from pipeline.cache.verify import verify
from pipeline.capture.append import append, enlarge
from pipeline.capture.run import capture
from pipeline.config.schema import Config
from pipeline.errors import CacheError, CacheMismatchError
from tests.support.caches import same_bits
from tests.support.tiny import chats, write_jsonl
from tests.unit.capture.conftest import capture_config
from tests.unit.target.conftest import lone_rank

MORE = {"model__target__layer_ids": [1, 3, 5, 2], "capture__final": True}


def with_more_rows(config: Config, folder: Path) -> Config:
    """Lines at the end of the first file, and a second file."""
    with open(folder / "chats.jsonl", "a") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in chats(6, seed=5))
    write_jsonl(folder / "more.jsonl", chats(9, seed=6))
    sources = [*config.data.train_ds.input_cfg, {"path": str(folder / "more.jsonl")}]
    values = config.model_dump()
    values["data"]["train_ds"]["input_cfg"] = sources
    return Config.model_validate(values)


def files(cache: Path) -> dict[str, tuple[int, int, bytes]]:
    """Inode, time and bytes of all files of shards but their markers."""
    return {
        str(path.relative_to(cache)): (path.stat().st_ino, path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted((cache / "shards").rglob("*"))
        if path.is_file() and path.name != "committed.json"
    }


def by_id(cache: Cache) -> dict[str, Any]:
    return {str(name): cache.read(i) for i, name in enumerate(cache.index.sample_id)}


def holds_what_a_fresh_capture_does(cache: Path, config: Config, folder: Path) -> None:
    """The same samples with the same states (appended ones were forwarded in other batches), and accepted as what `config` asks for."""
    fresh = config.model_copy(update={"capture": config.capture.model_copy(update={"path": str(folder / "fresh")})})
    capture(fresh, lone_rank())
    left, right = Cache.open(cache), Cache.open(folder / "fresh")
    assert left.manifest.states_identity == right.manifest.states_identity
    assert left.manifest.samples_identity == right.manifest.samples_identity
    assert left.manifest.totals == right.manifest.totals
    mine, theirs = by_id(left), by_id(right)
    assert mine.keys() == theirs.keys()
    for name, sample in mine.items():
        assert sample.tokens.input_ids.tolist() == theirs[name].tokens.input_ids.tolist()
        assert sample.tokens.spans.tolist() == theirs[name].tokens.spans.tolist()
        assert sample.hidden.keys() == theirs[name].hidden.keys()
        for layer, state in sample.hidden.items():
            torch.testing.assert_close(state, theirs[name].hidden[layer], rtol=1e-4, atol=1e-5)
        assert (sample.final is None) == (theirs[name].final is None)
    assert verify(cache, full=True) == []
    before = files(cache)
    capture(config, lone_rank())  # the larger cache is what capture with the same configuration expects
    append(config, lone_rank())
    assert files(cache) == before


def test_rows(copied: Path, tiny_target: Path) -> None:
    cache = copied / "cache"
    old, before = Cache.open(cache), files(cache)
    config = with_more_rows(capture_config(tiny_target, copied), copied)
    append(config, lone_rank())
    new = Cache.open(cache)
    assert {name: files(cache)[name] for name in before} == before
    assert new.manifest.segments is not None
    assert len(new.manifest.segments) == 2
    assert new.manifest.num_shards > old.manifest.num_shards
    assert [entry.marker_sha256 for entry in new.index.shards[: len(old.index.shards)]] == [e.marker_sha256 for e in old.index.shards]
    assert new.digest() != old.digest()
    holds_what_a_fresh_capture_does(cache, config, copied)


@pytest.mark.slow
def test_rows_between_those_of_before_and_then_once_more(copied: Path, tiny_target: Path, tmp_path: Path) -> None:
    """A validation set comes after all training rows: what is added to the latter lies in the middle of the corpus."""
    write_jsonl(copied / "held.jsonl", chats(5, seed=8))
    datasets = {"held": {"input_cfg": [{"path": str(copied / "held.jsonl")}]}}
    config = capture_config(tiny_target, copied, data__validation_ds__datasets=datasets, capture__path=str(copied / "second"))
    capture(config, lone_rank())
    config = with_more_rows(config, copied)
    append(config, lone_rank())
    manifest = read_manifest(copied / "second")
    assert manifest.segments is not None
    assert [len(ranges) for ranges in manifest.segments] == [2, 1]
    write_jsonl(copied / "again.jsonl", chats(3, seed=9))
    values = config.model_dump()
    values["data"]["train_ds"]["input_cfg"] = [*values["data"]["train_ds"]["input_cfg"], {"path": str(copied / "again.jsonl")}]
    config = Config.model_validate(values)
    append(config, lone_rank())
    manifest = read_manifest(copied / "second")
    assert manifest.segments is not None
    assert [len(ranges) for ranges in manifest.segments] == [2, 1, 1]
    holds_what_a_fresh_capture_does(copied / "second", config, copied)


def test_layers_and_the_final_state(copied: Path, tiny_target: Path) -> None:
    cache, before = copied / "cache", files(copied / "cache")
    old = by_id(Cache.open(cache))
    config = capture_config(tiny_target, copied, **MORE)
    append(config, lone_rank())
    assert {name: files(cache)[name] for name in before} == before
    new = Cache.open(cache, (1, 3, 5, 2), final=True)
    assert new.manifest.layer_ids == (1, 3, 5, 2)
    assert new.manifest.segments is None
    assert all(same_bits(by_id(new)[name].hidden[1], sample.hidden[1]) for name, sample in old.items())
    holds_what_a_fresh_capture_does(cache, config, copied)
    # The whole, captured at once, is the same to the bit: same batches, same kernels.
    assert Cache.open(copied / "fresh").digest() == new.digest()


@pytest.mark.slow
def test_rows_and_layers_at_once(copied: Path, tiny_target: Path) -> None:
    config = with_more_rows(capture_config(tiny_target, copied, **MORE), copied)
    append(config, lone_rank())
    holds_what_a_fresh_capture_does(copied / "cache", config, copied)


@pytest.mark.parametrize("resume", [append, pytest.param(capture, marks=pytest.mark.slow)])
def test_half_done_and_taken_up(copied: Path, tiny_target: Path, resume: Callable[..., None]) -> None:
    """Two shards have the new arrays, the others not. Nobody reads such a cache; append, or capture, does the rest, nothing twice."""
    config, cache = capture_config(tiny_target, copied, **MORE), copied / "cache"
    old = shutil.copytree(cache, copied / "old")
    append(config, lone_rank())
    whole, num_shards = Cache.open(cache).digest(), read_manifest(cache).num_shards
    reopen(cache, read_manifest(cache))
    for shard in range(2, num_shards):
        shutil.rmtree(cache / f"shards/{shard:05d}")
        shutil.copytree(old / f"shards/{shard:05d}", cache / f"shards/{shard:05d}")
    with pytest.raises(CacheError, match=f"is not complete: 2 of {num_shards} shards"):
        Cache.open(cache)
    assert verify(cache, full=True) == []
    with pytest.raises(CacheMismatchError, match=r"\n  layer_ids: cache"):
        append(capture_config(tiny_target, copied), lone_rank())
    before = files(cache)
    resume(config, lone_rank())
    assert {name: files(cache)[name] for name in before} == before
    assert Cache.open(cache).digest() == whole


def test_a_marker_is_replaced_after_the_arrays_are_there(copied: Path, tiny_target: Path) -> None:
    """Arrays that a killed run moved into a shard, without the marker that lists them, are written again."""
    cache, config = copied / "cache", capture_config(tiny_target, copied, **MORE)
    stray = cache / "shards/00001" / array_data("layer_2")
    stray.parent.mkdir(parents=True)
    stray.write_bytes(b"half of it")
    append(config, lone_rank())
    assert stray.stat().st_size == read_marker(cache, 1)[0].files[array_data("layer_2")].size
    assert verify(cache, full=True) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model__target__layer_ids": [1, 3, 2]}, r"leaves out \['layer_5'\].*layer_ids=\[1, 3, 5, 2\]"),
        ({"data__max_tokens": 40, **MORE}, r"\n  states_identity.max_tokens: "),
        ({"data__validation_ds__fraction": 0.3, **MORE}, r"\n  samples_identity.heldout_fraction: "),
        ({"capture__codec": "raw", **MORE}, r"\n  codec: "),
    ],
)
def test_what_no_append_can_do_is_refused(copied: Path, tiny_target: Path, changes: dict[str, Any], words: str) -> None:
    before = (copied / "cache/manifest.json").read_bytes()
    with pytest.raises(CacheMismatchError, match=words):
        append(capture_config(tiny_target, copied, **changes), lone_rank())
    assert (copied / "cache/manifest.json").read_bytes() == before


def test_rows_of_before_must_be_there_as_they_were(copied: Path, tiny_target: Path) -> None:
    config = with_more_rows(capture_config(tiny_target, copied), copied)
    lines = (copied / "chats.jsonl").read_text().splitlines(keepends=True)
    other = json.dumps({"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because it rains."}]}) + "\n"
    cases = [
        ([lines[1], lines[0], *lines[2:]], r"shards/00000/samples\.arrow, sample \d+: its sample_id is not that of the corpus"),
        ([*lines[:3], other, *lines[4:]], "input_ids|sample_id"),
        (lines[:30], r"samples of .* are not in this configuration's corpus \(the first: row-0-3\d\)"),
    ]
    for changed, words in cases:
        (copied / "chats.jsonl").write_text("".join(changed))
        with pytest.raises(CacheMismatchError, match=words):
            append(config, lone_rank())
    assert read_manifest(copied / "cache").state == "complete"


def test_a_damaged_cache_is_not_added_to(copied: Path, tiny_target: Path) -> None:
    (copied / "cache/shards/00001/samples.arrow").unlink()
    with pytest.raises(CacheError, match=r"00001/samples\.arrow.*Run repair"):
        append(capture_config(tiny_target, copied, **MORE), lone_rank())


def test_an_absent_layer_is_named_with_the_command_that_adds_it(copied: Path, tiny_target: Path) -> None:
    cache = copied / "cache"
    with pytest.raises(CacheMismatchError, match=r"needs \[2, 6\] as well") as caught:
        Cache.open(cache, (1, 2, 6))
    command = str(caught.value).splitlines()[-1].split()
    assert command[:3] == ["python", "stages/cache.py", "append"]
    assert command[4:] == [f"capture.path={cache}", "'model.target.layer_ids=[1,3,5,2,6]'"]
    with pytest.raises(CacheMismatchError, match=r"does not hold the final hidden state.*\n.*append .* capture\.final=true"):
        Cache.open(cache, final=True)
    from pipeline.config.load import load_config

    # As the command says it: from the configuration that the cache keeps.
    append(load_config("capture", command[3], [word.strip("'") for word in command[4:]]), lone_rank())
    assert Cache.open(cache, (1, 2, 6)).manifest.layer_ids == (1, 3, 5, 2, 6)


def test_nothing_to_add_is_no_append(copied: Path, tiny_target: Path) -> None:
    from pipeline.corpus.prepare import prepare

    config = capture_config(tiny_target, copied)
    assert enlarge(config, copied / "cache", prepare(config)) is None
