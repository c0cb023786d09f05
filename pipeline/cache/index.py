"""`index.arrow`: one row a sample, and the size of every file, so that opening a cache opens one file and not thousands.

It holds nothing that the shards do not hold, and is made again from them when it is missing. The manifest records the sha256
of the file, so that an index that was altered or belongs to other shards is noticed on opening, and one of what it says, so
that an index made again by another Arrow version can be compared too.
"""

import base64
import contextlib
import hashlib
import json
import logging
import os
import stat
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.cache.layout import FORMAT_VERSION, INDEX, MARKER, SAMPLES, inside, shard_files, shard_folder
from pipeline.cache.manifest import Manifest, canonical, read_marker
from pipeline.cache.samples import SPAN, ShardSamples, column_field, offsets_of
from pipeline.errors import CacheCorruptError
from pipeline.runtime.files import atomic_file

log = logging.getLogger(__name__)

INDEX_SCHEMA = pa.schema(
    [
        column_field("sample_id", pa.large_string()),
        column_field("source", pa.dictionary(pa.int32(), pa.large_string())),
        column_field("row", pa.int64()),
        column_field("split", pa.dictionary(pa.int32(), pa.large_string())),
        column_field("shard", pa.int32()),
        column_field("token_offset", pa.int64()),
        column_field("num_tokens", pa.int32()),
        column_field("num_supervised", pa.int32()),
        column_field("loss_mask", pa.large_list(column_field("item", SPAN))),
    ]
)
"""Columns; the metadata of the schema has `format_version`, `shards` (JSON: by shard its counts, the sha256 of its marker and the bytes of
every file) and `used_token_ids` (base64 of a bitmap, least significant bit first)."""


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """What the index knows of a shard: counts, sha256 of its marker and of samples.arrow, the size in bytes of each of its files."""

    num_samples: int
    num_tokens: int
    marker_sha256: str
    samples_sha256: str
    sizes: dict[str, int]


@dataclass(frozen=True)
class Index:
    """All samples of a cache by number: sample i is row i of every column.

    int64 [n]: `row`, `token_offset` (of its first token in its shard's arrays). int32 [n]: `shard`, `num_tokens`,
    `num_supervised`, `source` and `split` (codes into `sources`, `splits`). Spans (start, length) of supervised tokens lie one
    after the other in `span_starts`, `span_lengths` int32; those of sample i are rows `span_offsets[i]` to `span_offsets[i + 1]`.
    `used_token_ids` bool [largest id + 1]: true for ids that occur in the corpus. `shards` by shard number.
    """

    table: pa.Table
    row: NDArray[np.int64]
    shard: NDArray[np.int32]
    token_offset: NDArray[np.int64]
    num_tokens: NDArray[np.int32]
    num_supervised: NDArray[np.int32]
    source: NDArray[np.int32]
    sources: tuple[str, ...]
    split: NDArray[np.int32]
    splits: tuple[str, ...]
    span_offsets: NDArray[np.int64]
    span_starts: NDArray[np.int32]
    span_lengths: NDArray[np.int32]
    used_token_ids: NDArray[np.bool_]
    shards: tuple[ShardEntry, ...]

    def __len__(self) -> int:
        return len(self.row)

    @cached_property
    def sample_id(self) -> NDArray[Any]:
        """str [n]; made when first asked for, about 0.1 s for a million samples."""
        return np.asarray(self.table.column("sample_id").to_numpy())

    @cached_property
    def first_of_shard(self) -> NDArray[np.int64]:
        """int64 [shards + 1]: number of the first sample of every shard, then of all samples."""
        return offsets_of(np.array([entry.num_samples for entry in self.shards], np.int64))

    def spans(self, i: int) -> NDArray[np.int32]:
        """int32 [n, 2], rows (start, length) of the supervised tokens of sample i."""
        begin, end = self.span_offsets[i], self.span_offsets[i + 1]
        return np.stack((self.span_starts[begin:end], self.span_lengths[begin:end]), axis=1)

    def of_split(self, name: str) -> NDArray[np.int64]:
        """Numbers of the samples of a split, ascending; none if there is no such split."""
        return np.flatnonzero(self.split == self.splits.index(name)) if name in self.splits else np.empty(0, np.int64)

    def content_sha256(self) -> str:
        """Of the columns' values and the metadata; the same whichever Arrow version wrote the file."""
        digest = hashlib.sha256(canonical([FORMAT_VERSION, self.sources, self.splits, [astuple(entry) for entry in self.shards]]))
        id_lengths, id_bytes = _string_buffers(self.table.column("sample_id").chunk(0))
        for values in (
            id_lengths,
            id_bytes,
            self.row,
            self.shard,
            self.token_offset,
            self.num_tokens,
            self.num_supervised,
            self.source,
            self.split,
            self.span_offsets,
            self.span_starts,
            self.span_lengths,
            np.packbits(self.used_token_ids),
        ):
            digest.update(np.ascontiguousarray(values).data)
        return digest.hexdigest()


