import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pipeline.draft.anchors import draw_anchors, usable_anchors
from pipeline.records import CapturedSample, DraftBatch, TokenSample
from pipeline.train.feed import BatchShape, Feed, Order, Position, collate, divide, epoch_order
from tests.support.samples import HIDDEN, LAYERS, captured

SHAPE = BatchShape(LAYERS, block_size=4, hidden_size=HIDDEN, dtype=torch.float32)


def _order(num_tokens: list[int], batch: int, seed: int = 3) -> Order:
    return Order(seed, np.arange(len(num_tokens)) * 2, np.array(num_tokens), batch)


def test_order_is_a_permutation_of_its_own_for_each_seed_and_epoch() -> None:
    orders = [epoch_order(seed, epoch, 50).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    # Written down: a new version of NumPy or of this code must not change a run in the middle.
    assert epoch_order(0, 0, 8).tolist() == [0, 1, 6, 7, 3, 4, 2, 5]


@pytest.mark.parametrize(("dp_size", "accumulate"), [(1, 1), (1, 4), (2, 1), (2, 3), (3, 2), (8, 2)])
@pytest.mark.parametrize(("samples", "batch"), [(23, 5), (8, 8), (3, 8), (16, 4)])
def test_a_global_batch_is_the_same_samples_on_any_world(samples: int, batch: int, dp_size: int, accumulate: int) -> None:
    order = _order(np.random.default_rng(0).integers(4, 4000, samples).tolist(), batch)
    position = Position()
    for epoch in range(2):
        seen: list[int] = []
        for step in range(order.steps_per_epoch):
            assert position == Position(epoch, step)
            parts = order.micro_batches(position, dp_size, accumulate)
            alone = np.sort(order.micro_batches(position, 1, 1)[0][0])
            assert len(parts) == dp_size
            assert all(len(rank) == accumulate for rank in parts)
            rows = np.concatenate([micro for rank in parts for micro in rank])
            assert np.sort(rows).tolist() == alone.tolist()
            counts = [sum(len(micro) for micro in rank) for rank in parts]
            assert max(counts) - min(counts) <= 1
            seen += rows.tolist()
            position = order.after(position)
        assert sorted(seen) == (np.arange(samples) * 2).tolist()


def test_ranks_get_about_the_same_number_of_tokens() -> None:
    lengths = np.random.default_rng(1).integers(100, 4000, 64)
    work = [int(lengths[np.concatenate(parts)].sum()) for parts in divide(lengths, 4, 2)]
    assert max(work) / min(work) < 1.05


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


def _same(one: DraftBatch, other: DraftBatch) -> bool:
    tensors = (getattr(one, name) for name in ("input_ids", "loss_mask", "features", "anchors", "block_valid", "document_end"))
    others = (getattr(other, name) for name in ("input_ids", "loss_mask", "features", "anchors", "block_valid", "document_end"))
    return one.sample_ids == other.sample_ids and all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))


def _draw(tokens: TokenSample, epoch: int) -> NDArray[np.int64]:
    return draw_anchors(7, epoch, tokens.sample_id, usable_anchors(tokens.spans, tokens.num_tokens, 4, "full"), 3)


def test_threads_change_nothing_and_a_restart_goes_on() -> None:
    samples = captured(11, seed=2)
    order = Order(5, np.arange(11), np.array([s.tokens.num_tokens for s in samples]), 4)

    def batches(workers: int, start: Position, count: int) -> list[DraftBatch]:
        feed = Feed(lambda indices: [samples[i] for i in indices], _draw, SHAPE, workers)
        return list(itertools.islice(feed.micro_batches(order, start, 0, 1, 2), count))

    expected = batches(0, Position(), 14)  # 3 steps an epoch, 2 micro-batches a step: into the third epoch
    for workers in (1, 3):
        assert all(_same(a, b) for a, b in zip(batches(workers, Position(), 14), expected, strict=True))
    assert all(_same(a, b) for a, b in zip(batches(2, Position(1, 1), 6), expected[8:], strict=True))


def test_an_error_of_a_reading_thread_reaches_the_caller() -> None:
    samples = captured(4)

    def source(indices: "list[int]") -> list[CapturedSample]:
        raise OSError(f"sample {indices[0]} is gone")

    feed = Feed(source, _draw, SHAPE, 2)  # type: ignore[arg-type]
    order = Order(0, np.arange(4), np.array([s.tokens.num_tokens for s in samples]), 2)
    with pytest.raises(OSError, match="is gone"):
        next(feed.micro_batches(order, Position(), 0, 1, 1))
