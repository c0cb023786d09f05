"""Ids and masks of chats, against texts written by hand, for ChatML-like and Qwen3-like templates."""

from collections.abc import Sequence
from typing import Any

import pytest

from pipeline.corpus.chat import Rendered, prompt_ids, read_template, render
from pipeline.corpus.rows import Unusable
from pipeline.errors import ConfigError, TemplateError
from tests.support.tiny import CHATML, QWEN3_LIKE, build_tokenizer
from tests.unit.corpus.oracle import Piece, chatml, mask, runs, text

Messages = list[dict[str, Any]]


def chat(*turns: str, system: str | None = None) -> Messages:
    """user, assistant, user, … with these texts."""
    opening = [{"role": "system", "content": system}] if system is not None else []
    return opening + [{"role": ("user", "assistant")[i % 2], "content": turn} for i, turn in enumerate(turns)]


def rendered(tokenizer: Any, messages: Messages, cut_short: bool = False, **arguments: Any) -> Rendered:
    found = render(read_template(tokenizer, arguments), messages, cut_short)
    assert isinstance(found, Rendered), found
    direct = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **arguments)
    assert found.input_ids.tolist() == direct
    assert found.input_ids.dtype == found.spans.dtype == "int32"
    return found


def check(tokenizer: Any, messages: Messages, pieces: Sequence[Piece], cut_short: bool = False, **arguments: Any) -> Rendered:
    """The render's text is that of `pieces`, and its mask theirs."""
    found = rendered(tokenizer, messages, cut_short, **arguments)
    assert tokenizer.apply_chat_template(messages, tokenize=False, **arguments) == text(pieces)
    assert found.spans.tolist() == runs(mask(tokenizer, found.input_ids.tolist(), pieces))
    return found


CHATS = {
    "one turn": chat("Why is the sky blue?", "Because air scatters light."),
    "system": chat("hi", "hello there", system="Answer briefly."),
    "four turns": chat("a", "b", "c d", "e f g", "h", "i", "j", "k l"),
    "unicode": chat("それは何ですか 🙂", "«thé» — ünïcödé 👩‍👩‍👧 e\u0301\u200b", "🙂", "🙂🙂 \u0000 \ufeff"),
    "the end token in the text": chat("say <|im_end|>", "it is <|im_end|>\n<|im_start|>user\nhm<|im_end|>\n", "x", "<|im_end|>"),
    "the answer is the question": chat("same text", "same text", "same text", "same text"),
    "the answer is the role's name": chat("assistant", "assistant", "user", "<|im_start|>assistant\n"),
    "empty answers": chat("say nothing", "", "", ""),
    "white space around": chat("\n q ", "  two before, one after \n", "q", "\n\n  two newlines before", "q", " \n "),
    "ends with the user": chat("a", "b", "c"),
    "two answers in a row": [*chat("a", "b"), {"role": "assistant", "content": "more"}],
    "a tool's message": [*chat("a", "b"), {"role": "tool", "content": "21"}, {"role": "assistant", "content": "it is 21"}],
    "a template in the text": chat("{{ 7 * 7 }}", "{% for x in y %}{{ x }}{% endfor %}{% generation %}"),
}


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("cut_short", [False, True])
def test_chatml(tiny_tokenizer: Any, name: str, cut_short: bool) -> None:
    check(tiny_tokenizer, CHATS[name], chatml(CHATS[name], cut_short=cut_short), cut_short)


@pytest.mark.parametrize("name", CHATS)
def test_cut_at_every_length_the_mask_is_a_prefix(tiny_tokenizer: Any, name: str) -> None:
    found = rendered(tiny_tokenizer, CHATS[name])
    flags = mask(tiny_tokenizer, found.input_ids.tolist(), chatml(CHATS[name]))
    for length in range(1, len(flags) + 2):
        cut = found.prefix(length)
        assert cut.input_ids.tolist() == found.input_ids.tolist()[:length]
        assert cut.spans.tolist() == runs(flags[:length])


