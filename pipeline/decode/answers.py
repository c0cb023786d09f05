"""The target's own answers to prompts: what a draft should be trained on, since it is what the draft will be asked to predict.

Batched greedy generation by transformers. A row that the target did not end carries `finish_reason: length`, so that the
end token which the chat template adds after it is not supervised.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.runtime.files import atomic_file
from pipeline.runtime.logs import Progress


def write_answers(model: Any, tokenizer: Any, rows: Sequence[dict[str, Any]], path: Path, *, max_new_tokens: int, batch_size: int) -> int:
    """Answer the last user turn of every row and write the rows, answers added, to `path` as JSONL in their order.

    `model` and `tokenizer` are transformers' own; rows hold OpenAI `messages`. Prompts of like length share a batch.
    Returns the number of tokens generated. An answer holds at most `max_new_tokens` tokens.
    """
    prompts = [tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_dict=False) for row in rows]
    stop_ids = _stop_ids(model, tokenizer)
    answers: dict[int, list[int]] = {}
    order = sorted(range(len(rows)), key=lambda row: len(prompts[row]))
    with Progress(len(rows), "answers", "the target answers", enabled=True) as progress:
        for first in range(0, len(order), batch_size):
            batch = order[first : first + batch_size]
            for row, ids in zip(batch, _generate(model, [prompts[row] for row in batch], max_new_tokens, stop_ids), strict=True):
                answers[row] = ids
            progress.advance(len(batch))
    with atomic_file(path) as file:
        for index, asked in enumerate(rows):
            ids = answers[index]
            text = tokenizer.decode(ids, skip_special_tokens=True)
            record = {
                **asked,
                "messages": [*asked["messages"], {"role": "assistant", "content": text}],
                "finish_reason": "stop" if ids[-1] in stop_ids else "length",
            }
            file.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
    return sum(len(ids) for ids in answers.values())


def _stop_ids(model: Any, tokenizer: Any) -> list[int]:
    configured = model.generation_config.eos_token_id
    ids = configured if isinstance(configured, list) else [configured]
    return [i for i in dict.fromkeys([*ids, tokenizer.eos_token_id]) if i is not None]


def _generate(model: Any, prompts: list[list[int]], max_new_tokens: int, stop_ids: list[int]) -> list[list[int]]:
    """Greedy continuations of left-padded prompts, each cut after its first stop token."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts], device=model.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=model.device)
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=stop_ids,
            pad_token_id=stop_ids[0],
        )
    answers = []
    for row in out[:, longest:].tolist():
        end = next((k + 1 for k, token in enumerate(row) if token in stop_ids), len(row))
        answers.append(row[:end])
    return answers
