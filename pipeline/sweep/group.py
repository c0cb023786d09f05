"""Trials side by side: one process, one reading of the cache, and for each draft all that it would have alone.

The loop is that of `train/loop.py` with several trainings in it. A draft sees the same batches in the same order as alone, so its
weights and metrics are the same bits (one CPU process; on a GPU as far as its kernels repeat themselves). Members that are resumed stand
at different steps: those ahead wait until the others have caught up.
"""

import logging
import math
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from optuna.trial import TrialState

from pipeline.errors import CacheError, CheckpointError, DiskError, PipelineError, StoppedError, TrainingError
from pipeline.runtime.logs import Progress, labelled
from pipeline.sweep.account import Account
from pipeline.sweep.claim import Taken
from pipeline.sweep.ledger import COMPLETE, FAIL, PRUNED, Ledger
from pipeline.sweep.reading import SharedFeed
from pipeline.train.data import TrainingData, validation_sets
from pipeline.train.decoding import ShortDecoding
from pipeline.train.evaluate import validate_each
from pipeline.train.feed import Reading
from pipeline.train.loop import advance, save_every, take_validation, validation_due
from pipeline.train.run import Training, finish
from pipeline.train.watch import Clock

log = logging.getLogger(__name__)

EVERYONES = (OSError, CacheError, CheckpointError, DiskError, torch.AcceleratorError)
"""Faults of a disk or of a GPU: no trial is to blame, and all go on once that is mended."""


@dataclass(eq=False)
class Member:
    """A trial that learns. `stack` closes what its training holds, and gives its folder free at the very last. `seconds` are of its own
    steps and validations."""

    trial: Taken
    training: Training
    clock: Clock
    stack: ExitStack
    started_at: int
    seconds: float = 0.0

    @property
    def step(self) -> int:
        return self.training.state.step

    @contextmanager
    def timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - begin


