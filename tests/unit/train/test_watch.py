import importlib.util
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config.schema import Config
from pipeline.config.training import ExpManagerSection
from pipeline.draft.batch import BatchShape
from pipeline.errors import ConfigError, TrainingError
from pipeline.train.feed import Feed
from pipeline.train.watch import Clock, Watch, check_trackers, read_metrics


def _config(**exp_manager: Any) -> Config:
    return Config.model_validate({"name": "a run", "exp_manager": exp_manager})


def test_a_tracker_that_is_not_installed_is_an_error_that_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    check_trackers(ExpManagerSection())
    found = importlib.util.find_spec
    monkeypatch.setattr("pipeline.train.watch.find_spec", lambda name: None if name in ("wandb", "trackio") else found(name))
    check_trackers(ExpManagerSection(create_tensorboard_logger=True))
    with pytest.raises(
        ConfigError, match=r"create_wandb_logger, exp_manager\.create_trackio_logger: true, .*: pip install wandb trackio\."
    ):
        check_trackers(ExpManagerSection(create_wandb_logger=True, create_trackio_logger=True, create_tensorboard_logger=True))


def test_lines_are_kept_and_figures_go_to_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Watch(_config(create_tensorboard_logger=True), tmp_path, 10, enabled=True) as watch:
        watch.record(1, {"loss": 2.5, "accuracy_by_slot": [0.5, None]})
        watch.record(2, {"loss": 2.0})
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.5, "accuracy_by_slot": [0.5, None]}, {"step": 2, "loss": 2.0}]
    events = EventAccumulator(str(tmp_path / "tensorboard" / "a run")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 2.5), (2, 2.0)]


def test_a_tracker_that_does_not_start_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("no folder")
    with pytest.raises(
        ConfigError, match=r"create_tensorboard_logger is true, and tensorboard does not start: .*Mend that, or set it to false"
    ):
        Watch(_config(create_tensorboard_logger=True), tmp_path, 10, enabled=True)


def test_other_ranks_open_nothing(tmp_path: Path) -> None:
    with Watch(_config(create_tensorboard_logger=True), tmp_path, 10, enabled=False):
        pass
    assert not list(tmp_path.iterdir())


def test_a_line_that_the_disk_does_not_take_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with Watch(_config(), tmp_path, 10, enabled=True) as watch, pytest.raises(TrainingError, match=r"metrics\.jsonl cannot be written"):
        watch.record(1, {"loss": 2.5})


def test_tokens_of_a_line_are_those_of_the_time_that_it_counts() -> None:
    """A run that goes on in the middle of a line has the sums of the steps before, and not their time."""
    feed = Feed(lambda numbers: [], lambda tokens, cycle: np.zeros(0, np.int64), BatchShape((1,), 4, 8, torch.float32), 0)
    clock = Clock(feed, tokens_seen=800)
    assert clock.read(1000)[2] == 200
    assert clock.read(2000)[2] == 1000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of wandb's own packages
def test_wandb_offline_keeps_the_run_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = _config(create_wandb_logger=True, wandb_logger_kwargs={"project": "drafts"})
    with Watch(config, tmp_path, 10, enabled=True) as watch:
        watch.record(1, {"loss": 2.5})
        watch.record(2, {"val_loss": 2.0})
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (log,) = run.glob("run-*.wandb")
    end = time.monotonic() + 60  # its own process writes, and may be behind
    while not all(word in log.read_bytes() for word in (b"drafts", b"a run", b"val_loss")):
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of trackio's own packages
def test_trackio_keeps_the_run_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in `dev`: it needs an older pillow than the one that is pinned there."""
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))  # which it reads when it is imported
    pytest.importorskip("trackio")
    with Watch(_config(create_trackio_logger=True), tmp_path, 10, enabled=True) as watch:
        watch.record(1, {"loss": 2.5})
    with closing(sqlite3.connect(tmp_path / "dflash.db")) as database:
        assert database.execute("select run_name, step, json_extract(metrics, '$.loss') from metrics").fetchall() == [("a run", 1, 2.5)]
