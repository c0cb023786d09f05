"""A journal that is cut anywhere keeps what lies before the cut, and the later of two lines about a row holds."""

from pathlib import Path

import pytest

from pipeline.errors import RegenerateError
from pipeline.regenerate.journal import Ended, Journal, Ledger


def _ended(index: int, text: str = "…", *, again: bool = False) -> Ended:
    return Ended(index, "failed" if again else "done", {"source": "a", "row": index, "text": text}, again=again, num_tokens=index)


def _write(output: Path, run: int, rank: int, *rows: Ended) -> Path:
    with Journal(output, run, rank) as journal:
        journal.append(rows)
    return output / "journal" / f"{run:05d}-{rank}.jsonl"


def test_rows_come_back_in_order_and_unchanged(tmp_path: Path) -> None:
    rows = [_ended(index, f"line\n{index} \u2028é🙂") for index in range(6)]
    _write(tmp_path, 1, 0, rows[4], rows[1])
    _write(tmp_path, 1, 1, rows[5], rows[0])
    _write(tmp_path, 2, 0, rows[2], rows[3])
    ledger = Ledger(tmp_path)
    assert list(ledger.read(6)) == rows
    assert ledger.runs == 2
    assert not any(ledger.is_open(index) for index in range(6))
    assert ledger.is_open(6)


def test_cut_at_any_byte_whole_lines_are_kept(tmp_path: Path) -> None:
    rows = [_ended(index, "é") for index in range(3)]
    path = _write(tmp_path, 1, 0, *rows)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        ledger = Ledger(tmp_path)
        assert [ledger.is_open(index) for index in range(3)] == [size < end for end in ends]


def test_what_follows_a_broken_line_is_not_believed(tmp_path: Path) -> None:
    path = _write(tmp_path, 1, 0, *(_ended(index) for index in range(3)))
    data = bytearray(path.read_bytes())
    data[path.read_bytes().index(b"\n") + 3] = 0
    path.write_bytes(data)
    assert [Ledger(tmp_path).is_open(index) for index in range(3)] == [False, True, True]


def test_a_later_run_answers_what_failed(tmp_path: Path) -> None:
    _write(tmp_path, 1, 0, _ended(0, again=True), _ended(1))
    ledger = Ledger(tmp_path)
    assert ledger.is_open(0)
    assert not ledger.is_open(0, again=False)
    assert [ended.state for ended in ledger.read(2)] == ["failed", "done"]
    _write(tmp_path, 2, 0, _ended(0))
    assert not Ledger(tmp_path).is_open(0)
    assert [ended.state for ended in Ledger(tmp_path).read(2)] == ["done", "done"]


def test_a_row_without_an_end_is_an_error(tmp_path: Path) -> None:
    _write(tmp_path, 1, 0, _ended(1))
    with pytest.raises(RegenerateError, match="row 0 of 2 has no end"):
        list(Ledger(tmp_path).read(2))
