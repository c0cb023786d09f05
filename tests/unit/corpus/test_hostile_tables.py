"""Tables and paths that are not as they should be: a row costs itself, a file is named with what is wrong."""

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config.schema import InputSection
from pipeline.corpus import sources
from pipeline.corpus.prepare import prepare
from pipeline.corpus.rows import Row
from pipeline.corpus.sources import read_rows
from pipeline.errors import CorpusError
from tests.unit.corpus.test_prepare import config_of

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a b c"}]


def read(table: pa.Table, path: Path) -> list[Row]:
    pq.write_table(table, path)
    return list(read_rows([InputSection(type="parquet", path=str(path))]))


@pytest.mark.parametrize("name", ["x.pq", "x.PARQUET", "0123abcd"])
def test_a_parquet_file_is_one_whatever_its_name(tmp_path: Path, name: str) -> None:
    (row,) = read(pa.Table.from_pylist([{"messages": CHAT}]), tmp_path / name)
    assert row.messages == CHAT


def test_text_that_was_written_as_bytes_is_text(tmp_path: Path) -> None:
    as_bytes = [{**message, "content": message["content"].encode()} for message in CHAT]
    (row,) = read(pa.Table.from_pylist([{"messages": as_bytes}]), tmp_path / "x.parquet")
    assert row.messages == CHAT


def test_a_row_that_is_no_text_costs_itself(tmp_path: Path) -> None:
    values = pa.array([json.dumps(CHAT).encode(), b"[\xff\xfe", json.dumps(CHAT).encode()], pa.binary())
    _, offsets, data = values.buffers()
    assert offsets is not None
    assert data is not None
    texts = pa.StringArray.from_buffers(3, offsets, data)
    for column in (values, texts):
        rows = read(pa.table({"messages": column}), tmp_path / "x.parquet")
        assert [row.unusable.reason if row.unusable else row.messages for row in rows] == [CHAT, "invalid text", CHAT]


def test_a_row_of_a_table_has_an_end_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "ROW_BYTES", 1000)
    long = [CHAT[0], {"role": "assistant", "content": "x" * 2000}]
    rows = read(pa.Table.from_pylist([{"messages": CHAT}, {"messages": long}, {"messages": CHAT}]), tmp_path / "x.parquet")
    assert [row.unusable.reason if row.unusable else row.messages for row in rows] == [CHAT, "row too long", CHAT]


def test_whatever_is_broken_in_a_parquet_file_names_it_or_costs_rows(tmp_path: Path) -> None:
    texts = [{"messages": [{"role": "user", "content": f"{i * 7919:x}" * 9}, CHAT[1]]} for i in range(500)]
    path = tmp_path / "x.parquet"
    pq.write_table(pa.Table.from_pylist(texts), path)
    whole = path.read_bytes()
    for at in range(4, len(whole) - 200, len(whole) // 40):
        path.write_bytes(whole[:at] + bytes(byte ^ 0xFF for byte in whole[at : at + 40]) + whole[at + 40 :])
        try:
            assert len(list(read_rows([InputSection(type="parquet", path=str(path))]))) == 500
        except CorpusError as error:
            assert "x.parquet cannot be read" in str(error)  # noqa: PT017 - either is right


@pytest.mark.parametrize("path", ["~nobody-of-this-name/x.jsonl", f"/tmp/{'a' * 300}.jsonl"])
def test_a_path_that_can_be_none_says_so(path: str) -> None:
    with pytest.raises(CorpusError, match="Check the path in input_cfg"):
        list(read_rows([InputSection(path=path)]))


def test_a_file_whose_name_is_no_text_is_read(tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"caf\xe9.jsonl")).write_text(json.dumps({"messages": CHAT}))
    assert prepare(config_of(tiny_target, tmp_path / "p", tmp_path / "*.jsonl")).sample(0).source == "caf\\udce9.jsonl"


def test_a_file_of_another_type_is_hinted_at(tiny_target: Path, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps([{"messages": CHAT}], indent=1))
    with pytest.raises(CorpusError, match="need `type` in their entry"):
        prepare(config_of(tiny_target, tmp_path / "p", tmp_path / "x.json"))
