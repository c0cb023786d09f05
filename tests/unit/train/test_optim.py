import itertools
from typing import Any

import pytest
import torch
from torch import nn

from pipeline.config.training import OptimSection, SchedSection, TrainerSection
from pipeline.errors import ConfigError
from pipeline.runtime.ranks import start_ranks
from pipeline.train.optim import build_optimizers, learning_rate, set_learning_rate, total_steps
from tests.support.samples import learner


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
    model = nn.Sequential(nn.Linear(3, 3), nn.RMSNorm(3), nn.Conv1d(3, 3, 2, groups=3))  # its kernel has three dimensions
    (optimizer,) = build_optimizers(model, OptimSection(lr=0.1, weight_decay=0.5))
    before = [p.detach().clone() for p in model.parameters()]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.equal(old, new) == (new.ndim != 2)


@pytest.mark.parametrize("name", ["cosine", "linear", "constant", "wsd"])
def test_every_schedule_rises_to_lr_and_never_jumps(name: Any) -> None:
    section = OptimSection(lr=1.0, sched=SchedSection(name=name, warmup_steps=10, min_lr=0.1, decay_ratio=0.2))
    rates = [learning_rate(section, step, 100) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[100] == pytest.approx(1.0 if name == "constant" else 0.1)
    assert max(rates) == 1.0
    assert max(abs(a - b) for a, b in itertools.pairwise(rates)) < 0.11


def test_wsd_falls_at_the_end_only() -> None:
    by_ratio = OptimSection(lr=1.0, sched=SchedSection(name="wsd", warmup_steps=0, decay_ratio=0.25))
    by_steps = OptimSection(lr=1.0, sched=SchedSection(name="wsd", warmup_steps=0, decay_steps=25))
    rates = [learning_rate(by_ratio, step, 100) for step in range(101)]
    assert rates == [learning_rate(by_steps, step, 100) for step in range(101)]
    assert rates[:76] == [1.0] * 76
    assert rates[75:] == pytest.approx([1 - step / 25 for step in range(26)])
    # A longer run repeats the shorter one up to its fall, so a checkpoint from there serves both.
    assert [learning_rate(by_steps, step, 400) for step in range(75)] == rates[:75]
    # A fall longer than what the rise leaves begins when the rise is over.
    assert learning_rate(OptimSection(lr=1.0, sched=SchedSection(name="wsd", warmup_steps=50, decay_steps=80)), 50, 100) == 1.0


def test_muon_takes_the_matrices_of_the_layers_and_adamw_the_rest() -> None:
    draft = learner(start_ranks(1, None, 1)).draft
    optimizers = build_optimizers(draft, OptimSection(name="muon", lr=0.1, weight_decay=0.5))
    muon, adamw = optimizers
    assert isinstance(muon, torch.optim.Muon)
    assert isinstance(adamw, torch.optim.AdamW)
    names = {id(p): name for name, p in draft.named_parameters()}
    taken = {names[id(p)] for p in muon.param_groups[0]["params"]}
    assert taken == {name for name in names.values() if name.startswith("layers.") and "proj" in name}
    rest = {names[id(p)] for group in adamw.param_groups for p in group["params"]}
    assert taken | rest == set(names.values())
    before = {name: p.detach().clone() for name, p in draft.named_parameters()}
    generator = torch.Generator().manual_seed(1)
    for p in draft.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    set_learning_rate(optimizers, 1e-2)
    for optimizer in optimizers:
        optimizer.step()
    moved = {name: float((p.detach() - before[name] * (1 - 5e-3)).square().mean().sqrt()) for name, p in draft.named_parameters()}
    # Adam's first update is about 1 everywhere, so 1e-2 here; Muon's is to be of the size that AdamW's has later on, 0.2 of that.
    assert moved["fc.weight"] == pytest.approx(1e-2, rel=0.05)
    assert moved["layers.0.mlp.up_proj.weight"] == pytest.approx(0.2e-2, rel=0.25)
