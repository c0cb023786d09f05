"""Stage two: from a configuration to a trained draft, and to the same draft when it was interrupted on the way.

LOG_DIR/
  config.yaml, provenance.json     the resolved configuration, and what ran
  metrics.jsonl                    one line each `log_every_n_steps`, one each validation
  checkpoints/step_0000123/        all that resuming needs (checkpoint.py)
  export/                          the draft as servers load it
  training.png                     loss, acceptance and accuracy by slot
"""

import copy
import logging
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from pipeline.config.load import to_yaml
from pipeline.config.schema import Config
from pipeline.draft.anchors import draw_anchors, usable_anchors
from pipeline.draft.batch import BatchShape
from pipeline.draft.export import export_draft
from pipeline.draft.model import Draft, DraftConfig
from pipeline.errors import CheckpointError
from pipeline.records import TokenSample
from pipeline.report.plots import plot_training
from pipeline.runtime.files import FolderLock, write_json
from pipeline.runtime.logs import Progress
from pipeline.runtime.provenance import provenance
from pipeline.runtime.ranks import Ranks
from pipeline.train.checkpoint import TrainState, best_first, checkpoints, load_checkpoint, prune, remove_leftovers, save_checkpoint
from pipeline.train.data import TrainingData, division_of, open_data, training_order, validation_sets
from pipeline.train.evaluate import validate
from pipeline.train.feed import Draw, Feed, num_micro_batches
from pipeline.train.identity import TRAINED_ON
from pipeline.train.optim import build_optimizer, learning_rate, total_steps
from pipeline.train.order import Order
from pipeline.train.step import Learner, Step, Sums, start_accelerator, train_step
from pipeline.train.watch import Clock, Watch, cut_metrics, read_metrics

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Run:
    """What stays the same from the first step to the last."""

    config: Config
    ranks: Ranks
    folder: Path
    data: TrainingData
    order: Order
    shape: BatchShape
    learner: Learner
    num_steps: int
    fingerprint: dict[str, Any]
    watch: Watch

    @property
    def checkpoint_folder(self) -> Path:
        return self.folder / "checkpoints"


