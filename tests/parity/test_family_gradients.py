"""One gradient of every variant, however the samples of a step are grouped: in micro-batches, in packed rows, on two ranks."""

import os
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from pipeline.draft.anchors import draw_prefixes, usable_anchors
from pipeline.draft.batch import BatchShape, collate
from pipeline.records import CapturedSample, DraftBatch
from pipeline.runtime.ranks import start_ranks
from pipeline.train.learner import Learner
from pipeline.train.parts import whole
from pipeline.train.step import Sums, train_step
from tests.support.family import FEW, OBJECTIVES, SECTIONS
from tests.support.launch import spawn_ranks
from tests.support.samples import HIDDEN, LAYERS, captured, learner

SHAPE = BatchShape(LAYERS, 4, HIDDEN, torch.float32)
Pair = tuple[str, str]
Result = tuple[torch.Tensor, Sums]


def _learner(pair: Pair) -> Learner:
    return learner(start_ranks(1, None, 1), draft=SECTIONS[pair[0]], objective=OBJECTIVES[pair[1]])


def _batch(pair: Pair, samples: Sequence[CapturedSample], rows: Sequence[Sequence[int]] | None = None) -> DraftBatch:
    shift = int(SECTIONS[pair[0]].get("shift_label", False))
    anchors = [usable_anchors(s.tokens.spans, s.tokens.num_tokens, 4, "partial", shift) for s in samples]
    prefixes = [draw_prefixes(0, 0, s.tokens.sample_id, at, 4, 0.9) for s, at in zip(samples, anchors, strict=True)]
    return collate(samples, anchors, SHAPE, rows, prefixes if pair[1] == "variable_prefix" else None)


def _step(pair: Pair, batches: Sequence[DraftBatch]) -> Result:
    """The gradient as one vector, and the sums, of one step from the same new draft on these micro-batches."""
    learning = _learner(pair)
    step = train_step(learning, iter(batches), len(batches), 1e-3, clip=None, done=0.2)
    return torch.cat([p.grad.flatten() for p in learning.draft.parameters() if p.grad is not None]), step.sums


def _close(found: Result, expected: Result) -> None:
    assert (found[0] - expected[0]).norm() / expected[0].norm() < 1e-5
    np.testing.assert_allclose(found[1].values, expected[1].values, rtol=1e-5)
    assert found[1].loss == pytest.approx(expected[1].loss, rel=1e-5)


def _at_once(pair: Pair) -> Result:
    return _step(pair, [_batch(pair, captured(4, seed=4))])


@pytest.mark.parametrize("pair", FEW)
def test_accumulation_and_packing(pair: Pair) -> None:
    samples, expected = captured(4, seed=4), _at_once(pair)
    assert float(expected[0].norm()) > 0.1
    _close(_step(pair, [_batch(pair, [samples[i] for i in group]) for group in ([0, 3], [], [1, 2])]), expected)
    _close(_step(pair, [_batch(pair, samples, [[2, 0], [3, 1]])]), expected)
    _close(_step(pair, [_batch(pair, samples[:3], [[0, 2, 1]]), _batch(pair, samples[3:])]), expected)


def _on_rank(rank: int, world_size: int, pair: Pair, grouping: list[list[list[int]]]) -> Result:
    samples = captured(4, seed=4)
    return _step(pair, [_batch(pair, [samples[i] for i in group]) for group in grouping[rank]])


def _on_divided_rank(rank: int, world_size: int, pair: Pair) -> tuple[list[torch.Tensor], Sums]:
    """Two steps of a draft divided by FSDP2; its weights afterwards."""
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    learning, samples = _learner(pair), captured(4, seed=4)
    assert learning.is_divided
    batches = [_batch(pair, [samples[i] for i in group]) for group in ([[0], [1, 2]], [[3], []])[rank]]
    for _ in range(2):
        sums = train_step(learning, iter(batches), 2, 1e-2, clip=1.0, done=0.2).sums
    return [whole(p.detach()) for p in learning.draft.parameters()], sums


@pytest.mark.slow
@pytest.mark.parametrize("pair", FEW)
def test_two_ranks(pair: Pair) -> None:
    expected = _at_once(pair)
    results = spawn_ranks(_on_rank, 2, pair, [[[0], [1, 2]], [[3], []]], timeout=100)
    for result in results:
        _close(result, expected)
    assert torch.equal(results[0][0], results[1][0])


@pytest.mark.slow
@pytest.mark.parametrize("pair", FEW[:3])
def test_two_ranks_of_a_divided_draft(pair: Pair) -> None:
    learning, batch = _learner(pair), _batch(pair, captured(4, seed=4))
    sums = [train_step(learning, iter([batch]), 1, 1e-2, clip=1.0, done=0.2).sums for _ in range(2)][1]
    for weights, found in spawn_ranks(_on_divided_rank, 2, pair, timeout=100):
        np.testing.assert_allclose(found.values, sums.values, rtol=1e-3)
        for ours, expected in zip(weights, learning.draft.parameters(), strict=True):
            assert (ours - expected.detach()).norm() < 1e-3 * expected.detach().norm() + 1e-4


@pytest.mark.parametrize("pair", FEW)
def test_what_is_learned_is_what_is_asked(pair: Pair) -> None:
    """A few samples by heart: the loss falls, and metrics have every figure of the variant."""
    learning = _learner(pair)
    batch = _batch(pair, captured(2, seed=4, longest=24))
    losses = [train_step(learning, iter([batch]), 1, 3e-3, 1.0, done=step / 30).sums.loss for step in range(30)]
    # Kimi K3's draft has one guess for all slots of a block, and can know less by heart.
    assert losses[-1] < (0.85 if pair[0] == "kimi_k3" else 0.6) * losses[0]
    metrics = train_step(learning, iter([batch]), 1, 3e-3, 1.0, done=0.25).sums.metrics()
    wanted = {"loss", "accept_len", "accuracy", "accuracy_by_slot", *learning.layout.terms, *learning.layout.means}
    assert set(metrics) == wanted
    assert len(metrics["accuracy_by_slot"]) == 3 + int(SECTIONS[pair[0]].get("shift_label", False))
    if "lambda_base" in metrics:
        assert metrics["lambda_base"] == pytest.approx(0.5)
