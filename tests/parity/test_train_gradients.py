"""One gradient, however the samples of a step are grouped: all at once, in micro-batches, with empty ones, on two ranks."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from pipeline.draft.anchors import usable_anchors
from pipeline.draft.batch import BatchShape, collate
from pipeline.records import CapturedSample, DraftBatch
from pipeline.runtime.ranks import start_ranks
from pipeline.train.step import Sums, train_step
from tests.support.launch import spawn_ranks
from tests.support.samples import HIDDEN, LAYERS, captured, learner

SHAPE = BatchShape(LAYERS, 4, HIDDEN, torch.float32)


def _batch(samples: Sequence[CapturedSample]) -> DraftBatch:
    return collate(samples, [usable_anchors(s.tokens.spans, s.tokens.num_tokens, 4, "partial") for s in samples], SHAPE)


def _step(batches: Sequence[DraftBatch]) -> tuple[torch.Tensor, Sums]:
    """The gradient as one vector, and the sums, of one step from the same new draft on these micro-batches."""
    learning = learner(start_ranks(1, None, 1))
    step = train_step(learning, iter(batches), len(batches), 1e-3, clip=None)
    return torch.cat([p.grad.flatten() for p in learning.draft.parameters() if p.grad is not None]), step.sums


def _on_rank(rank: int, world_size: int, grouping: list[list[list[int]]]) -> tuple[torch.Tensor, Sums]:
    samples = captured(4, seed=4)
    return _step([_batch([samples[i] for i in group]) for group in grouping[rank]])


def _close(found: tuple[torch.Tensor, Sums], expected: tuple[torch.Tensor, Sums]) -> None:
    difference = (found[0] - expected[0]).norm() / expected[0].norm()
    assert difference < 1e-5
    np.testing.assert_allclose(found[1].values, expected[1].values, rtol=1e-5)


@pytest.fixture(scope="module")
def at_once() -> tuple[torch.Tensor, Sums]:
    samples = captured(4, seed=4)
    counts = [s.tokens.num_supervised for s in samples]
    assert max(counts) > 2 * min(counts)
    return _step([_batch(samples)])


@pytest.mark.parametrize("grouping", [[[0], [1], [2], [3]], [[0, 1, 2], [3]], [[0, 3], [], [1, 2], []]])
def test_accumulation(grouping: list[list[int]], at_once: tuple[torch.Tensor, Sums]) -> None:
    samples = captured(4, seed=4)
    _close(_step([_batch([samples[i] for i in group]) for group in grouping]), at_once)


@pytest.mark.slow
@pytest.mark.parametrize("grouping", [[[[0, 1]], [[2, 3]]], [[[0], [1, 2]], [[3], []]], [[[0, 1], [2, 3]], [[], []]]])
def test_two_ranks(grouping: list[list[list[int]]], at_once: tuple[torch.Tensor, Sums]) -> None:
    results = spawn_ranks(_on_rank, 2, grouping, timeout=60)
    for result in results:
        _close(result, at_once)
    assert torch.equal(results[0][0], results[1][0])


def test_clipping_acts_on_the_true_gradient(at_once: tuple[torch.Tensor, Sums]) -> None:
    learning = learner(start_ranks(1, None, 1))
    step = train_step(learning, iter([_batch([s]) for s in captured(4, seed=4)]), 4, 1e-3, clip=0.1)
    assert step.grad_norm == pytest.approx(float(at_once[0].norm()), rel=1e-5)
    clipped = torch.cat([p.grad.flatten() for p in learning.draft.parameters() if p.grad is not None])
    torch.testing.assert_close(clipped, at_once[0] * 0.1 / at_once[0].norm(), rtol=1e-4, atol=1e-7)


def test_next_batches_are_left_for_the_next_step() -> None:
    samples = captured(4, seed=4)
    learning = learner(start_ranks(1, None, 1))
    batches = iter([_batch([sample]) for sample in itertools.chain(samples)])
    assert train_step(learning, batches, 3, 1e-3, None).sums.samples == 3
    assert next(batches).sample_ids == ("sample-3",)
