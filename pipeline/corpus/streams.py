"""Bytes of a file, compressed or not, and the rows in them: lines, or values of JSON.

Both are cut without reading a row, so that a broken one costs nothing but itself. A compressed file has no places to jump to; it is
read forward, and a process that takes one part of it after another goes on where the last one ended.
"""

import bz2
import gzip
import io
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import BinaryIO, TypeAlias, cast

from pyarrow import ArrowException

from pipeline.errors import CorpusError

Pieces: TypeAlias = Iterator[tuple[bytes, bool]]
"""Bytes one after the other, and whether a row ends with them. A piece is a whole row, except of rows so long that they come in several."""

_SKIPPED = 1 << 20
_START, _BETWEEN = re.compile(rb"(?:\xef\xbb\xbf)?\s*\[?[\s,\]]*"), re.compile(rb"[\s,\]]*")
_BRACKET, _QUOTE = re.compile(rb'["{}\[\]]'), re.compile(rb'["\\]')
_SCALAR_END = re.compile(rb"[\s,\]]")


def _zstd(path: Path) -> BinaryIO:
    import pyarrow as pa  # noqa: PLC0415 - for those files alone

    return cast(BinaryIO, io.BufferedReader(cast(io.RawIOBase, pa.CompressedInputStream(pa.OSFile(str(path), "rb"), "zstd"))))


OPENERS: dict[str, Callable[[Path], BinaryIO]] = {
    ".gz": lambda path: cast(BinaryIO, gzip.GzipFile(path)),
    ".bz2": lambda path: cast(BinaryIO, bz2.BZ2File(path)),
    ".xz": lambda path: cast(BinaryIO, lzma.LZMAFile(path)),  # noqa: SIM115 - whoever opens it closes it
    ".zst": _zstd,
}


def is_compressed(path: Path) -> bool:
    return path.suffix.lower() in OPENERS


def bare_suffix(path: Path) -> str:
    """The ending of the name that says what the file holds, once it is decompressed."""
    return (path.with_suffix("") if is_compressed(path) else path).suffix.lower()


def open_bytes(path: Path) -> BinaryIO:
    """The file's bytes, decompressed."""
    return OPENERS[path.suffix.lower()](path) if is_compressed(path) else open(path, "rb")


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """What a missing or damaged file raises in the block becomes a `CorpusError`."""
    try:
        yield
    except (OSError, EOFError, zlib.error, lzma.LZMAError, ArrowException) as error:
        raise CorpusError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error


class Cursor:
    """One compressed file, open in this process: reads at rising offsets go on where the last one ended."""

    def __init__(self) -> None:
        self._file: tuple[object, ...] = ()
        self._stream: BinaryIO | None = None
        self._at = 0

    def seek(self, path: Path, offset: int) -> None:
        """Be at `offset` of the file's decompressed bytes."""
        status = os.stat(path)
        file = (path, status.st_ino, status.st_size, status.st_mtime_ns)
        if self._stream is None or file != self._file or offset < self._at:
            self.close()
            self._stream, self._file, self._at = open_bytes(path), file, 0
        while self._at < offset and self.read(min(_SKIPPED, offset - self._at)):
            pass

    def read(self, num_bytes: int) -> bytes:
        assert self._stream is not None
        try:
            data = self._stream.read(num_bytes)
        except BaseException:
            self.close()
            raise
        self._at += len(data)
        return data

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self._stream = None


def lines(stream: BinaryIO, longest: int) -> Pieces:
    """Lines, each with its end."""
    for piece in iter(partial(stream.readline, longest), b""):
        yield piece, piece.endswith(b"\n")


def documents(stream: BinaryIO, longest: int) -> Pieces:
    """One row: the whole file."""
    piece = stream.read(longest)
    while piece:
        following = stream.read(longest)
        yield piece, not following
        piece = following


class _Value:
    """How far one JSON value has been looked at. Only brackets and strings count."""

    def __init__(self, first: bytes) -> None:
        self.depth = 1 if first in b"{[" else 0
        self.in_string = first == b'"'
        self.is_scalar = not self.depth and not self.in_string

    def scan(self, buffer: bytes, at: int) -> tuple[int, bool]:
        """How far the value is known to reach in `buffer` from `at` on, and whether it ends there."""
        while True:
            pattern = _SCALAR_END if self.is_scalar else _QUOTE if self.in_string else _BRACKET
            found = pattern.search(buffer, at)
            if found is None:
                return len(buffer), False
            at, byte = found.end(), found[0]
            if self.is_scalar:
                return found.start(), True
            if byte == b"\\":
                if at == len(buffer):
                    return found.start(), False
                at += 1
            elif byte == b'"':
                self.in_string = not self.in_string
            else:
                self.depth += 1 if byte in b"{[" else -1
            if not self.depth and not self.in_string:
                return at, True


def values(stream: BinaryIO, longest: int, at_start: bool = True) -> Pieces:
    """The elements of one JSON array, or values one after the other, each with what separates it from the one before.

    `at_start`: the stream is at the file's beginning, where an array may open. A value longer than `longest` comes in pieces. What
    follows the last value is left out.
    """
    buffer, begin, at = b"", 0, 0  # a piece begins at `begin`, and is known up to `at`
    value: _Value | None = None
    while more := stream.read(min(_SKIPPED, longest)):
        buffer, at, begin = buffer[begin:] + more, at - begin, 0
        while at < len(buffer):
            if value is None:
                if at_start and len(buffer) < 4 and (more := stream.read(4)):  # enough to tell a byte order mark
                    buffer += more
                    continue
                skipped = _START.match(buffer) if at_start else _BETWEEN.match(buffer, at)
                assert skipped is not None
                at = skipped.end()
                if at == len(buffer):
                    break
                value, at, at_start = _Value(buffer[at : at + 1]), at + 1, False
            before = at
            at, ends = value.scan(buffer, at)
            if ends:
                yield buffer[begin:at], True
                value, begin = None, at
            elif at == before or at == len(buffer):
                break
        if value is not None and at - begin >= longest:
            yield buffer[begin:at], False
            begin = at
    if value is not None:
        yield buffer[begin:], True


def bare_values(data: bytes, at_start: bool) -> list[bytes]:
    """The values in the bytes of a part, without what separates them."""
    found: list[bytes] = []
    for piece, _ in values(cast(BinaryIO, io.BytesIO(data)), len(data) + 1, at_start):
        skipped = (_START if at_start and not found else _BETWEEN).match(piece)
        found.append(piece[skipped.end() :] if skipped else piece)
    return found
