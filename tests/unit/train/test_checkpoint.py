from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from pipeline.errors import CheckpointError
from pipeline.runtime.ranks import start_ranks
from pipeline.train.checkpoint import (
    TrainState,
    best_first,
    checkpoints,
    load_checkpoint,
    prune,
    remove_leftovers,
    save_checkpoint,
)
from pipeline.train.order import Position
from pipeline.train.step import Learner
from tests.support.samples import learner

FINGERPRINT = {"data": {"cache": "abc"}, "draft": {"block_size": 4, "target_layer_ids": (1, 3, 5)}, "seed": 0}
STATE = TrainState(step=3, position=Position(1, 2), samples_seen=12, tokens_seen=345, window=(1.0, 0.1), metrics={"val_accept_len": 1.5})


def _trained() -> Learner:
    """A draft whose optimizer has a state, without the cost of a forward."""
    learning = learner(start_ranks(1, None, 1))
    generator = torch.Generator().manual_seed(1)
    for parameter in learning.draft.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    learning.optimizer.step()
    return learning


def test_what_is_written_comes_back(tmp_path: Path) -> None:
    old, new = _trained(), learner(start_ranks(1, None, 1))
    torch.manual_seed(5)
    path = save_checkpoint(tmp_path, STATE, old.draft, old.optimizer, FINGERPRINT)
    expected = torch.rand(3)
    assert sorted(p.name for p in path.iterdir()) == ["draft.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"]
    assert load_checkpoint(path, new.draft, new.optimizer, FINGERPRINT) == STATE
    assert torch.equal(torch.rand(3), expected)
    for a, b in zip(old.draft.parameters(), new.draft.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.grad is not None
        b.grad = a.grad.clone()
    old.optimizer.step()
    new.optimizer.step()
    for a, b in zip(old.draft.parameters(), new.draft.parameters(), strict=True):
        assert torch.equal(a, b)


def test_only_the_draft_is_in_it_and_all_of_it_is_float32(tmp_path: Path) -> None:
    learning = _trained()
    path = save_checkpoint(tmp_path, STATE, learning.draft, learning.optimizer, FINGERPRINT)
    weights, moments = load_file(path / "draft.safetensors"), load_file(path / "optimizer.safetensors")
    names = [name for name, _ in learning.draft.named_parameters()]
    assert sorted(weights) == sorted(names)
    assert sorted(moments) == sorted(f"{name}.{key}" for name in names for key in ("exp_avg", "exp_avg_sq", "step"))
    assert {tensor.dtype for tensor in [*weights.values(), *moments.values()]} == {torch.float32}
    frozen = {learning.bundle.embedding.shape, learning.bundle.head.shape}
    assert not frozen & {tensor.shape for tensor in weights.values()}


def test_another_run_is_refused_field_by_field(tmp_path: Path) -> None:
    learning = _trained()
    path = save_checkpoint(tmp_path, STATE, learning.draft, learning.optimizer, FINGERPRINT)
    other = {"data": {"cache": "abd"}, "draft": {"block_size": 8, "target_layer_ids": (1, 3, 5)}, "seed": 0}
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path, learning.draft, learning.optimizer, other)
    lines = str(error.value).splitlines()
    assert lines[1:3] == ["  data.cache: abc in the checkpoint, abd in this run", "  draft.block_size: 4 in the checkpoint, 8 in this run"]
    assert len(lines) == 4


@pytest.mark.parametrize("name", ["draft.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["short", "gone"])
def test_a_damaged_checkpoint_is_refused_by_the_name_of_the_file(tmp_path: Path, name: str, damage: str) -> None:
    learning = _trained()
    path = save_checkpoint(tmp_path, STATE, learning.draft, learning.optimizer, FINGERPRINT)
    if damage == "gone":
        (path / name).unlink()
    else:
        data = (path / name).read_bytes()
        (path / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointError, match=name):
        load_checkpoint(path, learning.draft, learning.optimizer, FINGERPRINT)


def test_the_best_and_the_last_are_kept(tmp_path: Path) -> None:
    learning = _trained()
    for step, value in enumerate([1.1, 1.9, 1.4, 1.9, None, 1.2], start=1):
        state = replace(STATE, step=step, metrics={} if value is None else {"val_accept_len": value})
        save_checkpoint(tmp_path, state, learning.draft, learning.optimizer, FINGERPRINT)
        prune(tmp_path, "val_accept_len", "max", 2)
    assert [p.name for p in checkpoints(tmp_path)] == ["step_0000002", "step_0000004", "step_0000006"]
    assert [p.name for p, _ in best_first(tmp_path, "val_accept_len", "max")] == ["step_0000002", "step_0000004", "step_0000006"]
    assert best_first(tmp_path, "val_accept_len", "min")[0][1] == 1.2
    prune(tmp_path, "val_accept_len", "max", 0)
    assert [p.name for p in checkpoints(tmp_path)] == ["step_0000006"]


def test_half_written_folders_are_no_checkpoints_and_go(tmp_path: Path) -> None:
    learning = _trained()
    path = save_checkpoint(tmp_path, STATE, learning.draft, learning.optimizer, FINGERPRINT)
    for name in (".step_0000009.123-ab.tmp", "step_0000005"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "draft.safetensors").write_bytes(b"half")
    assert checkpoints(tmp_path) == [path]
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    with safe_open(path / "draft.safetensors", "pt") as file:
        assert "fc.weight" in file.keys()  # noqa: SIM118
