"""Shards and batches as pure functions of lengths: every sample once, budgets kept, nothing else looked at."""

import itertools
from typing import Any, TypeAlias

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.corpus.plan import plan_batches, plan_segments, plan_shards, shards_of_part

Lengths: TypeAlias = NDArray[np.integer[Any]]

lengths = st.lists(st.integers(1, 400), max_size=120).map(lambda values: np.array(values, dtype=np.int64))
budgets = st.integers(1, 2000)


@given(lengths, budgets)
def test_shards_cover_the_corpus_in_order_within_their_budget(num_tokens: Lengths, budget: int) -> None:
    shards = plan_shards(num_tokens, budget)
    assert [i for shard in shards for i in shard] == list(range(len(num_tokens)))
    held = [int(num_tokens[list(shard)].sum()) for shard in shards]
    assert all(len(shard) == 1 or tokens <= budget for shard, tokens in zip(shards, held, strict=True))
    # As many as fit: the sample after a shard would have been too much.
    assert all(tokens + num_tokens[after[0]] > budget for tokens, after in zip(held, shards[1:], strict=False))
    assert plan_shards(num_tokens.astype(np.int32), budget) == shards


@given(lengths, budgets)
def test_appended_samples_change_no_shard_but_the_last(num_tokens: Lengths, budget: int) -> None:
    before = plan_shards(num_tokens[: len(num_tokens) // 2], budget)[:-1]
    assert plan_shards(num_tokens, budget)[: len(before)] == before


@given(lengths, budgets, st.data())
def test_segments_are_divided_each_by_itself(num_tokens: Lengths, budget: int, data: st.DataObject) -> None:
    assert plan_segments(num_tokens, budget, None) == plan_shards(num_tokens, budget)
    if len(num_tokens) < 3:
        return
    a, b = sorted(data.draw(st.tuples(st.integers(1, len(num_tokens) - 1), st.integers(1, len(num_tokens) - 1))))
    segments = [[(0, a), (b, len(num_tokens))], [(a, b)]] if a < b else [[(0, a)], [(a, len(num_tokens))]]
    outer = [*range(a), *range(b, len(num_tokens))] if a < b else list(range(a))
    inner = list(range(a, b)) if a < b else list(range(a, len(num_tokens)))
    expected = [[numbers[i] for i in shard] for numbers in (outer, inner) for shard in plan_shards(num_tokens[numbers], budget)]
    assert plan_segments(num_tokens, budget, segments) == expected
    with pytest.raises(ValueError, match="once each"):
        plan_segments(num_tokens, budget, segments[:1])


@given(lengths, budgets)
def test_batches_hold_every_sample_once_sorted_within_their_budget(num_tokens: Lengths, budget: int) -> None:
    batches = plan_batches(num_tokens, budget)
    flat = [position for batch in batches for position in batch]
    assert flat == sorted(range(len(num_tokens)), key=lambda i: (num_tokens[i], i))
    for batch in batches:
        assert batch
        assert len(batch) == 1 or len(batch) * int(num_tokens[batch].max()) <= budget
    for batch, after in itertools.pairwise(batches):
        assert (len(batch) + 1) * int(num_tokens[after[0]]) > budget


@given(lengths, budgets)
def test_batches_are_a_function_of_lengths_alone(num_tokens: Lengths, budget: int) -> None:
    assert plan_batches(num_tokens.astype(np.int32), budget) == plan_batches(num_tokens.copy(), budget)


@pytest.mark.parametrize("bad", [np.array([3, 0]), np.array([[1, 2]]), np.array([-1])])
def test_lengths_that_are_none_are_refused(bad: Lengths) -> None:
    with pytest.raises(ValueError, match="num_tokens"):
        plan_shards(bad, 10)
    with pytest.raises(ValueError, match="batch_tokens is 0"):
        plan_batches(np.array([1]), 0)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 20))
def test_parts_divide_the_shards_and_overlap_only_where_their_shares_do(num_shards: int, of: int, other: int) -> None:
    assert [shard for part in range(1, of + 1) for shard in shards_of_part(num_shards, part, of)] == list(range(num_shards))
    for a, b in itertools.product(range(1, of + 1), range(1, other + 1)):
        apart = a * other <= (b - 1) * of or b * of <= (a - 1) * other
        assert not apart or not set(shards_of_part(num_shards, a, of)) & set(shards_of_part(num_shards, b, other))
