"""Which files are read, how they are divided, and that every line is a row once."""

import bz2
import dataclasses
import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.schema import InputSection
from pipeline.corpus import sources
from pipeline.corpus.rows import Row
from pipeline.corpus.sources import Source, divide, find_sources, read_part, read_rows
from pipeline.errors import CorpusError

LINES = [b'{"messages": [{"role": "user", "content": "%d"}]}' % i for i in range(20)]


def inputs(*paths: Path | str) -> list[InputSection]:
    return [InputSection(path=str(path)) for path in paths]


def test_files_keep_their_order_and_patterns_are_sorted(tmp_path: Path) -> None:
    for name in ("b.jsonl", "a.jsonl", "c.json", "x[1].jsonl"):
        (tmp_path / name).write_bytes(LINES[0])
    (tmp_path / "d.jsonl").mkdir()
    sets = {"train": inputs(tmp_path / "c.json", tmp_path / "?.jsonl"), "val": inputs(tmp_path / "x[1].jsonl")}
    found = find_sources(sets)
    assert [(s.ordinal, s.name, s.split) for s in found] == [
        (0, "c.json", "train"),
        (1, "a.jsonl", "train"),
        (2, "b.jsonl", "train"),
        (0, "x[1].jsonl", "val"),
    ]
    assert [s.name for s in find_sources({"train": inputs(tmp_path / "x[?].jsonl")})] == ["x[1].jsonl"]


def test_files_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "chats.jsonl").write_bytes(LINES[0])
    assert [s.name for s in find_sources({"train": inputs(tmp_path / "*" / "chats.jsonl")})] == ["0:chats.jsonl", "1:chats.jsonl"]


@pytest.mark.parametrize("name", ["missing.jsonl", "*.nothing", "."])
def test_what_is_not_there_is_an_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(CorpusError, match="folder" if name == "." else "no such file"):
        find_sources({"train": inputs(tmp_path / name)})


def test_every_line_is_a_row_once_whatever_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.jsonl"
    for ending in (b"", b"\n", b"\n\n", b"\n\n\n"):
        data = b"\n".join(LINES) + ending
        path.write_bytes(data)
        count = len(data.splitlines())
        whole = list(read_rows(inputs(path)))
        assert [row.row for row in whole] == list(range(count))
        for rows, size in ((1, 10**6), (3, 10**6), (1000, 1), (1000, 170), (20, 10**6), (1000, 10**6)):
            monkeypatch.setattr(sources, "PART_ROWS", rows)
            monkeypatch.setattr(sources, "PART_BYTES", size)
            parts = list(divide(Source(0, path.name, path, "train")))
            assert [row for part in parts for row in read_part(part)] == whole
            assert [part.first_row for part in parts] == [sum(p.num_rows for p in parts[:i]) for i in range(len(parts))]
            assert sum(part.num_bytes for part in parts) == len(data)
            assert all(part.num_rows <= rows and (part.num_rows == 1 or part.num_bytes <= size) for part in parts)


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").touch()
    assert list(read_rows(inputs(tmp_path / "x.jsonl"))) == []


def test_a_file_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"\n".join(LINES))
    (part,) = divide(Source(0, path.name, path, "train"))
    path.write_bytes(b"\n".join(reversed(LINES)))
    with pytest.raises(CorpusError, match=r"x\.jsonl was changed"):
        list(read_part(part))
    path.unlink()
    with pytest.raises(CorpusError, match=r"x\.jsonl cannot be read"):
        list(read_part(part))


