"""How many bytes a cache will take, from the lengths of its shards and what the codecs make of real states.

Raw arrays are computed exactly. Of the other codecs a full chunk is measured, and one that is half filled with zero rows,
as the last chunk of an array is: what lies between is taken as linear.
"""

import math
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from pipeline.cache.codec import bits_of, encode_chunk, index_bytes
from pipeline.cache.frames import table_bytes
from pipeline.cache.layout import CHUNK_TOKENS, ArraySpec, array_data, group_metadata, num_chunks, shard_files
from pipeline.cache.manifest import FileRecord, Manifest, ShardMarker, sealed_text
from pipeline.cache.samples import samples_file
from pipeline.records import TokenSample

CODECS: tuple[str, ...] = get_args(Manifest.model_fields["codec"].annotation)
MEASURED_CHUNKS = 8
INDEX_BYTES = 110
"""Of a sample in index.arrow: ids of usual length, one or two spans."""


@dataclass(frozen=True, slots=True)
class ChunkBytes:
    """Bytes of a stored chunk of an array, its crc32c included: `fixed`, and the rest in proportion to its rows."""

    full: float
    fixed: float

    def of_rows(self, rows: int) -> float:
        return self.fixed + (self.full - self.fixed) * rows / CHUNK_TOKENS


def measure_chunk(states: torch.Tensor, spec: ArraySpec) -> ChunkBytes:
    """What the codec makes of chunks of `states` [S, H] (CPU), of which up to `MEASURED_CHUNKS` from all over are tried."""
    rows = bits_of(states.contiguous())
    if len(rows) < CHUNK_TOKENS:  # too few for a chunk: repeated, which no codec sees
        rows = np.tile(rows, (math.ceil(CHUNK_TOKENS / len(rows)), 1))
    starts = np.unique(np.linspace(0, len(rows) - CHUNK_TOKENS, MEASURED_CHUNKS).astype(int))
    full = half = 0
    for start in starts:
        chunk = rows[start : start + CHUNK_TOKENS].copy()
        full += len(encode_chunk(chunk, spec).data)
        chunk[CHUNK_TOKENS // 2 :] = 0
        half += len(encode_chunk(chunk, spec).data)
    mean_full, mean_half = full / len(starts), half / len(starts)
    return ChunkBytes(mean_full, max(0.0, 2 * mean_half - mean_full))


def array_bytes(spec: ArraySpec, num_tokens: int, chunk: ChunkBytes) -> float:
    """Of both files of one array of a shard."""
    whole, rest = divmod(num_tokens, CHUNK_TOKENS)
    payload = whole * chunk.full + (chunk.of_rows(rest) if rest else 0.0)
    chunks = num_chunks(num_tokens)
    return payload + table_bytes(spec, chunks) + index_bytes(chunks) + len(spec.metadata(num_tokens))


def hidden_bytes(manifest: Manifest, shard_tokens: Sequence[int], chunks: Mapping[str, ChunkBytes]) -> float:
    """Of everything under `hidden.zarr`, over all shards; `chunks` by array."""
    arrays = sum(array_bytes(manifest.spec(name), tokens, chunks[name]) for tokens in shard_tokens for name in manifest.arrays)
    return arrays + len(shard_tokens) * len(group_metadata())


def raw_hidden_bytes(manifest: Manifest, shard_tokens: Sequence[int]) -> int:
    """As `hidden_bytes` with the codec `raw`, exactly. No codec takes more of states (of noise, `lossless` does: some bytes a frame)."""
    raw = manifest.model_copy(update={"codec": "raw"})
    chunk = {name: ChunkBytes(raw.spec(name).chunk_bytes + 4.0, raw.spec(name).chunk_bytes + 4.0) for name in raw.arrays}
    return round(hidden_bytes(raw, shard_tokens, chunk))


def sample_bytes(samples: Sequence[TokenSample], num_shards: int, total_samples: int, total_tokens: int) -> float:
    """Of `samples.arrow` over all shards: a part a file, and a part in proportion to samples and tokens, from two files of `samples`."""
    half, all_of_them = (len(samples_file(list(samples[:count]))) for count in (max(1, len(samples) // 2), len(samples)))
    tokens_of_half, tokens = (sum(s.num_tokens for s in samples[:count]) for count in (max(1, len(samples) // 2), len(samples)))
    slope = (all_of_them - half) / (tokens - tokens_of_half) if tokens > tokens_of_half else 4.0
    return num_shards * max(0.0, all_of_them - slope * tokens) + slope * total_tokens


def marker_bytes(manifest: Manifest) -> int:
    """Of one `committed.json`."""
    record = FileRecord(size=10**8, sha256="0" * 64)
    marker = ShardMarker(
        shard=1, num_samples=500, num_tokens=10**5, num_supervised=10**5, files=dict.fromkeys(shard_files(manifest.arrays), record)
    )
    return len(sealed_text(marker))


def stored_share(manifest: Manifest, markers: Iterable[ShardMarker]) -> float | None:
    """Bytes of the arrays of committed shards, as a share of raw; None while there are none."""
    pairs = [
        (marker.files[array_data(name)].size, marker.num_tokens * manifest.spec(name).width * manifest.spec(name).item_bytes)
        for marker in markers
        for name in manifest.arrays
        if array_data(name) in marker.files
    ]
    return sum(size for size, _ in pairs) / sum(raw for _, raw in pairs) if pairs else None


def free_bytes(path: Path) -> int:
    """Of the file system that `path` will lie on. Quotas are not seen."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    return shutil.disk_usage(there).free
