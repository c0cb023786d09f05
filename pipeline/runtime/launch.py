"""What the ranks of one launch tell one another: small files in a folder of the launch, never collectives.

Ranks reach the points where they meet minutes or hours apart (one tokenises, one loads from a slow disk), and a collective that is
waited for so long is killed by its time limit. A rank that fails leaves its reason here, and whoever waits ends with it. Each rank
holds a lock for as long as it lives, so that one which was killed is noticed too; and a rank that is stuck where Python does
not run, in a collective whose other side is gone, is ended by a thread of its own. Any moment is a good one for that: what
is committed stays, and the rest is done again.
"""

import json
import logging
import os
import secrets
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from pipeline.errors import CacheError, LaunchError, PeerFailedError, PipelineError, StoppedError
from pipeline.runtime.files import FolderLock, lock_holder, wait_for, write_json
from pipeline.runtime.logs import log_to_file
from pipeline.runtime.ranks import Ranks

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
GRACE_SECONDS = 10.0
"""What a rank has to end in good order, once it is asked to or cannot go on."""
STALE_SECONDS = 60


class Launch:
    """The meeting place of this launch's ranks, under the folder that they write together. `token` is the launch's own."""

    def __init__(self, root: Path, ranks: Ranks) -> None:
        self.token = _shared_token(ranks)
        self.folder = root / ".launch" / self.token
        self.ranks = ranks
        self._sigterm = False
        self._end: PipelineError | None = None  # why this rank must end, once it must
        self._over = threading.Event()

    def tell(self, name: str, value: Any) -> None:
        """Make `value` (JSON) known to all ranks under `name`."""
        write_json(self.folder / f"{name}.json", value)

    def hear(self, name: str, what: str) -> Any:
        """Wait for what another rank tells under `name`. Raises as `check` when that is not to be expected any more."""
        path = self.folder / f"{name}.json"
        wait_for(path, what, self.check)
        return json.loads(path.read_bytes())

    def take(self, name: str, what: str) -> Any:
        """As `hear`, for what concerns this rank alone: the file is removed."""
        value = self.hear(name, what)
        (self.folder / f"{name}.json").unlink()
        return value

    def check(self) -> None:
        """To be called often. Raises `PeerFailedError` when another rank failed, `LaunchError` when one died and this one is the first
        to notice, `StoppedError` when the launch was stopped by SIGTERM."""
        if self._sigterm and self._end is None:
            self._end = self._look() or StoppedError("stopped by SIGTERM; what is committed stays, and the same command goes on from there")
        if self._end is not None:
            raise self._end

    @contextmanager
    def together(self) -> Iterator[None]:
        """All that the ranks do together. When this rank fails it leaves the reason where others find it; if another one failed before,
        it ends with that one's."""
        before = _on_sigterm(self._note_sigterm)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            alive = FolderLock(self.folder, f"alive-{self.ranks.rank}")
            alive.__enter__()
        except OSError as error:
            raise CacheError(f"{self.folder} cannot be made: {error}. Free disk space or mend its path, then run again.") from error
        watch = threading.Thread(target=self._watch, name="watch", daemon=True)
        try:
            if self.ranks.world_size > 1:
                _meet(self.ranks)  # from here on, a rank without its lock is one that has ended
            watch.start()
            yield
        except Exception as error:
            ending = self._ending(error)
            if ending is error:
                raise
            raise ending from error
        finally:
            self._over.set()
            if watch.is_alive():
                watch.join()
            alive.__exit__(None, None, None)
            if before is not None:
                signal.signal(signal.SIGTERM, before)

    def end(self) -> None:
        """Remove the folder, and those of launches of which no rank lives any more."""
        shutil.rmtree(self.folder, ignore_errors=True)
        for other in self.folder.parent.glob("*"):
            with suppress(OSError):  # another launch may be doing the same
                old = time.time() - other.stat().st_mtime > STALE_SECONDS
                if old and not any(lock_holder(path) for path in other.glob("alive-*")):
                    shutil.rmtree(other, ignore_errors=True)
        with suppress(OSError):  # not empty: another launch is at work, or has been refused in this moment
            self.folder.parent.rmdir()

    def _ending(self, error: Exception) -> Exception:
        """What this rank ends with, `error` itself or the reason behind it, told to the others where they do not know it."""
        if isinstance(error, PeerFailedError):
            return error
        if not isinstance(error, PipelineError) and self.ranks.world_size > 1:
            # A collective fails in many words when its other side is gone; the reason may come a moment later.
            until = time.monotonic() + 2 * LOOK_SECONDS
            while self._end is None and time.monotonic() < until:
                time.sleep(LOOK_SECONDS / 5)
        ending: Exception = error
        if self._end is not None or self._sigterm:
            with suppress(PipelineError):
                self.check()
            ending = self._end or error
        elif reason := self._failed_elsewhere():
            return reason
        if isinstance(ending, PeerFailedError):
            return ending
        if self.ranks.world_size == 1:
            self.end()
            return ending
        with suppress(OSError):  # of the two errors, the first is to be seen
            stopped = isinstance(ending, StoppedError)
            self.tell(f"failed-{self.ranks.rank}", {"reason": str(ending) or type(ending).__name__, "stopped": stopped})
        return ending

    # ---- what a thread of its own looks at

    def _watch(self) -> None:
        noticed = None
        while not self._over.wait(LOOK_SECONDS):
            if self._end is None and self.ranks.world_size > 1:
                self._end = self._look()
            if noticed is None and (self._end is not None or self._sigterm):
                noticed = time.monotonic()
            if noticed is not None and time.monotonic() - noticed > GRACE_SECONDS:
                self._leave()

    def _leave(self) -> None:
        """End this process as a kill would: its main thread is where no exception reaches it."""
        with suppress(PipelineError):
            self.check()
        ending = self._end
        if isinstance(ending, StoppedError):
            log.warning("%s", ending)
        else:
            log_to_file(str(ending))
        if isinstance(ending, LaunchError) and not isinstance(ending, PeerFailedError | StoppedError):
            with suppress(OSError):
                self.tell(f"failed-{self.ranks.rank}", {"reason": str(ending), "stopped": False})
            print(f"error on rank {self.ranks.rank}: {ending}", file=sys.stderr, flush=True)
        os._exit(StoppedError.exit_code if isinstance(ending, StoppedError) else 2)

    def _look(self) -> PipelineError | None:
        """Why this rank cannot go on: one that failed and said why, or one that is dead."""
        if told := self._failed_elsewhere():
            return told
        ranks = self.ranks
        group = range(ranks.dp_rank * ranks.tp_size, (ranks.dp_rank + 1) * ranks.tp_size)
        for rank in range(1, ranks.world_size) if ranks.is_main else {0, *group} - {ranks.rank}:
            if self._is_dead(rank):
                return self._failed_elsewhere() or self._died(rank)
        return None

    def _is_dead(self, rank: int) -> bool:
        """Whether the rank ended without having said that it is done. The folder itself goes when all are."""
        path = self.folder / f"alive-{rank}"
        free = path.exists() and lock_holder(path) is None
        return free and not (self.folder / f"done-{rank}.json").exists() and path.exists()

    def _died(self, rank: int) -> PipelineError:
        """The error for a dead rank: in full for the first that notices, who tells the user."""
        reason = (
            f"rank {rank} of {self.ranks.world_size} died without a word: killed, out of memory, or its machine is gone. "
            "What is committed stays; look at what that rank wrote last, then run the same command again."
        )
        try:
            os.close(os.open(self.folder / f"died-{rank}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return PeerFailedError(f"stopped, because {reason}")
        except OSError:  # a full disk: better said twice than never
            pass
        return LaunchError(reason)

    def _failed_elsewhere(self) -> PipelineError | None:
        for path in sorted(self.folder.glob("failed-*.json")):
            rank = path.stem.removeprefix("failed-")
            if rank != str(self.ranks.rank):
                told = json.loads(path.read_bytes())
                if told["stopped"]:
                    return StoppedError(f"rank {rank} was {told['reason']}")
                return PeerFailedError(f"stopped, because rank {rank} failed: {told['reason']}")
        return None

    def _note_sigterm(self, number: int, frame: FrameType | None) -> None:
        self._sigterm = True


def _on_sigterm(handler: Any) -> Any:
    """Install a handler and return the one before; None where this thread may not."""
    return signal.signal(signal.SIGTERM, handler) if threading.current_thread() is threading.main_thread() else None


def _shared_token(ranks: Ranks) -> str:
    """A word that no other launch has. With `_meet` the only collectives here: all ranks have just started."""
    token = [secrets.token_hex(6)]
    if ranks.world_size > 1:
        dist.broadcast_object_list(token, src=0, device=ranks.device)
    return token[0]


def _meet(ranks: Ranks) -> None:
    dist.barrier(device_ids=[ranks.local_rank] if ranks.device.type == "cuda" else None)
