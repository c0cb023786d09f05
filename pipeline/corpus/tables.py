"""Rows of Parquet and Arrow files, and of datasets of the `datasets` package, which keeps them as Arrow files on the disk.

A part of a table is a range of its rows, and its digest is of their values: a table that was written again with other row groups or
another compression is the same one as long as it is divided alike.
"""

import json
import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from typing import Any, cast, get_args

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.config.schema import InputSection, RowKey
from pipeline.corpus.messages import Unusable, shown, too_long
from pipeline.errors import CorpusError

READ = (*get_args(RowKey), "conversations")
"""Columns that a row is read from; others are not looked at, and are no part of the corpus's fingerprint."""


class Table:
    """Files of one schema as rows 0 .. num_rows - 1, read forward: what lies behind the last rows that were read costs no more."""

    def __init__(self, files: Sequence[Path], columns: Sequence[str], is_parquet: bool) -> None:
        self._arrow: pa.Table | None = None
        if is_parquet:
            self._parquet = pq.ParquetFile(files[0], memory_map=True)
            schema, metadata = self._parquet.schema_arrow, self._parquet.metadata
            self._ends = [0]
            for group in range(metadata.num_row_groups):
                self._ends.append(self._ends[-1] + metadata.row_group(group).num_rows)
            self.num_rows = self._ends[-1]
            self.num_bytes = sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))
        else:
            self._arrow = pa.concat_tables([_read_arrow(file) for file in files])
            schema, self.num_rows, self.num_bytes = self._arrow.schema, self._arrow.num_rows, self._arrow.nbytes
        self.columns = [name for name in schema.names if name in columns]
        if not self.columns:
            raise CorpusError(
                f"{files[0]} has the columns {shown(', '.join(schema.names))}, expected messages, conversations, or those that the entry's "
                f"`keys` name."
            )
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._held: list[pa.RecordBatch] = []  # rows from `_at` on that were read already
        self._at = 0

    def read(self, first: int, num_rows: int) -> pa.RecordBatch:
        """Rows [first, first + num_rows), in one piece of memory that begins with them."""
        if self._arrow is not None:
            rows = self._arrow.select(self.columns).slice(first, num_rows)
        else:
            rows = pa.Table.from_batches(self._read_parquet(first, num_rows))
        # `take` copies: what the slices were cut from has no part in the bytes that the digest is of.
        return rows.combine_chunks().take(pa.array(range(rows.num_rows), pa.int64())).combine_chunks().to_batches()[0]

    def _read_parquet(self, first: int, num_rows: int) -> list[pa.RecordBatch]:
        group = max(i for i, start in enumerate(self._ends[:-1]) if start <= first)
        if self._batches is None or first < self._at or self._ends[group] > self._at + sum(batch.num_rows for batch in self._held):
            groups = list(range(group, len(self._ends) - 1))
            self._batches = self._parquet.iter_batches(1024, row_groups=groups, columns=self.columns, use_threads=False)
            self._held, self._at = [], self._ends[group]
        while self._at + sum(batch.num_rows for batch in self._held) < first + num_rows:
            self._held.append(next(self._batches))
            while self._at + self._held[0].num_rows <= first:
                self._at += self._held.pop(0).num_rows
        rows = []
        skip, left = first - self._at, num_rows
        for batch in self._held:
            rows.append(batch.slice(skip, left))
            left -= rows[-1].num_rows
            skip = max(0, skip - batch.num_rows)
        return rows


def open_table(files: Sequence[Path], given: InputSection) -> Table:
    """The table in `files`. One is kept open, since a process reads many parts of it one after the other."""
    try:
        status = tuple((str(file), (found := os.stat(file)).st_size, found.st_mtime_ns, found.st_ino) for file in files)
        is_parquet = given.type == "parquet" or files[0].suffix.lower() == ".parquet"
        return _opened(status, tuple(sorted({*READ, *given.keys.values()})), is_parquet)
    except (OSError, pa.ArrowException) as error:
        raise CorpusError(f"{files[0]} cannot be read: {error}") from error


