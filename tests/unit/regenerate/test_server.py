"""Servers that fail in every way that servers do: each row ends once, and what concerns all rows ends the run."""

import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import LaunchError, RegenerateError
from pipeline.regenerate.server import regenerate_by_servers
from tests.support.faults import Behaviour, FaultServer, Reply, completion, echo
from tests.support.launch import free_port
from tests.support.tiny import write_jsonl
from tests.unit.regenerate.conftest import answers_of, chat, read_jsonl, read_report, regenerate_config

FAST = {"backend": "server", "model": "target", "backoff_seconds": 0.01, "max_retries": 6}


def _run(folder: Path, rows: list[Any], *servers: FaultServer, **section: Any) -> dict[str, Any]:
    """The report of a run over `rows`."""
    write_jsonl(folder / "chats.jsonl", rows)
    addresses = [server.address for server in servers]
    regenerate_by_servers(regenerate_config(None, folder, **{**FAST, "servers": addresses, **section}))
    return read_report(folder)


def _first(times: int, reply: Reply) -> Behaviour:
    """`reply` to the first requests with the same messages, then an answer."""
    return lambda body, before: reply if before < times else echo(body, before)


def test_turn_by_turn_and_in_order(tmp_path: Path) -> None:
    rows = [chat(f"a{i}", f"b{i}", f"c{i}") for i in range(30)]
    with FaultServer(lambda body, before: Reply(**{**vars(echo(body, before)), "seconds": 0.01})).running() as server:
        report = _run(tmp_path, rows, server, concurrency=5)
    assert (report["rows"], report["done"], report["tokens"]) == (30, 30, 270)
    answers = read_jsonl(tmp_path / "answers" / "answers.jsonl")
    assert [row["row"] for row in answers] == list(range(30))
    assert answers_of(answers[7]) == ["you said: a7", "you said: b7", "you said: c7"]
    assert server.most_at_once == 5
    third = next(body for body in server.requests if body["messages"][-1]["content"] == "c7")
    assert third["messages"] == answers[7]["messages"][:5]
    assert third | {"messages": []} == {"model": "target", "max_tokens": 8, "temperature": 0.0, "messages": []}


@pytest.mark.parametrize(
    "reply",
    [
        Reply(429, {"error": "busy"}, {"Retry-After": "0"}),
        Reply(429, {"error": "busy"}, {"Retry-After": "Wed, 21 Oct 2015 07:28:00 GMT"}),
        Reply(503, {"error": "busy"}, {"Retry-After": "nonsense"}),
        Reply(500, b"<html>"),
        Reply(0),
        Reply(200, b"no JSON"),
        Reply(200, {"choices": []}),
        Reply(200, completion("half", "abort")),
        Reply(200, completion("\ud800")),
        pytest.param(Reply(200, completion("late"), seconds=3.0), marks=pytest.mark.slow),
    ],
    ids=lambda reply: f"{reply.status} {str(reply.body)[:20]} {reply.seconds}",
)
def test_asked_again_until_there_is_an_answer(tmp_path: Path, reply: Reply) -> None:
    with FaultServer(_first(2, reply)).running() as server:
        report = _run(tmp_path, [chat("one"), chat("two")], server, timeout_seconds=1.0)
    assert report["done"] == 2
    assert len(server.requests) == 6
    assert [answers_of(row) for row in read_jsonl(tmp_path / "answers" / "answers.jsonl")] == [["you said: one"], ["you said: two"]]


@pytest.mark.slow
def test_retry_after_is_waited_for(tmp_path: Path) -> None:
    with FaultServer(_first(1, Reply(429, {}, {"Retry-After": "1"}))).running() as server:
        began = time.monotonic()
        assert _run(tmp_path, [chat("one")], server)["done"] == 1
        assert time.monotonic() - began >= 1.0


