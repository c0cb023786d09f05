"""Turns what writers left into a shard that counts, and shards into a complete cache.

Committed means: `committed.json`, written last, lists every file with its size and sha256. The folder is also renamed, so that
a half-written shard has no name that anything looks for; on a store without renames the marker alone would do.
"""

import hashlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path

from pipeline.cache.bundle import BUNDLE_FILES
from pipeline.cache.index import Index, build_index, index_file, write_index
from pipeline.cache.layout import (
    GROUP_JSON,
    MARKER,
    SAMPLES,
    array_data,
    array_json,
    group_metadata,
    shard_files,
    shard_folder,
    shards_folder,
    target_folder,
    temporary_folder,
)
from pipeline.cache.manifest import FileRecord, Manifest, ShardMarker, Totals, read_manifest, sealed_text, write_manifest
from pipeline.cache.samples import samples_file
from pipeline.errors import CacheError
from pipeline.records import TokenSample
from pipeline.runtime.files import file_digest, sync_folder

_LEFTOVER = re.compile(r"\.(\d{5,})\.tmp-.+")


def commit_shard(
    cache: Path, shard: int, samples: Sequence[TokenSample], records: dict[str, FileRecord], *, attempt: str = "0"
) -> ShardMarker:
    """Make shard number `shard` count. `samples` in the order in which they were appended; `records` of all writers of this attempt."""
    manifest = read_manifest(cache)
    folder, final = temporary_folder(cache, shard, attempt), shard_folder(cache, shard)
    _check_arrays(folder, manifest, samples, records)
    if (final / MARKER).exists():
        raise CacheError(f"{final} is committed already; two captures must not write one shard")
    files = dict(records)
    for name, data in ((SAMPLES, samples_file([sample.check() for sample in samples])), (GROUP_JSON, group_metadata().encode())):
        _write(folder / name, data)
        files[name] = FileRecord(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    marker = ShardMarker(
        shard=shard,
        num_samples=len(samples),
        num_tokens=sum(sample.num_tokens for sample in samples),
        num_supervised=sum(sample.num_supervised for sample in samples),
        files=files,
    )
    _write(folder / MARKER, sealed_text(marker))
    for level in sorted({level for name in files for level in (folder / name).parents if level.is_relative_to(folder)}):
        sync_folder(level)
    shutil.rmtree(final, ignore_errors=True)  # a folder that lost its marker, or was half removed
    os.rename(folder, final)
    sync_folder(final.parent)
    return marker


def _check_arrays(folder: Path, manifest: Manifest, samples: Sequence[TokenSample], records: dict[str, FileRecord]) -> None:
    """Every array must have been written, by someone, with as many rows as the samples have tokens."""
    expected = set(shard_files(manifest.arrays)) - {SAMPLES, GROUP_JSON}
    if set(records) != expected:
        missing, extra = sorted(expected - set(records)), sorted(set(records) - expected)
        raise CacheError(f"{folder}: files missing {missing}, not expected {extra}; every array must be written by exactly one process")
    num_tokens = sum(sample.num_tokens for sample in samples)
    for name in manifest.arrays:
        metadata = manifest.spec(name).metadata(num_tokens).encode() if num_tokens else b""
        if records[array_json(name)].sha256 != hashlib.sha256(metadata).hexdigest():
            raise CacheError(f"{folder}: the array {name} does not have the {num_tokens} tokens of the {len(samples)} samples to commit")
        if (folder / array_data(name)).stat().st_size != records[array_data(name)].size:
            raise CacheError(f"{folder / array_data(name)} was changed after it was written")


def committed_shards(cache: Path) -> set[int]:
    """Numbers of the shards that count."""
    return {int(path.parent.name) for path in shards_folder(cache).glob(f"[0-9]*/{MARKER}") if path.parent.name.isdigit()}


def remove_leftovers(cache: Path, shards: Collection[int] | None = None) -> list[Path]:
    """Remove the temporary folders that killed runs left, of these shards only or of all; nothing may be writing them."""
    found = [
        path
        for path in sorted(shards_folder(cache).glob(".*.tmp-*"))
        if (match := _LEFTOVER.fullmatch(path.name)) and (shards is None or int(match[1]) in shards)
    ]
    for path in found:
        shutil.rmtree(path)
    return found


def complete(cache: Path) -> Manifest:
    """When all shards are committed: index, totals, and the manifest says "complete". Harmless when repeated or done by two at once."""
    manifest = read_manifest(cache)
    if manifest.state == "complete":
        return manifest
    missing = sorted(set(range(manifest.num_shards)) - committed_shards(cache))
    if missing:
        raise CacheError(
            f"{cache}: {len(missing)} of {manifest.num_shards} shards are not captured yet (first: {missing[:8]}). "
            "Run capture again; it goes on."
        )
    absent = [name for name in BUNDLE_FILES if not (target_folder(cache) / name).is_file()]
    if absent:
        raise CacheError(f"{target_folder(cache)} lacks {absent}, which training needs of the target. Save the target's bundle first.")
    index = build_index(cache, manifest)
    data = index_file(index)
    write_index(cache, data)
    done = manifest.model_copy(
        update={
            "state": "complete",
            "totals": _totals(index),
            "index": FileRecord(size=len(data), sha256=hashlib.sha256(data).hexdigest()),
            "index_content_sha256": index.content_sha256(),
            "target_files": {
                str(path.relative_to(target_folder(cache))): FileRecord(size=path.stat().st_size, sha256=file_digest(path))
                for path in sorted(target_folder(cache).rglob("*"))
                if path.is_file() and not path.name.startswith(".")
            },
        }
    )
    write_manifest(cache, done)
    return done


def _totals(index: Index) -> Totals:
    counts = Counter(index.split.tolist())
    return Totals(
        samples=len(index),
        tokens=int(index.num_tokens.sum(dtype="int64")),
        supervised=int(index.num_supervised.sum(dtype="int64")),
        samples_by_split={name: counts[code] for code, name in enumerate(index.splits)},
    )


def _write(path: Path, data: bytes) -> None:
    """Inside the temporary folder, where a file may be half-written without harm."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
