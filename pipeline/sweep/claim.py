"""Which trials a process trains next. Any number of processes, on any machines that see LOG_DIR, share a sweep this way.

One process at a time chooses, under the lock LOG_DIR/claim.lock, and holds the lock of each chosen trial's folder (`.lock`, the one
that training alone takes too) until the trial has ended. A lock goes with its process: a trial that is RUNNING and whose folder
is free was left by one that died or was stopped, and is taken over, from its newest checkpoint.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from optuna.trial import FrozenTrial

from pipeline.config.schema import Config
from pipeline.errors import CacheLockedError, PipelineError
from pipeline.runtime.files import FolderLock
from pipeline.sweep.ledger import FAIL, RUNNING, WAITING, Ledger, params_of
from pipeline.sweep.memory import available_bytes, batch_bytes, draft_bytes
from pipeline.sweep.reading import Readings
from pipeline.sweep.space import overrides, settings
from pipeline.train.data import training_order
from pipeline.train.optim import total_steps

log = logging.getLogger(__name__)

MOST_AT_ONCE = 8
"""Drafts side by side where `auto` chooses, and those that have ended decide about more: the sampler learns from them, or time is up."""
LEARNING = ("tpe", "gp", "cmaes")
MISSES = 4
"""New settings in a row that read something else than the group, after which no more are proposed for it."""
FAILURES = 64
"""New settings in a row that cannot be, after which the space is taken to hold no other."""


@dataclass(frozen=True, eq=False)
class Taken:
    """A trial that this process trains. `lock` is held."""

    id: int
    number: int
    config: Config
    folder: Path
    lock: FolderLock


@dataclass(frozen=True, eq=False)
class _Described:
    """A trial in words; its configuration, the key of its reading and its steps as far as a budget needs them, or why it cannot be."""

    words: tuple[str, ...]
    config: Config | None
    key: str
    steps: int = 0
    error: PipelineError | None = None


@dataclass(eq=False)
class Claims:
    """What choosing needs. `config_of` makes a configuration from words such as `a.b=c`; `deadline` is of `time.monotonic`; `processes`
    of the launch share what there is to do; `limit`, once it is known, is how many drafts really fit side by side."""

    base: Config
    ledger: Ledger
    readings: Readings
    config_of: Callable[[Sequence[str]], Config]
    device: torch.device
    deadline: float | None
    processes: int
    limit: int | None = None
    _known: dict[int, _Described] = field(default_factory=dict)

    def take_group(self) -> list[Taken]:
        """Trials to train side by side: all read the same. Empty when nothing is left to begin that no other process trains."""
        with FolderLock(self.base.log_dir, "claim.lock", wait_for_it="another process that chooses its trials"):
            if self.base.sweep.sampler == "grid":
                self.ledger.enqueue_grid()
            else:
                self.ledger.enqueue_seeds()
            group: list[Taken] = []
            key, room = "", _Room(self)
            for trial in self._candidates(room):
                described = self._describe(trial)
                if group and described.error is None and described.key != key:
                    continue
                if (taken := self._take(trial, described, room)) is not None:
                    key = described.key
                    group.append(taken)
                if room.full:
                    break
        return group

    def unfinished(self) -> int | None:
        """Trials that are not ended, proposed or not; None where only time or steps will tell."""
        section, waiting, running = self.base.sweep, self.ledger.waiting(), self.ledger.trials(RUNNING)
        begun = len(self.ledger.trials()) - len(self.ledger.trials(WAITING))
        if section.sampler == "grid":
            return len(running) + min(len(waiting), len(waiting) if section.trials is None else max(0, section.trials - begun))
        return None if section.trials is None else len(running) + max(0, section.trials - begun)

    def _candidates(self, room: "_Room") -> Iterator[FrozenTrial]:
        """Trials that may be begun now: left behind, waiting, and new ones as long as they read what the group reads."""
        yield from self.ledger.trials(RUNNING)
        for trial in self.ledger.waiting():
            if not room.may_begin():
                return
            yield trial
        misses = failures = 0
        while self.base.sweep.sampler != "grid" and misses < MISSES and failures < FAILURES and room.may_begin(self._promised()):
            before, trial = room.drafts, self.ledger.propose()
            room.begin(trial.number, self._describe(trial).steps)
            yield trial
            if room.drafts > before:
                misses = failures = 0
            elif self.ledger.storage.get_trial(trial._trial_id).state == FAIL:
                failures += 1
            else:
                misses += 1

    def _promised(self) -> dict[int, int]:
        """Steps of the trials that wait, by number: settings that were begun with the first seed, and are to be compared in pairs."""
        return {trial.number: self._describe(trial).steps for trial in self.ledger.waiting()}

    def _describe(self, trial: FrozenTrial) -> _Described:
        if trial.state == RUNNING and "seed" not in trial.user_attrs:
            trial = self.ledger.described(trial._trial_id)
        if trial.number not in self._known:
            words = tuple(overrides(settings(self.base.sweep.space, params_of(trial))))
            own = {
                "trainer.seed": trial.user_attrs["seed"],
                "name": f"{self.base.name}-{trial.number:04d}",
                "exp_manager.explicit_log_dir": str(self._folder(trial)),
                "exp_manager.resume_if_exists": True,
            }
            try:
                config = without_sweep(self.config_of([*words, *overrides(own)]))
                self._known[trial.number] = _Described(words, config, self.readings.key(config), self._steps(config))
            except PipelineError as error:
                self._known[trial.number] = _Described(words, None, "", error=error)
        return self._known[trial.number]

    def _steps(self, config: Config) -> int:
        if config.trainer.max_steps is not None or self.base.sweep.steps is None:
            return config.trainer.max_steps or 0
        return total_steps(config.trainer, training_order(self.readings.of(config), config).steps)

    def _folder(self, trial: FrozenTrial) -> Path:
        return Path(self.base.log_dir) / "trials" / f"{trial.number:04d}"

    def _take(self, trial: FrozenTrial, described: _Described, room: "_Room") -> Taken | None:
        """The trial as this process's own; None where another has it, it does not fit, or it cannot be, which is recorded."""
        folder, config = self._folder(trial), described.config
        try:
            if config is not None and not room.has_for(config):
                return None
        except PipelineError as error:
            described, config = _Described(described.words, None, "", error=error), None
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder)
        try:
            lock.__enter__()
        except CacheLockedError:
            return None
        # What was RUNNING may have ended since it was looked at: its process lets go of the folder only after that.
        state = self.ledger.storage.get_trial(trial._trial_id).state
        if state.is_finished() or (state == WAITING and self.ledger.take(trial) is None):
            lock.__exit__(None, None, None)
            return None
        room.begin(trial.number, described.steps)
        self.ledger.set(
            trial._trial_id, settings=list(described.words), folder=str(folder.relative_to(self.base.log_dir)), steps=described.steps
        )
        log.info("trial %d, seed %s: %s", trial.number, trial.user_attrs.get("seed"), " ".join(described.words))
        if config is None:
            log.warning("trial %d (%s) cannot be: %s", trial.number, " ".join(described.words), described.error)
            self.ledger.set(trial._trial_id, error=f"{type(described.error).__name__}: {described.error}")
            self.ledger.end(trial._trial_id, FAIL)
            lock.__exit__(None, None, None)
            return None
        room.take(config)
        return Taken(trial._trial_id, trial.number, config, folder, lock)


