"""Stage two: from a configuration to a trained draft, and to the same draft when it was interrupted on the way."""

import logging
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist

from pipeline.config.schema import Config
from pipeline.errors import PeerFailedError, TrainingError
from pipeline.records import DraftBatch
from pipeline.runtime.files import FolderLock
from pipeline.runtime.logs import Progress
from pipeline.runtime.ranks import Ranks
from pipeline.train.checkpoint import TrainState
from pipeline.train.data import TrainingData, division_of, training_order, validation_sets
from pipeline.train.decoding import ShortDecoding
from pipeline.train.evaluate import validate
from pipeline.train.feed import Feed, num_micro_batches
from pipeline.train.learner import check_compiler, divided_launch
from pipeline.train.modes import open_data
from pipeline.train.optim import learning_rate
from pipeline.train.run import Training, finish, start_training
from pipeline.train.step import Step, Sums, train_step
from pipeline.train.watch import Clock, check_monitors, check_trackers

log = logging.getLogger(__name__)


def train(config: Config, ranks: Ranks) -> bool:
    """Train the draft of `config` in `config.log_dir`, from the newest checkpoint there if there is one, and export it.

    Every rank calls it; the folder must be on a file system that all of them see. Returns False when SIGTERM ended it early, with
    a checkpoint from which the same command goes on. Raises `CheckpointError` for a checkpoint of another run,
    `CacheLockedError` when another process trains in the folder, `PeerFailedError` when another rank is gone.
    """
    check_trackers(config.exp_manager)
    check_compiler(config.trainer)
    divided_launch()
    folder = Path(config.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder) if ranks.is_main else nullcontext(), _peers(ranks, folder), open_data(config, ranks) as data:
        training = start_training(config, ranks, data, training_order(data, config), folder)
        with training.saver, training.watch:
            if steps_to_the_end(training):
                finish(training)
                return True
    return False


def steps_to_the_end(training: Training) -> bool:
    """Optimizer steps until the training has finished, or until SIGTERM: then False, with a checkpoint on its way to the disk."""
    config, data, ranks, order = training.config, training.data, training.ranks, training.order
    check_monitors(config, {name: bool(data.usable[numbers].any()) for name, numbers in validation_sets(data).items()})
    decoding = ShortDecoding.load(config, ranks, _to_validate_on(training)) if config.trainer.val_decode_prompts else None
    num_workers = config.data.num_workers if data.any_thread else 0
    feed = Feed(data.source, training.draw(), training.shape, num_workers, data.ready, training.prefixes())
    division = division_of(config, order, ranks.dp_size)
    batches = feed.micro_batches(order, training.state.position, division, ranks.dp_rank)
    if validation_due(training) and not training.state.metrics:  # SIGTERM came at this step, and there was no time
        _validate(training, decoding)
        training.save(final=training.finished)
    clock, done = Clock(feed, training.state.tokens_seen), training.state.step
    with sigterm() as asked, Progress(max(training.num_steps, done), "steps", "training", ranks.is_main, done=done) as progress:
        while not training.finished:
            count = num_micro_batches(order, training.state.position, division)
            step = advance(training, batches, count, clock, bool(asked))
            progress.advance(1, f"loss {step.sums.loss:.3f}")
            stop = step.stop
            with clock.paused():
                if validation_due(training) and not stop:
                    stop = not _validate(training, decoding, asked)
                if stop or training.finished or training.state.step % save_every(training) == 0:
                    training.save(final=training.finished)
            if stop:
                training.saver.wait()
                log.warning("stopped by SIGTERM after step %d; the same command goes on from here", training.state.step)
                return False
        training.saver.wait()  # a SIGTERM from here on may end the process at once
    return True


def advance(training: Training, batches: Iterator[DraftBatch], count: int, clock: Clock, stop: bool) -> Step:
    """One optimizer step of one draft from its next `count` micro-batches, with its line of metrics where one is due."""
    trainer, state, num_steps = training.config.trainer, training.state, training.num_steps
    rate = learning_rate(training.config.model.optim, state.step, num_steps)
    # A checkpoint that could not be written is told to all ranks where they save, so they go there.
    asked = stop or training.saver.failed
    step = train_step(training.learner, batches, count, rate, trainer.gradient_clip_val, asked, state.step / num_steps)
    if trainer.ema_decay is not None:
        training.learner.update_average(trainer.ema_decay, state.step)
    training.state = replace(
        state,
        step=state.step + 1,
        position=training.order.after(state.position),
        samples_seen=state.samples_seen + step.sums.samples,
        tokens_seen=state.tokens_seen + step.sums.tokens,
        window=(Sums(state.window, step.sums.layout) + step.sums).values,
        metrics={},
        rate=rate,
    )
    if training.state.step % trainer.log_every_n_steps == 0 or training.state.step == num_steps:
        _log(training, step, rate, clock)
    return step


