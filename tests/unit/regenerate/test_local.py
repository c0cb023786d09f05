"""The target in this process: its answers are its own, whatever shares their batch, and the corpus reads them as they are."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.config.schema import Config
from pipeline.corpus.prepare import prepare
from pipeline.decode.speculative import greedy_decode
from pipeline.errors import CacheLockedError, LaunchError, RegenerateError
from pipeline.regenerate.local import regenerate_locally
from pipeline.runtime.files import FolderLock
from tests.support.tiny import write_chats, write_jsonl
from tests.unit.regenerate.conftest import answers_of, chat, read_jsonl, read_report, regenerate_config, user
from tests.unit.target.conftest import lone_rank

END = 2


def _run(config: Config) -> list[dict[str, Any]]:
    regenerate_locally(config, lone_rank())
    return read_jsonl(Path(config.regenerate.output or "") / "answers.jsonl")


def _answers(target: Path, folder: Path, name: str, **section: Any) -> list[dict[str, Any]]:
    return _run(regenerate_config(target, folder, output=str(folder / name), **section))


@pytest.fixture(scope="module")
def answered(answering_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 chats and the answers to them. Read it, never write into it."""
    folder = tmp_path_factory.mktemp("answered")
    write_chats(folder / "chats.jsonl", 24)
    _run(regenerate_config(answering_target, folder))
    return folder


