"""Acceptance of blocks, and the walk over an answer."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipeline.draft.metrics import BlockSums, accepted_prefix, walk_lengths

slots = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=6)


def slow_accepted(block: list[tuple[bool, bool]]) -> int:
    accepted = 0
    for correct, supervised in block:
        if supervised and not correct:
            break
        accepted += supervised
    return accepted


@given(slots)
def test_accepted_prefix(block: list[tuple[bool, bool]]) -> None:
    correct, supervised = (torch.tensor(column) for column in zip(*block, strict=True))
    assert int(accepted_prefix(correct, supervised)) == slow_accepted(block)


def test_a_hole_neither_breaks_nor_lengthens_a_prefix() -> None:
    supervised = torch.tensor([False, True, False, True, True])
    assert int(accepted_prefix(torch.tensor([False, True, False, True, False]), supervised)) == 2


def test_sums() -> None:
    correct = torch.tensor([[[0, 1, 1], [0, 0, 1], [0, 1, 1]]], dtype=torch.bool)
    supervised = torch.tensor([[[0, 1, 1], [0, 1, 1], [0, 0, 0]]], dtype=torch.bool)
    sums = BlockSums.of(correct, supervised)
    assert sums.accept_len == (3 + 1) / 2  # the third block has nothing supervised and is no block of the mean
    assert sums.accuracy == 3 / 4
    assert sums.accuracy_by_slot == pytest.approx([float("nan"), 0.5, 1.0], nan_ok=True)
    doubled = BlockSums.from_vector((sums + sums).vector())
    assert doubled.accept_len == sums.accept_len
    assert int(doubled.blocks) == 4


def test_no_scored_block() -> None:
    none = torch.zeros(1, 2, 3, dtype=torch.bool)
    assert BlockSums.of(none, none).accept_len == pytest.approx(float("nan"), nan_ok=True)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=40))
def test_a_walk_covers_the_answer_once(accepted: list[int]) -> None:
    lengths = walk_lengths(np.array(accepted), len(accepted))
    assert sum(lengths) == len(accepted) - 1
    at = 0
    for length in lengths[:-1]:
        assert length == accepted[at] + 1
        at += length
    if lengths:
        assert 1 <= lengths[-1] <= accepted[at] + 1


def test_walk_by_hand() -> None:
    assert walk_lengths(np.array([2, 9, 9, 0, 1, 9, 4, 9]), 8) == [3, 1, 2, 1]
    assert walk_lengths(np.array([0]), 1) == []
