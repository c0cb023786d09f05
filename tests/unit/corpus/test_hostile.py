"""A file of several hundred rows that nobody should have written: the run ends, and every row is a sample or listed with its reason."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.corpus.prepare import prepare
from tests.support.launch import run
from tests.support.tiny import QWEN3_LIKE, chats, write_jsonl
from tests.unit.corpus.test_prepare import config_of, dropped

U, A = {"role": "user", "content": "u"}, {"role": "assistant", "content": "an answer"}
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 1e308, 10**30, -(2**63), "", " ", "\x00", "\ud83d", "\udc00\ud800", "\u202e\u2066"),
    *("\x1b[2J", "\ufeff", "\r\n", "🙂" * 1000, "<|im_end|>", "<think>", "</think>", "{{ x }}", [], [[]], {}, {"a": {}}),
    *([None], ["text"], [U], [[U, A]], [{"type": "text"}], [{"type": "text", "text": 5}], [{"type": "image", "image": "x.png"}]),
    [{"type": "text", "text": [{"type": "text", "text": "deep"}]}],
]
JUNK: list[bytes] = [
    *(b"", b" ", b"\t\r", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"null", b"true", b"[]"),
    *(b"{}", b'""', b"0", b"-", b"NaN", b"Infinity", b"nul", b"{", b"}", b"[", b"]", b'"', b"'", b"{'messages': []}", b"{,}"),
    *(b'{"messages": }', b'{"messages"', b'{"messages": [}', b'{"a":1,}', b"{} {}", b"[1,2", b'{"messages": "\n', b"<xml/>"),
    *(b"a,b,c", b"# comment", b"// comment", b"9" * 5000, b"1e99999", b'"\\ud83d"', b'{"\\u0000": 1}', b"\xff" * 1000),
    *(b"[" * 100_000, b'{"a":' * 100_000, b"[" * 900 + b"]" * 900, b'{"messages": ' + b"[" * 900 + b"]" * 900 + b"}"),
    *(b'{"messages": "' + b"x" * 1_000_000 + b'"}', b"y" * 1_000_000, b'{"messages": [' + b"1," * 300_000 + b"1]}"),
]


def hostile() -> Iterator[bytes]:
    """Rows; each differs from a good one in one place, or is nothing at all."""
    yield from JUNK
    for value in VALUES:
        yield json.dumps(value).encode()
        for row in (
            {"messages": value},
            {"conversations": value},
            {"messages": [value]},
            {"messages": [U, value]},
            {"messages": [U, value, A]},
            {"messages": [{"role": value, "content": "x"}, A]},
            {"messages": [U, {"role": value, "content": "x"}]},
            {"messages": [{"role": "user", "content": value}, A]},
            {"messages": [U, {"role": "assistant", "content": value}]},
            {"messages": [{"role": "system", "content": value}, U, A]},
            {"messages": [U, {**A, "tool_calls": value}]},
            {"messages": [U, {"role": "assistant", "tool_calls": [value]}]},
            {"messages": [U, {**A, "tool_calls": [{"function": value}]}]},
            {"messages": [U, {**A, "tool_calls": [{"function": {"name": value, "arguments": value}}]}]},
            {"messages": [U, {**A, "reasoning_content": value}]},
            {"messages": [U, {**A, "more": value}]},
            {"messages": [U, A], "tools": value},
            {"messages": [U, A], "id": value, "finish_reason": value},
            {"conversations": [{"from": value, "value": "x"}, {"from": "gpt", "value": value}]},
        ):
            yield json.dumps(row).encode()
    deep: Any = "x"
    for _ in range(400):
        deep = {"a": [deep]}
    yield json.dumps({"messages": [U, {**A, "tool_calls": [{"function": {"name": "f", "arguments": deep}}]}]}).encode()
    yield json.dumps({"messages": [U, A], "tools": [deep]}).encode()
    yield b'{"messages": [], "messages": [{"role": "user", "content": "u"}, {"role": "assistant", "role": "user", "content": "a"}]}'
    yield b'{"messages": [{"role": "user", "content": "u"}, {"role": "user", "role": "assistant", "content": "kept, since last wins"}]}'
    yield json.dumps({"messages": [U, A] * 600}).encode()
    yield json.dumps({"messages": [U, {**A, "content": "word " * 200_000}]}).encode()
    yield json.dumps({"messages": [{**U, "content": "\x00" * 1_000_000}, A]}).encode()
    yield json.dumps({"messages": [U, A]}).encode() + b"\r"


@pytest.fixture(scope="module")
def hostile_file(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    lines = [*hostile(), *(json.dumps(row).encode() for row in chats(40))]
    random.Random(0).shuffle(lines)
    path = tmp_path_factory.mktemp("hostile") / "x.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path, path.read_bytes().count(b"\n")


@pytest.mark.parametrize(
    "how", ["jsonl", *(pytest.param(how, marks=pytest.mark.slow) for how in ("json", "qwen3", "turns", "drop", "text", "tokens"))]
)
def test_every_row_is_a_sample_or_listed(tiny_target: Path, tmp_path: Path, hostile_file: tuple[Path, int], how: str) -> None:
    path, count = hostile_file
    assert count > 600
    template = tmp_path / "qwen3.jinja"
    template.write_text(QWEN3_LIKE)
    settings: dict[str, dict[str, Any]] = {
        "qwen3": {"target_chat_template": str(template), "mask_reasoning": True},
        "turns": {"one_sample_per_turn": True, "max_tokens": 64},
        "drop": {"too_long": "drop", "drop_duplicates": True, "loss_on": "last_turn"},
    }
    config = config_of(tiny_target, tmp_path / "p", path, **settings.get(how, {}))
    if how in ("json", "text", "tokens"):
        entry = {"path": str(path), "type": how, **({"document": "line"} if how == "text" else {})}
        if how == "tokens":
            ids = write_jsonl(tmp_path / "ids.jsonl", [{"input_ids": [1, 2, 3]}])
            entries: list[Any] = [entry, {"path": str(ids), "type": "tokens"}]
        else:
            entries = [entry]
        config = type(config).model_validate(
            {**config.model_dump(), "data": {**config.data.model_dump(), "train_ds": {"input_cfg": entries}}}
        )
    corpus = prepare(config)
    counts = corpus.counts
    assert counts["rows"] == counts["kept"] + sum(counts["dropped"].values())
    lost = [(line["source"], line["row"]) for line in dropped(corpus) if "piece" not in line]
    samples = [corpus.sample(i).check() for i in range(len(corpus))]
    kept = {(sample.source, sample.row) for sample in samples}
    assert len(lost) == len(set(lost)) == sum(counts["dropped"].values())
    assert kept.isdisjoint(lost)
    assert len(kept) == counts["kept"]
    assert len({sample.sample_id for sample in samples}) == len(samples) == counts["samples"]
    if how != "json":
        rows = {row for source, row in kept | set(lost) if source == "x.jsonl"}
        assert rows == set(range(count))
    assert all(sample.num_supervised >= 2 for sample in samples)
    assert sum(line["detail"].isprintable() for line in dropped(corpus)) == len(dropped(corpus))


@pytest.mark.slow
def test_the_stage_ends_without_a_traceback(tiny_target: Path, tmp_path: Path, hostile_file: tuple[Path, int]) -> None:
    path, count = hostile_file
    config = tmp_path / "c.yaml"
    config.write_text(
        f"model: {{target: {{path: {tiny_target}}}}}\n"
        f"data: {{prepared_dir: {tmp_path / 'p'}, num_proc: 2, train_ds: {{input_cfg: [{{path: {path}}}]}}}}\n"
    )
    finished = run("stages/corpus.py", "prepare", str(config))
    account = json.loads(finished.text[finished.text.index("{\n") :])
    assert account["rows"] == count == account["kept"] + sum(account["dropped"].values())
    assert "Traceback" not in finished.text
    shown = run("stages/corpus.py", "preview", str(config), "--count", "10")
    assert "Traceback" not in shown.text
    assert "\x1b[2J" not in shown.text
