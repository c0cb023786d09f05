"""One line to one chat, or to the reason why it is none."""

import json
from typing import Any

import pytest

from pipeline.config.schema import InputSection
from pipeline.corpus.rows import Row, read_document, read_row, read_value
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
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
    row = read({"messages": [OPENAI["messages"][1], call]})
    assert row.messages == [OPENAI["messages"][1], {"role": "assistant", "tool_calls": call["tool_calls"]}]


@pytest.mark.parametrize("given", ['{"city": "Bonn", "x": null}', {"city": "Bonn", "x": None}])
def test_arguments_of_a_call_are_an_object_whether_they_came_as_one_or_as_text(given: Any) -> None:
    call = {"id": None, "type": "function", "function": {"name": "f", "arguments": given, "strict": None}}
    row = read({"messages": [U, {"role": "assistant", "content": "", "tool_calls": [call]}]})
    expected = [{"type": "function", "function": {"name": "f", "arguments": {"city": "Bonn", "x": None}}}]
    assert row.messages == [U, {"role": "assistant", "content": "", "tool_calls": expected}]


@pytest.mark.parametrize("text", ["", "no json", "[1]", "{", "3"])
def test_arguments_that_are_no_object_stay_as_they_are(text: str) -> None:
    call = {"function": {"name": "f", "arguments": text}}
    row = read({"messages": [U, {"role": "assistant", "tool_calls": [call]}]})
    assert row.messages is not None
    assert row.messages[1]["tool_calls"] == [call]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, "two", {"text": " three"}, {"type": "output_text", "text": "!"}]
    assert read({"messages": [U, {"role": "assistant", "content": parts}]}).messages == [
        U,
        {"role": "assistant", "content": "one two three!"},
    ]


@pytest.mark.parametrize("tools", [[{"name": "f"}], '[{"name": "f"}]'])
def test_tools_are_read_as_a_list_or_as_text(tools: Any) -> None:
    none: Any
    assert read({**OPENAI, "tools": tools}).tools == [{"name": "f"}]
    for none in (None, [], "", "[]"):
        assert read({**OPENAI, "tools": none}).tools is None


def test_messages_may_be_json_in_a_string() -> None:
    assert read({"messages": json.dumps(OPENAI["messages"])}).messages == OPENAI["messages"]


def given(**fields: Any) -> InputSection:
    return InputSection.model_validate({"path": "x", **fields})


def test_names_of_keys_and_roles_are_the_entrys_own() -> None:
    keys = {"messages": "dialog", "role": "speaker", "content": "said", "tools": "functions", "id": "uid", "finish_reason": "end"}
    turns = [{"speaker": "human", "said": "é 🙂"}, {"speaker": "gpt4", "said": "a", "thoughts": "hm"}]
    row = {"dialog": turns, "functions": [{"name": "f"}], "uid": "u1", "end": "length", "messages": [A]}
    read = read_value("x", 0, row, given(keys={**keys, "reasoning_content": "thoughts"}, roles={"gpt4": "assistant"}))
    said = [{"role": "user", "content": "é 🙂"}, {"role": "assistant", "content": "a", "reasoning_content": "hm"}]
    assert (read.messages, read.tools, read.id, read.finish_reason) == (said, [{"name": "f"}], "u1", "length")
    other = read_value("x", 0, {"dialog": turns}, given(keys=keys))
    assert other.unusable is not None
    assert other.unusable.reason == "unknown role"
    missing = read_value("x", 0, OPENAI, given(keys={"messages": "dialog"}))
    assert missing.unusable is not None
    assert missing.unusable.detail.startswith("expected `dialog`, found messages")
    with pytest.raises(ValueError, match="assistant"):
        given(roles={"gpt4": "robot"})


def test_a_system_message_is_added_where_there_is_none() -> None:
    added = {"role": "system", "content": "Be kind."}
    assert read_value("x", 0, says(U, A), given(system="Be kind.")).messages == [added, U, A]
    assert read_value("x", 0, OPENAI, given(system="Be kind.")).messages == OPENAI["messages"]


