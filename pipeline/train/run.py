"""One draft in training: what learns, where it stands, and the folder that it writes. `loop.py` advances it.

Nothing in it is shared with another draft but the data, so several can be trained side by side from one reading of a cache.

LOG_DIR/
  config.yaml                      what the configuration says, with interpolations and overrides in place
  provenance.json                  what ran: every field of the configuration, versions, git state, identity of the cache, starting weights
  metrics.jsonl                    one line each `log_every_n_steps`, one each validation
  checkpoints/step_0000123/        all that resuming needs (checkpoint.py)
  export/                          the draft as servers load it, as of the last step
  export_best/                     that of the best checkpoint, where that is not the last one
  training.png                     loss, acceptance and accuracy by slot
  logs/rank0.log                   what each rank said
"""

import json
import logging
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.config.load import to_yaml
from pipeline.config.schema import Config
from pipeline.draft.anchors import draw_anchors, draw_prefixes, usable_anchors
from pipeline.draft.batch import BatchShape
from pipeline.draft.export import export_draft
from pipeline.draft.model import Draft, DraftConfig, draft_with
from pipeline.errors import CheckpointError
from pipeline.records import TokenSample
from pipeline.report.plots import plot_training
from pipeline.runtime.files import write_json
from pipeline.runtime.provenance import provenance
from pipeline.runtime.ranks import Ranks
from pipeline.train.checkpoint import (
    TrainState,
    best_first,
    checkpoints,
    load_checkpoint,
    read_validated,
    remove_leftovers,
    take_snapshot,
)
from pipeline.train.data import TrainingData
from pipeline.train.feed import Draw, Prefixes
from pipeline.train.identity import TRAINED_ON
from pipeline.train.initial import load_initial
from pipeline.train.learner import Learner, build_learner, start_accelerator
from pipeline.train.optim import freeze_parameters, learning_rate, total_steps
from pipeline.train.order import Order
from pipeline.train.saver import Saver
from pipeline.train.step import Sums
from pipeline.train.watch import Watch, cut_metrics, read_metrics, settle_monitors, to_disk

log = logging.getLogger(__name__)

PROVENANCE = "provenance.json"


@dataclass(eq=False)
class Training:
    """Everything but `state` stays the same from the first step to the last. `fingerprint` is what a checkpoint must agree with."""

    config: Config
    ranks: Ranks
    folder: Path
    data: TrainingData
    order: Order
    learner: Learner
    num_steps: int
    fingerprint: Mapping[str, Any]
    watch: Watch
    saver: Saver
    state: TrainState

    @property
    def shape(self) -> BatchShape:
        draft = self.learner.draft.config
        return BatchShape(draft.target_layer_ids, draft.block_size, draft.hidden_size, self.data.dtype)

    @property
    def stopped_early(self) -> bool:
        """Whether the validations were no better for as long as `exp_manager.early_stopping` waits."""
        patience = self.config.exp_manager.early_stopping.patience
        return patience is not None and self.state.stale >= patience

    @property
    def finished(self) -> bool:
        return self.state.step >= self.num_steps or self.stopped_early

    def save(self, *, final: bool = False) -> None:
        """Begin to write a checkpoint. Every rank must call it. Raises `CheckpointError` when the one before could not be written."""
        self.saver.save(take_snapshot(self.learner, self.state, self.fingerprint, final=final))

    def draw(self) -> Draw:
        """Anchors of a training sample, the nth time that it is drawn."""
        objective, draft, seed = self.config.model.objective, self.learner.draft.config, self.config.trainer.seed

        def draw(tokens: TokenSample, cycle: int) -> Any:
            usable = usable_anchors(tokens.spans, tokens.num_tokens, draft.block_size, objective.anchor_fit, draft.label_shift)
            return draw_anchors(seed, cycle, tokens.sample_id, usable, objective.num_anchors)

        return draw

    def prefixes(self) -> Prefixes | None:
        """Visible prefixes of their blocks, where the objective draws them."""
        objective, block_size, seed = self.config.model.objective, self.shape.block_size, self.config.trainer.seed
        if objective.name != "variable_prefix":
            return None
        return lambda tokens, cycle, anchors: draw_prefixes(seed, cycle, tokens.sample_id, anchors, block_size, objective.prefix_base)


def newest_checkpoint(config: Config, ranks: Ranks, folder: Path) -> Path | None:
    """The checkpoint in `folder` to go on from, the same for all ranks, which must all call it. Raises `CheckpointError` when the
    configuration forbids to go on, or a rank does not see the folder."""
    if ranks.is_main:
        remove_leftovers(folder)
    names: list[str | None] = [found[-1].name if (found := checkpoints(folder)) else None]
    if ranks.world_size > 1:
        dist.broadcast_object_list(names, src=0, device=ranks.device)
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


