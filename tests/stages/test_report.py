"""The report of a sweep, and of runs, is one page that holds what it should and needs nothing else."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from PIL import Image

from pipeline.capture.run import capture
from pipeline.config.load import load_config
from pipeline.runtime.ranks import start_alone, start_ranks
from pipeline.sweep.gather import target_of
from pipeline.train.checkpoint import checkpoints
from pipeline.train.loop import train
from stages import report
from tests.support.sweeps import run_sweep, write_sweep
from tests.support.tiny import write_chats
from tests.support.training import config, repeatable

SPACE = {
    "model.draft.num_hidden_layers": {"choice": [1, 2]},
    "model.draft.target_layer_ids": {"choice": [[4], [1, 4]]},
    "model.optim.lr": {"choice": [2e-3, 1e30]},
}


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """LOG_DIR of a sweep with two seeds, of which half the trials failed."""
    folder = tmp_path_factory.mktemp("swept")
    chats = write_chats(folder / "chats.jsonl", 24, seed=3)
    capture(config(folder, tiny_target, chats, model__target__layer_ids=[1, 2, 4]), start_ranks(1, None, 1))
    file = write_sweep(folder, tiny_target, chats, folder / "cache", {"space": SPACE, "seeds": [0, 1]}, trainer__max_steps=8)
    run_sweep(file)
    return folder / "sweep"


@pytest.mark.slow
def test_the_report_of_a_sweep(swept: Path, tmp_path: Path) -> None:
    assert report.main([str(swept), "--out", str(tmp_path), "--measure-target"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert not re.search(r'(src|href|srcset)=(?!"data:)', page)
    for words in (
        "Leaderboard",
        "What one read saved",
        "bytes read",
        "behind the best",
        "predicted speed-up",
        "8 complete, 8 fail",
        "not finite",
    ):
        assert words in page
    assert page.count("data:image/svg+xml;base64,") == 8  # four pictures, light and dark
    for name in ("curves", "pareto", "settings", "slots"):
        with Image.open(tmp_path / f"{name}.png") as image:
            image.load()
            assert image.size[0] > 600
    [rows] = re.findall(r"<h2>Leaderboard</h2>.*?<tbody>(.*?)</tbody>", page)
    assert rows.count("<tr>") == 4
    assert rows.count("±") == 7  # of the best there is nothing that it is behind


@pytest.mark.slow
def test_its_command_trains_the_best_run_again(swept: Path, tmp_path: Path) -> None:
    assert report.main([str(swept), "--out", str(tmp_path)]) == 0
    [command] = re.findall(
        r"<pre>accelerate launch --num_processes 1 stages/train_draft.py (.*?)</pre>", (tmp_path / "report.html").read_text()
    )
    file, override = shlex.split(command)
    assert override.startswith("exp_manager.explicit_log_dir=")
    assert train(load_config("train", file, [f"exp_manager.explicit_log_dir={tmp_path / 'again'}"]), start_ranks(1, None, 1))
    assert repeatable(tmp_path / "again") == repeatable(Path(file).parent)


@pytest.mark.slow
def test_the_report_of_runs(swept: Path, tmp_path: Path) -> None:
    """Of a few trials by their own folders: what differs in their configurations is the setting."""
    runs = [run for run in sorted((swept / "trials").iterdir()) if (run / "export").is_dir()]
    assert report.main([*map(str, runs), "--out", str(tmp_path), "--target-ms", "20"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "num_hidden_layers" in page
    assert "target_layer_ids" in page
    assert "20 ms a step, as given" in page
    [rows] = re.findall(r"<h2>Leaderboard</h2>.*?<tbody>(.*?)</tbody>", page)
    assert rows.count("<tr>") == 4


@pytest.mark.slow
def test_one_faulty_run_does_not_take_the_others_with_it(swept: Path, tmp_path: Path) -> None:
    """Of one the export is damaged, of another the newest checkpoint; the folder's name is no plain YAML."""
    moved = tmp_path / "a: [sweep] & <b>"
    shutil.copytree(swept, moved)
    first, second, *rest = [run for run in sorted((moved / "trials").iterdir()) if (run / "export").is_dir()]
    (first / "export/model.safetensors").write_bytes(b"")
    (checkpoints(second / "checkpoints")[-1] / "state.json").write_text("{")
    assert report.main([str(moved)]) == 0
    assert report.main([str(run) for run in (first, second, *rest)] + ["--out", str(tmp_path / "runs")]) == 0
    page = (tmp_path / "runs/report.html").read_text()
    assert "unreadable" in page
    assert "cannot be read" in page
    assert "<b>&" not in page
    (moved / "study.db").unlink()
    assert report.main([str(moved)]) == 2
    assert not (moved / "study.db").exists()


@pytest.mark.slow
def test_the_target_is_measured_with_the_block_sizes_of_all_runs(swept: Path, tmp_path: Path) -> None:
    runs = [run for run in sorted((swept / "trials").iterdir()) if (run / "export").is_dir()][:2]
    other = tmp_path / "other"
    shutil.copytree(runs[1], other)
    (other / "config.yaml").write_text((other / "config.yaml").read_text().replace("block_size: 4", "block_size: 6"))
    assert set(target_of([runs[0], other], start_alone()[0]).blocks) == {4, 6}


@pytest.mark.parametrize("words", [["--target-tokens-per-second", "9"], ["--target-ms", "0"], ["--measure-target", "--target-ms", "9"]])
def test_options_that_would_do_nothing_are_refused(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        report.main([str(tmp_path), *words])


def test_a_folder_that_is_no_run_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(tmp_path)]) == 2
    assert "is no run: it holds no config.yaml" in capsys.readouterr().err
