"""The same conversations through the templates of many families: what is supervised is what the assistant said, and its end token.

What to expect is written out below by hand, family by family, and found in the render by searching for it: nothing of how the pipeline
locates answers is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from pipeline.corpus.chat import EVERYTHING, Rendered, Supervision, prompt_ids, read_template, render
from tests.support.tiny import CHATML, build_tokenizer
from tests.unit.corpus.oracle import mask, runs
from tests.unit.corpus.test_chat import Messages, chat
from tests.unit.corpus.test_real_templates import package_folder

pytestmark = pytest.mark.slow

DATE = {"strftime_now": "2025-06-30"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "d", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    }
]
CALL = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
MISTRAL = (
    "{{ bos_token }}{% set users = messages | selectattr('role', 'equalto', 'user') | list %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if m == users[-1] and tools %}"
    "{{ '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}"
    "{% elif m.tool_calls %}{{ '[TOOL_CALLS] ' + (m.tool_calls | map(attribute='function') | list | tojson) + eos_token }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}{% else %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
)
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn"}}\n</tool_call>'
XML = "<tool_call>\n<function=weather>\n<parameter=city>\nBonn\n</parameter>\n</function>\n</tool_call>"
EMPTY = "<think>\n\n</think>\n\n"


@dataclass(frozen=True)
class Family:
    """A template and what it makes of an answer. `end` is its end token; `before` what the target writes before an answer without
    reasoning; `think` what it writes of the reasoning "hm", None where the template shows none; `call` of the call of `weather`,
    None where the template knows no tools. `rewrites`: only the last turn can be supervised, because the template shows earlier ones
    otherwise."""

    template: str
    end: str
    before: str = ""
    think: str | None = None
    call: str | None = None
    rewrites: bool = False
    system: bool = True
    special: tuple[str, ...] = ()

    def tokenizer(self) -> Any:
        """The tests' tokenizer, with the special tokens of the family."""
        text = self.template
        if "{" not in text:
            text = (package_folder("trl") / "chat_templates" / f"{text}.jinja").read_text()
        tokenizer = build_tokenizer(text)
        tokenizer.add_special_tokens(
            {"bos_token": "<|endoftext|>", "additional_special_tokens": [*self.special, *([self.end] if self.end else [])]}
        )
        return tokenizer


FAMILIES = {
    "ChatML": Family(CHATML, "<|im_end|>"),
    "Qwen2.5": Family("qwen2_5", "<|im_end|>", call=HERMES),
    "Qwen3": Family("qwen3", "<|im_end|>", before=EMPTY, think="<think>\nhm\n</think>\n\n", call=HERMES, rewrites=True),
    "Qwen3-Instruct": Family("qwen3_instruct_2507", "<|im_end|>", call=HERMES),
    "Qwen3.5": Family("qwen3_5_think", "<|im_end|>", before="\n</think>\n\n", think="hm\n</think>\n\n", call=XML, rewrites=True),
    "Llama 3": Family("llama3", "<|eot_id|>"),
    "Llama 3.1": Family("llama3_1", "<|eot_id|>", call='{"name": "weather", "parameters": {"city": "Bonn"}}'),
    "Llama 3.2": Family("llama3_2", "<|eot_id|>", call='{"name": "weather", "parameters": {"city": "Bonn"}}'),
    "Gemma": Family("gemma", "<end_of_turn>", system=False),
    "Gemma 3": Family("gemma3", "<end_of_turn>"),
    "Mistral": Family(
        MISTRAL, "<|im_end|>", before=" ", call='[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Bonn"}}]', system=False
    ),
    "Phi 3": Family("phi3", "<|end|>"),
    "Phi 3.5": Family("phi3_5", "<|end|>"),
    "DeepSeek-R1": Family("deepseek_r1_distill", "<｜end▁of▁sentence｜>", before="\n</think>\n\n", think="hm\n</think>\n\n", rewrites=True),
    "DeepSeek-V3": Family("deepseekv3", "<｜end▁of▁sentence｜>", before="\n</think>\n\n", think="hm\n</think>\n\n", rewrites=True),
    "Nemotron 3": Family("nemotron_3_nano", "<|im_end|>", before="</think>", think="hm\n</think>\n", rewrites=True),
    "GLM 4.5": Family("glm4moe", "", before="\n<think></think>\n", think="\n<think>hm</think>\n"),
    "gpt-oss": Family(
        "gptoss",
        "<|return|>",
        before="<|channel|>final<|message|>",
        think="<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>",
        rewrites=True,
    ),
    "Cohere": Family("cohere", "<|END_OF_TURN_TOKEN|>"),
    "LFM2": Family("lfm2_v2", "<|im_end|>", call="<|tool_call_start|>[weather(city='Bonn')]<|tool_call_end|>"),
}
by_family = pytest.mark.parametrize("name", FAMILIES)