def test_a_row_that_is_too_long_is_listed_and_its_neighbours_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PART_BYTES", 100)
    monkeypatch.setattr(sources, "ROW_BYTES", 200)
    path = tmp_path / "x.jsonl"
    for long in (b"x" * 199 + b"\n", b"x" * 200 + b"\n", b"x" * 201 + b"\n", b"x" * 5000 + b"\n", b"x" * 399 + b"\n", b"x" * 400 + b"\n"):
        for data in (LINES[0] + b"\n" + long + LINES[1] + b"\n", long + LINES[1], LINES[0] + b"\n" + long.removesuffix(b"\n")):
            path.write_bytes(data)
            found = list(read_rows(inputs(path)))
            assert [row.row for row in found] == list(range(len(data.splitlines())))
            for row, line in zip(found, data.splitlines(keepends=True), strict=True):
                reason = row.unusable.reason if row.unusable else None
                assert reason == ("row too long" if len(line) > 200 else "broken JSON" if b"x" in line else None)
    path.write_bytes(b"x" * 1000)
    (part,) = divide(Source(0, path.name, path, "train"))
    path.write_bytes(b"x" * 999 + b"y")
    with pytest.raises(CorpusError, match="was changed"):
        list(read_part(part))


# ---- compressed files, JSON values, plain text


def _zst(data: bytes) -> bytes:
    return bytes(pa.Codec("zstd").compress(data, asbytes=True))


PACKED: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": _zst}


@pytest.mark.parametrize("ending", PACKED)
def test_a_compressed_file_gives_the_rows_of_what_it_holds(tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PART_ROWS", 3)
    data = b"\n".join(LINES) + b"\n"
    plain, packed = tmp_path / "x.jsonl", tmp_path / f"x.jsonl{ending}"
    plain.write_bytes(data)
    half = data.index(b"\n", len(data) // 2)
    packed.write_bytes(PACKED[ending](data[:half]) + PACKED[ending](data[half:]))  # several streams in one file, as parallel packers write
    expected = [dataclasses.replace(row, source=packed.name) for row in read_rows(inputs(plain))]
    assert list(read_rows(inputs(packed))) == expected
    (source,), (bare,) = find_sources({"train": inputs(packed)}), find_sources({"train": inputs(plain)})
    parts = list(divide(source))
    assert [part.digest for part in parts] == [part.digest for part in divide(bare)]
    # In any order, as several workers take them, also backwards.
    for part in [*parts[::-1], *parts[::2], *parts[1::2], parts[0]]:
        assert list(read_part(part)) == expected[part.first_row : part.first_row + part.num_rows]
    packed.write_bytes(packed.read_bytes()[:-20])
    with pytest.raises(CorpusError, match=r"x\.jsonl\.\w+ cannot be read"):
        list(read_rows(inputs(packed)))
    packed.write_bytes(b"no such format" * 10)
    with pytest.raises(CorpusError, match="cannot be read"):
        list(read_rows(inputs(packed)))


def test_a_compressed_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n".join(LINES)))
    assert len(list(read_rows(inputs(path)))) == 20
    path.unlink()
    path.write_bytes(gzip.compress(b"\n".join(LINES[:5])))
    assert len(list(read_rows(inputs(path)))) == 5


CHAT = [{"role": "user", "content": 'a "quoted" [bracket] {brace} \\ 🙂'}, {"role": "assistant", "content": "b\n]}"}]


@pytest.mark.parametrize("form", ["array", "indented", "lines", "spread", "packed"])
def test_json_files_of_one_array_or_of_values_one_after_the_other(tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PART_ROWS", 3)
    rows = [{"messages": CHAT, "id": f"r{i}", "x": [[], {}, [i]]} for i in range(10)]
    text = {
        "array": json.dumps(rows),
        "indented": "\ufeff \n" + json.dumps(rows, indent=2, ensure_ascii=False) + "\n",
        "lines": "".join(json.dumps(row) + "\n" for row in rows),
        "spread": "\n\n".join(json.dumps(row, indent=4) for row in rows),
        "packed": json.dumps(rows),
    }[form]
    path = tmp_path / ("x.json.gz" if form == "packed" else "x.json")
    path.write_bytes(gzip.compress(text.encode()) if form == "packed" else text.encode())
    found = list(read_rows([InputSection(type="json", path=str(path))]))
    assert [(row.row, row.id, row.messages) for row in found] == [(i, f"r{i}", CHAT) for i in range(10)]


def test_a_broken_value_of_a_json_file_costs_itself(tmp_path: Path) -> None:
    good = json.dumps({"messages": CHAT})
    path = tmp_path / "x.json"
    path.write_text(f'[{good}, {{"messages": nonsense}}, 5, "text", [1, 2], null, {good}, }}, {good}] trailing {good} {{"messages": [')
    found = list(read_rows([InputSection(type="json", path=str(path))]))
    reasons = [row.unusable.reason if row.unusable else None for row in found]
    wrong, broken = "wrong type", "broken JSON"
    assert reasons == [None, broken, wrong, wrong, wrong, wrong, None, broken, None, broken, None, broken]


def test_a_value_that_is_too_long_is_listed_and_its_neighbours_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PART_BYTES", 300)
    monkeypatch.setattr(sources, "ROW_BYTES", 400)
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"messages": CHAT}, {"messages": CHAT, "x": "y" * 5000}, {"messages": CHAT}]))
    found = list(read_rows([InputSection(type="json", path=str(path))]))
    assert [row.unusable.reason if row.unusable else None for row in found] == [None, "row too long", None]