def test_keys_that_are_null_render_as_if_absent(tiny_tokenizer: Any) -> None:
    from pipeline.corpus.rows import read_row

    row = b'{"messages": [{"role": "user", "content": "a", "tool_calls": null}, {"role": "assistant", "content": "b", "tool_calls": null}]}'
    template = "{% for m in messages %}{{ m.role + ('T' if m.tool_calls is defined else '') + m.content }}<|im_end|>{% endfor %}"
    read = read_row("x", 0, row)
    assert read.messages is not None
    found = rendered(build_tokenizer(template), read.messages)
    assert build_tokenizer(template).decode(found.input_ids) == "usera<|im_end|>assistantb<|im_end|>"


# ---- templates that rewrite history


def qwen3(messages: Messages, thoughts: Sequence[str], prompt_thinks: bool = True) -> list[Piece]:
    """By hand what the Qwen3-like template writes: thoughts are shown in the last answer only, which is all that is supervised."""
    pieces: list[Piece] = []
    for i, message in enumerate(messages):
        last = i == len(messages) - 1
        body = message["content"]
        if last or "</think>" in body:
            body = body.split("</think>")[-1].lstrip("\n")
        pieces.append((f"<|im_start|>{message['role']}\n", False))
        if last:
            pieces.append((f"<think>\n{thoughts[-1]}\n</think>\n\n", prompt_thinks))
        pieces += [(body, last), ("<|im_end|>", last), ("\n", False)]
    return pieces


def test_qwen3_like_thinking_is_supervised_on_the_last_turn_only() -> None:
    tokenizer = build_tokenizer(QWEN3_LIKE)
    messages = chat("q1", "<think>\nfirst\n</think>\n\none", "q2", "<think>\nsecond\n</think>\n\ntwo")
    assert check(tokenizer, messages, qwen3(messages, ["first", "second"])).last_turn_only


def test_qwen3_like_single_turn_keeps_its_thinking() -> None:
    tokenizer = build_tokenizer(QWEN3_LIKE)
    messages = chat("q1", "<think>\nfirst\n</think>\n\none")
    assert not check(tokenizer, messages, qwen3(messages, ["first"])).last_turn_only
    assert not check(tokenizer, chat("q1", "one"), qwen3(chat("q1", "one"), [""])).last_turn_only


def test_qwen3_like_empty_think_block_of_the_prompt_is_not_supervised() -> None:
    tokenizer = build_tokenizer(QWEN3_LIKE)
    for messages in (chat("q1", "one"), chat("q1", "one", "q2", "two")):
        found = check(tokenizer, messages, qwen3(messages, [""], prompt_thinks=False), enable_thinking=False)
        assert found.last_turn_only == (len(messages) > 2)
        start = int(found.spans[0, 0])
        assert found.input_ids[:start].tolist() == prompt_ids(read_template(tokenizer, {"enable_thinking": False}), messages[:-1]).tolist()


def test_reasoning_that_was_cut_has_no_end_of_its_own() -> None:
    tokenizer = build_tokenizer(QWEN3_LIKE)
    messages = [*chat("q1"), {"role": "assistant", "content": "", "reasoning_content": "it is a long"}]
    pieces = [
        ("<|im_start|>user\nq1<|im_end|>\n<|im_start|>assistant\n", False),
        ("<think>\nit is a long", True),
        ("\n</think>\n\n<|im_end|>\n", False),
    ]
    check(tokenizer, messages, pieces, cut_short=True)


def test_an_answer_that_contradicts_the_generation_prompt_is_not_guessed_at() -> None:
    template = read_template(build_tokenizer(QWEN3_LIKE), {"enable_thinking": False})
    found = render(template, chat("q1", "<think>\nbut it thinks\n</think>\n\none"))
    assert isinstance(found, Unusable)
    assert found.reason == "turn not located"