def train(config: Config, ranks: Ranks) -> bool:
    """Train the draft of `config` in `config.log_dir`, from the newest checkpoint there if there is one, and export it.

    Every rank calls it; the folder must be on a file system that all of them see. Returns False when SIGTERM ended it early, with
    a checkpoint from which the same command goes on. Raises `CheckpointError` for a checkpoint of another run,
    `CacheLockedError` when another process trains in the folder.
    """
    folder = Path(config.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    with FolderLock(folder) if ranks.is_main else nullcontext():
        newest = _newest_checkpoint(config, ranks, folder / "checkpoints")
        run, state = _start(config, ranks, folder, newest)
        if ranks.is_main:
            _write_down(run, state)
        state, finished = _steps(run, state)
        if finished and ranks.is_main:
            _finish(run, state)
        for tracker in run.learner.accelerator.trackers:
            tracker.finish()
    return finished


def _newest_checkpoint(config: Config, ranks: Ranks, folder: Path) -> Path | None:
    """The checkpoint to go on from, the same for all ranks."""
    if ranks.is_main:
        remove_leftovers(folder)
    names: list[str | None] = [found[-1].name if (found := checkpoints(folder)) else None]
    if ranks.world_size > 1:
        dist.broadcast_object_list(names, src=0)
    name = names[0]
    if name is None:
        return None
    if not config.exp_manager.resume_if_exists:
        raise CheckpointError(
            f"{folder} holds checkpoints, up to {name}, and exp_manager.resume_if_exists is false. Set it to true to go on from there, or "
            "choose another exp_manager.explicit_log_dir."
        )
    if not (folder / name).is_dir():
        raise CheckpointError(
            f"rank {ranks.rank} does not see {folder / name}: exp_manager.explicit_log_dir must be on a shared file system."
        )
    return folder / name


def _start(config: Config, ranks: Ranks, folder: Path, newest: Path | None) -> tuple[Run, TrainState]:
    """Open the data, make the draft, and put the checkpoint `newest` into it."""
    data = open_data(config, ranks)
    section = config.model.draft
    geometry = DraftConfig.build(section, data.bundle, data.layer_ids, data.special_ids)
    data.check_mask_token(geometry.mask_token_id)
    order = training_order(data, config)
    fingerprint = {
        "data": dict(data.identity),
        "draft": asdict(geometry),
        "objective": config.model.objective.model_dump(),
        "optimizer": config.model.optim.name,
        "seed": config.trainer.seed,
        **order.settings,
    }
    torch.manual_seed(config.trainer.seed)
    draft = Draft(geometry).to(ranks.device)
    optimizer = build_optimizer(draft, config.model.optim)
    state = TrainState(window=Sums.zero(geometry.block_size).values)
    if newest is not None:
        state = load_checkpoint(newest, draft, optimizer, fingerprint)
        log.info("going on from %s: %d steps done, %d samples seen", newest, state.step, state.samples_seen)
    board = folder / "tensorboard" if config.exp_manager.create_tensorboard_logger else None
    accelerator = start_accelerator(config.trainer.precision, board)
    accelerator.init_trackers(config.name)
    compute = torch.bfloat16 if config.trainer.precision == "bf16-mixed" else torch.float32
    learner = Learner(
        draft=draft,
        model=accelerator.prepare_model(draft),
        optimizer=optimizer,
        bundle=data.bundle.to(ranks.device, compute),
        objective=config.model.objective,
        accelerator=accelerator,
        ranks=ranks,
    )
    num_steps = total_steps(config.trainer, order.steps)
    shape = BatchShape(geometry.target_layer_ids, geometry.block_size, geometry.hidden_size, data.dtype)
    watch = Watch(folder, num_steps, accelerator)
    return Run(config, ranks, folder, data, order, shape, learner, num_steps, fingerprint, watch), state


def _write_down(run: Run, state: TrainState) -> None:
    """Configuration and provenance of this start, and the size of the job."""
    text = to_yaml(run.config)
    (run.folder / "config.yaml").write_text(text, encoding="utf-8")
    write_json(run.folder / "provenance.json", {**provenance(text), "fingerprint": run.fingerprint})
    cut_metrics(run.folder, state.step, validated=bool(state.metrics))
    parameters = sum(p.numel() for p in run.learner.draft.parameters())
    log.info(
        "draft of %.1f M parameters; %d steps, %d an epoch, %s a step over %d rank(s)",
        parameters / 1e6,
        run.num_steps,
        run.order.steps(0),
        f"{run.order.batch_tokens} tokens" if run.order.batch_tokens else f"{run.order.batch_size} samples",
        run.ranks.dp_size,
    )
    if state.step > run.num_steps:
        log.warning("the newest checkpoint is at step %d, beyond the end asked for: nothing is trained, its draft is exported", state.step)


def _steps(run: Run, state: TrainState) -> tuple[TrainState, bool]:
    """Optimizer steps from `state` to the end, or to SIGTERM."""
    trainer, ranks = run.config.trainer, run.ranks
    save_every = run.config.exp_manager.checkpoint_callback_params.every_n_train_steps or trainer.val_check_interval or run.num_steps
    feed = Feed(run.data.source, _draw(run), run.shape, run.config.data.num_workers if run.data.any_thread else 0)
    division = division_of(run.config, run.order, ranks.dp_size)
    batches = feed.micro_batches(run.order, state.position, division, ranks.dp_rank)
    if _validation_due(run, state) and not state.metrics:  # SIGTERM came at this step, and there was no time
        state = _validate(run, state)
        _save(run, state)
    clock = Clock(feed)
    with _sigterm() as asked, Progress(max(run.num_steps, state.step), "steps", "training", ranks.is_main, done=state.step) as progress:
        while state.step < run.num_steps:
            rate = learning_rate(run.config.model.optim, state.step, run.num_steps)
            count = num_micro_batches(run.order, state.position, division)
            step = train_step(run.learner, batches, count, rate, trainer.gradient_clip_val, bool(asked))
            state = _after(run, state, step)
            progress.advance(1, f"loss {step.sums.loss:.3f}")
            last = state.step == run.num_steps
            if state.step % trainer.log_every_n_steps == 0 or last:
                state = _log(run, state, step, rate, clock)
            with clock.paused():
                if _validation_due(run, state) and not step.stop:
                    state = _validate(run, state)
                if state.step % save_every == 0 or last or step.stop:
                    _save(run, state)
            if step.stop:
                log.warning("stopped by SIGTERM after step %d; the same command goes on from here", state.step)
                return state, False
    return state, True


def _validation_due(run: Run, state: TrainState) -> bool:
    every = run.config.trainer.val_check_interval or run.num_steps
    return state.step > 0 and (state.step % every == 0 or state.step == run.num_steps)


def _draw(run: Run) -> Draw:
    """Anchors of a training sample, the nth time that it is drawn."""
    objective, block_size, seed = run.config.model.objective, run.shape.block_size, run.config.trainer.seed

    def draw(tokens: TokenSample, cycle: int) -> Any:
        usable = usable_anchors(tokens.spans, tokens.num_tokens, block_size, objective.anchor_fit)
        return draw_anchors(seed, cycle, tokens.sample_id, usable, objective.num_anchors)

    return draw


def _after(run: Run, state: TrainState, step: Step) -> TrainState:
    return TrainState(
        step=state.step + 1,
        position=run.order.after(state.position),
        samples_seen=state.samples_seen + step.sums.samples,
        tokens_seen=state.tokens_seen + step.sums.tokens,
        window=(Sums(state.window) + step.sums).values,
    )


def _log(run: Run, state: TrainState, step: Step, rate: float, clock: Clock) -> TrainState:
    """Record the sums since the last line, and begin new ones."""
    window = Sums(state.window)
    seconds, waited = clock.read()
    if run.ranks.is_main:
        metrics = {
            **window.metrics(),
            "epoch": state.position.epoch,
            "lr": rate,
            "grad_norm": step.grad_norm,
            "samples_seen": state.samples_seen,
            "tokens_seen": state.tokens_seen,
            "tokens_per_second": window.tokens / seconds,
            "data_wait_share": waited / seconds,
        }
        run.watch.record(state.step, metrics)
        run.watch.train_line(state.step, metrics)
    return replace(state, window=Sums.zero(run.shape.block_size).values)


def _validate(run: Run, state: TrainState) -> TrainState:
    sets = validation_sets(run.data)
    if not sets:
        return state
    metrics = validate(run.learner, run.data, sets, run.config.data.num_workers)
    if run.ranks.is_main and metrics:
        run.watch.record(state.step, metrics)
    if run.ranks.is_main:
        run.watch.validation_line(state.step, metrics)
    return replace(state, metrics={name: value for name, value in metrics.items() if isinstance(value, float)})


def _save(run: Run, state: TrainState) -> None:
    if run.ranks.is_main:
        save_checkpoint(run.checkpoint_folder, state, run.learner.draft, run.learner.optimizer, run.fingerprint)
        keep = run.config.exp_manager.checkpoint_callback_params
        prune(run.checkpoint_folder, keep.monitor, keep.mode, keep.save_top_k)


def _finish(run: Run, state: TrainState) -> None:
    """Export in the target's dtype, in which the pair will serve; draw the run."""
    folder = run.folder / "export"
    shutil.rmtree(folder, ignore_errors=True)
    export_draft(copy.deepcopy(run.learner.draft).to(run.data.dtype), folder)
    write_json(folder / TRAINED_ON, dict(run.data.states_identity))
    plot_training(read_metrics(run.folder), run.folder / "training.png", run.config.name)
    keep = run.config.exp_manager.checkpoint_callback_params
    best = best_first(run.checkpoint_folder, keep.monitor, keep.mode)
    log.info(
        "done: %d steps, %d samples, %d tokens; draft exported to %s%s",
        state.step,
        state.samples_seen,
        state.tokens_seen,
        folder,
        f"; best {keep.monitor} {best[0][1]:.4f} at {best[0][0].name}" if best else "",
    )


@contextmanager
def _sigterm() -> Iterator[list[int]]:
    """A list that is empty until SIGTERM comes; the process goes on until it looks."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    before = signal.signal(signal.SIGTERM, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)