def test_plain_text_and_token_ids() -> None:
    assert read_value("x", 0, {"body": "some text"}, given(keys={"text": "body"})).text == "some text"
    assert read_document("x", 0, b"\xef\xbb\xbfa\r\nb").text == "a\r\nb"
    row = read_value("x", 0, {"input_ids": [1, 2], "loss_mask": [0, True]}, given(type="tokens"))
    assert (row.input_ids, row.loss_mask) == ([1, 2], [False, True])
    assert read_value("x", 0, {"ids": [1]}, given(type="tokens", keys={"input_ids": "ids"})).loss_mask is None


NOT_TOKENS: dict[str, tuple[Any, str]] = {
    "none": ({}, "wrong type"),
    "text": ({"input_ids": "1 2"}, "wrong type"),
    "empty": ({"input_ids": []}, "empty text"),
    "a boolean": ({"input_ids": [1, True]}, "wrong type"),
    "a fraction": ({"input_ids": [1, 2.0]}, "wrong type"),
    "negative": ({"input_ids": [1, -1]}, "wrong type"),
    "huge": ({"input_ids": [1, 2**31]}, "wrong type"),
    "mask too short": ({"input_ids": [1, 2], "loss_mask": [1]}, "wrong type"),
    "mask an object": ({"input_ids": [1, 2], "loss_mask": {}}, "wrong type"),
    "mask of text": ({"input_ids": [1, 2], "loss_mask": ["0", "1"]}, "wrong type"),
    "mask of more than 1": ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "wrong type"),
}


@pytest.mark.parametrize("name", NOT_TOKENS)
def test_bad_rows_of_tokens_give_a_reason(name: str) -> None:
    value, reason = NOT_TOKENS[name]
    row = read_value("x", 0, value, given(type="tokens"))
    assert row.input_ids is None
    assert row.unusable is not None
    assert row.unusable.reason == reason


@pytest.mark.parametrize(("data", "reason"), [(b"", "empty text"), (b" \n", "empty text"), (b"\xff\xfe", "invalid text")])
def test_texts_that_are_none(data: bytes, reason: str) -> None:
    row = read_document("x", 0, data)
    assert row.unusable is not None
    assert (row.text, row.unusable.reason) == (None, reason)


def test_what_a_row_says_about_itself() -> None:
    row = read({**OPENAI, "id": "x/1", "finish_reason": "length", "more": 1})
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
    "an image": (says({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}), "content that is no text"),
    "audio": (says({"role": "user", "content": [{"type": "input_audio", "text": "x"}]}), "content that is no text"),
    "a part of no type we know": (says({"role": "user", "content": [{"type": ["text"], "text": "x"}]}), "content that is no text"),
    "a part without a text": (says({"role": "user", "content": [{"type": "text"}]}), "wrong type"),
    "parts in parts": (says({"role": "user", "content": [[{"type": "text", "text": "x"}]]}), "wrong type"),
    "content true": (says({"role": "user", "content": True}), "wrong type"),
    "content an object": (says({"role": "user", "content": {"text": "x"}}), "wrong type"),
    "reasoning a number": (says(U, {"role": "assistant", "content": "x", "reasoning_content": 5}), "wrong type"),
    "calls an object": (says(U, {"role": "assistant", "content": "x", "tool_calls": {"name": "f"}}), "wrong type"),
    "a call that is text": (says(U, {"role": "assistant", "tool_calls": ["f"]}), "wrong type"),
    "messages of broken JSON": ({"messages": "[{"}, "wrong type"),
    "value null": ({"conversations": [{"from": "human", "value": None}]}, "wrong type"),
    "tools an object": ({**OPENAI, "tools": {"name": "f"}}, "wrong type"),
    "tools of text": ({**OPENAI, "tools": ["f"]}, "wrong type"),
    "tools of broken JSON": ({**OPENAI, "tools": "f("}, "wrong type"),
    "tools true": ({**OPENAI, "tools": True}, "wrong type"),
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
