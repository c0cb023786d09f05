"""What training measures is what serving gives: a draft that knows one text by heart decodes it in whole blocks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.runtime.ranks import start_ranks
from pipeline.train.loop import train
from pipeline.train.served import evaluate
from tests.support.tiny import TinyShape, build_model, build_tokenizer, write_jsonl
from tests.support.training import config, repeatable

QUESTION = "Why is the sky blue?"
ANSWER = (
    "Because air scatters short waves of light more than long ones, so blue reaches the eye from everywhere. The rain falls on the roof."
)
BLOCK = 6


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target that has learnt to answer one question, so that its answer is a text that the tokenizer gives back."""
    folder = tmp_path_factory.mktemp("target") / "target"
    tokenizer, model = build_tokenizer(), build_model(TinyShape(layers=6))
    messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    ids = torch.tensor([tokenizer.apply_chat_template(messages, return_dict=False)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(120):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss < 0.02:
            break
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _run(folder: Path, target: Path, steps: int) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    """Train on the one chat, decode its question: the last validation, the evaluation, and the lengths of the steps."""
    chat = {"messages": [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]}
    chats = write_jsonl(folder / "chats.jsonl", [chat])
    wanted = config(
        folder,
        target,
        chats,
        data__mode="online",
        data__validation_ds={"datasets": {"same": {"input_cfg": [{"path": str(chats)}]}}},
        data__train_ds={"input_cfg": [{"path": str(chats)}], "global_batch_size": 1},
        model__draft__block_size=BLOCK,
        model__objective={"num_anchors": 64, "gamma": 8.0, "anchor_fit": "partial"},
        trainer__max_steps=steps,
        trainer__log_every_n_steps=50,
        trainer__val_decode_prompts=1,
        evaluate={"input_cfg": [{"path": str(chats)}], "max_new_tokens": 64},
    )
    ranks = start_ranks(1, None, 1)
    assert train(wanted, ranks)
    result = evaluate(wanted, ranks)
    prompt = json.loads((folder / "run" / "evaluation_prompts.jsonl").read_text())
    assert json.loads((folder / "run" / "evaluation.json").read_text()) == result
    return repeatable(folder / "run")[-1], result, prompt["step_lengths"]


def test_a_text_learnt_by_heart_is_served_in_whole_blocks(tmp_path: Path, target: Path) -> None:
    measured, result, lengths = _run(tmp_path, target, 90)
    assert result["lossless"]
    # Every step but the last, which the answer's end cuts, commits a block: its B - 1 slots, and the target's own next token.
    assert len(lengths) > 4
    assert set(lengths[:-1]) == {BLOCK}
    assert result["served_acceptance_length"] == pytest.approx(measured["val_walk_accept_len"], rel=1e-6)
    assert measured["val_accept_len"] > BLOCK - 1.5


def test_the_walk_predicts_every_step_of_a_middling_draft(tmp_path: Path, target: Path) -> None:
    measured, result, lengths = _run(tmp_path, target, 38)
    assert result["lossless"]
    assert len(set(lengths[:-1])) > 2
    assert result["prompts_whose_walk_equals_serving"] == 1
    assert measured["val_served_accept_len"] == result["served_acceptance_length"]
    assert result["walk_accept_len"] == result["served_acceptance_length"] == pytest.approx(measured["val_walk_accept_len"], rel=1e-6)
