"""What one row, one reply, one key or one folder can do to a whole run of answers: nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.errors import RegenerateError
from pipeline.regenerate.journal import Ended, Journal
from tests.support.faults import Behaviour, FaultServer, Reply, completion, echo
from tests.unit.regenerate.conftest import chat, read_jsonl, regenerate_config
from tests.unit.regenerate.test_server import _first, _run


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def calling(*calls: Any) -> dict[str, Any]:
    found = completion("", "tool_calls")
    found["choices"][0]["message"]["tool_calls"] = list(calls)
    return found


def failed(folder: Path) -> list[tuple[int, str]]:
    return [(row["row"], row["reason"]) for row in read_jsonl(folder / "answers" / "failed.jsonl")]


@pytest.mark.parametrize("levels", [250, 600, 900])
def test_a_row_that_is_nested_too_deeply_costs_itself(tmp_path: Path, levels: int) -> None:
    question = chat("three")
    question["messages"][0]["meta"] = nested(levels)
    with FaultServer(echo).running() as server:
        report = _run(tmp_path, [{**chat("one"), "tools": [nested(levels)]}, chat("two"), question, chat("four")], server)
    assert (report["done"], report["failed"]) == (2, 2)
    assert failed(tmp_path) == [(0, "nested too deeply"), (2, "nested too deeply")]


@pytest.mark.parametrize("usage", [{"completion_tokens": -5}, {"completion_tokens": "many"}, {"completion_tokens": 1.5}, [1], None])
def test_a_count_of_tokens_that_is_none_costs_no_answer(tmp_path: Path, usage: Any) -> None:
    with FaultServer(lambda body, before: Reply(200, {**completion("so"), "usage": usage})).running() as server:
        report = _run(tmp_path, [chat("one"), chat("two")], server)
    assert (report["done"], report["tokens"]) == (2, 0)


@pytest.mark.parametrize(
    "body",
    [b"[" * 100_000, calling("x"), calling({"function": {"name": "f", "arguments": nested(250)}})],
    ids=["nested", "a call that is a string", "nested arguments"],
)
def test_replies_that_no_row_can_hold_are_asked_for_again(tmp_path: Path, body: Any) -> None:
    with FaultServer(_first(1, Reply(200, body))).running() as server:
        assert _run(tmp_path, [chat("one"), chat("two")], server)["done"] == 2


def test_an_answer_that_is_withheld_is_not_asked_for_again(tmp_path: Path) -> None:
    def behaviour(body: dict[str, Any], before: int) -> Reply:
        return Reply(200, completion("", "content_filter")) if body["messages"][-1]["content"] == "one" else echo(body, before)

    with FaultServer(behaviour).running() as server:
        report = _run(tmp_path, [chat("one"), chat("two")], server)
    assert (report["done"], failed(tmp_path), len(server.requests)) == (1, [(0, "refused by the server")], 2)


def test_a_redirection_ends_the_run_and_says_where_to(tmp_path: Path) -> None:
    elsewhere: Behaviour = lambda body, before: Reply(307, b"", {"Location": "https://other/v1/chat/completions"})  # noqa: E731
    with FaultServer(elsewhere).running() as server, pytest.raises(RegenerateError, match=r"redirects to https://other/v1"):
        _run(tmp_path, [chat("one")], server)


def test_a_key_is_never_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "sk-q7q7\n")
    with FaultServer(echo).running() as server:
        assert _run(tmp_path, [chat("one")], server, api_key_env="KEY")["done"] == 1
        for key in ("sk-q7q7\nX: y", "sk-q7q7é"):
            monkeypatch.setenv("KEY", key)
            with pytest.raises(RegenerateError, match="in KEY") as caught:
                _run(tmp_path, [chat("one")], server, api_key_env="KEY")
            assert "q7q7" not in str(caught.value)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and b"q7q7" in path.read_bytes()]
    with pytest.raises(ValidationError, match="user name or password"):
        regenerate_config(None, tmp_path, servers=["https://me:q7q7@host/v1"])


def test_a_folder_of_something_else_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "answers").mkdir()
    (tmp_path / "answers" / "answers.jsonl").write_text("mine")
    with FaultServer(echo).running() as server:
        with pytest.raises(RegenerateError, match=r"has answers\.jsonl and no settings\.json"):
            _run(tmp_path, [chat("one")], server)
        assert (tmp_path / "answers" / "answers.jsonl").read_text() == "mine"
        with pytest.raises(RegenerateError, match="expected a folder"):
            _run(tmp_path, [chat("one")], server, output=str(tmp_path / "answers" / "answers.jsonl"))


def test_a_full_disk_is_an_error_that_can_be_mended(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    (tmp_path / "journal" / "00001-0.jsonl").symlink_to("/dev/full")
    with pytest.raises(RegenerateError, match=r"00001-0\.jsonl cannot be written: .*No space left"), Journal(tmp_path, 1, 0) as journal:
        journal.append([Ended(0, "done", {"messages": []})])


def test_when_nothing_is_answered_an_example_says_why(tmp_path: Path) -> None:
    login: Behaviour = lambda body, before: Reply(200, b"<html>log in</html>")  # noqa: E731
    with FaultServer(login).running() as server, pytest.raises(RegenerateError, match=r"such as chats\.jsonl row 0: .*<html>log in"):
        _run(tmp_path, [chat("one")], server, max_retries=0)


def test_no_row_at_all_is_said_plainly(tmp_path: Path) -> None:
    with FaultServer(echo).running() as server, pytest.raises(RegenerateError, match="holds no row"):
        _run(tmp_path, [], server)
    assert json.loads((tmp_path / "answers" / "report.json").read_text())["rows"] == 0
