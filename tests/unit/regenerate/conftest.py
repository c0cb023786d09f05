"""A tiny target that ends some of its answers, and runs that let it answer."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.schema import Config
from pipeline.decode.speculative import greedy_decode
from tests.support.tiny import QWEN3_LIKE, write_answering_target


@pytest.fixture(scope="session")
def thinking_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_answering_target(tmp_path_factory.mktemp("thinking") / "target", template=QWEN3_LIKE)


def regenerate_config(target: Path | None, folder: Path, **section: Any) -> Config:
    """Answers to `folder/chats.jsonl` in `folder/answers`; `section` are fields of `regenerate`, and `chat_template_kwargs`."""
    target_section: dict[str, Any] = {"path": str(target) if target else None, "dtype": "float32"}
    target_section |= {"chat_template_kwargs": section.pop("chat_template_kwargs", {})}
    return Config.model_validate(
        {
            "name": "answers",
            "model": {"target": target_section},
            "data": {"train_ds": {"input_cfg": [{"path": str(folder / "chats.jsonl")}]}},
            "regenerate": {"output": str(folder / "answers"), "max_new_tokens": 8, "batch_size": 4, **section},
            "exp_manager": {"explicit_log_dir": str(folder / "run")},
        }
    )


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def read_report(folder: Path) -> dict[str, Any]:
    """The account of the answers in `folder`/answers."""
    found: dict[str, Any] = json.loads((folder / "answers" / "report.json").read_text())
    return found


def answers_of(row: dict[str, Any]) -> list[str]:
    return [message["content"] for message in row["messages"] if message["role"] == "assistant"]


def greedy_answers(target: Path, row: dict[str, Any], **template_arguments: Any) -> list[str]:
    """What the target writes in place of each answer of `row`, after the messages before it; 8 tokens at most, stripped."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(target)
    texts = []
    for place, message in enumerate(row["messages"]):
        if message["role"] == "assistant":
            before = row["messages"][:place]
            ids = tokenizer.apply_chat_template(before, add_generation_prompt=True, return_dict=False, **template_arguments)
            texts.append(tokenizer.decode(greedy_decode(model, ids, 8, {2}).ids, skip_special_tokens=True).rstrip("\ufffd").strip())
    return texts


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def chat(*texts: str) -> dict[str, Any]:
    """A row of questions, each with an answer that is to be replaced."""
    return {"messages": [message for text in texts for message in (user(text), {"role": "assistant", "content": "to be replaced"})]}
