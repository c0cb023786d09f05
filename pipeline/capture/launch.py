"""What the ranks of one launch tell one another: small files in a folder of the launch, never collectives.

Ranks reach the points where they meet minutes or hours apart (one tokenises, one loads from a slow disk), and a collective that is
waited for so long is killed by its time limit. A rank that fails leaves its reason here, and whoever waits ends with it.
"""

import json
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeline.errors import PeerFailedError
from pipeline.runtime.files import wait_for, write_json
from pipeline.runtime.ranks import Ranks

STALE_SECONDS = 3600


class Launch:
    """The meeting place of this launch's ranks, under the folder that they write together. `token` is the launch's own."""

    def __init__(self, root: Path, ranks: Ranks) -> None:
        self.token = _shared_token(ranks)
        self.folder = root / ".launch" / self.token
        self._rank, self._alone = ranks.rank, ranks.world_size == 1

    def tell(self, name: str, value: Any) -> None:
        """Make `value` (JSON) known to all ranks under `name`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(self.folder / f"{name}.json", value)

    def hear(self, name: str, what: str) -> Any:
        """Wait for what another rank tells under `name`. Raises `PeerFailedError` with its reason when a rank has failed instead."""
        path = self.folder / f"{name}.json"
        wait_for(path, what, self._gave_up)
        return json.loads(path.read_bytes())

    def take(self, name: str, what: str) -> Any:
        """As `hear`, for what concerns this rank alone: the file is removed."""
        value = self.hear(name, what)
        (self.folder / f"{name}.json").unlink()
        return value

    @contextmanager
    def failures_told(self) -> Iterator[None]:
        """Leave the reason where others find it when this rank fails; if another one failed before, end with that one's."""
        try:
            yield
        except Exception as error:
            if reason := self._failed_elsewhere():
                raise PeerFailedError(reason) from error
            if self._alone:
                self.end()
                raise
            with suppress(OSError):  # of the two errors, the first is to be seen
                self.tell(f"failed-{self._rank}", str(error) or type(error).__name__)
            raise

    def end(self) -> None:
        """Remove the folder, and those that killed launches left long ago."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for other in self.folder.parent.glob("*"):
            if time.time() - other.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(other, ignore_errors=True)
        with suppress(OSError):  # not empty: another launch has been refused in this moment
            self.folder.parent.rmdir()

    def _gave_up(self) -> str | None:
        if reason := self._failed_elsewhere():
            raise PeerFailedError(reason)
        return None

    def _failed_elsewhere(self) -> str | None:
        for path in sorted(self.folder.glob("failed-*.json")):
            rank = path.stem.removeprefix("failed-")
            if rank != str(self._rank):
                return f"stopped, because rank {rank} failed: {json.loads(path.read_bytes())}"
        return None


def _shared_token(ranks: Ranks) -> str:
    """A word that no other launch has. The one collective of capture's own: all ranks have just started when they take part."""
    token = [secrets.token_hex(6)]
    if ranks.world_size > 1:
        dist.broadcast_object_list(token, src=0, device=ranks.device)
    return token[0]
