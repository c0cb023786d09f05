"""Masks of arbitrary chats in ChatML, against a text put together by hand and the bytes of every token."""

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.corpus.chat import Rendered, read_template, render
from tests.unit.corpus.oracle import chatml, mask, runs, text

# Ordinary and difficult text: any character but half surrogates, and what the template itself writes.
characters = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
pieces = st.sampled_from(["<|im_end|>", "<|im_start|>", "<|im_end|>\n", "assistant\n", "\n", "\n\n", " ", "  ", "<think>", "é", "🙂", "a"])
contents = st.lists(characters | pieces, max_size=4).map("".join)
openings = st.lists(st.fixed_dictionaries({"role": st.just("system"), "content": contents}), max_size=1)
exchanges = st.lists(st.tuples(contents, contents), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(opening=openings, turns=exchanges, cut_short=st.booleans(), max_tokens=st.integers(1, 200))
def test_chatml_masks(
    tiny_tokenizer: Any, opening: list[dict[str, str]], turns: list[tuple[str, str]], cut_short: bool, max_tokens: int
) -> None:
    messages = opening + [{"role": role, "content": said} for turn in turns for role, said in zip(("user", "assistant"), turn, strict=True)]
    expected = chatml(messages, cut_short=cut_short)
    found = render(read_template(tiny_tokenizer, {}), messages, cut_short)
    assert isinstance(found, Rendered)
    ids = tiny_tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert found.input_ids.tolist() == ids
    assert tiny_tokenizer.apply_chat_template(messages, tokenize=False) == text(expected)
    flags = mask(tiny_tokenizer, ids, expected)
    assert found.spans.tolist() == runs(flags)
    assert found.prefix(max_tokens).spans.tolist() == runs(flags[:max_tokens])
