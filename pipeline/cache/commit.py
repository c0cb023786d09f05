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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

from pipeline.cache.bundle import BUNDLE_FILES
from pipeline.cache.index import Index, build_index, index_file, write_index
from pipeline.cache.layout import (
    GROUP_JSON,
    HIDDEN,
    MARKER,
    SAMPLES,
    array_data,
    array_json,
    group_metadata,
    inside,
    shard_folder,
    shards_folder,
    target_folder,
    temporary_folder,
)
from pipeline.cache.manifest import FileRecord, Manifest, ShardMarker, Totals, read_manifest, read_marker, sealed_text, write_manifest
from pipeline.cache.samples import samples_file
from pipeline.errors import CacheCorruptError, CacheError
from pipeline.records import TokenSample
from pipeline.runtime.files import atomic_file, file_digest, sync_folder

_LEFTOVER = re.compile(r"\.(\d{5,})\.tmp-.+")


def commit_shard(
    cache: Path, shard: int, samples: Sequence[TokenSample], records: dict[str, FileRecord], *, attempt: str = "0"
) -> ShardMarker:
    """Make shard number `shard` count. `samples` in the order in which they were appended; `records` of all writers of this attempt."""
    manifest = read_manifest(cache)
    folder, final = temporary_folder(cache, shard, attempt), shard_folder(cache, shard)
    _check_arrays(folder, manifest, manifest.arrays, sum(sample.num_tokens for sample in samples), records)
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
    commit_linked(cache, marker, attempt=attempt)
    return marker


def commit_linked(cache: Path, marker: ShardMarker, *, attempt: str = "0") -> None:
    """Make a shard count whose files, all of them sound already, lie in the temporary folder of this attempt."""
    folder, final = temporary_folder(cache, marker.shard, attempt), shard_folder(cache, marker.shard)
    _write(folder / MARKER, sealed_text(marker))
    for level in sorted({level for name in marker.files for level in (folder / name).parents if level.is_relative_to(folder)}):
        sync_folder(level)
    shutil.rmtree(final, ignore_errors=True)  # a folder that lost its marker, or was half removed
    os.rename(folder, final)
    sync_folder(final.parent)


def extend_shard(cache: Path, shard: int, arrays: tuple[str, ...], records: dict[str, FileRecord], *, attempt: str = "0") -> ShardMarker:
    """Add `arrays`, written by this attempt, to a shard that counts. Until its marker is replaced, in one step, it counts as it was."""
    manifest, folder, final = read_manifest(cache), temporary_folder(cache, shard, attempt), inside(cache, shard_folder(cache, shard))
    marker, _ = read_marker(cache, shard)
    _check_arrays(folder, manifest, arrays, marker.num_tokens, records)
    for name in arrays:
        source, place = (inside(cache, (root / array_json(name)).parent) for root in (folder, final))
        for level in (source / "c" / "0", source / "c", source):
            sync_folder(level)
        shutil.rmtree(place, ignore_errors=True)  # moved here by a run that was killed before it replaced the marker
        os.rename(source, place)
    sync_folder(final / HIDDEN)
    longer = marker.model_copy(update={"files": {**marker.files, **records}})
    with atomic_file(final / MARKER) as file:
        file.write(sealed_text(longer))
    shutil.rmtree(folder, ignore_errors=True)
    return longer


def discard_shard(cache: Path, shard: int) -> None:
    """Make a shard not count, and remove it. A link is removed, not what it points to."""
    folder = shard_folder(cache, shard)
    inside(cache, folder.parent)
    if folder.is_symlink():
        folder.unlink()
        return
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


def _check_arrays(folder: Path, manifest: Manifest, arrays: tuple[str, ...], num_tokens: int, records: dict[str, FileRecord]) -> None:
    """Each of `arrays` must have been written, by someone, with as many rows as the samples have tokens."""
    expected = {path(name) for name in arrays for path in (array_json, array_data)}
    if set(records) != expected:
        missing, extra = sorted(expected - set(records)), sorted(set(records) - expected)
        raise CacheError(f"{folder}: files missing {missing}, not expected {extra}; every array must be written by exactly one process")
    for name in arrays:
        metadata = manifest.spec(name).metadata(num_tokens).encode() if num_tokens else b""
        if records[array_json(name)].sha256 != hashlib.sha256(metadata).hexdigest():
            raise CacheError(f"{folder}: the array {name} does not have the {num_tokens} tokens of the shard's samples")
        if (folder / array_data(name)).stat().st_size != records[array_data(name)].size:
            raise CacheError(f"{folder / array_data(name)} was changed after it was written")


