"""Every variant with every objective that it is trained on, against the same slot by slot; and what of a variant no objective shows."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pipeline.config.draft import ObjectiveSection
from pipeline.draft import attention, groups, head
from pipeline.draft.config import DraftConfig
from pipeline.draft.loss import base_share, objective
from pipeline.draft.model import Draft, new_in_variant
from pipeline.draft.slots import block_ids, dpace_weights, embed_blocks
from pipeline.errors import DraftError
from pipeline.records import TargetBundle
from tests.support.family import FAMILY, FEW, PAIRS, family_batch, family_config, family_draft, section_of, slow_sums
from tests.unit.draft.test_loss import Largest

SCALES: dict[str, Any] = {"input_embedding_scale": 2.0, "output_multiplier": 0.5, "final_logit_softcapping": 4.0}


def bundle_of(**scales: Any) -> TargetBundle:
    generator = torch.Generator().manual_seed(1)
    embedding, matrix = torch.randn(2, 30, 12, generator=generator)
    return TargetBundle(embedding, matrix, torch.rand(12, generator=generator) + 0.5, {"rms_norm_eps": 1e-6}, **scales).check()


@pytest.mark.parametrize(("draft", "name"), PAIRS)
def test_sums_and_gradients(draft: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed rows, blocks over the end of their document, a target with scales; in groups of two blocks, and chunks of seven rows."""
    monkeypatch.setattr(groups, "CPU_SLOTS", 8)
    monkeypatch.setattr(head, "CHUNK_LOGITS", 7 * 30)
    model, section, bundle = family_draft(draft), section_of(name), bundle_of(**SCALES)
    batch = family_batch(3, model.config, section, packed=True, tokens=20, blocks=12 if name == "variable_prefix" else 7)
    sums = objective(model, bundle, batch, section, done=0.25)
    slow = slow_sums(model, bundle, batch, section, share=0.4)
    torch.testing.assert_close(sums.numerators.double(), slow.numerators, rtol=2e-5, atol=1e-5)
    torch.testing.assert_close(sums.denominators.double(), torch.tensor(slow.denominators, dtype=torch.float64), rtol=1e-5, atol=1e-6)
    assert sums.accepted[sums.supervised.any(dim=-1)].tolist() == slow.accepted
    assert int(sums.metrics.correct.sum()) == slow.correct
    means = dict(zip(sums.layout.means, sums.means.tolist(), strict=True))
    if means:
        assert means["base_accept_len"] == [sum(slow.base_accepted) + len(slow.base_accepted), len(slow.base_accepted)]
    if "candidate_recall" in means:
        assert means["candidate_recall"][0] == slow.hits
        assert 0 < slow.hits < means["candidate_recall"][1]
    parameters = list(model.parameters())
    for number in range(len(slow.numerators)):
        ours = torch.autograd.grad(sums.numerators[number], parameters, retain_graph=True)
        theirs = torch.autograd.grad(slow.numerators[number], parameters, retain_graph=True, allow_unused=True)
        for (parameter, _), found, expected in zip(model.named_parameters(), ours, theirs, strict=True):
            wanted = torch.zeros_like(found) if expected is None else expected
            torch.testing.assert_close({parameter: found}, {parameter: wanted}, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("draft", FAMILY)
@pytest.mark.parametrize("name", ["decay", "dpace", "forward_kl"])
def test_a_batch_that_teaches_nothing(draft: str, name: str) -> None:
    model, section = family_draft(draft), section_of(name)
    batch = family_batch(6, model.config, section)
    sums = objective(model, bundle_of(), replace(batch, loss_mask=torch.zeros_like(batch.loss_mask)), section)
    torch.autograd.backward(sums.loss)
    assert not sums.numerators.any()
    assert not sums.denominators.any()
    for parameter, values in model.named_parameters():
        assert values.grad is not None, parameter
        assert not values.grad.any(), parameter


@pytest.mark.parametrize(("draft", "name"), FEW)
def test_without_grad_the_values_are_the_same(draft: str, name: str) -> None:
    model, section = family_draft(draft), section_of(name)
    batch = family_batch(7, model.config, section)
    trained = objective(model, bundle_of(), batch, section)
    with torch.no_grad():
        scored = objective(model, bundle_of(), batch, section)
    assert torch.equal(trained.numerators.detach(), scored.numerators)
    assert torch.equal(trained.means, scored.means)


@pytest.mark.parametrize("draft", FAMILY)
def test_autocast_keeps_sums_in_float32(draft: str) -> None:
    model, section = family_draft(draft), section_of("forward_kl")
    batch = family_batch(8, model.config, section, tokens=24, blocks=8)
    exact = objective(model, bundle_of(), batch, section)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = objective(model, bundle_of(), batch, section)
    assert mixed.numerators.dtype == torch.float32
    # Which tokens are candidates changes with rounding, so the selector's sum may jump.
    torch.testing.assert_close(mixed.numerator, exact.numerator, rtol=0.1, atol=1.0)
    assert bool(torch.isfinite(mixed.numerators).all())
    parameters = list(model.parameters())
    ours, theirs = (torch.autograd.grad(sums.numerator, parameters, allow_unused=True) for sums in (mixed, exact))
    one, other = (torch.cat([grad.flatten() for grad in grads if grad is not None]) for grads in (ours, theirs))
    assert float(F.cosine_similarity(one, other, dim=0)) > 0.98


@pytest.mark.parametrize(("draft", "name"), [*FEW, ("dflash2", "forward_kl"), ("domino", "reverse_kl"), ("dflash", "total_variation")])
def test_no_tensor_holds_all_slots_of_the_vocabulary(draft: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor the teacher's logits at all positions: nothing is larger than a chunk, or than the head."""
    vocab, tokens, blocks = 4000, 400, 150
    monkeypatch.setattr(head, "CHUNK_LOGITS", 40_000)
    monkeypatch.setattr(attention, "TILE_QUERIES", 128)
    model, section = family_draft(draft, vocab_size=vocab), section_of(name)
    batch = family_batch(3, model.config, section, rows=1, tokens=tokens, blocks=blocks)
    generator = torch.Generator().manual_seed(1)
    embedding, matrix = torch.randn(2, vocab, 12, generator=generator)
    bundle = TargetBundle(embedding, matrix, torch.ones(12), {"rms_norm_eps": 1e-6})
    with Largest() as largest:
        torch.autograd.backward(objective(model, bundle, batch, section).loss)
    others = attention.TILE_QUERIES * (tokens + attention.TILE_QUERIES)  # a tile's mask
    assert largest.numel <= max(40_000, matrix.numel(), others) < min(tokens, 4 * blocks) * vocab / 4


def test_a_slot_of_a_causal_block_sees_nothing_behind_it() -> None:
    model = family_draft("jetspec", sliding_window=6, layer_types=("sliding_attention", "full_attention"))
    batch = family_batch(0, model.config, section_of("decay"))
    embeddings = torch.randn(*batch.anchors.shape, 4, 12, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = model(batch, embeddings)
        for slot in range(4):
            changed = embeddings.clone()
            changed[:, :, slot] += 1.0
            after = model(batch, changed)
            assert torch.equal(before[:, :, :slot], after[:, :, :slot])
            assert bool((before[:, :, slot:] != after[:, :, slot:]).any(dim=-1).all())


@pytest.mark.parametrize("draft", ["dflash2", "three taps"])
def test_a_new_dflash2_is_plain_dflash(draft: str) -> None:
    config = family_config(draft)
    plain = Draft(replace(config, variant="dflash"))
    model = Draft(config)
    assert {name.split(".")[0 if "codebook" in name or "selector" in name else 2] for name in new_in_variant(config)} == {
        "candidate_selector",
        "attention_conv",
        "mlp_conv",
    }
    missing, unexpected = model.load_state_dict(plain.state_dict(), strict=False)
    assert set(missing) == new_in_variant(config)
    assert not unexpected
    section, bundle = section_of("decay"), bundle_of()
    batch = family_batch(1, config, section)
    embeddings = embed_blocks(block_ids(batch, config), bundle)
    assert torch.equal(model(batch, embeddings), plain(batch, embeddings))
    sums, expected = (objective(one, bundle, batch, section) for one in (model, plain))
    assert torch.equal(sums.numerator, expected.numerator)
    assert torch.equal(sums.accepted, expected.accepted)


@pytest.mark.parametrize(("variant", "parts"), [("dflash", set()), ("jetspec", set()), ("domino", {"prefix_gru", "embed_proj"})])
def test_what_a_variant_has_that_a_plain_draft_has_not(variant: str, parts: set[str]) -> None:
    assert {name.split(".")[0] for name in new_in_variant(family_config(variant))} == parts


def test_the_share_of_the_base_falls_to_nothing_in_the_first_half() -> None:
    section = section_of("decay")
    assert [base_share(section, done) for done in (0.0, 0.25, 0.5, 1.0)] == pytest.approx([0.8, 0.4, 0.0, 0.0])


@pytest.mark.parametrize(
    ("draft", "changes", "message"),
    [
        ("dflash2", {"conv_group_size": 5}, "conv_group_size 5 does not divide the hidden size 12"),
        ("dflash2", {"selector_top_k": 31}, r"selector_top_k is 31, expected 1\.\.30"),
        ("dflash2", {"selector_rank": 0}, "selector_rank is 0"),
        ("dflash2", {"conv_group_size": 0}, "conv_group_size is 0"),
        ("domino", {"pure_draft_prefix_len": 3}, "leaves no slot of a block of 4 to correct"),
        ("domino", {"emb_dim": 0}, "emb_dim is 0"),
    ],
)
def test_sizes_that_cannot_work(draft: str, changes: dict[str, Any], message: str) -> None:
    config: DraftConfig = family_config(draft, **changes)
    with pytest.raises(DraftError, match=message):
        Draft(config)


def test_the_continuation_value_of_unlikely_slots_is_exact() -> None:
    """At the start of training the product of fifteen probabilities is too small for float32; of what is left of it, little is."""
    section = ObjectiveSection(name="dpace", dpace_weights="continuation_value", dpace_alpha=0.0)
    losses, supervised = torch.full((2, 16), 11.5), torch.ones(2, 16, dtype=torch.bool)
    supervised[:, 0] = supervised[1, 9] = False
    smooth = torch.where(supervised, torch.exp(-losses.double()), 1.0)
    confidence = smooth.cumprod(dim=-1)
    expected = (confidence * supervised).flip(-1).cumsum(dim=-1).flip(-1) / confidence
    torch.testing.assert_close(dpace_weights(section, losses, supervised)[:, 1:].double(), expected[:, 1:], rtol=1e-5, atol=0)


def test_a_teacher_needs_final_states_and_an_rms_norm() -> None:
    model, section = family_draft("jetspec"), section_of("forward_kl")
    batch = family_batch(2, model.config, section)
    with pytest.raises(DraftError, match=r"this batch has none: capture with capture\.final=true"):
        objective(model, bundle_of(), replace(batch, final=None), section)
    with pytest.raises(DraftError, match="no rms_norm_eps"):
        objective(model, replace(bundle_of(), config={}), batch, section)
