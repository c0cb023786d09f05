"""What training and evaluation refuse, field by field, before they start."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.cache.reader import Cache
from pipeline.capture.remask import remask
from pipeline.config.load import load_config, to_yaml
from pipeline.config.schema import Config
from pipeline.errors import CacheMismatchError, DraftError
from pipeline.train.identity import TRAINED_ON, check_cache, check_target
from tests.support.tiny import QWEN3_LIKE, build_tokenizer, write_target
from tests.unit.capture.conftest import capture_config, captured, copied  # noqa: F401 - fixtures


def _config(target: Path, folder: Path, **changes: Any) -> Config:
    return capture_config(target, folder, **changes)


def test_what_agrees_is_accepted_wherever_it_lies(copied: Path, tiny_target: Path, tmp_path: Path) -> None:  # noqa: F811
    moved = Path(shutil.move(copied / "cache", tmp_path / "elsewhere"))
    cache = Cache.open(moved)
    target = shutil.copytree(tiny_target, tmp_path / "copy of the target")
    check_cache(_config(target, copied), cache)
    check_cache(_config(target, copied, data__max_tokens=50, trainer__seed=7, capture__shard_tokens=9, capture__codec="raw"), cache)
    absent: dict[str, Any] = {"data__train_ds": {"input_cfg": [{"path": str(tmp_path / "no.jsonl")}]}}
    check_cache(_config(tmp_path / "no target", copied, **absent), cache)
    shutil.rmtree(copied / "prepared")  # then it is tokenised anew, for the comparison
    check_cache(_config(target, copied), cache)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model__target__dtype": "bfloat16"}, r"states_identity\.target\.dtype: cache \"float32\", run \"bfloat16\""),
        ({"model__target__attn_implementation": "eager"}, r"states_identity\.target\.attn_implementation"),
        ({"model__target__chat_template_kwargs": {"enable_thinking": False}}, r"states_identity\.chat_template_kwargs\.enable_thinking"),
        ({"data__max_tokens": 5000}, r"states_identity\.max_tokens: cache 4096, run 5000"),
        ({"data__validation_ds": {"fraction": 0.1}}, r"samples_identity\.heldout_fraction"),
        ({"data__min_supervised_tokens": 3}, r"samples_identity\.min_supervised_tokens"),
        ({"data__loss_on": "last_turn"}, r"samples_identity\.loss_on: cache \(absent\), run \"last_turn\""),
    ],
)
def test_a_setting_that_the_cache_was_not_made_with(captured: Path, tiny_target: Path, changes: dict[str, Any], field: str) -> None:  # noqa: F811
    with pytest.raises(CacheMismatchError, match=rf"differ in 1 field\(s\):\n  {field}"):
        check_cache(_config(tiny_target, captured, **changes), Cache.open(captured / "cache"))


def test_rules_that_came_later_are_compared_where_either_side_has_them(copied: Path, tiny_target: Path) -> None:  # noqa: F811
    check_cache(_config(tiny_target, copied, data__loss_on="all_turns", data__drop_duplicates=False), Cache.open(copied / "cache"))
    remask(_config(tiny_target, copied, data__loss_on="last_turn"))
    cache = Cache.open(copied / "cache")
    assert cache.manifest.samples_identity["loss_on"] == "last_turn"
    assert cache.manifest.corpus is not None
    assert cache.manifest.corpus["rows"] == cache.manifest.corpus["kept"]
    check_cache(_config(tiny_target, copied), cache)
    check_cache(_config(tiny_target, copied, data__loss_on="last_turn"), cache)
    with pytest.raises(CacheMismatchError, match=r'1 field\(s\):\n  samples_identity\.loss_on: cache "last_turn", run "all_turns"'):
        check_cache(_config(tiny_target, copied, data__loss_on="all_turns"), cache)


def test_other_weights_tokenizer_template_or_rows(copied: Path, tiny_target: Path, tmp_path: Path) -> None:  # noqa: F811
    cache = Cache.open(copied / "cache")
    with pytest.raises(CacheMismatchError, match=r"\n  states_identity\.target\.weights_digest"):
        check_cache(_config(write_target(tmp_path / "tuned", seed=1), copied), cache)
    other = shutil.copytree(tiny_target, tmp_path / "other")
    (other / "chat_template.jinja").write_text(QWEN3_LIKE)
    with pytest.raises(CacheMismatchError, match=r"\n  states_identity\.chat_template:"):
        check_cache(_config(other, copied), cache)
    tokenizer = build_tokenizer()
    tokenizer.add_tokens(["sunrise"])
    tokenizer.save_pretrained(other)
    with pytest.raises(CacheMismatchError, match=r"\n  states_identity\.tokenizer:"):
        check_cache(_config(other, copied), cache)
    rows = (copied / "chats.jsonl").read_text().splitlines(keepends=True)
    (copied / "chats.jsonl").write_text("".join([rows[1], rows[0], *rows[2:]]))
    with pytest.raises(CacheMismatchError, match=r"\n  states_identity\.token_ids:"):
        check_cache(_config(tiny_target, copied), cache)


def test_a_file_s_defaults_are_not_taken_for_settings(captured: Path, tiny_target: Path, tmp_path: Path) -> None:  # noqa: F811
    path = tmp_path / "train.yaml"
    path.write_text(
        f"data: {{cache: {captured / 'cache'}}}\nmodel: {{draft: {{mask_token_id: 500}}, target: }}\ntrainer: {{max_steps: 1}}\n"
    )
    silent = load_config("train", str(path), [])
    assert silent.model.target.model_fields_set == set()
    check_cache(silent, Cache.open(captured / "cache"))
    with pytest.raises(CacheMismatchError, match="dtype"):
        check_cache(load_config("train", str(path), ["model.target.dtype=bfloat16"]), Cache.open(captured / "cache"))
    (tmp_path / "resolved.yaml").write_text(to_yaml(silent))
    assert load_config("train", str(tmp_path / "resolved.yaml"), []) == silent


def test_a_draft_is_not_evaluated_with_another_target(
    captured: Path,  # noqa: F811
    tiny_target: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / TRAINED_ON).write_text(json.dumps(Cache.open(captured / "cache").manifest.states_identity))
    section = _config(tiny_target, captured).model.target
    check_target(section, tmp_path)
    assert not caplog.messages
    check_target(section.model_copy(update={"dtype": "bfloat16"}), tmp_path)
    assert 'target.dtype: the draft was trained with "float32", this run has "bfloat16"' in caplog.text
    tuned = write_target(tmp_path / "tuned", seed=1)
    with pytest.raises(DraftError, match=r"1 field\(s\) differ:\n  target\.weights_digest: draft "):
        check_target(section.model_copy(update={"path": str(tuned)}), tmp_path)
    check_target(section, captured)  # says nothing of a target
    (tmp_path / TRAINED_ON).write_text("[]")
    with pytest.raises(DraftError, match="expected an object, found a list"):
        check_target(section, tmp_path)
