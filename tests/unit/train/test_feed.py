import itertools

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from pipeline.draft.anchors import draw_anchors, draw_prefixes, usable_anchors
from pipeline.draft.batch import BatchShape
from pipeline.records import CapturedSample, DraftBatch, TokenSample
from pipeline.train.divide import Division
from pipeline.train.feed import Feed, bound_by_reading, num_micro_batches
from pipeline.train.order import Mixture, Order, Position
from tests.support.samples import HIDDEN, LAYERS, captured

SHAPE = BatchShape(LAYERS, block_size=4, hidden_size=HIDDEN, dtype=torch.float32)


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
        return list(itertools.islice(feed.micro_batches(order, start, Division(accumulate=2), 0), count))

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
        next(feed.micro_batches(order, Position(), Division(), 0))


@pytest.mark.parametrize("workers", [0, 2])
def test_packed_batches_by_tokens_on_any_ranks_hold_the_global_batch(workers: int) -> None:
    """However many micro-batches a step takes, every rank has as many, and together they are the step's samples with their anchors."""
    samples = captured(11, seed=2)
    order = Order(5, np.arange(11), np.array([s.tokens.num_tokens for s in samples]), 6, mixture=Mixture((3.0, 1.0), np.arange(11) % 2))

    def steps(division: Division) -> list[list[tuple[str, list[int]]]]:
        feeds = [
            Feed(lambda indices: [samples[i] for i in indices], _draw, SHAPE, workers).micro_batches(order, Position(), division, rank)
            for rank in range(division.dp_size)
        ]
        found, position = [], Position()
        for _ in range(5):
            batches = [next(feed) for _ in range(num_micro_batches(order, position, division)) for feed in feeds]
            found.append(sorted(pair for batch in batches for pair in _drawn(batch)))
            position = order.after(position)
        return found

    expected = steps(Division())
    assert [len(step) for step in expected] == [6, 5, 6, 5, 6]
    for division in (Division(2, 3), Division(1, 2, None, 100), Division(2, 1, 120, 120), Division(3, 1, 70)):
        assert steps(division) == expected


def test_each_block_has_the_visible_prefix_of_its_anchor() -> None:
    samples = captured(5, seed=2)
    order = Order(5, np.arange(5), np.array([s.tokens.num_tokens for s in samples]), 5)

    def prefixes(tokens: TokenSample, cycle: int, anchors: NDArray[np.int64]) -> NDArray[np.int64]:
        return draw_prefixes(7, cycle, tokens.sample_id, anchors, 4, 0.9)

    feed = Feed(lambda indices: [samples[i] for i in indices], _draw, SHAPE, 0, prefixes=prefixes)
    batch = next(feed.micro_batches(order, Position(), Division(1, 1, None, 150), 0))
    assert batch.prefix_lengths is not None
    lengths = [n for row in range(len(batch.anchors)) for n in batch.prefix_lengths[row, batch.block_valid[row]].tolist()]
    expected = [n for sample, at in _drawn(batch) if at for n in draw_prefixes(7, 0, sample, np.array(at), 4, 0.9).tolist()]
    assert lengths == expected
    assert set(lengths) == {2, 3}


def _drawn(batch: DraftBatch) -> list[tuple[str, list[int]]]:
    """Sample ids with the positions of their anchors, row by row."""
    found: list[tuple[str, list[int]]] = []
    ids = iter(batch.sample_ids)
    for row in range(len(batch.anchors)):
        valid = batch.block_valid[row]
        starts, positions = batch.document_start[row, valid], batch.position_ids[row].gather(0, batch.anchors[row, valid])
        found += [(next(ids), positions[starts == start].tolist()) for start in sorted(set(starts.tolist()))]
    assert next(ids, None) is None
    return found


def test_a_run_is_bound_by_reading_when_it_waits_much() -> None:
    assert bound_by_reading(waited=10.0, seconds=100.0, num_workers=2) is None
    assert bound_by_reading(waited=3.0, seconds=4.0, num_workers=2) is None  # of a run of seconds
    told = bound_by_reading(waited=43.0, seconds=100.0, num_workers=2)
    assert "43% of its time so far went by waiting for samples. Raise data.num_workers (2)" in str(told)
