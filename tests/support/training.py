"""Configurations of short trainings on the tiny target, and what of a run must repeat exactly."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.config.schema import Config
from pipeline.train.checkpoint import checkpoints
from pipeline.train.watch import read_metrics
from tests.support.tiny import MASK_TOKEN_ID

TIMES = ("tokens_per_second", "data_wait_share")


def config(folder: Path, target: Path, chats: Path, **changes: Any) -> Config:
    """A draft of two layers and blocks of 4, float32, on `chats`; dotted names with `__` change fields, as in `trainer__max_steps=3`.

    Everything is written below `folder`, except the cache when `data__cache` names one.
    """
    values: dict[str, Any] = {
        "name": "test",
        "model": {
            "target": {"path": str(target), "dtype": "float32"},
            "draft": {"num_hidden_layers": 2, "block_size": 4, "mask_token_id": MASK_TOKEN_ID},
            "objective": {"num_anchors": 8, "gamma": 2.0},
            "optim": {"lr": 2e-3, "weight_decay": 0.01},
        },
        "data": {
            "prepared_dir": str(folder / "prepared"),
            "train_ds": {"input_cfg": [{"path": str(chats)}], "global_batch_size": 4},
            "validation_ds": {"fraction": 0.1},
            "max_tokens": 96,
            "num_proc": 1,
            "num_workers": 0,
        },
        "capture": {"path": str(folder / "cache"), "shard_tokens": 2048, "batch_tokens": 512},
        "trainer": {"max_steps": 12, "log_every_n_steps": 1},
        "exp_manager": {"explicit_log_dir": str(folder / "run")},
    }
    for name, value in changes.items():
        *path, last = name.split("__")
        section = values
        for part in path:
            section = section.setdefault(part, {})
        section[last] = value
    return Config.model_validate(values)


def repeatable(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics without the figures that are times."""
    return [{name: value for name, value in record.items() if name not in TIMES} for record in read_metrics(folder)]


def after_line(folder: Path, step: int, act: Callable[[], None]) -> threading.Thread:
    """Call `act` once the run in `folder` has written a line for `step`."""

    def watch() -> None:
        while all(record["step"] < step for record in read_metrics(folder / "run")):
            time.sleep(0.001)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def newest(folder: Path) -> Path:
    """The newest checkpoint of the run in `folder`."""
    return checkpoints(folder / "run" / "checkpoints")[-1]


def sigterm_to_self() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
