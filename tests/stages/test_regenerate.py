"""The stage as it is typed: against a real server, by the launcher, and with settings that are wrong."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import load_config, to_yaml
from pipeline.regenerate.server import regenerate_by_servers
from tests.support.launch import REPOSITORY, accelerate_launch, run
from tests.support.serve import transformers_serve
from tests.support.tiny import QWEN3_LIKE, write_answering_target, write_chats
from tests.unit.regenerate.conftest import answers_of, greedy_answers, read_jsonl, read_report, regenerate_config


@pytest.mark.slow
def test_a_real_server_answers_turn_by_turn_with_thinking_on_and_off(tmp_path: Path) -> None:
    target = write_answering_target(tmp_path / "target", template=QWEN3_LIKE)
    write_chats(tmp_path / "chats.jsonl", 12, seed=3)
    assert '"system"' in (tmp_path / "chats.jsonl").read_text()
    found: dict[bool, list[dict[str, Any]]] = {}
    with transformers_serve(target, tmp_path / "serve.log") as address:
        for thinking in (True, False):
            arguments = {"enable_thinking": thinking}
            served = {"backend": "server", "servers": [address], "concurrency": 4, "chat_template_kwargs": arguments}
            regenerate_by_servers(regenerate_config(target, tmp_path, output=str(tmp_path / f"{thinking}"), **served))
            found[thinking] = read_jsonl(tmp_path / f"{thinking}" / "answers.jsonl")
            assert len(found[thinking]) == 12
            for row in found[thinking]:
                # The server strips what it calls the content; so it is stripped in what the next turn is asked, too.
                assert [text.strip() for text in answers_of(row)] == greedy_answers(target, row, **arguments)
    assert found[True] != found[False]
    assert {row["finish_reason"] for row in found[True] + found[False]} == {"stop", "length"}


@pytest.mark.slow
def test_two_ranks_under_accelerate_launch(answering_target: Path, tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", 30)
    (tmp_path / "config.yaml").write_text(to_yaml(regenerate_config(answering_target, tmp_path)))
    finished = accelerate_launch("stages/regenerate.py", str(tmp_path / "config.yaml"), timeout=240)
    assert "world size 2" in finished.text
    assert read_report(tmp_path)["rows"] == 30
    assert [row["row"] for row in read_jsonl(tmp_path / "answers" / "answers.jsonl")] == list(range(30))
    again = run("stages/regenerate.py", str(tmp_path / "config.yaml"), "regenerate.temperature=1.5", check=False)
    assert again.codes == (2,)
    assert "temperature: the folder has 0.0, this run 1.5" in again.text
    assert "Traceback" not in again.text


@pytest.mark.parametrize("path", sorted((REPOSITORY / "configs" / "regenerate").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_configurations_that_come_with_it_load(path: Path) -> None:
    assert load_config("regenerate", str(path), []).regenerate.output is not None


@pytest.mark.slow
def test_all_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(json.dumps({"regenerate": {"backend": "server", "max_new_token": 3}}))
    told = run("stages/regenerate.py", str(tmp_path / "config.yaml"), check=False)
    assert told.codes == (2,)
    assert "did you mean regenerate.max_new_tokens?" in told.text
    (tmp_path / "config.yaml").write_text(json.dumps({"regenerate": {"backend": "server"}}))
    told = run("stages/regenerate.py", str(tmp_path / "config.yaml"), check=False)
    for field in ("data.train_ds.input_cfg", "regenerate.output", "regenerate.servers", "regenerate.model"):
        assert f"{field}: not set" in told.text
