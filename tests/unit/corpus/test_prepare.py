"""A corpus from files to samples: the account of all rows, ids, splits, fingerprints, and what a broken run leaves."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.config.schema import Config
from pipeline.corpus import sources
from pipeline.corpus.prepare import open_prepared, prepare, prepared_folder
from pipeline.corpus.prepared import PreparedCorpus
from pipeline.errors import CorpusError, TargetError, TemplateError
from pipeline.runtime.files import FolderLock
from tests.support.tiny import CHATML, QWEN3_LIKE, build_tokenizer, chats, write_chats, write_jsonl
from tests.unit.corpus.oracle import chatml, mask, runs
from tests.unit.corpus.test_rows import BAD


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PART_ROWS", 16)


def config_of(target: Path, folder: Path, *paths: Path, validation: dict[str, Path] | None = None, **data: Any) -> Config:
    """One process, `paths` as training sources, `validation` by name; keys with a dot in them go to model.target."""
    fraction = data.pop("fraction", 0.0)
    target_fields = {key.removeprefix("target_"): data.pop(key) for key in list(data) if key.startswith("target_")}
    sets = {name: {"input_cfg": [{"path": str(path)}]} for name, path in (validation or {}).items()}
    given = {"prepared_dir": str(folder), "num_proc": 1, "train_ds": {"input_cfg": [{"path": str(path)} for path in paths]}, **data}
    return Config.model_validate(
        {
            "model": {"target": {"path": str(target), **target_fields}},
            "data": {**given, "validation_ds": {"fraction": fraction, "datasets": sets}},
        }
    )


def everything(corpus: PreparedCorpus) -> list[Any]:
    return [(s.sample_id, s.source, s.row, s.split, s.input_ids.tolist(), s.spans.tolist()) for s in map(corpus.sample, range(len(corpus)))]


def files_of(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and path.name != ".lock"
    }


def dropped(corpus: PreparedCorpus) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (corpus.path / "dropped.jsonl").read_text().splitlines()]


def test_samples_are_the_chats_in_order(tiny_target: Path, tiny_tokenizer: Any, tmp_path: Path) -> None:
    rows = chats(50)
    corpus = prepare(config_of(tiny_target, tmp_path / "p", write_jsonl(tmp_path / "x.jsonl", rows)))
    assert len(corpus) == 50
    for i, row in enumerate(rows):
        sample = corpus.sample(i).check()
        ids = tiny_tokenizer.apply_chat_template(row["messages"], tokenize=True, return_dict=False)
        assert (sample.row, sample.source, sample.split, sample.sample_id) == (i, "x.jsonl", "train", f"row-0-{i}")
        assert sample.input_ids.tolist() == ids
        assert sample.spans.tolist() == runs(mask(tiny_tokenizer, ids, chatml(row["messages"])))
    samples = [corpus.sample(i) for i in range(50)]
    assert corpus.num_tokens.tolist() == [s.num_tokens for s in samples]
    assert corpus.counts == {
        "rows": 50,
        "kept": 50,
        "dropped": {},
        "samples": 50,
        "left_out": {},
        "truncated": 0,
        "last_turn_only": 0,
        "after_prompt": 0,
        "answers_cut_short": 0,
        "generated": 0,
        "duplicates": 0,
        "also_in_validation": 0,
        "tokens": sum(s.num_tokens for s in samples),
        "supervised": sum(s.num_supervised for s in samples),
        "by_split": {
            "train": {"samples": 50, "tokens": int(corpus.num_tokens.sum()), "supervised": corpus.counts["supervised"], "generated": 0}
        },
    }
    assert sorted(files_of(corpus.path)) == ["dropped.jsonl", "prepared.json", "samples.arrow"]
    with pytest.raises(IndexError):
        corpus.sample(50)


def test_openai_and_sharegpt_rows_give_the_same_samples(tiny_target: Path, tmp_path: Path) -> None:
    names = {"system": "system", "user": "human", "assistant": "gpt"}
    rows = chats(20)
    other = [{"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in row["messages"]]} for row in rows]
    filled = [{"messages": [{**m, "tool_calls": None, "name": None} for m in row["messages"]], "tools": None} for row in rows]
    corpora = []
    for i, given in enumerate((rows, other, filled)):
        (tmp_path / str(i)).mkdir()
        corpora.append(prepare(config_of(tiny_target, tmp_path / "p", write_jsonl(tmp_path / str(i) / "x.jsonl", given))))
    assert everything(corpora[0]) == everything(corpora[1]) == everything(corpora[2])
    assert len({corpus.path for corpus in corpora}) == 3
    assert corpora[0].fields == corpora[1].fields == corpora[2].fields


def test_a_hostile_file_is_accounted_for_row_by_row(tiny_target: Path, tmp_path: Path) -> None:
    good = [json.dumps(row).encode() for row in chats(60)]
    bad = [(value if isinstance(value, bytes) else json.dumps(value).encode(), reason) for value, reason in BAD.values()]
    user, answer = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a b"}
    for messages, reason in (
        ([{"role": "system", "content": "s"}], "system only"),
        ([user], "no assistant turn"),
        ([answer, user, answer], "assistant first"),
        ([user, {**answer, "content": ""}], "too few supervised tokens"),
        ([user, {**answer, "content": "x \ud83d"}], "invalid text"),
        ([user, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}], "template error"),
    ):
        bad.append((json.dumps({"messages": messages}).encode(), reason))
    lines: list[tuple[bytes, str | None]] = [*((line, None) for line in good), *bad, *bad, *bad, *bad, *bad]
    random.Random(0).shuffle(lines)
    lines.append((json.dumps({"messages": [user, {**answer, "content": "word " * 200_000}]}).encode(), None))
    assert len(lines) > 200
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join(line for line, _ in lines))
    corpus = prepare(config_of(tiny_target, tmp_path / "p", path))
    expected = [(i, reason) for i, (_, reason) in enumerate(lines) if reason]
    assert [(d["row"], d["reason"]) for d in dropped(corpus)] == expected
    assert all(d["source"] == "x.jsonl" for d in dropped(corpus))
    assert [corpus.sample(i).row for i in range(len(corpus))] == [i for i, (_, reason) in enumerate(lines) if not reason]
    counts = corpus.counts
    assert counts["rows"] == len(lines) == counts["kept"] + sum(counts["dropped"].values())
    assert counts["dropped"] == {reason: sum(r == reason for _, r in expected) for reason in {r for _, r in expected}}
    assert counts["truncated"] == 1
    assert corpus.num_tokens.max() == 4096


def test_an_answer_cut_at_a_limit_has_no_end_token(tiny_target: Path, tiny_tokenizer: Any, tmp_path: Path) -> None:
    rows = [{**row, "finish_reason": ("stop", "length", None)[i % 3]} for i, row in enumerate(chats(12))]
    corpus = prepare(config_of(tiny_target, tmp_path / "p", write_jsonl(tmp_path / "x.jsonl", rows)))
    assert corpus.counts["answers_cut_short"] == 4
    assert corpus.counts["generated"] == corpus.counts["by_split"]["train"]["generated"] == 8
    for i, row in enumerate(rows):
        pieces = chatml(row["messages"], cut_short=row["finish_reason"] == "length")
        assert corpus.sample(i).spans.tolist() == runs(mask(tiny_tokenizer, corpus.sample(i).input_ids.tolist(), pieces))


def test_cut_to_max_tokens_is_a_prefix(tiny_target: Path, tmp_path: Path) -> None:
    path = write_chats(tmp_path / "x.jsonl", 40)
    whole = prepare(config_of(tiny_target, tmp_path / "p", path))
    cut = prepare(config_of(tiny_target, tmp_path / "p", path, max_tokens=60))
    by_row = {whole.sample(i).row: whole.sample(i) for i in range(len(whole))}
    for i in range(len(cut)):
        sample, full = cut.sample(i).check(), by_row[cut.sample(i).row]
        assert sample.input_ids.tolist() == full.prefix(60).input_ids.tolist()
        assert sample.spans.tolist() == full.prefix(60).spans.tolist()
    short = [row for row, sample in by_row.items() if sample.prefix(60).num_supervised < 2]
    assert [d["row"] for d in dropped(cut)] == short
    assert cut.counts["truncated"] == sum(s.num_tokens > 60 and s.prefix(60).num_supervised >= 2 for s in by_row.values())


# ---- ids


def test_ids_are_the_rows_own_where_they_are_unique(tiny_target: Path, tmp_path: Path) -> None:
    given = ["a", "twice", 3, None, "twice", "", "row-0-3", "x" * 300, "\ud83d", "b/1", "row-1-0", "row-zero"]
    rows = [{**row, "id": own} for row, own in zip(chats(12), given, strict=True)]
    first = tmp_path / "x.jsonl"
    first.write_text("".join(json.dumps(row) + "\n" for row in rows))
    second = write_jsonl(tmp_path / "y.jsonl", [{**chats(1)[0], "id": "b/1"}, {**chats(2)[1], "id": "c"}])
    corpus = prepare(config_of(tiny_target, tmp_path / "p", first, second))
    ids = [corpus.sample(i).sample_id for i in range(len(corpus))]
    own = {0: "a", 11: "row-zero"}
    assert ids == [own.get(i, f"row-0-{i}") for i in range(12)] + ["row-1-0", "c"]
    assert corpus.sample_ids().tolist() == ids


def test_files_that_are_added_to_one_set_leave_the_ids_of_the_others(tiny_target: Path, tmp_path: Path) -> None:
    files = [write_jsonl(tmp_path / f"{name}.jsonl", chats(3, seed)) for seed, name in enumerate("abv")]
    ids = []
    for training in (files[:1], files[:2]):
        config = config_of(tiny_target, tmp_path / "p", *training, validation={"held-back": files[2]})
        ids.append(prepare(config).sample_ids().tolist())
    assert ids[0] == [*(f"row-0-{i}" for i in range(3)), *(f"row-held-back-0-{i}" for i in range(3))]
    assert ids[1] == ids[0][:3] + [f"row-1-{i}" for i in range(3)] + ids[0][3:]


# ---- splits


def test_rows_that_are_added_move_no_sample_to_the_other_side(tiny_target: Path, tmp_path: Path) -> None:
    rows = [{**row, "id": f"id{i}"} for i, row in enumerate(chats(300))]

    def sides(name: str, given: list[dict[str, Any]], **more: Any) -> dict[str, str]:
        corpus = prepare(config_of(tiny_target, tmp_path / "p", write_jsonl(tmp_path / name, given), fraction=0.3, **more))
        return {s.sample_id: s.split for s in map(corpus.sample, range(len(corpus)))}

    few = sides("few.jsonl", rows[:200])
    assert set(few.values()) == {"train", "heldout"}
    assert 35 <= list(few.values()).count("heldout") <= 85
    shuffled = random.Random(1).sample(rows, 300)
    many = sides("many.jsonl", shuffled)
    assert {key: many[key] for key in few} == few
    cut = sides("cut.jsonl", rows[:200], max_tokens=80)
    assert {key: few[key] for key in cut} == cut
    copies = sides("copies.jsonl", rows[:50] + [{**row, "id": f"copy{i}"} for i, row in enumerate(rows[:50])])
    assert all(copies[f"copy{i}"] == copies[f"id{i}"] for i in range(50))


def test_named_validation_sets_are_splits(tiny_target: Path, tmp_path: Path) -> None:
    train, val = write_chats(tmp_path / "t.jsonl", 30), write_chats(tmp_path / "v.jsonl", 10, seed=1)
    corpus = prepare(config_of(tiny_target, tmp_path / "p", train, validation={"math": val, "more": val}, fraction=0.4))
    by_split = corpus.counts["by_split"]
    assert {name: sums["samples"] for name, sums in by_split.items() if name in ("math", "more")} == {"math": 10, "more": 10}
    assert by_split["train"]["samples"] + by_split["heldout"]["samples"] == 30
    assert by_split["heldout"]["samples"] > 0
    assert corpus.sample(30).source == "1:v.jsonl"


# ---- fingerprints


def test_the_fingerprint_is_of_content(tiny_target: Path, tmp_path: Path) -> None:
    rows = chats(40)
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    val = write_chats(tmp_path / "v.jsonl", 5, seed=2)
    base = config_of(tiny_target, tmp_path / "p", path, validation={"a": val})
    corpus = prepare(base)

    (tmp_path / "moved").mkdir()
    moved = tmp_path / "moved" / "renamed.jsonl"
    moved.write_bytes(path.read_bytes())
    same = config_of(tiny_target, tmp_path / "p", moved, validation={"a": val}, num_proc=2)
    assert prepared_folder(same) == corpus.path
    found = open_prepared(same)
    assert found is not None
    assert found.fields == corpus.fields

    template = tmp_path / "template.jinja"
    template.write_text(CHATML + " ")
    other = build_tokenizer()
    other.add_tokens(["<extra>"])
    other.save_pretrained(tmp_path / "other")
    shuffled = write_jsonl(tmp_path / "shuffled.jsonl", rows[::-1])
    changed = write_jsonl(tmp_path / "changed.jsonl", [*rows[:-1], {**rows[-1], "finish_reason": "length"}])
    sets = {"a": val}
    variants = {
        "order": config_of(tiny_target, tmp_path / "p", shuffled, validation=sets),
        "content": config_of(tiny_target, tmp_path / "p", changed, validation=sets),
        "order of sources": config_of(tiny_target, tmp_path / "p", val, validation={"a": path}),
        "name of a set": config_of(tiny_target, tmp_path / "p", path, validation={"b": val}),
        "fraction": config_of(tiny_target, tmp_path / "p", path, validation=sets, fraction=0.5),
        "max_tokens": config_of(tiny_target, tmp_path / "p", path, validation=sets, max_tokens=4095),
        "min_supervised": config_of(tiny_target, tmp_path / "p", path, validation=sets, min_supervised_tokens=3),
        "template": config_of(tiny_target, tmp_path / "p", path, validation=sets, target_chat_template=str(template)),
        "arguments": config_of(tiny_target, tmp_path / "p", path, validation=sets, target_chat_template_kwargs={"enable_thinking": False}),
        "tokenizer": config_of(tmp_path / "other", tmp_path / "p", path, validation=sets),
    }
    folders = {name: prepared_folder(config) for name, config in variants.items()}
    assert len({corpus.path, *folders.values()}) == len(variants) + 1
    assert open_prepared(variants["order"]) is None

    def differing(name: str) -> set[str]:
        found = prepare(variants[name])
        return {
            f"{part}.{key}" for part, fields in corpus.fields.items() for key, value in fields.items() if found.fields[part][key] != value
        }

    # What the states depend on, and what only masks, splits and selection do, differ apart.
    assert differing("content") == {"samples.loss_masks"}
    assert differing("fraction") == {"samples.heldout_fraction", "samples.splits"}
    assert differing("order") == {"states.token_ids", "samples.loss_masks"}
    assert differing("max_tokens") == {"states.max_tokens"}
    assert differing("arguments") == {"states.chat_template_kwargs"}


# ---- runs that broke off, and files that are damaged


def test_a_run_that_failed_is_taken_up_and_ends_with_the_same_bytes(tiny_target: Path, tmp_path: Path) -> None:
    path = write_chats(tmp_path / "x.jsonl", 100)
    reference = prepare(config_of(tiny_target, tmp_path / "p", path))
    config = config_of(tiny_target, tmp_path / "q", path)
    folder = prepared_folder(config)
    (folder / "samples.arrow").mkdir(parents=True)  # stands in its way once all parts are done
    with pytest.raises(CorpusError, match="cannot be written"):
        prepare(config)
    assert open_prepared(config) is None
    (folder / "samples.arrow").rmdir()
    parts = sorted((folder / "parts").glob("*.arrow"))
    assert len(parts) == 7
    parts[1].unlink()
    parts[2].write_bytes(parts[2].read_bytes()[:-50])
    parts[3].write_bytes(b"")
    (folder / "parts" / ".00005.arrow.1-ab.tmp").write_bytes(b"half")
    before = {part: part.stat().st_mtime_ns for part in parts[4:] + parts[:1]}
    (folder / "samples.arrow").mkdir()
    with pytest.raises(CorpusError):
        prepare(config)
    assert {part: part.stat().st_mtime_ns for part in before} == before
    (folder / "samples.arrow").rmdir()
    assert files_of(prepare(config).path) == files_of(reference.path)


def test_a_complete_corpus_is_opened_not_made_again(tiny_target: Path, tmp_path: Path) -> None:
    config = config_of(tiny_target, tmp_path / "p", write_chats(tmp_path / "x.jsonl", 20))
    corpus = prepare(config)
    before = (corpus.path / "samples.arrow").stat().st_mtime_ns
    (corpus.path / "parts").mkdir()  # as a kill right after the last file leaves it
    assert everything(prepare(config)) == everything(corpus)
    assert (corpus.path / "samples.arrow").stat().st_mtime_ns == before
    assert not (corpus.path / "parts").exists()


@pytest.mark.parametrize("damage", ["short", "missing", "no description", "another version", "fewer"])
def test_damage_to_a_complete_corpus_is_an_error_that_names_the_file(tiny_target: Path, tmp_path: Path, damage: str) -> None:
    config = config_of(tiny_target, tmp_path / "p", write_chats(tmp_path / "x.jsonl", 20))
    folder = prepare(config).path
    samples, description = folder / "samples.arrow", json.loads((folder / "prepared.json").read_bytes())
    if damage == "short":
        samples.write_bytes(samples.read_bytes()[:-100])
    elif damage == "missing":
        samples.unlink()
    elif damage == "no description":
        (folder / "prepared.json").write_bytes(b"{")
    elif damage == "another version":
        (folder / "prepared.json").write_text(json.dumps({**description, "format_version": 0}))
    else:
        (folder / "prepared.json").write_text(json.dumps({**description, "counts": {**description["counts"], "samples": 21}}))
    with pytest.raises(CorpusError, match=str(folder)):
        prepare(config)


def test_a_second_run_waits_for_the_one_that_prepares_the_same_corpus(tiny_target: Path, tmp_path: Path) -> None:
    config = config_of(tiny_target, tmp_path / "p", write_chats(tmp_path / "x.jsonl", 20))
    folder = prepared_folder(config)
    folder.mkdir(parents=True)
    with ThreadPoolExecutor(1) as pool:
        with FolderLock(folder):
            second = pool.submit(prepare, config)
            with pytest.raises(TimeoutError):
                second.result(0.5)
            assert not (folder / "prepared.json").exists()
        assert len(second.result(60)) == 20


# ---- nothing usable


def test_nothing_usable_is_an_error_with_the_reasons(tiny_target: Path, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"messages": []}\n{"messages": []}\nno json\n')
    with pytest.raises(CorpusError, match=r"none of 3 rows .*empty conversation × 2 \(such as x.jsonl row 0\); broken JSON × 1") as caught:
        prepare(config_of(tiny_target, tmp_path / "p", path))
    listed = Path(str(caught.value).split("listed in ")[1].removesuffix("."))
    assert len(listed.read_text().splitlines()) == 3
    path.write_bytes(b"")
    with pytest.raises(CorpusError, match="holds no row"):
        prepare(config_of(tiny_target, tmp_path / "p", path))


def test_a_template_that_leaves_every_mask_empty_is_named(tiny_target: Path, tmp_path: Path) -> None:
    template = tmp_path / "odd.jinja"
    template.write_text(CHATML.split("{% if add")[0] + "{% if add_generation_prompt %}<|im_start|>model\n{% endif %}")
    path = write_chats(tmp_path / "x.jsonl", 5)
    with pytest.raises(TemplateError, match=r"odd\.jinja: not one of 5 chats got a supervised token.*turn not located × 5"):
        prepare(config_of(tiny_target, tmp_path / "p", path, target_chat_template=str(template)))
    template.write_text(
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if false %}{% generation %}{% endgeneration %}{% endif %}"
    )
    with pytest.raises(TemplateError, match=r"odd\.jinja.*no supervised token × 5"):
        prepare(config_of(tiny_target, tmp_path / "p", path, target_chat_template=str(template)))


def test_rows_on_which_the_template_rewrites_history_are_counted(tiny_target: Path, tmp_path: Path) -> None:
    template = tmp_path / "qwen3.jinja"
    template.write_text(QWEN3_LIKE)
    rows = [row for row in chats(30) if len(row["messages"]) > 3]
    corpus = prepare(config_of(tiny_target, tmp_path / "p", write_jsonl(tmp_path / "x.jsonl", rows), target_chat_template=str(template)))
    assert corpus.counts["last_turn_only"] == corpus.counts["kept"] == len(rows)
    assert all(len(corpus.sample(i).spans) == 1 for i in range(len(corpus)))


def test_an_empty_validation_set_is_an_error(tiny_target: Path, tmp_path: Path) -> None:
    path, empty = write_chats(tmp_path / "x.jsonl", 5), write_jsonl(tmp_path / "v.jsonl", [{"messages": []}])
    with pytest.raises(CorpusError, match=r"no sample in val; found 5 in train"):
        prepare(config_of(tiny_target, tmp_path / "p", path, validation={"val": empty}))
    with pytest.raises(CorpusError, match=r"no sample in train; found 1 in heldout"):
        prepare(config_of(tiny_target, tmp_path / "p", write_chats(tmp_path / "y.jsonl", 1), fraction=0.999999))


# ---- tokenizers that cannot be used


def test_tokenizers_that_cannot_be_used(tiny_target: Path, tmp_path: Path) -> None:
    path = write_chats(tmp_path / "x.jsonl", 5)
    with pytest.raises(TargetError, match="is not a folder"):
        prepare(config_of(tmp_path / "nowhere", tmp_path / "p", path))
    (tmp_path / "empty").mkdir()
    with pytest.raises(TargetError, match="cannot be loaded"):
        prepare(config_of(tmp_path / "empty", tmp_path / "p", path))
    bare = build_tokenizer()
    bare.chat_template = None
    bare.save_pretrained(tmp_path / "bare")
    with pytest.raises(TemplateError, match="has no chat template"):
        prepare(config_of(tmp_path / "bare", tmp_path / "p", path))
    with pytest.raises(TemplateError, match="cannot be read"):
        prepare(config_of(tiny_target, tmp_path / "p", path, target_chat_template=str(tmp_path / "missing.jinja")))


def test_digests_do_not_depend_on_how_the_corpus_is_divided(tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_chats(tmp_path / "x.jsonl", 40)
    one = prepare(config_of(tiny_target, tmp_path / "p", path))
    monkeypatch.setattr(sources, "PART_ROWS", 3)
    other = prepare(config_of(tiny_target, tmp_path / "q", path))
    assert one.fields == other.fields
    assert everything(one) == everything(other)
    assert np.array_equal(one.num_tokens, other.num_tokens)