def test_a_text_is_a_file_or_a_line(tmp_path: Path) -> None:
    for name, data in (("a.txt", b"one\ntwo\r\n\n three"), ("b.txt", b"\xff"), ("c.txt", b"")):
        (tmp_path / name).write_bytes(data)
    whole = list(read_rows([InputSection(type="text", path=str(tmp_path / "*.txt"))]))
    assert [row.text for row in whole] == ["one\ntwo\r\n\n three", None]  # an empty file has no row
    lines = list(read_rows([InputSection(type="text", document="line", path=str(tmp_path / "a.txt"))]))
    assert [row.text for row in lines] == ["one", "two", None, " three"]
    assert lines[2].unusable is not None


@pytest.mark.parametrize(("most", "expected"), [(1, 1), (4, 4), (19, 19), (20, 20), (21, 21), (1000, 40)])
def test_no_more_rows_than_an_entry_asks_for(tmp_path: Path, most: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PART_ROWS", 3)
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_bytes(b"\n".join(LINES))
    entries = [InputSection(path=str(tmp_path / "?.jsonl"), max_rows=most), InputSection(path=str(tmp_path / "a.jsonl"))]
    assert len(list(read_rows(entries))) == expected + 20


@pytest.mark.parametrize("fields", [{"split": "test"}, {"name": "x"}, {"document": "line"}, {"type": "hf", "document": "line"}])
def test_fields_of_another_type_are_refused(fields: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="is for type"):
        InputSection.model_validate({"path": "x", **fields})


def test_recursive_patterns(tmp_path: Path) -> None:
    (tmp_path / "deep" / "er").mkdir(parents=True)
    for folder in (".", "deep", "deep/er"):
        (tmp_path / folder / "x.jsonl").write_bytes(LINES[0])
    assert len(find_sources({"train": inputs(tmp_path / "**" / "*.jsonl")})) == 3


# ---- tables


def table_of(rows: list[dict[str, object]]) -> pa.Table:
    return pa.Table.from_pylist(rows)


ROWS: list[dict[str, object]] = [
    {
        "messages": [
            {"role": "user", "content": f"q{i}"},
            {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a" if i % 2 else "b": i}}}]},
            {"role": "assistant", "content": f"answer {i}"},
        ],
        "id": f"r{i}",
        "other": "x" * i,
    }
    for i in range(50)
]


def as_json(tmp_path: Path) -> list[Row]:
    path = tmp_path / "same.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return list(read_rows(inputs(path)))


def same(found: list[Row], expected: list[Row]) -> bool:
    return [(r.row, r.id, r.messages, r.unusable) for r in found] == [(r.row, r.id, r.messages, r.unusable) for r in expected]


@pytest.mark.parametrize("group", [7, 13, 1000])
def test_parquet_rows_are_those_of_the_same_json(tmp_path: Path, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PART_ROWS", 10)
    pq.write_table(table_of(ROWS), tmp_path / "x.parquet", row_group_size=group)
    given = InputSection(type="parquet", path=str(tmp_path / "x.parquet"))
    assert same(list(read_rows([given])), as_json(tmp_path))
    (source,) = find_sources({"train": [given]})
    parts = list(divide(source))
    for part in [*parts[::-1], *parts[::2], parts[1], parts[1]]:
        assert [row.id for row in read_part(part)] == [f"r{i}" for i in range(part.first_row, part.first_row + part.num_rows)]
    assert sum(part.num_rows for part in divide(source, 23)) == 23
    pq.write_table(table_of(ROWS), tmp_path / "y.parquet", row_group_size=9, compression="zstd")
    (other,) = find_sources({"train": [InputSection(type="parquet", path=str(tmp_path / "y.parquet"))]})
    if len(list(divide(other))) == len(parts):
        assert [part.digest for part in divide(other)] == [part.digest for part in parts]
    pq.write_table(table_of(ROWS[::-1]), tmp_path / "x.parquet", row_group_size=group)
    with pytest.raises(CorpusError, match="was changed"):
        list(read_part(parts[0]))
    (tmp_path / "x.parquet").write_bytes(b"PAR1 no parquet")
    with pytest.raises(CorpusError, match=r"x\.parquet cannot be read"):
        list(read_rows([given]))


def test_a_table_without_a_column_that_is_read_says_so(tmp_path: Path) -> None:
    pq.write_table(pa.table({"dialog": [1], "label": [2]}), tmp_path / "x.parquet")
    with pytest.raises(CorpusError, match="has the columns dialog, label, expected messages"):
        list(read_rows([InputSection(type="parquet", path=str(tmp_path / "x.parquet"))]))
    (row,) = read_rows([InputSection(type="parquet", path=str(tmp_path / "x.parquet"), keys={"messages": "dialog"})])
    assert row.unusable is not None
    assert row.unusable.reason == "wrong type"


def test_an_empty_table_has_no_rows(tmp_path: Path) -> None:
    pq.write_table(table_of(ROWS).slice(0, 0), tmp_path / "x.parquet")
    assert list(read_rows([InputSection(type="parquet", path=str(tmp_path / "x.parquet"))])) == []


@pytest.mark.parametrize("ending", ["jsonl", "json", "jsonl.gz", "parquet", "arrow"])
def test_token_ids_come_in_any_of_these(tmp_path: Path, ending: str) -> None:
    rows: list[dict[str, object]] = [{"input_ids": [1, 2, i], "loss_mask": [0, 1, 1]} for i in range(5)]
    path = tmp_path / f"x.{ending}"
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    if ending == "parquet":
        pq.write_table(table_of(rows), path)
    elif ending == "arrow":
        with pa.ipc.new_stream(str(path), table_of(rows).schema) as writer:
            writer.write_table(table_of(rows))
    else:
        path.write_bytes(gzip.compress(text) if ending.endswith("gz") else text)
    found = list(read_rows([InputSection(type="tokens", path=str(path))]))
    assert [(row.input_ids, row.loss_mask) for row in found] == [([1, 2, i], [False, True, True]) for i in range(5)]


@pytest.mark.slow
def test_datasets_of_a_folder_and_as_they_were_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(sources, "PART_ROWS", 10)
    datasets.disable_progress_bars()
    expected = as_json(tmp_path)
    whole = datasets.Dataset.from_list(ROWS)
    whole.save_to_disk(str(tmp_path / "saved"), num_shards=3)
    datasets.DatasetDict({"train": whole, "test": whole.select(range(5))}).save_to_disk(str(tmp_path / "splits"))
    (tmp_path / "files").mkdir()
    (tmp_path / "same.jsonl").rename(tmp_path / "files" / "train.jsonl")

    def read(folder: str, **fields: str) -> list[Row]:
        return list(read_rows([InputSection.model_validate({"type": "hf", "path": str(tmp_path / folder), **fields})]))

    assert same(read("saved"), expected)
    assert same(read("splits"), expected)
    assert same(read("files"), expected)
    assert len(read("splits", split="test")) == 5
    assert len(read("saved/data-00001-of-00003.arrow")) == 17
    for folder, split, word in (
        ("nowhere", "train", "cannot be loaded"),
        ("splits", "dev", "cannot be loaded"),
        ("files", "train[:5]", "5 of 50"),
    ):
        with pytest.raises(CorpusError, match=word):
            read(folder, split=split)