def check(tokenizer: Any, messages: Messages, said: Sequence[str], tools: Any = None, supervision: Supervision = EVERYTHING) -> Rendered:
    """What is supervised is `said`, each piece once and in this order, in the text of the render or of prompt and answer."""
    template = read_template(tokenizer, DATE)
    found = render(template, messages, False, tools, supervision)
    assert isinstance(found, Rendered), found
    ids = found.input_ids.tolist()
    dated = "strftime_now" in tokenizer.chat_template
    date = {"date_string": "30 Jun 2025"} if dated else {}  # gpt-oss takes no date but today's
    direct = tokenizer.apply_chat_template(messages, tokenize=False, tools=tools, **date)
    text = tokenizer.decode(ids)
    if found.after_prompt:
        prompt = tokenizer.apply_chat_template(messages[:-1], tokenize=False, add_generation_prompt=True)
        assert text.startswith(prompt)
        after = text[len(prompt) :].rstrip("\n")
        assert after.endswith(said[-1]) if supervision.mask_reasoning else after == said[-1].rstrip("\n")
    elif not dated or "date_string" in tokenizer.chat_template:
        assert text == direct
        assert ids == tokenizer(direct, add_special_tokens=False)["input_ids"]
    pieces, at = [], 0
    for piece in said:
        start = text.index(piece, at) if piece is not said[-1] else text.rindex(piece)
        pieces += [(text[at:start], False), (piece, True)]
        at = start + len(piece)
    flags = mask(tokenizer, ids, [*pieces, (text[at:], False)])
    assert found.spans.tolist() == runs(flags)
    for length in range(1, len(ids) + 1):
        assert found.prefix(length).spans.tolist() == runs(flags[:length])
        assert found.prefix(length).input_ids.tolist() == ids[:length]
    return found


@by_family
def test_answers_and_their_end_tokens(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    for system in (None, "Be brief.") if family.system else (None,):
        one = chat("q1", "one two", system=system)
        check(tokenizer, one, [f"{family.before}one two{family.end}"])
        more = chat("q1", "one two", "q2", "three\n\nfour «thé» 🙂", "q3", "five", system=system)
        said = [f"{family.before}{text}{family.end}" for text in ("one two", "three\n\nfour «thé» 🙂", "five")]
        found = check(tokenizer, more, said[-1:] if family.rewrites else said)
        assert found.last_turn_only == family.rewrites
        check(tokenizer, more, said[-1:], supervision=Supervision(only_last=True))


@by_family
def test_reasoning(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    messages = [chat("q1")[0], {"role": "assistant", "reasoning_content": "hm", "content": "one two"}]
    whole = f"{family.before if family.think is None else family.think}one two{family.end}"
    check(tokenizer, messages, [whole])
    answer = f"<|start|>assistant<|channel|>final<|message|>one two{family.end}" if name == "gpt-oss" else f"one two{family.end}"
    if family.think is not None and name != "GLM 4.5":
        check(tokenizer, messages, [answer], supervision=Supervision(mask_reasoning=True))
    if "<think>" in (tokenizer.chat_template if family.think else ""):
        inline = [messages[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\none two"}]
        found = render(read_template(tokenizer, DATE), inline)
        assert isinstance(found, Rendered)
        if name not in ("Nemotron 3", "GLM 4.5"):  # these lay out the line ends anew
            check(tokenizer, inline, [whole])
            check(tokenizer, inline, [answer], supervision=Supervision(mask_reasoning=True))


@by_family
def test_tools(name: str) -> None:
    family = FAMILIES[name]
    tokenizer = family.tokenizer()
    messages: Messages = [
        {"role": "user", "content": "q1"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "21"},
        {"role": "assistant", "content": "It is 21."},
    ]
    if family.call is None:
        found = render(read_template(tokenizer, DATE), messages, tools=TOOLS)
        assert isinstance(found, Rendered) or found.reason in ("template error", "tool calls left out", "turn not located")
        return
    if family.think is not None:
        messages = [{**m, "reasoning_content": "hm"} if m["role"] == "assistant" else m for m in messages]
    before = family.think if family.think is not None else family.before
    call = f"{'' if name == 'Mistral' else before}{family.call}{family.end}"
    said = [call, f"{before}It is 21.{family.end}"]
    check(tokenizer, messages[:2], said[:1], TOOLS)
    check(tokenizer, messages, said, TOOLS)
    without = tokenizer.apply_chat_template(messages, tokenize=False)
    assert "description" in tokenizer.apply_chat_template(messages, tokenize=False, tools=TOOLS)
    assert "description" not in without


@by_family
def test_every_answer_follows_what_the_target_is_given(name: str) -> None:
    """The tokens before the last answer are those of a prompt that asks for it."""
    tokenizer = FAMILIES[name].tokenizer()
    template = read_template(tokenizer, DATE)
    messages = chat("q1", "one two", "q2", "three")
    found = render(template, messages)
    assert isinstance(found, Rendered)
    assert found.input_ids[: found.spans[-1, 0]].tolist() == prompt_ids(template, messages[:-1]).tolist()
