"""Decoding at a temperature: for every variant of the draft, texts are distributed exactly as the target's own."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import Qwen3ForCausalLM

from pipeline.decode.sampling import Request, Sampler, residual, speculative_sample, verify
from pipeline.decode.speculative import greedy_decode
from pipeline.draft.model import Draft
from pipeline.draft.slots import Proposal
from pipeline.errors import TargetError
from pipeline.records import TargetBundle
from tests.support.drafts import lively_draft
from tests.support.family import FAMILY, family_config
from tests.support.tiny import TinyShape, build_model

VOCAB, PROMPT, TOKENS = 8, [3, 1, 6, 0, 5], 3
RUNS = 4000


@pytest.fixture(scope="module")
def target() -> Qwen3ForCausalLM:
    """Eight rows of vocabulary, so that every text of three tokens can be counted."""
    return build_model(TinyShape(layers=5, hidden=12, heads=2, kv_heads=1, head_dim=8, intermediate=32, vocab=VOCAB), seed=3)


@pytest.fixture(scope="module")
def bundle(target: Qwen3ForCausalLM) -> TargetBundle:
    embedding, head = target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach()
    return TargetBundle(embedding, head, target.model.norm.weight.detach(), target.config.to_dict()).check()


def draft_for(name: str) -> Draft:
    """Blocks of three; DFlash 2 knows candidates that are not all of the vocabulary."""
    sizes = {"block_size": 3, "vocab_size": VOCAB, "num_target_layers": 5, "mask_token_id": VOCAB - 1, "selector_top_k": 5}
    return lively_draft(family_config(name, **sizes)).eval()


def sampler(temperature: float = 1.0, top_p: float = 1.0, seed: int = 0) -> Sampler:
    return Sampler(temperature, top_p, torch.Generator().manual_seed(seed))


def slow_distribution(logits: torch.Tensor, temperature: float, top_p: float) -> torch.Tensor:
    """Of one row of logits, token by token in float64: the likeliest are kept until they hold `top_p`."""
    rows, kept, held = torch.softmax(logits.double() / temperature, dim=0), torch.zeros(len(logits), dtype=torch.float64), 0.0
    for token in sorted(range(len(logits)), key=lambda token: -float(rows[token])):
        if held >= top_p:
            break
        kept[token] = rows[token]
        held += float(rows[token])
    return kept / kept.sum()


def exact_joint(target: Qwen3ForCausalLM, temperature: float, top_p: float) -> torch.Tensor:
    """The probability of each text of three tokens, [V, V, V]."""
    prefixes = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
    with torch.no_grad():
        logits = target(torch.cat((torch.tensor([PROMPT]).expand(VOCAB**2, -1), prefixes), dim=1), use_cache=False).logits[:, -3:]
    rows = torch.stack([slow_distribution(row, temperature, top_p) for row in logits.flatten(0, 1)]).view(VOCAB, VOCAB, 3, VOCAB)
    first, second, third = rows[0, 0, 0], rows[:, 0, 1], rows[:, :, 2]
    return first[:, None, None] * second[:, :, None] * third


def chance_of(counts: torch.Tensor, exact: torch.Tensor) -> float:
    """The p-value of a chi-square test of `counts` against probabilities `exact`, over the cells of which at least 5 are expected, and all
    others together. 0 where something was drawn that has no probability."""
    expected = exact.flatten() * counts.sum()
    found = counts.flatten().double()
    if bool((found[expected == 0] > 0).any()):
        return 0.0
    large = expected >= 5
    expected = torch.cat((expected[large], expected[~large].sum().view(1)))
    found = torch.cat((found[large], found[~large].sum().view(1)))
    if expected[-1] < 5:
        expected, found = expected[:-1], found[:-1]
    assert len(expected) > 20, "too few cells to tell anything"
    statistic = ((found - expected).square() / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(expected) - 1) / 2, dtype=torch.float64), statistic / 2))


def drawn(target: Any, draft: Draft, bundle: TargetBundle, by: Sampler, accept: Callable[..., Any] = verify) -> torch.Tensor:
    """How often each text of three tokens came out, [V, V, V]; decoding goes on behind them, so that no limit cuts a step short."""
    texts = speculative_sample(target, draft, bundle, Request(PROMPT, TOKENS + 1, texts=RUNS), by, accept)
    first = torch.tensor([one.ids[:TOKENS] for one in texts])
    return torch.bincount(first @ torch.tensor([VOCAB**2, VOCAB, 1]), minlength=VOCAB**3).view(VOCAB, VOCAB, VOCAB)


@pytest.mark.slow
@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (1.4, 0.8)])
@pytest.mark.parametrize("name", FAMILY)
def test_texts_are_distributed_as_the_targets(name: str, temperature: float, top_p: float, target: Any, bundle: TargetBundle) -> None:
    counts = drawn(target, draft_for(name), bundle, sampler(temperature, top_p))
    assert chance_of(counts, exact_joint(target, temperature, top_p)) > 0.001


@pytest.mark.slow
def test_a_target_with_windows(target: Any, bundle: TargetBundle) -> None:
    """Texts of different lengths, and a target whose own layers look back four tokens: every token must stand where it would alone."""
    config = copy.deepcopy(target.config)
    config.layer_types = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config.sliding_window, config.use_sliding_window = 4, True
    windowed = Qwen3ForCausalLM(config).eval()
    windowed.load_state_dict(target.state_dict())
    exact = exact_joint(windowed, 1.0, 1.0)
    assert float((exact - exact_joint(target, 1.0, 1.0)).abs().sum()) > 0.1
    assert chance_of(drawn(windowed, draft_for("dflash"), bundle, sampler()), exact) > 0.001


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILY)
def test_without_the_residual_they_are_not(name: str, target: Any, bundle: TargetBundle) -> None:
    """The same test, of a sampler that draws from p where it should draw from what q leaves of it."""
    counts = drawn(target, draft_for(name), bundle, sampler(), partial(verify, replaced_from=lambda p, q: p))
    assert chance_of(counts, exact_joint(target, 1.0, 1.0)) < 0.001


@pytest.mark.parametrize("name", FAMILY)
def test_at_hardly_any_temperature_texts_are_the_greedy_ones(name: str, target: Any, bundle: TargetBundle) -> None:
    expected = greedy_decode(target, PROMPT, 30, ()).ids
    for one in speculative_sample(target, draft_for(name), bundle, Request(PROMPT, 30, texts=3), sampler(1e-4)):
        assert one.ids == expected
        assert sum(one.step_lengths) == 29


def test_texts_end_at_a_stop_token_or_at_the_limit(target: Any, bundle: TargetBundle) -> None:
    texts = speculative_sample(target, draft_for("dflash"), bundle, Request(PROMPT, 9, stop_ids={2, 4}, texts=300), sampler())
    assert {len(one.ids) for one in texts} == set(range(1, 10))
    for one in texts:
        assert not {2, 4} & set(one.ids[:-1])
        assert len(one.ids) == 9 or one.ids[-1] in (2, 4)
        assert sum(one.step_lengths) == len(one.ids) - 1
        assert all(1 <= step <= 3 for step in one.step_lengths)
    assert {step for one in texts for step in one.step_lengths} == {1, 2, 3}


def test_a_seed_gives_the_same_texts_again(target: Any, bundle: TargetBundle) -> None:
    def ids(seed: int) -> list[list[int]]:
        return [one.ids for one in speculative_sample(target, draft_for("dflash"), bundle, Request(PROMPT, 12), sampler(seed=seed))]

    assert ids(1) == ids(1)
    assert ids(1) != ids(2)


def test_nothing_to_decode_is_refused(target: Any, bundle: TargetBundle) -> None:
    with pytest.raises(TargetError, match="nothing to decode"):
        speculative_sample(target, draft_for("dflash"), bundle, Request(PROMPT, 0), sampler())


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 0.9), (2.0, 0.3), (1.0, 1e-9)])
def test_distribution(temperature: float, top_p: float) -> None:
    logits = torch.randn(40, 30, generator=torch.Generator().manual_seed(0)) * 2
    found = sampler(temperature, top_p).distribution(logits)
    expected = torch.stack([slow_distribution(row, temperature, top_p) for row in logits])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-7)


def test_candidates_are_drawn_from_where_they_stand_in_the_vocabulary() -> None:
    logits, candidates = torch.tensor([[[1.0, 0.0], [0.5, 2.0]]]), torch.tensor([[[4, 1], [0, 3]]])
    rows = sampler().drafted_from(Proposal(torch.tensor([[4, 3]]), logits, candidates), 5)
    softmax = torch.softmax(logits, dim=-1)[0]
    expected = torch.tensor([[0, softmax[0, 1], 0, 0, softmax[0, 0]], [softmax[1, 0], 0, 0, softmax[1, 1], 0]])
    torch.testing.assert_close(rows[0], expected)


def test_verify_keeps_as_much_as_can_be_kept() -> None:
    """One slot: kept with probability Σ min(p, q), and what comes out is distributed as p, and behind a kept token as the next p."""
    count, by = 200_000, sampler(seed=5)
    p = torch.softmax(torch.randn(2, 6, generator=torch.Generator().manual_seed(1)) * 1.5, dim=-1)
    q = torch.softmax(torch.randn(6, generator=torch.Generator().manual_seed(2)) * 1.5, dim=-1)
    tokens = by.draw(q.expand(count, 1, 6))
    kept, following = verify(tokens, q.expand(count, 1, 6), p.expand(count, 2, 6), by)
    assert float(kept.float().mean()) == pytest.approx(float(torch.minimum(p[0], q).sum()), abs=0.005)
    out = torch.where(kept == 1, tokens[:, 0], following)
    torch.testing.assert_close(torch.bincount(out, minlength=6) / count, p[0], rtol=0, atol=0.005)
    behind = following[kept == 1]
    torch.testing.assert_close(torch.bincount(behind, minlength=6) / len(behind), p[1], rtol=0, atol=0.01)


def test_what_the_target_never_writes_is_never_kept() -> None:
    p, q = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]]), torch.tensor([[[1.0, 0.0]]])
    kept, following = verify(torch.zeros(1, 1, dtype=torch.int64), q, p, sampler())
    assert (kept.tolist(), following.tolist()) == ([0], [1])
    assert residual(p[:, 0], p[:, 0]).tolist() == [[0.0, 1.0]]
