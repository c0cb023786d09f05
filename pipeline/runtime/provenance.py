"""What ran: kept beside a cache, a run or an export for the reader's benefit, and part of no identity."""

import importlib.metadata
import platform
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PACKAGES = (
    "accelerate",
    "dflash-pipeline",
    "numcodecs",
    "numpy",
    "pyarrow",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
    "zarr",
    "zstandard",
)


def provenance(config_yaml: str) -> dict[str, Any]:
    """argv, resolved configuration, versions (None for a package that is not installed), git state of the pipeline's
    checkout (None when it is installed from elsewhere), host and UTC time. JSON-ready."""
    return {
        "argv": list(sys.argv),
        "config": config_yaml,
        "git": _git_state(Path(__file__).resolve().parent),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git_state(folder: Path) -> dict[str, Any] | None:
    """Commit, and the tracked files that differ from it, of the checkout that holds `folder`."""
    # A virtual environment may lie inside some other project's checkout: only one that tracks this very file counts.
    if _git(folder, "ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    commit, changed = _git(folder, "rev-parse", "HEAD"), _git(folder, "status", "--porcelain", "--untracked-files=no")
    if commit is None or changed is None:
        return None
    return {"commit": commit.strip(), "changed": [line[3:] for line in changed.splitlines()]}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
