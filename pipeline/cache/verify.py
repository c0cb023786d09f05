"""Looks a cache through, complete or still open, and lists every fault with the file that it is in."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pipeline.cache.commit import committed_shards
from pipeline.cache.index import build_index, size_faults
from pipeline.cache.layout import (
    GROUP_JSON,
    INDEX,
    MANIFEST,
    MARKER,
    array_data,
    array_json,
    group_metadata,
    inside,
    shard_files,
    shard_folder,
    target_folder,
)
from pipeline.cache.manifest import FileRecord, Manifest, read_manifest, read_marker
from pipeline.cache.openfiles import ArrayFile
from pipeline.errors import CacheError
from pipeline.runtime.files import file_digest


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: `file` relative to the cache, and what was found."""

    file: str
    problem: str

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}"


def verify(cache: Path, full: bool = False, threads: int | None = None) -> list[Fault]:
    """All faults of a cache, none if it is sound. Shards that an open cache does not have yet are no fault.

    Fast: every file is there and has its size, markers and manifest are intact, counts agree. `full` also reads every byte
    and compares checksums, on `threads` threads (default: one a core).
    """
    try:
        manifest = read_manifest(cache)
    except CacheError as error:
        return [Fault(MANIFEST, str(error))]
    there = committed_shards(cache)
    complete = manifest.state == "complete"
    shards = range(manifest.num_shards) if complete else sorted(there & set(range(manifest.num_shards)))
    faults = [
        Fault(f"shards/{shard:05d}", f"not one of the {manifest.num_shards} shards")
        for shard in sorted(there - set(range(manifest.num_shards)))
    ]
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        for found in pool.map(lambda shard: _shard_faults(cache, manifest, shard, full), shards):
            faults += found
        if complete:
            records = manifest.target_files or {}
            faults += _file_faults(cache, target_folder(cache), records, full)
    if complete:
        faults += _index_faults(cache, manifest, full and not faults)
    return faults


def _shard_faults(cache: Path, manifest: Manifest, shard: int, full: bool) -> list[Fault]:
    folder = shard_folder(cache, shard)
    try:
        marker, _ = read_marker(cache, shard)
    except CacheError as error:
        return [_fault(cache, folder / MARKER, str(error))]
    arrays = tuple(name for name in manifest.arrays if manifest.state == "complete" or array_data(name) in marker.files)
    if set(marker.files) != set(shard_files(arrays)):
        return [_fault(cache, folder / MARKER, f"lists {sorted(marker.files)}, expected {sorted(shard_files(arrays))}")]
    faults = _file_faults(cache, folder, marker.files, full)
    if faults:
        return faults
    texts = {GROUP_JSON: group_metadata()} | {array_json(name): manifest.spec(name).metadata(marker.num_tokens) for name in arrays}
    for name, text in texts.items():
        if (folder / name).read_bytes() != text.encode():
            faults.append(_fault(cache, folder / name, "is not the metadata that this shard must have"))
    if full:
        for name in arrays:
            path = folder / array_data(name)
            try:
                ArrayFile(path, manifest.spec(name), marker.num_tokens, marker.files[array_data(name)].size)
            except CacheError as error:
                faults.append(_fault(cache, path, str(error)))
    return faults


def _file_faults(cache: Path, folder: Path, records: dict[str, FileRecord], full: bool) -> list[Fault]:
    """Files that are missing, of another size or, if `full`, of another checksum."""
    faults = []
    for name, record in records.items():
        path = folder / name
        try:
            inside(cache, path)
            problems = size_faults(folder, {name: record.size})
            if full and not problems and file_digest(path) != record.sha256:
                problems = ["its bytes were altered: another sha256 than was recorded."]
        except (OSError, CacheError) as error:
            problems = [str(error)]
        faults += [_fault(cache, path, problem) for problem in problems]
    return faults


def _index_faults(cache: Path, manifest: Manifest, full: bool) -> list[Fault]:
    path = cache / INDEX
    if path.exists() and manifest.index is not None:
        faults = _file_faults(cache, cache, {INDEX: manifest.index}, full=True)
        if faults:
            return [Fault(fault.file, f"{fault.problem} Delete it; it is made again from the shards.") for fault in faults]
    if full and build_index(cache, manifest).content_sha256() != manifest.index_content_sha256:
        return [Fault(MANIFEST, "the shards, each sound, are not those that the cache was completed with")]
    return []


def _fault(cache: Path, path: Path, problem: str) -> Fault:
    return Fault(str(path.relative_to(cache)), problem)
