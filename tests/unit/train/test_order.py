"""Order is pure: over a grid of settings every sample comes as often as it should, in the same global batches everywhere."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest

from pipeline.train.divide import Division, divide
from pipeline.train.order import GlobalBatch, Mixture, Order, Position, epoch_order

LENGTHS = np.random.default_rng(0).integers(4, 4000, 23)
START = Position()
ENTRY = np.arange(23) % 3  # 8, 8 and 7 samples


def _order(size: int | None = 5, tokens: int | None = None, buckets: int = 1, weights: tuple[float, ...] = ()) -> Order:
    mixture = Mixture(weights, ENTRY) if weights else None
    return Order(3, np.arange(23) * 2, LENGTHS, size, tokens, buckets, mixture)


def _steps(order: Order, start: Position = START) -> Iterator[tuple[Position, GlobalBatch]]:
    position = start
    while True:
        yield position, order.global_batch(position)
        position = order.after(position)


def _epochs(order: Order, count: int) -> list[list[GlobalBatch]]:
    epochs: list[list[GlobalBatch]] = [[] for _ in range(count)]
    for position, batch in _steps(order):
        if position.epoch == count:
            return epochs
        assert position.step == len(epochs[position.epoch])
        epochs[position.epoch].append(batch)
    raise AssertionError


def test_order_is_a_permutation_of_its_own_for_each_seed_and_epoch() -> None:
    orders = [epoch_order(seed, epoch, 50).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4
    # Written down: a new version of NumPy or of this code must not change a run in the middle.
    assert epoch_order(0, 0, 8).tolist() == [0, 1, 6, 7, 3, 4, 2, 5]


def test_without_options_the_order_is_that_of_earlier_versions() -> None:
    """Consecutive pieces of the epoch's permutation: runs that were begun before there was anything else go on."""
    order = _order()
    for epoch, batches in enumerate(_epochs(order, 2)):
        assert np.concatenate([b.samples for b in batches]).tolist() == (epoch_order(3, epoch, 23) * 2).tolist()
        assert [len(b.samples) for b in batches] == [5, 5, 5, 5, 3]
        assert {cycle for b in batches for cycle in b.cycles.tolist()} == {epoch}
    assert order.settings == {"global_batch_size": 5}


GRID = [
    (size, tokens, buckets, weights)
    for size, tokens in ((5, None), (40, None), (None, 6000), (None, 1))
    for buckets in (1, 4)
    for weights in ((), (0.6, 0.3, 0.1), (1.0, 1.0, 1.0))
]


