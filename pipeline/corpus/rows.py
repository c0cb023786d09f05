"""One line of a source to one chat, or to the reason why it is none.

Two forms are read, OpenAI's `messages` (role, content) and ShareGPT's `conversations` (from, value); the same chat in
either gives the same messages. Text is never changed. Whatever is wrong with a row is a value, not an exception: a bad
row is counted and listed, and the run goes on.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]
"""`role`, `content`, and further keys as the row had them; a key whose value was null is absent."""

ROLES = ("system", "user", "assistant", "tool")
SHAREGPT_ROLES: Mapping[str, str] = {
    **{role: role for role in ROLES},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
SHOWN_CHARACTERS = 160


@dataclass(frozen=True, slots=True)
class Unusable:
    """Why a row is left out: `reason` is one of a few fixed phrases, to count by; `detail` says what was found in this row."""

    reason: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """Row `row` (from 0; one line each) of `source`. `messages` is None exactly where `unusable` says why.

    `finish_reason` is about the last assistant turn ("length": the answer was cut at a token limit); `id` is the row's own.
    """

    source: str
    row: int
    messages: list[Message] | None
    unusable: Unusable | None = None
    finish_reason: str | None = None
    id: str | None = None


def read_row(source: str, row: int, line: bytes) -> Row:
    """The chat in `line`, UTF-8 JSON."""
    value = _read_json(line.removeprefix(BYTE_ORDER_MARK) if row == 0 else line)
    if isinstance(value, Unusable):
        return Row(source, row, None, value)
    messages = _messages(value)
    if isinstance(messages, Unusable):
        return Row(source, row, None, messages)
    finish_reason, own_id = value.get("finish_reason"), value.get("id")
    return Row(
        source,
        row,
        messages,
        finish_reason=finish_reason if isinstance(finish_reason, str) else None,
        id=own_id if isinstance(own_id, str) else None,
    )


def shown(value: object) -> str:
    """`value` for a message: one line, not too long, printable."""
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text[: 2 * SHOWN_CHARACTERS].split())
    text = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _read_json(line: bytes) -> dict[str, Any] | Unusable:
    if not line.strip():
        return Unusable("blank line")
    try:
        # Decoded here, because json.loads guesses UTF-16 and lets half characters pass when it is given bytes.
        value = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Unusable("broken JSON", f"not UTF-8: {error.reason} at byte {error.start}")
    except RecursionError:
        return Unusable("broken JSON", "nested too deeply")
    except ValueError as error:
        return Unusable("broken JSON", shown(str(error)))
    if not isinstance(value, dict):
        return Unusable("wrong type", f"the row is {_kind(value)}, expected an object")
    return value


def _messages(row: dict[str, Any]) -> list[Message] | Unusable:
    """The row's messages in one form."""
    key = next((key for key in ("messages", "conversations") if row.get(key) is not None), None)
    if key is None:
        return Unusable("no messages", f"expected `messages` or `conversations`, found {shown(', '.join(row)) or 'no key'}")
    given = row[key]
    if not isinstance(given, list):
        return Unusable("wrong type", f"{key} is {_kind(given)}, expected a list")
    if not given:
        return Unusable("empty conversation")
    if row.get("tools"):
        return Unusable("tools", "the row declares tools, which are not read yet; the chat would be rendered without them")
    messages = []
    for i, item in enumerate(given):
        message = _message(item, f"{key}[{i}]")
        if isinstance(message, Unusable):
            return message
        messages.append(message)
    return messages


def _message(item: object, where: str) -> Message | Unusable:
    if not isinstance(item, dict):
        return Unusable("wrong type", f"{where} is {_kind(item)}, expected an object")
    # `datasets` fills keys that a row lacks with null; to a template that is something else than an absent key.
    message = {key: value for key, value in item.items() if value is not None}
    role_key, text_key, roles = "role", "content", {role: role for role in ROLES}
    if "role" not in message and "from" in message:
        role_key, text_key, roles = "from", "value", dict(SHAREGPT_ROLES)
    role, text = message.pop(role_key, None), message.pop(text_key, None)
    if not isinstance(role, str):
        return Unusable("wrong type", f"{where}.{role_key} is {_kind(role)}, expected a string")
    if role not in roles:
        return Unusable("unknown role", f"{where}.{role_key} is {shown(repr(role))}, expected one of {', '.join(roles)}")
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    if text is None and roles[role] == "assistant" and rest.get("tool_calls"):
        return {"role": "assistant", **rest}
    if not isinstance(text, str):
        return Unusable("wrong type", f"{where}.{text_key} is {_kind(text)}, expected a string")
    return {"role": roles[role], "content": text, **rest}


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null or absent"}
    return names.get(type(value), "a number")
