"""Sweeps that are killed, stopped, shared by several processes, or hold trials that cannot be."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import FrozenTrial

from pipeline.capture.run import capture
from pipeline.errors import CacheMismatchError, ConfigError
from pipeline.runtime.ranks import start_ranks
from pipeline.sweep.ledger import COMPLETE, FAIL, PRUNED, RUNNING, WAITING
from pipeline.train.checkpoint import checkpoints
from pipeline.train.watch import read_metrics
from tests.support.launch import REPOSITORY, accelerate_launch, kill_group, start
from tests.support.sweeps import GRID, RATES, run_sweep, trials_of, write_sweep
from tests.support.tiny import write_chats
from tests.support.training import config, repeatable

STAGE = str(REPOSITORY / "stages/sweep.py")


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", 20, seed=3)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, chats: Path) -> Path:
    folder = tmp_path_factory.mktemp("captured")
    capture(config(folder, tiny_target, chats, model__target__layer_ids=[1, 2, 4]), start_ranks(1, None, 1))
    return folder / "cache"


@pytest.fixture
def write(tmp_path: Path, tiny_target: Path, chats: Path, cache: Path) -> Callable[..., Path]:
    def make(section: dict[str, Any], name: str = "", **changes: Any) -> Path:
        return write_sweep(tmp_path / name, tiny_target, chats, cache, section, **changes)

    return make


def _run_of(file: Path, trial: FrozenTrial) -> Path:
    return Path(file.parent, "sweep", trial.user_attrs["folder"])


def _wait(what: Callable[[], bool], process: Any) -> None:
    """Until `what` holds, or the process has ended."""
    while process.poll() is None and not what():
        time.sleep(0.005)


@pytest.mark.slow
def test_kill_9_and_the_same_command_again(write: Callable[..., Path], tmp_path: Path) -> None:
    section = {"space": GRID, "side_by_side": 2}
    file, whole = write(section, "killed", trainer__max_steps=24), write(section, "whole", trainer__max_steps=24)
    run_sweep(whole)
    process = start([sys.executable, STAGE, str(file)], tmp_path / "log")
    try:
        second = file.parent / "sweep/trials/0002"
        _wait(lambda: any(line["step"] >= 6 for line in read_metrics(second)), process)
    finally:
        kill_group(process)
    before = trials_of(file)
    assert [trial.state for trial in before[:2]] == [COMPLETE, COMPLETE]
    assert all(trial.state in (RUNNING, COMPLETE) for trial in before[2:])  # COMPLETE only where the kill came too late
    finished = {path: path.stat().st_mtime_ns for trial in before[:2] for path in _run_of(file, trial).rglob("*") if path.is_file()}
    run_sweep(file)
    after, expected = trials_of(file), trials_of(whole)
    assert [trial.state for trial in after] == [COMPLETE] * 4
    assert all(path.stat().st_mtime_ns == at for path, at in finished.items() if path.name != ".lock")
    for trial, other in zip(after, expected, strict=True):
        run, same = _run_of(file, trial), _run_of(whole, other)
        assert (trial.params, trial.values, trial.intermediate_values) == (other.params, other.values, other.intermediate_values)
        assert repeatable(run) == repeatable(same)
        assert (run / "export/model.safetensors").read_bytes() == (same / "export/model.safetensors").read_bytes()
        assert trial.value == trial.user_attrs["metrics"]["val_accept_len"]


@pytest.mark.slow
def test_members_at_different_steps_go_on_exactly(write: Callable[..., Path]) -> None:
    """One trial has lost its newest checkpoint: those ahead of it wait."""
    section = {"space": GRID, "side_by_side": 4}
    file, whole = (write(section, name, trainer__max_steps=60) for name in ("killed", "whole"))
    run_sweep(whole)
    process = start([sys.executable, STAGE, str(file)], file.parent / "log")
    runs = [file.parent / f"sweep/trials/{number:04d}" for number in range(4)]
    try:
        _wait(lambda: all(any(line["step"] >= 9 for line in read_metrics(run)) for run in runs), process)
    finally:
        kill_group(process)
    newest = checkpoints(runs[1] / "checkpoints")[-1]
    assert newest.name < "step_0000060"
    shutil.rmtree(runs[1] / "checkpoints")
    run_sweep(file)
    for run in runs:
        same = whole.parent / "sweep/trials" / run.name
        assert repeatable(run) == repeatable(same)
        assert (run / "export/model.safetensors").read_bytes() == (same / "export/model.safetensors").read_bytes()


@pytest.mark.slow
def test_trials_that_cannot_be_are_recorded_and_the_rest_go_on(write: Callable[..., Path]) -> None:
    space = {
        "model.draft.mask_token_id": {"choice": [511, 1]},  # 1 occurs in the corpus
        "model.optim.lr": {"choice": [2e-3, 1e30]},  # the loss is soon not finite
        "model.draft.block_size": {"choice": [4, 90]},  # no sample holds such a block
    }
    file = write({"space": space, "side_by_side": 8}, model__optim__sched={"warmup_steps": 0})
    run_sweep(file)
    errors = {tuple(t.params[name] for name in space): t.user_attrs.get("error", "") for t in trials_of(file)}
    assert {t.state for t in trials_of(file)} == {COMPLETE, FAIL}
    assert errors[(511, 2e-3, 4)] == ""
    assert "not finite" in errors[(511, 1e30, 4)]
    assert all("mask_token_id 1 occurs in the corpus" in errors[(1, rate, 4)] for rate in (2e-3, 1e30))
    assert all("without a usable anchor" in errors[(mask, rate, 90)] for mask in (511, 1) for rate in (2e-3, 1e30))
    before = [t.datetime_complete for t in trials_of(file)]
    run_sweep(file)
    assert [t.datetime_complete for t in trials_of(file)] == before


@pytest.mark.slow
def test_sigterm_ends_a_sweep_in_good_order(write: Callable[..., Path], tmp_path: Path) -> None:
    file, whole = (write({"space": RATES}, name, trainer__max_steps=40) for name in ("stopped", "whole"))
    run_sweep(whole)
    process = start([sys.executable, STAGE, str(file)], tmp_path / "log")
    _wait(lambda: any(line["step"] >= 6 for line in read_metrics(file.parent / "sweep/trials/0000")), process)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(60) in (143, 0)
    run_sweep(file)
    for number in range(2):
        runs = [f.parent / f"sweep/trials/{number:04d}" for f in (file, whole)]
        assert repeatable(runs[0]) == repeatable(runs[1])


@pytest.mark.slow
def test_processes_share_a_sweep(write: Callable[..., Path], tmp_path: Path) -> None:
    """Two of one launch, and one that was started besides."""
    file = write({"space": GRID, "seeds": [0, 1]})
    other = start([sys.executable, STAGE, str(file)], tmp_path / "other")
    try:
        launched = accelerate_launch("stages/sweep.py", str(file))
        assert other.wait(120) == 0, (tmp_path / "other").read_text()
    finally:
        kill_group(other)
    assert launched.ok
    assert [trial.state for trial in trials_of(file)] == [COMPLETE] * 8
    taken = [json.loads(path.read_text())["trials"] for path in (file.parent / "sweep/groups").iterdir()]
    assert sorted(number for group in taken for number in group) == list(range(8))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sampler", "pruner"), [("random", "median"), ("tpe", "successive_halving"), ("qmc", "none"), ("cmaes", "none"), ("gp", "none")]
)
def test_samplers_and_pruners(write: Callable[..., Path], tmp_path: Path, sampler: str, pruner: str) -> None:
    """With a journal file as the ledger. Settings are paired by seed; more trials than before continue the sweep."""
    space = {"model.optim.lr": {"log_uniform": [1e-5, 1e-2]}, "model.draft.num_hidden_layers": {"integers": [1, 2]}}
    section = {
        "space": space,
        "sampler": sampler,
        "pruner": pruner,
        "trials": 4,
        "seeds": [0, 1],
        "storage": str(tmp_path / "journal.log"),
    }
    file = write(section, trainer__val_check_interval=2)
    run_sweep(file, "sweep.trials=2")
    first = {t.number: t.params for t in trials_of(file) if t.state != WAITING}
    run_sweep(file)
    trials = [trial for trial in trials_of(file) if trial.state != WAITING]
    assert {t.number: t.params for t in trials if t.number in first} == first
    assert len(trials) == 4
    assert {t.state for t in trials} <= {COMPLETE, PRUNED}
    by_seed = {seed: [t.params for t in trials if t.user_attrs["seed"] == seed] for seed in (0, 1)}
    assert len(by_seed[0]) == 2
    assert all(params in by_seed[0] for params in by_seed[1])
    assert all(set(t.intermediate_values) <= {2, 4, 6, 8} for t in trials)


@pytest.mark.slow
def test_a_missing_layer_is_told_before_anything_is_trained(write: Callable[..., Path]) -> None:
    file = write({"space": {"model.draft.target_layer_ids": {"choice": [[4], [3, 4]]}}})
    with pytest.raises(CacheMismatchError, match=r"needs \[3\] as well(.|\n)*stages/cache.py append"):
        run_sweep(file)
    assert not (file.parent / "sweep/trials").exists()


@pytest.mark.slow
def test_another_sweep_is_refused(write: Callable[..., Path]) -> None:
    file = write({"space": RATES})
    run_sweep(file, "trainer.max_steps=2")
    with pytest.raises(ConfigError, match=r"trainer\.max_steps: 2, now 8"):
        run_sweep(file)
