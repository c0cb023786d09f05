"""Which files are read, how they are divided, and that every line is a row once."""

from pathlib import Path

import pytest

from pipeline.config.schema import InputSection
from pipeline.corpus import sources
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
