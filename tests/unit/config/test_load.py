import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from pipeline.config.load import Stage, load_config, to_yaml
from pipeline.config.schema import Config
from pipeline.errors import ConfigError

CAPTURE = {
    "name": "tiny",
    "model": {"target": {"path": "some/target", "dtype": "float32"}},
    "data": {"train_ds": {"input_cfg": [{"path": "a.jsonl"}, {"path": "b.jsonl"}]}},
    "capture": {"path": "cache"},
}


def write(folder: Path, content: object) -> str:
    path = folder / "config.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return str(path)


def faults(path: str, overrides: Sequence[str] = (), stage: Stage = "capture") -> list[str]:
    """Every listed fault, after checking that the count in the first line is right."""
    with pytest.raises(ConfigError) as caught:
        load_config(stage, path, overrides)
    first, *lines = str(caught.value).splitlines()
    assert first.startswith(f"{path}: {len(lines)} fault")
    return [line.strip() for line in lines]


def test_file_overrides_and_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, CAPTURE)
    config = load_config(
        "capture", path, ["model.target.tp_size=2", "data.max_tokens=99", "model.optim.lr=1e-3", "model.draft.block_size=8"]
    )
    assert config.name == "tiny"
    assert config.model.target.dtype == "float32"
    assert config.model.target.tp_size == 2
    assert config.data.max_tokens == 99
    assert config.model.optim.lr == 1e-3
    assert config.model.optim.betas == (0.9, 0.95)
    assert [source.path for source in config.data.train_ds.input_cfg] == ["a.jsonl", "b.jsonl"]


def test_overrides_of_lists_mappings_null_and_whole_sections(tmp_path: Path) -> None:
    path = write(tmp_path, CAPTURE)
    config = load_config(
        "capture",
        path,
        [
            "model.target.layer_ids=[1,3]",
            "model.target.chat_template_kwargs.enable_thinking=false",
            "model.target.chat_template_kwargs.note=a=b",
            "data.train_ds.input_cfg.1.path=c.jsonl",
            "trainer.gradient_clip_val=null",
            "trainer={seed: 5}",
            "trainer.log_every_n_steps=3",
            "data.validation_ds.datasets.easy.input_cfg=[{path: v.jsonl}]",
        ],
    )
    assert config.model.target.layer_ids == (1, 3)
    assert config.model.target.chat_template_kwargs == {"enable_thinking": False, "note": "a=b"}
    assert [source.path for source in config.data.train_ds.input_cfg] == ["a.jsonl", "c.jsonl"]
    assert config.trainer.gradient_clip_val is None
    assert (config.trainer.seed, config.trainer.log_every_n_steps) == (5, 3)
    assert config.data.validation_ds.datasets["easy"].input_cfg[0].path == "v.jsonl"


def test_interpolation_reaches_defaults_other_fields_and_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLACE", "elsewhere")
    content = CAPTURE | {
        "capture": {"path": "${oc.env:PLACE}/${name}-${data.max_tokens}"},
        "evaluate": {"input_cfg": "${data.train_ds.input_cfg}"},
    }
    path = write(tmp_path, content)
    config = load_config("capture", path, ["name=other"])
    assert config.capture.path == "elsewhere/other-4096"
    assert config.evaluate.input_cfg == config.data.train_ds.input_cfg
    assert load_config("capture", path, ["data.cache=${name}-cache"]).data.cache == "tiny-cache"


def test_an_empty_section_means_its_defaults(tmp_path: Path) -> None:
    config = load_config("capture", write(tmp_path, yaml.safe_dump(CAPTURE) + "trainer:\n"), [])
    assert config.trainer == Config().trainer