@pytest.mark.parametrize(("size", "tokens", "buckets", "weights"), GRID)
def test_every_sample_comes_as_often_as_it_should(size: int | None, tokens: int | None, buckets: int, weights: tuple[float, ...]) -> None:
    order = _order(size, tokens, buckets, weights)
    seen: set[tuple[int, int]] = set()
    for epoch, batches in enumerate(_epochs(order, 7)):
        assert order.steps(epoch) == len(batches)
        samples = np.concatenate([b.samples for b in batches]).tolist()
        for batch in batches:
            assert np.array_equal(batch.num_tokens, LENGTHS[batch.samples // 2])
            assert tokens is None or len(batch.samples) == 1 or batch.num_tokens.sum() <= tokens
            assert size is None or len(batch.samples) <= size
            for sample, cycle in zip(batch.samples.tolist(), batch.cycles.tolist(), strict=True):
                assert (sample, cycle) not in seen  # no draw has the anchors of another
                seen.add((sample, cycle))
        if not weights:
            assert sorted(samples) == (np.arange(23) * 2).tolist()
        else:
            assert order.mixture is not None
            assert np.bincount(ENTRY[np.array(samples) // 2], minlength=3).tolist() == order.mixture.quotas()
    per_entry = [dict.fromkeys((np.flatnonzero(entry == ENTRY) * 2).tolist(), 0) for entry in range(3)]
    for sample, _ in seen:
        per_entry[ENTRY[sample // 2]][sample] += 1
    for counts in per_entry:  # never a third time before all came twice
        assert max(counts.values()) - min(counts.values()) <= 1


def test_quotas_follow_the_weights_by_largest_remainder() -> None:
    assert Mixture((0.6, 0.3, 0.1), ENTRY).quotas() == [14, 7, 2]  # 13.8, 6.9, 2.3
    assert Mixture((2.0, 2.0, 2.0), ENTRY).quotas() == [8, 8, 7]  # 7.67 each: the first are rounded up
    assert Mixture((1e-9, 1.0, 1.0), ENTRY).quotas() == [0, 12, 11]


def test_tokens_fill_a_step_as_far_as_the_next_sample_fits() -> None:
    for batches in _epochs(_order(None, 6000), 3):
        for batch, after in zip(batches, batches[1:], strict=False):
            assert batch.num_tokens.sum() + after.num_tokens[0] > 6000


def test_buckets_bring_like_lengths_together_in_shuffled_batches() -> None:
    def padding(order: Order) -> int:
        return sum(int((b.num_tokens.max() - b.num_tokens).sum()) for b in _epochs(order, 1)[0])

    order = _order(4, buckets=5)
    assert padding(order) < padding(_order(4)) / 2
    first, second = _epochs(order, 2)
    assert [b.num_tokens.max() for b in first] != sorted(b.num_tokens.max() for b in first)
    assert [set(b.samples) for b in first] != [set(b.samples) for b in second]


def test_windows_hold_for_the_first_epoch_only() -> None:
    windows = np.repeat([2, 0, 1], [9, 9, 5])
    order = Order(3, np.arange(23), LENGTHS, 4, length_buckets=3, windows=windows)
    first, second = (np.concatenate([b.samples for b in batches]) for batches in _epochs(order, 2))
    assert windows[first].tolist() == sorted(windows)
    assert first.tolist() != np.argsort(windows, kind="stable").tolist()
    usual = np.concatenate([b.samples for b in _epochs(Order(3, np.arange(23), LENGTHS, 4, length_buckets=3), 2)[1]])
    assert second.tolist() == usual.tolist()


@pytest.mark.parametrize("settings", [{}, {"buckets": 4}, {"size": None, "tokens": 6000}, {"weights": (0.6, 0.3, 0.1)}])
def test_an_order_goes_on_from_any_position(settings: dict[str, Any]) -> None:
    whole = [(position, batch.samples.tolist()) for position, batch in islice(_steps(_order(**settings)), 20)]
    for start in (3, 11):
        again = islice(_steps(_order(**settings), whole[start][0]), 20 - start)
        assert [(position, batch.samples.tolist()) for position, batch in again] == whole[start:]


@pytest.mark.parametrize("dp_size", [1, 2, 3, 8])
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("micro_batch_tokens", [None, 1000, 9000])
@pytest.mark.parametrize("pack_tokens", [None, 500, 6000])
def test_a_global_batch_is_shared_out_whole(dp_size: int, accumulate: int, micro_batch_tokens: int | None, pack_tokens: int | None) -> None:
    lengths = LENGTHS[:17]
    for count in (0, 1, 5, 17):
        shares = divide(lengths[:count], Division(dp_size, accumulate, micro_batch_tokens, pack_tokens))
        assert len(shares) == dp_size
        assert len({len(share) for share in shares}) == 1  # all ranks run the same collectives
        assert sorted(place for share in shares for rows in share for row in rows for place in row) == list(range(count))
        counts = [sum(len(row) for rows in share for row in rows) for share in shares]
        assert max(counts) - min(counts) <= 1
        if micro_batch_tokens is None:
            assert len(shares[0]) == accumulate
        for rows in (rows for share in shares for rows in share if rows):
            used = [int(lengths[row].sum()) for row in rows]
            if micro_batch_tokens is not None:
                assert len(rows) == 1 or len(rows) * max(used) <= micro_batch_tokens
            if pack_tokens is None:
                assert all(len(row) == 1 for row in rows)
            else:
                assert all(len(row) == 1 or total <= pack_tokens for row, total in zip(rows, used, strict=True))


def test_ranks_get_about_the_same_number_of_tokens_and_rows_are_full() -> None:
    lengths = np.random.default_rng(1).integers(100, 4000, 64)
    shares = divide(lengths, Division(4, 2))
    work = [sum(int(lengths[row].sum()) for rows in share for row in rows) for share in shares]
    assert max(work) / min(work) < 1.05
    rows = [row for share in divide(lengths, Division(2, 1, 8000, 8000)) for rows in share for row in rows]
    assert lengths.sum() / (len(rows) * 8000) > 0.85
