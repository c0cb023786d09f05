"""What the rules of `data` make of a corpus: which answers, which samples, how long, and none twice."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.schema import Config
from pipeline.corpus import duplicates, sources
from pipeline.corpus.prepare import prepare, prepared_folder
from pipeline.corpus.prepared import PreparedCorpus
from pipeline.errors import ConfigError, TemplateError
from tests.support.tiny import CHATML, QWEN3_LIKE, write_chats, write_jsonl
from tests.unit.corpus.oracle import chatml, mask, runs
from tests.unit.corpus.test_chat import chat
from tests.unit.corpus.test_prepare import config_of, dropped, everything


def with_entries(config: Config, *entries: dict[str, Any], **sets: list[dict[str, Any]]) -> Config:
    """`config` with these training entries, and validation sets by name."""
    data = config.data.model_dump()
    data["train_ds"]["input_cfg"] = entries
    data["validation_ds"]["datasets"] = {name: {"input_cfg": given} for name, given in sets.items()}
    return Config.model_validate({**config.model_dump(), "data": data})


def said(corpus: PreparedCorpus, tokenizer: Any) -> list[list[str]]:
    """The supervised texts of each sample."""
    samples = [corpus.sample(i).check() for i in range(len(corpus))]
    return [[tokenizer.decode(s.input_ids[start : start + length]) for start, length in s.spans.tolist()] for s in samples]


@pytest.fixture
def qwen3(tmp_path: Path) -> str:
    path = tmp_path / "qwen3.jinja"
    path.write_text(QWEN3_LIKE)
    return str(path)


TWO = [*chat("q1", "one two"), *chat("q2", "three four")]
THINKING = [
    TWO[0],
    {"role": "assistant", "content": "one two", "reasoning_content": "first"},
    TWO[2],
    {"role": "assistant", "content": "three four", "reasoning_content": "second"},
]


def test_the_last_answer_alone(tiny_target: Path, tiny_tokenizer: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"messages": TWO}, {"messages": [*TWO, *chat("q3")]}])
    corpus = prepare(config_of(tiny_target, tmp_path / "p", path, loss_on="last_turn"))
    assert said(corpus, tiny_tokenizer) == [["three four<|im_end|>"]] * 2
    assert corpus.counts["last_turn_only"] == 0
    assert corpus.samples_fields["loss_on"] == "last_turn"


def test_one_sample_a_turn_gives_each_the_context_that_it_was_written_in(
    tiny_target: Path, tiny_tokenizer: Any, tmp_path: Path, qwen3: str
) -> None:
    rows = [{"messages": THINKING, "id": "a"}, {"messages": TWO[:2]}, {"messages": chat("q", "", "q", "five six")}]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    corpus = prepare(config_of(tiny_target, tmp_path / "p", path, one_sample_per_turn=True, target_chat_template=qwen3, fraction=0.5))
    think = "<think>\n{}\n</think>\n\n"
    assert said(corpus, tiny_tokenizer) == [
        [f"{think.format('first')}one two<|im_end|>"],
        [f"{think.format('second')}three four<|im_end|>"],
        [f"{think.format('')}one two<|im_end|>"],
        [f"{think.format('')}<|im_end|>"],
        [f"{think.format('')}five six<|im_end|>"],
    ]
    assert corpus.sample_ids().tolist() == ["a", "a/1", "row-0-1", "row-0-2", "row-0-2/1"]
    assert [corpus.sample(i).row for i in range(5)] == [0, 0, 1, 2, 2]
    assert corpus.sample(0).split == corpus.sample(1).split
    assert corpus.sample(3).split == corpus.sample(4).split
    assert {key: corpus.counts[key] for key in ("rows", "kept", "samples", "last_turn_only")} == {
        "rows": 3,
        "kept": 3,
        "samples": 5,
        "last_turn_only": 0,
    }


def test_pieces_that_give_no_sample_are_listed_and_the_row_is_kept(tiny_target: Path, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "x.jsonl", [{"messages": chat("q", "", "q", "five six seven")}, {"messages": chat("q", "", "q", "")}])
    corpus = prepare(config_of(tiny_target, tmp_path / "p", path, one_sample_per_turn=True))
    few = "too few supervised tokens"
    assert [(d["row"], d.get("piece"), d["reason"]) for d in dropped(corpus)] == [(0, 0, few), (1, None, few)]
    assert corpus.counts["left_out"] == corpus.counts["dropped"] == {few: 1}
    assert corpus.sample_ids().tolist() == ["row-0-0/1"]


def test_an_id_that_another_row_has_with_its_turn_is_not_given_twice(tiny_target: Path, tmp_path: Path) -> None:
    rows = [{"messages": TWO, "id": "a"}, {"messages": chat("q9", "nine ten"), "id": "a/1"}]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    corpus = prepare(config_of(tiny_target, tmp_path / "p", path, one_sample_per_turn=True))
    assert corpus.sample_ids().tolist() == ["a", "row-0-0/1", "row-0-1"]


def test_reasoning_is_left_unsupervised(tiny_target: Path, tiny_tokenizer: Any, tmp_path: Path, qwen3: str) -> None:
    inline = [TWO[0], {"role": "assistant", "content": "<think>\nhm </thinking>\n</think>\n\none two"}]
    rows = [{"messages": THINKING[:2]}, {"messages": inline}, {"messages": TWO[:2]}]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    corpus = prepare(config_of(tiny_target, tmp_path / "p", path, mask_reasoning=True, target_chat_template=qwen3))
    assert said(corpus, tiny_tokenizer) == [["one two<|im_end|>"]] * 3
    whole = prepare(config_of(tiny_target, tmp_path / "p", path, target_chat_template=qwen3))
    assert corpus.states_fields == whole.states_fields
    # A template without any reasoning of its own: the marks in the text count.
    corpus = prepare(config_of(tiny_target, tmp_path / "p", path, mask_reasoning=True))
    assert said(corpus, tiny_tokenizer) == [["one two<|im_end|>"]] * 3


# ---- length


def test_what_is_too_long_is_dropped_if_asked(tiny_target: Path, tmp_path: Path) -> None:
    path = write_chats(tmp_path / "x.jsonl", 40)
    whole = prepare(config_of(tiny_target, tmp_path / "p", path))
    corpus = prepare(config_of(tiny_target, tmp_path / "p", path, max_tokens=100, too_long="drop"))
    short = {whole.sample(i).row for i in range(len(whole)) if whole.num_tokens[i] <= 100}
    assert {corpus.sample(i).row for i in range(len(corpus))} == short
    assert corpus.counts["dropped"] == {"longer than max_tokens": 40 - len(short)}
    assert corpus.counts["truncated"] == 0
    assert int(corpus.num_tokens.max()) <= 100


@pytest.mark.parametrize("bos", [False, True])
def test_a_long_text_goes_on_in_further_samples(tiny_target: Path, tiny_tokenizer: Any, tmp_path: Path, bos: bool) -> None:
    from tokenizers.processors import TemplateProcessing

    from tests.support.tiny import build_tokenizer

    tokenizer = build_tokenizer()
    if bos:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)])
    tokenizer.save_pretrained(tmp_path / "target")
    text = "The kettle boils while the rain falls on the roof. " * 30
    (tmp_path / "x.txt").write_text(text)
    config = with_entries(
        config_of(tmp_path / "target", tmp_path / "p", tmp_path / "x.txt", max_tokens=50, fraction=0.5),
        {"type": "text", "path": str(tmp_path / "x.txt")},
        {"path": str(write_chats(tmp_path / "y.jsonl", 20))},
    )
    corpus = prepare(config)
    samples = [s for s in (corpus.sample(i).check() for i in range(len(corpus))) if s.source == "x.txt"]
    ids = tiny_tokenizer(text, add_special_tokens=False)["input_ids"]
    room = 49 if bos else 50
    stretches = [[0] * bos + ids[i : i + room] for i in range(0, len(ids), room)]
    assert [s.input_ids.tolist() for s in samples] == [stretch for stretch in stretches if len(stretch) > 2]
    assert all(s.spans.tolist() == [[1, s.num_tokens - 1]] for s in samples)
    assert len({s.split for s in samples}) == 1
    assert samples[1].sample_id == "row-0-0/1"
    data = config.data.model_copy(update={"too_long": "drop"})
    corpus = prepare(config.model_copy(update={"data": data}))
    assert dropped(corpus)[0]["reason"] == "longer than max_tokens"


def test_token_ids_are_taken_as_they_are(tiny_target: Path, tmp_path: Path) -> None:
    rows = [
        {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1], "id": "given"},
        {"input_ids": [5, 6, 7]},
        {"input_ids": [5, 480]},
        {"input_ids": [5, 6], "loss_mask": [0, 0]},
    ]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    corpus = prepare(with_entries(config_of(tiny_target, tmp_path / "p", path), {"type": "tokens", "path": str(path)}))
    samples = [corpus.sample(i).check() for i in range(len(corpus))]
    assert [(s.sample_id, s.input_ids.tolist(), s.spans.tolist()) for s in samples] == [
        ("given", [5, 6, 7, 8], [[2, 2]]),
        ("row-0-1", [5, 6, 7], [[1, 2]]),
    ]
    assert [d["reason"] for d in dropped(corpus)] == ["token id out of range", "no supervised token"]


def test_texts_and_token_ids_need_no_chat_template(tiny_target: Path, tmp_path: Path) -> None:
    from tests.support.tiny import build_tokenizer

    bare = build_tokenizer()
    bare.chat_template = None
    bare.save_pretrained(tmp_path / "bare")
    ids = write_jsonl(tmp_path / "x.jsonl", [{"input_ids": [5, 6, 7]}])
    (tmp_path / "x.txt").write_text("The kettle boils")
    entries: list[dict[str, Any]] = [
        {"type": "tokens", "path": str(ids)},
        {"type": "text", "path": str(tmp_path / "x.txt")},
        {"path": str(write_jsonl(tmp_path / "t.jsonl", [{"body": "The kettle"}])), "keys": {"text": "body"}},
    ]
    config = config_of(tmp_path / "bare", tmp_path / "p", ids)
    assert len(prepare(with_entries(config, *entries))) == 3
    with pytest.raises(TemplateError, match="bare has no chat template"):
        prepare(with_entries(config, *entries, {"path": str(write_chats(tmp_path / "c.jsonl", 2))}))


# ---- duplicates


def test_no_tokens_twice_and_none_of_validation_in_training(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PART_ROWS", 4)
    monkeypatch.setattr(duplicates, "_COMPARED", 3)
    unique = [{"messages": chat(f"question {i}", f"answer number {i}")} for i in range(12)]
    train = [unique[i] for i in (0, 1, 0, 2, 3, 4, 1, 5, 0, 6, 7)]
    sets = {"a": [unique[i] for i in (8, 2, 8, 9)], "b": [unique[i] for i in (2, 10, 5)]}
    paths = {name: [{"path": str(write_jsonl(tmp_path / f"{name}.jsonl", rows))}] for name, rows in sets.items()}
    entry = {"path": str(write_jsonl(tmp_path / "t.jsonl", train))}
    base = config_of(tiny_target, tmp_path / "p", tmp_path / "t.jsonl")
    counted = prepare(with_entries(base, entry, **paths))
    assert (len(counted), counted.counts["duplicates"], counted.counts["also_in_validation"]) == (18, 6, 2)
    assert not {"drop_duplicates", "too_long"} & counted.samples_fields.keys()
    dropping = config_of(tiny_target, tmp_path / "p", tmp_path / "t.jsonl", drop_duplicates=True)
    corpus = prepare(with_entries(dropping, entry, **paths))
    samples = [corpus.sample(i) for i in range(len(corpus))]
    assert [(s.split, s.row) for s in samples] == [
        *(("train", row) for row in (0, 1, 4, 5, 9, 10)),
        *(("a", row) for row in (0, 1, 3)),
        *(("b", row) for row in (0, 1, 2)),
    ]
    assert [(d["source"], d["row"], d["detail"]) for d in dropped(corpus)] == [
        ("t.jsonl", 2, "the same tokens as t.jsonl row 0"),
        ("t.jsonl", 3, "the same tokens as a.jsonl row 1"),
        ("t.jsonl", 6, "the same tokens as t.jsonl row 1"),
        ("t.jsonl", 7, "the same tokens as b.jsonl row 2"),
        ("t.jsonl", 8, "the same tokens as t.jsonl row 0"),
        ("a.jsonl", 2, "the same tokens as a.jsonl row 0"),
    ]
    assert corpus.counts["dropped"] == {"duplicate": 6}
    assert corpus.counts["rows"] == 18 == corpus.counts["kept"] + 6
    assert {d["reason"] for d in dropped(corpus)} == {"duplicate"}


def test_an_id_of_a_dropped_copy_is_free_again(tiny_target: Path, tmp_path: Path) -> None:
    rows = [{"messages": TWO, "id": "a"}, {"messages": TWO, "id": "a"}, {"messages": chat("x", "y z"), "id": "b"}]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    assert prepare(config_of(tiny_target, tmp_path / "p", path)).sample_ids().tolist() == ["row-0-0", "row-0-1", "b"]
    assert prepare(config_of(tiny_target, tmp_path / "p", path, drop_duplicates=True)).sample_ids().tolist() == ["a", "b"]


def test_duplicates_agree_with_a_set(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PART_ROWS", 16)
    rng = np.random.default_rng(0)
    rows = [{"messages": chat(f"q{i}", f"answer {i}")} for i in rng.integers(0, 60, 200).tolist()]
    config = config_of(tiny_target, tmp_path / "p", write_jsonl(tmp_path / "x.jsonl", rows), drop_duplicates=True, fraction=0.3)
    corpus = prepare(config)
    first = list({json.dumps(row): i for i, row in reversed(list(enumerate(rows)))}.values())
    assert [corpus.sample(i).row for i in range(len(corpus))] == sorted(first)


# ---- tools, dates, identity


def test_tools_of_a_row_reach_the_template(tiny_target: Path, tiny_tokenizer: Any, tmp_path: Path) -> None:
    template = tmp_path / "tools.jinja"
    template.write_text("{% if tools %}{{ '<|im_start|>tools\\n' + tools | tojson + '<|im_end|>\\n' }}{% endif %}" + CHATML)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    path = write_jsonl(
        tmp_path / "x.jsonl", [{"messages": TWO, "tools": tools}, {"messages": TWO, "tools": json.dumps(tools)}, {"messages": TWO}]
    )
    corpus = prepare(config_of(tiny_target, tmp_path / "p", path, target_chat_template=str(template)))
    before = ("<|im_start|>tools\n" + json.dumps(tools) + "<|im_end|>\n", False)
    for i, pieces in enumerate(([before, *chatml(TWO)], [before, *chatml(TWO)], chatml(TWO))):
        sample = corpus.sample(i)
        assert tiny_tokenizer.decode(sample.input_ids) == "".join(piece for piece, _ in pieces)
        assert sample.spans.tolist() == runs(mask(tiny_tokenizer, sample.input_ids.tolist(), pieces))


DATED = "{{ 'Today is ' + strftime_now('%d %b %Y') + '\\n' }}" + CHATML


def test_a_template_that_writes_the_date_gets_the_one_that_is_configured(tiny_target: Path, tiny_tokenizer: Any, tmp_path: Path) -> None:
    template = tmp_path / "dated.jinja"
    template.write_text(DATED)
    path = write_jsonl(tmp_path / "x.jsonl", [{"messages": TWO}])
    with pytest.raises(TemplateError, match=r"chat_template_kwargs\.strftime_now=2025-06-30"):
        prepare(config_of(tiny_target, tmp_path / "p", path, target_chat_template=str(template)))
    corpora = []
    for day in ("2025-06-30", "2025-07-01"):
        kwargs = {"strftime_now": day}
        config = config_of(tiny_target, tmp_path / "p", path, target_chat_template=str(template), target_chat_template_kwargs=kwargs)
        corpora.append(prepare(config))
        assert corpora[-1].states_fields["chat_template_kwargs"] == kwargs
    assert tiny_tokenizer.decode(corpora[0].sample(0).input_ids).startswith("Today is 30 Jun 2025\n<|im_start|>user")
    assert corpora[0].states_fields["token_ids"] != corpora[1].states_fields["token_ids"]
    with pytest.raises(ConfigError, match="expected a date such as"):
        kwargs = {"strftime_now": "yesterday"}
        prepare(config_of(tiny_target, tmp_path / "p", path, target_chat_template=str(template), target_chat_template_kwargs=kwargs))


def test_rules_at_their_defaults_are_no_part_of_the_identity(tiny_target: Path, tmp_path: Path) -> None:
    path = write_chats(tmp_path / "x.jsonl", 10)
    corpus = prepare(config_of(tiny_target, tmp_path / "p", path))
    assert list(corpus.samples_fields) == sorted(
        ["mask_rules", "min_supervised_tokens", "heldout_fraction", "validation_sets", "loss_masks", "splits"]
    )
    assert corpus.samples_fields["mask_rules"] == 2
    rules: dict[str, Any] = {
        "too_long": "drop",
        "drop_duplicates": True,
        "loss_on": "last_turn",
        "one_sample_per_turn": True,
        "mask_reasoning": True,
    }
    folders = {prepared_folder(config_of(tiny_target, tmp_path / "p", path, **{name: value})) for name, value in rules.items()}
    assert len(folders | {corpus.path}) == 6


def test_how_rows_are_read_is_part_of_the_fingerprint(tiny_target: Path, tmp_path: Path) -> None:
    path = str(write_chats(tmp_path / "x.jsonl", 10))
    base = config_of(tiny_target, tmp_path / "p", tmp_path / "x.jsonl")
    entries: list[dict[str, Any]] = [
        {},
        {"system": "s"},
        {"roles": {"x": "user"}},
        {"keys": {"id": "uid"}},
        {"max_rows": 5},
        {"type": "json"},
        {"type": "text", "document": "line"},
    ]
    folders = [prepared_folder(with_entries(base, {"path": path, **entry})) for entry in entries]
    assert len(set(folders)) == len(entries)
    assert prepared_folder(with_entries(base, {"path": path, "max_rows": 10})) == folders[0]
    json_too, lines = (prepare(with_entries(base, {"path": path, **entry})) for entry in ({"type": "json"}, {}))
    assert everything(json_too) == everything(lines)
