"""Drafts that are trained side by side from one reading are, bit for bit, those that are trained alone."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.capture.run import capture
from pipeline.config.load import load_config
from pipeline.runtime.ranks import start_ranks
from pipeline.train.checkpoint import checkpoints
from pipeline.train.loop import train
from tests.support.sweeps import run_sweep, write_sweep
from tests.support.tiny import write_chats
from tests.support.training import config, repeatable

SPACE = {
    "model.draft.num_hidden_layers": {"choice": [1, 2]},
    "model.draft.target_layer_ids": {"choice": [[4], [1, 4]]},
    "model.draft.block_size": {"choice": [4, 6]},
}


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", 24, seed=3)


def _captured(folder: Path, target: Path, chats: Path, codec: str) -> Path:
    capture(config(folder, target, chats, capture__codec=codec, model__target__layer_ids=[1, 2, 4]), start_ranks(1, None, 1))
    return folder / "cache"


def _same_as_alone(sweep_folder: Path, alone: Path) -> int:
    """Train every trial again by the command that the report gives, and compare."""
    runs = [run for run in sorted((sweep_folder / "trials").iterdir()) if (run / "export").is_dir()]
    for run in runs:
        found = load_config("train", str(run / "config.yaml"), [f"exp_manager.explicit_log_dir={alone / run.name}"])
        assert train(found, start_ranks(1, None, 1))
        assert repeatable(run) == repeatable(alone / run.name)
        ours, theirs = (checkpoints(folder / "checkpoints")[-1] for folder in (run, alone / run.name))
        assert ours.name == theirs.name
        for name in ("draft.safetensors", "optimizer.safetensors"):
            assert (ours / name).read_bytes() == (theirs / name).read_bytes()
        assert (run / "export/model.safetensors").read_bytes() == (alone / run.name / "export/model.safetensors").read_bytes()
    return len(runs)


@pytest.mark.slow
def test_members_of_the_family_and_objectives_side_by_side(tmp_path: Path, tiny_target: Path, chats: Path) -> None:
    """One of them needs the final hidden state, and one draws visible prefixes."""
    folder = tmp_path / "captured"
    capture(config(folder, tiny_target, chats, capture__final=True, model__target__layer_ids=[1, 4]), start_ranks(1, None, 1))
    space = {
        "model.draft.variant": {"choice": ["dflash", "dflash2", "domino"]},
        "model.objective.name": {"choice": ["decay", "distill", "variable_prefix"]},
    }
    changes = {"model__objective": {"num_anchors": 6, "gamma": 2.0, "anchor_fit": "partial"}, "trainer__val_check_interval": 8}
    run_sweep(write_sweep(tmp_path, tiny_target, chats, folder / "cache", {"space": space}, **changes))
    assert _same_as_alone(tmp_path / "sweep", tmp_path / "alone") >= 5


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["lossless", "int8"])
def test_bit_for_bit(tmp_path: Path, tiny_target: Path, chats: Path, codec: str) -> None:
    """Other layers, depths, block sizes and anchors in one process; the anchors' fit leaves every sample usable for both block sizes."""
    cache = _captured(tmp_path / "captured", tiny_target, chats, codec)
    section: dict[str, Any] = {"space": SPACE, "side_by_side": 8}
    changes = {"model__objective": {"num_anchors": 6, "gamma": 2.0, "anchor_fit": "partial"}, "data__num_workers": 1}
    run_sweep(write_sweep(tmp_path, tiny_target, chats, cache, section, **changes))
    assert len(list((tmp_path / "sweep/groups").iterdir())) == 1  # they did stand side by side
    assert _same_as_alone(tmp_path / "sweep", tmp_path / "alone") == 8