def test_every_fault_at_once_with_paths_and_suggestions(tmp_path: Path) -> None:
    content = {
        "model": {
            "target": {"dtyp": "bfloat16", "tp_size": 0},
            "draft": {"block_size": "many", "sliding_window": "${nowhere.x}"},
            "optim": {"lr": -1},
        },
        "max_stepz": 3,
        "lr": 0.1,
        "data": {"train_ds": {"input_cfg": [{"pth": "a"}, 3]}},
        "trainer": {"max_steps": 3, "max_epochs": 3, "devices": None},
        "zzz": {},
    }
    found = faults(write(tmp_path, content), ["trainer.log_every=3", "capture.codec=zip", "nonsense", "name.x=1", "trainer.seed=["])
    expected = [
        ("trainer.log_every: unknown field", "did you mean trainer.log_every_n_steps?"),
        ("nonsense:", "a.b=value"),
        ("name.x: unknown field", "name is a value"),
        ("trainer.seed:", "not a YAML value"),
        ("model.draft.sliding_window:", "nowhere.x"),
        ("model.target.dtyp: unknown field", "did you mean model.target.dtype?"),
        ("model.target.tp_size:", "greater than or equal to 1; found 0"),
        ("model.draft.block_size:", "found 'many'"),
        ("model.optim.lr:", "greater than 0; found -1"),
        ("max_stepz: unknown field", "did you mean trainer.max_steps?"),
        ("lr: unknown field", "did you mean model.optim.lr?"),
        ("data.train_ds.input_cfg.0.path:", "not set"),
        ("data.train_ds.input_cfg.0.pth: unknown field", "did you mean data.train_ds.input_cfg.0.path?"),
        ("data.train_ds.input_cfg.1:", "expected a section"),
        ("trainer:", "max_steps and max_epochs are both set"),
        ("capture.codec:", "'lossless', 'raw', 'int8' or 'int4'; found 'zip'"),
        ("zzz: unknown field", "the configuration has name, model, data"),
    ]
    for start, rest in expected:
        assert any(fault.startswith(start) and rest in fault for fault in found), (start, rest, found)
    assert len(found) == len(expected)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.train_ds.input_cfg.2.path=x", "the list has 2 entries"),
        ("data.train_ds.input_cfg.first.path=x", "indexed by a number"),
        ("model.target.paths=x", "did you mean model.target.path?"),
        ("modle.target.path=x", "did you mean model?"),
        ("=x", "unknown field"),
        ("model.target.chat_template_kwargs.a=[1]", "found [1]"),
        ("evaluate.input_cfg.0.path=x", "override it as a whole"),
    ],
)
def test_overrides_must_name_existing_fields(tmp_path: Path, override: str, message: str) -> None:
    path = write(tmp_path, CAPTURE | {"evaluate": {"input_cfg": "${data.train_ds.input_cfg}"}})
    (fault,) = faults(path, [override])
    assert message in fault


@pytest.mark.parametrize(
    ("stage", "overrides", "missing"),
    [
        ("corpus", [], ["model.target.path", "data.train_ds.input_cfg"]),
        ("capture", [], ["model.target.path", "data.train_ds.input_cfg", "capture.path"]),
        ("train", [], ["data.cache", "model.draft.mask_token_id", "trainer.max_steps"]),
        ("train", ["capture.path=c", "trainer.max_epochs=1"], ["model.draft.mask_token_id"]),
        (
            "train",
            ["data.mode=online", "trainer.max_steps=1"],
            ["model.target.path", "data.train_ds.input_cfg", "model.draft.mask_token_id"],
        ),
        ("evaluate", ["model.target.path=t"], ["evaluate.input_cfg"]),
    ],
)
def test_what_a_stage_cannot_do_without(tmp_path: Path, stage: Stage, overrides: list[str], missing: list[str]) -> None:
    found = faults(write(tmp_path, "{}"), overrides, stage)
    assert [fault.partition(":")[0] for fault in found] == missing
    assert all("not set, and" in fault for fault in found)


@pytest.mark.parametrize(
    ("content", "message"),
    [("a: [", "cannot be read as YAML"), ("- 1", "holds a list"), ("name: a\nname: b", "duplicate key"), (None, "no such")],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: str | None, message: str) -> None:
    path = write(tmp_path, content) if content is not None else str(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=message):
        load_config("capture", path, [])


def test_the_resolved_yaml_reads_back_to_the_same_configuration(tmp_path: Path) -> None:
    config = load_config("capture", write(tmp_path, CAPTURE), ["model.optim.eps=1e-12", "exp_manager.explicit_log_dir=runs/${name}"])
    again = load_config("capture", write(tmp_path, to_yaml(config)), [])
    assert again == config
    assert "runs/tiny" in to_yaml(config)


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().trainer.max_steps = 3  # type: ignore[misc]


