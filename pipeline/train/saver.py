"""Checkpoints written while training goes on: a copy is taken at once, and a thread puts it on the disk."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import torch.distributed as dist

from pipeline.config.training import CheckpointSection
from pipeline.errors import CheckpointError
from pipeline.runtime.ranks import Ranks
from pipeline.train.checkpoint import Snapshot, prune, write_snapshot

log = logging.getLogger(__name__)


class Saver:
    """Writes the checkpoints of one run, one at a time, and removes those that are not to be kept. Its end waits for the one in hand.

    Only the first rank writes; all ranks call `save` and `wait`, so that a write that failed ends all of them with the same words.
    """

    def __init__(self, folder: Path, keep: CheckpointSection, ranks: Ranks) -> None:
        self.folder, self._keep, self._ranks = folder, keep, ranks
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._thread.shutdown(wait=True)
        if error is not None and (failure := self._failure()):
            log.error("%s", failure)  # the error that ends the run came first

    @property
    def failed(self) -> bool:
        """Whether the write in hand has failed already; `wait` says why."""
        return self._writing is not None and self._writing.done() and self._writing.exception() is not None

    def save(self, snapshot: Snapshot | None) -> None:
        """Begin to write `snapshot`, once the one before is written. Raises `CheckpointError` when that one could not be."""
        self.wait()
        if snapshot is not None:
            self._writing = self._thread.submit(self._write, snapshot)

    def wait(self) -> None:
        """Return when nothing is left to write. Raises `CheckpointError` on all ranks when the write failed."""
        failure = [self._failure()]
        if self._ranks.world_size > 1:
            dist.broadcast_object_list(failure, src=0, device=self._ranks.device)
        if failure[0]:
            raise CheckpointError(failure[0])

    def _failure(self) -> str | None:
        """Wait for the write in hand; why it failed, if it did. What is no `CheckpointError` is a bug and passes through."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
        except CheckpointError as error:
            return str(error)
        return None

    def _write(self, snapshot: Snapshot) -> None:
        write_snapshot(self.folder, snapshot)
        try:
            prune(self.folder, self._keep.monitor, self._keep.better, self._keep.save_top_k)
        except OSError as error:
            raise CheckpointError(
                f"a checkpoint in {self.folder} that is not to be kept cannot be removed: {error}. Mend that folder, then run the same "
                "command again: it goes on from the newest checkpoint."
            ) from error