@dataclass(eq=False)
class Group:
    """`members` are those that have not ended. `asked` is not empty once the run is to stop; `data` has the layers of all members.
    `crowded`: memory did not suffice for all, and some were put back."""

    ledger: Ledger
    data: TrainingData
    feed: SharedFeed
    decoding: ShortDecoding | None
    account: Account
    asked: Sequence[int]
    members: list[Member] = field(default_factory=list)
    crowded: bool = False
    _seconds: dict[int, float] = field(default_factory=dict)

    def train(self, shown: bool) -> None:
        """To the end of every member. Raises `StoppedError` when the run is to stop, with a checkpoint of each."""
        # A run that was stopped at a validation had no time for it.
        late = [m for m in self.members if validation_due(m.training) and not m.training.state.metrics]
        self._validate(late)
        if self.asked:
            self._stop()
        self._save(late, always=True)
        self._end_finished()
        total = max((m.training.num_steps for m in self.members), default=0)
        done = min((m.step for m in self.members), default=0)
        with Progress(total, "steps", f"{len(self.members)} drafts", shown, done=done) as progress:
            while self.members:
                self._step()
                progress.advance(1, f"{len(self.members)} left")
        self.account.write(self.feed.waited_seconds, self._times())
        waited, fed = self.feed.waited_seconds, sum(self.account.fed.values())
        read = self.account.reading
        told = "read %.1f MB, packed, once: %d tokens for %d fed to the drafts; %.1f s waiting"
        log.info(told, read.bytes_read / 1e6, read.tokens, fed, waited)

    def _step(self) -> None:
        """One step of those that are furthest behind."""
        behind = min(m.step for m in self.members)
        due = [m for m in self.members if m.step == behind]
        readings = self.feed.step(due[0].training.state.position)
        tokens = sum(sample.tokens.num_tokens for reading in readings for sample in reading.samples)
        self.account.feed([m.trial.number for m in due], tokens)
        for member in due:
            self._advance(member, readings)
        moved = [m for m in due if m in self.members]
        if not self.asked:
            self._validate([m for m in moved if validation_due(m.training)])
        self._save(moved)
        if self.asked:
            self._stop()
        self._end_finished()
        self.account.note(self.feed.waited_seconds, self._times())

    def _advance(self, member: Member, readings: Sequence[Reading]) -> None:
        training = member.training
        draw, shape, prefixes = training.draw(), training.shape, training.prefixes()
        with self._own_fault(member), member.timed(), member.clock.running():
            advance(training, (reading.batch(draw, shape, prefixes) for reading in readings), len(readings), member.clock, False)

    def _validate(self, members: Sequence[Member]) -> None:
        """From one reading of the validation sets for all; reported by all before any of them is judged."""
        for member, metrics in self._measured(members) if members else ():
            value = None
            with self._own_fault(member), member.timed():
                take_validation(member.training, metrics)
                value = self._monitored(member)
            if value is not None:
                self.ledger.report(member.trial.id, member.step, value)
        for member in members:
            reported = member in self.members and member.training.state.metrics and not member.training.finished
            if reported and self.ledger.falls_behind(member.trial.id):
                log.info("trial %d is ended at step %d: it falls behind", member.trial.number, member.step)
                self._end(member, PRUNED)

    def _measured(self, members: Sequence[Member]) -> list[tuple[Member, dict[str, Any]]]:
        """The metrics of those that could be validated; of none after SIGTERM, which are then validated when the sweep goes on."""
        drafts = [(m.training.learner, m.training.learner.evaluated()) for m in members]
        begin = time.perf_counter()
        sets = validation_sets(self.data)
        try:
            found = validate_each(drafts, self.data, sets, self.feed.num_workers, self.asked)
        except EVERYONES:
            raise
        except Exception:
            if len(members) > 1:  # each by itself, so that only those fail whose fault it is
                return [one for member in members for one in self._measured([member])]
            with self._own_fault(members[0]):
                raise
            return []
        if found is None:
            return []
        tokens = sum(int(self.data.num_tokens[numbers].sum()) for numbers in sets.values())
        self.account.feed([m.trial.number for m in members], tokens)
        share = (time.perf_counter() - begin) / len(members)
        measured = []
        for member, (_, draft), metrics in zip(members, drafts, found, strict=True):
            member.seconds += share
            with self._own_fault(member), member.timed():
                if isinstance(metrics, TrainingError):
                    raise metrics
                decoded = self.decoding.measure(draft, self.asked) if self.decoding is not None else {}
                if decoded is None:
                    return []
                measured.append((member, metrics | decoded))
        return measured

    def _monitored(self, member: Member) -> float:
        value = member.training.state.metrics.get(self.ledger.section.monitor)
        if value is None or not math.isfinite(value):
            raise TrainingError(
                f"the validation at step {member.step} gives no {self.ledger.section.monitor}, which trials are compared by."
            )
        return value

    def _save(self, members: Sequence[Member], *, always: bool = False) -> None:
        """Not a trial's own fault when it fails: the disk is everyone's."""
        for member in members:
            due = always or member.training.finished or member.step % save_every(member.training) == 0
            if member in self.members and due:
                member.training.save(final=member.training.finished)

    def _end_finished(self) -> None:
        for member in [m for m in self.members if m.training.finished]:
            with self._own_fault(member):
                self._monitored(member)
                finish(member.training)
            if member in self.members:
                self._end(member, COMPLETE)

    def _stop(self) -> None:
        self._save([m for m in self.members if m.step > m.started_at], always=True)
        for member in self.members:
            member.training.saver.wait()
        self.account.write(self.feed.waited_seconds, self._times())
        raise StoppedError("stopped by SIGTERM; the same command goes on from here")

    def _end(self, member: Member, state: TrialState, error: str | None = None) -> None:
        """Say in the ledger how the trial ended, and let go of it."""
        trial, metrics = member.trial, dict(member.training.state.metrics)
        value = self._monitored(member) if state == COMPLETE else metrics.get(self.ledger.section.monitor)
        self.ledger.set(trial.id, steps=member.step, seconds=round(member.seconds, 3), metrics=metrics)
        if error is not None:
            self.ledger.set(trial.id, error=error)
        self.ledger.end(trial.id, state, None if state == FAIL else value)
        self._let_go(member)

    def _let_go(self, member: Member) -> None:
        self.members.remove(member)
        self._seconds[member.trial.number] = member.seconds
        member.stack.close()

    def _times(self) -> dict[int, float]:
        return self._seconds | {m.trial.number: m.seconds for m in self.members}

    @contextmanager
    def _own_fault(self, member: Member) -> Iterator[None]:
        """An error inside is the trial's own: it is recorded, and the others go on. One of `EVERYONES` passes through."""
        with labelled(f"trial {member.trial.number}"):
            try:
                yield
            except EVERYONES:
                raise
            except torch.OutOfMemoryError as error:
                if len(self.members) == 1:
                    self._end(member, FAIL, told(error))
                else:
                    log.warning("no memory for it beside %d others: it goes on later, from its newest checkpoint", len(self.members) - 1)
                    self._let_go(member)
                    self.crowded = True
            except Exception as error:
                log.error("failed at step %d: %s", member.step, told(error))
                self._end(member, FAIL, told(error))


def told(error: Exception) -> str:
    """An error in words; one that is no `PipelineError`, and so a bug, with its traceback."""
    if isinstance(error, PipelineError):
        return f"{type(error).__name__}: {error}"
    return "".join(traceback.format_exception(error))