def build_index(cache: Path, manifest: Manifest, shards: Sequence[int] | None = None) -> Index:
    """Put the index together from all shards, or from `shards`, ascending, as if there were no others.

    Raises `CacheCorruptError` naming the first file that is missing, cut or disagrees.
    """
    numbers = range(manifest.num_shards) if shards is None else shards
    with ThreadPoolExecutor() as pool:
        parts = list(pool.map(lambda shard: _shard_part(cache, manifest, shard), numbers))
    table = pa.concat_tables([part for part, _, _ in parts])
    columns = {name: table.column(name).combine_chunks() for name in table.column_names}
    for name in ("source", "split"):
        columns[name] = columns[name].dictionary_encode()
    used = np.zeros(max(len(bitmap) for _, _, bitmap in parts), np.bool_)
    for _, _, bitmap in parts:
        used[: len(bitmap)] |= bitmap
    entries = dict.fromkeys(range(manifest.num_shards), ShardEntry(0, 0, "", "", {})) | dict(
        zip(numbers, (entry for _, entry, _ in parts), strict=True)
    )
    metadata = {
        "format_version": str(FORMAT_VERSION),
        "shards": json.dumps([astuple(entry) for entry in entries.values()]),
        "used_token_ids": base64.b64encode(np.packbits(used, bitorder="little").tobytes()).decode(),
        "num_token_ids": str(len(used)),
    }
    schema = INDEX_SCHEMA.with_metadata(metadata)
    return _index_of(pa.table([columns[name] for name in schema.names], schema=schema))


def _shard_part(cache: Path, manifest: Manifest, shard: int) -> tuple[pa.Table, ShardEntry, NDArray[np.bool_]]:
    """Index rows of one shard, its entry, and the ids that it uses."""
    folder = shard_folder(cache, shard)
    marker, data = read_marker(cache, shard)
    sizes = {MARKER: len(data), **{name: record.size for name, record in sorted(marker.files.items())}}
    if set(marker.files) != set(shard_files(manifest.arrays)):
        raise CacheCorruptError(
            f"{folder / MARKER} lists {sorted(marker.files)}, expected {sorted(shard_files(manifest.arrays))}. Capture the shard again."
        )
    faults = size_faults(folder, sizes)
    if faults:
        raise CacheCorruptError(f"{faults[0]} Capture the shard again.")
    samples = ShardSamples.open(inside(cache, folder / SAMPLES), marker.files[SAMPLES].sha256)
    batch, ids = samples.batch, samples.input_ids
    counts = (batch.num_rows, *(int(np.sum(batch.column(name).to_numpy())) for name in ("num_tokens", "num_supervised")))
    if counts != (marker.num_samples, marker.num_tokens, marker.num_supervised):
        raise CacheCorruptError(
            f"{folder / SAMPLES} holds {counts} samples, tokens, supervised; {MARKER} says "
            f"{(marker.num_samples, marker.num_tokens, marker.num_supervised)}. Capture the shard again."
        )
    used = np.zeros(int(ids.max()) + 1 if len(ids) else 0, np.bool_)
    used[ids[ids >= 0]] = True
    columns = [
        pa.array(np.full(batch.num_rows, shard, np.int32)) if name == "shard" else _widened(batch.column(name), name)
        for name in INDEX_SCHEMA.names
    ]
    entry = ShardEntry(marker.num_samples, marker.num_tokens, hashlib.sha256(data).hexdigest(), marker.files[SAMPLES].sha256, sizes)
    return pa.table(columns, names=INDEX_SCHEMA.names), entry, used


def _widened(column: Any, name: str) -> Any:
    """With 64-bit offsets, so that any number of samples fits one batch."""
    kind = INDEX_SCHEMA.field(name).type
    return column.cast(kind.value_type if pa.types.is_dictionary(kind) else kind)


