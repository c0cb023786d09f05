"""The rows of a corpus as questions: what is put to the target before each of its answers.

The assistant's turns of a row are left out, for the target writes its own. Messages between two of them are put together; where
they hold no user's turn they go with the next. A tool's result answers a call that the target has not made, so a chat ends
before the first one.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from pipeline.config.schema import InputSection
from pipeline.corpus.messages import nested_deeper
from pipeline.corpus.rows import Message, Row, Unusable
from pipeline.corpus.select import check_turns
from pipeline.corpus.sources import read_rows
from pipeline.regenerate.journal import MOST_NESTED

WINDOW_BATCHES = 64
"""Batches are of like rows among so many batches' rows, which is what is held in memory."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Row number `index` of all that are read (from 0), which is row `row` of `source`.

    `turns`: the messages put before the first answer, before the second, …; empty exactly where `unusable` says why nothing can be
    asked. `shortened`: the row goes on with a tool's result, and is asked only what comes before. `tools` are the functions that it
    declares.
    """

    index: int
    source: str
    row: int
    id: str | None
    turns: tuple[tuple[Message, ...], ...]
    shortened: bool = False
    unusable: Unusable | None = None
    tools: list[dict[str, Any]] | None = None

    @property
    def place(self) -> dict[str, Any]:
        """What names this row in a file: its own id if it has one, source and row."""
        return {**({"id": self.id} if self.id is not None else {}), "source": self.source, "row": self.row}


def read_prompts(inputs: Sequence[InputSection]) -> Iterator[Prompt]:
    """All rows of `inputs`, in order; a row that asks nothing says why. `CorpusError` for a file that is not there."""
    for index, row in enumerate(read_rows(inputs)):
        found = _turns(row)
        if isinstance(found, Unusable):
            yield Prompt(index, row.source, row.row, _sound(row.id), (), unusable=found)
        else:
            yield Prompt(index, row.source, row.row, _sound(row.id), *found, tools=row.tools)


class Digest:
    """The content of prompts as they pass: `rows` of them, `digest` sha256 hex over places and messages, in order."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._prompts = prompts
        self._sha256 = sha256()
        self.rows = 0

    def __iter__(self) -> Iterator[Prompt]:
        for prompt in self._prompts:
            value = [prompt.place, prompt.unusable.reason if prompt.unusable else prompt.turns, prompt.shortened, prompt.tools]
            self._sha256.update(json.dumps(value, sort_keys=True).encode() + b"\n")
            self.rows += 1
            yield prompt

    @property
    def digest(self) -> str:
        return self._sha256.hexdigest()


def batches(prompts: Iterable[Prompt], batch_size: int) -> Iterator[list[Prompt]]:
    """Prompts of like shape together: by number of turns, then by length in characters. Those that ask nothing are left out.

    A function of the prompts alone, so that a resumed run has the same batches, and with them the same rounding.
    """
    window: list[Prompt] = []
    for prompt in prompts:
        if prompt.unusable is None:
            window.append(prompt)
        if len(window) == batch_size * WINDOW_BATCHES:
            yield from _sorted_batches(window, batch_size)
            window = []
    yield from _sorted_batches(window, batch_size)


def _sorted_batches(window: Sequence[Prompt], batch_size: int) -> Iterator[list[Prompt]]:
    ordered = sorted(window, key=lambda prompt: (len(prompt.turns), _characters(prompt), prompt.index))
    for first in range(0, len(ordered), batch_size):
        yield ordered[first : first + batch_size]


def _characters(prompt: Prompt) -> int:
    return sum(len(str(message.get("content", ""))) for turn in prompt.turns for message in turn)


def _turns(row: Row) -> tuple[tuple[tuple[Message, ...], ...], bool] | Unusable:
    """The turns of a row and whether it was shortened, or why it has none."""
    if row.messages is None:
        return row.unusable or Unusable("no messages", "a text or token ids, and not a chat")
    unusable = check_turns(row.messages)
    # An answer is what is to be written: that there is none yet is no fault.
    if unusable is not None and unusable.reason != "no assistant turn":
        return unusable
    if unusable := _unwritable([row.messages, row.tools]):
        return unusable
    roles = [message["role"] for message in row.messages]
    end = roles.index("tool") if "tool" in roles else len(roles)
    turns: list[tuple[Message, ...]] = []
    waiting: list[Message] = []
    for place, message in enumerate(row.messages[:end]):
        if message["role"] != "assistant":
            waiting.append(message)
        if roles[place + 1 : place + 2] in ([], ["assistant"], ["tool"]) and any(m["role"] == "user" for m in waiting):
            turns.append(tuple(waiting))
            waiting = []
    return (tuple(turns), end < len(roles)) if turns else Unusable("no user turn")


def _unwritable(value: Any) -> Unusable | None:
    """Why messages or tools cannot be sent or written as JSON, if so."""
    if nested_deeper(value, MOST_NESTED):
        return Unusable("nested too deeply", f"more than {MOST_NESTED} levels")
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        return Unusable("invalid text", f"half of a surrogate pair: {error.object[error.start : error.end]!a}")
    except ValueError as error:
        return Unusable("wrong type", f"no JSON: {error}")
    return None


def _sound(own_id: str | None) -> str | None:
    """The row's own id, unless it is no valid text."""
    try:
        (own_id or "").encode()
    except UnicodeEncodeError:
        return None
    return own_id
