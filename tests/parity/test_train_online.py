"""One seed trained from the cache and online: the same run."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.capture.run import capture
from pipeline.runtime.ranks import start_ranks
from pipeline.train.loop import train
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
