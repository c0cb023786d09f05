"""What training must not start with, or go on with: one row each, by its first call and what it then reads; the message names it."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pytest

from pipeline.cache.commit import reopen
from pipeline.cache.manifest import read_manifest
from pipeline.errors import CacheCorruptError, CacheError, CacheMismatchError
from pipeline.train.data import open_cache
from tests.support.tiny import MASK_TOKEN_ID, QWEN3_LIKE, build_tokenizer, write_target
from tests.unit.capture.conftest import capture_config, captured, copied  # noqa: F401 - fixtures

SHARD = "cache/shards/00001"
DATA = f"{SHARD}/hidden.zarr/layer_3/c/0/0"
Damage: TypeAlias = Callable[[Path], object]


def train_on(folder: Path, target: Path, **changes: Any) -> None:
    """What training does with a cache before it is done with it: open, compare, read the target's bundle and every sample."""
    data = open_cache(capture_config(target, folder, model__draft__mask_token_id=MASK_TOKEN_ID, **changes))
    for number in range(len(data.num_tokens)):
        data.source([number])


def flipped(name: str, place: float = 0.5) -> Damage:
    def flip(folder: Path) -> None:
        data = bytearray((folder / name).read_bytes())
        data[int(place * len(data))] ^= 1
        (folder / name).write_bytes(data)

    return flip


def cut(name: str, num_bytes: int = 1) -> Damage:
    return lambda folder: os.truncate(folder / name, (folder / name).stat().st_size - num_bytes)


def removed(name: str) -> Damage:
    return lambda folder: shutil.rmtree(folder / name) if (folder / name).is_dir() else (folder / name).unlink()


def cut_at_the_batch(folder: Path) -> None:
    data = (folder / SHARD / "samples.arrow").read_bytes()
    end = len(data) - 10 - int.from_bytes(data[-10:-6], "little")
    assert pa.ipc.open_stream(data[8:end]).read_all().num_rows > 1  # as a stream it would read well
    (folder / SHARD / "samples.arrow").write_bytes(data[:end])


def edited(folder: Path) -> None:
    path = folder / "cache/manifest.json"
    path.write_text(path.read_text().replace('"heldout_fraction": 0.2', '"heldout_fraction": 0.3'))


def stopped_early(folder: Path) -> None:
    reopen(folder / "cache", read_manifest(folder / "cache"))
    shutil.rmtree(folder / SHARD)


FILES = {
    "manifest": "cache/manifest.json",
    "index": "cache/index.arrow",
    "marker": f"{SHARD}/committed.json",
    "samples": f"{SHARD}/samples.arrow",
    "group": f"{SHARD}/hidden.zarr/zarr.json",
    "array": f"{SHARD}/hidden.zarr/layer_3/zarr.json",
    "hidden": DATA,
    "bundle": "cache/target/bundle.safetensors",
    "bundle config": "cache/target/bundle.json",
    "tokenizer": "cache/target/tokenizer/tokenizer.json",
}
DAMAGES: dict[str, tuple[Damage, str]] = {
    "shard deleted": (removed(SHARD), SHARD),
    "samples cut at a batch boundary": (cut_at_the_batch, f"{SHARD}/samples.arrow has"),
    "hidden file cut": (cut(DATA), f"{DATA} has"),
    "hidden file deleted": (removed(DATA), f"{DATA} is missing"),
    "marker removed": (removed(f"{SHARD}/committed.json"), f"{SHARD}/committed.json is missing"),
    "manifest removed": (removed("cache/manifest.json"), "cache/manifest.json is missing, though committed shards"),
    "manifest edited": (edited, "cache/manifest.json was edited"),
    "capture stopped early": (stopped_early, "is not complete: 4 of 5 shards are captured"),
    **{f"a byte flipped: {kind}": (flipped(name), name) for kind, name in FILES.items()},
}


def test_a_sound_cache_is_accepted(captured: Path, tiny_target: Path) -> None:  # noqa: F811
    train_on(captured, tiny_target)


