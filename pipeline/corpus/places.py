"""Where a template puts what the assistant said: character ranges in the render of a whole chat.

Without generation marks in the template, the place of a turn follows from two more renders. The messages before it with
their generation prompt give the place where the target starts to write; the messages up to it give the place where it ends.
Both must be found again in the whole render, letter by letter; where they are not, the template rewrites its history
(Qwen3 drops the thinking of earlier turns), and only the last turn, which it cannot rewrite, is supervised.

With marks, the marks say what is the assistant's. What the generation prompt supplies, and the newline after the end
token, are taken off also there: the target emits neither.

Some generation prompts open a think block that the template does not show in a chat (DeepSeek-R1), or shows otherwise for an answer
without reasoning (Nemotron). What the target sees when it is served is the prompt, so there the last turn is read as the prompt
and, after it, what the target must emit: the row's reasoning, the end of the block, and the answer as the template writes it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.corpus.messages import Message, Unusable
from pipeline.corpus.turns import Encoded, Template, Tools

NOT_LOCATED = "turn not located"
THINKING_CUT = "ended while thinking"
ONLY_THINK = re.compile(r"(?:\s|</?think>)*")
THINK, END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class Place:
    """Characters [start, end) of the whole render are one answer and its end token; the end token's are [text_end, end)."""

    start: int
    text_end: int
    end: int


@dataclass(frozen=True, slots=True)
class Places:
    """`places` in the text `whole`, which is the render except where the last turn had to be read after its generation prompt."""

    places: tuple[Place, ...]
    whole: str
    last_turn_only: bool = False
    after_prompt: bool = False


