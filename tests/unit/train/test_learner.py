from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.schema import Config, ModelSection
from pipeline.config.training import TrainerSection
from pipeline.draft.anchors import usable_anchors
from pipeline.draft.batch import BatchShape, collate
from pipeline.errors import ConfigError, LaunchError
from pipeline.records import CapturedSample
from pipeline.runtime.ranks import start_ranks
from pipeline.train.learner import Learner, build_learner, check_compiler, divided_launch, start_accelerator
from pipeline.train.optim import freeze_parameters, step_weight
from pipeline.train.step import train_step
from tests.support.samples import HIDDEN, LAYERS, captured, learner


def _learn(learning: Learner, samples: Sequence[CapturedSample], **average: float) -> list[float]:
    """A step on each sample; losses and norms of gradients."""
    shape, figures = BatchShape(LAYERS, 4, HIDDEN, torch.float32), []
    for number, sample in enumerate(samples):
        batch = collate([sample], [usable_anchors(sample.tokens.spans, sample.tokens.num_tokens, 4, "partial")], shape)
        step = train_step(learning, iter([batch]), 1, 1e-3, 1.0)
        figures += [step.sums.loss, step.grad_norm]
        for decay in average.values():
            learning.update_average(decay, number)
    return figures


def _built(**trainer: Any) -> Learner:
    plain = learner(start_ranks(1, None, 1))
    config = Config.model_validate({"model": {"objective": {"gamma": 2.0}, "optim": {"weight_decay": 0.1}}, "trainer": trainer})
    return build_learner(config, plain.draft, plain.bundle, start_accelerator("fp32"), plain.ranks)


def test_the_average_is_of_the_weights_after_each_step() -> None:
    samples, learning = captured(4, seed=4), learner(start_ranks(1, None, 1), ema_decay=0.7)
    expected = learning.draft.fc.weight.detach().clone()
    for number, sample in enumerate(samples):
        _learn(learning, [sample])
        learning.update_average(0.7, number)
        expected = expected + step_weight(0.7, number) * (learning.draft.fc.weight.detach() - expected)
    torch.testing.assert_close(learning.evaluated().fc.weight, expected, rtol=1e-5, atol=1e-8)
    assert [step_weight(0.7, step) for step in (0, 10, 1000)] == pytest.approx([0.9, 0.45, 0.3])
    assert not torch.equal(learning.evaluated().fc.weight, learning.draft.fc.weight)


def test_activations_formed_twice_give_the_same_numbers() -> None:
    samples = captured(4, seed=4)
    assert _learn(_built(gradient_checkpointing=True), samples) == pytest.approx(_learn(_built(), samples), rel=1e-6)


@pytest.mark.slow
@pytest.mark.timeout(900)  # a compiler at work
@pytest.mark.filterwarnings("ignore")  # of its own parts
def test_compiled_layers_give_the_same_numbers() -> None:
    samples = captured(6, seed=4)
    learning = _built(compile=True, gradient_checkpointing=False)
    assert _learn(learning, samples) == pytest.approx(_learn(_built(), samples), rel=1e-5)
    assert set(learning.draft.state_dict()) == set(_built().draft.state_dict())


def test_no_compiler_is_an_error_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_compiler(TrainerSection(compile=False))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    check_compiler(TrainerSection(compile=False))
    with pytest.raises(ConfigError, match=r"no C\+\+ compiler was found \(looked for g\+\+, clang\+\+\)"):
        check_compiler(TrainerSection(compile=True))


def test_what_of_accelerates_settings_cannot_be_followed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not divided_launch()
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(LaunchError, match="FSDP version 1"):
        divided_launch()
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert divided_launch()
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    with pytest.raises(LaunchError, match="fsdp_offload_params"):
        divided_launch()


def test_frozen_parameters_are_out_of_the_optimizer_and_stay() -> None:
    plain = learner(start_ranks(1, None, 1))
    section = ModelSection(freeze_params=(r"^layers\.0\.", "norm"), prevent_freeze_params=(r"mlp",))
    frozen = freeze_parameters(plain.draft, section)
    assert "layers.0.self_attn.q_proj.weight" in frozen
    assert "layers.1.post_attention_layernorm.weight" in frozen
    assert not [name for name in frozen if "mlp" in name]
    learning = build_learner(Config(), plain.draft, plain.bundle, plain.accelerator, plain.ranks)
    before = {name: p.detach().clone() for name, p in learning.draft.named_parameters()}
    _learn(learning, captured(3, seed=4))
    same = [name for name, p in learning.draft.named_parameters() if torch.equal(p, before[name])]
    assert same == frozen
    owned = {id(p) for optimizer in learning.optimizers for group in optimizer.param_groups for p in group["params"]}
    assert not owned & {id(p) for name, p in learning.draft.named_parameters() if name in frozen}


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"freeze_params": ["layers.7"]}, r"model\.freeze_params: 'layers.7' matches no parameter"),
        ({"freeze_params": ["fc"], "prevent_freeze_params": ["head"]}, r"model\.prevent_freeze_params: 'head' matches no parameter"),
        ({"freeze_params": ["."]}, "freezes every parameter"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        freeze_parameters(learner(start_ranks(1, None, 1)).draft, ModelSection.model_validate(section))
