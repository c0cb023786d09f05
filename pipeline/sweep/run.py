"""A sweep, as one process takes part in it: choose trials, train them side by side, and again, until nothing is left to begin.

LOG_DIR/
  sweep.yaml              the configuration, with interpolations and overrides in place
  study.db                ledger (ledger.py), unless sweep.storage names another
  trials/0007/            the run of a trial, as `stages/train_draft.py` leaves one; its config.yaml trains it alone
  sweep.id                which ledger these trials are in (ledger.py)
  groups/*.json           what was read for which trials, and what that took (account.py)
  claim.lock, logs/
"""

import logging
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from pipeline.config.load import to_yaml
from pipeline.config.schema import Config
from pipeline.errors import CheckpointError, ConfigError, StoppedError, TrainingError
from pipeline.runtime.files import FolderLock, atomic_file
from pipeline.runtime.logs import labelled
from pipeline.runtime.ranks import Ranks
from pipeline.sweep.account import Account
from pipeline.sweep.claim import Claims, Taken
from pipeline.sweep.group import EVERYONES, Group, Member, told
from pipeline.sweep.ledger import COMPLETE, FAIL, PRUNED, RUNNING, SWEEP_CONFIG, WAITING, Ledger, check_sampler, settled
from pipeline.sweep.memory import num_parameters
from pipeline.sweep.reading import Readings, SharedFeed, SharedReading
from pipeline.sweep.space import of_all_layers, overrides
from pipeline.train.checkpoint import checkpoints
from pipeline.train.data import TrainingData, division_of, training_order, validation_sets
from pipeline.train.decoding import ShortDecoding
from pipeline.train.learner import check_compiler
from pipeline.train.loop import sigterm
from pipeline.train.run import Training, start_training
from pipeline.train.watch import Clock, check_monitors, check_trackers, never_given, settle_monitors

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Launch:
    """This process among those of one launch; they meet in the ledger alone."""

    ranks: Ranks
    rank: int
    processes: int


