"""Answers of a target in this process: transformers' batched generation, with sampling that belongs to the row.

Greedy, or by the Gumbel-max form of sampling: the token is the argmax of log p plus noise, which has the distribution p. The noise comes
from a generator a row and turn, so an answer does not depend on which rows share its batch. What cannot be avoided: padding and the
shape of a batch change the last bits of the logits, and where two tokens are that close the answer can part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from pipeline.config.regenerate import RegenerateSection
from pipeline.corpus.chat import TEMPLATE_ERROR, prompt_ids, render
from pipeline.corpus.places import THINKING_CUT
from pipeline.corpus.rows import Message, Unusable, shown
from pipeline.corpus.turns import Template
from pipeline.errors import TargetError
from pipeline.regenerate.conversation import Answer, Chat
from pipeline.regenerate.journal import Ended
from pipeline.regenerate.prompts import Prompt
from pipeline.target.load import Target

INCOMPLETE = "\ufffd"  # what a decoder puts for a character whose last bytes are missing


@dataclass(frozen=True)
class Answerer:
    """A whole target with its template. `reads_reasoning`: the template renders `reasoning_content`."""

    target: Target
    template: Template
    stop_ids: tuple[int, ...]
    reads_reasoning: bool
    section: RegenerateSection

    def answer(self, prompts: Sequence[Prompt]) -> list[Ended]:
        """Answer all turns of `prompts`, a turn of all at a time; how each ended, in their order."""
        chats = [Chat(prompt, self.section.keep_reasoning) for prompt in prompts]
        ended: dict[int, Ended] = {}
        while open_chats := [chat for chat in chats if chat.prompt.index not in ended]:
            asked: list[tuple[Chat, list[int]]] = []
            for chat in open_chats:
                ids = self._prompt(chat)
                if isinstance(ids, Ended):
                    ended[chat.prompt.index] = ids
                else:
                    asked.append((chat, ids))
            for (chat, ids), new in zip(asked, self._generate(asked), strict=True):
                if (over := self._take(chat, ids, new)) is not None:
                    ended[chat.prompt.index] = over
        return [ended[prompt.index] for prompt in prompts]

    def _prompt(self, chat: Chat) -> list[int] | Ended:
        """The ids of what the chat asks now; or its end, where that cannot be rendered or leaves no room."""
        try:
            ids: list[int] = prompt_ids(self.template, chat.messages, chat.prompt.tools).tolist()
        except Exception as error:  # a template is code of its author's: it can raise anything
            return chat.fail(TEMPLATE_ERROR, f"{type(error).__name__}: {shown(str(error))}")
        positions, new = self.target.max_positions, self.section.max_new_tokens
        if positions is not None and len(ids) + new > positions:
            return chat.fail("prompt too long", f"{len(ids)} tokens and {new} for the answer; the target has {positions} positions")
        return ids

    def _generate(self, asked: Sequence[tuple[Chat, list[int]]]) -> list[list[int]]:
        """What the target writes after each prompt, its first stop token included."""
        if not asked:
            return []
        model, section = self.target.model, self.section
        longest = max(len(ids) for _, ids in asked)
        padding = [longest - len(ids) for _, ids in asked]
        rows = [[self.stop_ids[0]] * pad + ids for pad, (_, ids) in zip(padding, asked, strict=True)]
        seen = [[0] * pad + [1] * (longest - pad) for pad in padding]
        try:
            with torch.inference_mode():
                out = model.generate(
                    input_ids=torch.tensor(rows, device=self.target.device),
                    attention_mask=torch.tensor(seen, device=self.target.device),
                    generation_config=GenerationConfig(
                        max_new_tokens=section.max_new_tokens,
                        do_sample=False,
                        eos_token_id=list(self.stop_ids),
                        pad_token_id=self.stop_ids[0],
                    ),
                    logits_processor=self._sampling([chat for chat, _ in asked]),
                )
        except torch.OutOfMemoryError as error:
            raise TargetError(
                f"{len(asked)} chats of up to {longest} tokens and {section.max_new_tokens} new ones do not fit on {self.target.device}: "
                f"lower regenerate.batch_size ({section.batch_size}). ({error})"
            ) from error
        return [self._cut(row) for row in out[:, longest:].tolist()]

    def _cut(self, ids: list[int]) -> list[int]:
        end = next((place + 1 for place, token in enumerate(ids) if token in self.stop_ids), len(ids))
        return ids[:end]

    def _sampling(self, chats: Sequence[Chat]) -> LogitsProcessorList:
        section = self.section
        processors = LogitsProcessorList()
        if section.temperature == 0:
            return processors
        processors.append(TemperatureLogitsWarper(section.temperature))
        if section.top_k is not None:
            processors.append(TopKLogitsWarper(section.top_k))
        if section.top_p < 1:
            processors.append(TopPLogitsWarper(section.top_p))
        places = [(section.seed, chat.prompt.index, chat.turn) for chat in chats]
        processors.append(_RowNoise([_generator(place, self.target.device) for place in places]))
        return processors

    def _take(self, chat: Chat, asked: list[int], new: list[int]) -> Ended | None:
        tokenizer = self.template.tokenizer
        stopped = bool(new) and new[-1] in self.stop_ids
        kept = new
        text = tokenizer.decode(kept, skip_special_tokens=True)
        while not stopped and kept and text.endswith(INCOMPLETE):
            kept = kept[:-1]
            text = tokenizer.decode(kept, skip_special_tokens=True)
        forms = self._forms(text, self._thinks(asked))
        if not forms:
            return chat.fail(THINKING_CUT, f"{len(new)} tokens, and no answer among them; see regenerate.max_new_tokens")
        exact = [form for form in forms if self._is_exact(chat, form, asked + kept)]
        message = (exact or forms)[0]
        return chat.take(Answer(message, "stop" if stopped else "length", len(new), bool(exact)))

    def _thinks(self, asked: list[int]) -> bool:
        """Whether the generation prompt itself opens the thinking."""
        return bool(self.template.tokenizer.decode(asked[-4:]).rstrip().endswith(self.template.shape.think[0]))

    def _forms(self, text: str, thinks: bool) -> list[Message]:
        """The assistant's message, thinking apart where the template has a place for it, with and without the line ends at its marks: some
        templates write their own. Nothing for thinking that has no end."""
        if not self.reads_reasoning:
            return [{"role": "assistant", "content": text}]
        begin_mark, end_mark = self.template.shape.think
        before, end, content = text.partition(end_mark)
        if end:
            reasoning = before.lstrip("\n").removeprefix(begin_mark).removeprefix("\n")
            plain: Message = {"role": "assistant", "content": content.lstrip("\n"), "reasoning_content": reasoning.strip("\n")}
            return [plain, {"role": "assistant", "content": content, "reasoning_content": reasoning}]
        if thinks or text.lstrip().startswith(begin_mark):
            return []
        return [{"role": "assistant", "content": text}]

    def _is_exact(self, chat: Chat, message: Message, written: list[int]) -> bool:
        """Whether the corpus's render of the chat with this answer begins with the tokens that were read and written."""
        rendered = render(self.template, [*chat.messages, message], tools=chat.prompt.tools)
        return not isinstance(rendered, Unusable) and bool(rendered.input_ids[: len(written)].tolist() == written)