def test_loading_and_help_import_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from pipeline.config.load import load_config, describe_fields\n"
        "from pipeline.runtime.stage import run_stage\n"
        f"load_config('capture', {write(tmp_path, CAPTURE)!r}, []); describe_fields()\n"
        "assert run_stage('capture', print, ['--help']) == 0\n"
        "print(sorted({'torch', 'numpy', 'transformers', 'accelerate'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_parts_of_a_capture(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("capture: {path: cache}\nmodel: {target: {path: t}}\ndata: {train_ds: {input_cfg: [{path: x}]}}\n")
    assert load_config("capture", str(path), []).capture.part == (1, 1)
    assert load_config("capture", str(path), ["capture.parts=3/16"]).capture.part == (3, 16)
    for text, words in (("17/16", "give one of 1/16 to 16/16"), ("0/4", "pattern"), ("3", "valid string"), ("1/0", "pattern")):
        with pytest.raises(ConfigError, match=rf"capture[.\w]*: .*{words}"):
            load_config("capture", str(path), [f"capture.parts={text}"])


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        ("model.target.layer_ids=[]", "at least 1 item"),
        ("model.draft.target_layer_ids=[]", "at least 1 item"),
        ("model.optim.betas=[0.9,1.5]", "less than 1; found 1.5"),
        ("trainer.seed=99999999999999999999", "less than 9223372036854775808"),
        ("exp_manager.checkpoint_callback_params.monitor=val_acceptlen", "accept_len.*found 'val_acceptlen'"),
        ("data.train_ds={global_batch_size: 4, global_batch_tokens: 9}", "data.train_ds: .* are both set"),
        ("data.train_ds={pack_tokens: 9}", "data.train_ds: pack_tokens is set, and packing is false"),
        ("data.train_ds={packing: true, pack_tokens: 9, micro_batch_tokens: 8}", "data.train_ds: a row of pack_tokens"),
        ("data.train_ds.input_cfg.1.weight=0.5", r"data.train_ds: input_cfg\.0 has no weight, and others have"),
        (
            "data.validation_ds.datasets={code: {input_cfg: [{path: c.jsonl, weight: 1}]}}",
            "code.input_cfg: weight is for entries of train_ds",
        ),
        ("evaluate.input_cfg=[{path: c.jsonl, weight: 1}]", "evaluate.input_cfg: weight is for entries of train_ds"),
    ],
)
def test_values_that_would_fail_later_or_be_ignored(tmp_path: Path, override: str, fault: str) -> None:
    (line,) = faults(write(tmp_path, CAPTURE), [override])
    assert re.search(fault, line)


@pytest.mark.parametrize(
    ("overrides", "fault"),
    [
        (["data.train_ds.micro_batch_tokens=9", "trainer.accumulate_grad_batches=2"], "micro_batch_tokens and trainer.accumulate"),
        (["data.mode=hybrid", "data.cache=other"], "data.cache is not capture.path"),
        (["data.mode=hybrid", "capture.parts=1/2"], "capture.parts is set"),
    ],
)
def test_fields_of_two_sections_that_exclude_each_other(tmp_path: Path, overrides: list[str], fault: str) -> None:
    (line,) = faults(write(tmp_path, CAPTURE), overrides)
    assert fault in line
    assert not line.strip().startswith(":")


def test_monitored_metrics_and_folders_in_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    path = write(tmp_path, CAPTURE)
    monitor = "exp_manager.checkpoint_callback_params.monitor"
    for metric in ("val_loss", "val_walk_accept_len", "val/held-out_2/accuracy"):
        config = load_config("capture", path, [f"{monitor}={metric}", "data.cache=~/cache", "exp_manager.explicit_log_dir=~/run"])
        assert config.exp_manager.checkpoint_callback_params.monitor == metric
    assert config.log_dir == f"{tmp_path}/run"
    assert config.cache_path == f"{tmp_path}/cache"


def test_settings_of_training_that_cannot_be_meant(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("{model: {optim: {lr: 1e-4, sched: {min_lr: 1e-3}}}, exp_manager: {early_stopping: {patience: 2}}}")
    with pytest.raises(ConfigError, match=r"sched\.min_lr 0\.001 is above lr 0\.0001"):
        load_config("corpus", str(tmp_path / "c.yaml"), [])
    with pytest.raises(ConfigError, match=r"early_stopping\.patience is set, and trainer\.val_check_interval is not"):
        load_config("corpus", str(tmp_path / "c.yaml"), ["model.optim.lr=0.01"])


def test_the_worst_is_not_taken_for_the_best(tmp_path: Path) -> None:
    text = "exp_manager: {early_stopping: {monitor: val_loss, mode: max}, checkpoint_callback_params: {mode: min}}"
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError) as error:
        load_config("corpus", str(tmp_path / "c.yaml"), [])
    assert "early_stopping: mode max would take the worst val_loss for the best; set mode to min" in str(error.value)
    assert "checkpoint_callback_params: mode min would take the worst val_accept_len for the best" in str(error.value)
