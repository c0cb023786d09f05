"""What the target wrote, with its thinking, as a message that the template turns into the same tokens again."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.config.regenerate import RegenerateSection
from pipeline.corpus.chat import read_template
from pipeline.regenerate.generate import Answerer, reads_reasoning
from pipeline.regenerate.journal import Ended
from pipeline.regenerate.prompts import Prompt
from pipeline.target.load import Target, load_target
from tests.support.tiny import CHATML, QWEN3_LIKE, build_tokenizer
from tests.unit.regenerate.conftest import regenerate_config, user
from tests.unit.target.conftest import lone_rank

# The generation prompt opens the thinking, and the template adds nothing around its end.
OPENED = """\
{%- for message in messages -%}
  {{- '<|im_start|>' + message.role + '\\n' -}}
  {%- if message.reasoning_content is string -%}{{- '<think>\\n' + message.reasoning_content + '</think>' -}}{%- endif -%}
  {{- message.content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}
"""
SEEN = "<think>\nI see\n</think>\n\nYes<|im_end|>"


class Scribe:
    """In the place of transformers' model: it writes the same text to every prompt."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = torch.tensor(ids)

    def generate(self, input_ids: torch.Tensor, **options: Any) -> torch.Tensor:
        return torch.cat((input_ids, self._ids.expand(len(input_ids), -1)), dim=1)


@pytest.fixture(scope="module")
def target(answering_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Target:
    config = regenerate_config(answering_target, tmp_path_factory.mktemp("unused"))
    return load_target(config.model.target, lone_rank(), (0,), final=True)


def _written(target: Target, source: str, text: str, keep_reasoning: bool = True, **arguments: Any) -> Ended:
    """How a chat ends in which the target writes `text`, by the template `source`."""
    tokenizer = build_tokenizer(source)
    template = read_template(tokenizer, arguments)
    scribe = replace(target, model=Scribe(tokenizer(text, add_special_tokens=False)["input_ids"]))
    section = RegenerateSection(max_new_tokens=100, keep_reasoning=keep_reasoning)
    answerer = Answerer(scribe, template, (tokenizer.eos_token_id,), reads_reasoning(template), section)
    return answerer.answer([Prompt(0, "chats.jsonl", 0, None, ((user("Why is the sky blue?"),),))])[0]


@pytest.mark.parametrize(
    ("source", "arguments", "text", "message"),
    [
        (QWEN3_LIKE, {}, SEEN, {"content": "Yes", "reasoning_content": "I see"}),
        (QWEN3_LIKE, {"enable_thinking": False}, "Yes<|im_end|>", {"content": "Yes"}),
        (OPENED, {}, "I see\n</think>\n\nYes<|im_end|>", {"content": "\n\nYes", "reasoning_content": "I see\n"}),
        (OPENED, {}, "I see</think>Yes<|im_end|>", {"content": "Yes", "reasoning_content": "I see"}),
        (OPENED, {}, "</think>Yes", {"content": "Yes", "reasoning_content": ""}),
        (CHATML, {}, SEEN, {"content": SEEN.removesuffix("<|im_end|>")}),
        (CHATML, {}, "I see</think>", {"content": "I see</think>"}),
    ],
)
def test_the_message_renders_as_what_was_written(
    target: Target, source: str, arguments: dict[str, Any], text: str, message: dict[str, str]
) -> None:
    ended = _written(target, source, text, **arguments)
    assert ended.row["messages"][1] == {"role": "assistant", **message}
    assert ended.exact
    assert ended.state == ("done" if text.endswith("<|im_end|>") else "cut")


def test_an_answer_that_renders_otherwise_is_noted(target: Target) -> None:
    assert _written(target, QWEN3_LIKE, "Yes<|im_end|>").exact is False, "the template writes a think block that the target did not"


@pytest.mark.parametrize(("source", "text"), [(QWEN3_LIKE, "<think>\nI see"), (OPENED, "I see"), (OPENED, "I see<|im_end|>")])
def test_thinking_without_an_answer_fails(target: Target, source: str, text: str) -> None:
    ended = _written(target, source, text)
    assert (ended.state, ended.reason, ended.again) == ("failed", "ended while thinking", False)


def test_thinking_is_left_out_if_asked(target: Target) -> None:
    assert _written(target, QWEN3_LIKE, SEEN, keep_reasoning=False).row["messages"][1] == {"role": "assistant", "content": "Yes"}


def test_an_incomplete_character_at_a_cut_is_left_out(target: Target) -> None:
    whole = build_tokenizer()("é🙂", add_special_tokens=False)["input_ids"]
    tokenizer = build_tokenizer()
    text = tokenizer.decode(whole)
    assert text == "é🙂"
    template = read_template(tokenizer, {})
    answerer = Answerer(replace(target, model=Scribe(whole[:-1])), template, (2,), False, RegenerateSection(max_new_tokens=100))
    ended = answerer.answer([Prompt(0, "chats.jsonl", 0, None, ((user("one"),),))])[0]
    assert ended.row["messages"][1]["content"] == "é"
    assert (ended.state, ended.exact) == ("cut", True)
