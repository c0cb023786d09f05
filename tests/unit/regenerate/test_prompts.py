"""What a row asks, and why some ask nothing."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.schema import InputSection
from pipeline.regenerate.prompts import WINDOW_BATCHES, Digest, Prompt, batches, read_prompts
from tests.support.tiny import write_chats, write_jsonl


def _prompts(path: Path) -> list[Prompt]:
    return list(read_prompts([InputSection(path=str(path))]))


def _one(folder: Path, *roles: str) -> Prompt:
    row = {"messages": [{"role": role, "content": f"{i}"} for i, role in enumerate(roles)]}
    return _prompts(write_jsonl(folder / "one.jsonl", [row]))[0]


@pytest.mark.parametrize(
    ("roles", "asked", "shortened"),
    [
        ("user", ["0"], False),
        ("user assistant", ["0"], False),
        ("system user assistant user assistant", ["01", "3"], False),
        ("user assistant user", ["0", "2"], False),
        ("user user assistant", ["01"], False),
        ("user assistant system user assistant", ["0", "23"], False),
        ("user assistant system assistant user", ["0", "24"], False),
        ("user assistant system", ["0"], False),
        ("user assistant tool assistant user assistant", ["0"], True),
        ("system user assistant user assistant tool", ["01", "3"], True),
    ],
)
def test_each_answer_has_the_messages_before_it(tmp_path: Path, roles: str, asked: list[str], shortened: bool) -> None:
    prompt = _one(tmp_path, *roles.split())
    assert ["".join(message["content"] for message in turn) for turn in prompt.turns] == asked
    assert prompt.shortened is shortened
    assert prompt.unusable is None


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"messages": [{"role": "system", "content": "x"}]}', "system only"),
        ('{"messages": [{"role": "assistant", "content": "x"}, {"role": "user", "content": "x"}]}', "assistant first"),
        ('{"messages": [{"role": "tool", "content": "x"}, {"role": "user", "content": "x"}]}', "no user turn"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "invalid text"),
        ('{"messages": [{"role": "user", "content": "x", "weight": NaN}]}', "wrong type"),
        ('{"messages": []}', "empty conversation"),
        ('{"messages"', "broken JSON"),
        ("", "blank line"),
    ],
)
def test_a_row_that_asks_nothing_says_why(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "one.jsonl").write_text(line + "\n")
    prompt = _prompts(tmp_path / "one.jsonl")[0]
    assert prompt.turns == ()
    assert prompt.unusable is not None
    assert prompt.unusable.reason == reason


def test_batches_are_of_like_rows_and_hold_each_once(tmp_path: Path) -> None:
    prompts = _prompts(write_chats(tmp_path / "chats.jsonl", 3 * WINDOW_BATCHES))
    found = list(batches(prompts, 2))
    assert sorted(prompt.index for batch in found for prompt in batch) == list(range(len(prompts)))
    assert all(len(batch) <= 2 for batch in found)
    assert sum(len({len(prompt.turns) for prompt in batch}) == 1 for batch in found) > 0.9 * len(found)
    first = [prompt.index for batch in found[:WINDOW_BATCHES] for prompt in batch]
    assert max(first) < 2 * WINDOW_BATCHES, "a window is read no further than it is held"


def test_the_digest_is_of_content_and_order(tmp_path: Path) -> None:
    def digest(rows: list[Any]) -> str:
        found = Digest(_prompts(write_jsonl(tmp_path / "rows.jsonl", rows)))
        assert len(list(found)) == found.rows == len(rows)
        return found.digest

    rows = [{"messages": [{"role": "user", "content": text}]} for text in ("one", "two")]
    assert digest(rows) == digest(json.loads(json.dumps(rows)))
    assert digest(rows[::-1]) != digest(rows) != digest(rows[:1])
    assert digest([{"id": "a", **rows[0]}, rows[1]]) != digest(rows)
