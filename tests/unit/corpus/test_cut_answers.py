"""Answers that were cut at a limit, and chats that go on after the last answer: nothing is supervised that the target did not write."""

from pathlib import Path
from typing import Any

import pytest

from pipeline.corpus.chat import Supervision, read_template, render
from pipeline.corpus.prepare import prepare
from pipeline.corpus.rows import Unusable
from tests.support.tiny import CHATML, QWEN3_LIKE, build_tokenizer, write_jsonl
from tests.unit.corpus.test_chat import chat
from tests.unit.corpus.test_prepare import config_of
from tests.unit.corpus.test_rules import THINKING, TWO, qwen3, said, with_entries

__all__ = ["qwen3"]  # a fixture

CALLS = CHATML.replace(
    "message['content'] + '<|im_end|>\\n'",
    "message['content'] + (('<tool_call>' + message['tool_calls'] | map(attribute='function') | list | tojson + '</tool_call>')"
    " if message['tool_calls'] else '') + '<|im_end|>\\n'",
)


def supervised(template: str, answer: dict[str, Any], masked: bool = False, cut_short: bool = True) -> list[str] | Unusable:
    """The supervised texts of a question and `answer`."""
    tokenizer = build_tokenizer(template)
    messages = [*chat("q1"), {"role": "assistant", "content": "", **answer}]
    found = render(read_template(tokenizer, {}), messages, cut_short, None, Supervision(mask_reasoning=masked))
    if isinstance(found, Unusable):
        return found
    return [tokenizer.decode(found.input_ids[start : start + length]) for start, length in found.spans.tolist()]


@pytest.mark.parametrize("cut_short", [True, False])
def test_reasoning_without_an_end_is_masked_too(cut_short: bool) -> None:
    if cut_short:
        assert supervised(QWEN3_LIKE, {"reasoning_content": "it is long"}, masked=True) == []
    end = [] if cut_short else ["<|im_end|>"]
    assert supervised(CHATML, {"content": "<think>\nit is long"}, True, cut_short) == end
    assert supervised(CHATML, {"content": "<think>\na</think>\n\nsee <think>"}, True, cut_short) == ["".join(["see <think>", *end])]


def test_a_think_block_that_the_template_closes_before_cut_reasoning_is_not_the_targets() -> None:
    found = supervised(QWEN3_LIKE, {"content": "<think>\nit is long"})
    assert isinstance(found, Unusable)
    assert found.reason == "ended while thinking"
    assert supervised(CHATML, {"content": "<think>\nit is long"}) == ["<think>\nit is long"]


@pytest.mark.parametrize("arguments", ['{"city": "Bo', {"city": "Bonn"}])
def test_of_a_call_in_which_an_answer_was_cut_the_template_writes_the_end(arguments: Any) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    found = supervised(CALLS, {"content": "I look", "tool_calls": [call]})
    assert isinstance(found, list)
    assert found[0].startswith("I look<tool_call>")
    assert "weather" not in found[0]
    whole = supervised(CALLS, {"content": "I look", "tool_calls": [call]}, cut_short=False)
    assert isinstance(whole, list)
    assert whole[0].endswith("</tool_call><|im_end|>")


def test_one_sample_a_turn_of_a_chat_that_ends_with_a_question(tiny_target: Path, tiny_tokenizer: Any, tmp_path: Path, qwen3: str) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"messages": [*THINKING, *chat("q3")]}, {"messages": [*TWO, *chat("q3")]}])
    corpus = prepare(config_of(tiny_target, tmp_path / "p", path, one_sample_per_turn=True, target_chat_template=qwen3))
    assert (corpus.counts["kept"], corpus.counts["samples"], corpus.counts["left_out"]) == (2, 4, {})
    assert said(corpus, tiny_tokenizer)[1] == ["<think>\nsecond\n</think>\n\nthree four<|im_end|>"]


def test_where_a_text_is_cut_moves_it_to_no_other_split(tmp_path: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.save_pretrained(tmp_path / "target")
    lines = [f"The kettle number {i} boils while the rain falls on the roof.\n" for i in range(40)]
    (tmp_path / "x.txt").write_text("".join(lines))
    splits = []
    for name, most in (("a", 12), ("b", 400)):
        config = config_of(tmp_path / "target", tmp_path / name, tmp_path / "x.txt", max_tokens=most, fraction=0.5)
        corpus = prepare(with_entries(config, {"type": "text", "document": "line", "path": str(tmp_path / "x.txt")}))
        splits.append({sample.row: sample.split for sample in map(corpus.sample, range(len(corpus)))})
    assert splits[0] == splits[1]
    assert set(splits[0].values()) == {"train", "heldout"}