@lru_cache(maxsize=1)
def _opened(status: tuple[tuple[Any, ...], ...], columns: tuple[str, ...], is_parquet: bool) -> Table:
    return Table([Path(found[0]) for found in status], columns, is_parquet)


def digest_of(batch: pa.RecordBatch) -> str:
    digest = sha256(str(batch.schema.remove_metadata()).encode())
    digest.update(batch.replace_schema_metadata(None).serialize())
    return digest.hexdigest()


def plain_rows(batch: pa.RecordBatch, longest: int) -> Iterator[Any]:
    """The rows as values of JSON; an `Unusable` for one of more than `longest` bytes, or whose text is no UTF-8. A field that is null was
    absent: Arrow gives every object the fields of all others."""
    kind = pa.struct(list(batch.schema))
    try:
        if batch.nbytes <= longest:
            yield from [_plain(row, kind) for row in batch.to_pylist()]
            return
    except ValueError:  # of one row, which costs itself alone
        pass
    for i in range(batch.num_rows):
        row = batch.slice(i, 1)
        if row.nbytes > longest:
            yield too_long(row.nbytes, longest)
            continue
        try:
            yield _plain(row.to_pylist()[0], kind)
        except UnicodeDecodeError as error:
            yield Unusable("invalid text", f"not UTF-8: {error.reason} at byte {error.start}")
        except ValueError as error:
            yield Unusable("wrong type", shown(str(error)))


def _plain(value: Any, kind: pa.DataType) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    if isinstance(kind, pa.JsonType):  # what `datasets` keeps objects in that have not all the same fields
        try:
            return json.loads(value)
        except ValueError:
            return value
    if isinstance(kind, pa.StructType):
        return {field.name: _plain(value[field.name], field.type) for field in kind if value[field.name] is not None}
    if isinstance(value, list) and not isinstance(kind, pa.MapType):
        inner = cast("pa.ListType[Any]", kind).value_type
        return [_plain(item, inner) for item in value]
    if isinstance(value, bytes):  # text that was written as bytes
        return value.decode("utf-8")
    return dict(value) if isinstance(kind, pa.MapType) else value if isinstance(value, str) else str(value)


def _read_arrow(file: Path) -> pa.Table:
    """An Arrow file of either format, mapped; nothing of it is read yet."""
    mapped = pa.memory_map(str(file))
    try:
        return pa.ipc.open_stream(mapped).read_all()
    except pa.ArrowInvalid:
        return pa.ipc.open_file(mapped).read_all()


def files_of_dataset(given: InputSection) -> tuple[Path, ...]:
    """The Arrow files of the split of a dataset: a hub id, a folder that `save_to_disk` wrote, or a folder of data files."""
    try:
        import datasets  # noqa: PLC0415 - an extra, and slow to import
    except ImportError as error:
        raise CorpusError(f"{given.path}: type hf needs the package datasets: pip install 'dflash-pipeline[datasets]'.") from error
    folder = Path(given.path).expanduser()
    saved = (folder / "dataset_dict.json").is_file() or (folder / "state.json").is_file()
    try:
        if saved:
            found = datasets.load_from_disk(str(folder))
            found = found[given.split] if isinstance(found, datasets.DatasetDict) else found
        else:
            found = datasets.load_dataset(str(folder) if folder.is_dir() else given.path, given.name, split=given.split)
    except Exception as error:  # what a hub or a folder can do wrong has no common type
        raise CorpusError(
            f"the dataset {given.path}{f' ({given.name})' if given.name else ''}, split {given.split}, cannot be loaded: "
            f"{type(error).__name__}: {shown(str(error))}. Give path (a hub id or a folder), name and split as for datasets.load_dataset."
        ) from error
    files = tuple(Path(file["filename"]) for file in cast(Any, found).cache_files)
    rows = sum(_read_arrow(file).num_rows for file in files)
    if rows != len(found):
        raise CorpusError(
            f"the dataset {given.path}, split {given.split}, is {len(found)} of {rows} rows in its files. Give a whole split "
            "and max_rows to cut it."
        )
    return files
