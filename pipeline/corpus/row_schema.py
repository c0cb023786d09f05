"""What a row of a corpus may be, as JSON Schema with examples: made from what `rows.py` and `messages.py` read by."""

from typing import Any

from pipeline.corpus.messages import OPENAI_ROLES, SHAREGPT_ROLES, TEXT_PARTS
from pipeline.corpus.rows import LARGEST_ID

CHAT_EXAMPLES: list[dict[str, Any]] = [
    {
        "id": "q-17",
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Is it warm in Bonn?"}]},
            {
                "role": "assistant",
                "reasoning_content": "I have to look.",
                "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bonn"}'}}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "21"},
            {"role": "assistant", "content": "Yes, 21 degrees."},
        ],
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}],
        "finish_reason": "stop",
    },
    {"conversations": [{"from": "human", "value": "Is it late?"}, {"from": "gpt", "value": "It is ten."}]},
]
TOKEN_EXAMPLES: list[dict[str, Any]] = [{"id": "t-1", "input_ids": [1, 51, 9, 2], "loss_mask": [0, 0, 1, 1]}, {"input_ids": [1, 51, 9, 2]}]

_NULLABLE_TEXT = {"type": ["string", "null"]}
_PART = {"type": "object", "required": ["text"], "properties": {"type": {"enum": list(TEXT_PARTS)}, "text": {"type": "string"}}}
_TEXT: dict[str, Any] = {
    "description": "text, or parts of it, which are joined",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"anyOf": [{"type": "string"}, _PART]}}],
}


def _listed(item: dict[str, Any], description: str) -> dict[str, Any]:
    """A list, or the same as JSON in a string."""
    return {
        "description": description,
        "anyOf": [
            {"type": "array", "minItems": 1, "items": item},
            {"type": "string", "pattern": r"^\s*\[", "contentMediaType": "application/json"},
        ],
    }


def _message(role_key: str, text_key: str, roles: list[str]) -> dict[str, Any]:
    """A message; only an assistant that calls tools may say nothing."""
    speaks = {"required": [text_key], "properties": {text_key: _TEXT}}
    answers = [role for role in roles if SHAREGPT_ROLES[role] == "assistant"]
    calls = {
        "required": ["tool_calls"],
        "properties": {role_key: {"enum": answers}, "tool_calls": {"type": "array", "minItems": 1}, text_key: {"type": "null"}},
    }
    return {
        "type": "object",
        "required": [role_key],
        "properties": {
            role_key: {"enum": roles},
            **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), _NULLABLE_TEXT),
            "tool_calls": {
                "description": "arguments of a function as an object, or as JSON in a string",
                "anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "object"}}],
            },
        },
        "anyOf": [speaks, calls],
    }


def row_schemas() -> dict[str, dict[str, Any]]:
    """Schemas by the name of their file."""
    openai = _message("role", "content", list(OPENAI_ROLES))
    either = {"if": {"required": ["role"]}, "then": openai, "else": _message("from", "value", list(SHAREGPT_ROLES))}
    chat = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A chat: one row of a corpus",
        "description": "Keys and names of roles may be others where the entry of input_cfg says so in `keys` and `roles`. Further keys are "
        "left alone; those of messages go to the chat template. A key that is null counts as absent.",
        "type": "object",
        "properties": {
            "messages": _listed(either, "the turns"),
            "conversations": _listed(either, "the turns, where there are no messages"),
            "tools": {
                "description": "functions that the chat template is to declare; a list of objects, or the same as JSON in a string",
                "anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "string"}, {"type": "null"}],
            },
            "id": {"description": "becomes the sample's id where it is a string that no other row has"},
            "finish_reason": {"description": 'of the last answer; "length": it was cut, so its end token is not the target\'s own'},
        },
        "anyOf": [{"required": ["messages"]}, {"required": ["conversations"]}],
        "examples": CHAT_EXAMPLES,
    }
    tokens = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Token ids: one row of a corpus, of an entry of type tokens",
        "type": "object",
        "properties": {
            "input_ids": {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0, "maximum": LARGEST_ID}},
            "loss_mask": {
                "description": "one for each token, 1 where it is supervised; default: all but the first",
                "anyOf": [{"type": "array", "items": {"enum": [0, 1, False, True]}}, {"type": "null"}],
            },
            "id": {"description": "as in a chat"},
        },
        "required": ["input_ids"],
        "examples": TOKEN_EXAMPLES,
    }
    return {"corpus_row.schema.json": chat, "token_row.schema.json": tokens}