class _RowNoise(LogitsProcessor):
    """Gumbel noise, a generator a row: the argmax after it is a sample."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        noise = torch.empty_like(scores, dtype=torch.float32)
        for row, generator in zip(noise, self._generators, strict=True):
            row.exponential_(generator=generator)
        return scores.float() - noise.log()


def _generator(place: tuple[int, int, int], device: torch.device) -> torch.Generator:
    """Random numbers of one seed, row and turn; CPU and GPU have different ones."""
    digest = blake2b("/".join(map(str, place)).encode(), digest_size=8).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "little") >> 1)


def reads_reasoning(template: Template) -> bool:
    """Whether the template renders an answer's `reasoning_content`."""
    question: Message = {"role": "user", "content": "Is it late?"}
    answer: Message = {"role": "assistant", "content": "Yes7Indeed", "reasoning_content": "It8Depends"}
    try:
        return "It8Depends" in template.text(template.settled([question, answer]))
    except Exception:  # it asks for something else, and is not known to read it
        return False


def stop_ids_of(target: Any, tokenizer: Any) -> tuple[int, ...]:
    """Tokens that end an answer: those of the target's generation config, and the tokenizer's own."""
    ends: Any = target.model.generation_config.eos_token_id
    found = [*(ends if isinstance(ends, list) else [ends]), tokenizer.eos_token_id]
    ids = tuple(dict.fromkeys(int(end) for end in found if end is not None))
    if not ids:
        raise TargetError("neither the target's generation config nor its tokenizer names a token that ends an answer.")
    return ids
