from pathlib import Path

import pytest

from pipeline.config.schema import DataSection
from pipeline.corpus.entries import entries_of
from pipeline.errors import CorpusError
from tests.support.tiny import write_chats


def _data(*paths: object) -> DataSection:
    return DataSection.model_validate({"train_ds": {"input_cfg": [{"path": str(path), "weight": 1.0} for path in paths]}})


def test_files_that_are_here_are_listed_as_capture_lists_them(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_chats(tmp_path / folder / "chats.jsonl", 1)
    write_chats(tmp_path / "a" / "more.jsonl", 1)
    data = _data(tmp_path / "b/chats.jsonl", tmp_path / "a/*.jsonl")
    assert entries_of(data, ["more.jsonl", "0:chats.jsonl", "1:chats.jsonl"]) == [1, 0, 1]


def test_names_tell_where_the_files_are_elsewhere() -> None:
    data = _data("/far/chat-*.jsonl", "/far/code.jsonl", "/far/[x].jsonl", "/far/1:odd.jsonl")
    assert entries_of(data, ["code.jsonl", "chat-7.jsonl", "[x].jsonl", "3:chat-7.jsonl", "1:odd.jsonl"]) == [1, 0, 2, 0, 3]


def test_what_cannot_be_told_is_an_error() -> None:
    data = _data("/far/a/chats.jsonl", "/far/b/*.jsonl")
    with pytest.raises(CorpusError, match=r"samples of 0:chats\.jsonl belong to several entries .*\(/far/a/chats.*, /far/b/"):
        entries_of(data, ["0:chats.jsonl"])
    with pytest.raises(CorpusError, match=r"samples of other\.json belong to no entry"):
        entries_of(data, ["other.json"])
