"""Files of chats: which they are, where they can be divided, and their rows.

A file is read through once to divide it into parts and to digest them. A part is what one worker tokenises at a time and
what a resumed run does not do again; where parts begin depends on the file's bytes alone, so the parts' digests are also
the file's fingerprint, and a worker that finds other bytes than those knows that the file was changed under it.
"""

import glob
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

from pipeline.config.schema import InputSection
from pipeline.corpus.rows import Row, Unusable, read_row
from pipeline.errors import CorpusError

# The first two belong to the fingerprint: they decide where record batches end in the prepared file.
PART_ROWS = 1024
PART_BYTES = 4 << 20
ROW_BYTES = 8 << 20  # tokenising takes up to 600 bytes a token, so a row must have an end


@dataclass(frozen=True, slots=True)
class Source:
    """One file. `ordinal` counts the files of its own set from 0, so that files added to one set rename nothing in another;
    `split` is "train" or the name of the validation set it is in."""

    ordinal: int
    name: str
    path: Path
    split: str


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive lines of a source: bytes [offset, offset + num_bytes), rows [first_row, first_row + num_rows)."""

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
    found = [(split, path) for split, inputs in sets.items() for given in inputs for path in _match(given.path)]
    names = [path.name for _, path in found]
    splits = [split for split, _ in found]
    return [
        Source(splits[:i].count(split), path.name if names.count(path.name) == 1 else f"{i}:{path.name}", path, split)
        for i, (split, path) in enumerate(found)
    ]


def divide(source: Source) -> Iterator[Part]:
    """The parts of a source, in order, from one pass over its bytes."""
    offset = first_row = num_bytes = num_rows = 0
    digest, inside_row = sha256(), False
    with _opened(source) as stream:
        # A piece is a whole row, except of rows so long that they come in several.
        for piece in iter(partial(stream.readline, ROW_BYTES), b""):
            if num_rows and not inside_row and (num_rows >= PART_ROWS or num_bytes + len(piece) > PART_BYTES):
                yield Part(source, offset, num_bytes, first_row, num_rows, digest.hexdigest())
                offset, first_row = offset + num_bytes, first_row + num_rows
                num_bytes, num_rows, digest = 0, 0, sha256()
            digest.update(piece)
            num_bytes, num_rows = num_bytes + len(piece), num_rows + (not inside_row)
            inside_row = not piece.endswith(b"\n")
    if num_rows:
        yield Part(source, offset, num_bytes, first_row, num_rows, digest.hexdigest())


def read_part(part: Part) -> Iterator[Row]:
    """The rows of a part. Raises `CorpusError` when the file no longer holds the bytes that it was divided by."""
    digest, data = sha256(), b""
    with _opened(part.source) as stream:
        stream.seek(part.offset)
        left = part.num_bytes
        # More than one read is needed for a row only that is too long to be looked at.
        while left and (data := stream.read(min(left, ROW_BYTES))):
            digest.update(data)
            left -= len(data)
    if digest.hexdigest() != part.digest:
        raise CorpusError(
            f"{part.source.path} was changed while it was being prepared (rows {part.first_row} to {part.first_row + part.num_rows - 1} "
            f"differ). Run again once it is at rest."
        )
    if part.num_bytes > ROW_BYTES:
        unusable = Unusable("row too long", f"{part.num_bytes} bytes, at most {ROW_BYTES}")
        yield Row(part.source.name, part.first_row, None, unusable)
        return
    for i, line in enumerate(data.removesuffix(b"\n").split(b"\n")):
        yield read_row(part.source.name, part.first_row + i, line)


def read_rows(inputs: Sequence[InputSection]) -> Iterator[Row]:
    """All rows of `inputs`, in order, a part at a time; a row that is no chat says why. `CorpusError` for a file that is not there."""
    for source in find_sources({"": inputs}):
        for part in divide(source):
            yield from read_part(part)


def _match(pattern: str) -> list[Path]:
    path = Path(pattern).expanduser()
    if path.is_file():
        return [path]
    if path.is_dir():
        raise CorpusError(f"{pattern} is a folder; name its files, such as {pattern.rstrip('/')}/*.jsonl")
    # `[` is an ordinary character here; only * and ? match.
    matches = sorted(Path(match) for match in glob.glob(str(path).replace("[", "[[]")) if Path(match).is_file())
    if not matches:
        raise CorpusError(f"{pattern}: no such file, and no file matches it. Check the path in input_cfg.")
    return matches


@contextmanager
def _opened(source: Source) -> Iterator[BinaryIO]:
    try:
        with open(source.path, "rb") as stream:
            yield stream
    except OSError as error:
        raise CorpusError(f"{source.path} cannot be read: {error.strerror or error}") from error
