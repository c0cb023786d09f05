"""Looks a cache through, complete or still open, and lists every fault with the file that it is in."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pipeline.cache.commit import committed_shards
from pipeline.cache.index import build_index, load_index, size_faults
from pipeline.cache.info import info
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
from pipeline.runtime.logs import Progress


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong: `file` relative to the cache, and what was found."""

    file: str
    problem: str

    @property
    def shard(self) -> int | None:
        """Number of the shard that the file belongs to, if it does."""
        parts = self.file.split("/")
        return int(parts[1]) if len(parts) > 1 and parts[0] == "shards" else None

    def __str__(self) -> str:
        return f"{self.file}: {self.problem}"


def verify(
    cache: Path, full: bool = False, threads: int | None = None, looked_at: Callable[[int], None] = lambda num_bytes: None
) -> list[Fault]:
    """All faults of a cache, none if it is sound. Shards that an open cache does not have yet are no fault.

    Fast: every file is there and has its size, markers and manifest are intact, counts agree. `full` also reads every byte
    and compares checksums, on `threads` threads (default: one a core). `looked_at` is called with the recorded size of every file
    of shards and target/ once it has been, by one thread at a time.
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
    if manifest.state == "remasking":
        faults.append(Fault(MANIFEST, "a remask was interrupted; run the same remask again, it goes on"))
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        for found, size in pool.map(lambda shard: _shard_faults(cache, manifest, shard, full), shards):
            faults += found
            looked_at(size)
    if complete:
        records = manifest.target_files or {}
        faults += _file_faults(cache, target_folder(cache), records, full)
        looked_at(sum(record.size for record in records.values()))
        faults += _index_faults(cache, manifest, {fault.file for fault in faults}, full)
    return faults


def verify_with_progress(cache: Path, full: bool = False, threads: int | None = None) -> list[Fault]:
    """`verify`, with a bar or lines on stderr. Raises `CacheError` when there is no cache at all in the folder."""
    if not cache.is_dir():
        raise CacheError(f"{cache} is not a folder; name that of a cache.")
    try:
        sizes = info(cache)["bytes"]
    except CacheError as error:
        return [Fault(MANIFEST, str(error))]
    with Progress(sizes["hidden.zarr"] + sizes["samples"] + sizes["bundle"], "bytes", "verifying", enabled=True) as progress:
        return verify(cache, full, threads, progress.advance)


def _shard_faults(cache: Path, manifest: Manifest, shard: int, full: bool) -> tuple[list[Fault], int]:
    """Faults of a shard, and the bytes that its marker records."""
    folder = shard_folder(cache, shard)
    try:
        marker, _ = read_marker(cache, shard)
    except CacheError as error:
        return [_fault(cache, folder / MARKER, str(error))], 0
    size = sum(record.size for record in marker.files.values())
    arrays = tuple(name for name in manifest.arrays if manifest.state == "complete" or array_data(name) in marker.files)
    if set(marker.files) != set(shard_files(arrays)):
        return [_fault(cache, folder / MARKER, f"lists {sorted(marker.files)}, expected {sorted(shard_files(arrays))}")], size
    faults = _file_faults(cache, folder, marker.files, full)
    if faults:
        return faults, size
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
    return faults, size


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


def _index_faults(cache: Path, manifest: Manifest, faulty: set[str], full: bool) -> list[Fault]:
    """Faults of the index itself, and shards, though sound, that are not those that it was made from."""
    path = cache / INDEX
    if path.exists() and manifest.index is not None:
        faults = _file_faults(cache, cache, {INDEX: manifest.index}, full=True)
        if faults:
            return [Fault(fault.file, f"{fault.problem} Delete it; it is made again from the shards.") for fault in faults]
        try:
            index = load_index(cache, manifest)
        except CacheError as error:
            return [Fault(INDEX, str(error))]
        markers = [f"shards/{shard:05d}/{MARKER}" for shard in range(manifest.num_shards)]
        return [
            Fault(marker, "is not the marker that the index records: another shard was put in the place of this one")
            for marker, entry in zip(markers, index.shards, strict=True)
            if marker not in faulty and (cache / marker).is_file() and file_digest(cache / marker) != entry.marker_sha256
        ]
    if full and not faulty and build_index(cache, manifest).content_sha256() != manifest.index_content_sha256:
        return [Fault(MANIFEST, "the shards, each sound, are not those that the cache was completed with")]
    return []


def _fault(cache: Path, path: Path, problem: str) -> Fault:
    return Fault(os.path.relpath(path, cache), problem)