def _log(training: Training, step: Step, rate: float, clock: Clock) -> None:
    """Record the sums since the last line, and begin new ones."""
    state = training.state
    window = Sums(state.window, training.learner.layout)
    seconds, waited, tokens = clock.read(state.tokens_seen)
    if training.ranks.is_main:
        metrics = {
            **window.metrics(),
            "epoch": state.position.epoch,
            "lr": rate,
            "grad_norm": step.grad_norm,
            "samples_seen": state.samples_seen,
            "tokens_seen": state.tokens_seen,
            "tokens_per_second": tokens / seconds,
            "data_wait_share": waited / seconds,
        }
        training.watch.record(state.step, metrics)
        training.watch.train_line(state.step, metrics)
        if training.data.any_thread and (advice := clock.advice(training.config.data.num_workers)):
            log.warning(advice)
    training.state = replace(state, window=Sums.zero(training.learner.layout).values)


def save_every(training: Training) -> int:
    """Steps between checkpoints."""
    trainer, keep = training.config.trainer, training.config.exp_manager.checkpoint_callback_params
    return keep.every_n_train_steps or trainer.val_check_interval or training.num_steps


def validation_due(training: Training) -> bool:
    """Whether the step that was just made is one to validate after."""
    step, every = training.state.step, training.config.trainer.val_check_interval or training.num_steps
    return step > 0 and (step % every == 0 or step == training.num_steps)


def _to_validate_on(training: Training) -> TrainingData:
    return training.data.for_validation(training.state.position.epoch)


def _validate(training: Training, decoding: ShortDecoding | None, asked: Sequence[int] = ()) -> bool:
    """Validate the draft as it would be exported now, and judge by it whether to go on. Returns False, with nothing changed, when `asked`
    was filled on a rank meanwhile: a validation may take longer than the time that a scheduler gives after SIGTERM."""
    sets = validation_sets(training.data)
    if not sets:
        return True
    draft = training.learner.evaluated()
    metrics = validate(training.learner, draft, _to_validate_on(training), sets, training.config.data.num_workers, asked)
    decoded = decoding.measure(draft, asked) if decoding is not None and metrics is not None else {}
    if metrics is None or decoded is None:
        return False
    metrics |= decoded
    take_validation(training, metrics)
    return True


def take_validation(training: Training, metrics: Mapping[str, Any]) -> None:
    """Record the metrics of a validation at this step, and judge by them whether to go on."""
    state = training.state
    if training.ranks.is_main and metrics:
        training.watch.record(state.step, metrics)
    if training.ranks.is_main:
        training.watch.validation_line(state.step, metrics)
    state = replace(state, metrics={name: value for name, value in metrics.items() if isinstance(value, float)})
    training.state = _judged(training, state)


def _judged(training: Training, state: TrainState) -> TrainState:
    """`state` with its latest validation compared with the best one, where early stopping is asked for. All ranks have the same sums,
    so they decide alike."""
    early = training.config.exp_manager.early_stopping
    if early.patience is None:
        return state
    value = state.metrics.get(early.monitor)
    if value is None:
        raise TrainingError(
            f"exp_manager.early_stopping.monitor is {early.monitor}, which this run's validation does not give; it gives "
            f"{', '.join(sorted(state.metrics)) or 'nothing'}."
        )
    sign = 1.0 if early.better == "max" else -1.0
    if state.best is None or state.judged_by != early.monitor or sign * (value - state.best) > early.min_delta:
        return replace(state, best=value, stale=0, judged_by=early.monitor)
    return replace(state, stale=state.stale + 1)


@contextmanager
def _peers(ranks: Ranks, folder: Path) -> Iterator[None]:
    """Ends with words of ours when a collective fails, which it does when another rank is gone or did not come in time."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        signs = ("gloo", "Connection closed", "Connection reset", "Broken pipe", "NCCL", "Timed out waiting")
        if ranks.world_size == 1 or not (isinstance(error, dist.DistError) or any(sign in text for sign in signs)):
            raise
        raise PeerFailedError(
            f"another rank of {ranks.world_size} is gone, or did not come to a meeting of all ranks in time "
            f"({text.splitlines()[0][:200]}). See what it said last in {folder / 'logs'}, then run the same command again: it goes on from "
            "the newest checkpoint."
        ) from error


@contextmanager
def sigterm() -> Iterator[list[int]]:
    """A list that is empty until SIGTERM comes; the process goes on until it looks."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
