"""Where a template puts what the assistant said: character ranges in the render of a whole chat.

Without generation marks in the template, the place of a turn follows from two more renders. The messages before it with
their generation prompt give the place where the target starts to write; the messages up to it give the place where it ends.
Both must be found again in the whole render, letter by letter; where they are not, the template rewrites its history
(Qwen3 drops the thinking of earlier turns), and only the last turn, which it cannot rewrite, is supervised.

With marks, the marks say what is the assistant's. What the generation prompt supplies, and the newline after the end
token, are taken off also there: the target emits neither.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.corpus.rows import Message, Unusable

MASK_RULES = 1  # raise it when the same chat and template would get another mask

NOT_LOCATED = "turn not located"


@dataclass(frozen=True, slots=True)
class Encoded:
    """`input_ids` int32 [S]; `starts` int64 [S], each token's first character; `marks` bool [S], generation marks, if there are any."""

    input_ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    marks: NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True)
class Template:
    """A tokenizer with the arguments of its chat template, and what the template showed when it was tried.

    `marked`: it has generation marks. `end` is the text from an answer's last character to the end of its end token, "" when no
    special token ends an answer; `trailer` is what follows in the same turn, such as a newline. `opening` is the header
    of an answer where the template writes one that no generation prompt gives.
    """

    tokenizer: Any
    arguments: Mapping[str, Any]
    marked: bool
    opening: str = ""
    end: str = ""
    trailer: str = ""

    def text(self, messages: Sequence[Message], prompt: bool = False) -> str:
        """The render of `messages`, with the generation prompt after them if asked."""
        text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=prompt, **self.arguments)
        return str(text)

    def encode(self, whole: str) -> Encoded:
        """Ids and places of all tokens of the whole render."""
        return _encoded(
            self.tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, return_attention_mask=False, verbose=False)
        )

    def encode_marked(self, messages: Sequence[Message]) -> Encoded:
        """The same from the messages, with the tokens that the template's generation marks cover."""
        options = {"return_offsets_mapping": True, "return_attention_mask": False, "verbose": False}
        return _encoded(
            self.tokenizer.apply_chat_template(
                list(messages),
                tokenize=True,
                return_dict=True,
                return_assistant_tokens_mask=True,
                tokenizer_kwargs=options,
                **self.arguments,
            )
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Characters [start, end) of the whole render are one answer and its end token; the end token's are [text_end, end)."""

    start: int
    text_end: int
    end: int


@dataclass(frozen=True, slots=True)
class Places:
    places: tuple[Place, ...]
    last_turn_only: bool = False


def find_places(template: Template, messages: Sequence[Message], whole: str) -> Places | Unusable:
    """The places of all assistant turns, or of the last alone where the template rewrites earlier ones."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    found = [_place(template, messages, i, whole) for i in turns]
    if isinstance(found[-1], str):
        return Unusable(NOT_LOCATED, f"message {turns[-1]}: {found[-1]}")
    places = tuple(place for place in found if isinstance(place, Place))
    if len(places) < len(found):
        return Places((found[-1],), last_turn_only=True)
    return Places(places)


def _place(template: Template, messages: Sequence[Message], turn: int, whole: str) -> Place | str:
    """The place of message `turn`, or what the renders disagree about."""
    prompt = template.text(messages[:turn], prompt=True) + template.opening
    after = whole if turn == len(messages) - 1 else template.text(messages[: turn + 1])
    if not after.startswith(prompt):
        return "the chat up to here does not begin with its generation prompt"
    if not after.endswith(template.end + template.trailer):
        return f"the turn does not end with {template.end + template.trailer!r}, as a plain answer does"
    end = len(after) - len(template.trailer)
    if end < len(prompt) or not whole.startswith(after[:end]):
        return "later messages change how the template renders it"
    return Place(len(prompt), max(len(prompt), end - len(template.end)), end)


def marked_places(template: Template, messages: Sequence[Message], whole: str, encoded: Encoded) -> Places:
    """The template's own marks, less what the generation prompt supplies and what follows the end token."""
    prompts = []
    for i, message in enumerate(messages):
        if message["role"] == "assistant" and whole.startswith(prompt := template.text(messages[:i], prompt=True)):
            prompts.append(len(prompt))
    places = []
    for start, end in _marked_ranges(encoded, len(whole)):
        begin = max((at for at in prompts if start < at <= end), default=start)
        text_end = whole.rfind(template.end, begin, end) if template.end else -1
        if text_end >= 0 and not whole[text_end + len(template.end) : end].strip():
            places.append(Place(begin, text_end, text_end + len(template.end)))
        else:
            places.append(Place(begin, end, end))
    return Places(tuple(places))


def _marked_ranges(encoded: Encoded, num_characters: int) -> list[tuple[int, int]]:
    """Characters [start, end) of each run of marked tokens."""
    assert encoded.marks is not None
    edges = np.flatnonzero(np.diff(np.concatenate(([False], encoded.marks, [False])).astype(np.int8))).tolist()
    bounds = [*encoded.starts.tolist(), num_characters]
    return [(bounds[a], bounds[b]) for a, b in zip(edges[::2], edges[1::2], strict=True)]


def _encoded(found: Mapping[str, Any]) -> Encoded:
    starts, ends = np.asarray(found["offset_mapping"], dtype=np.int64).reshape(-1, 2).T
    # Some tokenizers trim white space off the offsets, and leave a token of nothing else at its end: it starts where the one before ended.
    before = np.concatenate(([0], np.maximum.accumulate(ends)[:-1])) if len(ends) else ends
    starts = np.where(starts == ends, np.minimum(starts, before), starts)
    marks = np.asarray(found["assistant_masks"], dtype=np.bool_) if "assistant_masks" in found else None
    return Encoded(np.asarray(found["input_ids"], dtype=np.int32), starts, marks)