def test_a_row_that_is_refused_is_listed_and_asked_once(tmp_path: Path) -> None:
    def behaviour(body: dict[str, Any], before: int) -> Reply:
        return Reply(400, {"error": "too long"}) if "bad" in body["messages"][-1]["content"] else echo(body, before)

    with FaultServer(behaviour).running() as server:
        report = _run(tmp_path, [chat("one"), chat("fine", "bad"), chat("two"), {"messages": []}], server)
    assert (report["done"], report["failed"]) == (2, 2)
    assert report["failed_by_reason"] == {"empty conversation": 1, "refused by the server": 1}
    assert len(server.requests) == 4
    failed = read_jsonl(tmp_path / "answers" / "failed.jsonl")
    assert [(row["row"], row["again"]) for row in failed] == [(1, True), (3, False)]
    assert "400" in failed[0]["detail"]
    assert "too long" in failed[0]["detail"]


def test_a_row_that_no_try_answers_is_tried_by_the_next_run(tmp_path: Path) -> None:
    rows = [chat("poison"), chat("one"), {"messages": []}]
    broken = True

    def behaviour(body: dict[str, Any], before: int) -> Reply:
        return Reply(500, {}) if broken and body["messages"][-1]["content"] == "poison" else echo(body, before)

    with FaultServer(behaviour).running() as server:
        report = _run(tmp_path, rows, server, max_retries=2)
        assert (report["done"], report["failed"], report["failed_tried_again_by_the_next_run"]) == (1, 2, 1)
        assert len(server.requests) == 4
        broken = False
        report = _run(tmp_path, rows, server, max_retries=2)
        assert (report["done"], report["failed"], report["failed_tried_again_by_the_next_run"]) == (2, 1, 0)
        assert len(server.requests) == 5
    assert [row["row"] for row in read_jsonl(tmp_path / "answers" / "answers.jsonl")] == [0, 1]


def test_several_servers_share_the_work_and_a_dead_one_is_left_out(tmp_path: Path) -> None:
    with FaultServer(echo).running() as one, FaultServer(echo).running() as two:
        dead = f"http://127.0.0.1:{free_port()}/v1"
        report = _run(tmp_path, [chat(f"{i}") for i in range(40)], one, two, servers=[one.address, dead, two.address], concurrency=2)
    assert report["done"] == 40
    assert len(one.requests) + len(two.requests) == 40
    assert min(len(one.requests), len(two.requests)) >= 5


def test_nobody_there_ends_the_run_and_no_row(tmp_path: Path) -> None:
    rows = [chat(f"{i}") for i in range(5)]
    with pytest.raises(RegenerateError, match="no server can be reached"):
        _run(tmp_path, rows, servers=[f"http://127.0.0.1:{free_port()}/v1"], max_retries=2)
    with FaultServer(echo).running() as server:
        assert _run(tmp_path, rows, server)["done"] == 5


@pytest.mark.parametrize(("status", "field"), [(401, "api_key_env"), (404, "regenerate.model")])
def test_what_every_row_would_hear_ends_the_run(tmp_path: Path, status: int, field: str) -> None:
    with FaultServer(lambda body, before: Reply(status, {"error": "no"})).running() as server, pytest.raises(RegenerateError, match=field):
        _run(tmp_path, [chat(f"{i}") for i in range(50)], server, concurrency=1)
    assert len(server.requests) == 1


def test_when_all_rows_are_refused_the_request_is_wrong(tmp_path: Path) -> None:
    with FaultServer(lambda body, before: Reply(422, {"error": "top_k?"})).running() as server:
        with pytest.raises(RegenerateError, match=r"20 rows were refused.*top_k"):
            _run(tmp_path, [chat(f"{i}") for i in range(50)], server, concurrency=4)
        server.behaviour = echo
        assert _run(tmp_path, [chat(f"{i}") for i in range(50)], server)["done"] == 50