class _Room:
    """What a group can still take, by memory, by what was asked for, and by what the sweep may still spend."""

    def __init__(self, claims: Claims) -> None:
        section, begun = claims.base.sweep, [trial for trial in claims.ledger.trials() if trial.state != WAITING]
        self._claims, self._section, self.drafts = claims, section, 0
        self._begun = {trial.number: int(trial.user_attrs.get("steps", 0)) for trial in begun}
        self._left = available_bytes(claims.device)
        self._most: float = math.inf
        if section.side_by_side != "auto":
            self._most = section.side_by_side
        elif section.sampler in LEARNING or section.hours is not None:
            self._most = MOST_AT_ONCE
        self._most = min(self._most, claims.limit or math.inf)
        unfinished = claims.unfinished()
        if section.side_by_side == "auto" and unfinished is not None:
            self._most = min(self._most, max(1, math.ceil(unfinished / claims.processes)))

    @property
    def full(self) -> bool:
        return self.drafts >= self._most

    def may_begin(self, promised: Mapping[int, int] | None = None) -> bool:
        """Whether the budget allows one more trial, with what is `promised` (steps by number) besides those that are begun."""
        section, deadline, spent = self._section, self._claims.deadline, {**(promised or {}), **self._begun}
        return (
            (section.trials is None or len(spent) < section.trials)
            and (section.steps is None or sum(spent.values()) < section.steps)
            and (deadline is None or time.monotonic() < deadline)
        )

    def has_for(self, config: Config) -> bool:
        """The first draft is always taken: only training it can tell. Raises `DraftError` for one that cannot be."""
        need = self._need(config)
        return self.drafts == 0 or self._section.side_by_side != "auto" or need <= self._left

    def begin(self, number: int, steps: int) -> None:
        """Count a trial that runs now, or has failed at once, and what it is to make."""
        self._begun[number] = steps

    def take(self, config: Config) -> None:
        self._left -= self._need(config)
        self.drafts += 1

    def _need(self, config: Config) -> int:
        readings = self._claims.readings
        shared = 0 if self.drafts else batch_bytes(config, readings.base(config))
        return draft_bytes(config, readings.of(config), self._claims.device) + shared


def without_sweep(config: Config) -> Config:
    """The configuration of one run: what a sweep is told has no place in it."""
    return Config.model_validate(config.model_dump(mode="json", exclude_unset=True, exclude={"sweep"}))
