"""What a training can be asked for besides: to end early, to start from weights, to say what it was told."""

import json
import logging
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file

from pipeline.capture.run import capture
from pipeline.config.load import load_config, to_yaml
from pipeline.config.schema import Config
from pipeline.errors import CacheMismatchError, ConfigError, TrainingError
from pipeline.records import CapturedSample
from pipeline.runtime.ranks import start_ranks
from pipeline.train.checkpoint import checkpoints, read_state
from pipeline.train.data import training_order
from pipeline.train.loop import steps_to_the_end, train
from pipeline.train.modes import open_data
from pipeline.train.run import start_training
from pipeline.train.served import evaluate
from pipeline.train.watch import check_monitors, settle_monitors
from tests.support.tiny import chats, write_chats, write_jsonl
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


@pytest.mark.parametrize(
    ("monitor", "sets", "words"),
    [
        ("val/other/loss", {"heldout": True}, r"monitor is val/other/loss: there is no such validation set, only heldout\."),
        ("val_served_accept_len", {"heldout": True}, r"trainer\.val_decode_prompts is 0"),
        ("val_loss", {}, "there is no validation set to judge by"),
        ("val/one/loss", {"heldout": True, "one": False}, "none of its samples has a usable anchor"),
        ("val_loss", {"one": False}, "none of its samples has a usable anchor"),
    ],
)
def test_early_stopping_by_what_is_not_measured_is_an_error_at_once(given: Config, monitor: str, sets: dict[str, bool], words: str) -> None:
    early = {"early_stopping": {"patience": 1, "monitor": monitor}}
    wanted = Config.model_validate({**given.model_dump(exclude_unset=True), "exp_manager": early})
    with pytest.raises(ConfigError, match=words):
        check_monitors(wanted, sets)


def test_a_monitor_that_no_validation_gives_ends_the_run_before_its_first_step(
    tmp_path: Path, given: Config, caplog: pytest.LogCaptureFixture
) -> None:
    early = {"patience": 1, "monitor": "val/other/loss"}
    with pytest.raises(ConfigError, match=r"early_stopping\.patience is set, and its monitor is val/other/loss"):
        _train(_changed(given, tmp_path / "run", exp_manager__early_stopping=early))
    assert not (tmp_path / "run/metrics.jsonl").exists()
    assert _train(
        _changed(given, tmp_path / "kept", trainer__max_steps=1, exp_manager__checkpoint_callback_params={"monitor": "val/other/loss"})
    )
    assert "no checkpoint is kept for being the best: its monitor is val/other/loss" in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("last_reason", "mode", "monitor"),
    [("stop", "offline", "val_walk_accept_len"), ("stop", "online", "val_walk_accept_len"), (None, "offline", "val_accept_len")],
)
def test_the_models_own_answers_are_judged_by_the_walk_through_them(
    tmp_path: Path, tiny_target: Path, last_reason: str | None, mode: str, monitor: str
) -> None:
    """One validation answer of unknown origin is enough for the other metric."""
    rows = [{**row, "finish_reason": "length"} for row in chats(16, seed=2)]
    rows[-1]["finish_reason"] = last_reason
    train_on, validate_on = write_jsonl(tmp_path / "train.jsonl", chats(12, seed=5)), write_jsonl(tmp_path / "val.jsonl", rows)
    sets = {"datasets": {"val": {"input_cfg": [{"path": str(validate_on)}]}}}
    steps = {"trainer__max_steps": 2, "trainer__val_check_interval": 1}
    wanted = config(tmp_path, tiny_target, train_on, data__validation_ds=sets, data__mode=mode, **steps)
    if mode == "offline":
        capture(wanted, start_ranks(1, None, 1))
    assert _train(wanted)
    written = yaml.safe_load((tmp_path / "run/config.yaml").read_text())["exp_manager"]
    assert {written[name]["monitor"] for name in ("checkpoint_callback_params", "early_stopping")} == {monitor}
    first, last = checkpoints(tmp_path / "run/checkpoints")[0], checkpoints(tmp_path / "run/checkpoints")[-1]
    assert read_state(first)["metrics"][monitor] >= read_state(last)["metrics"][monitor]


def test_the_best_checkpoint_is_exported_where_it_is_not_the_last(tmp_path: Path, given: Config) -> None:
    """At a rate at which it gets worse, the first validation is the best; with the running average, which is what was validated."""
    optim = {**given.model.optim.model_dump(exclude_unset=True), "lr": 0.5, "sched": {"name": "constant", "warmup_steps": 0}}
    wanted = _changed(given, tmp_path / "run", model__optim=optim, trainer__max_steps=8, trainer__ema_decay=0.1)
    keep = {"checkpoint_callback_params": {"monitor": "val_loss"}}
    wanted = Config.model_validate(
        {**wanted.model_dump(exclude_unset=True), "exp_manager": {"explicit_log_dir": str(tmp_path / "run"), **keep}}
    )
    assert _train(wanted)
    best, last = checkpoints(tmp_path / "run/checkpoints")
    assert read_state(best)["metrics"]["val_loss"] < read_state(last)["metrics"]["val_loss"]
    for folder, checkpoint in (("export_best", best), ("export", last)):
        exported, kept = load_file(tmp_path / "run" / folder / "model.safetensors"), load_file(checkpoint / "average.safetensors")
        assert all(torch.equal(exported[name], kept[name]) for name in kept)
    assert (tmp_path / "run/export_best/trained_on.json").read_bytes() == (tmp_path / "run/export/trained_on.json").read_bytes()


