"""`samples.arrow` of a shard: its samples in the order in which their hidden states lie in the arrays.

Arrow IPC *file* format with one record batch: a cut file has no footer and cannot be opened, where a cut *stream* reads short.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.cache.layout import FORMAT_VERSION
from pipeline.errors import CacheCorruptError
from pipeline.records import TokenSample

SPAN = pa.struct([pa.field("start", pa.int32(), nullable=False), pa.field("length", pa.int32(), nullable=False)])


def column_field(name: str, kind: pa.DataType) -> Any:
    """A column without missing values."""
    return pa.field(name, kind, nullable=False)


SAMPLES_SCHEMA = pa.schema(
    [
        column_field("sample_id", pa.string()),
        column_field("source", pa.string()),
        column_field("row", pa.int64()),
        column_field("split", pa.string()),
        column_field("input_ids", pa.list_(column_field("item", pa.int32()))),
        column_field("loss_mask", pa.list_(column_field("item", SPAN))),
        column_field("num_tokens", pa.int32()),
        column_field("token_offset", pa.int64()),
        column_field("num_supervised", pa.int32()),
    ],
    metadata={"format_version": str(FORMAT_VERSION)},
)


def offsets_of(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Where each of the runs of those lengths begins, and where the last one ends: int64 [n + 1]."""
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))


def _array(values: NDArray[Any]) -> Any:
    return pa.array(values)  # untyped, because the stubs take any NumPy array for booleans


def samples_batch(samples: Sequence[TokenSample]) -> pa.RecordBatch:
    """The rows of `samples.arrow`."""
    num_tokens = np.array([sample.num_tokens for sample in samples], np.int64)
    spans = np.concatenate([sample.spans for sample in samples])
    span_offsets = offsets_of(np.array([len(sample.spans) for sample in samples], np.int64))
    offsets = offsets_of(num_tokens)
    starts, lengths = (_array(np.ascontiguousarray(spans[:, k], np.int32)) for k in (0, 1))
    ids = _array(np.concatenate([sample.input_ids for sample in samples]))
    columns = [
        pa.array([sample.sample_id for sample in samples], pa.string()),
        pa.array([sample.source for sample in samples], pa.string()),
        _array(np.array([sample.row for sample in samples], np.int64)),
        pa.array([sample.split for sample in samples], pa.string()),
        pa.ListArray.from_arrays(_array(offsets.astype(np.int32)), ids, type=SAMPLES_SCHEMA.field("input_ids").type),
        pa.ListArray.from_arrays(
            _array(span_offsets.astype(np.int32)),
            pa.StructArray.from_arrays([starts, lengths], fields=[SPAN.field(0), SPAN.field(1)]),
            type=SAMPLES_SCHEMA.field("loss_mask").type,
        ),
        _array(num_tokens.astype(np.int32)),
        _array(offsets[:-1]),
        _array(np.array([sample.num_supervised for sample in samples], np.int32)),
    ]
    return pa.record_batch(columns, schema=SAMPLES_SCHEMA)


def samples_file(samples: Sequence[TokenSample]) -> bytes:
    """The whole of `samples.arrow`."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, SAMPLES_SCHEMA) as writer:
        writer.write_batch(samples_batch(samples))
    return sink.getvalue().to_pybytes()


def first_difference(stored: "ShardSamples", samples: Sequence[TokenSample], columns: Sequence[str]) -> tuple[int, str] | None:
    """Position and column of the first value in which `stored` is not `samples`; None if all of `columns` are equal."""
    expected: Any = samples_batch(samples)
    different = [name for name in columns if not stored.batch.column(name).equals(expected.column(name))]
    if not different:
        return None
    for position in range(min(len(stored), len(samples))):
        for name in different:
            if stored.batch.column(name)[position] != expected.column(name)[position]:
                return position, name
    return min(len(stored), len(samples)), different[0]


@dataclass(frozen=True, slots=True)
class ShardSamples:
    """An open `samples.arrow`, memory-mapped.

    The tokens of the sample at position p are `input_ids[offsets[p]:offsets[p + 1]]`; its spans likewise.
    """

    batch: Any  # pyarrow.RecordBatch; its stubs lack what is used here
    input_ids: NDArray[np.int32]
    offsets: NDArray[np.int32]
    span_starts: NDArray[np.int32]
    span_lengths: NDArray[np.int32]
    span_offsets: NDArray[np.int32]

    @classmethod
    def open(cls, path: Path, sha256: str) -> "ShardSamples":
        """`CacheCorruptError` unless the file has that checksum, the columns of this format and is sound inside."""
        try:
            with pa.memory_map(str(path)) as source:
                if hashlib.sha256(source.read_buffer()).hexdigest() != sha256:
                    raise CacheCorruptError(
                        f"{path} was altered: its checksum is wrong. Restore it from a copy, or capture the shard again."
                    )
                reader = pa.ipc.open_file(source)
                if not reader.schema.equals(SAMPLES_SCHEMA, check_metadata=True) or reader.num_record_batches != 1:
                    raise CacheCorruptError(f"{path}: not the columns of samples.arrow, version {FORMAT_VERSION}. Capture the shard again.")
                batch: Any = reader.get_batch(0)
                batch.validate(full=True)
        except (pa.ArrowException, OSError) as error:
            raise CacheCorruptError(f"{path} cannot be read as an Arrow file: {error}. Capture the shard again.") from error
        ids, spans = batch.column("input_ids"), batch.column("loss_mask")
        return cls(
            batch,
            input_ids=ids.values.to_numpy(),
            offsets=ids.offsets.to_numpy(),
            span_starts=spans.values.field(0).to_numpy(),
            span_lengths=spans.values.field(1).to_numpy(),
            span_offsets=spans.offsets.to_numpy(),
        )

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    def sample(self, position: int) -> TokenSample:
        """The sample at `position` of the shard, in memory of its own."""
        sample_id, source, row, split = (self.batch.column(name)[position].as_py() for name in ("sample_id", "source", "row", "split"))
        begin, end = self.span_offsets[position], self.span_offsets[position + 1]
        return TokenSample(
            sample_id=sample_id,
            source=source,
            row=row,
            split=split,
            input_ids=self.input_ids[self.offsets[position] : self.offsets[position + 1]].copy(),
            spans=np.stack((self.span_starts[begin:end], self.span_lengths[begin:end]), axis=1),
        )