def start_training(config: Config, ranks: Ranks, data: TrainingData, order: Order, folder: Path) -> Training:
    """Make the draft of `config`, put the newest checkpoint of `folder` into it if there is one, and write down what runs.

    Every rank must call it. Raises `DraftError` for a draft that cannot be, `CheckpointError` for a checkpoint of another run.
    """
    config = settle_monitors(config, data.own_answers)
    newest = newest_checkpoint(config, ranks, folder / "checkpoints")
    geometry = DraftConfig.build(config.model.draft, data.bundle, data.layer_ids, data.special_ids)
    data.check_mask_token(geometry.mask_token_id)
    torch.manual_seed(config.trainer.seed)
    draft = Draft(geometry)
    initial = load_initial(draft, config.model.init_from_checkpoint) if newest is None else None
    frozen = freeze_parameters(draft, config.model)
    if frozen:
        log.info("frozen: %s", ", ".join(frozen))
    fingerprint = {
        "data": dict(data.identity),
        "draft": asdict(geometry),
        "objective": config.model.objective.model_dump(),
        "optimizer": config.model.optim.name,
        "ema_decay": config.trainer.ema_decay,
        "frozen": frozen,
        "seed": config.trainer.seed,
        **order.settings,
    }
    learner = build_learner(config, draft, data.bundle, start_accelerator(config.trainer.precision), ranks)
    state = TrainState(window=Sums.zero(learner.layout).values)
    if newest is not None:
        state = load_checkpoint(newest, learner, fingerprint)
        if state.judged_by not in (None, config.exp_manager.early_stopping.monitor):
            state = replace(state, best=None, stale=0, judged_by=None)  # figures of another metric tell nothing of this one
        log.info("going on from %s: %d steps done, %d samples seen", newest, state.step, state.samples_seen)
    num_steps = total_steps(config.trainer, order.steps)
    _tell_other_rates(config, state, num_steps)
    saver = Saver(folder / "checkpoints", config.exp_manager.checkpoint_callback_params, ranks)
    watch = Watch(config, folder, num_steps, ranks.is_main)
    training = Training(config, ranks, folder, data, order, learner, num_steps, fingerprint, watch, saver, state)
    if ranks.is_main:
        with to_disk(folder):
            _write_down(training, initial)
    return training


def _tell_other_rates(config: Config, state: TrainState, num_steps: int) -> None:
    """Warn when the last step would have had another learning rate: training goes on, and is no longer one run without a break."""
    now = learning_rate(config.model.optim, state.step - 1, num_steps) if 0 < state.step < num_steps else None
    if state.rate is not None and now is not None and not math.isclose(state.rate, now):
        log.warning(
            "step %d was made at learning rate %.3e, and would be at %.3e now: model.optim, or the length of %d steps, is not what this "
            "run began with. From here on the rates are those of the new schedule",
            *(state.step, state.rate, now, num_steps),
        )


def _write_down(training: Training, initial: Mapping[str, Any] | None) -> None:
    """Configuration and provenance of this start, and the size of the job."""
    config, folder, state, order = training.config, training.folder, training.state, training.order
    (folder / "config.yaml").write_text(to_yaml(config, named_only=True), encoding="utf-8")
    told = {"fingerprint": training.fingerprint, "init_from_checkpoint": initial or _began_with(folder, state)}
    write_json(folder / PROVENANCE, {**provenance(to_yaml(config)), **told})
    cut_metrics(folder, state.step, validated=bool(state.metrics))
    sizes = [(p.numel(), p.requires_grad) for p in training.learner.draft.parameters()]
    log.info(
        "draft of %.1f M parameters, %.1f M trained, %s; %d steps, %d an epoch, %s a step over %d rank(s)",
        sum(size for size, _ in sizes) / 1e6,
        sum(size for size, trained in sizes if trained) / 1e6,
        "divided over the ranks (FSDP2)" if training.learner.is_divided else "whole on each rank",
        training.num_steps,
        order.steps(0),
        f"{order.batch_tokens} tokens" if order.batch_tokens else f"{order.batch_size} samples",
        training.ranks.dp_size,
    )
    if state.step > training.num_steps:
        log.warning("the newest checkpoint is at step %d, beyond the end asked for: nothing is trained, its draft is exported", state.step)


def _began_with(folder: Path, state: TrainState) -> Any:
    """The starting weights that the first start of this run wrote down; a later start has only the checkpoint."""
    try:
        return json.loads((folder / PROVENANCE).read_bytes())["init_from_checkpoint"] if state.step else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def finish(training: Training) -> None:
    """Export in the target's dtype, in which the pair will serve, the draft as it is now and the best one; draw the run. Every rank must
    call it."""
    config, state = training.config, training.state
    draft = training.learner.evaluated()
    training.saver.wait()
    if not training.ranks.is_main:
        return
    folder, best_folder = training.folder / "export", training.folder / "export_best"
    _export(training, draft, folder)
    with to_disk(training.folder / "training.png"):
        plot_training(read_metrics(training.folder), training.folder / "training.png", config.name)
    keep, early = config.exp_manager.checkpoint_callback_params, config.exp_manager.early_stopping
    last, best = checkpoints(training.saver.folder)[-1:], best_first(training.saver.folder, keep.monitor, keep.better)[:1]
    if best and best[0][0] not in last:
        _export(training, draft_with(draft.config, read_validated(best[0][0])[2]), best_folder)
    else:
        shutil.rmtree(best_folder, ignore_errors=True)
    if training.stopped_early:
        log.info(
            "stopped early: %s was not better than %.4f in the last %d validation(s), so training ended at step %d of %d",
            *(early.monitor, state.best, state.stale, state.step, training.num_steps),
        )
    log.info(
        "done: %d steps, %d samples, %d tokens; draft%s exported to %s%s%s",
        state.step,
        state.samples_seen,
        state.tokens_seen,
        " (its running average)" if training.learner.average is not None else "",
        folder,
        "".join(f"; final checkpoint {path.name}" for path in last),
        "".join(
            f"; best {keep.monitor} {value:.4f} at {path.name}" + (f", exported to {best_folder}" if path not in last else "")
            for path, value in best
        ),
    )


def _export(training: Training, draft: Draft, folder: Path) -> None:
    with to_disk(folder):
        shutil.rmtree(folder, ignore_errors=True)
        export_draft(served_copy(draft, training.data.dtype), folder)
        write_json(folder / TRAINED_ON, dict(training.data.states_identity))


def served_copy(draft: Draft, dtype: torch.dtype) -> Draft:
    """A copy of `draft` in `dtype`, without what training wrapped around its layers."""
    return draft_with(draft.config, {name: p.detach().to(dtype, copy=True) for name, p in draft.named_parameters()})
