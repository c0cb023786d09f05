"""One data-parallel group's shards, one after another: samples → forward → writer → commit, with nothing waiting that need not.

While the device computes a batch, the states of the one before are on their way to the host and those before that are being packed
and written; the last files of a shard are flushed and committed while the next shard is already running.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pipeline.cache.commit import commit_shard, committed_shards, extend_shard
from pipeline.cache.manifest import FileRecord, Manifest, ShardMarker
from pipeline.cache.writer import ShardWriter
from pipeline.capture.space import SpaceLeft
from pipeline.corpus.plan import plan_batches
from pipeline.corpus.prepared import PreparedCorpus
from pipeline.errors import CacheError
from pipeline.records import CapturedSample, TokenSample
from pipeline.runtime.launch import Launch
from pipeline.runtime.logs import Progress
from pipeline.runtime.ranks import Ranks
from pipeline.target.forward import Flight, start_forward
from pipeline.target.load import Target


@dataclass(frozen=True)
class Work:
    """What all shards of a launch have in common. `lengths` are the corpus's, in tokens, `shards[i]` the samples of shard i, ascending.
    `pending`: by shard, the arrays to capture; all of them for a shard that is not there, some for one that is to get more.
    `raw_missing`: bytes of all that the cache lacks, before packing, parts of other jobs included.
    `larger`: the manifest takes the place of the cache's, to which it adds something."""

    cache: Path
    manifest: Manifest
    corpus: PreparedCorpus
    lengths: NDArray[np.int64]
    shards: Sequence[Sequence[int]]
    pending: Mapping[int, tuple[str, ...]]
    larger: bool
    batch_tokens: int
    raw_missing: int
    launch: Launch
    ranks: Ranks

    def arrays(self, shard: int) -> tuple[str, ...]:
        """Those that this rank writes: ranks that hold one target together see the same states, and each takes some layers."""
        return self.pending[shard][self.ranks.tp_rank :: self.ranks.tp_size]

    def batches(self, shard: int) -> list[list[TokenSample]]:
        """The shard's samples as they are forwarded and, one batch after another, stored."""
        rows = self.shards[shard]
        plan = plan_batches(self.lengths[np.asarray(rows)], self.batch_tokens)
        return [[self.corpus.sample(rows[i]) for i in batch] for batch in plan]

    def num_tokens(self, shard: int) -> int:
        return int(self.lengths[np.asarray(self.shards[shard])].sum())


def capture_shards(work: Work, target: Target, numbers: Sequence[int], progress: Progress) -> None:
    """Capture and commit the shards `numbers`; every rank of a tensor-parallel group calls this with the same ones.

    Raises `HiddenStateError` naming the sample whose states are unusable, `CacheError` when the disk is. What was committed stays.
    """
    space = SpaceLeft(work.cache, work.manifest, work.raw_missing)
    with _Background() as background:
        for number in numbers:
            batches = work.batches(number)
            # With more ranks than arrays some have nothing to write, and still take part in the forward.
            arrays = work.arrays(number)
            writer = ShardWriter(work.cache, number, work.manifest, arrays, attempt=work.launch.token) if arrays else None
            try:
                for captured in forward_ahead(target, batches):
                    for sample in captured:
                        if writer is not None:
                            writer.append(sample)
                    progress.advance(sum(sample.tokens.num_tokens for sample in captured))
                    background.check()
                    work.launch.check()
                background.wait()
            except BaseException:
                if writer is not None:
                    writer.abandon()
                raise
            samples = [sample for batch in batches for sample in batch]
            committed = partial(_finish, work, number, samples, writer)
            background.start(partial(_finish_and_look, committed, space if work.ranks.is_main else None, progress.done / progress.total))
        background.wait()


def forward_ahead(target: Target, batches: Sequence[Sequence[TokenSample]]) -> Iterator[list[CapturedSample]]:
    """Captured samples of each batch, on the host. On a GPU the next batch is queued before this one is waited for."""
    ahead = 0 if target.device.type == "cpu" else 1
    flights: deque[Flight] = deque()
    for batch in batches:
        flights.append(start_forward(target, batch).to_host())
        if len(flights) > ahead:
            yield flights.popleft().land()
    while flights:
        yield flights.popleft().land()


def _finish_and_look(finish: Callable[[], ShardMarker | None], space: SpaceLeft | None, done: float) -> None:
    marker = finish()
    if marker is not None and space is not None:
        space.look(marker, done)


def _finish(work: Work, number: int, samples: Sequence[TokenSample], writer: ShardWriter | None) -> ShardMarker | None:
    """Flush this rank's files; the first rank of the group gathers the records of all and commits."""
    launch, ranks = work.launch, work.ranks
    try:
        records = {} if writer is None else writer.close()
    except BaseException:
        if writer is not None:
            writer.abandon()
        raise
    if ranks.tp_rank:
        launch.tell(f"shard-{number}-{ranks.tp_rank}", {path: record.model_dump() for path, record in records.items()})
        return None
    for other in range(1, ranks.tp_size):
        told = launch.take(f"shard-{number}-{other}", f"the layers of shard {number} that rank {ranks.rank + other} writes")
        records |= {path: FileRecord(**record) for path, record in told.items()}
    try:
        if number in committed_shards(work.cache, (number,)):
            return extend_shard(work.cache, number, work.pending[number], records, attempt=launch.token)
        return commit_shard(work.cache, number, samples, records, attempt=launch.token)
    except OSError as error:
        raise CacheError(
            f"shard {number} of {work.cache} cannot be committed: {error}. Free disk space, then run capture again."
        ) from error


class _Background:
    """One thing at a time that runs beside the forward. Its error comes out of `check`, `wait` or the next `start`."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="commit")
        self._running: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        self.wait()
        self._running = self._pool.submit(work)

    def check(self) -> None:
        if self._running is not None and self._running.done():
            self._running.result()

    def wait(self) -> None:
        if self._running is not None:
            self._running.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(wait=True)
