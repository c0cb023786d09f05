from pathlib import Path

from PIL import Image

from pipeline.report.plots import plot_served, plot_training
from pipeline.report.tables import table


def _size(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        image.load()
        return image.size


def test_pictures_are_whole_png_files(tmp_path: Path) -> None:
    records = [{"step": step, "loss": 5.0 / step, "accept_len": 1.0 + step / 10} for step in range(1, 6)]
    records.append({"step": 5, "val_loss": 1.2, "val_accept_len": 1.4})
    plot_training([*records, {"step": 5, "val_accuracy_by_slot": [0.5, 0.2, 0.1]}], tmp_path / "curves.png", "run")
    plot_training([], tmp_path / "empty.png", "a run without a line")
    plot_served({1: 10, 2: 3, 4: 1}, tmp_path / "served.png", "served")
    assert _size(tmp_path / "curves.png") == _size(tmp_path / "empty.png")
    assert _size(tmp_path / "served.png")[0] > 500


def test_table_aligns_numbers_to_the_right() -> None:
    text = table(["name", "tokens", "rate"], [["a", 5, 1.0], ["longer", 1234, 12.3456]])
    assert text.splitlines() == [
        "name    tokens    rate",
        "----------------------",
        "a            5   1.000",
        "longer    1234  12.346",
    ]
