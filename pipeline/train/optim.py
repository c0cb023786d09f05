"""Length of the run, learning rate and optimizer.

The learning rate is a function of the step alone, written into the parameter groups before each step. No scheduler object
exists, so nothing of it can be stepped once a rank, or be forgotten in a checkpoint.
"""

import math
from collections.abc import Callable

import torch
from torch import nn

from pipeline.config.training import OptimSection, TrainerSection
from pipeline.errors import ConfigError


def total_steps(section: TrainerSection, steps: Callable[[int], int]) -> int:
    """Optimizer steps of the whole run, from `max_steps` or `max_epochs`; `steps(epoch)` are those of an epoch.

    Raises `ConfigError` when neither is set.
    """
    if section.max_steps is not None:
        return section.max_steps
    if section.max_epochs is not None:
        return sum(steps(epoch) for epoch in range(section.max_epochs))
    raise ConfigError("trainer.max_steps and trainer.max_epochs are both unset, so training has no end. Set one of them.")


def learning_rate(section: OptimSection, step: int, num_steps: int) -> float:
    """Rate of optimizer step `step` (0-based) of `num_steps`.

    The rise reaches `lr` at the last warm-up step and starts above 0, so that no step is wasted; the half cosine after it
    reaches `min_lr` one step past the end.
    """
    sched = section.sched
    warmup = sched.warmup_steps if sched.warmup_steps is not None else round(sched.warmup_ratio * num_steps)
    if step < warmup:
        return section.lr * (step + 1) / warmup
    fall = min(1.0, (step - warmup) / max(1, num_steps - warmup))
    return sched.min_lr + (section.lr - sched.min_lr) * 0.5 * (1.0 + math.cos(math.pi * fall))


def build_optimizer(draft: nn.Module, section: OptimSection) -> torch.optim.AdamW:
    """AdamW over all parameters of `draft` (fp32); decay on matrices only, so that norms and biases are not pulled to 0."""
    parameters = list(draft.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=section.lr, betas=section.betas, eps=section.eps, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
