"""A small corpus of chats captured once, and what it was captured from."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.capture.run import capture
from pipeline.config.schema import Config
from tests.support.tiny import write_chats
from tests.unit.target.conftest import lone_rank

Make = Callable[..., Config]


def capture_config(target: Path, folder: Path, **changes: Any) -> Config:
    """A run on `folder/chats.jsonl` into `folder/cache`; `changes` are fields by dotted name, with `__` for the dots."""
    values: dict[str, Any] = {
        "name": "toy",
        "model": {"target": {"path": str(target), "dtype": "float32"}, "draft": {"num_hidden_layers": 3}},
        "data": {
            "prepared_dir": str(folder / "prepared"),
            "num_proc": 1,
            "train_ds": {"input_cfg": [{"path": str(folder / "chats.jsonl")}]},
            "validation_ds": {"fraction": 0.2},
        },
        "capture": {"path": str(folder / "cache"), "shard_tokens": 1500, "batch_tokens": 600},
        "exp_manager": {"explicit_log_dir": str(folder / "run")},
    }
    for name, value in changes.items():
        *sections, field = name.split("__")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
        place[field] = value
    return Config.model_validate(values)


@pytest.fixture(scope="session")
def captured(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with chats.jsonl, prepared/ and a complete cache/. Read it, never write into it."""
    folder = tmp_path_factory.mktemp("captured")
    write_chats(folder / "chats.jsonl", 40)
    capture(capture_config(tiny_target, folder), lone_rank())
    return folder


@pytest.fixture
def copied(captured: Path, tmp_path: Path) -> Path:
    """A copy of `captured` in another place."""
    return Path(shutil.copytree(captured, tmp_path / "copied"))
