"""The tokenizer, its chat template, and what a chat becomes: token ids and the spans that are supervised.

Ids come from one direct render of the whole chat, and equal `apply_chat_template(messages, tokenize=True, **arguments)`, but for
templates whose generation prompt says something else than their render. What is supervised is what the target would have to
emit: an answer's text and the token that ends it, not the newline that a template writes after it, and not what the
generation prompt supplies. `places.py` finds where that is.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pipeline.config.schema import TargetSection
from pipeline.corpus.messages import Message, Unusable, shown
from pipeline.corpus.places import (
    END_THINK,
    ONLY_THINK,
    THINK,
    THINKING_CUT,
    Place,
    Places,
    answers_of,
    closed_for_it,
    find_places,
    marked_places,
    without_end,
    without_reasoning,
)
from pipeline.corpus.turns import MASK_RULES, Shape, Template, Tools, open_template
from pipeline.errors import ConfigError, TargetError, TemplateError

__all__ = ["MASK_RULES", "Rendered", "Template", "load_tokenizer", "prompt_ids", "read_template", "render"]

# Chats that a template is tried on. Some templates refuse a system message, some want one.
_QUESTION: Message = {"role": "user", "content": "Is it late?"}
_OPENINGS: tuple[list[Message], ...] = ([_QUESTION], [{"role": "system", "content": "Be brief."}, _QUESTION])
_ANSWER, _REASONING = "Yes7Indeed", "Nine8Thoughts"
_MARK = re.compile(r"<[^<>]*>|\[[^\[\]]*\]")
TEMPLATE_ERROR = "template error"
LOST_CALLS = "tool calls left out"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat as the target reads it: `input_ids` int32 [S]; `spans` int32 [n, 2], rows (start, length) of supervised tokens, ascending,
    disjoint and not touching. `last_turn_only`: the template rewrites earlier turns, so only the last one is supervised.
    `after_prompt`: the last turn is read after the generation prompt, which the template's own render contradicts."""

    input_ids: NDArray[np.int32]
    spans: NDArray[np.int32]
    last_turn_only: bool = False
    after_prompt: bool = False

    @property
    def num_supervised(self) -> int:
        return int(self.spans[:, 1].sum())

    def prefix(self, max_tokens: int) -> Self:
        """The first `max_tokens` tokens; spans are cut with them."""
        spans = self.spans[self.spans[:, 0] < max_tokens].copy()
        spans[:, 1] = np.minimum(spans[:, 1], max_tokens - spans[:, 0])
        return replace(self, input_ids=self.input_ids[:max_tokens], spans=spans)


def load_tokenizer(section: TargetSection) -> Any:
    """The target's fast tokenizer, with the template of `section.chat_template` in place of its own where one is given.

    Raises `TargetError` when there is no tokenizer or only a slow one, `TemplateError` when that file cannot be read.
    """
    from transformers import AutoTokenizer  # noqa: PLC0415 - it brings torch, which workers do without

    path = str(section.path)
    if path.startswith((".", "/", "~")):
        path = str(Path(path).expanduser())
        if not Path(path).is_dir():
            raise TargetError(f"model.target.path {section.path} is not a folder; expected one with the target's tokenizer in it.")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, revision=section.revision, trust_remote_code=section.trust_remote_code)
    except Exception as error:  # what a foreign folder can do wrong has no common type
        raise TargetError(
            f"the tokenizer of {section.path} cannot be loaded: {type(error).__name__}: {shown(str(error))}. model.target.path must "
            f"name a folder with tokenizer.json, or a hub id that can be reached."
        ) from error
    if not getattr(tokenizer, "is_fast", False):
        raise TargetError(
            f"the tokenizer of {section.path} is {type(tokenizer).__name__}, which cannot say which characters a token covers. "
            f"A folder with tokenizer.json is needed."
        )
    if section.chat_template is not None:
        try:
            tokenizer.chat_template = Path(section.chat_template).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TemplateError(f"model.target.chat_template {section.chat_template} cannot be read: {error}") from error
    return tokenizer


