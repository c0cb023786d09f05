"""Decoding of target and draft together: never another token than the target's own, and steps as the walk foretells them."""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from pipeline.config.schema import ObjectiveSection
from pipeline.decode.speculative import check_rewindable, greedy_decode, speculative_decode
from pipeline.draft.config import DraftConfig
from pipeline.draft.loss import objective
from pipeline.draft.metrics import walk_lengths
from pipeline.draft.model import Draft
from pipeline.errors import DraftError, TargetError
from pipeline.records import DraftBatch, TargetBundle
from tests.support.drafts import lively_draft, small_config
from tests.support.family import LAYERS
from tests.support.tiny import MASK_TOKEN_ID, TinyShape, build_model

LAYER_IDS = (1, 3, 5)
PROMPT = [7, 100, 31, 250, 12, 60, 5]


@pytest.fixture(scope="module")
def target() -> Qwen3ForCausalLM:
    return build_model(TinyShape())


def bundle_of(model: Any) -> TargetBundle:
    embedding, head = model.get_input_embeddings().weight.detach(), model.lm_head.weight.detach()
    return TargetBundle(embedding, head, model.model.norm.weight.detach(), model.config.to_dict()).check()


def config_for(model: Any, **changes: Any) -> DraftConfig:
    values = {
        "hidden_size": model.config.hidden_size,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": model.config.vocab_size,
        "num_target_layers": model.config.num_hidden_layers,
        "target_layer_ids": LAYER_IDS,
        "block_size": 6,
        "mask_token_id": MASK_TOKEN_ID,
        **changes,
    }
    return small_config(**values)


def batch_of(model: Any, prompt: Sequence[int], answer: Sequence[int], anchors: Sequence[int]) -> DraftBatch:
    """One row, prompt and answer, only the answer supervised; features from one forward of the target."""
    ids = torch.tensor([[*prompt, *answer]])
    with torch.no_grad():
        states = model.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    at = torch.tensor([list(anchors)])
    return DraftBatch(
        sample_ids=("text",),
        input_ids=ids,
        loss_mask=torch.arange(ids.shape[1]).unsqueeze(0) >= len(prompt),
        features=torch.cat([states[layer + 1] for layer in LAYER_IDS], dim=-1),
        position_ids=torch.arange(ids.shape[1]).unsqueeze(0),
        anchors=at,
        document_start=torch.zeros_like(at),
        document_end=torch.full_like(at, ids.shape[1]),
        block_valid=torch.ones_like(at, dtype=torch.bool),
    ).check()


def fit(draft: Draft, model: Any, batch: DraftBatch, steps: int) -> None:
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    for _ in range(steps):
        sums = objective(draft, bundle_of(model), batch, ObjectiveSection(gamma=4.0))
        optimizer.zero_grad()
        torch.autograd.backward(sums.loss)
        optimizer.step()


@pytest.fixture(scope="module")
def answer(target: Qwen3ForCausalLM) -> list[int]:
    return greedy_decode(target, PROMPT, 41, ()).ids


@pytest.fixture(scope="module")
def fitted(target: Qwen3ForCausalLM, answer: list[int]) -> Draft:
    """A draft that knows `answer` by heart."""
    torch.manual_seed(0)
    draft = Draft(config_for(target))
    fit(draft, target, batch_of(target, PROMPT, answer, range(len(PROMPT), len(PROMPT) + len(answer) - 1)), 120)
    return draft.eval()


def test_greedy_is_the_targets_own_generation(target: Qwen3ForCausalLM, answer: list[int]) -> None:
    out = target.generate(torch.tensor([PROMPT]), max_new_tokens=41, do_sample=False, eos_token_id=None)
    assert answer == out[0, len(PROMPT) :].tolist()


def test_a_draft_that_knows_the_text_commits_whole_blocks(target: Qwen3ForCausalLM, fitted: Draft, answer: list[int]) -> None:
    decoded = speculative_decode(target, fitted, bundle_of(target), PROMPT, 41, ())
    assert decoded.ids == answer
    assert decoded.step_lengths == [6, 6, 6, 6, 6, 6, 4]
    assert decoded.acceptance_length == 40 / 7


@pytest.mark.parametrize("name", LAYERS)
def test_an_untrained_draft_changes_nothing_but_speed(target: Qwen3ForCausalLM, answer: list[int], name: str) -> None:
    decoded = speculative_decode(target, lively_draft(config_for(target, **LAYERS[name])), bundle_of(target), PROMPT, 41, ())
    assert decoded.ids == answer
    assert sum(decoded.step_lengths) == 40


@pytest.mark.parametrize(("name", "steps"), [("windows", 20), ("windows", 30), ("kimi_k3", 40)])
def test_steps_are_those_of_the_walk(target: Qwen3ForCausalLM, answer: list[int], name: str, steps: int) -> None:
    """A half-trained draft, some blocks accepted in part: scoring every position foretells each step of serving."""
    torch.manual_seed(1)
    draft = Draft(config_for(target, **LAYERS[name]))
    first = len(PROMPT)
    every = batch_of(target, PROMPT, answer, range(first, first + len(answer)))
    fit(draft, target, batch_of(target, PROMPT, answer, range(first, first + len(answer) - 6, 2)), steps)
    with torch.no_grad():
        accepted = objective(draft, bundle_of(target), every, ObjectiveSection()).accepted[0].numpy()
    walk = walk_lengths(accepted, len(answer))
    served = speculative_decode(target, draft, bundle_of(target), PROMPT, len(answer), ())
    assert served.ids == answer
    assert served.step_lengths == walk
    # Kimi K3's draft proposes one token for a whole block (test_kimi): steps are 1, and 2 here.
    assert len(set(walk)) > (1 if name == "kimi_k3" else 2), "all steps alike: this draft proves little"


