"""Thirty steps are ten, SIGTERM, ten, kill -9, ten: the same weights and lines, whatever keeps state in between."""

import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.capture.run import capture
from pipeline.config.schema import Config
from pipeline.runtime.ranks import start_ranks
from pipeline.train.checkpoint import checkpoints
from pipeline.train.loop import train
from tests.support.launch import spawn_ranks
from tests.support.tiny import write_chats
from tests.support.training import after_line, config, newest, repeatable

pytestmark = pytest.mark.slow

STEPS = 30  # about 5 an epoch
HELD_OUT = {"data__validation_ds": {"fraction": 0.25}}
PLAIN: dict[str, Any] = {}
RICH: dict[str, Any] = {
    "model__optim": {"name": "muon", "lr": 2e-3, "weight_decay": 0.01, "sched": {"name": "wsd", "decay_ratio": 0.5}},
    "model__freeze_params": ["norm"],
    "model__prevent_freeze_params": [r"^norm\.", "hidden_norm"],
    "trainer__ema_decay": 0.9,
    "exp_manager__early_stopping": {"patience": 50},
    "data__num_workers": 2,
}
KINDS = pytest.mark.parametrize("kind", ["plain", "rich"])


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Iterator[tuple[Path, Path, Path]]:
    """Target, chats and the folder of a cache of them."""
    folder = tmp_path_factory.mktemp("given")
    chats = write_chats(folder / "chats.jsonl", 24, seed=2)
    capture(config(folder, tiny_target, chats, **HELD_OUT), start_ranks(1, None, 1))
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)  # one that comes after the run is over must not end the tests
    yield tiny_target, chats, folder
    signal.signal(signal.SIGTERM, before)


def _config(folder: Path, given: tuple[Path, Path, Path], kind: str) -> Config:
    target, chats, cached = given
    wanted = {"trainer__max_steps": STEPS, "trainer__val_check_interval": 2, "data__cache": str(cached / "cache"), **HELD_OUT}
    wanted |= {"exp_manager__checkpoint_callback_params": {"save_top_k": STEPS}}
    return config(folder, target, chats, **wanted, **(RICH if kind == "rich" else PLAIN))


def _run(folder: Path, given: tuple[Path, Path, Path], kind: str) -> bool:
    return train(_config(folder, given, kind), start_ranks(1, None, 1))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, given: tuple[Path, Path, Path]) -> dict[str, Path]:
    """The runs without an interruption, by kind."""
    folders = {}
    for kind in ("plain", "rich"):
        folders[kind] = tmp_path_factory.mktemp(kind)
        assert _run(folders[kind], given, kind)
    return folders


def _same(folder: Path, whole: Path) -> None:
    assert repeatable(folder / "run") == repeatable(whole / "run")
    assert [record["step"] for record in repeatable(folder / "run") if "lr" in record] == list(range(1, STEPS + 1))
    names = sorted(path.name for path in newest(whole).iterdir())
    assert sorted(path.name for path in newest(folder).iterdir()) == names
    for name in names:
        assert (newest(folder) / name).read_bytes() == (newest(whole) / name).read_bytes(), name
    assert (folder / "run/export/model.safetensors").read_bytes() == (whole / "run/export/model.safetensors").read_bytes()


@KINDS
def test_ten_then_sigterm_then_ten_then_kill_9_then_ten(
    tmp_path: Path, given: tuple[Path, Path, Path], whole: dict[str, Path], kind: str
) -> None:
    thread = after_line(tmp_path, 10, lambda: os.kill(os.getpid(), signal.SIGTERM))
    assert not _run(tmp_path, given, kind)
    thread.join()
    stopped = int(newest(tmp_path).name.removeprefix("step_"))
    assert 10 <= stopped < STEPS
    child = multiprocessing.get_context("spawn").Process(target=_run, args=(tmp_path, given, kind))
    child.start()
    after_line(tmp_path, max(20, stopped + 1), child.kill).join(60)
    child.join(10)
    assert child.exitcode == -signal.SIGKILL
    assert _run(tmp_path, given, kind)
    _same(tmp_path, whole[kind])


@KINDS
@pytest.mark.parametrize("ends", [True, False], ids=["at the end of an epoch", "inside one"])
def test_killed(tmp_path: Path, given: tuple[Path, Path, Path], whole: dict[str, Path], kind: str, ends: bool) -> None:
    """What a kill after some step leaves: its checkpoint, and lines of later steps."""
    epochs = {record["step"]: record["epoch"] for record in repeatable(whole[kind] / "run") if "lr" in record}
    step = next(step for step in range(8, STEPS, 2) if (epochs[step] > epochs[step - 1]) == ends)
    shutil.copytree(whole[kind] / "run", tmp_path / "run")
    for path in checkpoints(tmp_path / "run" / "checkpoints"):
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    assert int(newest(tmp_path).name.removeprefix("step_")) == step
    shutil.rmtree(tmp_path / "run" / "export")
    assert _run(tmp_path, given, kind)
    _same(tmp_path, whole[kind])


def test_what_is_frozen_stays_bit_by_bit(whole: dict[str, Path]) -> None:
    from safetensors.torch import load_file

    first, last = (
        load_file(path / "draft.safetensors") for path in (checkpoints(whole["rich"] / "run/checkpoints")[0], newest(whole["rich"]))
    )
    same = {name for name in first if first[name].equal(last[name])}
    assert same == {name for name in first if "norm" in name and name not in ("norm.weight", "hidden_norm.weight")}
    moments = load_file(newest(whole["rich"]) / "optimizer.safetensors")
    assert not [name for name in moments if name.rsplit(".", 1)[0] in same]
    assert {name.rsplit(".", 1)[1] for name in moments} == {"momentum_buffer", "exp_avg", "exp_avg_sq", "step"}
    average = load_file(newest(whole["rich"]) / "average.safetensors")
    exported = load_file(whole["rich"] / "run/export/model.safetensors")
    assert all(exported[name].equal(average[name]) for name in exported)
    assert not average["fc.weight"].equal(last["fc.weight"])


def _on_two(rank: int, world_size: int, folder: Path, given: tuple[Path, Path, Path]) -> bool:
    if rank == 1:  # the rank that is told is not the one that writes
        after_line(folder, 10, lambda: os.kill(os.getpid(), signal.SIGTERM))
    return _run(folder, given, "rich")


def test_two_ranks_go_on_as_one(tmp_path: Path, given: tuple[Path, Path, Path], whole: dict[str, Path]) -> None:
    assert spawn_ranks(_on_two, 2, tmp_path, given, timeout=120) == [False, False]
    assert _run(tmp_path, given, "rich")
    for found, expected in zip(repeatable(tmp_path / "run"), repeatable(whole["rich"] / "run"), strict=True):
        assert found.keys() == expected.keys()
        for name in ("step", "epoch", "lr", "samples_seen", "tokens_seen"):
            assert found.get(name) == expected.get(name)
        for name in ("loss", "val_loss"):  # Muon works in bfloat16 inside, which makes more of a rounding than AdamW does
            assert found.get(name, 0.0) == pytest.approx(expected.get(name, 0.0), rel=1e-3)
