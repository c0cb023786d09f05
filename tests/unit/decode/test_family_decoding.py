"""Decoding of every variant: never another token than the target's own, and blocks accepted whole where the text is known by heart."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from pipeline.config.draft import ObjectiveSection
from pipeline.decode.speculative import greedy_decode, speculative_decode
from pipeline.draft.loss import objective
from pipeline.draft.model import Draft
from pipeline.records import TargetBundle
from tests.support.drafts import lively_draft
from tests.support.family import DRAFTS
from tests.support.tiny import TinyShape, build_model
from tests.unit.decode.test_speculative import PROMPT, batch_of, bundle_of, config_for

BLOCK = 6


@pytest.fixture(scope="module")
def target() -> Qwen3ForCausalLM:
    return build_model(TinyShape())


@pytest.fixture(scope="module")
def answer(target: Qwen3ForCausalLM) -> list[int]:
    return greedy_decode(target, PROMPT, 41, ()).ids


def scaled(target: Qwen3ForCausalLM) -> TargetBundle:
    return replace(bundle_of(target), input_embedding_scale=1.5, output_multiplier=0.5, final_logit_softcapping=8.0)


@pytest.fixture(scope="module", params=DRAFTS)
def fitted(request: pytest.FixtureRequest, target: Qwen3ForCausalLM, answer: list[int]) -> Draft:
    """A draft of the variant that knows `answer` by heart."""
    torch.manual_seed(0)
    draft = Draft(config_for(target, **DRAFTS[request.param]))
    section = ObjectiveSection(gamma=4.0)
    batch = batch_of(target, PROMPT, answer, range(len(PROMPT), len(PROMPT) + len(answer) - 1))
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    for _ in range(120):
        optimizer.zero_grad()
        torch.autograd.backward(objective(draft, bundle_of(target), batch, section, done=0.2).loss)
        optimizer.step()
    return draft.eval()


@pytest.mark.slow
def test_what_is_known_by_heart_is_accepted_in_whole_blocks(target: Qwen3ForCausalLM, fitted: Draft, answer: list[int]) -> None:
    decoded = speculative_decode(target, fitted, bundle_of(target), PROMPT, 41, ())
    assert decoded.ids == answer
    whole = BLOCK + fitted.config.label_shift
    assert decoded.step_lengths[:-1] == [whole] * (40 // whole)


@pytest.mark.parametrize("draft", DRAFTS)
def test_whatever_a_draft_proposes_the_text_is_the_targets(draft: str, target: Qwen3ForCausalLM) -> None:
    """Drafts of random weights, with sliding layers among them and scales that change what they propose; stop tokens too."""
    layers = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8}
    model = lively_draft(config_for(target, **DRAFTS[draft], **layers))
    greedy = greedy_decode(target, PROMPT, 30, ())
    for stop_ids in ((), (greedy.ids[11],)):
        expected = greedy_decode(target, PROMPT, 30, stop_ids)
        found = speculative_decode(target, model, scaled(target), PROMPT, 30, stop_ids)
        assert found.ids == expected.ids
        assert sum(found.step_lengths) == len(found.ids) - 1
        assert np.all(np.array(found.step_lengths) >= 1)