def test_reasoning_tool_calls_and_cuts_are_kept(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}, "index": None}
    said: dict[str, Reply] = {
        "think": Reply(body=completion("yes", reasoning_content="hm")),
        "new name": Reply(body=completion("yes", reasoning="hm")),
        "call": Reply(body=completion(None, "tool_calls", tool_calls=[call])),
        "long": Reply(body=completion("and so on an\ufffd", "length")),
        "thinks long": Reply(body=completion(None, "length", reasoning_content="hm")),
        "silent": Reply(body=completion(None)),
    }
    rows = [chat(text, "and then?") for text in said]

    def behaviour(body: dict[str, Any], before: int) -> Reply:
        return said.get(body["messages"][-1]["content"], Reply(body=completion("then")))

    with FaultServer(behaviour).running() as server:
        report = _run(tmp_path, rows, server)
        (tmp_path / "bare").mkdir()
        bare = _run(tmp_path / "bare", rows, server, keep_reasoning=False)
    assert (report["done"], report["cut"], report["failed_by_reason"]) == (4, 1, {"ended while thinking": 1})
    assert report["chats_shortened"] == 2
    assert bare["done"] == 4
    think, new, called, long, silent = read_jsonl(tmp_path / "answers" / "answers.jsonl")
    assert think["messages"][1] == new["messages"][1] == {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert called["messages"][1:] == [
        {"role": "assistant", "content": "", "tool_calls": [{key: value for key, value in call.items() if value is not None}]}
    ]
    assert (long["finish_reason"], long["messages"][1:]) == ("length", [{"role": "assistant", "content": "and so on an"}])
    assert answers_of(silent) == ["", "then"]
    assert "reasoning_content" not in str(read_jsonl(tmp_path / "bare" / "answers" / "answers.jsonl"))


def test_tools_are_declared_and_kept(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    with FaultServer(echo).running() as server:
        _run(tmp_path, [{**chat("one"), "tools": tools}, chat("two")], server)
    assert sorted(str(request.get("tools")) for request in server.requests) == sorted([str(tools), "None"])
    assert [row.get("tools") for row in read_jsonl(tmp_path / "answers" / "answers.jsonl")] == [tools, None]


def test_sampling_template_arguments_and_key_are_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling: dict[str, Any] = {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "seed": 3,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    rows = [chat("one", "two"), chat("three")]
    with FaultServer(echo).running() as server:
        with pytest.raises(RegenerateError, match="ANSWERS_KEY"):
            _run(tmp_path, rows, server, api_key_env="ANSWERS_KEY")
        monkeypatch.setenv("ANSWERS_KEY", "secret")
        assert _run(tmp_path, rows, server, api_key_env="ANSWERS_KEY", **sampling)["done"] == 2
    body = server.requests[0]
    assert {name: body[name] for name in ("temperature", "top_p", "top_k")} == {"temperature": 0.7, "top_p": 0.9, "top_k": 20}
    assert body["chat_template_kwargs"] == {"enable_thinking": False}
    assert len({request["seed"] for request in server.requests}) == 3
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}
    for file in (tmp_path / "answers").rglob("*"):
        assert file.is_dir() or b"secret" not in file.read_bytes()


def test_other_settings_or_prompts_are_refused_field_by_field(tmp_path: Path) -> None:
    with FaultServer(echo).running() as server:
        _run(tmp_path, [chat("one")], server)
        with pytest.raises(RegenerateError, match="mixed") as refusal:
            _run(tmp_path, [chat("one"), chat("two")], server, temperature=0.5, model="other", concurrency=2)
    text = str(refusal.value)
    for line in (
        "temperature: the folder has 0.0, this run 0.5",
        'target.model: the folder has "target", this run "other"',
        "prompts.rows",
    ):
        assert line in text
    assert "concurrency" not in text
    assert "max_new_tokens" not in text


def test_nothing_answered_is_an_error(tmp_path: Path) -> None:
    with FaultServer(echo).running() as server, pytest.raises(RegenerateError, match="none of 1 rows was answered"):
        _run(tmp_path, [{"messages": []}], server)


def test_a_launch_of_several_processes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="one process"):
        _run(tmp_path, [chat("one")], servers=["http://127.0.0.1:1/v1"])
