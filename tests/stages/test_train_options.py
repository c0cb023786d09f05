"""What a training can be asked for besides: to end early, to start from weights, to say what it was told."""

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from pipeline.capture.run import capture
from pipeline.config.load import load_config, to_yaml
from pipeline.config.schema import Config
from pipeline.errors import CacheMismatchError, ConfigError, TrainingError
from pipeline.runtime.ranks import start_ranks
from pipeline.train.checkpoint import checkpoints, read_state
from pipeline.train.loop import train
from tests.support.tiny import write_chats
from tests.support.training import config, repeatable


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Config:
    """A cache, and the configuration of a short training from it."""
    folder = tmp_path_factory.mktemp("given")
    changes: dict[str, Any] = {"data__validation_ds": {"fraction": 0.25}, "trainer__max_steps": 12, "trainer__val_check_interval": 2}
    wanted = config(folder, tiny_target, write_chats(folder / "chats.jsonl", 16, seed=2), **changes)
    capture(wanted, start_ranks(1, None, 1))
    return wanted


def _changed(given: Config, folder: Path, **changes: Any) -> Config:
    values = given.model_dump(exclude_unset=True)
    values["exp_manager"]["explicit_log_dir"] = str(folder)
    for name, value in changes.items():
        section, field = name.split("__")
        values[section][field] = value
    return Config.model_validate(values)


def _train(wanted: Config) -> bool:
    return train(wanted, start_ranks(1, None, 1))


def test_early_stopping_is_the_same_over_a_resume(tmp_path: Path, given: Config, caplog: pytest.LogCaptureFixture) -> None:
    """No later loss is better than the first by 10, so the second validation without a better one ends the run."""
    given = _changed(given, tmp_path / "run")
    values = given.model_dump(exclude_unset=True)
    values["exp_manager"] |= {
        "early_stopping": {"monitor": "val_loss", "mode": "min", "patience": 2, "min_delta": 10.0},
        "checkpoint_callback_params": {"save_top_k": 9},
    }
    wanted = Config.model_validate(values)
    with caplog.at_level(logging.INFO):
        assert _train(wanted)
    assert "stopped early: val_loss was not better than" in caplog.text
    assert "in the last 2 validation(s), so training ended at step 6 of 12" in caplog.text
    assert repeatable(tmp_path / "run")[-1]["step"] == 6
    newest = checkpoints(tmp_path / "run/checkpoints")[-1]
    assert (newest.name, read_state(newest)["final"], read_state(newest)["stale"]) == ("step_0000006", True, 2)
    shutil.copytree(tmp_path / "run", tmp_path / "again")
    for path in checkpoints(tmp_path / "again/checkpoints")[1:]:
        shutil.rmtree(path)
    (tmp_path / "run" / "training.png").unlink()
    assert _train(wanted)  # over already: exported again, and nothing trained
    assert (tmp_path / "run" / "training.png").exists()
    assert _train(_changed(wanted, tmp_path / "again"))
    assert repeatable(tmp_path / "again") == repeatable(tmp_path / "run")
    assert (tmp_path / "again/export/model.safetensors").read_bytes() == (tmp_path / "run/export/model.safetensors").read_bytes()
    assert len(checkpoints(tmp_path / "again/checkpoints")) == 3


def test_early_stopping_by_what_is_not_measured_is_an_error(tmp_path: Path, given: Config) -> None:
    early = {"patience": 1, "monitor": "val/other/loss", "mode": "min"}
    with pytest.raises(TrainingError, match=r"early_stopping\.monitor is val/other/loss, .* gives val/heldout/accept_len, "):
        _train(_changed(given, tmp_path / "run", exp_manager__early_stopping=early))


def test_starting_weights_are_told_and_taken_once(tmp_path: Path, given: Config, caplog: pytest.LogCaptureFixture) -> None:
    assert _train(_changed(given, tmp_path / "first"))
    weights = load_file(tmp_path / "first/export/model.safetensors")
    source = str(tmp_path / "first/export")
    wanted = _changed(given, tmp_path / "second", trainer__max_steps=1, model__init_from_checkpoint=source, model__freeze_params=["."])
    wanted = wanted.model_copy(update={"model": wanted.model.model_copy(update={"prevent_freeze_params": ("^norm",)})})
    with caplog.at_level(logging.INFO):
        assert _train(wanted)
    assert "frozen: fc.weight, hidden_norm.weight, layers.0." in caplog.text
    trained = load_file(checkpoints(tmp_path / "second/checkpoints")[-1] / "draft.safetensors")
    assert [name for name in trained if not trained[name].equal(weights[name])] == ["norm.weight"]
    told = json.loads((tmp_path / "second/provenance.json").read_text())["init_from_checkpoint"]
    assert (told["path"], told["kind"], told["tensors"]) == (source, "Hugging Face folder", len(weights))
    shutil.rmtree(tmp_path / "first/export")  # not needed any more
    assert _train(wanted)
    assert json.loads((tmp_path / "second/provenance.json").read_text())["init_from_checkpoint"] is None


def test_the_run_keeps_the_configuration_as_it_was_said(tmp_path: Path, given: Config) -> None:
    """A default is the cache's own affair until it is written down, so the kept file must not write it down."""
    values = given.model_dump(exclude_unset=True)
    del values["model"]["target"]["dtype"], values["data"]["max_tokens"]
    silent = _changed(Config.model_validate(values), tmp_path / "run", trainer__max_steps=1)
    assert _train(silent)
    kept = load_config("train", str(tmp_path / "run/config.yaml"), [])
    assert kept == silent
    assert kept.model.target.model_fields_set == {"path"}
    assert _train(kept)
    told = json.loads((tmp_path / "run/provenance.json").read_text())
    assert yaml.safe_load(told["config"])["model"]["target"]["dtype"] == "bfloat16"
    assert set(told) >= {"argv", "git", "versions", "fingerprint", "host", "time"}
    assert told["fingerprint"]["data"]["cache"]
    (tmp_path / "full.yaml").write_text(to_yaml(silent))
    with pytest.raises(CacheMismatchError, match="dtype"):
        _train(load_config("train", str(tmp_path / "full.yaml"), [f"exp_manager.explicit_log_dir={tmp_path / 'other'}"]))


def test_decoding_without_a_target_or_a_prompt_is_an_error(tmp_path: Path, given: Config) -> None:
    divided = {**given.model.target.model_dump(exclude_unset=True), "tp_size": 2}
    with pytest.raises(ConfigError, match=r"model\.target\.tp_size is 2"):
        _train(_changed(given, tmp_path / "run", trainer__val_decode_prompts=1, model__target=divided))
