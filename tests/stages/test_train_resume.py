"""A run that was stopped, killed, or moved to another number of ranks is the run that was not."""

import json
import logging
import multiprocessing
import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pipeline.config.schema import Config
from pipeline.errors import CacheLockedError, CheckpointError, DraftError
from pipeline.records import CapturedSample
from pipeline.runtime.files import FolderLock
from pipeline.runtime.ranks import start_ranks
from pipeline.train.data import training_order
from pipeline.train.loop import steps_to_the_end, train
from pipeline.train.modes import open_data
from pipeline.train.run import start_training
from tests.support.launch import spawn_ranks
from tests.support.tiny import write_chats
from tests.support.training import after_line, config, newest, repeatable, sigterm_to_self

STEPS = 16  # of several epochs


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", 24, seed=2)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, chats: Path) -> Path:
    """The run without an interruption."""
    folder = tmp_path_factory.mktemp("whole")
    assert _run(folder, tiny_target, chats)
    return folder


@pytest.fixture
def harmless_sigterm() -> Iterator[None]:
    """A signal that comes after the run is over must not end the tests."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    yield
    signal.signal(signal.SIGTERM, before)


def _run(folder: Path, target: Path, chats: Path, **changes: Any) -> bool:
    return train(_config(folder, target, chats, **changes), start_ranks(1, None, 1))


def _config(folder: Path, target: Path, chats: Path, **changes: Any) -> Config:
    """Online, so that no cache has to be captured first; checkpoints and validations, of a few samples, fall on different steps."""
    wanted = {
        "data__mode": "online",
        "data__validation_ds": {"fraction": 0.25},
        "trainer__max_steps": STEPS,
        "trainer__val_check_interval": 7,
        **changes,
    }
    wanted |= {"exp_manager__checkpoint_callback_params": {"every_n_train_steps": 3, "save_top_k": 0}}
    return config(folder, target, chats, **wanted)


def _same_run(folder: Path, whole: Path) -> None:
    assert repeatable(folder / "run") == repeatable(whole / "run")
    assert any("val_loss" in record for record in repeatable(whole / "run"))
    for name in ("draft.safetensors", "optimizer.safetensors"):
        assert (newest(folder) / name).read_bytes() == (newest(whole) / name).read_bytes()
    assert (folder / "run/export/model.safetensors").read_bytes() == (whole / "run/export/model.safetensors").read_bytes()


@pytest.mark.usefixtures("harmless_sigterm")
def test_sigterm_writes_a_checkpoint_and_the_same_command_goes_on(tmp_path: Path, whole: Path, tiny_target: Path, chats: Path) -> None:
    for step in (3, 8):
        thread = after_line(tmp_path, step, sigterm_to_self)
        assert not _run(tmp_path, tiny_target, chats)
        thread.join()
        assert step <= int(newest(tmp_path).name.removeprefix("step_")) < STEPS
        assert not (tmp_path / "run" / "export").exists()
    assert _run(tmp_path, tiny_target, chats)
    _same_run(tmp_path, whole)


@pytest.mark.usefixtures("harmless_sigterm")
def test_sigterm_inside_a_validation_ends_it_and_does_not_lose_it(tmp_path: Path, whole: Path, tiny_target: Path, chats: Path) -> None:
    """It comes with the first sample that is read for the validation at step 7, and no further one is read."""
    wanted = _config(tmp_path, tiny_target, chats)
    ranks = start_ranks(1, None, 1)
    read: list[int] = []
    with open_data(wanted, ranks) as data:

        def source(numbers: Sequence[int]) -> list[CapturedSample]:
            if data.split[numbers[0]] != "train":
                read.append(numbers[0])
                sigterm_to_self()
            return data.source(numbers)

        folder = Path(wanted.log_dir)
        folder.mkdir()
        training = start_training(wanted, ranks, replace(data, source=source), training_order(data, wanted), folder)
        with training.saver, training.watch:
            assert not steps_to_the_end(training)
    assert len(read) == 1
    assert sum(data.split != "train") > 1
    stopped = json.loads((newest(tmp_path) / "state.json").read_text())
    assert (stopped["step"], stopped["metrics"]) == (7, {})
    assert _run(tmp_path, tiny_target, chats)
    _same_run(tmp_path, whole)


@pytest.mark.usefixtures("harmless_sigterm")
def test_sigterm_at_a_validation_puts_it_off_and_does_not_lose_it(tmp_path: Path, whole: Path, tiny_target: Path, chats: Path) -> None:
    """Validations at every step, so that the stop falls on one."""
    for folder, step in ((tmp_path / "stopped", 4), (tmp_path / "whole", None)):
        if step is not None:
            after_line(folder, step, sigterm_to_self)
            assert not _run(folder, tiny_target, chats, trainer__val_check_interval=1)
            stopped = json.loads((newest(folder) / "state.json").read_text())
            assert stopped["metrics"] == {}
        assert _run(folder, tiny_target, chats, trainer__val_check_interval=1)
    _same_run(tmp_path / "stopped", tmp_path / "whole")


@pytest.mark.slow
def test_kill_9_loses_only_the_steps_since_the_checkpoint(tmp_path: Path, whole: Path, tiny_target: Path, chats: Path) -> None:
    for step in (5, 11):
        child = multiprocessing.get_context("spawn").Process(target=_run, args=(tmp_path, tiny_target, chats))
        child.start()
        after_line(tmp_path, step, child.kill).join(60)
        child.join(10)
        assert child.exitcode == -signal.SIGKILL
        assert int(newest(tmp_path).name.removeprefix("step_")) < STEPS
    (tmp_path / "run" / "checkpoints" / ".step_0000012.1-ab.tmp").mkdir()
    with open(tmp_path / "run" / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 99, "lo')
    assert _run(tmp_path, tiny_target, chats)
    _same_run(tmp_path, whole)
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))


def _stopped_on_two(rank: int, world_size: int, folder: Path, target: Path, chats: Path) -> bool:
    if rank == 1:  # the rank that is told is not the one that writes
        after_line(folder, 7, sigterm_to_self)
    return _run(folder, target, chats)


@pytest.mark.slow
def test_two_ranks_go_on_as_one_with_the_same_samples(tmp_path: Path, whole: Path, tiny_target: Path, chats: Path) -> None:
    assert spawn_ranks(_stopped_on_two, 2, tmp_path, tiny_target, chats, timeout=120) == [False, False]
    assert _run(tmp_path, tiny_target, chats)
    for found, expected in zip(repeatable(tmp_path / "run"), repeatable(whole / "run"), strict=True):
        assert found.keys() == expected.keys()
        for name in ("step", "epoch", "lr", "samples_seen", "tokens_seen"):
            assert found.get(name) == expected.get(name)
        for name in ("loss", "val_loss"):
            assert found.get(name, 0.0) == pytest.approx(expected.get(name, 0.0), rel=1e-4)


def test_a_finished_run_says_the_same_again(whole: Path, tiny_target: Path, chats: Path) -> None:
    before, export = repeatable(whole / "run"), (whole / "run/export/model.safetensors").read_bytes()
    assert _run(whole, tiny_target, chats)
    assert repeatable(whole / "run") == before
    assert (whole / "run/export/model.safetensors").read_bytes() == export


def test_fewer_steps_than_are_done_are_pointed_out(whole: Path, tiny_target: Path, chats: Path, caplog: pytest.LogCaptureFixture) -> None:
    before, export = repeatable(whole / "run"), (whole / "run/export/model.safetensors").read_bytes()
    with caplog.at_level(logging.WARNING):
        assert _run(whole, tiny_target, chats, trainer__max_steps=STEPS - 3)
    assert f"the newest checkpoint is at step {STEPS}, beyond the end asked for" in caplog.text
    assert (repeatable(whole / "run"), (whole / "run/export/model.safetensors").read_bytes()) == (before, export)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model__draft__mask_token_id": 510}, "draft.mask_token_id: 511 in the checkpoint, 510 in this run"),
        ({"model__draft__block_size": 5}, "draft.block_size: 4 in the checkpoint, 5 in this run"),
        ({"model__draft__target_layer_ids": [2, 4]}, r"draft.target_layer_ids: \[1, 5\] in the checkpoint, \[2, 4\] in this run"),
        ({"model__objective__gamma": 3.0}, "objective.gamma: 2.0 in the checkpoint, 3.0 in this run"),
        ({"trainer__seed": 1}, "seed: 0 in the checkpoint, 1 in this run"),
        ({"model__optim__name": "muon"}, "optimizer: adamw in the checkpoint, muon in this run"),
        ({"trainer__ema_decay": 0.9}, "ema_decay: None in the checkpoint, 0.9 in this run"),
        ({"model__freeze_params": ["^fc"]}, r"frozen: \[\] in the checkpoint, \['fc.weight'\] in this run"),
        ({"data__max_tokens": 80}, "data.corpus: "),
    ],
)
def test_other_settings_are_refused(whole: Path, tiny_target: Path, chats: Path, changes: dict[str, Any], field: str) -> None:
    before = repeatable(whole / "run")
    with pytest.raises(CheckpointError, match=field):
        _run(whole, tiny_target, chats, **changes)
    assert repeatable(whole / "run") == before


def test_what_may_change_may_change(whole: Path, tiny_target: Path, chats: Path) -> None:
    assert _run(whole, tiny_target, chats, model__optim__lr=1e-3, trainer__accumulate_grad_batches=2, trainer__log_every_n_steps=3)


def test_a_folder_is_one_runs(whole: Path, tiny_target: Path, chats: Path) -> None:
    with pytest.raises(CheckpointError, match="resume_if_exists is false"):
        _run(whole, tiny_target, chats, exp_manager__resume_if_exists=False)
    with FolderLock(whole / "run"), pytest.raises(CacheLockedError, match=f"process {os.getpid()}"):
        _run(whole, tiny_target, chats)


def test_the_target_is_in_no_checkpoint(whole: Path, tiny_target: Path) -> None:
    names = set(load_file(newest(whole) / "draft.safetensors"))
    assert not names & set(load_file(tiny_target / "model.safetensors")) - {n for n in names if n.startswith("layers.")}
    assert {name.split(".")[0] for name in names} == {"fc", "hidden_norm", "norm", "layers"}
    assert json.loads((newest(whole) / "state.json").read_text())["step"] == STEPS


def test_a_mask_token_that_the_corpus_holds_is_refused(tmp_path: Path, tiny_target: Path, chats: Path) -> None:
    with pytest.raises(DraftError, match="mask_token_id 1 occurs in the corpus"):
        _run(tmp_path, tiny_target, chats, model__draft__mask_token_id=1)
    with pytest.raises(DraftError, match="eos token"):
        _run(tmp_path, tiny_target, chats, model__draft__mask_token_id=2)