def sweep(config: Config, launch: Launch, config_of: Callable[[Sequence[str]], Config]) -> None:
    """Train the trials of `config.sweep` in `config.log_dir`. `config_of` makes the configuration of a trial from words such as `a.b=c`.

    Raises `CacheMismatchError` with the command that adds a layer which the space names and the cache lacks, before anything is
    trained; `ConfigError` for a folder or a ledger of another sweep, `StoppedError` after SIGTERM, `TrainingError` when
    no trial came to its end and some failed.
    """
    check_trackers(config.exp_manager)
    check_compiler(config.trainer)
    check_sampler(config.sweep.sampler)
    folder = Path(config.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    deadline = None if config.sweep.hours is None else time.monotonic() + 3600 * config.sweep.hours
    readings = Readings(_layers(config))
    caches = _open_all(config, readings, config_of)
    config = settled(config, all(data.own_answers for data in caches.values()))
    with FolderLock(folder, "claim.lock", wait_for_it="another process that opens the ledger"):
        ledger = Ledger(config)
        if not (folder / SWEEP_CONFIG).exists() or launch.rank == 0:
            with atomic_file(folder / SWEEP_CONFIG) as stream:
                stream.write(to_yaml(config, named_only=True).encode())
        ledger.study.set_user_attr("command", shlex.join(sys.argv))
        ledger.check_folder()
        for path, data in caches.items():
            ledger.check_cache(path, data.identity["cache"])
    try:
        claims = Claims(config, ledger, readings, config_of, launch.ranks.device, deadline, launch.processes)
        with sigterm() as asked:
            while trials := claims.take_group():
                if train_side_by_side(trials, ledger, readings, launch, asked):
                    claims.limit = max(1, len(trials) // 2)
                if asked:
                    raise StoppedError("stopped by SIGTERM; the same command goes on from here")
        _say(ledger)
    finally:
        ledger.close()


def train_side_by_side(trials: Sequence[Taken], ledger: Ledger, readings: Readings, launch: Launch, asked: Sequence[int]) -> bool:
    """Train the trials, which all read the same, until each has ended in the ledger or SIGTERM came (`StoppedError`). Returns whether
    they were too many for the memory, and some were put back.

    Raises `CacheError` when the cache cannot be read: then no trial is to blame, and all go on once it is mended.
    """
    # Of several, one that needs the final hidden state, if there is one: what is opened for it serves the others too.
    config = max((trial.config for trial in trials), key=lambda config: config.model.objective.needs_final)
    device = launch.ranks.device
    views = {trial.number: readings.of(trial.config) for trial in trials}
    layers = tuple(dict.fromkeys(layer for view in views.values() for layer in view.layer_ids))
    base = readings.base(config)
    reading = SharedReading(base, layers, config.model.objective.needs_final, device)
    compute = torch.bfloat16 if config.trainer.precision == "bf16-mixed" else torch.float32
    shared: dict[str, Any] = {"source": reading.source, "bundle": base.bundle.to(device, compute)}  # the bundle is there once, for all
    data = replace(base, layer_ids=layers, **shared)
    log.info("%d draft(s) side by side from one reading of layers %s", len(trials), list(layers))
    with ExitStack() as stack:
        started: list[tuple[Taken, Training, ExitStack]] = []
        crowded = False
        for trial in trials:
            own = stack.enter_context(ExitStack())
            own.callback(trial.lock.__exit__, None, None, None)
            try:
                training = _start(trial, replace(views[trial.number], **shared), ledger, launch.ranks, own, alone=not started)
            except torch.OutOfMemoryError:
                log.warning("no memory for trial %d beside %d others: it is trained later", trial.number, len(started))
                own.close()
                crowded = True
                continue
            if training is not None:
                started.append((trial, training, own))
        if not started:
            return False
        order = started[0][1].order
        feed = SharedFeed(reading.source, order, division_of(config, order, 1), config.data.num_workers)
        stack.callback(feed.close)
        decoding = ShortDecoding.load(config, launch.ranks, data) if config.trainer.val_decode_prompts else None
        account = Account(ledger.folder, [trial.number for trial, _, _ in started], reading)
        members = [
            Member(trial, training, Clock(feed, training.state.tokens_seen), own, training.state.step) for trial, training, own in started
        ]
        del started  # a member that has ended is to be free
        group = Group(ledger, data, feed, decoding, account, asked, members, crowded)
        group.train(shown=launch.rank == 0)
        return group.crowded


def _start(trial: Taken, data: TrainingData, ledger: Ledger, ranks: Ranks, own: ExitStack, *, alone: bool) -> Training | None:
    """The trial's training, closed by `own`; None where it cannot be, which is recorded. Raises what is no fault of the trial: one of
    `EVERYONES`, a checkpoint to go on from included, and memory that does not suffice unless it is `alone`."""
    with labelled(f"trial {trial.number}"):
        try:
            training = start_training(trial.config, ranks, data, training_order(data, trial.config), trial.folder)
        except Exception as error:
            # Weights to start from may be what the trial tries; then there is no checkpoint of its own yet.
            own_weights = isinstance(error, CheckpointError) and not checkpoints(trial.folder / "checkpoints")
            if (isinstance(error, EVERYONES) and not own_weights) or (isinstance(error, torch.OutOfMemoryError) and not alone):
                raise
            log.error("cannot be trained: %s", told(error))
            ledger.set(trial.id, error=told(error), steps=0)
            ledger.end(trial.id, FAIL)
            own.close()
            return None
    own.enter_context(training.watch)
    own.enter_context(training.saver)
    ledger.set(trial.id, steps=training.num_steps, cache=data.identity["cache"], parameters=num_parameters(trial.config, data))
    return training


def _layers(config: Config) -> tuple[int, ...] | None:
    """All target layers that a trial can read."""
    values = config.sweep.space.get("model.draft.target_layer_ids")
    return of_all_layers(values.choice or () if values is not None else (config.model.draft.target_layer_ids,))


def _open_all(config: Config, readings: Readings, config_of: Callable[[Sequence[str]], Config]) -> dict[str, TrainingData]:
    """The caches that trials can read, by path: opened now, with every value of a choice by itself, so that a cache that lacks something
    is told before anything is trained."""
    space = config.sweep.space
    configs = [] if "data.cache" in space else [config]
    for name, values in space.items():
        for value in values.choice or () if name == "data.cache" or "data.cache" not in space else ():
            with suppress(ConfigError):  # what only goes with other values of the space is checked with the trial
                configs.append(config_of(overrides({name: value})))
    opened = {str(one.cache_path): readings.of(one) for one in configs if one.cache_path is not None}
    for path, data in opened.items():
        if not validation_sets(data):
            raise ConfigError(
                f"the cache {path} has no validation samples, which trials are compared by; set data.validation_ds at capture."
            )
        # Whether a draft's blocks fit into any of them is the trial's.
        sets = dict.fromkeys(validation_sets(data), True)
        if "trainer.val_decode_prompts" not in space and (reason := never_given(config.sweep.monitor, config, sets)):
            raise ConfigError(f"sweep.monitor is {config.sweep.monitor}: {reason}")
        check_monitors(settle_monitors(config, data.own_answers), sets)
    return opened


def _say(ledger: Ledger) -> None:
    """How the trials stand, and which is best. Raises `TrainingError` when none came to its end and some failed."""
    by_state = {state: ledger.trials(state) for state in (COMPLETE, PRUNED, FAIL, RUNNING, WAITING)}
    counts = ", ".join(f"{len(found)} {state.name.lower()}" for state, found in by_state.items() if found)
    running = [trial.number for trial in by_state[RUNNING]]
    if running:
        log.info("trials %s are trained by other processes", ", ".join(map(str, running)))
    if by_state[COMPLETE]:
        best = ledger.study.best_trial
        words = " ".join(best.user_attrs["settings"])
        log.info("%s; best: trial %d, %s %.4f, %s", counts, best.number, ledger.section.monitor, best.value, words)
    elif by_state[FAIL] and not running:
        first = by_state[FAIL][0]
        raise TrainingError(f"no trial came to its end ({counts}). Trial {first.number} failed: {first.user_attrs.get('error')}")
    else:
        log.info("%s", counts or "no trial")
