"""Where the ledger of a sweep is kept: `sweep.storage`."""

import re
from pathlib import Path

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend

from pipeline.config.schema import Config
from pipeline.errors import ConfigError

LEDGER = "study.db"
"""In LOG_DIR, unless `sweep.storage` names another."""


def without_ledger(config: Config) -> Path | None:
    """The file that the ledger should be in, where it is in a file and that is missing: opening it would begin a new one."""
    where = config.sweep.storage or f"sqlite:///{Path(config.log_dir) / LEDGER}"
    name = where if "://" not in where else where.removeprefix("sqlite:///") if where.startswith("sqlite:///") else None
    return None if name is None or Path(name).exists() else Path(name)


def open_storage(where: str | None, folder: Path) -> BaseStorage:
    """The storage that `sweep.storage` names, for a sweep in `folder`. Raises `ConfigError` when it cannot be opened."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        if where is not None and "://" not in where:
            return JournalStorage(JournalFileBackend(where))
        url = where or f"sqlite:///{folder / LEDGER}"
        # Writers of one SQLite file wait for each other.
        return RDBStorage(url, engine_kwargs={"connect_args": {"timeout": 120}} if url.startswith("sqlite") else None)
    except Exception as error:  # the database's own driver has its own errors
        told = without_password(f"{where or folder / LEDGER} cannot be opened: {error}")
        raise ConfigError(f"sweep.storage: {told}") from error


def without_password(text: str) -> str:
    """`text` with the passwords of URLs in it as ***: it goes to where more people read than may open the database."""
    return re.sub(r"(://[^:/@\s]*:)[^@\s]+@", r"\1***@", text)