def test_a_validation_that_is_not_finite_names_its_samples(tmp_path: Path, given: Config) -> None:
    wanted = _changed(given, tmp_path / "run")
    (tmp_path / "run").mkdir()
    ranks = start_ranks(1, None, 1)
    with open_data(wanted, ranks) as data:
        bad = int(np.flatnonzero(data.split == "heldout")[0])

        def source(numbers: Sequence[int]) -> list[CapturedSample]:
            found = data.source(numbers)
            return [replace(s, hidden={n: h * (torch.nan if bad in numbers else 1.0) for n, h in s.hidden.items()}) for s in found]

        training = start_training(wanted, ranks, replace(data, source=source), training_order(data, wanted), tmp_path / "run")
        name = data.source([bad])[0].tokens.sample_id
        with training.saver, training.watch, pytest.raises(TrainingError, match=rf"not finite for 1 sample\(s\): {name}\. Check the cache"):
            steps_to_the_end(training)


@pytest.mark.parametrize(("name", "told"), [("cosine", True), ("constant", False)])
def test_a_longer_run_tells_that_its_rates_are_others(
    tmp_path: Path, given: Config, caplog: pytest.LogCaptureFixture, name: str, told: bool
) -> None:
    optim = {**given.model.optim.model_dump(exclude_unset=True), "sched": {"name": name, "warmup_steps": 0}}
    for steps in (2, 4):
        assert _train(_changed(given, tmp_path / "run", model__optim=optim, trainer__max_steps=steps, trainer__val_check_interval=9))
    assert ("step 2 was made at learning rate 1.000e-03, and would be at 1.707e-03 now" in caplog.text) is told
    assert ("was made at learning rate" in caplog.text) is told
    caplog.clear()
    assert _train(_changed(given, tmp_path / "run", model__optim=optim, trainer__max_steps=3, trainer__val_check_interval=9))
    assert "beyond the end asked for" in caplog.text
    assert "was made at learning rate" not in caplog.text  # no step is made at another one


def test_another_monitor_forgets_what_the_one_before_judged(tmp_path: Path, given: Config) -> None:
    """The best acceptance length is below every loss here, so as a loss it could not be improved on."""
    for steps, monitor in ((2, "val_accept_len"), (4, "val_loss")):
        early = {"patience": 9, "monitor": monitor}
        assert _train(_changed(given, tmp_path / "run", trainer__max_steps=steps, exp_manager__early_stopping=early))
    state = read_state(checkpoints(tmp_path / "run/checkpoints")[-1])
    assert (state["stale"], state["judged_by"]) == (0, "val_loss")
    assert state["best"] == pytest.approx(state["metrics"]["val_loss"])


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
    assert json.loads((tmp_path / "second/provenance.json").read_text())["init_from_checkpoint"] == told


def test_an_export_that_the_disk_does_not_take_is_one_error(tmp_path: Path, given: Config) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/export").write_text("in the way")
    wanted = _changed(given, tmp_path / "run", trainer__max_steps=1)
    with pytest.raises(TrainingError, match=r"export cannot be written: .* goes on from the newest checkpoint"):
        _train(wanted)
    (tmp_path / "run/export").unlink()
    assert _train(wanted)
    assert (tmp_path / "run/export/config.json").exists()


def test_the_run_keeps_the_configuration_as_it_was_said(tmp_path: Path, given: Config) -> None:
    """A default is the cache's own affair until it is written down, so the kept file must not; but what auto came to be, it does write."""
    values = given.model_dump(exclude_unset=True)
    del values["model"]["target"]["dtype"], values["data"]["max_tokens"]
    silent = _changed(Config.model_validate(values), tmp_path / "run", trainer__max_steps=1)
    assert _train(silent)
    kept = load_config("train", str(tmp_path / "run/config.yaml"), [])
    assert kept == settle_monitors(silent, own_answers=False)
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


@pytest.mark.slow
def test_answers_of_one_token_have_no_steps_to_measure(tmp_path: Path, given: Config) -> None:
    """The prefill gives an answer's first token, so nothing is left for the draft."""
    wanted = _changed(given, tmp_path / "run", trainer__max_steps=1)
    assert _train(wanted)
    section = {"input_cfg": given.data.train_ds.input_cfg, "max_new_tokens": 1, "max_prompts": 2}
    result = evaluate(Config.model_validate({**wanted.model_dump(exclude_unset=True), "evaluate": section}), start_ranks(1, None, 1))
    assert (result["new_tokens"], result["served_acceptance_length"], result["lossless"]) == (2, None, True)
    assert (tmp_path / "run/served.png").exists()