def test_a_turn_that_a_later_one_changes_is_left_out_not_misplaced() -> None:
    # Here it is the last answer that a later message changes, so nothing can be supervised.
    template = read_template(build_tokenizer(QWEN3_LIKE), {})
    found = render(template, chat("q1", "one", "q2"))
    assert isinstance(found, Unusable)
    assert found.reason == "turn not located"


# ---- other shapes of templates


def test_a_template_that_strips_content(tiny_tokenizer: Any) -> None:
    tokenizer = build_tokenizer(CHATML.replace("message['content']", "message['content'] | trim"))
    messages = chat("  q ", "\n an answer with space around \n\n", "q", "  ", "x", "y ")
    stripped = [{**m, "content": m["content"].strip()} for m in messages]
    check(tokenizer, messages, chatml(stripped))
    check(tokenizer, messages, chatml(stripped, cut_short=True), cut_short=True)


MARKED = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{% if message.role == 'assistant' %}{% generation %}"
    "{% if think is defined and not think %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{{ message.content + 'END' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>\\n' }}{% endif %}AFTER{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if think is defined and not think %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)


@pytest.mark.parametrize("inside", [True, False], ids=["newline inside the marks", "newline outside"])
@pytest.mark.parametrize("cut_short", [False, True])
def test_generation_marks_give_the_same_mask_as_a_template_without(tiny_tokenizer: Any, inside: bool, cut_short: bool) -> None:
    template = MARKED.replace("END", "<|im_end|>\\n" if inside else "<|im_end|>").replace("AFTER", "")
    if not inside:
        template = template.replace("{% endgeneration %}", "{% endgeneration %}{{ '\\n' }}")
    tokenizer = build_tokenizer(template)
    for messages in CHATS.values():
        found = rendered(tokenizer, messages, cut_short)
        assert found.spans.tolist() == rendered(tiny_tokenizer, messages, cut_short).spans.tolist()


def test_generation_marks_without_the_end_token_leave_it_out() -> None:
    tokenizer = build_tokenizer(
        MARKED.replace(" + 'END'", "").replace("{% endgeneration %}", "{% endgeneration %}{{ '<|im_end|>\\n' }}").replace("AFTER", "")
    )
    messages = chat("q1", "one two", "q2", "three")
    pieces = [(piece, flag and piece != "<|im_end|>") for piece, flag in chatml(messages)]
    check(tokenizer, messages, pieces)


def test_marked_tokens_that_the_prompt_supplies_are_not_supervised() -> None:
    tokenizer = build_tokenizer(MARKED.replace("END", "<|im_end|>\\n").replace("AFTER", ""))
    messages = chat("q1", "one", "q2", "two")
    pieces: list[Piece] = []
    for message in messages:
        answer = message["role"] == "assistant"
        pieces += [(f"<|im_start|>{message['role']}\n", False), ("<think>\n\n</think>\n\n" if answer else "", False)]
        pieces += [(message["content"], answer), ("<|im_end|>", answer), ("\n", False)]
    check(tokenizer, messages, pieces, think=False)


def test_a_template_without_an_end_token_supervises_the_text_alone() -> None:
    template = (
        "{% for m in messages %}{{ '### ' + m.role + '\\n' + m.content + '\\n\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '### assistant\\n' }}{% endif %}"
    )
    messages = chat("q1", "one two", "q2", "three")
    pieces = [p for m in messages for p in [(f"### {m['role']}\n", False), (m["content"], m["role"] == "assistant"), ("\n\n", False)]]
    check(build_tokenizer(template), messages, pieces)
    check(build_tokenizer(template), messages, pieces, cut_short=True)


def test_a_template_that_ignores_the_generation_prompt_keeps_the_header_out() -> None:
    tokenizer = build_tokenizer(CHATML.split("{% if add_generation_prompt")[0])
    check(tokenizer, CHATS["four turns"], chatml(CHATS["four turns"]))