def test_answers_are_those_of_greedy_decoding_turn_by_turn(answering_target: Path, answered: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(answering_target, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(answering_target)
    asked, ended = read_jsonl(answered / "chats.jsonl"), read_jsonl(answered / "answers" / "answers.jsonl")
    assert [row["row"] for row in ended] == list(range(24))
    states: Counter[str] = Counter()
    for question, row in zip(asked, ended, strict=True):
        messages: list[dict[str, str]] = []
        for message in question["messages"]:
            if message["role"] != "assistant":
                messages.append(message)
                continue
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            ids = greedy_decode(model, prompt, 8, {END}).ids
            text = tokenizer.decode(ids, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": text if ids[-1] == END else text.rstrip("\ufffd")})
            if ids[-1] != END:
                break
        assert row["messages"] == messages
        assert row["finish_reason"] == ("stop" if ids[-1] == END else "length")
        states[row["finish_reason"]] += 1
    assert min(states["stop"], states["length"]) >= 3, "both kinds are wanted here"
    report = read_report(answered)
    assert (report["done"], report["cut"]) == (states["stop"], states["length"])


def test_the_corpus_reads_them_and_supervises_no_end_that_was_not_written(answering_target: Path, answered: Path, tmp_path: Path) -> None:
    config = regenerate_config(answering_target, tmp_path)
    data = {**config.model_dump()["data"], "train_ds": {"input_cfg": [{"path": str(answered / "answers" / "answers.jsonl")}]}}
    corpus = prepare(Config.model_validate({**config.model_dump(), "data": {**data, "prepared_dir": str(tmp_path / "p"), "num_proc": 1}}))
    rows = {row["row"]: row for row in read_jsonl(answered / "answers" / "answers.jsonl")}
    ends: dict[str, list[int]] = {"stop": [], "length": []}
    for i in range(len(corpus)):
        sample = corpus.sample(i)
        row = rows[sample.row]
        assert np.count_nonzero(sample.input_ids == END) == len(row["messages"])
        supervised = int((sample.input_ids[sample.loss_mask] == END).sum())
        assert supervised == len(answers_of(row)) - (row["finish_reason"] == "length")
        ends[row["finish_reason"]].append(supervised)
    assert sum(ends["length"]) > 0, "earlier turns of a cut chat ended, and that is to be learned"


def test_sampled_answers_belong_to_the_row_and_the_seed(answering_target: Path, tmp_path: Path) -> None:
    write_jsonl(tmp_path / "chats.jsonl", [chat(f"tell me about the river {i % 3}", "and then?") for i in range(9)])
    sampling = {"temperature": 1.0, "top_p": 0.9, "top_k": 50}
    one, four, nine = (_answers(answering_target, tmp_path, f"b{size}", batch_size=size, **sampling) for size in (1, 4, 9))
    assert one == four == nine
    assert len({json.dumps(row["messages"]) for row in one}) == 9, "rows with one question sample apart"
    assert _answers(answering_target, tmp_path, "seed", seed=1, **sampling) != one


@pytest.mark.slow
def test_samples_have_the_probabilities_of_the_target(answering_target: Path, tmp_path: Path) -> None:
    rows = 1500
    write_jsonl(tmp_path / "chats.jsonl", [{"messages": [user("Why is the sky blue?")]}] * rows)
    found = _answers(answering_target, tmp_path, "one", temperature=0.7, top_k=4, max_new_tokens=1, batch_size=500)
    tokenizer = AutoTokenizer.from_pretrained(answering_target)
    model = AutoModelForCausalLM.from_pretrained(answering_target, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template([user("Why is the sky blue?")], add_generation_prompt=True, return_tensors="pt")["input_ids"]
    logits, ids = model(prompt).logits[0, -1].topk(4)
    expected = (logits / 0.7).softmax(-1).tolist()
    texts = [tokenizer.decode([token], skip_special_tokens=True).rstrip("\ufffd") for token in ids.tolist()]
    counts = Counter(answers_of(row)[0] for row in found)
    assert set(counts) <= set(texts)
    for text in set(texts):
        share = sum(p for p, other in zip(expected, texts, strict=True) if other == text)
        assert abs(counts[text] / rows - share) < 4.5 * (share * (1 - share) / rows) ** 0.5 + 1e-9


@pytest.mark.parametrize("thinking", [False, True])
def test_template_arguments_reach_the_prompt(thinking_target: Path, tmp_path: Path, thinking: bool) -> None:
    write_jsonl(tmp_path / "chats.jsonl", [chat("Why is the sky blue?")])
    [row] = _answers(thinking_target, tmp_path, "answers", chat_template_kwargs={"enable_thinking": thinking})
    tokenizer = AutoTokenizer.from_pretrained(thinking_target)
    model = AutoModelForCausalLM.from_pretrained(thinking_target, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(row["messages"][:1], add_generation_prompt=True, return_dict=False, enable_thinking=thinking)
    assert tokenizer.decode(prompt).endswith("</think>\n\n") is not thinking
    text = tokenizer.decode(greedy_decode(model, prompt, 8, {END}).ids, skip_special_tokens=True)
    assert answers_of(row) == [text.rstrip("\ufffd") if row["finish_reason"] == "length" else text]


def test_rows_that_ask_nothing_or_too_much_are_listed(answering_target: Path, tmp_path: Path) -> None:
    rows = [chat("one"), {"messages": [{"role": "system", "content": "x"}]}, chat("word " * 5000), chat("two"), "no object"]
    write_jsonl(tmp_path / "chats.jsonl", rows)
    found = _answers(answering_target, tmp_path, "answers")
    assert [row["row"] for row in found] == [0, 3]
    failed = read_jsonl(tmp_path / "answers" / "failed.jsonl")
    assert [(row["row"], row["reason"], row["again"]) for row in failed] == [
        (1, "system only", False),
        (2, "prompt too long", False),
        (4, "wrong type", False),
    ]
    report = read_report(tmp_path)
    assert report["rows"] == report["done"] + report["cut"] + report["failed"] == 5


def test_own_ids_are_kept(answering_target: Path, tmp_path: Path) -> None:
    rows = [{"id": "a/1", **chat("one")}, {"id": "\ud800", **chat("two")}, chat("three")]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = _answers(answering_target, tmp_path, "answers")
    assert [row.get("id") for row in found] == ["a/1", None, None]


def test_a_finished_run_is_not_done_again(answering_target: Path, tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", 6)
    config = regenerate_config(answering_target, tmp_path)
    first = _run(config)
    journals = {path.name: path.stat().st_size for path in (tmp_path / "answers" / "journal").iterdir()}
    assert _run(config) == first
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "answers" / "journal").iterdir()}
    assert journals.items() <= sizes.items()
    assert sum(sizes.values()) == sum(journals.values())


def test_another_target_template_or_seed_is_refused(answering_target: Path, thinking_target: Path, tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", 4)
    _run(regenerate_config(answering_target, tmp_path))
    with pytest.raises(RegenerateError, match=r"target\.chat_template.*the folder has"):
        _run(regenerate_config(thinking_target, tmp_path))
    with pytest.raises(RegenerateError, match=r"temperature: the folder has 0\.0, this run 1\.0"):
        _run(regenerate_config(answering_target, tmp_path, temperature=1.0))
    _run(regenerate_config(answering_target, tmp_path, seed=5))  # greedy answers have no seed


def test_two_runs_on_one_folder_are_refused(answering_target: Path, tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", 4)
    (tmp_path / "answers").mkdir()
    with FolderLock(tmp_path / "answers"), pytest.raises(CacheLockedError, match="in use by process"):
        _run(regenerate_config(answering_target, tmp_path))


def test_tensor_parallel_generation_is_refused(answering_target: Path, tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match=r"regenerate\.backend=server"):
        regenerate_locally(regenerate_config(answering_target, tmp_path), lone_rank(tp_size=2))
