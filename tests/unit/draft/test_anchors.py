"""Anchors against the rule spelt out position by position, and draws that depend on nothing but their arguments."""

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipeline.corpus.chat import spans_of
from pipeline.draft.anchors import Fit, draw_anchors, draw_prefixes, has_usable_anchor, usable_anchors

masks = st.lists(st.booleans(), min_size=1, max_size=30)
fits: st.SearchStrategy[Fit] = st.sampled_from(["full", "partial"])


def slow_usable(mask: list[bool], block_size: int, fit: Fit, shift: int) -> list[int]:
    usable = []
    for anchor in range(len(mask)):
        fits = anchor <= len(mask) - block_size if fit == "full" else anchor <= len(mask) - 2
        labels = [anchor + slot for slot in range(1, block_size + shift) if anchor + slot < len(mask) and mask[anchor + slot]]
        if mask[anchor] and fits and labels:
            usable.append(anchor)
    return usable


@given(masks, st.integers(2, 8), fits, st.integers(0, 1))
def test_usable_anchors(mask: list[bool], block_size: int, fit: Fit, shift: int) -> None:
    found = usable_anchors(spans_of(np.array(mask)), len(mask), block_size, fit, shift)
    assert found.tolist() == slow_usable(mask, block_size, fit, shift)


@settings(deadline=None)
@given(st.lists(masks, min_size=1, max_size=8), st.integers(2, 8), fits, st.integers(0, 3), st.integers(0, 1))
def test_has_usable_anchor_for_many_samples(samples: list[list[bool]], block_size: int, fit: Fit, before: int, shift: int) -> None:
    spans = [spans_of(np.array(mask)) for mask in samples]
    # An index may be a slice of a larger one: spans of other samples stand before.
    flat = np.concatenate([np.full((before, 2), 1, dtype=np.int32), *spans])
    offsets = before + np.concatenate(([0], np.cumsum([len(s) for s in spans])))
    found = has_usable_anchor(flat, offsets, np.array([len(mask) for mask in samples]), block_size, fit, shift)
    assert found.tolist() == [bool(slow_usable(mask, block_size, fit, shift)) for mask in samples]


def test_an_index_without_any_span() -> None:
    nothing = np.zeros((0, 2), dtype=np.int32)
    assert has_usable_anchor(nothing, np.zeros(4, dtype=np.int64), np.array([5, 5, 5]), 4, "full").tolist() == [False] * 3


@given(st.integers(0, 3), st.integers(0, 3), st.text(max_size=5), st.integers(1, 50), st.integers(1, 60))
def test_draws(seed: int, epoch: int, sample_id: str, count: int, wanted: int) -> None:
    usable = np.arange(count) * 3 + 1
    drawn = draw_anchors(seed, epoch, sample_id, usable, wanted)
    assert len(drawn) == min(count, wanted)
    assert set(drawn) <= set(usable)
    assert (np.diff(drawn) > 0).all()
    assert np.array_equal(drawn, draw_anchors(seed, epoch, sample_id, usable, wanted))


def test_draws_differ_by_seed_epoch_and_sample_and_by_nothing_else() -> None:
    usable = np.arange(1000)

    def draw(seed: int, epoch: int, sample_id: str) -> NDArray[np.int64]:
        return draw_anchors(seed, epoch, sample_id, usable, 30)

    np.random.seed(0)
    first = draw(1, 2, "a")
    np.random.seed(1)
    assert np.array_equal(first, draw(1, 2, "a"))
    for other in (draw(2, 2, "a"), draw(1, 3, "a"), draw(1, 2, "b"), draw(12, 0, "2/a")):
        assert len(set(first) & set(other)) < 10
    # Another process, with another hash seed, draws the same.
    code = "import numpy as np; from pipeline.draft.anchors import draw_anchors as d; print(d(1, 2, 'a', np.arange(1000), 30).tolist())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout.strip() == str(first.tolist())


def test_every_usable_anchor_is_drawn_equally_often() -> None:
    counts = np.zeros(20)
    for epoch in range(2000):
        counts[draw_anchors(0, epoch, "sample", np.arange(20), 5)] += 1
    assert counts.sum() == 10_000
    assert counts.min() == pytest.approx(500, abs=100)
    assert counts.max() == pytest.approx(500, abs=100)


def test_prefixes_are_drawn_as_often_as_their_weights_say() -> None:
    drawn = draw_prefixes(0, 0, "sample", np.arange(40_000), 6, 0.7)
    weights = 0.7 ** np.arange(2, 6)
    counts = np.bincount(drawn, minlength=6)
    assert counts[:2].tolist() == [0, 0]
    np.testing.assert_allclose(counts[2:] / 40_000, weights / weights.sum(), atol=0.01)
    assert set(draw_prefixes(0, 0, "sample", np.arange(99), 2, 0.9)) == {1}
    assert set(draw_prefixes(0, 0, "sample", np.arange(99), 3, 0.9)) == {2}


def test_a_prefix_depends_on_seed_epoch_sample_and_position_alone() -> None:
    anchors = np.arange(300)
    first = draw_prefixes(1, 2, "a", anchors, 16, 0.9)
    np.random.seed(1)
    assert np.array_equal(first[50:60], draw_prefixes(1, 2, "a", anchors[50:60], 16, 0.9))
    for other in ((2, 2, "a"), (1, 3, "a"), (1, 2, "b")):
        assert (first != draw_prefixes(*other, anchors, 16, 0.9)).mean() > 0.8
    assert len(draw_prefixes(1, 2, "a", anchors[:0], 16, 0.9)) == 0
