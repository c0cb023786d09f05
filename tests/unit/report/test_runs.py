import pytest

from pipeline.report.runs import Estimate, Run, TargetSpeed, effects, leaderboard


def _run(rate: float, seed: int, value: float | None, state: str = "COMPLETE") -> Run:
    records = [{"step": 8, "val_loss": 1.0, "val_walk_accept_len": 2.0, "val_accuracy_by_slot": [0.5, 0.25]}]
    return Run(f"{rate}-{seed}", "", state, seed, {"lr": rate}, value, records, 4, draft_seconds=0.01)


RUNS = [_run(1.0, 0, 3.0), _run(1.0, 1, 3.4), _run(2.0, 0, 2.9), _run(2.0, 1, 3.2), _run(3.0, 0, None, "FAIL"), _run(3.0, 1, 9.0, "PRUNED")]


def test_settings_are_compared_in_pairs_of_seeds() -> None:
    rows = leaderboard(RUNS, "max", TargetSpeed(0.05, {4: 0.06}, None, "given"))
    assert [row.settings["lr"] for row in rows] == [1.0, 2.0]
    assert rows[0].behind is None
    behind = rows[1].behind
    assert behind is not None
    assert behind.mean == pytest.approx(0.15)
    assert behind.half == pytest.approx(12.706 * 0.05 * 2**0.5 / 2**0.5)  # differences 0.1 and 0.2
    assert rows[0].speedup == pytest.approx(2.0 * 0.05 / (0.01 + 0.06))
    assert rows[0].accuracy_by_slot == [0.5, 0.25]
    assert [row.settings["lr"] for row in leaderboard(RUNS, "min", None)] == [2.0, 1.0]


def test_one_seed_has_no_interval() -> None:
    assert Estimate.of([2.0]) == Estimate(2.0, None, 1)


def test_effects_are_shares_of_the_variance() -> None:
    [(name, (levels, share))] = effects(RUNS).items()
    assert name == "lr"
    assert {value: level.mean for value, level in levels.items()} == {1.0: pytest.approx(3.2), 2.0: pytest.approx(3.05)}
    assert share == pytest.approx(0.0225 / 0.1475)
    assert effects([]) == {}


def test_a_range_does_not_explain_everything_because_no_value_comes_twice() -> None:
    values = [3.0, 1.0, 2.0, 2.0, 3.0, 1.0, 1.0, 2.0, 3.0]
    [(_, (levels, share))] = effects([_run(float(rate), 0, value) for rate, value in enumerate(values)]).items()
    assert len(levels) == 9
    assert share == pytest.approx(0.0)
    [(_, (_, share))] = effects([_run(float(rate), 0, value) for rate, value in enumerate(sorted(values))]).items()
    assert share == pytest.approx(1.0)
