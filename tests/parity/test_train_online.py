"""One seed trained from the cache and online: the same run."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.capture.run import capture
from pipeline.config.load import to_yaml
from pipeline.errors import DraftError
from pipeline.runtime.ranks import start_ranks
from pipeline.train.loop import train
from tests.support.launch import run_ranks
from tests.support.tiny import write_chats
from tests.support.training import config, repeatable


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", 20, seed=5)


def _both(folder: Path, target: Path, chats: Path, batch_tokens: int, **changes: Any) -> tuple[Path, Path]:
    """Folders of a run from the cache, read by two threads, and of one online."""
    ranks = start_ranks(1, None, 1)
    common = {"capture__batch_tokens": batch_tokens, "trainer__val_check_interval": 6, "trainer__accumulate_grad_batches": 2, **changes}
    offline = config(folder, target, chats, data__num_workers=2, exp_manager__explicit_log_dir=str(folder / "offline"), **common)
    online = config(folder, target, chats, data__mode="online", exp_manager__explicit_log_dir=str(folder / "online"), **common)
    capture(offline, ranks)
    assert train(offline, ranks)
    assert train(online, ranks)
    return folder / "offline", folder / "online"


def test_bit_for_bit_with_one_sample_a_forward(tmp_path: Path, tiny_target: Path, chats: Path) -> None:
    offline, online = _both(tmp_path, tiny_target, chats, batch_tokens=1)
    assert repeatable(offline) == repeatable(online)
    assert len(repeatable(offline)) == 14
    weights = [(run / "export" / "model.safetensors").read_bytes() for run in (offline, online)]
    assert weights[0] == weights[1]


def test_within_rounding_with_other_groups_of_samples(tmp_path: Path, tiny_target: Path, chats: Path) -> None:
    offline, online = _both(tmp_path, tiny_target, chats, batch_tokens=400, data__max_tokens=128, trainer__max_steps=8)
    for one, other in zip(repeatable(offline), repeatable(online), strict=True):
        assert one.keys() == other.keys()
        for name in one.keys() & {"loss", "val_loss", "samples_seen", "tokens_seen", "lr"}:
            assert one[name] == pytest.approx(other[name], rel=1e-5), (one["step"], name)


def test_a_smaller_max_tokens_trains_on_prefixes(tmp_path: Path, tiny_target: Path, chats: Path) -> None:
    """A cache of longer samples gives the run that one of shorter samples gives."""
    ranks = start_ranks(1, None, 1)
    short = {"data__max_tokens": 48, "trainer__max_steps": 4, "capture__batch_tokens": 1, "data__validation_ds": {"fraction": 0.0}}
    for name, captured in (("long", 96), ("short", 48)):
        capture(config(tmp_path / name, tiny_target, chats, **{**short, "data__max_tokens": captured}), ranks)
        assert train(config(tmp_path / name, tiny_target, chats, **short), ranks)
    lines = [repeatable(tmp_path / name / "run") for name in ("long", "short")]
    for one, other in zip(*lines, strict=True):
        assert one["tokens_seen"] == other["tokens_seen"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)


@pytest.mark.slow
def test_on_two_ranks_and_with_a_divided_target(tmp_path: Path, tiny_target: Path, chats: Path) -> None:
    """Online on dp 2, and on tp 2, packed: step by step the losses of one rank that reads a cache, where rows hold one sample."""
    changes = {"trainer__max_steps": 8, "trainer__val_check_interval": 4, "capture__batch_tokens": 400}
    offline = config(tmp_path, tiny_target, chats, **changes)
    capture(offline, start_ranks(1, None, 1))
    assert train(offline, start_ranks(1, None, 1))
    for name, tp_size in (("dp", 1), ("tp", 2)):
        log_dir = str(tmp_path / name / "run")
        online = config(tmp_path, tiny_target, chats, data__mode="online", exp_manager__explicit_log_dir=log_dir, **changes)
        (tmp_path / f"{name}.yaml").write_text(to_yaml(online))
        settings = (f"model.target.tp_size={tp_size}", "data.train_ds.packing=true", "data.train_ds.micro_batch_tokens=192")
        run_ranks("stages/train_draft.py", str(tmp_path / f"{name}.yaml"), *settings, num_ranks=2, timeout=200)
        for one, other in zip(repeatable(tmp_path / "run"), repeatable(Path(log_dir)), strict=True):
            assert one.keys() == other.keys()
            for key in one.keys() & {"loss", "val_loss", "samples_seen", "tokens_seen", "lr", "epoch"}:
                assert one[key] == pytest.approx(other[key], rel=1e-5), (name, one["step"], key)


@pytest.mark.slow
def test_a_corpus_that_cannot_be_prepared_ends_every_rank(tmp_path: Path, tiny_target: Path, chats: Path) -> None:
    missing = config(tmp_path, tiny_target, tmp_path / "nowhere.jsonl", data__mode="online")
    (tmp_path / "run.yaml").write_text(to_yaml(missing))
    done = run_ranks("stages/train_draft.py", str(tmp_path / "run.yaml"), num_ranks=2, timeout=100, check=False)
    assert done.codes == (2, 2)
    assert all("nowhere.jsonl: no such file" in text for text in done.outputs)


def test_the_mask_token_is_looked_at_before_the_target_is_loaded(tmp_path: Path, tiny_target: Path, chats: Path) -> None:
    shutil.copytree(tiny_target, tmp_path / "target", ignore=shutil.ignore_patterns("*.safetensors"))
    wrong = config(tmp_path, tmp_path / "target", chats, data__mode="online", model__draft__mask_token_id=1)
    with pytest.raises(DraftError, match="mask_token_id 1 occurs in the corpus"):
        train(wrong, start_ranks(1, None, 1))
