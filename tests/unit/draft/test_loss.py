"""The objective against the same on all logits at once."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.config.schema import ObjectiveSection
from pipeline.draft import attention, groups, head
from pipeline.draft.head import cross_entropy, head_losses
from pipeline.draft.loss import block_ids, block_labels, embed_blocks, objective
from pipeline.draft.model import Draft
from pipeline.draft.slots import likeliest
from pipeline.errors import DraftError
from pipeline.records import DraftBatch, TargetBundle
from tests.support.drafts import any_batch, lively_draft, small_config


def bundle_of(vocab: int = 30, hidden: int = 12, **scales: Any) -> TargetBundle:
    generator = torch.Generator().manual_seed(1)
    embedding, head = torch.randn(2, vocab, hidden, generator=generator)
    return TargetBundle(embedding, head, torch.ones(hidden), {}, **scales).check()


SCALES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scaled": {"input_embedding_scale": 3.5, "output_multiplier": 0.25},
    "capped": {"output_multiplier": 2.0, "final_logit_softcapping": 3.0},
}


def by_all_logits(draft: Draft, bundle: TargetBundle, batch: DraftBatch, weights: list[float]) -> tuple[torch.Tensor, float]:
    """Σ w·m·CE and Σ w·m, slot by slot, with every logit in float64."""
    config = draft.config
    hidden = draft(batch, embed_blocks(block_ids(batch, config), bundle)).double()
    total, denominator = torch.zeros((), dtype=torch.float64), 0.0
    for row in range(batch.anchors.shape[0]):
        for block in range(batch.anchors.shape[1]):
            for slot in range(1, config.block_size):
                at = int(batch.anchors[row, block]) + slot
                if not batch.block_valid[row, block] or at >= int(batch.document_end[row, block]) or not batch.loss_mask[row, at]:
                    continue
                logits = hidden[row, block, slot] @ bundle.head.double().T * bundle.output_multiplier
                if bundle.final_logit_softcapping is not None:
                    logits = bundle.final_logit_softcapping * torch.tanh(logits / bundle.final_logit_softcapping)
                total = total + weights[slot] * F.cross_entropy(logits, batch.input_ids[row, at])
                denominator += weights[slot]
    return total, denominator


@pytest.mark.parametrize(("chunk", "slots"), [(1, 512), (100, 1), (1 << 24, 8), (1 << 24, 512)])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("packed", [False, True])
def test_objective(chunk: int, slots: int, scales: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(block_size=4)
    draft, bundle, batch = lively_draft(config), bundle_of(**SCALES[scales]), any_batch(3, config, packed=packed)
    monkeypatch.setattr(head, "CHUNK_LOGITS", chunk)
    monkeypatch.setattr(groups, "CPU_SLOTS", slots)
    section = ObjectiveSection(name="decay", gamma=2.0)
    sums = objective(draft, bundle, batch, section)
    total, denominator = by_all_logits(draft, bundle, batch, [0.0, 1.0, 2.718281828459045**-0.5, 2.718281828459045**-1.0])
    assert denominator > 0
    assert float(sums.denominator) == pytest.approx(denominator, rel=1e-6)
    torch.testing.assert_close(sums.numerator.double(), total, rtol=1e-5, atol=1e-5)
    parameters = list(draft.parameters())
    ours, exact = torch.autograd.grad(sums.numerator, parameters), torch.autograd.grad(total, parameters)
    for found, expected in zip(ours, exact, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_frozen_parameters_get_no_gradient_and_the_others_the_same() -> None:
    config = small_config()
    draft, bundle, batch = lively_draft(config), bundle_of(), any_batch(3, config)
    torch.autograd.backward(objective(draft, bundle, batch, ObjectiveSection()).numerator)
    exact = {name: parameter.grad for name, parameter in draft.named_parameters()}
    for frozen in (("fc", "layers.0"), ("layers", "norm"), ("fc", "hidden_norm", "layers")):
        for name, parameter in draft.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
            parameter.grad = None
        torch.autograd.backward(objective(draft, bundle, batch, ObjectiveSection()).numerator)
        for name, parameter in draft.named_parameters():
            assert (parameter.grad is None) == name.startswith(frozen), name
            if parameter.grad is not None:
                torch.testing.assert_close(parameter.grad, exact[name])


@given(st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(2, 4), st.integers(1, 30))
def test_groups_cover_every_block_once_and_no_padding_alone(counts: list[int], block_size: int, slots: int) -> None:
    valid = torch.arange(max(1, *counts, 1)) < torch.tensor(counts).unsqueeze(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "CPU_SLOTS", slots)
        found = groups.places(valid, block_size)
    covered = torch.zeros(valid.shape)
    for place in found:
        covered[place] += 1
        assert covered[place].numel() <= max(1, slots // block_size)
        assert bool(valid[place].any()) or len(found) == 1
    assert bool((covered[valid] == 1).all())
    assert bool((covered <= 1).all())
    assert found


def test_uniform_weights() -> None:
    config = small_config(block_size=4)
    draft, bundle, batch = lively_draft(config), bundle_of(), any_batch(4, config)
    sums = objective(draft, bundle, batch, ObjectiveSection(name="uniform"))
    total, denominator = by_all_logits(draft, bundle, batch, [1.0] * 4)
    assert float(sums.denominator) == denominator == int(sums.supervised.sum())
    torch.testing.assert_close(sums.numerator.double(), total, rtol=1e-5, atol=1e-5)


def test_sums_do_not_depend_on_how_rows_are_grouped() -> None:
    config = small_config()
    draft, bundle, batch = lively_draft(config), bundle_of(), any_batch(5, config, rows=4)
    section = ObjectiveSection()

    def row(index: int) -> DraftBatch:
        parts = {
            name: getattr(batch, name)[index : index + 1] for name in DraftBatch.__slots__ if isinstance(getattr(batch, name), torch.Tensor)
        }
        return replace(batch, sample_ids=(batch.sample_ids[index],), **parts)

    together = objective(draft, bundle, batch, section)
    alone = [objective(draft, bundle, row(index), section) for index in range(4)]
    torch.testing.assert_close(sum(part.denominator for part in alone), together.denominator)
    parameters = list(draft.parameters())
    whole = torch.autograd.grad(together.numerator, parameters)
    pieces = [torch.autograd.grad(part.numerator, parameters) for part in alone]
    for expected, *found in zip(whole, *pieces, strict=True):
        torch.testing.assert_close(torch.stack(found).sum(0), expected, rtol=1e-4, atol=1e-5)
    metrics = alone[0].metrics + alone[1].metrics + alone[2].metrics + alone[3].metrics
    assert torch.equal(metrics.vector(), together.metrics.vector())


@pytest.mark.parametrize("case", ["nothing supervised", "only padding blocks", "anchors at 0"])
def test_a_batch_that_teaches_nothing_gives_every_parameter_a_zero_gradient(case: str) -> None:
    config = small_config(attention_bias=True)
    draft, bundle, batch = lively_draft(config), bundle_of(), any_batch(6, config)
    if case == "only padding blocks":
        batch = replace(batch, block_valid=torch.zeros_like(batch.block_valid))
    else:
        batch = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    if case == "anchors at 0":
        batch = replace(batch, anchors=torch.zeros_like(batch.anchors), document_start=torch.zeros_like(batch.anchors))
    sums = objective(draft, bundle, batch, ObjectiveSection())
    torch.autograd.backward(sums.numerator)
    assert float(sums.numerator.detach()) == float(sums.denominator) == 0.0
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None, name
        assert bool((parameter.grad == 0).all()), name


def test_a_batch_without_blocks_is_refused() -> None:
    config = small_config()
    batch = any_batch(0, config)
    empty = {name: getattr(batch, name)[:, :0] for name in ("anchors", "document_start", "document_end", "block_valid")}
    with pytest.raises(DraftError, match="no block"):
        objective(lively_draft(config), bundle_of(), replace(batch, **empty), ObjectiveSection())


def test_without_grad_the_values_are_the_same() -> None:
    config = small_config()
    draft, bundle, batch = lively_draft(config), bundle_of(), any_batch(7, config)
    trained = objective(draft, bundle, batch, ObjectiveSection())
    with torch.no_grad():
        scored = objective(draft, bundle, batch, ObjectiveSection())
    assert not scored.numerator.requires_grad
    assert torch.equal(trained.numerator.detach(), scored.numerator)
    assert torch.equal(trained.correct, scored.correct)


def test_a_bundle_in_bfloat16_trains_a_draft_in_float32() -> None:
    config = small_config()
    draft, batch = lively_draft(config), any_batch(7, config)
    stored = bundle_of().to(torch.device("cpu"), torch.bfloat16)
    widened = stored.to(torch.device("cpu"), torch.float32)
    found, expected = (objective(draft, bundle, batch, ObjectiveSection()).numerator for bundle in (stored, widened))
    assert torch.equal(found, expected)
    torch.autograd.backward(found)


def test_an_impossible_label_still_has_an_exact_loss() -> None:
    head = torch.tensor([[300.0], [0.0], [-300.0]])
    bundle = TargetBundle(head, head, torch.ones(1), {})
    hidden = torch.ones(2, 1, requires_grad=True)
    losses, predicted, _ = head_losses(hidden, cross_entropy(torch.tensor([2, 0])), bundle)
    assert predicted.tolist() == [0, 0]
    assert losses.tolist() == [600.0, 0.0]
    torch.autograd.backward(losses.sum())
    assert hidden.grad is not None
    assert hidden.grad.flatten().tolist() == [600.0, 0.0]


@pytest.mark.parametrize("scales", SCALES)
def test_autocast_keeps_softmax_and_sums_in_float32(scales: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config()
    draft, bundle, batch = lively_draft(config), bundle_of(**SCALES[scales]), any_batch(8, config)
    exact = objective(draft, bundle, batch, ObjectiveSection())
    monkeypatch.setattr(groups, "CPU_SLOTS", 6)  # several groups share the casts that autocast keeps
    with torch.autocast("cpu", torch.bfloat16):
        mixed = objective(draft, bundle, batch, ObjectiveSection())
    assert mixed.numerator.dtype == mixed.denominator.dtype == torch.float32
    torch.testing.assert_close(mixed.numerator, exact.numerator, rtol=0.05, atol=0.5)
    parameters = list(draft.parameters())
    ours = torch.cat([grad.flatten() for grad in torch.autograd.grad(mixed.numerator, parameters)])
    theirs = torch.cat([grad.flatten() for grad in torch.autograd.grad(exact.numerator, parameters)])
    assert float(F.cosine_similarity(ours, theirs, dim=0)) > 0.99


@pytest.mark.parametrize("rows", [0, 1, 6, 23])
def test_chunks_in_bfloat16_have_each_their_own_logits(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_LOGITS", 2 * 30)  # of these rows, six at once
    bundle, generator = bundle_of(), torch.Generator().manual_seed(3)
    hidden, labels = torch.randn(rows, 12, generator=generator, requires_grad=True), torch.arange(rows) % 30
    with torch.autocast("cpu", torch.bfloat16):
        losses = head_losses(hidden, cross_entropy(labels), bundle).loss
    exact = F.cross_entropy(hidden @ bundle.head.T, labels, reduction="none")
    torch.testing.assert_close(losses, exact, rtol=0.02, atol=0.05)
    (ours,), (theirs,) = (torch.autograd.grad(loss.sum(), hidden) for loss in (losses, exact))
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.05)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the number of elements of the largest tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max([self.numel, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))])
        return out


def test_neither_logits_nor_masks_ever_exist_for_all_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(vocab_size=5000)
    draft, bundle, batch = lively_draft(config), bundle_of(vocab=5000), any_batch(9, config, rows=1, tokens=600, blocks=400)
    slots = 400 * 3
    monkeypatch.setattr(head, "CHUNK_LOGITS", 50_000)
    monkeypatch.setattr(attention, "TILE_QUERIES", 256)
    with Largest() as largest:
        torch.autograd.backward(objective(draft, bundle, batch, ObjectiveSection()).numerator)
    tile = attention.TILE_QUERIES * (600 + attention.TILE_QUERIES)
    assert largest.numel <= max(50_000, bundle.head.numel(), slots * config.intermediate_size, tile) < slots * 600


@pytest.mark.parametrize("vocab", [30, head.RUN, head.RUN + 1, 700, 5 * head.RUN])
def test_the_largest_of_many_is_the_first_of_equals(vocab: int) -> None:
    logits = torch.randn(40, vocab, generator=torch.Generator().manual_seed(0)).mul(2).round()
    logits[0], logits[1, -1] = 0.5, 99.0
    top, place = head.largest(logits)
    assert torch.equal(top, logits.amax(dim=1))
    assert torch.equal(place, logits.argmax(dim=1))
    assert head.largest(logits[:0])[1].shape == (0,)
    blocks = logits.view(8, 5, vocab)[:, 1:]
    assert torch.equal(likeliest(blocks), blocks.argmax(dim=-1))


def test_labels_stay_inside_the_anchors_document() -> None:
    config = small_config()
    batch = any_batch(11, config, packed=True, blocks=8)
    labels, supervised = block_labels(batch, config.block_size)
    for row, block, slot in supervised.nonzero().tolist():
        at = int(batch.anchors[row, block]) + slot
        assert slot >= 1
        assert at < int(batch.document_end[row, block])
        assert int(labels[row, block, slot]) == int(batch.input_ids[row, at])