def load_saved_tokenizer(folder: Path) -> Any:
    """The fast tokenizer that capture saved in a cache. Nothing that the folder may bring is executed, whatever its files ask for."""
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - as above

    try:
        # Of the class itself, and not of the one that the files name: custom code is never looked for.
        return PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise TargetError(f"the tokenizer in {folder} cannot be loaded: {type(error).__name__}: {shown(str(error))}.") from error


def read_template(tokenizer: Any, arguments: Mapping[str, Any]) -> Template:
    """Try the chat template on plain chats, and see how it opens and ends an answer.

    Raises `ConfigError` for an argument that is not the template's, `TemplateError` for one that renders no chat or is not there.
    """
    if not tokenizer.chat_template:
        raise TemplateError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template; name a file with one in model.target.chat_template."
        )
    own = set(inspect.signature(tokenizer.apply_chat_template).parameters) - {"kwargs"}
    if taken := sorted(own & arguments.keys()):
        raise ConfigError(
            f"model.target.chat_template_kwargs: {', '.join(taken)} cannot be set; give only what the chat template itself reads."
        )
    plain = open_template(tokenizer, arguments)
    failure: Exception | None = None
    for opening in _OPENINGS:
        try:
            whole = plain.text([*opening, {"role": "assistant", "content": _ANSWER}])
            prompt, unprompted = plain.text(opening, prompt=True), plain.text(opening)
        except TemplateError:
            raise
        except Exception as error:  # a template is code of its author's: it can raise anything
            failure = failure or error
            continue
        return _with_shape(plain, opening, whole, prompt, unprompted)
    raise TemplateError(
        f"the chat template renders neither a question with an answer nor one with a system message before it: "
        f"{type(failure).__name__}: {shown(str(failure))}. Check model.target.chat_template and chat_template_kwargs."
    ) from failure


def _with_shape(template: Template, question: list[Message], whole: str, prompt: str, unprompted: str) -> Template:
    at = whole.rfind(_ANSWER)
    if at < 0:
        raise TemplateError("the chat template leaves out the assistant's text. Check model.target.chat_template.")
    tail = whole[at + len(_ANSWER) :]
    end = _first_special(template.tokenizer, tail)
    opening = whole[len(prompt) : at] if prompt == unprompted and whole.startswith(prompt) else ""
    shape = Shape(
        opening=opening if opening.strip() else "",
        end=tail[:end],
        trailer=tail[end:],
        header=_header(prompt, whole[:at], unprompted),
        text_arguments=not _renders_call(template, question, {"city": "Bonn"}) and _renders_call(template, question, '{"city": "Bonn"}'),
        think=_think_marks(template, question, prompt, unprompted),
    )
    return replace(template, shape=shape)


def _header(prompt: str, before_answer: str, unprompted: str) -> str | None:
    """What a generation prompt and a chat have alike before an answer, where they part at a think block and nowhere else."""
    if before_answer.startswith(prompt) or not (prompt.startswith(unprompted) and before_answer.startswith(unprompted)):
        return None
    common = _alike(prompt, before_answer)
    if not (ONLY_THINK.fullmatch(prompt, common) and ONLY_THINK.fullmatch(before_answer, common)):
        return None
    return prompt[len(unprompted) : common]