def size_faults(folder: Path, sizes: dict[str, int]) -> list[str]:
    """One sentence for each file of `sizes` (bytes by name) that is missing in `folder`, not a plain file, or of another size."""
    faults = []
    for name, size in sizes.items():
        path = os.path.join(folder, name)
        try:
            found = os.lstat(path)
        except OSError as error:
            faults.append(f"{path} is missing ({error.strerror}).")
            continue
        if not stat.S_ISREG(found.st_mode):
            faults.append(f"{path} is not a plain file.")
        elif found.st_size != size:
            faults.append(f"{path} has {found.st_size} bytes, expected {size}.")
    return faults


def index_file(index: Index) -> bytes:
    """The whole of `index.arrow`."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, index.table.schema) as writer:
        writer.write_table(index.table, max_chunksize=max(1, len(index)))
    return sink.getvalue().to_pybytes()


def write_index(cache: Path, data: bytes) -> None:
    """Write `index.arrow` in one step; two processes that do so at once write the same."""
    with atomic_file(cache / INDEX) as file:
        file.write(data)


def load_index(cache: Path, manifest: Manifest) -> Index:
    """The index of a complete cache, memory-mapped; made again when it is missing.

    `CacheCorruptError` if the file is not the one that the manifest records, or the shards are not those that it was made from.
    """
    path = inside(cache, cache / INDEX)
    if not path.exists():
        return _index_made_again(cache, manifest)
    try:
        with pa.memory_map(str(path)) as source:
            if manifest.index is None or hashlib.sha256(source.read_buffer()).hexdigest() != manifest.index.sha256:
                raise CacheCorruptError(f"{path} is not the index that the manifest records. Delete it; it is made again from the shards.")
            return _index_of(pa.ipc.open_file(source).read_all())
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CacheCorruptError(f"{path} cannot be read: {error}. Delete it; it is made again from the shards.") from error


def _index_made_again(cache: Path, manifest: Manifest) -> Index:
    index = build_index(cache, manifest)
    if index.content_sha256() != manifest.index_content_sha256:
        raise CacheCorruptError(f"{cache / INDEX} is missing, and the shards are not those that the manifest was completed with.")
    data = index_file(index)
    if manifest.index is not None and hashlib.sha256(data).hexdigest() == manifest.index.sha256:
        with contextlib.suppress(OSError):  # a cache on a read-only disk is used with the index in memory
            write_index(cache, data)
    else:
        log.warning("%s is missing, and this Arrow version does not write it as it was: it is made again at every opening", cache / INDEX)
    return index


def _index_of(table: pa.Table) -> Index:
    if not table.schema.equals(INDEX_SCHEMA, check_metadata=False) or table.column("row").num_chunks != 1:
        raise ValueError(f"columns {table.schema.names} are not those of the index, version {FORMAT_VERSION}")
    table.validate(full=True)
    metadata = {key.decode(): value for key, value in (table.schema.metadata or {}).items()}
    column: dict[str, Any] = {name: table.column(name).chunk(0) for name in table.column_names}
    spans, offsets = column["loss_mask"].values, column["loss_mask"].offsets.to_numpy()
    bits = np.frombuffer(base64.b64decode(metadata["used_token_ids"]), np.uint8)
    return Index(
        table=table,
        **{name: column[name].to_numpy() for name in ("row", "shard", "token_offset", "num_tokens", "num_supervised")},
        source=column["source"].indices.to_numpy(),
        sources=tuple(column["source"].dictionary.to_pylist()),
        split=column["split"].indices.to_numpy(),
        splits=tuple(column["split"].dictionary.to_pylist()),
        span_offsets=offsets,
        span_starts=spans.field(0).to_numpy(),
        span_lengths=spans.field(1).to_numpy(),
        used_token_ids=np.unpackbits(bits, count=int(metadata["num_token_ids"]), bitorder="little").view(np.bool_),
        shards=tuple(ShardEntry(*entry) for entry in json.loads(metadata["shards"])),
    )


def _string_buffers(strings: Any) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
    """Offsets and bytes of a large_string array that was not sliced."""
    _, offsets, data = strings.buffers()
    ends = np.frombuffer(offsets, np.int64)[: len(strings) + 1]
    return ends, np.frombuffer(data, np.uint8)[: ends[-1]]
