"""Samples in rows, one or several: every token, state, anchor and label where it belongs."""

import numpy as np
import pytest
import torch

from pipeline.draft.anchors import usable_anchors
from pipeline.draft.batch import BatchShape, collate
from pipeline.draft.loss import block_labels
from tests.support.samples import HIDDEN, LAYERS, captured

SHAPE = BatchShape(LAYERS, block_size=4, hidden_size=HIDDEN, dtype=torch.float32)


def test_empty_batch_has_one_invalid_block() -> None:
    batch = collate([], [], SHAPE).check()
    assert batch.sample_ids == ()
    assert batch.features.shape == (1, 4, len(LAYERS) * HIDDEN)
    assert batch.block_valid.tolist() == [[False]]


def test_collate_places_every_token_state_and_anchor() -> None:
    samples = captured(3, seed=1)
    anchors = [usable_anchors(s.tokens.spans, s.tokens.num_tokens, 4, "full") for s in samples]
    batch = collate(samples, anchors, SHAPE).check()
    for row, (one, at) in enumerate(zip(samples, anchors, strict=True)):
        length = one.tokens.num_tokens
        assert batch.input_ids[row, :length].tolist() == one.tokens.input_ids.tolist()
        assert batch.loss_mask[row].nonzero().flatten().tolist() == one.tokens.loss_mask.nonzero()[0].tolist()
        assert torch.equal(batch.features[row, :length], one.features(LAYERS))
        assert not batch.features[row, length:].any()
        assert batch.anchors[row][batch.block_valid[row]].tolist() == at.tolist()
        assert set(batch.document_end[row].tolist()) == {length}


ROWS = [[2, 0], [1], [4, 3, 5]]


@pytest.mark.parametrize("rows", [None, ROWS])
def test_positions_blocks_and_labels_of_packed_samples(rows: list[list[int]] | None) -> None:
    """A packed document is what it is alone, moved: its anchors, where they may look, and its labels."""
    samples = captured(6, seed=5, shortest=3, longest=40)  # some shorter than a block
    anchors = [usable_anchors(s.tokens.spans, s.tokens.num_tokens, 4, "partial") for s in samples]
    batch = collate(samples, anchors, SHAPE, rows).check()
    assert batch.sample_ids == tuple(s.tokens.sample_id for s in samples)
    labels, supervised = block_labels(batch, 4)
    for number, row in enumerate(rows or [[place] for place in range(6)]):
        start = first = 0
        for place in row:
            one, at = samples[place], anchors[place]
            alone = collate([one], [at], SHAPE)
            end, blocks = start + one.tokens.num_tokens, slice(first, first + len(at))
            assert batch.input_ids[number, start:end].tolist() == one.tokens.input_ids.tolist()
            assert batch.position_ids[number, start:end].tolist() == list(range(one.tokens.num_tokens))
            assert torch.equal(batch.features[number, start:end], one.features(LAYERS))
            assert batch.anchors[number, blocks].tolist() == (at + start).tolist()
            assert batch.block_valid[number, blocks].all()
            assert set(batch.document_start[number, blocks].tolist()) <= {start}
            assert set(batch.document_end[number, blocks].tolist()) <= {end}
            of_one, wanted = block_labels(alone, 4)
            assert torch.equal(supervised[number, blocks], wanted[0, : len(at)])
            assert torch.equal(labels[number, blocks][wanted[0, : len(at)]], of_one[0, : len(at)][wanted[0, : len(at)]])
            start, first = end, first + len(at)
        assert not batch.block_valid[number, first:].any()
        assert not batch.loss_mask[number, start:].any()
        assert int(batch.document_end[number].max()) == start


def test_a_last_document_without_an_anchor_is_counted() -> None:
    samples = captured(2, seed=1)
    batch = collate(samples, [np.array([3]), np.zeros(0, np.int64)], SHAPE, [[0, 1]]).check()
    assert int(batch.document_end.max()) == sum(s.tokens.num_tokens for s in samples)
    assert batch.block_valid.tolist() == [[True, False]]
