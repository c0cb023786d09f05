"""Columns of a prepared corpus's `samples.arrow`. `python -m pipeline.corpus.schema DIR` writes down what these and rows are; a test holds
them equal."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.corpus.row_schema import row_schemas

FORMAT_VERSION = 3  # raise it when columns, files or ids of a prepared corpus change


def _field(name: str, kind: pa.DataType, meaning: str) -> "pa.Field[Any]":
    return pa.field(name, kind, nullable=False, metadata={"meaning": meaning})


SPAN = pa.struct([pa.field("start", pa.int32(), nullable=False), pa.field("length", pa.int32(), nullable=False)])

SAMPLES = pa.schema(
    [
        _field(
            "sample_id",
            pa.string(),
            "the row's own id if a string that no other row has, else row-SOURCE-ROW or row-SET-SOURCE-ROW by ordinals; "
            "with /1, /2, … for further samples of the row; unique",
        ),
        _field("source", pa.string(), "name of the file, without its folder"),
        _field("row", pa.int64(), "line of the source, from 0"),
        _field("split", pa.string(), "train, heldout, or the name of a validation set"),
        _field("input_ids", pa.list_(pa.field("item", pa.int32(), nullable=False)), "one render of the chat template, cut to max_tokens"),
        _field("loss_mask", pa.list_(pa.field("item", SPAN, nullable=False)), "supervised tokens: ascending spans that do not touch"),
        _field("num_tokens", pa.int32(), "length of input_ids, in tokens"),
        _field("num_supervised", pa.int32(), "supervised tokens"),
    ]
)

# A part holds the same, with what is needed to find ids in place of ids.
_FIRST: "list[pa.Field[Any]]" = [
    pa.field("own_id", pa.string()),
    *(pa.field(name, pa.uint64(), nullable=False) for name in ("id_hash", "content_low", "content_high")),
    pa.field("piece", pa.int32(), nullable=False),
    pa.field("flags", pa.uint8(), nullable=False),
]
PART = pa.schema(_FIRST + [SAMPLES.field(i) for i in range(1, len(SAMPLES))])


EXAMPLE: dict[str, Any] = {
    "sample_id": "row-0-17",
    "source": "chats.jsonl",
    "row": 17,
    "split": "train",
    "input_ids": [1, 4093, 198, 1780, 2],
    "loss_mask": [{"start": 3, "length": 2}],
    "num_tokens": 5,
    "num_supervised": 2,
}


def schemas() -> dict[str, str]:
    """File name in data_schemas/ and its text."""
    columns = {
        field.name: {"type": str(field.type), "nullable": field.nullable, "meaning": (field.metadata or {})[b"meaning"].decode()}
        for field in SAMPLES
    }
    samples = {
        "file": "samples.arrow of a prepared corpus: Arrow IPC file format",
        "format_version": FORMAT_VERSION,
        "columns": columns,
        "example": EXAMPLE,
    }
    values = {"prepared_samples.arrow.json": samples, **row_schemas()}
    return {name: json.dumps(value, indent=2, ensure_ascii=False) + "\n" for name, value in values.items()}


if __name__ == "__main__":
    for name, text in schemas().items():
        Path(sys.argv[1], name).write_text(text)