def _alike(a: str, b: str) -> int:
    """How many characters the two begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _renders_call(template: Template, question: list[Message], arguments: object) -> bool:
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    try:
        return "Bonn" in template.text([*question, {"role": "assistant", "content": "", "tool_calls": [call]}])
    except Exception:  # as above
        return False


def _think_marks(template: Template, question: list[Message], prompt: str, unprompted: str) -> tuple[str, str]:
    """The marks that the template writes around reasoning; the commonest ones where it shows none."""
    answer = {"role": "assistant", "content": _ANSWER, **dict.fromkeys(("reasoning_content", "thinking"), _REASONING)}
    try:
        whole = template.text([*question, answer])
    except Exception:  # as above
        return THINK, END_THINK
    at = whole.rfind(_REASONING)
    end = whole.find(_ANSWER, at)
    if at < len(unprompted) or end < 0:
        return THINK, END_THINK
    before, supplied = whole[len(unprompted) : at].rstrip(), prompt[len(unprompted) :].rstrip()
    own = before[_alike(before, supplied) :].strip()
    closing = _MARK.match(whole[at + len(_REASONING) : end].lstrip())
    opening = own or ((marks := _MARK.findall(before)) and marks[-1])
    return (opening, closing[0]) if opening and closing else (THINK, END_THINK)


def _first_special(tokenizer: Any, tail: str) -> int:
    """Where the first special token in `tail` ends, in characters; 0 when there is none."""
    # Some tokenizers count runs of white space among their added tokens.
    special = {i: token.content for i, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    special[tokenizer.eos_token_id] = tokenizer.eos_token
    for token_id in tokenizer(tail, add_special_tokens=False)["input_ids"]:
        if (text := special.get(token_id)) and (at := tail.find(text)) >= 0:
            return at + len(text)
    return 0


def prompt_ids(template: Template, messages: Sequence[Message], tools: Tools = None) -> NDArray[np.int32]:
    """Ids int32 [S] of `messages` and the generation prompt after them: what the target is given to answer."""
    return template.encode(template.text(template.settled(messages), prompt=True, tools=tools)).input_ids


@dataclass(frozen=True, slots=True)
class Supervision:
    """What of a chat is supervised. `only_last`: no answer but the last. `mask_reasoning`: not what the target thinks before it answers."""

    only_last: bool = False
    mask_reasoning: bool = False


EVERYTHING = Supervision()


def render(
    template: Template, messages: Sequence[Message], cut_short: bool = False, tools: Tools = None, supervision: Supervision = EVERYTHING
) -> Rendered | Unusable:
    """One chat to ids and supervised spans; or why the template does not allow it.

    `cut_short`: the last answer was cut at a token limit, so the token that the template puts after it is not supervised.
    """
    try:
        messages = template.settled(messages)
        if template.marked:
            whole, encoded = template.encode_marked(messages, tools)
            found: Places | Unusable = marked_places(template, messages, whole, encoded, tools, supervision.only_last)
        else:
            found = find_places(template, messages, tools, supervision.only_last)
        if isinstance(found, Unusable):
            return found
        if lost := _lost_calls(messages, found.whole):
            return Unusable(LOST_CALLS, f"the chat template does not show a call of {shown(repr(lost))}")
        found.whole.encode("utf-8")
        if not template.marked:
            encoded = template.encode(found.whole)
    except UnicodeEncodeError as error:
        return Unusable("invalid text", f"half of a surrogate pair: {shown(error.object[error.start : error.end])}")
    except Exception as error:  # a template is code of its author's: it can raise anything
        return Unusable(TEMPLATE_ERROR, f"{type(error).__name__}: {shown(str(error))}")
    places = found.places
    if cut_short and places:
        answer = messages[answers_of(messages)[-1]]
        if closed_for_it(template.shape.think, answer, found.whole[places[-1].start : places[-1].text_end]):
            return Unusable(THINKING_CUT, "the chat template closes a think block before it, which the target did not")
        places = (*places[:-1], without_end(places[-1], answer, found.whole))
    if supervision.mask_reasoning:
        places = without_reasoning(template, found.whole, places)
    return Rendered(encoded.input_ids, _spans(places, encoded.starts), found.last_turn_only, found.after_prompt)


def _lost_calls(messages: Sequence[Message], whole: str) -> str | None:
    """A function that the chat calls and the render does not name: the answer would be an empty one."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    names = [str((call.get("function") or call).get("name", "")) for call in calls]
    return next((name for name in names if name not in whole), None)


def _spans(places: Sequence[Place], starts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Tokens that start inside a place, as int32 [n, 2] rows (start, length).

    A token that reaches in from the left holds characters that the generation prompt supplied (an answer's leading newline
    merged with the header's): the target is never asked for it. One that reaches out on the right is the answer's.
    """
    mask = np.zeros(len(starts), dtype=np.bool_)
    for place in places:
        mask |= (starts >= place.start) & (starts < place.end)
    return spans_of(mask)


def spans_of(mask: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Runs of true values in `mask` bool [S], as int32 [n, 2] rows (start, length)."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    starts, ends = edges[::2], edges[1::2]
    return np.stack((starts, ends - starts), axis=1).astype(np.int32)
