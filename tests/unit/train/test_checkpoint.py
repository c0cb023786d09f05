import resource
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from pipeline.config.training import CheckpointSection
from pipeline.errors import CheckpointError
from pipeline.runtime.ranks import start_ranks
from pipeline.train.checkpoint import (
    TrainState,
    best_first,
    checkpoints,
    load_checkpoint,
    prune,
    remove_leftovers,
    take_snapshot,
    write_snapshot,
)
from pipeline.train.learner import Learner
from pipeline.train.order import Position
from pipeline.train.saver import Saver
from tests.support.samples import learner

FINGERPRINT = {"data": {"cache": "abc"}, "draft": {"block_size": 4, "target_layer_ids": (1, 3, 5)}, "seed": 0}
STATE = TrainState(step=3, position=Position(1, 2), samples_seen=12, tokens_seen=345, window=(1.0, 0.1), metrics={"val_accept_len": 1.5})


def _trained(**changes: Any) -> Learner:
    """A draft whose optimizers have a state, without the cost of a forward."""
    learning = learner(start_ranks(1, None, 1), **changes)
    generator = torch.Generator().manual_seed(1)
    for parameter in learning.draft.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    _step(learning)
    return learning


def _step(learning: Learner) -> None:
    for optimizer in learning.optimizers:
        optimizer.step()
    learning.update_average(0.9, 30)


def _save(folder: Path, learning: Learner, state: TrainState = STATE, *, final: bool = False) -> Path:
    snapshot = take_snapshot(learning, state, FINGERPRINT, final=final)
    assert snapshot is not None
    return write_snapshot(folder, snapshot)


