"""One part of the corpus to one Arrow file, in a worker process. Nothing here imports torch, so that workers start quickly.

A part's file holds the samples of its rows and, as JSON in the schema's metadata, the account of the rows that are none. It is
written atomically, and a function of the part and the `Rules` alone: which worker writes it, and when, makes no difference.
"""

import json
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from io import IOBase
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa

from pipeline.corpus.chat import Rendered, Template, render
from pipeline.corpus.rows import Row, Unusable
from pipeline.corpus.schema import PART, SPAN
from pipeline.corpus.select import TRAIN, check_supervised, check_turns, split_of
from pipeline.corpus.sources import Part, Source, read_part
from pipeline.runtime.files import atomic_file

ACCOUNT = b"account"
LONGEST_OWN_ID = 200
_PLACE_ID = re.compile(r"row-(?:[\w-]+-)?\d+-\d+")


@dataclass(frozen=True, slots=True)
class Rules:
    """What decides, besides the template, which samples a row gives. Lengths in tokens."""

    max_tokens: int
    min_supervised: int
    heldout_fraction: float


@dataclass(slots=True)
class Account:
    """What became of the rows of a part: `rows` of them, `dropped` as (row, reason, detail), and how many kept ones are special."""

    rows: int = 0
    dropped: list[tuple[int, str, str]] = field(default_factory=list)
    truncated: int = 0
    last_turn_only: int = 0
    answers_cut_short: int = 0


@dataclass(frozen=True, slots=True)
class Kept:
    """A row's sample before its id is known to be unique."""

    row: int
    own_id: str | None
    split: str
    rendered: Rendered


def place_id(source: Source, row: int) -> str:
    """The id of a sample whose row brings none that can be used: the place of the row. Rows and files added behind it leave it as it is."""
    return f"row-{'' if source.split == TRAIN else source.split + '-'}{source.ordinal}-{row}"


def hash_id(sample_id: str) -> int:
    """64 bits of an id, to find ids that occur twice in 8 bytes a row."""
    return int.from_bytes(blake2b(sample_id.encode(), digest_size=8).digest(), "little")


def write_part(template: Template, rules: Rules, part: Part, path: Path) -> None:
    """Tokenise the rows of `part` into the file `path`. Raises `CorpusError` when the source was changed."""
    account = Account()
    kept: list[Kept] = []
    for row in read_part(part):
        account.rows += 1
        sample = sample_of(template, rules, part, row, account)
        if isinstance(sample, Unusable):
            account.dropped.append((row.row, sample.reason, sample.detail))
        else:
            kept.append(sample)
    batch = _batch(part, kept)
    schema = PART.with_metadata({ACCOUNT: json.dumps(asdict(account)).encode()})
    with atomic_file(path) as stream, pa.ipc.new_file(cast(IOBase, stream), schema) as writer:
        writer.write_batch(batch.replace_schema_metadata(schema.metadata))


def read_account(schema: pa.Schema) -> Account:
    """The account that a part's file carries."""
    return Account(**json.loads(schema.metadata[ACCOUNT]))


def sample_of(template: Template, rules: Rules, part: Part, row: Row, account: Account) -> Kept | Unusable:
    """The sample that a row gives, counted in `account` where it is a special one; or why it gives none."""
    if row.messages is None:
        return row.unusable or Unusable("wrong type")
    if unusable := check_turns(row.messages):
        return unusable
    cut_short = row.finish_reason == "length"
    whole = render(template, row.messages, cut_short)
    if isinstance(whole, Unusable):
        return whole
    rendered = whole.prefix(rules.max_tokens)
    if unusable := check_supervised(rendered.num_supervised, whole.num_supervised, rules.min_supervised):
        return unusable
    account.truncated += len(rendered.input_ids) < len(whole.input_ids)
    account.last_turn_only += whole.last_turn_only
    account.answers_cut_short += cut_short
    return Kept(row.row, _usable_id(row.id), split_of(whole.input_ids, part.source.split, rules.heldout_fraction), rendered)


def _usable_id(own_id: str | None) -> str | None:
    """A row's own id, unless it is empty, very long, no valid text, or of the form that ids by place have."""
    if not own_id or len(own_id) > LONGEST_OWN_ID or _PLACE_ID.fullmatch(own_id):
        return None
    try:
        own_id.encode()
    except UnicodeEncodeError:
        return None
    return own_id


def _batch(part: Part, kept: Sequence[Kept]) -> pa.RecordBatch:
    source, rendered = part.source, [sample.rendered for sample in kept]
    spans = [r.spans for r in rendered]
    flat = np.concatenate([np.zeros((0, 2), dtype=np.int32), *spans])
    starts, lengths = (pa.array(np.ascontiguousarray(flat[:, column])) for column in (0, 1))
    ids = np.concatenate([np.zeros(0, dtype=np.int32), *(r.input_ids for r in rendered)])
    columns: Mapping[str, Any] = {
        "own_id": pa.array([sample.own_id for sample in kept], pa.string()),
        "id_hash": pa.array([hash_id(s.own_id or place_id(source, s.row)) for s in kept], pa.uint64()),
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

_work: tuple[Template, Rules] | None = None


def start_worker(template: Template, rules: Rules) -> None:
    """Set up a worker: it leaves Ctrl-C to the parent, and ends with it, also when the parent is killed."""
    global _work  # noqa: PLW0603 - a pool hands its workers no other place to keep things
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _work = template, rules


def work(part: Part, path: Path) -> int:
    """Write one part in a worker; returns its number of rows."""
    assert _work is not None
    write_part(*_work, part, path)
    return part.num_rows


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)
