import itertools

import pytest
import torch
from torch import nn

from pipeline.config.training import OptimSection, SchedSection, TrainerSection
from pipeline.errors import ConfigError
from pipeline.train.optim import build_optimizers, learning_rate, total_steps


def test_rate_rises_to_lr_and_falls_to_min_lr() -> None:
    section = OptimSection(lr=1e-3, sched=SchedSection(warmup_steps=10, min_lr=1e-5))
    rates = [learning_rate(section, step, 110) for step in range(111)]
    assert rates[0] == pytest.approx(1e-4)
    assert rates[9] == rates[10] == 1e-3
    assert rates[60] == pytest.approx((1e-3 + 1e-5) / 2)
    assert rates[110] == pytest.approx(1e-5)
    assert all(a > b for a, b in itertools.pairwise(rates[10:]))


def test_warm_up_is_a_share_of_the_run_unless_given_in_steps() -> None:
    assert learning_rate(OptimSection(lr=1.0, sched=SchedSection(warmup_ratio=0.04)), 1, 100) == 0.5
    assert learning_rate(OptimSection(lr=1.0, sched=SchedSection(warmup_ratio=0.0)), 0, 100) == 1.0


def test_length_of_a_run() -> None:
    assert total_steps(TrainerSection(max_steps=7), lambda epoch: 3) == 7
    assert total_steps(TrainerSection(max_epochs=3), lambda epoch: 3 + epoch % 2) == 10
    with pytest.raises(ConfigError, match=r"trainer\.max_steps and trainer\.max_epochs are both unset"):
        total_steps(TrainerSection(), lambda epoch: 3)


def test_decay_pulls_on_matrices_only() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.RMSNorm(3))
    (optimizer,) = build_optimizers(model, OptimSection(lr=0.1, weight_decay=0.5))
    before = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new) == (new.ndim < 2)