@pytest.mark.parametrize("changes", [{}, {"optimizer": "muon", "ema_decay": 0.9}], ids=["adamw", "muon and average"])
def test_what_is_written_comes_back(tmp_path: Path, changes: dict[str, Any]) -> None:
    old, new = _trained(**changes), learner(start_ranks(1, None, 1), **changes)
    torch.manual_seed(5)
    path = _save(tmp_path, old)
    expected = torch.rand(3)
    files = ["draft.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"]
    assert sorted(p.name for p in path.iterdir()) == ["average.safetensors"] * ("ema_decay" in changes) + files
    assert load_checkpoint(path, new, FINGERPRINT) == STATE
    assert torch.equal(torch.rand(3), expected)
    for a, b in zip(old.draft.parameters(), new.draft.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a.grad is not None
        b.grad = a.grad.clone()
    for learning in (old, new):
        _step(learning)
    for a, b in zip(old.draft.parameters(), new.draft.parameters(), strict=True):
        assert torch.equal(a, b)
    for a, b in zip(old.evaluated().parameters(), new.evaluated().parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(old.evaluated().fc.weight, old.draft.fc.weight) == (not changes)


def test_a_snapshot_is_of_its_moment(tmp_path: Path) -> None:
    learning = _trained(ema_decay=0.9)
    snapshot = take_snapshot(learning, STATE, FINGERPRINT)
    before = learning.draft.fc.weight.detach().clone()
    _step(learning)
    assert snapshot is not None
    path = write_snapshot(tmp_path, snapshot)
    assert torch.equal(load_file(path / "draft.safetensors")["fc.weight"], before)
    assert not torch.equal(before, learning.draft.fc.weight)


def test_only_the_draft_is_in_it_and_all_of_it_is_float32(tmp_path: Path) -> None:
    learning = _trained()
    path = _save(tmp_path, learning)
    weights, moments = load_file(path / "draft.safetensors"), load_file(path / "optimizer.safetensors")
    names = [name for name, _ in learning.draft.named_parameters()]
    assert sorted(weights) == sorted(names)
    assert sorted(moments) == sorted(f"{name}.{key}" for name in names for key in ("exp_avg", "exp_avg_sq", "step"))
    assert {tensor.dtype for tensor in [*weights.values(), *moments.values()]} == {torch.float32}
    frozen = {learning.bundle.embedding.shape, learning.bundle.head.shape}
    assert not frozen & {tensor.shape for tensor in weights.values()}


def test_another_run_is_refused_field_by_field(tmp_path: Path) -> None:
    learning = _trained()
    path = _save(tmp_path, learning)
    other = {"data": {"cache": "abd"}, "draft": {"block_size": 8, "target_layer_ids": (1, 3, 5)}, "seed": 0}
    with pytest.raises(CheckpointError) as error:
        load_checkpoint(path, learning, other)
    lines = str(error.value).splitlines()
    assert lines[1:3] == ["  data.cache: abc in the checkpoint, abd in this run", "  draft.block_size: 4 in the checkpoint, 8 in this run"]
    assert len(lines) == 4


@pytest.mark.parametrize("name", ["draft.safetensors", "optimizer.safetensors", "rng.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["short", "gone", "a bit flipped"])
def test_a_damaged_checkpoint_is_refused_by_the_name_of_the_file(tmp_path: Path, name: str, damage: str) -> None:
    learning = _trained()
    path = _save(tmp_path, learning)
    if damage == "gone":
        (path / name).unlink()
    elif damage == "short":
        data = (path / name).read_bytes()
        (path / name).write_bytes(data[: len(data) // 2])
    else:
        flipped = bytearray((path / name).read_bytes())
        flipped[flipped.index(b'"step": 3') + 8 if name == "state.json" else -3] ^= 1
        (path / name).write_bytes(flipped)
    with pytest.raises(
        CheckpointError, match=rf"{name} (cannot be read|is damaged).* Remove .*step_0000003 to go on from the checkpoint before"
    ):
        load_checkpoint(path, learning, FINGERPRINT)


def test_the_best_and_the_last_are_kept(tmp_path: Path) -> None:
    learning = _trained()
    for step, value in enumerate([1.1, 1.9, 1.4, 1.9, None, 1.2], start=1):
        state = replace(STATE, step=step, metrics={} if value is None else {"val_accept_len": value})
        _save(tmp_path, learning, state)
        prune(tmp_path, "val_accept_len", "max", 2)
    assert [p.name for p in checkpoints(tmp_path)] == ["step_0000002", "step_0000004", "step_0000006"]
    assert [p.name for p, _ in best_first(tmp_path, "val_accept_len", "max")] == ["step_0000002", "step_0000004", "step_0000006"]
    assert best_first(tmp_path, "val_accept_len", "min")[0][1] == 1.2
    prune(tmp_path, "val_accept_len", "max", 0)
    assert [p.name for p in checkpoints(tmp_path)] == ["step_0000006"]
    _save(tmp_path, learning, replace(STATE, step=7), final=True)
    _save(tmp_path, learning, replace(STATE, step=8))
    prune(tmp_path, "val_accept_len", "max", 0)
    assert [p.name for p in checkpoints(tmp_path)] == ["step_0000007", "step_0000008"]


def test_half_written_folders_are_no_checkpoints_and_go(tmp_path: Path) -> None:
    learning = _trained()
    path = _save(tmp_path, learning)
    for name in (".step_0000009.123-ab.tmp", "step_0000005"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "draft.safetensors").write_bytes(b"half")
    assert checkpoints(tmp_path) == [path]
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
    with safe_open(path / "draft.safetensors", "pt") as file:
        assert "fc.weight" in file.keys()  # noqa: SIM118


def test_a_disk_that_takes_no_more_is_one_error_and_leaves_the_older_checkpoint(tmp_path: Path) -> None:
    learning = _trained()
    path = _save(tmp_path, learning)
    before = {file.name: file.read_bytes() for file in path.iterdir()}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    saver = Saver(tmp_path, CheckpointSection(monitor="val_accept_len"), start_ranks(1, None, 1))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # the kernel refuses larger files as a full disk does
    try:
        with (
            pytest.raises(CheckpointError, match=r"step_0000004 cannot be written: .*\. The checkpoint before it, step_0000003, is whole"),
            saver,
        ):
            saver.save(take_snapshot(learning, replace(STATE, step=4), FINGERPRINT))
            saver.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {file.name: file.read_bytes() for file in path.iterdir()} == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_end_of_a_saver_waits_for_the_write_in_hand(tmp_path: Path) -> None:
    learning = _trained()
    with Saver(tmp_path, CheckpointSection(monitor="val_accept_len"), start_ranks(1, None, 1)) as saver:
        for step in (1, 2):
            saver.save(take_snapshot(learning, replace(STATE, step=step, metrics={"val_accept_len": 3.0 - step}), FINGERPRINT))
    assert [p.name for p in checkpoints(tmp_path)] == ["step_0000001", "step_0000002"]
    assert not saver.failed