@pytest.mark.parametrize("case", DAMAGES)
def test_damage(copied: Path, tiny_target: Path, case: str) -> None:  # noqa: F811
    damage, words = DAMAGES[case]
    damage(copied)
    with pytest.raises(CacheError, match=re.escape(words)) as caught:
        train_on(copied, tiny_target)
    assert isinstance(caught.value, CacheCorruptError) or case == "capture stopped early"


def other_weights(folder: Path, target: Path) -> dict[str, Any]:
    return {"model__target__path": str(write_target(folder / "other", seed=1))}


def other_template(folder: Path, target: Path) -> dict[str, Any]:
    (folder / "template.jinja").write_text(QWEN3_LIKE)
    return {"model__target__chat_template": str(folder / "template.jinja")}


def other_tokenizer(folder: Path, target: Path) -> dict[str, Any]:
    other = shutil.copytree(target, folder / "other")
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["sunrise"])
    tokenizer.save_pretrained(other)
    return {"model__target__path": str(other)}


def rows_reordered(folder: Path, target: Path) -> dict[str, Any]:
    lines = (folder / "chats.jsonl").read_text().splitlines(keepends=True)
    (folder / "chats.jsonl").write_text("".join([lines[1], lines[0], *lines[2:]]))
    return {}


OTHERS: dict[str, tuple[Callable[[Path, Path], dict[str, Any]], str]] = {
    "other weights of the same shape": (other_weights, "states_identity.target.weights_digest: cache"),
    "other template": (other_template, "states_identity.chat_template: cache"),
    "other tokenizer": (other_tokenizer, "states_identity.tokenizer: cache"),
    "rows reordered": (rows_reordered, "states_identity.token_ids: cache"),
    "dtype": (lambda *_: {"model__target__dtype": "bfloat16"}, 'states_identity.target.dtype: cache "float32", run "bfloat16"'),
    "layers": (lambda *_: {"model__draft__target_layer_ids": [1, 2]}, "this run needs [2] as well"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_another_than_the_cache_was_captured_from(copied: Path, tiny_target: Path, case: str) -> None:  # noqa: F811
    change, words = OTHERS[case]
    changes = change(copied, tiny_target)
    with pytest.raises(CacheMismatchError, match=re.escape(words)):
        train_on(copied, tiny_target, **changes)


def test_a_missing_layer_comes_with_the_command_that_adds_it(copied: Path, tiny_target: Path) -> None:  # noqa: F811
    with pytest.raises(CacheMismatchError) as caught:
        train_on(copied, tiny_target, model__draft__target_layer_ids=[1, 2])
    command = str(caught.value).splitlines()[-1]
    assert re.fullmatch(r"  python stages/cache\.py append \S+/provenance/config\.yaml capture\.path=\S+ '\S+=\[1,3,5,2\]'", command)


@pytest.mark.slow
def test_the_stages_end_with_one_paragraph_and_code_2(copied: Path, tiny_target: Path) -> None:  # noqa: F811
    from pipeline.config.load import to_yaml
    from tests.support.launch import run

    config = capture_config(tiny_target, copied, model__draft__mask_token_id=MASK_TOKEN_ID, trainer__max_steps=2)
    (copied / "config.yaml").write_text(to_yaml(config))
    whole = (copied / DATA).read_bytes()
    os.truncate(copied / DATA, 10)
    finished = run("stages/train_draft.py", str(copied / "config.yaml"), check=False)
    assert finished.codes == (2,)
    assert f"{DATA} has 10 bytes" in finished.text
    assert "Traceback" not in finished.text
    (copied / DATA).write_bytes(whole)
    for stage in ("stages/capture.py", "stages/train_draft.py"):
        finished = run(stage, str(copied / "config.yaml"), "model.target.dtype=bfloat16", check=False)
        assert finished.codes == (2,)
        assert "states_identity.target.dtype" in finished.text
        assert "Traceback" not in finished.text
    assert json.loads((copied / "cache/manifest.json").read_text())["state"] == "complete"
