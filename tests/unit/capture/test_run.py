import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.cache.commit import committed_shards
from pipeline.cache.manifest import read_manifest
from pipeline.cache.reader import Cache
from pipeline.capture.run import capture
from pipeline.errors import CacheLockedError, CacheMismatchError, HiddenStateError, TargetError
from pipeline.runtime.files import FolderLock
from tests.support.tiny import CHATML, QWEN3_LIKE, build_tokenizer, write_target
from tests.unit.capture.conftest import capture_config
from tests.unit.target.conftest import lone_rank


def _stamps(cache: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of all files of committed shards."""
    return {
        str(path.relative_to(cache)): (path.stat().st_ino, path.stat().st_mtime_ns)
        for path in sorted((cache / "shards").rglob("*"))
        if path.is_file()
    }


def test_a_complete_cache_is_left_alone_wherever_it_lies(copied: Path, captured: Path, tmp_path: Path, tiny_target: Path) -> None:
    target = shutil.copytree(tiny_target, tmp_path / "moved target")
    before = _stamps(copied / "cache")
    capture(capture_config(target, copied), lone_rank())
    assert _stamps(copied / "cache") == before
    assert Cache.open(copied / "cache").digest() == Cache.open(captured / "cache").digest()
    assert not list((copied / "cache").glob(".launch"))
    assert len(list((copied / "cache" / "provenance").glob("*.json"))) == 2


def test_only_missing_shards_are_captured(copied: Path, captured: Path, tiny_target: Path) -> None:
    cache = copied / "cache"
    (cache / "shards" / "00001" / "committed.json").unlink()
    shutil.rmtree(cache / "shards" / "00003")
    (cache / "shards" / ".00002.tmp-killed" / "hidden.zarr").mkdir(parents=True)
    before = _stamps(cache)
    capture(capture_config(tiny_target, copied), lone_rank())
    after = _stamps(cache)
    redone = {name.split("/")[1] for name, stamp in after.items() if before.get(name) != stamp}
    assert redone == {"00001", "00003"}
    assert not list((cache / "shards").glob(".*"))
    assert Cache.open(cache).digest() == Cache.open(captured / "cache").digest()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model__target__dtype": "bfloat16"}, "states_identity.target.dtype"),
        ({"model__target__layer_ids": [1, 3]}, "layer_ids"),
        ({"model__target__layer_ids": [3, 1, 5]}, "layer_ids"),
        ({"model__target__attn_implementation": "eager"}, "states_identity.target.attn_implementation"),
        ({"data__max_tokens": 50}, "states_identity.max_tokens"),
        ({"data__validation_ds": {"fraction": 0.0}}, "samples_identity.heldout_fraction"),
        ({"capture__shard_tokens": 1501}, "states_identity.shard_tokens"),
        ({"capture__codec": "raw"}, "codec"),
        ({"capture__final": True}, "final"),
    ],
)
def test_another_setting_is_refused_by_name(copied: Path, tiny_target: Path, changes: dict[str, Any], field: str) -> None:
    before = _stamps(copied)
    with pytest.raises(CacheMismatchError, match=rf"\n  {field}: cache .*, run "):
        capture(capture_config(tiny_target, copied, **changes), lone_rank())
    assert _stamps(copied) == before


def test_another_target_template_tokenizer_or_order_is_refused_by_name(copied: Path, tiny_target: Path, tmp_path: Path) -> None:
    tuned = write_target(tmp_path / "tuned", seed=1)
    with pytest.raises(CacheMismatchError, match=r"states_identity.target.weights_digest") as error:
        capture(capture_config(tuned, copied), lone_rank())
    assert "differ in 1 field" in str(error.value)
    other = shutil.copytree(tiny_target, tmp_path / "template")
    (other / "chat_template.jinja").write_text(CHATML.replace("<|im_end|>\\n", "<|im_end|>\\n\\n"))
    with pytest.raises(CacheMismatchError, match=r"states_identity.chat_template"):
        capture(capture_config(other, copied), lone_rank())
    tokenizer = build_tokenizer(CHATML)
    tokenizer.add_tokens(["sunrise"])
    tokenizer.save_pretrained(tmp_path / "template")
    with pytest.raises(CacheMismatchError, match=r"states_identity.tokenizer"):
        capture(capture_config(other, copied), lone_rank())
    rows = (copied / "chats.jsonl").read_text().splitlines(keepends=True)
    (copied / "chats.jsonl").write_text("".join([rows[1], rows[0], *rows[2:]]))
    with pytest.raises(CacheMismatchError, match=r"states_identity.token_ids"):
        capture(capture_config(tiny_target, copied), lone_rank())


def test_only_one_capture_at_a_time(copied: Path, tiny_target: Path) -> None:
    config = capture_config(tiny_target, copied)
    with FolderLock(copied / "cache"), pytest.raises(CacheLockedError, match="in use by process"):
        capture(config, lone_rank())
    capture(config, lone_rank())


def test_unusable_states_stop_the_run_and_leave_no_shard(captured: Path, tiny_target: Path, tmp_path: Path) -> None:
    sick = Path(shutil.copytree(tiny_target, tmp_path / "sick"))
    tensors = load_file(sick / "model.safetensors")
    for name, tensor in tensors.items():
        if ".layers." in name and "norm" not in name:
            tensor.zero_()
    tensors["model.embed_tokens.weight"][:] = 1.0
    save_file(tensors, sick / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(captured / "chats.jsonl", tmp_path)
    with pytest.raises(HiddenStateError, match=r"sample .* row \d+\), layer 1: states are the same at all \d+ positions"):
        capture(capture_config(sick, tmp_path), lone_rank())
    cache = tmp_path / "cache"
    assert read_manifest(cache).state == "open"
    assert committed_shards(cache) == set()
    assert not list((cache / "shards").iterdir())


def test_faults_of_the_request_come_before_anything_is_made(captured: Path, tiny_target: Path, tmp_path: Path) -> None:
    shutil.copy(captured / "chats.jsonl", tmp_path)
    faults: list[tuple[dict[str, Any], str]] = [
        ({"model__target__layer_ids": [1, 7]}, "final norm"),
        ({"model__target__path": str(tmp_path / "none")}, "not a folder"),
    ]
    for changes, words in faults:
        with pytest.raises(TargetError, match=words):
            capture(capture_config(tiny_target, tmp_path, **changes), lone_rank())
        assert not (tmp_path / "cache" / "manifest.json").exists()


def test_what_training_needs_of_the_target(captured: Path, tiny_target: Path) -> None:
    from transformers import AutoTokenizer

    cache = Cache.open(captured / "cache")
    bundle = cache.bundle()
    tensors = load_file(tiny_target / "model.safetensors")
    assert torch.equal(bundle.embedding, tensors["model.embed_tokens.weight"])
    assert torch.equal(bundle.head, tensors["lm_head.weight"])
    assert torch.equal(bundle.final_norm, tensors["model.norm.weight"])
    assert bundle.config["num_hidden_layers"] == 8
    tokenizer = AutoTokenizer.from_pretrained(cache.tokenizer_dir)
    assert tokenizer.chat_template == CHATML
    assert len(tokenizer) == 480


def test_a_template_of_the_user_s_lies_in_the_cache(captured: Path, tiny_target: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    shutil.copy(captured / "chats.jsonl", tmp_path)
    (tmp_path / "template.jinja").write_text(QWEN3_LIKE)
    config = capture_config(tiny_target, tmp_path, model__target__chat_template=str(tmp_path / "template.jinja"), capture__final=True)
    capture(config, lone_rank())
    cache = Cache.open(tmp_path / "cache", final=True)
    assert AutoTokenizer.from_pretrained(cache.tokenizer_dir).chat_template == QWEN3_LIKE
    assert cache.read(0, final=True).final is not None


def test_samples_beyond_the_target_s_positions_are_pointed_out(
    captured: Path, tiny_target: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    short = Path(shutil.copytree(tiny_target, tmp_path / "short"))
    config = json.loads((short / "config.json").read_text()) | {"max_position_embeddings": 100}
    (short / "config.json").write_text(json.dumps(config))
    rows = (captured / "chats.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "chats.jsonl").write_text("".join(rows[:4]))
    with caplog.at_level(logging.WARNING):
        capture(capture_config(short, tmp_path, data__validation_ds={"fraction": 0.0}), lone_rank())
    assert any("consider data.max_tokens=100" in message for message in caplog.messages)
