"""A space is checked with everything else, before anything runs."""

from pathlib import Path

import pytest

from pipeline.config.load import load_config
from pipeline.errors import ConfigError

BASE = """
model: {draft: {mask_token_id: 3}, optim: {lr: 1.0e-3, sched: {min_lr: "${model.optim.lr}"}}}
data: {cache: caches/one}
trainer: {max_steps: 8}
"""


def _file(folder: Path, sweep: str, more: str = "") -> str:
    file = folder / "sweep.yaml"
    file.write_text(BASE + more + sweep)
    return str(file)


def test_all_faults_of_a_space_at_once(tmp_path: Path) -> None:
    sweep = """
sweep:
  space:
    model.optim.lrr: {choice: [1]}
    model.draft.num_hidden_layers: {choice: [1, 0]}
    model.draft.target_layer_ids: {choice: [[1], 7]}
    trainer.seed: {choice: [1]}
    exp_manager.explicit_log_dir: {choice: [here]}
    model.optim.lr: {uniform: [2, 1]}
"""
    with pytest.raises(ConfigError) as caught:
        load_config("sweep", _file(tmp_path, sweep, "name: one\nevaluate: {max_new_token: 3}\n"), [])
    for fault in (
        "sweep.space: model.optim.lrr: unknown field; did you mean model.optim.lr?",
        "sweep.space: model.draft.num_hidden_layers: should be greater than or equal to 1; found 0",
        "sweep.space: model.draft.target_layer_ids: should be a valid tuple; found 7",
        "sweep.space: trainer.seed cannot be swept: name the seeds in sweep.seeds",
        "sweep.space: exp_manager.explicit_log_dir cannot be swept",
        "sweep.space.model.optim.lr: the low end 2.0 is not below the high end 1.0",
        "evaluate.max_new_token: unknown field; did you mean evaluate.max_new_tokens?",
    ):
        assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("sweep", "fault"),
    [
        ("sweep: {seeds: [1]}", "sweep.space: not set, and a sweep needs it"),
        (
            "sweep: {space: {model.optim.lr: {uniform: [0.1, 0.2]}}}",
            "grid needs a choice for every field; model.optim.lr is a range",
        ),
        ("sweep: {sampler: tpe, space: {model.optim.lr: {choice: [0.1]}}}", "sampler tpe never ends by itself; set trials, steps or hours"),
        (
            "sweep: {space: {model.optim.lr: {choice: [0.1], uniform: [0.1, 1]}}}",
            "exactly one of choice, uniform, log_uniform, integers",
        ),
        ("sweep: {seeds: [1, 1], space: {model.optim.lr: {choice: [0.1]}}}", "seeds holds a seed twice"),
        ("sweep: {monitor: val_loss, mode: max, space: {model.optim.lr: {choice: [0.1]}}}", "would take the worst val_loss for the best"),
    ],
)
def test_what_a_sweep_cannot_do(tmp_path: Path, sweep: str, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config("sweep", _file(tmp_path, sweep), [])
    assert fault in str(caught.value)


def test_a_field_of_the_space_need_not_be_in_the_file(tmp_path: Path) -> None:
    file = _file(tmp_path, "sweep: {space: {data.cache: {choice: [a, b]}, model.optim.lr: {choice: [0.1]}}}")
    assert load_config("sweep", file, ["data.cache=null"]).cache_path is None


def test_interpolations_follow_the_fields_of_a_trial(tmp_path: Path) -> None:
    """A trial's words are overrides, laid over the file before `${a.b}` is resolved."""
    file = _file(tmp_path, "sweep: {space: {model.optim.lr: {choice: [0.1]}}}")
    assert load_config("train", file, ["model.optim.lr=0.1"]).model.optim.sched.min_lr == 0.1


def test_the_values_of_a_field_as_an_override(tmp_path: Path) -> None:
    file = _file(tmp_path, "sweep: {space: {data.cache: {choice: [a, b]}}}")
    words = ["sweep.space.model.optim.lr.log_uniform=[0.1,1]", "sweep.sampler=random", "sweep.trials=2", "data.cache=null"]
    space = load_config("sweep", file, words).sweep.space
    assert (space["model.optim.lr"].log_uniform, space["data.cache"].choice) == ((0.1, 1.0), ("a", "b"))
    with pytest.raises(ConfigError, match=r"sweep\.space: model\.optim\.lrr: unknown field"):
        load_config("sweep", file, ["sweep.space.model.optim.lrr.choice=[0.1]"])
    space = load_config("sweep", file, ["sweep.space.model.optim.lr={choice: [0.1]}", "data.cache=null"]).sweep.space
    assert space["model.optim.lr"].choice == (0.1,)
