"""The two commands themselves: exit codes, what they write, what they say."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.config.load import load_config, to_yaml
from pipeline.train.watch import read_metrics
from tests.support.launch import REPOSITORY, kill_group, run, start
from tests.support.tiny import write_chats
from tests.support.training import config


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs" / "train").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_configurations_load(path: Path) -> None:
    loaded = load_config("train", str(path), [])
    assert loaded.log_dir.startswith("runs/")
    assert loaded.cache_path is not None
    name = "quickstart" if path.stem.startswith("quickstart-") else path.stem  # its variants read its cache
    partner = load_config("capture", str(REPOSITORY / "configs" / "capture" / f"{name}.yaml"), [])
    assert partner.capture.path == loaded.cache_path
    assert partner.model.target.path == loaded.model.target.path
    assert partner.model.target.chat_template_kwargs == loaded.model.target.chat_template_kwargs
    assert partner.data.max_tokens <= loaded.data.max_tokens


def test_faults_of_the_configuration_end_with_code_2(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("data: {cache: nowhere}\nmodel: {draft: {block_sise: 8}, optim: {lr: -1}}\n")
    done = run("stages/train_draft.py", str(tmp_path / "bad.yaml"), check=False)
    assert done.codes == (2,)
    for expected in ("model.draft.block_sise: unknown field; did you mean model.draft.block_size?", "model.optim.lr: "):
        assert expected in done.text
    assert "Traceback" not in done.text


@pytest.mark.slow
def test_train_stop_go_on_and_evaluate(tmp_path: Path, tiny_target: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 24, seed=2)
    wanted = config(
        tmp_path,
        tiny_target,
        chats,
        data__mode="online",
        trainer__max_steps=60,
        exp_manager__create_tensorboard_logger=True,
        evaluate={"input_cfg": [{"path": str(chats)}], "max_prompts": 3, "max_new_tokens": 12, "temperature": 0.9, "top_p": 0.95},
    )
    file, folder = tmp_path / "config.yaml", tmp_path / "run"
    file.write_text(to_yaml(wanted))
    process = start([sys.executable, str(REPOSITORY / "stages/train_draft.py"), str(file)], tmp_path / "first.log")
    try:
        until = time.monotonic() + 100
        while len(read_metrics(folder)) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        kill_group(process)
    said = (tmp_path / "first.log").read_text()
    assert code == 143, said
    assert "stopped by SIGTERM after step" in said
    assert "this draft reads the target layers [1, 5], chosen by its depth" in said
    done = run("stages/train_draft.py", str(file))
    assert "going on from" in done.text
    assert {path.name for path in folder.iterdir()} >= {
        "config.yaml",
        "provenance.json",
        "metrics.jsonl",
        "training.png",
        "export",
        "tensorboard",
    }
    assert [record["step"] for record in read_metrics(folder) if "loss" in record] == list(range(1, 61))
    assert len(list((folder / "tensorboard").rglob("events.*"))) == 2
    assert load_config("train", str(folder / "config.yaml"), []) == wanted
    run("stages/evaluate.py", str(file))
    result = json.loads((folder / "evaluation.json").read_text())
    assert result["lossless"] is True
    assert result["num_prompts"] == 3
    assert result["sampling"] == {"temperature": 0.9, "top_p": 0.95, "seed": 0}
    assert 1 <= result["sampled_acceptance_length"] <= 4
    assert (folder / "served.png").exists()