def committed_shards(cache: Path, shards: Collection[int] | None = None) -> set[int]:
    """Numbers of the shards that count, of `shards` or of all that are there."""
    if shards is not None:
        return {shard for shard in shards if (shard_folder(cache, shard) / MARKER).exists()}
    return {int(path.parent.name) for path in shards_folder(cache).glob(f"[0-9]*/{MARKER}") if path.parent.name.isdigit()}


def missing_arrays(cache: Path, manifest: Manifest) -> dict[int, tuple[str, ...]]:
    """What is still to be captured: by shard, the arrays that it lacks, all of them where the shard does not count."""

    def lacks(shard: int) -> tuple[str, ...]:
        if shard not in there:
            return manifest.arrays
        files = read_marker(cache, shard)[0].files
        return tuple(name for name in manifest.arrays if array_data(name) not in files)

    there = committed_shards(cache)
    with ThreadPoolExecutor(16) as pool:  # the reads wait for a file system, often a remote one
        return {shard: names for shard, names in enumerate(pool.map(lacks, range(manifest.num_shards))) if names}


def check_complete(cache: Path, manifest: Manifest) -> None:
    """Raise `CacheError`, saying what is missing and which command goes on, unless the cache is complete."""
    if manifest.state == "remasking":
        raise CacheError(f"{cache} is between two sets of loss masks: a remask was interrupted. Run the same remask again; it goes on.")
    if manifest.state == "open":
        done = manifest.num_shards - len(missing_arrays(cache, manifest))
        raise CacheError(
            f"{cache} is not complete: {done} of {manifest.num_shards} shards are captured. Run capture (or append) again; it goes on."
        )


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
    missing = sorted(missing_arrays(cache, manifest))
    if missing:
        raise CacheError(
            f"{cache}: {len(missing)} of {manifest.num_shards} shards are not captured yet (first: {missing[:8]}). "
            "Run capture again; it goes on."
        )
    absent = [name for name in BUNDLE_FILES if not (target_folder(cache) / name).is_file()]
    if absent:
        raise CacheError(f"{target_folder(cache)} lacks {absent}, which training needs of the target. Save the target's bundle first.")
    target_files = _target_files(cache)
    if altered := [name for name, record in (manifest.target_files or {}).items() if target_files.get(name) != record]:
        raise CacheCorruptError(f"{target_folder(cache)}: {altered} were altered since they were written. Restore them, or run repair.")
    index = build_index(cache, manifest)
    data = index_file(index)
    write_index(cache, data)
    done = manifest.model_copy(
        update={
            "state": "complete",
            "totals": _totals(index),
            "index": FileRecord(size=len(data), sha256=hashlib.sha256(data).hexdigest()),
            "index_content_sha256": index.content_sha256(),
            "target_files": target_files,
        }
    )
    write_manifest(cache, done)
    return done


def reopen(cache: Path, manifest: Manifest, *, keep_target: bool = True, state: Literal["open", "remasking"] = "open") -> Manifest:
    """Put `manifest` in place as not complete, in one step; `complete` counts and digests anew.

    With `keep_target` the records of the target's files stay, and `complete` then refuses files that are no longer those.
    """
    cleared = {"state": state, "totals": None, "index": None, "index_content_sha256": None}
    opened = manifest.model_copy(update=cleared if keep_target else {**cleared, "target_files": None})
    write_manifest(cache, opened)
    return opened


def _target_files(cache: Path) -> dict[str, FileRecord]:
    folder = target_folder(cache)
    return {
        str(path.relative_to(folder)): FileRecord(size=path.stat().st_size, sha256=file_digest(inside(cache, path)))
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith(".")
    }


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