@pytest.mark.parametrize("place", [0, 1, 5, 9])
def test_a_stop_token_ends_the_answer_inside_a_block(target: Qwen3ForCausalLM, fitted: Draft, answer: list[int], place: int) -> None:
    stop = answer[place]
    end = answer.index(stop) + 1
    decoded = speculative_decode(target, fitted, bundle_of(target), PROMPT, 41, {stop, 999})
    assert decoded.ids == answer[:end] == greedy_decode(target, PROMPT, 41, {stop}).ids
    assert sum(decoded.step_lengths) == end - 1


@pytest.mark.parametrize("length", [1, 2, 6, 7, 8])
def test_the_token_limit_cuts_the_last_step(target: Qwen3ForCausalLM, fitted: Draft, answer: list[int], length: int) -> None:
    decoded = speculative_decode(target, fitted, bundle_of(target), PROMPT, length, ())
    assert decoded.ids == answer[:length]
    whole, rest = divmod(length - 1, 6)
    assert decoded.step_lengths == [6] * whole + [rest] * (rest > 0)


def test_a_prompt_of_one_token(target: Qwen3ForCausalLM) -> None:
    draft = lively_draft(config_for(target))
    assert speculative_decode(target, draft, bundle_of(target), [9], 12, ()).ids == greedy_decode(target, [9], 12, ()).ids


def test_bfloat16(target: Qwen3ForCausalLM, fitted: Draft) -> None:
    model = build_model(TinyShape()).to(torch.bfloat16)
    half = Draft(fitted.config)
    half.load_state_dict(fitted.state_dict())
    decoded = speculative_decode(model, half.to(torch.bfloat16), bundle_of(model), PROMPT, 41, ())
    assert len(decoded.ids) == 41
    # float32 masters decode beside a bfloat16 target too
    assert len(speculative_decode(model, fitted, bundle_of(model), PROMPT, 41, ()).ids) == 41


def test_a_target_with_windows_is_taken_back_rightly() -> None:
    """The target's own sliding layers, far beyond their window."""
    config = Qwen3Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=8, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        layer_types=["sliding_attention", "full_attention"] * 4, sliding_window=9, use_sliding_window=True, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(3)
    model = Qwen3ForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.ndim == 2 else 1.0)
    draft = lively_draft(config_for(model, mask_token_id=63))
    greedy = greedy_decode(model, [1, 2, 3], 40, ())
    assert greedy.ids == model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=40, do_sample=False, eos_token_id=None)[0, 3:].tolist()
    assert speculative_decode(model, draft, bundle_of(model), [1, 2, 3], 40, ()).ids == greedy.ids


def test_recurrent_targets_are_refused() -> None:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    with torch.device("meta"):
        model = Qwen3NextForCausalLM(Qwen3NextConfig(num_hidden_layers=4, num_experts=4, vocab_size=64))
    with pytest.raises(TargetError, match=r"recurrent layers \(linear_attention\)"):
        check_rewindable(model)


@pytest.mark.parametrize("layers", [[1, 2, 3, 5, 6, 7], []])
def test_kimis_linear_attention_is_recurrent_too(target: Qwen3ForCausalLM, layers: list[int]) -> None:
    """As its config says it, which names no layer types. There is no such model in transformers, so a Qwen3 carries the field."""
    config = copy.deepcopy(target.config)
    config.linear_attn_config = {"kda_layers": layers, "full_attn_layers": [4, 8]}
    model = Qwen3ForCausalLM(config)
    if layers:
        with pytest.raises(TargetError, match=r"recurrent layers \(kda_layers\)"):
            check_rewindable(model)
    else:
        check_rewindable(model)


def test_wrong_pairs_and_empty_requests_are_refused(target: Qwen3ForCausalLM) -> None:
    other = lively_draft(config_for(target, num_target_layers=12))
    with pytest.raises(DraftError, match="made for a target of 12 layers and hidden size 64; this one has 8 layers"):
        speculative_decode(target, other, bundle_of(target), PROMPT, 4, ())
    with pytest.raises(TargetError, match="prompt of 0 tokens"):
        greedy_decode(target, [], 4, ())
    with pytest.raises(TargetError, match="0 new tokens"):
        speculative_decode(target, lively_draft(config_for(target)), bundle_of(target), PROMPT, 0, ())


def test_the_fitted_draft_is_scored_as_served(target: Qwen3ForCausalLM, fitted: Draft, answer: list[int]) -> None:
    first = len(PROMPT)
    with torch.no_grad():
        scored = objective(fitted, bundle_of(target), batch_of(target, PROMPT, answer, range(first, first + 40)), ObjectiveSection())
    assert np.array_equal(scored.accepted[0, :36].numpy(), np.full(36, 5))
