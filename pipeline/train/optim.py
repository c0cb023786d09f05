"""Length of the run, learning rate, optimizers, frozen parameters, and the weight of a step in the running average.

The learning rate is a function of the step alone, written into the parameter groups before each step. No scheduler object
exists, so nothing of it can be stepped once a rank, or be forgotten in a checkpoint.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pipeline.config.schema import ModelSection
from pipeline.config.training import OptimSection, TrainerSection
from pipeline.errors import ConfigError
from pipeline.train.parts import placed_like, whole

LIKE_ADAMW = "match_rms_adamw"
"""Muon's update gets the size that AdamW's has, so that one learning rate and one decay serve both."""


def total_steps(section: TrainerSection, steps: Callable[[int], int]) -> int:
    """Optimizer steps of the whole run, from `max_steps` or `max_epochs`; `steps(epoch)` are those of one epoch.

    Raises `ConfigError` when neither is set.
    """
    if section.max_steps is not None:
        return section.max_steps
    if section.max_epochs is not None:
        return sum(steps(epoch) for epoch in range(section.max_epochs))
    raise ConfigError("trainer.max_steps and trainer.max_epochs are both unset, so training has no end. Set one of them.")


def learning_rate(section: OptimSection, step: int, num_steps: int) -> float:
    """Rate of optimizer step `step` (0-based) of `num_steps`.

    The rise reaches `lr` at the last warm-up step and starts above 0, so that no step is wasted; a fall starts at `lr` and
    reaches `min_lr` one step past the end.
    """
    sched = section.sched
    warmup = sched.warmup_steps if sched.warmup_steps is not None else round(sched.warmup_ratio * num_steps)
    if step < warmup:
        return section.lr * (step + 1) / warmup
    if sched.name == "constant":
        return section.lr
    begin = warmup
    if sched.name == "wsd":
        decay = sched.decay_steps if sched.decay_steps is not None else round(sched.decay_ratio * num_steps)
        begin = max(warmup, num_steps - decay)
    done = min(1.0, max(0, step - begin) / max(1, num_steps - begin))
    left = 0.5 * (1.0 + math.cos(math.pi * done)) if sched.name == "cosine" else 1.0 - done
    return sched.min_lr + (section.lr - sched.min_lr) * left


def build_optimizers(draft: nn.Module, section: OptimSection) -> tuple[torch.optim.Optimizer, ...]:
    """Optimizers that share out the trainable parameters (fp32) of `draft`.

    Decay on matrices only, so that norms, biases and the kernels of convolutions, which are factors of a channel like a norm's, are
    not pulled to 0. Muon takes the matrices inside the layers and leaves everything else to AdamW, as its authors advise.
    """
    trained = [(name, p) for name, p in draft.named_parameters() if p.requires_grad]
    by_muon = [p for name, p in trained if section.name == "muon" and p.ndim == 2 and name.startswith("layers.")]
    taken = {id(p) for p in by_muon}
    rest = [p for _, p in trained if id(p) not in taken]
    groups = [
        {"params": [p for p in rest if p.ndim == 2], "weight_decay": section.weight_decay},
        {"params": [p for p in rest if p.ndim != 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizers: list[torch.optim.Optimizer] = []
    if by_muon:
        decay, momentum = section.weight_decay, section.momentum
        kind = GatheredMuon if any(isinstance(p, DTensor) for p in by_muon) else torch.optim.Muon
        optimizers.append(kind(by_muon, section.lr, decay, momentum, adjust_lr_fn=LIKE_ADAMW))
    if groups:
        optimizers.append(torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True))
    return tuple(optimizers)


class GatheredMuon(torch.optim.Muon):
    """Muon of a draft that is divided over the ranks. A matrix is put together for its orthogonalisation, one at a time and on every rank,
    since the products of its parts would cross ranks many times; the momentum stays divided."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p.grad))
                buffer.lerp_(p.grad, 1 - group["momentum"])
                alone = nn.Parameter(whole(p.detach()))
                alone.grad = whole(p.grad.lerp(buffer, group["momentum"]))
                once = torch.optim.Muon([alone], group["lr"], group["weight_decay"], 0.0, nesterov=False, adjust_lr_fn=LIKE_ADAMW)
                once.step()  # type: ignore[no-untyped-call]
                p.copy_(placed_like(alone.detach(), p))


def set_learning_rate(optimizers: Iterable[torch.optim.Optimizer], rate: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate


def freeze_parameters(draft: nn.Module, section: ModelSection) -> list[str]:
    """Freeze what `freeze_params` names and `prevent_freeze_params` does not; the names of what is frozen.

    Raises `ConfigError` for a pattern that matches no parameter, and when nothing is left to train.
    """
    names = [name for name, _ in draft.named_parameters()]
    for field in ("freeze_params", "prevent_freeze_params"):
        for pattern in getattr(section, field):
            if not any(re.search(pattern, name) for name in names):
                raise ConfigError(f"model.{field}: {pattern!r} matches no parameter of the draft. They are: {', '.join(names)}")
    frozen = [n for n in names if _matches(section.freeze_params, n) and not _matches(section.prevent_freeze_params, n)]
    if len(frozen) == len(names):
        raise ConfigError(
            f"model.freeze_params {list(section.freeze_params)} freezes every parameter of the draft: nothing is left to train."
        )
    for name in frozen:
        draft.get_parameter(name).requires_grad_(False)
    return frozen


def step_weight(ema_decay: float, step: int) -> float:
    """Share of the weights after step `step` (0-based) in the running average. Large at first, so that the average soon forgets the
    weights that the draft began with; the decay grows as (1 + t)/(10 + t) until it is `ema_decay`."""
    return 1.0 - min(ema_decay, (1 + step) / (10 + step))


def _matches(patterns: Sequence[str], name: str) -> bool:
    return any(re.search(pattern, name) for pattern in patterns)