def test_more_may_follow_the_end_token_of_the_last_turn() -> None:
    # As in Phi-3: the whole chat ends with a token of its own, which no turn but the last is followed by.
    tokenizer = build_tokenizer(CHATML + "{% if not add_generation_prompt %}{{ '<|endoftext|>' }}{% endif %}")
    messages = chat("q1", "one", "q2", "two")
    assert not check(tokenizer, messages, [*chatml(messages), ("<|endoftext|>", False)]).last_turn_only


def test_one_bos_whatever_the_tokenizer_adds_by_itself() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = build_tokenizer("{{ bos_token }}" + CHATML)
    tokenizer.bos_token = "<|endoftext|>"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    assert tokenizer("x")["input_ids"][0] == 0  # it does add one to plain text
    found = check(tokenizer, chat("a", "b"), [("<|endoftext|>", False), *chatml(chat("a", "b"))])
    assert found.input_ids.tolist().count(0) == 1


def test_pad_equal_to_eos_leaves_end_tokens_supervised() -> None:
    tokenizer = build_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    check(tokenizer, CHATS["four turns"], chatml(CHATS["four turns"]))


def test_offsets_without_white_space_give_the_same_masks() -> None:
    from tokenizers.processors import ByteLevel

    tokenizer = build_tokenizer()
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)  # as Llama 3's does
    for messages in CHATS.values():
        check(tokenizer, messages, chatml(messages))
        check(tokenizer, messages, chatml(messages, cut_short=True), cut_short=True)


def test_an_end_token_that_swallows_what_follows_is_supervised_whole() -> None:
    # As in Phi-3, whose special tokens take the white space on their right with them; so the newline is part of the token.
    from tokenizers import AddedToken

    tokenizer = build_tokenizer(CHATML.replace("<|im_end|>", "<|end|>"))
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|end|>", rstrip=True, special=True)]})
    for cut_short in (False, True):
        found = rendered(tokenizer, chat("q1", "one", "q2", "two "), cut_short)
        ids = [found.input_ids[start : start + length].tolist() for start, length in found.spans.tolist()]
        assert [tokenizer.convert_ids_to_tokens(run)[-1] == "<|end|>" for run in ids] == [True, not cut_short]
        assert [tokenizer.decode([i for i in run if i != tokenizer.convert_tokens_to_ids("<|end|>")]) for run in ids] == ["one", "two "]


# ---- what is refused


def test_half_a_surrogate_pair_is_no_text(tiny_tokenizer: Any) -> None:
    found = render(read_template(tiny_tokenizer, {}), chat("a", "b \ud83d c"))
    assert isinstance(found, Unusable)
    assert found.reason == "invalid text"


def test_a_template_that_raises_gives_a_reason() -> None:
    tokenizer = build_tokenizer(
        CHATML.replace("{% for", "{% if messages | length > 2 %}{{ raise_exception('too long a chat') }}{% endif %}{% for", 1)
    )
    template = read_template(tokenizer, {})
    assert isinstance(render(template, chat("a", "b")), Rendered)
    found = render(template, chat("a", "b", "c", "d"))
    assert isinstance(found, Unusable)
    assert (found.reason, "too long a chat" in found.detail) == ("template error", True)


@pytest.mark.parametrize(
    ("template", "word"),
    [
        ("{% for m in messages %}{{ m.content }", "TemplateSyntaxError"),
        ("{{ raise_exception('never') }}", "never"),
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}", "leaves out"),
    ],
)
def test_a_template_that_renders_no_chat_is_an_error(template: str, word: str) -> None:
    with pytest.raises(TemplateError, match=word):
        read_template(build_tokenizer(template), {})


def test_a_template_may_want_a_system_message() -> None:
    tokenizer = build_tokenizer("{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHATML)
    check(tokenizer, chat("a", "b", system="s"), chatml(chat("a", "b", system="s")))


def test_arguments_that_are_not_the_templates_are_refused(tiny_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="max_length, truncation"):
        read_template(tiny_tokenizer, {"truncation": True, "max_length": 4, "enable_thinking": False})
