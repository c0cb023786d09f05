"""Short sweeps on a cache of the tiny target."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from optuna.trial import FrozenTrial

from pipeline.config.load import load_config
from pipeline.config.schema import Config
from pipeline.runtime.ranks import start_alone
from pipeline.sweep.ledger import Ledger
from pipeline.sweep.run import Launch, sweep
from tests.support.training import config

RATES = {"model.optim.lr": {"choice": [1e-3, 2e-3]}}
GRID = {**RATES, "model.draft.target_layer_ids": {"choice": [[4], [1, 4]]}}


def write_sweep(folder: Path, target: Path, chats: Path, cache: Path, section: dict[str, Any], **changes: Any) -> Path:
    """A configuration file in `folder`; the sweep lies in `folder/sweep`, the tokenised chats beside the cache."""
    wanted = {
        "data__cache": str(cache),
        "data__prepared_dir": str(cache.parent / "prepared"),
        "exp_manager__explicit_log_dir": str(folder / "sweep"),
        "trainer__val_check_interval": 4,
        "trainer__max_steps": 8,
        "sweep": section,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "sweep.yaml"
    file.write_text(yaml.safe_dump(config(folder, target, chats, **wanted).model_dump(mode="json", exclude_unset=True)))
    return file


def run_sweep(file: Path, *words: str) -> Config:
    """The sweep of a configuration file, in this process."""

    def config_of(more: Sequence[str]) -> Config:
        return load_config("train", str(file), [*words, *more])

    loaded = load_config("sweep", str(file), words)
    ranks, rank, processes = start_alone()
    sweep(loaded, Launch(ranks, rank, processes), config_of)
    return loaded


def trials_of(file: Path) -> list[FrozenTrial]:
    """What the ledger of a configuration file's sweep holds."""
    ledger = Ledger(load_config("sweep", str(file), []))
    try:
        return ledger.trials()
    finally:
        ledger.close()
