"""One part of the corpus to one Arrow file, in a worker process. Nothing here imports torch, so that workers start quickly.

A part's file holds the samples of its rows and, as JSON in the schema's metadata, the account of the rows that are none. It is
written atomically, and a function of the part and the `Rules` alone: which worker writes it, and when, makes no difference.
"""

import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from hashlib import blake2b
from io import IOBase
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.corpus.messages import Unusable
from pipeline.corpus.samples import Account, Kept, Reader
from pipeline.corpus.schema import PART, SPAN
from pipeline.corpus.select import TRAIN
from pipeline.corpus.sources import Part, Source, read_part
from pipeline.runtime.files import atomic_file

ACCOUNT = b"account"


def place_id(source: Source, row: int) -> str:
    """The id of a sample whose row brings none that can be used: the place of the row. Rows and files added behind it leave it as it is."""
    return f"row-{'' if source.split == TRAIN else source.split + '-'}{source.ordinal}-{row}"


def piece_id(row_id: str, piece: int) -> str:
    """The id of a row's sample: the row's own for the first, or only, one."""
    return f"{row_id}/{piece}" if piece else row_id


def hash_tokens(input_ids: NDArray[np.int32]) -> tuple[int, int]:
    """128 bits of a sample's tokens, to find samples that occur twice in 16 bytes each."""
    digest = blake2b(input_ids.astype("<i4").tobytes(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def hash_id(sample_id: str) -> int:
    """64 bits of an id, to find ids that occur twice in 8 bytes a row."""
    return int.from_bytes(blake2b(sample_id.encode(), digest_size=8).digest(), "little")


def write_part(reader: Reader, part: Part, path: Path) -> None:
    """Tokenise the rows of `part` into the file `path`. Raises `CorpusError` when the source was changed."""
    account = Account()
    kept: list[Kept] = []
    for row in read_part(part):
        account.rows += 1
        samples = reader.samples_of(row, part.source.split, account)
        if isinstance(samples, Unusable):
            account.dropped.append((row.row, samples.reason, samples.detail))
        else:
            kept += samples
    batch = _batch(part, kept)
    schema = PART.with_metadata({ACCOUNT: json.dumps(asdict(account)).encode()})
    with atomic_file(path) as stream, pa.ipc.new_file(cast(IOBase, stream), schema) as writer:
        writer.write_batch(batch.replace_schema_metadata(schema.metadata))


def read_account(schema: pa.Schema) -> Account:
    """The account that a part's file carries."""
    return Account(**json.loads(schema.metadata[ACCOUNT]))


def _batch(part: Part, kept: Sequence[Kept]) -> pa.RecordBatch:
    source, rendered = part.source, [sample.rendered for sample in kept]
    spans = [r.spans for r in rendered]
    flat = np.concatenate([np.zeros((0, 2), dtype=np.int32), *spans])
    starts, lengths = (pa.array(np.ascontiguousarray(flat[:, column])) for column in (0, 1))
    ids = np.concatenate([np.zeros(0, dtype=np.int32), *(r.input_ids for r in rendered)])
    contents = np.array([hash_tokens(r.input_ids) for r in rendered], dtype=np.uint64).reshape(-1, 2)
    columns: Mapping[str, Any] = {
        "own_id": pa.array([sample.own_id for sample in kept], pa.string()),
        "id_hash": pa.array([hash_id(piece_id(s.own_id or place_id(source, s.row), s.piece)) for s in kept], pa.uint64()),
        "content_low": pa.array(np.ascontiguousarray(contents[:, 0])),
        "content_high": pa.array(np.ascontiguousarray(contents[:, 1])),
        "flags": pa.array([sample.flags for sample in kept], pa.uint8()),
        "piece": pa.array([sample.piece for sample in kept], pa.int32()),
        "source": pa.array([source.name] * len(kept), pa.string()),
        "row": pa.array([sample.row for sample in kept], pa.int64()),
        "split": pa.array([sample.split for sample in kept], pa.string()),
        "input_ids": _lists(PART.field("input_ids").type, [len(r.input_ids) for r in rendered], pa.array(ids)),
        "loss_mask": _lists(
            PART.field("loss_mask").type, [len(s) for s in spans], pa.StructArray.from_arrays([starts, lengths], fields=list(SPAN))
        ),
        "num_tokens": pa.array([len(r.input_ids) for r in rendered], pa.int32()),
        "num_supervised": pa.array([r.num_supervised for r in rendered], pa.int32()),
    }
    return pa.record_batch([columns[name] for name in PART.names], schema=PART)


def _lists(kind: pa.DataType, lengths: Sequence[int], values: Any) -> Any:
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, type=kind)


# ---- the worker's side of the pool

_reader: Reader | None = None


def start_worker(reader: Reader) -> None:
    """Set up a worker: it leaves Ctrl-C to the parent, and ends with it, also when the parent is killed."""
    global _reader  # noqa: PLW0603 - a pool hands its workers no other place to keep things
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _reader = reader


def work(part: Part, path: Path) -> int:
    """Write one part in a worker; returns its number of rows."""
    assert _reader is not None
    write_part(_reader, part, path)
    return part.num_rows


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
