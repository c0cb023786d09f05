"""Files that are there whole or not at all, locks that a crash does not leave behind, and waiting for a file.

Every write of the pipeline that another process may look for goes through `atomic_file` or `atomic_folder`: written under a
temporary name beside the final one, flushed to the disk, renamed, and the rename itself flushed. A kill at any moment leaves
the old state or the new one, and at worst a `.NAME.*.tmp` that nothing reads.
"""

import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from pipeline.errors import CacheError, CacheLockedError, PipelineError

log = logging.getLogger(__name__)

REPORT_SECONDS = 30.0
_held: set[int] = set()  # descriptors of locks that this process holds


@contextmanager
def atomic_file(path: Path | str) -> Iterator[BinaryIO]:
    """A binary file to write; it gets the name `path` when the block ends, replacing what was there, and is removed on an error."""
    path = Path(path)
    temporary = _temporary_name(path)
    try:
        with open(temporary, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def atomic_folder(path: Path | str) -> Iterator[Path]:
    """A folder to fill; it gets the name `path` when the block ends and is removed on an error.

    All files in it are flushed first. Raises `FileExistsError` when `path` is there and not an empty folder: unlike a file,
    a folder cannot be replaced in one step.
    """
    path = Path(path)
    temporary = _temporary_name(path)
    temporary.mkdir()
    try:
        yield temporary
        for folder, _, names in os.walk(temporary, topdown=False):
            for name in names:
                _sync(Path(folder, name))
            sync_folder(folder)
        if path.exists() and any(path.iterdir()):
            raise FileExistsError(f"{path} exists already")
        os.replace(temporary, path)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path | str, value: Any) -> None:
    """Atomic JSON with sorted keys and a final newline, so that equal values are equal bytes. NaN and Inf are a ValueError."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False)
    with atomic_file(path) as stream:
        stream.write(text.encode() + b"\n")


def file_digest(path: Path | str) -> str:
    """SHA-256 of the file's bytes, 64 hex digits."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def follow_umask(path: Path | str) -> None:
    """Give a file the permissions that a newly opened one gets: safetensors lets nobody but the owner read what it writes."""
    beside = _temporary_name(Path(path))
    try:
        beside.touch(exist_ok=False)
        shutil.copymode(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def sync_folder(folder: Path | str) -> None:
    """Flush the names in `folder` to the disk: a rename is durable only after this."""
    _sync(folder)


class FolderLock:
    """Exclusive use of a folder among processes, by `flock` on `FOLDER/NAME`; the kernel drops it when the holder ends, however.

    `shared` holders only keep exclusive ones out. The folder must exist. Raises `CacheLockedError`, naming host and process of the
    holder, when it is taken; with `wait_for_it` (what for, in words) it waits instead. Forked children do not keep it. The file
    stays: removing it would let two processes hold two locks of one name.

    On network file systems: NFS (v4, or v3 with lockd) makes it a lock of the server, which frees that of a crashed machine when
    its lease ends, after a minute or two. Lustre must be mounted with `-o flock`; `localflock`, or NFS `local_lock=flock`, lock
    within one machine only.
    """

    def __init__(self, folder: Path | str, name: str = ".lock", *, shared: bool = False, wait_for_it: str | None = None) -> None:
        self.folder = Path(folder)
        self.path = self.folder / name
        self._shared = shared
        self._wait_for_it = wait_for_it
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o666)
        start = reported = time.monotonic()
        while not self._taken(descriptor):
            holder = os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "a process that has not named itself yet"
            if self._wait_for_it is None:
                os.close(descriptor)
                raise CacheLockedError(f"{self.folder} is in use by {holder}. Wait for it or stop it; the lock goes with that process.")
            now = time.monotonic()
            if now - reported >= REPORT_SECONDS:
                reported = now
                log.info("waiting for %s for %d s, held by %s (%s)", self._wait_for_it, now - start, holder, self.path)
            time.sleep(min(1.0, 0.05 + (now - start) / 10))
        if not self._shared:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        _held.add(descriptor)
        self._descriptor = descriptor
        return self

    def _taken(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            os.close(descriptor)
            raise CacheError(f"{self.folder}: its file system gives no locks ({error}); mount it with flock support") from error
        return True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None and descriptor in _held:
            _held.discard(descriptor)
            if not self._shared:
                os.ftruncate(descriptor, 0)
            os.close(descriptor)


def lock_holder(path: Path | str) -> str | None:
    """Who holds the lock file `path`, as it named itself, or None when nobody does (also when there is no such file)."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(descriptor, 1000, 0).decode(errors="replace").strip() or "a process that has not named itself yet"
    finally:
        os.close(descriptor)
    return None


def wait_for(path: Path | str, what: str, give_up: Callable[[], str | None]) -> None:
    """Return once `path` exists; say every 30 s that `what` is being waited for.

    `give_up` is asked at each look; when it returns a reason, `PipelineError` is raised with it. Ranks wait so, and not in
    a collective, for work that may take longer than a process group's time limit.
    """
    path = Path(path)
    start = reported = time.monotonic()
    while not path.exists():
        reason = give_up()
        if reason is not None and not path.exists():
            raise PipelineError(f"{what} did not come: {reason} (waited for {path})")
        now = time.monotonic()
        if now - reported >= REPORT_SECONDS:
            reported = now
            log.info("waiting for %s for %d s (%s)", what, now - start, path)
        time.sleep(min(1.0, 0.05 + (now - start) / 10))


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def _sync(path: Path | str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _let_go_after_fork() -> None:
    # A forked child shares the lock; were it to outlive a killed parent, the folder would stay locked.
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go_after_fork)
