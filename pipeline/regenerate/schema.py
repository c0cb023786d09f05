"""The formats of a folder of answers: `python -m pipeline.regenerate.schema DIR` writes them down, a test holds them equal."""

import json
import sys
from pathlib import Path
from typing import Any

from pipeline.regenerate.conversation import Answer, Chat, failed
from pipeline.regenerate.journal import Ended, journal_schema
from pipeline.regenerate.prompts import Prompt

DRAFT = "https://json-schema.org/draft/2020-12/schema"


def schemas() -> dict[str, str]:
    """File name in data_schemas/ and its text."""
    done, cut, lost = _examples()
    row: dict[str, Any] = {
        "$schema": DRAFT,
        "title": "A line of answers.jsonl: a chat whose answers the target wrote, as the corpus reads it",
        "type": "object",
        "properties": {
            "id": {"type": "string", "description": "the row's own, if it had one"},
            "source": {"type": "string", "description": "name of the file that the prompts came from, without its folder"},
            "row": {"type": "integer", "minimum": 0, "description": "row of that source, from 0"},
            "tools": {"type": "array", "items": {"type": "object"}, "description": "the functions that the row declared, if any"},
            "messages": {
                "type": "array",
                "items": {
                    "type": "object",
                    "properties": {
                        "role": {"type": "string"},
                        "content": {"type": "string"},
                        "reasoning_content": {"type": "string", "description": "what the target thought before it answered"},
                        "tool_calls": {"type": "array", "items": {"type": "object"}},
                    },
                    "required": ["role", "content"],
                },
                "description": "the row's messages, with the target's answers in place of the assistant's",
            },
            "finish_reason": {
                "enum": ["stop", "length", "tool_calls"],
                "description": "of the last answer; length: cut at the token limit, so the end token after it is not supervised",
            },
        },
        "required": ["source", "row", "messages", "finish_reason"],
        "examples": [done.row, cut.row],
    }
    journal = {
        "$schema": DRAFT,
        **journal_schema(),
        "title": "A line of journal/RUN-RANK.jsonl: how a row ended. Of two lines about one row that of the later run holds",
        "examples": [json.loads(ended.line()) for ended in (done, lost)],
    }
    return {
        name: json.dumps(value, indent=2, ensure_ascii=False) + "\n"
        for name, value in {"answers.schema.json": row, "answers_journal.schema.json": journal}.items()
    }


def _examples() -> tuple[Ended, Ended, Ended]:
    """A row that is done, one that is cut in its first answer, one that failed."""
    river = {"role": "user", "content": "Where does the Rhine end?"}
    length = {"role": "user", "content": "How long is it?"}
    prompt = Prompt(17, "prompts.jsonl", 17, "geo/17", ((river,), (length,)))
    chat = Chat(prompt, keep_reasoning=True)
    thought = {"role": "assistant", "content": "In the North Sea.", "reasoning_content": "It passes Rotterdam."}
    chat.take(Answer(thought, "stop", 14, True))
    done = chat.take(Answer({"role": "assistant", "content": "About 1,230 km."}, "stop", 9, True))
    cut = Chat(Prompt(18, "prompts.jsonl", 18, None, ((river,), (length,))), keep_reasoning=True).take(
        Answer({"role": "assistant", "content": "In the North"}, "length", 3, True)
    )
    assert done is not None
    assert cut is not None
    return done, cut, failed(prompt, "no answer", "9 tries; the last: http://node1:8000/v1 answered 503: loading", again=True)


if __name__ == "__main__":
    for file, text in schemas().items():
        Path(sys.argv[1], file).write_text(text)
