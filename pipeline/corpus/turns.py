"""A chat template with its tokenizer: renders of whole chats, their tokens, and what the template showed when it was tried.

transformers' `apply_chat_template` is what defines a render. Here it is taken apart into the same steps (the compiled template, the
tokenizer's backend), since it spends most of its time around them, and has no way to fix the date that a template asks for.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from pipeline.corpus.messages import Message
from pipeline.errors import ConfigError, TemplateError

MASK_RULES = 2  # raise it when the same chat and template would get another mask

DATE = "strftime_now"
"""The template argument with the date of templates that write today's."""
Tools: TypeAlias = Sequence[Mapping[str, Any]] | None
_GENERATION_MARK = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


@dataclass(frozen=True, slots=True)
class Encoded:
    """`input_ids` int32 [S]; `starts` int64 [S], each token's first character; `marks` bool [S], generation marks, if there are any."""

    input_ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    marks: NDArray[np.bool_] | None = None


@dataclass(frozen=True, slots=True)
class Shape:
    """How a template writes answers, as it showed on a plain chat.

    `end` is the text from an answer's last character to the end of its end token, "" when no special token ends an answer; `trailer`
    is what follows in the same turn, such as a newline. `opening` is the header of an answer where the template writes one
    that no generation prompt gives. `header` is what stands before an answer in a chat and in the generation prompt alike,
    where the two part at a think block (`places.py`); None where the prompt begins the answer as the chat has it. `text_arguments`:
    the template wants the arguments of tool calls as a string of JSON. `think` are the marks around reasoning.
    """

    opening: str = ""
    end: str = ""
    trailer: str = ""
    header: str | None = None
    text_arguments: bool = False
    think: tuple[str, str] = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class Template:
    """A tokenizer with the arguments of its chat template. `marked`: it has generation marks. `before_text`: ids that the tokenizer puts
    before a plain text. Made by `open_template`."""

    tokenizer: Any
    arguments: Mapping[str, Any]
    marked: bool
    before_text: tuple[int, ...] = ()
    shape: Shape = field(default_factory=Shape)

    def text(self, messages: Sequence[Message], prompt: bool = False, tools: Tools = None) -> str:
        """The render of `messages`, with the generation prompt after them if asked."""
        context = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt, **self.arguments}
        return str(self._compiled(tools).render(context))

    def encode(self, whole: str) -> Encoded:
        """Ids and places of all tokens of the whole render."""
        return self._encoded(whole)[0]

    def encode_marked(self, messages: Sequence[Message], tools: Tools = None) -> tuple[str, Encoded]:
        """The render of a marked template, and its tokens with those that overlap what its generation marks enclose."""
        from transformers.utils.chat_template_utils import _render_with_assistant_indices  # noqa: PLC0415 - workers start without it

        whole, marked = _render_with_assistant_indices(self._compiled(tools), list(messages), tools, None, False, **self.arguments)
        encoded, ends = self._encoded(whole)
        marks = np.zeros(len(ends), dtype=np.bool_)
        for start, end in marked:
            marks |= (ends > start) & (encoded.starts < end)
        return whole, Encoded(encoded.input_ids, encoded.starts, marks)

    def encode_text(self, text: str) -> NDArray[np.int32]:
        """Ids int32 [S] of a plain text, without special tokens. Raises `UnicodeEncodeError` for half characters."""
        text.encode("utf-8")
        return np.array(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)

    def settled(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as the template wants them: reasoning under all its names, arguments of tool calls in the form that it reads."""
        from transformers.utils.chat_template_utils import _alias_reasoning_fields  # noqa: PLC0415 - as above

        messages = _alias_reasoning_fields(messages)
        return [_with_text_arguments(m) if self.shape.text_arguments and "tool_calls" in m else m for m in messages]

    def _compiled(self, tools: Tools) -> Any:
        from transformers.utils.chat_template_utils import _compile_jinja_template  # noqa: PLC0415 - as above

        return _compile_jinja_template(self.tokenizer.get_chat_template(tools=tools))  # which keeps what it compiled

    def _encoded(self, whole: str) -> tuple[Encoded, NDArray[np.int64]]:
        found = self.tokenizer.backend_tokenizer.encode(whole, add_special_tokens=False)
        ids = np.array(found.ids, dtype=np.int32)
        starts, ends = np.array(found.offsets, dtype=np.int64).reshape(-1, 2).T
        blank = starts == ends
        if blank.any():
            # Some tokenizers trim white space off the offsets, and leave a token of nothing else at its end: it starts where the one
            # before ended.
            before = np.concatenate(([0], np.maximum.accumulate(ends)[:-1]))
            starts = np.where(blank, np.minimum(starts, before), starts)
        return Encoded(ids, starts), ends


def open_template(tokenizer: Any, arguments: Mapping[str, Any]) -> Template:
    """The tokenizer's chat template with `arguments`; `strftime_now` is a date, and stands for today in templates that ask for it."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    day = arguments.get(DATE)
    if day is not None:
        try:
            day = date.fromisoformat(str(day))
        except ValueError:
            raise ConfigError(f"model.target.chat_template_kwargs.{DATE} is {day!r}, expected a date such as 2025-06-30") from None
    given = {**tokenizer.special_tokens_map, **arguments, DATE: Today(day)}
    whole, bare = (backend.encode("a", add_special_tokens=special).ids for special in (True, False))
    at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    return Template(tokenizer, given, _GENERATION_MARK.search(template_text(tokenizer)) is not None, tuple(whole[:at]))


def template_text(tokenizer: Any) -> str:
    """The chat template; "" where there is none, as plain texts and token ids need none."""
    return str(tokenizer.get_chat_template()) if tokenizer.chat_template else ""


@dataclass(frozen=True, slots=True)
class Today:
    """What a template calls as `strftime_now`. A class, so that it goes to workers with the template."""

    day: date | None

    def __call__(self, form: str) -> str:
        if self.day is None:
            raise TemplateError(
                "the chat template writes today's date, so the same chat would be another one tomorrow. Fix it with "
                f"model.target.chat_template_kwargs.{DATE}=2025-06-30, or give the template the argument that it takes for the date."
            )
        return self.day.strftime(form)


def _with_text_arguments(message: Message) -> Message:
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), dict):
            call = {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}  # noqa: PLW2901
        calls.append(call)
    return {**message, "tool_calls": calls}
