"""One row of a source to one chat, text or list of token ids; or to the reason why it is none.

Two forms of chats are read, OpenAI's `messages` (role, content) and ShareGPT's `conversations` (from, value); the same chat in
either gives the same messages (`messages.py`). Text is never changed. Whatever is wrong with a row is a value, not an
exception: a bad row is counted and listed, and the run goes on.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.config.schema import InputSection
from pipeline.corpus.messages import Message, Unusable, kind_of, read_messages, shown

__all__ = ["PLAIN", "Message", "Row", "Unusable", "read_document", "read_row", "read_value", "shown"]

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LARGEST_ID = 2**31 - 1
BROKEN = "broken JSON"
PLAIN = InputSection(path="")
"""How rows are read where nothing else is said."""


@dataclass(frozen=True, slots=True)
class Row:
    """Row `row` (from 0) of `source`: `messages`, `text` or `input_ids`, and none of them exactly where `unusable` says why.

    `tools` are the functions that the chat's template is to declare. `finish_reason` is about the last assistant turn ("length": the
    answer was cut at a token limit); `id` is the row's own. `loss_mask` goes with `input_ids`; None: all but the first.
    """

    source: str
    row: int
    messages: list[Message] | None
    unusable: Unusable | None = None
    finish_reason: str | None = None
    id: str | None = None
    tools: list[dict[str, Any]] | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    loss_mask: list[bool] | None = None


def read_row(source: str, row: int, line: bytes, given: InputSection = PLAIN) -> Row:
    """The row in `line`, UTF-8 JSON. A key that an object has twice counts as it stands last, as everywhere in Python."""
    value = _read_json(line.removeprefix(BYTE_ORDER_MARK) if row == 0 else line)
    return Row(source, row, None, value) if isinstance(value, Unusable) else read_value(source, row, value, given)


def read_value(source: str, row: int, value: object, given: InputSection = PLAIN) -> Row:
    """The row in a value of plain JSON types."""
    if not isinstance(value, dict):
        return Row(source, row, None, Unusable("wrong type", f"the row is {kind_of(value)}, expected an object"))
    try:
        found = _contents(value, given)
    except RecursionError:
        found = Unusable("nested too deeply")
    if isinstance(found, Unusable):
        return Row(source, row, None, found)
    keys: Mapping[Any, str] = given.keys
    finish_reason, own_id = (value.get(keys.get(name, name)) for name in ("finish_reason", "id"))
    return Row(
        source,
        row,
        found.pop("messages", None),
        finish_reason=finish_reason if isinstance(finish_reason, str) else None,
        id=own_id if isinstance(own_id, str) else None,
        **found,
    )


def read_document(source: str, row: int, data: bytes) -> Row:
    """A plain text, UTF-8. It is taken as it is, but for a byte order mark."""
    try:
        text = data.removeprefix(BYTE_ORDER_MARK).decode("utf-8")
    except UnicodeDecodeError as error:
        return Row(source, row, None, Unusable("invalid text", f"not UTF-8: {error.reason} at byte {error.start}"))
    return Row(source, row, None, text=text) if text.strip() else Row(source, row, None, Unusable("empty text"))


def _read_json(line: bytes) -> Any:
    if not line.strip():
        return Unusable("blank line")
    try:
        # Decoded here, because json.loads guesses UTF-16 and lets half characters pass when it is given bytes.
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Unusable(BROKEN, f"not UTF-8: {error.reason} at byte {error.start}")
    except RecursionError:
        return Unusable(BROKEN, "nested too deeply")
    except ValueError as error:
        return Unusable(BROKEN, shown(str(error)))


def _contents(value: dict[str, Any], given: InputSection) -> dict[str, Any] | Unusable:
    """Fields of `Row` by what the entry says that its rows are."""
    if given.type == "tokens":
        return _tokens(value, given)
    if "text" in given.keys:
        text = value.get(given.keys["text"])
        if not isinstance(text, str):
            return Unusable("wrong type", f"{given.keys['text']} is {kind_of(text)}, expected a string")
        return {"text": text} if text.strip() else Unusable("empty text")
    messages = read_messages(value, given)
    if isinstance(messages, Unusable):
        return messages
    tools = _tools(value.get(given.keys.get("tools", "tools")))
    return tools if isinstance(tools, Unusable) else {"messages": messages, "tools": tools}


def _tools(tools: object) -> list[dict[str, Any]] | Unusable | None:
    if isinstance(tools, str) and tools:
        try:
            tools = json.loads(tools)
        except ValueError as error:
            return Unusable("wrong type", f"tools is a string that is no JSON: {shown(str(error))}")
    if tools is None or tools in ("", []):
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        return Unusable("wrong type", f"tools is {kind_of(tools)}, expected a list of objects")
    return tools


def _tokens(value: dict[str, Any], given: InputSection) -> dict[str, Any] | Unusable:
    name, mask_name = given.keys.get("input_ids", "input_ids"), given.keys.get("loss_mask", "loss_mask")
    ids, mask = value.get(name), value.get(mask_name)
    if not isinstance(ids, list):
        return Unusable("wrong type", f"{name} is {kind_of(ids)}, expected a list of token ids")
    if not ids:
        return Unusable("empty text", f"{name} is empty")
    for i, token in enumerate(ids):
        if type(token) is not int or not 0 <= token <= LARGEST_ID:
            return Unusable("wrong type", f"{name}[{i}] is {shown(repr(token))}, expected a token id")
    if mask is None:
        return {"input_ids": ids}
    if not isinstance(mask, list) or len(mask) != len(ids):
        found = f"{len(mask)} values" if isinstance(mask, list) else kind_of(mask)
        return Unusable("wrong type", f"{mask_name} is {found}, expected one for each of {len(ids)} tokens")
    for i, flag in enumerate(mask):
        if type(flag) not in (bool, int) or flag not in (0, 1):
            return Unusable("wrong type", f"{mask_name}[{i}] is {shown(repr(flag))}, expected 0 or 1")
    return {"input_ids": ids, "loss_mask": [bool(flag) for flag in mask]}
