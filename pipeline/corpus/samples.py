"""A row to its samples: one, or one for each answer, or one for each stretch of a long text; or why it gives none."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from pipeline.corpus.chat import Rendered, Supervision, Template, render, spans_of
from pipeline.corpus.messages import Message, Unusable, shown
from pipeline.corpus.places import answers_of
from pipeline.corpus.rows import Row
from pipeline.corpus.select import check_supervised, check_turns, split_of

LONGEST_OWN_ID = 200
TOO_LONG = "longer than max_tokens"
OUT_OF_RANGE = "token id out of range"
SPECIAL = ("truncated", "last_turn_only", "after_prompt", "answers_cut_short", "generated")
"""Kinds of samples that are counted; bit i of `Kept.flags` is kind i. generated: the row has a finish_reason, so a model wrote it."""
_PLACE_ID = re.compile(r"row-(?:[\w-]+-)?\d+-\d+(?:/\d+)?")


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides, besides the template, which samples a row gives. Lengths in tokens. As in `data` of the configuration."""

    max_tokens: int
    min_supervised: int
    heldout_fraction: float
    too_long: Literal["truncate", "drop"] = "truncate"
    loss_on: Literal["all_turns", "last_turn"] = "all_turns"
    one_sample_per_turn: bool = False
    mask_reasoning: bool = False

    @property
    def supervision(self) -> Supervision:
        return Supervision(self.one_sample_per_turn or self.loss_on == "last_turn", self.mask_reasoning)


@dataclass(slots=True)
class Account:
    """What became of the rows of a part: `rows` of them, those that gave no sample as (row, reason, detail), and pieces of other rows that
    gave none as (row, piece, reason, detail)."""

    rows: int = 0
    dropped: list[tuple[int, str, str]] = field(default_factory=list)
    left_out: list[tuple[int, int, str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Kept:
    """A sample before its id is known to be unique. `piece` counts the samples that its row could give, from 0."""

    row: int
    piece: int
    own_id: str | None
    split: str
    rendered: Rendered
    flags: int = 0


@dataclass(frozen=True, slots=True)
class Reader:
    """What makes samples of rows: the target's template with its tokenizer, and the rules."""

    template: Template
    rules: Rules

    def samples_of(self, row: Row, split: str, account: Account) -> list[Kept] | Unusable:
        """The samples of a row of `split`, or why it gives none; pieces that give none are listed in `account`."""
        if row.unusable is not None:
            return row.unusable
        pieces = list(self._pieces(row))
        whole = [piece.input_ids for piece in pieces if isinstance(piece, Rendered)] or [np.zeros(0, dtype=np.int32)]
        # All pieces of a row are on one side. Of a chat that is divided by its answers, the last piece has all of it.
        before = len(self.template.before_text)  # of every stretch of a text, so where stretches end has no say
        ids = np.concatenate([stretch[before:] for stretch in whole]) if row.text is not None else whole[-1]
        side = split_of(ids, split, self.rules.heldout_fraction)
        kept: list[Kept] = []
        failed: list[tuple[int, Unusable]] = []
        for number, piece in enumerate(pieces):
            rendered = piece if isinstance(piece, Unusable) else self._cut(piece)
            if isinstance(rendered, Unusable) or isinstance(piece, Unusable):
                failed.append((number, rendered))  # type: ignore[arg-type]
                continue
            cut_short = row.finish_reason == "length" and number == len(pieces) - 1
            truncated, generated = len(rendered.input_ids) < len(piece.input_ids), row.finish_reason is not None
            kinds = (truncated, piece.last_turn_only, piece.after_prompt, cut_short, generated)
            flags = sum(1 << bit for bit, kind in enumerate(kinds) if kind)
            kept.append(Kept(row.row, number, _usable_id(row.id), side, rendered, flags))
        if not kept:
            return failed[-1][1]
        account.left_out += [(row.row, number, unusable.reason, unusable.detail) for number, unusable in failed]
        return kept

    def _pieces(self, row: Row) -> Iterator[Rendered | Unusable]:
        if row.messages is not None:
            yield from self._answers(row, row.messages)
        elif row.text is not None:
            yield from self._stretches(row.text)
        elif row.input_ids is not None:
            yield self._given(row.input_ids, row.loss_mask)

    def _answers(self, row: Row, messages: list[Message]) -> Iterator[Rendered | Unusable]:
        if unusable := check_turns(messages):
            yield unusable
            return
        cut_short, turns = row.finish_reason == "length", answers_of(messages)
        for turn in turns[:-1] if self.rules.one_sample_per_turn else ():
            yield render(self.template, messages[: turn + 1], False, row.tools, self.rules.supervision)
        if self.rules.one_sample_per_turn:  # what follows the last answer is no context of it, and templates may rewrite for it
            messages = messages[: turns[-1] + 1]
        yield render(self.template, messages, cut_short, row.tools, self.rules.supervision)

    def _stretches(self, text: str) -> Iterator[Rendered | Unusable]:
        """A text in stretches of max_tokens, each after what the tokenizer puts before a text; all but the first token supervised."""
        before = np.array(self.template.before_text, dtype=np.int32)
        try:
            ids = self.template.encode_text(text)
        except UnicodeEncodeError as error:
            yield Unusable("invalid text", f"half of a surrogate pair: {shown(error.object[error.start : error.end])}")
            return
        room = max(1, self.rules.max_tokens - len(before))
        if len(ids) > room and self.rules.too_long == "drop":
            yield Unusable(TOO_LONG, f"{len(before) + len(ids)} of at most {self.rules.max_tokens} tokens")
            return
        for start in range(0, max(1, len(ids)), room):
            stretch = np.concatenate((before, ids[start : start + room]))
            yield Rendered(stretch, spans_of(np.arange(len(stretch)) >= max(1, len(before))))

    def _given(self, input_ids: list[int], loss_mask: list[bool] | None) -> Rendered | Unusable:
        if (largest := max(input_ids)) >= len(self.template.tokenizer):
            return Unusable(OUT_OF_RANGE, f"{largest}, and the tokenizer has {len(self.template.tokenizer)} ids")
        mask = np.arange(len(input_ids)) >= 1 if loss_mask is None else np.array(loss_mask, dtype=np.bool_)
        return Rendered(np.array(input_ids, dtype=np.int32), spans_of(mask))

    def _cut(self, whole: Rendered) -> Rendered | Unusable:
        """The sample as long as it may be."""
        rules = self.rules
        too_long = len(whole.input_ids) > rules.max_tokens
        if too_long and rules.too_long == "drop":
            return Unusable(TOO_LONG, f"{len(whole.input_ids)} of at most {rules.max_tokens} tokens")
        rendered = whole.prefix(rules.max_tokens) if too_long else whole
        if unusable := check_supervised(rendered.num_supervised, whole.num_supervised, rules.min_supervised):
            return unusable
        return rendered


def _usable_id(own_id: str | None) -> str | None:
    """A row's own id, unless it is empty, very long, no valid text, or of the form that ids by place have."""
    if not own_id or len(own_id) > LONGEST_OWN_ID or _PLACE_ID.fullmatch(own_id):
        return None
    try:
        own_id.encode()
    except UnicodeEncodeError:
        return None
    return own_id
