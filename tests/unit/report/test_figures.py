"""What pictures say can be read: labels of settings, and which drafts a picture has room for."""

from collections.abc import Mapping
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure

from pipeline.report import figures, page
from pipeline.report.runs import Estimate, Run, TargetSpeed, effects, leaderboard


def _drawn(draw: figures.Draw, size: tuple[float, float]) -> Figure:
    with rc_context(figures._style(figures.LIGHT)):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure, figures.LIGHT)
        figure.canvas.draw()
    return figure


def _run(place: int, settings: Mapping[str, Any], value: float, draft_seconds: float | None = None) -> Run:
    records = [{"step": 1, "val_loss": 1.0, "val_walk_accept_len": 2.0}]
    return Run(f"{place}", "", "COMPLETE", 0, settings, value, records, 8, draft_seconds=draft_seconds)


def test_labels_of_settings_can_be_read() -> None:
    runs = [
        _run(
            place,
            {
                "model.optim.lr": 10 ** (-5 + place / 4),
                "model.draft.target_layer_ids": ["[1, 9, 17, 25, 33]", "[2, 18, 33]", "[33]"][place % 3],
                "data.cache": f"/a/long/path/to/where/caches/are/kept/part-{place % 2}",
                "model.draft.block_size": [4, 8, 16][place // 4],
                "model.draft.num_hidden_layers": place % 4,
                "model.objective.gamma": [None, 7.0][place % 2],
            },
            1.0 + place * place % 7,
        )
        for place in range(12)
    ]
    found = effects(runs)
    down, across = figures.settings_grid(found)
    figure = _drawn(figures.settings_effects(found, "val_accept_len"), (min(10.4, 2.6 * across + 0.6), 3.2 * down))
    whole = figure.bbox
    assert sum(axes.get_visible() for axes in figure.axes) == 6
    for axes in figure.axes:
        labels = [label for label in axes.get_xticklabels() if label.get_text()]
        assert labels
        for label in labels:
            box = label.get_window_extent()
            assert "$" not in label.get_text()
            assert box.x0 >= whole.x0 - 1
            assert box.y0 >= whole.y0 - 1
        level = [label.get_window_extent() for label in labels if label.get_rotation() == 0]
        assert not any(one.overlaps(other) for place, one in enumerate(level) for other in level[:place])


def test_the_draft_that_is_fastest_is_in_the_picture() -> None:
    rows = leaderboard([_run(place, {"a": place}, 2.0 - place / 100, 0.02 - place / 1000) for place in range(16)], "max", _TARGET)
    figure = _drawn(figures.pareto(rows, "val_accept_len", "max"), (10.4, 3.6))
    assert [label.get_text() for label in figure.axes[2].get_yticklabels()] == [f"{rank}" for rank in range(5, 17)]


def test_a_value_that_is_no_number_is_in_no_ranking() -> None:
    runs = [_run(0, {"a": 1}, 1.5), _run(1, {"a": 2}, float("nan")), _run(2, {"a": 3}, 1.4)]
    assert [row.value for row in leaderboard(runs, "max", None)] == [Estimate(1.5, None, 1), Estimate(1.4, None, 1)]
    assert list(effects(runs)["a"][0]) == [1, 3]


def test_short_values_stay_in_one_line() -> None:
    assert page._code("0.000163") == "<code>0.000163</code>"
    assert page._code("/a" * 20) == f"<code class=long>{'/a' * 20}</code>"


_TARGET = TargetSpeed(0.02, {}, None, "given")
