"""Faults that are not a trial's own, and folders and ledgers that do not belong together."""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.capture.run import capture
from pipeline.config.load import load_config
from pipeline.errors import CheckpointError, ConfigError, DiskError
from pipeline.runtime.ranks import start_ranks
from pipeline.sweep import run as sweep_run
from pipeline.sweep.claim import Claims
from pipeline.sweep.ledger import COMPLETE, FAIL, RUNNING, Ledger
from pipeline.sweep.reading import Readings
from pipeline.train import evaluate
from pipeline.train.checkpoint import checkpoints
from pipeline.train.run import start_training
from tests.support.launch import REPOSITORY, kill_group, start
from tests.support.sweeps import GRID, RATES, run_sweep, trials_of, write_sweep
from tests.support.tiny import write_chats
from tests.support.training import config, repeatable

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def write(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Callable[..., Path]:
    """Makes the configuration file of a sweep, in a folder of its own."""
    folder = tmp_path_factory.mktemp("captured")
    chats = write_chats(folder / "chats.jsonl", 20, seed=3)
    capture(config(folder, tiny_target, chats, model__target__layer_ids=[1, 2, 4]), start_ranks(1, None, 1))

    def make(section: dict[str, Any], **changes: Any) -> Path:
        return write_sweep(tmp_path_factory.mktemp("sweep"), tiny_target, chats, folder / "cache", section, **changes)

    return make


def _begun(file: Path) -> Ledger:
    """The ledger of a sweep that has trained nothing yet."""
    base = load_config("sweep", str(file), [])
    Path(base.log_dir).mkdir()
    ledger = Ledger(base)
    ledger.check_folder()
    return ledger


def test_the_folder_of_another_sweep_is_refused(write: Callable[..., Path]) -> None:
    """Its trials would go on from checkpoints that are none of theirs: a learning rate is in no checkpoint's fingerprint."""
    file = write({"space": RATES})
    run_sweep(file)
    folder = file.parent / "sweep"
    before = [repeatable(run) for run in sorted((folder / "trials").iterdir())]
    with pytest.raises(ConfigError, match="do not belong together"):
        run_sweep(file, "name=other", "sweep.space={model.optim.lr: {choice: [3.0e-3]}}")
    (folder / "study.db").unlink()
    with pytest.raises(ConfigError, match="do not belong together"):
        run_sweep(file)
    assert [repeatable(run) for run in sorted((folder / "trials").iterdir())] == before


def test_a_ledger_whose_trials_are_elsewhere_is_refused(write: Callable[..., Path], tmp_path: Path) -> None:
    """Its locks would not be seen, and what others train be taken for left behind."""
    section = {"space": RATES, "storage": f"sqlite:///{tmp_path}/shared.db"}
    run_sweep(write(section))
    with pytest.raises(ConfigError, match="do not belong together"):
        run_sweep(write(section))


@pytest.mark.parametrize(("name", "block"), [("metrics.jsonl", Path.mkdir), ("export", Path.touch)])
def test_a_fault_of_the_disk_ends_no_trial(write: Callable[..., Path], name: str, block: Callable[[Path], None]) -> None:
    """At the start, or at the end, of the second."""
    file = write({"space": RATES})
    _begun(file).close()
    second = file.parent / "sweep/trials/0001"
    second.mkdir(parents=True)
    block(second / name)
    with pytest.raises(DiskError, match="cannot be written"):
        run_sweep(file)
    assert FAIL not in [trial.state for trial in trials_of(file)]


def test_a_damaged_checkpoint_ends_no_trial(write: Callable[..., Path]) -> None:
    file = write({"space": RATES}, trainer__max_steps=400)
    process = start([sys.executable, str(REPOSITORY / "stages/sweep.py"), str(file)], file.parent / "log")
    trial = file.parent / "sweep/trials/0000"
    try:
        while process.poll() is None and not checkpoints(trial / "checkpoints"):
            time.sleep(0.005)
    finally:
        kill_group(process)
    newest = checkpoints(trial / "checkpoints")[-1]
    (newest / "draft.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is damaged"):
        run_sweep(file)
    assert [trial.state for trial in trials_of(file)] == [RUNNING] * 2


def test_a_metric_that_no_validation_gives_is_told_before_anything_is_trained(write: Callable[..., Path]) -> None:
    file = write({"space": RATES, "monitor": "val_served_accept_len"})
    with pytest.raises(ConfigError, match=r"sweep\.monitor is val_served_accept_len: trainer\.val_decode_prompts is 0"):
        run_sweep(file)
    assert not (file.parent / "sweep/trials").exists()


def test_a_process_whose_trials_failed_does_not_end_those_of_others(write: Callable[..., Path]) -> None:
    """It would: when one process of a launch fails, the launcher stops the others."""
    file = write({"space": {"model.optim.lr": {"choice": [2e-3, 1e30]}}, "side_by_side": 1}, model__optim__sched={"warmup_steps": 0})
    ledger = _begun(file)
    base, cpu = load_config("sweep", str(file), []), torch.device("cpu")
    other = Claims(base, ledger, Readings(None), lambda more: load_config("train", str(file), list(more)), cpu, None, 1)
    [theirs] = other.take_group()
    run_sweep(file)
    assert [trial.state for trial in trials_of(file)] == [RUNNING, FAIL]
    theirs.lock.__exit__(None, None, None)
    ledger.close()


def test_one_draft_that_cannot_be_validated_fails_alone(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    real = evaluate.score

    def score(draft: Any, *rest: Any) -> Any:
        if len(draft.config.target_layer_ids) == 2:
            raise RuntimeError("no kernel for two layers")
        return real(draft, *rest)

    monkeypatch.setattr(evaluate, "score", score)
    file = write({"space": GRID})
    run_sweep(file)
    trials = trials_of(file)
    assert {(len(t.params["model.draft.target_layer_ids"]), t.state) for t in trials} == {(len("[4]"), COMPLETE), (len("[1, 4]"), FAIL)}
    assert all("no kernel for two layers" in t.user_attrs["error"] for t in trials if t.state == FAIL)


def test_memory_that_lacks_at_the_start_puts_a_trial_back(write: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = start_training, list[int]()

    def starting(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("no memory")
        return real(*arguments)

    monkeypatch.setattr(sweep_run, "start_training", starting)
    file = write({"space": RATES})
    run_sweep(file)
    assert len(calls) == 3
    assert [trial.state for trial in trials_of(file)] == [COMPLETE] * 2
