"""The draft against the same computed slot by slot, what a block can see, and what a change of dtype must not touch."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.draft.config import DraftConfig
from pipeline.draft.model import Draft
from pipeline.draft.qwen3 import inverse_frequencies
from pipeline.records import DraftBatch
from tests.support.drafts import FULL, SLIDING, any_batch, kimi_config, lively_draft, slow_forward, small_config

CONFIGS = {
    "plain": small_config(),
    "biased, no grouping": small_config(attention_bias=True, num_key_value_heads=2),
    "one window, one full": small_config(layer_types=(SLIDING, FULL), sliding_window=5, block_size=4, rope_theta=50.0),
    "kimi": kimi_config(block_size=4, rms_norm_eps=1e-2),
    "kimi, wide values, no q rank, no gate": kimi_config(shape={"v_head_dim": 9, "q_lora_rank": None, "mla_use_output_gate": False}),
    "kimi, other activation": kimi_config(shape={"activation_situ_beta": 0.7, "activation_situ_linear_beta": None}),
}


def embeddings_for(batch: DraftBatch, config: DraftConfig) -> torch.Tensor:
    shape = (*batch.anchors.shape, config.block_size, config.hidden_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_agrees_with_the_slow_loop(name: str, packed: bool) -> None:
    config = CONFIGS[name]
    draft, batch = lively_draft(config), any_batch(1, config, packed=packed)
    embeddings = embeddings_for(batch, config)
    with torch.no_grad():
        hidden = draft(batch, embeddings)
    torch.testing.assert_close(hidden.double(), slow_forward(draft, batch, embeddings), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", CONFIGS)
def test_perturbations(name: str, packed: bool) -> None:
    """Change one token's features, or one block's embeddings: exactly those blocks change that may see it."""
    config = CONFIGS[name]
    draft, batch = lively_draft(config), any_batch(2, config, packed=packed)
    embeddings = embeddings_for(batch, config)
    full = FULL in config.layer_types

    def changed(other: DraftBatch, others: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            difference: torch.Tensor = draft(batch, embeddings) - draft(other, others)
        return difference.abs().amax(dim=(2, 3)) > 1e-6

    rows, tokens = batch.input_ids.shape
    for row in range(rows):
        for token in range(tokens):
            features = batch.features.clone()
            features[row, token] += 3.0
            may_see = torch.zeros_like(batch.block_valid)
            may_see[row] = batch.block_valid[row] & (batch.document_start[row] <= token) & (token < batch.anchors[row])
            assert full, "with windows only, far rows would be out of sight"
            assert torch.equal(changed(replace(batch, features=features), embeddings), may_see)
        for block in range(batch.anchors.shape[1]):
            for slot in range(config.block_size):
                others = embeddings.clone()
                others[row, block, slot] += 3.0
                only = torch.zeros_like(batch.block_valid)
                only[row, block] = True
                assert torch.equal(changed(batch, others), only)


def test_a_window_hides_what_lies_behind_it() -> None:
    config = small_config(layer_types=(SLIDING,), num_hidden_layers=1, sliding_window=6)
    draft = lively_draft(config)
    batch = any_batch(4, config, rows=1, tokens=20, blocks=1)
    batch = replace(batch, anchors=torch.tensor([[12]]), block_valid=torch.tensor([[True]]), document_end=torch.tensor([[20]]))
    batch = replace(batch, document_start=torch.tensor([[0]]), position_ids=torch.arange(20).unsqueeze(0))
    embeddings = embeddings_for(batch, config)
    for token in range(20):
        features = batch.features.clone()
        features[0, token] += 3.0
        with torch.no_grad():
            moved = (draft(batch, embeddings) - draft(replace(batch, features=features), embeddings)).abs().amax(dim=-1)[0, 0] > 1e-6
        # Its in-block attention has one layer here, so a slot changes only by what it sees itself.
        assert moved.tolist() == [token < 12 and 12 + slot - token < 6 for slot in range(3)]


def test_order_of_anchors_and_padding_blocks_do_not_matter() -> None:
    config = small_config()
    draft, batch = lively_draft(config), any_batch(5, config, blocks=6, packed=True)
    embeddings = embeddings_for(batch, config)
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    fields = ("anchors", "document_start", "document_end", "block_valid")
    shuffled: dict[str, Any] = {name: getattr(batch, name)[:, order] for name in fields}
    padded: dict[str, Any] = {name: torch.cat((getattr(batch, name), getattr(batch, name)[:, :2]), dim=1) for name in fields}
    padded["block_valid"][:, 6:] = False
    with torch.no_grad():
        plain = draft(batch, embeddings)
        torch.testing.assert_close(draft(replace(batch, **shuffled), embeddings[:, order]), plain[:, order], rtol=1e-5, atol=1e-5)
        more = draft(replace(batch, **padded), torch.cat((embeddings, embeddings[:, :2]), dim=1))
    torch.testing.assert_close(more[:, :6], plain, rtol=1e-5, atol=1e-5)
    assert bool(torch.isfinite(more).all())


def test_features_in_bfloat16_are_read_in_the_precision_of_the_weights() -> None:
    config = small_config()
    draft, batch = lively_draft(config), any_batch(6, config)
    stored = replace(batch, features=batch.features.bfloat16())
    with torch.no_grad():
        same = draft(replace(batch, features=stored.features.float()), embeddings_for(batch, config))
        assert torch.equal(draft(stored, embeddings_for(batch, config)), same)


def test_embeddings_in_bfloat16_become_a_stream_in_the_precision_of_the_weights() -> None:
    config = small_config()
    draft, batch = lively_draft(config), any_batch(6, config)
    rounded = embeddings_for(batch, config).bfloat16()
    with torch.no_grad():
        assert torch.equal(draft(batch, rounded), draft(batch, rounded.float()))


@pytest.mark.parametrize(
    "config", [small_config(), kimi_config(), kimi_config(shape={"v_head_dim": 9})], ids=["plain", "kimi", "wide values"]
)
@pytest.mark.parametrize("how", ["autocast", "cast"])
def test_bfloat16(how: str, config: DraftConfig) -> None:
    draft, batch = lively_draft(config), any_batch(7, config)
    embeddings = embeddings_for(batch, config)
    with torch.no_grad():
        exact = draft(batch, embeddings)
    if how == "cast":
        draft.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
        hidden = draft(batch, embeddings.to(torch.bfloat16) if how == "cast" else embeddings)
    torch.autograd.backward(hidden.float().square().sum())
    torch.testing.assert_close(hidden.detach().float(), exact, rtol=0.1, atol=0.15)
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == (torch.float32 if how == "autocast" else torch.bfloat16)


def test_casting_a_draft_leaves_its_frequencies_alone() -> None:
    config = small_config(head_dim=64, rope_theta=1e6)
    draft = Draft(config).half().to(torch.bfloat16)
    found = inverse_frequencies(draft.config, torch.device("cpu"))
    assert found.dtype == torch.float32
    exact = [1e6 ** (-2 * i / 64) for i in range(32)]
    torch.testing.assert_close(found, torch.tensor(exact), rtol=1e-6, atol=0)
    assert not list(draft.buffers())


def test_new_weights() -> None:
    torch.manual_seed(0)
    draft = Draft(small_config(hidden_size=96, intermediate_size=128, attention_bias=True))
    for name, parameter in draft.named_parameters():
        if name.endswith("bias"):
            assert bool((parameter == 0).all()), name
        elif parameter.ndim == 1:
            assert bool((parameter == 1).all()), name
        else:
            assert abs(float(parameter.detach().mean())) < 0.003, name
            assert abs(float(parameter.detach().std()) - 0.02) < 0.003, name
