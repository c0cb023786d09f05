"""Files of chats: which they are, where they can be divided, and their rows.

A file is read through once to divide it into parts and to digest them. A part is what one worker tokenises at a time and
what a resumed run does not do again; where parts begin depends on the file's contents alone, so the parts' digests are also
the file's fingerprint, and a worker that finds something else than that knows that the file was changed under it.
"""

import glob
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias

from pipeline.config.schema import InputSection
from pipeline.corpus.messages import too_long
from pipeline.corpus.rows import PLAIN, Row, Unusable, read_document, read_row, read_value
from pipeline.corpus.streams import Cursor, Pieces, bare_suffix, bare_values, documents, is_compressed, lines, open_bytes, reading, values
from pipeline.corpus.tables import Table, digest_of, files_of_dataset, open_table, plain_rows
from pipeline.errors import CorpusError

# The first two belong to the fingerprint: they decide where record batches end in the prepared file.
PART_ROWS = 1024
PART_BYTES = 4 << 20
ROW_BYTES = 8 << 20  # tokenising takes up to 600 bytes a token, so a row must have an end

Form: TypeAlias = Literal["lines", "values", "document", "table"]
_cursor = Cursor()


@dataclass(frozen=True, slots=True)
class Source:
    """One file, or one dataset. `ordinal` counts the files of its own set from 0, so that files added to one set rename nothing in
    another; `split` is "train" or the name of the validation set it is in. `given` says how its rows are read, `entry` counts
    the entries of all sets. `files` are a table's.
    """

    ordinal: int
    name: str
    path: Path
    split: str
    given: InputSection = PLAIN
    entry: int = 0
    files: tuple[Path, ...] = ()

    @property
    def form(self) -> Form:
        """How its rows are told apart."""
        kind, suffix = self.given.type, bare_suffix(self.path)
        if kind == "text":
            return "document" if self.given.document == "file" else "lines"
        if kind in ("parquet", "hf") or (kind == "tokens" and suffix in (".parquet", ".arrow")):
            return "table"
        return "values" if kind == "json" or (kind == "tokens" and suffix == ".json") else "lines"

    @property
    def reading(self) -> dict[str, object]:
        """How its rows are read, as far as that is not the default: with its bytes, what it gives."""
        given = self.given.model_dump()
        return {name: given[name] for name in ("type", "keys", "roles", "system", "document") if given[name] != _DEFAULTS[name]}


