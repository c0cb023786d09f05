"""One gradient, however the samples of a step are grouped: all at once, in micro-batches, with empty ones, packed, on two ranks."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from pipeline.config.schema import ObjectiveSection
from pipeline.draft.anchors import draw_prefixes, usable_anchors
from pipeline.draft.batch import BatchShape, collate
from pipeline.records import CapturedSample, DraftBatch
from pipeline.runtime.ranks import start_ranks
from pipeline.train.step import Sums, train_step
from tests.support.launch import spawn_ranks
from tests.support.samples import HIDDEN, LAYERS, captured, learner, sample

SHAPE = BatchShape(LAYERS, 4, HIDDEN, torch.float32)

OBJECTIVES: Mapping[str, Mapping[str, Any]] = {
    "decay": {"gamma": 2.0},
    "uniform": {},
    "dpace": {"dpace_alpha": 0.3},
    "variable_prefix": {"gamma": 2.0},
    "distill": {"gamma": 2.0, "temperature": 1.5},
}
"""Every name that `model.objective.name` can be, with settings; one that is added needs a row here."""

PARTIAL = ObjectiveSection(anchor_fit="partial")
Rows = list[list[int]]  # of a batch: samples by row
AT_ONCE: list[Rows] = [[[0], [1], [2], [3], [4]]]
GROUPINGS: Mapping[str, list[Rows]] = {
    "four micro-batches": [[[0]], [[1]], [[2]], [[3], [4]]],
    "four samples and one": [[[0], [1], [2], [3]], [[4]]],
    "empty micro-batches": [[[0], [3]], [], [[1], [2], [4]], []],
    "packed into one row": [[[0, 4, 1, 2, 3]]],
    "packed into two rows": [[[4, 0], [2, 1, 3]]],
    "packed, in micro-batches": [[[1, 2], [4]], [[3, 0]]],
}
ON_RANKS: Sequence[list[list[Rows]]] = [
    [[[[0], [1]]], [[[2], [3], [4]]]],
    [[[[0]], [[1], [2]]], [[[3, 4]], []]],
    [[[[0, 1]], [[2], [3, 4]]], [[], []]],
]


def _samples() -> list[CapturedSample]:
    """Four of unequal supervised length, and one that is shorter than a block."""
    short = sample(4, 3, np.array([False, True, True]), torch.Generator().manual_seed(9))
    return [*captured(4, seed=4), short]


def _batch(samples: Sequence[CapturedSample], rows: Rows | None = None, section: ObjectiveSection = PARTIAL) -> DraftBatch:
    """The batch of `rows`, which number all samples; of all of them, one a row, by default."""
    rows = [[place] for place in range(len(samples))] if rows is None else rows
    chosen = [samples[place] for row in rows for place in row]
    anchors = [usable_anchors(s.tokens.spans, s.tokens.num_tokens, 4, section.anchor_fit) for s in chosen]
    prefixes = [draw_prefixes(0, 0, s.tokens.sample_id, at, 4, 0.9) for s, at in zip(chosen, anchors, strict=True)]
    places = itertools.count()
    numbered = [[next(places) for _ in row] for row in rows]
    return collate(chosen, anchors, SHAPE, numbered, prefixes if section.name == "variable_prefix" else None)


def _step(batches: Sequence[DraftBatch], section: ObjectiveSection) -> tuple[torch.Tensor, Sums]:
    """The gradient as one vector, and the sums, of one step from the same new draft on these micro-batches."""
    learning = replace(learner(start_ranks(1, None, 1)), objective=section)
    step = train_step(learning, iter(batches), len(batches), 1e-3, clip=None)
    return torch.cat([gradient.flatten() for gradient in learning.gradients()]), step.sums


def _grouped(grouping: list[Rows], section: ObjectiveSection) -> tuple[torch.Tensor, Sums]:
    return _step([_batch(_samples(), rows, section) for rows in grouping], section)


def _close(found: tuple[torch.Tensor, Sums], expected: tuple[torch.Tensor, Sums]) -> None:
    difference = (found[0] - expected[0]).norm() / expected[0].norm()
    assert difference < 1e-5
    np.testing.assert_allclose(found[1].values, expected[1].values, rtol=1e-5)


SECTIONS = [
    ObjectiveSection.model_validate({"name": name, "anchor_fit": fit, **row})
    for name, row in OBJECTIVES.items()
    for fit in ("full", "partial")
]


def test_there_is_a_row_for_every_objective() -> None:
    assert set(OBJECTIVES) == set(get_args(ObjectiveSection.model_fields["name"].annotation))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: f"{section.name}-{section.anchor_fit}")
def test_on_one_rank(section: ObjectiveSection) -> None:
    counts = [s.tokens.num_supervised for s in _samples()]
    assert max(counts) > 2 * min(counts)
    expected = _grouped(AT_ONCE, section)
    for grouping in GROUPINGS.values():
        _close(_grouped(grouping, section), expected)


def _on_rank(rank: int, world_size: int) -> list[tuple[torch.Tensor, Sums]]:
    return [_grouped(grouping[rank], section) for section in SECTIONS for grouping in ON_RANKS]


@pytest.mark.slow
def test_on_two_ranks() -> None:
    """Also with several samples in a row on one rank only, an empty micro-batch, and none at all."""
    results = spawn_ranks(_on_rank, 2, timeout=100)
    expected = [once for section in SECTIONS for once in [_grouped(AT_ONCE, section)] * len(ON_RANKS)]
    for first, second, wanted in zip(*results, expected, strict=True):
        _close(first, wanted)
        assert torch.equal(first[0], second[0])


def test_clipping_acts_on_the_true_gradient() -> None:
    at_once = _step([_batch(captured(4, seed=4))], ObjectiveSection(gamma=2.0, anchor_fit="partial"))
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
