"""One line to one chat, or to the reason why it is none."""

import json
from typing import Any

import pytest

from pipeline.corpus.rows import Row, read_row
from pipeline.corpus.select import check_turns

OPENAI = {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "é 🙂"}, {"role": "assistant", "content": "a"}]}
SHAREGPT = {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "é 🙂"}, {"from": "gpt", "value": "a"}]}


def read(value: Any) -> Row:
    return read_row("chats.jsonl", 7, value if isinstance(value, bytes) else json.dumps(value).encode())


def test_both_forms_give_the_same_messages() -> None:
    assert read(OPENAI).messages == read(SHAREGPT).messages == OPENAI["messages"]
    assert read({"conversations": OPENAI["messages"]}).messages == OPENAI["messages"]
    assert read({"messages": None, **SHAREGPT}).messages == OPENAI["messages"]


def test_null_keys_are_dropped_and_others_kept() -> None:
    filled = {"role": "assistant", "content": "a", "tool_calls": None, "name": None, "reasoning_content": "r"}
    row = read({"messages": [OPENAI["messages"][1], filled]})
    assert row.messages == [OPENAI["messages"][1], {"role": "assistant", "content": "a", "reasoning_content": "r"}]


def test_a_turn_of_tool_calls_needs_no_content() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    row = read({"messages": [OPENAI["messages"][1], call]})
    assert row.messages == [OPENAI["messages"][1], {"role": "assistant", "tool_calls": call["tool_calls"]}]


def test_what_a_row_says_about_itself() -> None:
    row = read({**OPENAI, "id": "x/1", "finish_reason": "length", "tools": [], "more": 1})
    assert (row.source, row.row, row.id, row.finish_reason) == ("chats.jsonl", 7, "x/1", "length")
    row = read({**OPENAI, "id": 5, "finish_reason": None})
    assert (row.id, row.finish_reason, row.unusable) == (None, None, None)


def test_a_byte_order_mark_is_taken_off_the_first_row_only() -> None:
    line = b"\xef\xbb\xbf" + json.dumps(OPENAI).encode()
    assert read_row("x", 0, line).messages == OPENAI["messages"]
    assert read_row("x", 1, line).messages is None
    assert read_row("x", 1, json.dumps(OPENAI).encode() + b" \r").messages == OPENAI["messages"]


def says(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


U, A = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
BAD: dict[str, tuple[Any, str]] = {
    "cut": (b'{"messages": [', "broken JSON"),
    "empty line": (b"", "blank line"),
    "spaces": (b"  \t ", "blank line"),
    "two values": (b"{} {}", "broken JSON"),
    "raw NUL": (b'{"messages": "\x00"}', "broken JSON"),
    "latin-1": ('{"messages": "é"}'.encode("latin-1"), "broken JSON"),
    "utf-16": (json.dumps(OPENAI).encode("utf-16"), "broken JSON"),
    "half a character": (b'{"messages": "\xed\xa0\x80"}', "broken JSON"),
    "deep": (b'{"messages": ' + b"[" * 200_000, "broken JSON"),
    "huge number": (b'{"messages": ' + b"9" * 5000 + b"}", "broken JSON"),
    "number": (b"3", "wrong type"),
    "string": (b'"messages"', "wrong type"),
    "null": (b"null", "wrong type"),
    "list": (b"[]", "wrong type"),
    "no key": ({"text": "hello"}, "no messages"),
    "empty object": ({}, "no messages"),
    "null key": ({"messages": None, "conversations": None}, "no messages"),
    "messages a string": ({"messages": "hello"}, "wrong type"),
    "messages an object": ({"messages": {"role": "user"}}, "wrong type"),
    "messages a number": ({"messages": 0}, "wrong type"),
    "messages false": ({"messages": False}, "wrong type"),
    "empty": ({"messages": []}, "empty conversation"),
    "message a string": (says("hello"), "wrong type"),
    "message null": (says(U, None), "wrong type"),
    "message empty": (says({}), "wrong type"),
    "no role": (says({"content": "x"}), "wrong type"),
    "role a number": (says({"role": 1, "content": "x"}), "wrong type"),
    "role a list": (says({"role": ["user"], "content": "x"}), "wrong type"),
    "unknown role": (says({"role": "narrator", "content": "x"}), "unknown role"),
    "role in capitals": (says({"role": "User", "content": "x"}), "unknown role"),
    "human in the OpenAI form": (says({"role": "human", "content": "x"}), "unknown role"),
    "role with an escape": (says({"role": "\x1b[31m\ud800", "content": "x"}), "unknown role"),
    "key with an escape": ({"\x1b[31m\ud800 \n": "x"}, "no messages"),
    "unknown from": ({"conversations": [{"from": "observation", "value": "x"}]}, "unknown role"),
    "no content": (says({"role": "user"}), "wrong type"),
    "content null": (says(U, {"role": "assistant", "content": None}), "wrong type"),
    "content null, no calls": (says(U, {"role": "assistant", "content": None, "tool_calls": []}), "wrong type"),
    "content a number": (says({"role": "user", "content": 5}), "wrong type"),
    "content parts": (says({"role": "user", "content": [{"type": "text", "text": "x"}]}), "wrong type"),
    "value null": ({"conversations": [{"from": "human", "value": None}]}, "wrong type"),
    "tools": ({**OPENAI, "tools": [{"name": "f"}]}, "tools"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_give_a_reason_and_no_messages(name: str) -> None:
    value, reason = BAD[name]
    row = read(value)
    assert row.messages is None
    assert row.unusable is not None
    assert row.unusable.reason == reason
    assert row.unusable.detail.isprintable()
    assert len(row.unusable.detail) < 300


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "system", "content": "s"}], "system only"),
        ([U], "no assistant turn"),
        ([U, {"role": "tool", "content": "t"}], "no assistant turn"),
        ([A, U, A], "assistant first"),
        ([{"role": "system", "content": "s"}, A, U, A], "assistant first"),
        ([U, A], None),
        ([{"role": "system", "content": "s"}, U, A, U], None),
        ([U, A] * 500, None),
        ([U, A] * 501, "too many turns"),
    ],
)
def test_chats_without_anything_to_learn(messages: list[dict[str, str]], reason: str | None) -> None:
    found = check_turns(messages)
    assert (found.reason if found else None) == reason
