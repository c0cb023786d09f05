"""The messages of a row in one form, whatever names and shapes the row has for them."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from pipeline.config.schema import InputSection

Message: TypeAlias = dict[str, Any]
"""`role`, `content`, and further keys as the row had them; a key whose value was null is absent. Arguments of tool calls are objects."""

ROLES = ("system", "user", "assistant", "tool")
OPENAI_ROLES: Mapping[str, str] = {role: role for role in ROLES}
SHAREGPT_ROLES: Mapping[str, str] = {
    **OPENAI_ROLES,
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}
TEXT_PARTS = ("text", "input_text", "output_text")
OPENING_ROLES = ("system", "developer")
SHOWN_CHARACTERS = 160


@dataclass(frozen=True, slots=True)
class Unusable:
    """Why a row is left out: `reason` is one of a few fixed phrases, to count by; `detail` says what was found in this row."""

    reason: str
    detail: str = ""


def shown(value: object) -> str:
    """`value` for a message: one line, not too long, printable."""
    text = value if isinstance(value, str) else repr(value)
    text = " ".join(text[: 2 * SHOWN_CHARACTERS].split())
    text = text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def too_long(num_bytes: int, longest: int) -> Unusable:
    """What a row is that is not looked at."""
    return Unusable("row too long", f"{num_bytes} bytes, at most {longest}")


def kind_of(value: object) -> str:
    """The JSON type of `value`, in words."""
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null or absent"}
    return names.get(type(value), "a number")


def nested_deeper(value: object, most: int) -> bool:
    """Whether objects and lists lie in one another more than `most` deep."""
    level = [value]
    for _ in range(most):
        level = [
            inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
        ]
    return any(isinstance(outer, dict | list) for outer in level)


def read_messages(row: dict[str, Any], given: InputSection) -> list[Message] | Unusable:
    """The row's messages, with the system message of `given` where it has none."""
    names = [given.keys["messages"]] if "messages" in given.keys else ["messages", "conversations"]
    key = next((name for name in names if row.get(name) is not None), None)
    if key is None:
        expected = " or ".join(f"`{name}`" for name in names)
        return Unusable("no messages", f"expected {expected}, found {shown(', '.join(map(str, row))) or 'no key'}")
    listed = row[key]
    if isinstance(listed, str) and listed.lstrip().startswith("["):
        try:
            listed = json.loads(listed)
        except ValueError as error:
            return Unusable("wrong type", f"{key} is a string that is no JSON: {shown(str(error))}")
    if not isinstance(listed, list):
        return Unusable("wrong type", f"{key} is {kind_of(listed)}, expected a list")
    if not listed:
        return Unusable("empty conversation")
    messages = []
    for i, item in enumerate(listed):
        message = _message(item, f"{key}[{i}]", given)
        if isinstance(message, Unusable):
            return message
        messages.append(message)
    if given.system is not None and all(message["role"] not in OPENING_ROLES for message in messages):
        messages.insert(0, {"role": "system", "content": given.system})
    return messages


def _message(item: object, where: str, given: InputSection) -> Message | Unusable:
    if not isinstance(item, dict):
        return Unusable("wrong type", f"{where} is {kind_of(item)}, expected an object")
    # `datasets` fills keys that a row lacks with null; to a template that is something else than an absent key.
    message = {key: value for key, value in item.items() if value is not None}
    role_key, text_key, roles = _names(message, given)
    role, text = message.pop(role_key, None), message.pop(text_key, None)
    if not isinstance(role, str):
        return Unusable("wrong type", f"{where}.{role_key} is {kind_of(role)}, expected a string")
    if role not in roles:
        return Unusable(
            "unknown role",
            f"{where}.{role_key} is {shown(repr(role))}, expected one of {', '.join(roles)}, or a name in `roles`",
        )
    rest = {key: value for key, value in message.items() if key not in ("role", "content")}
    for ours in ("reasoning_content", "tool_calls"):
        theirs = given.keys.get(ours)
        if theirs in rest:
            rest[ours] = rest.pop(theirs)
    if unusable := _settle_rest(rest, where):
        return unusable
    if text is None and roles[role] == "assistant" and rest.get("tool_calls"):
        return {"role": "assistant", **rest}
    if isinstance(text, list):
        text = _joined(text, f"{where}.{text_key}")
        if isinstance(text, Unusable):
            return text
    if not isinstance(text, str):
        return Unusable("wrong type", f"{where}.{text_key} is {kind_of(text)}, expected a string")
    return {"role": roles[role], "content": text, **rest}


def _names(message: Message, given: InputSection) -> tuple[str, str, Mapping[str, str]]:
    """Keys of the role and of the text, and the roles that the message may have."""
    keys = given.keys
    role_key, text_key, roles = "role", "content", OPENAI_ROLES
    if "role" not in message and "from" in message:
        role_key, text_key, roles = "from", "value", SHAREGPT_ROLES
    if "role" in keys:
        roles = SHAREGPT_ROLES
    return keys.get("role", role_key), keys.get("content", text_key), {**roles, **given.roles} if given.roles else roles


def _joined(parts: list[Any], where: str) -> str | Unusable:
    """The text of content parts. Images and the like are no text, and a chat without them would be another one."""
    texts = []
    for i, part in enumerate(parts):
        text = part
        if isinstance(part, dict):
            kind = part.get("type", "text")
            if kind not in TEXT_PARTS:
                return Unusable("content that is no text", f"{where}[{i}] has the type {shown(repr(kind))}; only text is read")
            text = part.get("text")
        if not isinstance(text, str):
            return Unusable("wrong type", f"{where}[{i}] is {kind_of(part)}, expected a part with a text")
        texts.append(text)
    return "".join(texts)


def _settle_rest(rest: dict[str, Any], where: str) -> Unusable | None:
    """Check reasoning and tool calls, in place: arguments that are JSON in a string become the object that templates expect."""
    for name in ("reasoning_content", "reasoning", "thinking"):
        if not isinstance(rest.get(name, ""), str):
            return Unusable("wrong type", f"{where}.{name} is {kind_of(rest[name])}, expected a string")
    calls = rest.get("tool_calls")
    if calls is None:
        return None
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        return Unusable("wrong type", f"{where}.tool_calls is {kind_of(calls)}, expected a list of objects")
    rest["tool_calls"] = [_call(call) for call in calls]
    return None


def _call(call: dict[str, Any]) -> dict[str, Any]:
    call = {key: value for key, value in call.items() if value is not None}
    if isinstance(call.get("function"), dict):
        return {**call, "function": _call(call["function"])}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return call
        if isinstance(parsed, dict):
            return {**call, "arguments": parsed}
    return call
