from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.errors import HiddenStateError, TargetError
from pipeline.records import TokenSample
from pipeline.target.forward import forward_hidden
from pipeline.target.load import Target
from tests.unit.target.conftest import sample

Load = Callable[..., Target]


@pytest.mark.parametrize("layer_ids", [(1, 3, 5), (5, 0, 6), (2,)])
def test_stored_layer_is_the_layer_s_output(load: Load, tiny_target: Path, layer_ids: tuple[int, ...]) -> None:
    from transformers import AutoModelForCausalLM

    target = load(tiny_target, layer_ids, final=True)
    whole = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    tokens, entering = sample(37), []
    whole.model.norm.register_forward_pre_hook(lambda module, args: entering.append(args[0]))
    with torch.no_grad():
        states = whole(torch.from_numpy(tokens.input_ids).long()[None], output_hidden_states=True).hidden_states
    (captured,) = forward_hidden(target, [tokens])
    assert list(captured.hidden) == list(layer_ids)
    for layer in layer_ids:
        torch.testing.assert_close(captured.hidden[layer], states[layer + 1][0], rtol=0, atol=0)
    assert captured.final is not None
    torch.testing.assert_close(captured.final, entering[0][0], rtol=0, atol=0)
    torch.testing.assert_close(captured.features(layer_ids), torch.cat([states[i + 1][0] for i in layer_ids], dim=-1), rtol=0, atol=0)


def test_alone_or_in_a_batch(target: Target) -> None:
    samples = [sample(n, seed) for seed, n in enumerate((5, 41, 1, 23, 41))]
    for together in forward_hidden(target, samples):
        (alone,) = forward_hidden(target, [together.tokens])
        for layer, state in together.hidden.items():
            assert state.shape == (together.tokens.num_tokens, 64)
            torch.testing.assert_close(state, alone.hidden[layer], rtol=1e-5, atol=7e-7 * float(state.abs().max()))


def test_states_can_be_trained_on(target: Target) -> None:
    (captured,) = forward_hidden(target, [sample(9)])
    weight = torch.ones(64, requires_grad=True)
    torch.autograd.backward((captured.hidden[3] * weight).sum())
    assert weight.grad is not None
    assert not captured.hidden[3].requires_grad


def test_ids_that_have_no_embedding(target: Target) -> None:
    for bad in (-1, 512):
        tokens = sample(9)
        ids = tokens.input_ids.copy()
        ids[4] = bad
        broken = TokenSample("odd", "chats.jsonl", 7, "train", ids, tokens.spans)
        with pytest.raises(TargetError, match=rf"sample odd .*row 7.* has id {bad} at position 4.*from 0 to 511"):
            forward_hidden(target, [tokens, broken])


@pytest.mark.parametrize(("value", "words"), [(float("nan"), "not finite"), (float("inf"), "not finite"), (0.0, "all zero")])
def test_unusable_states_stop_with_the_sample(load: Load, tiny_target: Path, value: float, words: str) -> None:
    target, tokens = load(tiny_target), sample(9, 3)
    with torch.no_grad():
        if value:
            target.model.get_input_embeddings().weight[int(tokens.input_ids[5])] = value
        else:
            for parameter in target.model.parameters():
                parameter.zero_()
    with pytest.raises(HiddenStateError, match=rf"sample s3 .*row 3\), layer 1: states are {words}"):
        forward_hidden(target, [tokens] if value == 0 else [sample(9, 2), tokens])


def test_constant_states_are_a_fault_unless_the_tokens_are_constant(load: Load, tiny_target: Path) -> None:
    target = load(tiny_target)
    with torch.no_grad():
        for parameter in target.model.parameters():
            parameter.zero_()
        target.model.get_input_embeddings().weight[:] = 1.0
    with pytest.raises(HiddenStateError, match="the same at all 9 positions"):
        forward_hidden(target, [sample(9)])
    same = TokenSample("same", "chats.jsonl", 0, "train", np.full(9, 7, np.int32), sample(9).spans)
    forward_hidden(target, [same])