_DEFAULTS = PLAIN.model_dump()


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive rows of a source, [first_row, first_row + num_rows); in its (decompressed) bytes, [offset, offset + num_bytes).

    Of a table `num_bytes` are those of its values, and `offset` is 0."""

    source: Source
    offset: int
    num_bytes: int
    first_row: int
    num_rows: int
    digest: str


def find_sources(sets: Mapping[str, Sequence[InputSection]]) -> list[Source]:
    """The files of every set (split name → inputs), in order; a pattern's matches are sorted.

    Files are called by their own name, with a number before it where two share one. Raises `CorpusError` for what is not there.
    """
    found: list[tuple[str, int, InputSection, Path, tuple[Path, ...]]] = []
    entry = 0
    for split, inputs in sets.items():
        for given in inputs:
            found += [(split, entry, given, path, files) for path, files in _match(given)]
            entry += 1
    called = [as_text(path.name) for _, _, _, path, _ in found]
    names, ordinals = Counter(called), Counter[str]()
    sources = []
    for i, (split, number, given, path, files) in enumerate(found):
        name = called[i] if names[called[i]] == 1 else f"{i}:{called[i]}"
        sources.append(Source(ordinals[split], name, path, split, given, number, files))
        ordinals[split] += 1
    return sources


def as_text(name: str | Path) -> str:
    """The name of a file, which need not be valid text, as one that can be written down."""
    return str(name).encode("utf-8", "backslashreplace").decode()


def divide_all(sources: Iterable[Source]) -> Iterator[Part]:
    """The parts of all sources, in order; of each entry no more rows than it asks for."""
    rows = Counter[int]()
    for source in sources:
        most = source.given.max_rows
        for part in divide(source, None if most is None else most - rows[source.entry]):
            rows[source.entry] += part.num_rows
            yield part


def divide(source: Source, max_rows: int | None = None) -> Iterator[Part]:
    """The parts of a source, in order, from one pass over it; `max_rows`: of its first rows alone."""
    if max_rows is not None and max_rows < 1:
        return
    if source.form == "table":
        yield from _divide_table(source, max_rows)
        return
    offset = first_row = num_bytes = num_rows = 0
    digest, inside_row = sha256(), False
    with reading(source.path), open_bytes(source.path) as stream:
        for piece, ends in _pieces(source, stream, 0):
            if num_rows and not inside_row and (num_rows >= PART_ROWS or num_bytes + len(piece) > PART_BYTES):
                yield Part(source, offset, num_bytes, first_row, num_rows, digest.hexdigest())
                offset, first_row = offset + num_bytes, first_row + num_rows
                num_bytes, num_rows, digest = 0, 0, sha256()
            digest.update(piece)
            num_bytes, num_rows = num_bytes + len(piece), num_rows + (not inside_row)
            inside_row = not ends
            if ends and first_row + num_rows == max_rows:
                break
    if num_rows:
        yield Part(source, offset, num_bytes, first_row, num_rows, digest.hexdigest())


def read_part(part: Part) -> Iterator[Row]:
    """The rows of a part. Raises `CorpusError` when the file no longer holds what it was divided by."""
    source = part.source
    if source.form == "table":
        for row, value in enumerate(_table_rows(part), part.first_row):
            bad = isinstance(value, Unusable)
            yield Row(source.name, row, None, value) if bad else read_value(source.name, row, value, source.given)
        return
    data = _read_bytes(part)
    if part.num_bytes > ROW_BYTES:
        yield Row(source.name, part.first_row, None, too_long(part.num_bytes, ROW_BYTES))
        return
    for i, line in enumerate(_rows(source, data, part.offset)):
        if source.given.type == "text":
            yield read_document(source.name, part.first_row + i, line)
        else:
            yield read_row(source.name, part.first_row + i, line, source.given)


def read_rows(inputs: Sequence[InputSection]) -> Iterator[Row]:
    """All rows of `inputs`, in order, a part at a time; a row that is no chat says why. `CorpusError` for a file that is not there."""
    for part in divide_all(find_sources({"": inputs})):
        yield from read_part(part)


def _pieces(source: Source, stream: BinaryIO, offset: int) -> Pieces:
    if source.form == "values":
        return values(stream, ROW_BYTES, at_start=offset == 0)
    return documents(stream, ROW_BYTES) if source.form == "document" else lines(stream, ROW_BYTES)


def _rows(source: Source, data: bytes, offset: int) -> Iterable[bytes]:
    if source.form == "document":
        return [data]
    if source.form == "values":
        return bare_values(data, at_start=offset == 0)
    whole = data.removesuffix(b"\n").split(b"\n")
    return [line.removesuffix(b"\r") for line in whole] if source.given.type == "text" else whole


def _read_bytes(part: Part) -> bytes:
    """The bytes of a part; none of one with a row that is too long to be looked at."""
    digest, pieces, left = sha256(), [], part.num_bytes
    path = part.source.path
    with reading(path), ExitStack() as stack:
        if is_compressed(path):
            _cursor.seek(path, part.offset)
            read: Callable[[int], bytes] = _cursor.read
        else:
            stream = stack.enter_context(open_bytes(path))
            stream.seek(part.offset)
            read = stream.read
        while left and (data := read(min(left, ROW_BYTES))):
            digest.update(data)
            left -= len(data)
            if part.num_bytes <= ROW_BYTES:
                pieces.append(data)
    _check_digest(part, digest.hexdigest())
    return b"".join(pieces)


def _check_digest(part: Part, found: str) -> None:
    if found != part.digest:
        raise CorpusError(
            f"{part.source.path} was changed while it was being prepared (rows {part.first_row} to {part.first_row + part.num_rows - 1} "
            f"differ). Run again once it is at rest."
        )


def _divide_table(source: Source, max_rows: int | None) -> Iterator[Part]:
    table = open_table(source.files, source.given)
    total = table.num_rows if max_rows is None else min(max_rows, table.num_rows)
    size = max(1, min(PART_ROWS, PART_BYTES * table.num_rows // max(1, table.num_bytes)))
    for first in range(0, total, size):
        count = min(size, total - first)
        with reading(source.path):
            batch = table.read(first, count)
        yield Part(source, 0, batch.nbytes, first, count, digest_of(batch))


def _table_rows(part: Part) -> Iterator[Any]:
    table: Table = open_table(part.source.files, part.source.given)
    with reading(part.source.path):
        batch = table.read(part.first_row, part.num_rows)
    _check_digest(part, digest_of(batch))
    return plain_rows(batch, ROW_BYTES)


def _match(given: InputSection) -> list[tuple[Path, tuple[Path, ...]]]:
    """What the entry's path names: one or several files, or a dataset. With each, the files of a table."""
    try:
        path = Path(given.path).expanduser()
        path.is_file()
    except (OSError, RuntimeError) as error:  # a name that no file can have, a user that is not there
        raise CorpusError(
            f"{given.path} cannot be read: {getattr(error, 'strerror', None) or error}. Check the path in input_cfg."
        ) from error
    if given.type == "hf" and path.suffix != ".arrow":
        return [(path, files_of_dataset(given))]
    if path.is_file():
        return [(path, (path,))]
    if path.is_dir():
        raise CorpusError(f"{given.path} is a folder; name its files, such as {given.path.rstrip('/')}/*.jsonl")
    # `[` is an ordinary character here; only * and ? match.
    matches = sorted(Path(match) for match in glob.glob(str(path).replace("[", "[[]"), recursive=True) if Path(match).is_file())
    if not matches:
        raise CorpusError(f"{given.path}: no such file, and no file matches it. Check the path in input_cfg.")
    return [(match, (match,)) for match in matches]
