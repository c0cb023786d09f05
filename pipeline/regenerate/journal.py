"""What became of each row, one line a row, written as it happens: the journal of a folder of answers.

    OUTPUT/journal/00002-3.jsonl      the third run's rank 3

A run never writes into the file of another, so a file has at most one end that a kill left half-written. Reading stops there. Of
two lines about one row the later run's holds: a row whose server failed is tried again by the next run.
"""

import json
import logging
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from pipeline.errors import RegenerateError
from pipeline.runtime.files import sync_folder

log = logging.getLogger(__name__)

State: TypeAlias = Literal["done", "cut", "failed"]
MOST_NESTED = 100
"""So deep may the values in a row be nested: what reads a journal takes 200, and a row is a few deep by itself."""
_OPEN, _ENDED, _AGAIN = range(3)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a row ended."""

    index: Annotated[int, Field(ge=0, description="number of the row among all rows of the input, from 0")]
    state: Annotated[State, Field(description="cut: the last answer ended at the token limit")]
    row: Annotated[dict[str, Any], Field(description="the row of answers.jsonl; of a failed one, only id, source and row")]
    num_tokens: Annotated[int, Field(ge=0, description="tokens that the target wrote, in all turns; 0 where a server does not say")] = 0
    exact: Annotated[
        bool | None, Field(description="whether the chat template gives back the very tokens that were written; null: not known")
    ] = None
    shortened: Annotated[bool, Field(description="the chat ends before its original did: a tool was called, or an answer was cut")] = False
    reason: Annotated[str | None, Field(description="of a failed row: one of a few fixed phrases")] = None
    detail: Annotated[str | None, Field(description="of a failed row: what was found")] = None
    again: Annotated[bool, Field(description="of a failed row: the next run tries it again")] = False

    def line(self) -> bytes:
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(given, ensure_ascii=False).encode() + b"\n"


_ADAPTER = TypeAdapter(Ended)


class Journal:
    """One process's file of one run, and a context manager. Appended lines are on the disk when `append` returns; `RegenerateError` where
    they cannot be."""

    def __init__(self, output: Path, run: int, rank: int) -> None:
        folder = output / "journal"
        folder.mkdir(exist_ok=True)
        self._file = open(folder / f"{run:05d}-{rank}.jsonl", "ab")  # noqa: SIM115 - it is closed by `__exit__`
        sync_folder(folder)

    def append(self, ended: Sequence[Ended]) -> None:
        lines = b"".join(one.line() for one in ended)
        try:
            self._file.write(lines)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RegenerateError(
                f"{self._file.name} cannot be written: {error}. What is journaled stays; once there is space, the same command goes on."
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self._file.close()
        except OSError:  # of lines that could not be written, which `append` has told
            if error is None:
                raise


class Ledger:
    """Which rows have ended, and where the journal says how; 13 bytes a row in memory.

    `runs` counts the runs whose files are there. Raises `RegenerateError` for a journal that cannot be read.
    """

    def __init__(self, output: Path) -> None:
        self._files = sorted((output / "journal").glob("*.jsonl"))
        self._state, self._file, self._offset = bytearray(), array("i"), array("q")
        self.runs = 0 if not self._files else int(self._files[-1].name.split("-")[0])
        for number, path in enumerate(self._files):
            for offset, ended in _lines(path):
                self._note(ended, number, offset)

    def is_open(self, index: int, *, again: bool = True) -> bool:
        """Whether row `index` has no end yet; with `again`, one that failed for a reason of its server counts as open."""
        state = self._state[index] if index < len(self._state) else _OPEN
        return state == _OPEN or (again and state == _AGAIN)

    def read(self, num_rows: int) -> Iterator[Ended]:
        """How the rows ended, in the order of the input. Raises `RegenerateError` when one of `num_rows` has not."""
        streams = [open(path, "rb") for path in self._files]  # noqa: SIM115 - they are read in turns
        try:
            for index in range(num_rows):
                if self.is_open(index, again=False):
                    raise RegenerateError(f"row {index} of {num_rows} has no end in the journal. Run again to answer it.")
                stream = streams[self._file[index]]
                stream.seek(self._offset[index])
                yield _ADAPTER.validate_json(stream.readline())
        finally:
            for stream in streams:
                stream.close()

    def _note(self, ended: Ended, file: int, offset: int) -> None:
        missing = ended.index + 1 - len(self._state)
        if missing > 0:
            self._state.extend(bytes(missing))
            self._file.extend([0] * missing)
            self._offset.extend([0] * missing)
        self._state[ended.index] = _AGAIN if ended.again else _ENDED
        self._file[ended.index], self._offset[ended.index] = file, offset


def _lines(path: Path) -> Iterator[tuple[int, Ended]]:
    """The lines of a journal with their offsets, up to the first that is not whole."""
    offset = 0
    try:
        with open(path, "rb") as stream:
            for line in stream:
                try:
                    if not line.endswith(b"\n"):
                        raise ValueError("no end")
                    ended = _ADAPTER.validate_json(line)
                except (ValidationError, ValueError):
                    log.warning("%s is half-written from byte %d on; the rows that it lacks are answered again", path, offset)
                    return
                yield offset, ended
                offset += len(line)
    except OSError as error:
        raise RegenerateError(f"{path} cannot be read: {error}. Mend its permissions or the disk, then run again.") from error


def journal_schema() -> dict[str, Any]:
    """JSON Schema of a journal's line."""
    return _ADAPTER.json_schema()