def answers_of(messages: Sequence[Message]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


def find_places(template: Template, messages: Sequence[Message], tools: Tools = None, only_last: bool = False) -> Places | Unusable:
    """The places of all assistant turns, or of the last alone where that is asked for or the template rewrites earlier ones."""
    whole = template.text(messages, tools=tools)
    turns = answers_of(messages)
    last = _place(template, messages, turns[-1], whole, tools)
    if isinstance(last, str):
        spliced = _after_prompt(template, messages, turns[-1], tools)
        if spliced is None:
            return Unusable(NOT_LOCATED, f"message {turns[-1]}: {last}")
        return Places((spliced[1],), spliced[0], last_turn_only=not only_last and len(turns) > 1, after_prompt=True)
    if only_last:
        return Places((last,), whole)
    found = [_place(template, messages, turn, whole, tools) for turn in turns[:-1]]
    places = tuple(place for place in found if isinstance(place, Place))
    if len(places) < len(found):
        return Places((last,), whole, last_turn_only=True)
    return Places((*places, last), whole)


def _place(template: Template, messages: Sequence[Message], turn: int, whole: str, tools: Tools) -> Place | str:
    """The place of message `turn`, or what the renders disagree about."""
    shape = template.shape
    prompt = template.text(messages[:turn], prompt=True, tools=tools) + shape.opening
    after = whole if turn == len(messages) - 1 else template.text(messages[: turn + 1], tools=tools)
    if not after.startswith(prompt):
        return f"the chat up to here does not begin with its generation prompt, which ends with {prompt[-40:]!r}"
    if not after.endswith(shape.end + shape.trailer):
        return f"the turn does not end with {shape.end + shape.trailer!r}, as a plain answer does"
    end = len(after) - len(shape.trailer)
    if end < len(prompt) or not whole.startswith(after[:end]):
        return "later messages change how the template renders it"
    return Place(len(prompt), max(len(prompt), end - len(shape.end)), end)


def _after_prompt(template: Template, messages: Sequence[Message], turn: int, tools: Tools) -> tuple[str, Place] | None:
    """The chat up to message `turn`, which is read after its generation prompt where the two part at a think block; and its place."""
    shape, before = template.shape, messages[:turn]
    if shape.header is None:
        return None
    prompt, plain = template.text(before, prompt=True, tools=tools), template.text(before, tools=tools)
    whole, common = template.text(messages[: turn + 1], tools=tools), plain + shape.header
    if not prompt.startswith(common) or not whole.startswith(common) or not whole.endswith(shape.end + shape.trailer):
        return None
    supplied, answer = prompt[len(common) :], whole[len(common) :]
    if not ONLY_THINK.fullmatch(supplied):
        return None
    text = prompt + (_inside(messages[turn], supplied, answer) if supplied.rstrip().endswith(THINK) else answer)
    end = len(text) - len(shape.trailer)
    return text, Place(len(prompt), max(len(prompt), end - len(shape.end)), end)


def _inside(message: Message, supplied: str, answer: str) -> str:
    """What the target writes after a prompt that ends by opening a think block; `answer` is what the template shows of it.

    An answer without reasoning closes the block at once. Line ends around the closing mark are the row's own where it has them.
    """
    if answer.startswith(THINK):
        return answer.removeprefix(THINK)
    content, reasoning = str(message.get("content", "")), str(message.get("reasoning_content", ""))
    if reasoning or END_THINK not in content:
        before = "" if reasoning.endswith("\n") else "\n"
        return f"{reasoning}{before}{END_THINK}{'' if answer.startswith(chr(10)) else chr(10) * 2}{answer}"
    written = content.rpartition(END_THINK)[0]
    if answer.startswith(written + END_THINK):  # the template shows the answer as it is
        return answer
    return (written.removeprefix(supplied) if written.startswith(supplied) else written.removeprefix(THINK)) + END_THINK + answer


def marked_places(
    template: Template, messages: Sequence[Message], whole: str, encoded: Encoded, tools: Tools = None, only_last: bool = False
) -> Places:
    """The template's own marks, less what the generation prompt supplies and what follows the end token."""
    end_text = template.shape.end
    prompts = [_prompt_end(template, messages[:turn], whole, tools) for turn in answers_of(messages)]
    places = []
    for start, end in _marked_ranges(encoded, len(whole)):
        begin = max((at for at in prompts if start < at <= end), default=start)
        text_end = whole.rfind(end_text, begin, end) if end_text else -1
        # Marks may take in what follows the end token of the last turn (Phi-3's token of its own that ends the chat).
        if text_end >= 0 and whole[text_end + len(end_text) : end].strip() in ("", template.shape.trailer.strip()):
            places.append(Place(begin, text_end, text_end + len(end_text)))
        else:
            places.append(Place(begin, end, end))
    if only_last:
        places = [place for place in places if 0 < prompts[-1] <= place.start] or places[-1:]
    return Places(tuple(places), whole)


def _prompt_end(template: Template, before: Sequence[Message], whole: str, tools: Tools) -> int:
    """Where in `whole` the generation prompt after `before` ends, or what of it the chat has too; 0 where it is not to be found."""
    prompt = template.text(before, prompt=True, tools=tools)
    if not whole.startswith(prompt) and template.shape.header is not None:
        prompt = template.text(before, tools=tools) + template.shape.header
    return len(prompt) if whole.startswith(prompt) else 0


def _marked_ranges(encoded: Encoded, num_characters: int) -> list[tuple[int, int]]:
    """Characters [start, end) of each run of marked tokens."""
    assert encoded.marks is not None
    edges = np.flatnonzero(np.diff(np.concatenate(([False], encoded.marks, [False])).astype(np.int8))).tolist()
    bounds = [*encoded.starts.tolist(), num_characters]
    return [(bounds[a], bounds[b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def closed_for_it(think: tuple[str, str], message: Message, said: str) -> bool:
    """Whether the template writes the end of a think block into `said`, the place of an answer whose text is reasoning without an end."""
    opening, closing = think
    content = str(message.get("content", ""))
    return content.lstrip().startswith(opening) and closing not in content and closing in said and not message.get("reasoning_content")


def without_end(place: Place, message: Message, whole: str) -> Place:
    """The place of an answer that was cut: without its end token, without the end of its reasoning where it did not get beyond that, and
    without calls of tools, since how the template ends a call that the target did not end is nothing that it wrote."""
    if calls := message.get("tool_calls"):
        name = str((calls[0].get("function") or calls[0]).get("name", ""))
        at = whole.find(name, place.start, place.text_end)
        return Place(place.start, at, at) if at >= 0 else Place(place.start, place.start, place.start)
    reasoning = str(message.get("reasoning_content", "")).strip()
    if reasoning and not message.get("content"):
        at = whole.rfind(reasoning, place.start, place.text_end)
        if at >= 0:
            return Place(place.start, at + len(reasoning), at + len(reasoning))
    return replace(place, end=place.text_end)


def without_reasoning(template: Template, whole: str, places: Sequence[Place]) -> tuple[Place, ...]:
    """The places less reasoning, its marks, and the white space after them."""
    return tuple(piece for place in places for piece in _pieces(template.shape.think, whole, place))


def _pieces(think: tuple[str, str], whole: str, place: Place) -> list[Place]:
    opening, closing = think
    pieces, at = [], place.start
    while (close := whole.find(closing, at, place.text_end)) >= 0:
        begin = whole.find(opening, at, close)
        if begin < 0:
            if at > place.start or not whole[: place.start].rstrip().endswith(opening):
                break
            begin = at  # the generation prompt has opened it
        pieces.append(Place(at, begin, begin))
        at = close + len(closing)
        while at < place.text_end and whole[at].isspace():
            at += 1
    if (left_open := _left_open(think, whole, place, at)) is not None:
        pieces.append(Place(at, left_open, left_open))
        at = place.text_end
    return [*pieces, Place(at, place.text_end, place.end)]


def _left_open(think: tuple[str, str], whole: str, place: Place, at: int) -> int | None:
    """Where from `at` on reasoning begins that the place does not close, as in an answer that was cut; None where none does."""
    opening, closing = think
    if whole.find(closing, at, place.text_end) >= 0:
        return None
    if at == place.start and whole[:at].rstrip().endswith(opening):
        return at
    begin = at + len(whole[at : place.text_end]) - len(whole[at : place.text_end].lstrip())
    return begin if whole.startswith(opening, begin, place.text_end) else None
