"""The files of a cache that a process has open: only what a read touches, straight into the caller's memory.

Files are opened when first needed, each process for itself. A cache has more array files than a process may hold open, so the
least recently used are let go; `samples.arrow` files are memory-mapped, cost no descriptor, and stay.
"""

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pipeline.cache.codec import Bits, decode_chunk, index_bytes, take_rows, unpack_index, unpack_rows
from pipeline.cache.frames import FrameTable, Run, table_bytes
from pipeline.cache.index import Index
from pipeline.cache.layout import (
    CHUNK_TOKENS,
    GROUP_JSON,
    MARKER,
    SAMPLES,
    ArraySpec,
    array_data,
    array_json,
    group_metadata,
    inside,
    num_chunks,
    shard_folder,
)
from pipeline.cache.lossy import take_quantised
from pipeline.cache.manifest import Manifest
from pipeline.cache.samples import ShardSamples
from pipeline.errors import CacheCorruptError
from pipeline.records import Quantised
from pipeline.runtime.files import file_digest

OPEN_ARRAYS = 256
"""Array files that a process keeps open. Each takes memory for its index, and 12 bytes a frame for its table: 100 KB of 262,144 tokens."""


class OpenFiles:
    """Safe from several threads; a forked child starts with none."""

    def __init__(self, cache: Path, manifest: Manifest, index: Index) -> None:
        self._cache, self._manifest, self._index = cache, manifest, index
        self._start()

    def _start(self) -> None:
        self._lock = threading.Lock()
        self._arrays: OrderedDict[tuple[int, str], ArrayFile] = OrderedDict()
        self._samples: dict[int, ShardSamples] = {}
        self._compared: set[tuple[int, str]] = set()
        self._last = _LastChunk()
        self.bytes_read = 0  # packed
        self._process = os.getpid()  # last: a forked child's other threads must not take the parent's lock for theirs

    def samples(self, shard: int) -> ShardSamples:
        """The shard's `samples.arrow`; when it is first opened, its checksum and that of the shard's marker are compared."""
        if self._process != os.getpid():
            self._start()
        found = self._samples.get(shard)
        if found is None:
            path, entry = inside(self._cache, shard_folder(self._cache, shard) / SAMPLES), self._index.shards[shard]
            self._compare(shard, MARKER, entry.marker_sha256)
            self._compare(shard, GROUP_JSON, hashlib.sha256(group_metadata().encode()).hexdigest())
            found = self._samples.setdefault(shard, ShardSamples.open(path, entry.samples_sha256))
        return found

    def begin(self, shard: int, array: str, start: int, num_tokens: int) -> "Reading":
        """A read of tokens start.. of an array, on which the disk begins while others are unpacked."""
        file = self._array(shard, array)
        reading = Reading(file, start, num_tokens, file.parts(start, num_tokens))
        file.announce(reading.parts)
        return reading

    def read_rows(self, reading: "Reading", out: Bits) -> None:
        """Fill `out` [n, width]."""
        file = reading.file
        for part in reading.parts:
            if part.runs:
                unpack_rows(file.packed(part.runs), part.runs, file.spec, part.first, out[part.rows], f"{file.path}, chunk {part.chunk}")
            else:
                take_rows(self._last.of(file, part.chunk), file.spec, part.first, out[part.rows])

    def read_quantised(self, reading: "Reading") -> Quantised:
        """Tokens of an array with a lossy codec."""
        chunks = [self._last.of(reading.file, part.chunk) for part in reading.parts]
        return take_quantised(chunks, reading.start % CHUNK_TOKENS, reading.num_tokens, reading.file.spec)

    def _array(self, shard: int, array: str) -> "ArrayFile":
        if self._process != os.getpid():
            self._start()
        key = (shard, array)
        with self._lock:
            found = self._arrays.get(key)
            if found is not None:
                self._arrays.move_to_end(key)
                return found
        # Opened outside the lock: on a network disk this takes milliseconds, and at worst two threads open the same file.
        entry, spec = self._index.shards[shard], self._manifest.spec(array)
        if key not in self._compared:
            self._compare(shard, array_json(array), hashlib.sha256(spec.metadata(entry.num_tokens).encode()).hexdigest())
            self._compared.add(key)
        path = inside(self._cache, shard_folder(self._cache, shard) / array_data(array))
        opened = ArrayFile(path, spec, entry.num_tokens, entry.sizes[array_data(array)], self._count)
        with self._lock:
            self._arrays[key] = opened
            if len(self._arrays) > OPEN_ARRAYS:
                self._arrays.popitem(last=False)
        return opened

    def _count(self, size: int) -> None:
        with self._lock:
            self.bytes_read += size

    def _compare(self, shard: int, name: str, sha256: str) -> None:
        path = inside(self._cache, shard_folder(self._cache, shard) / name)
        try:
            found = file_digest(path)
        except OSError as error:
            raise CacheCorruptError(f"{path} is missing ({error.strerror}). Restore it from a copy, or capture the shard again.") from error
        if found != sha256:
            raise CacheCorruptError(f"{path} was altered: its checksum is wrong. Restore it from a copy, or capture the shard again.")


class ArrayFile:
    """The open file of one array of one shard; closed when nobody holds it any more."""

    def __init__(self, path: Path, spec: ArraySpec, num_tokens: int, size: int, count: Callable[[int], None] | None = None) -> None:
        """Checks the size and the checksums of chunk index and table of frames. `count` is told the bytes of every read."""
        self.path, self.spec, self._told = path, spec, count
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CacheCorruptError(f"{path} is missing ({error.strerror}). Restore it from a copy, or capture the shard again.") from error
        chunks = num_chunks(num_tokens)
        found, tail, table = os.fstat(self._descriptor).st_size, index_bytes(chunks), table_bytes(spec, chunks)
        if found != size or found < tail:
            raise CacheCorruptError(f"{path} has {found} bytes, expected {size}. Restore it from a copy, or capture the shard again.")
        begin = max(0, found - tail - table)
        data = self._read(begin, np.empty(found - begin, np.uint8)).tobytes()
        self._chunks = unpack_index(data[-tail:], found, str(path))
        framed = table and int(self._chunks.sum(axis=1).max()) + tail < found
        self._frames = FrameTable(data[:-tail], self._chunks, spec, str(path)) if framed else None

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def __len__(self) -> int:
        """Chunks in the file."""
        return len(self._chunks)

    def decode(self, chunk: int) -> NDArray[np.uint8]:
        """A chunk's bytes as `take_rows` wants them, frames or not."""
        return decode_chunk(self.stored(chunk), self.spec, f"{self.path}, chunk {chunk}")

    def parts(self, start: int, num_tokens: int) -> list["Part"]:
        """What a read of tokens start.. takes, by chunk."""
        found, row = [], 0
        while row < num_tokens:
            chunk, first = divmod(start + row, CHUNK_TOKENS)
            count = min(CHUNK_TOKENS - first, num_tokens - row)
            runs = [] if self._frames is None else self._frames.runs(chunk, first, count)
            found.append(Part(chunk, first, slice(row, row + count), runs))
            row += count
        return found

    def announce(self, parts: Sequence["Part"]) -> None:
        """They will be read."""
        if hasattr(os, "posix_fadvise"):
            for part in parts:
                for offset, size in [(run.offset, run.size) for run in part.runs] or [self._chunks[part.chunk].tolist()]:
                    os.posix_fadvise(self._descriptor, offset, size, os.POSIX_FADV_WILLNEED)

    def packed(self, runs: Sequence[Run]) -> NDArray[np.uint8]:
        """Frames as they lie on the disk, one run after the other."""
        data, done = np.empty(sum(run.size for run in runs), np.uint8), 0
        self._tell(data.size)
        for run in runs:
            self._read(run.offset, data[done : done + run.size])
            done += run.size
        return data

    def stored(self, chunk: int) -> NDArray[np.uint8]:
        """A chunk as it lies on the disk."""
        offset, size = self._chunks[chunk].tolist()
        self._tell(size)
        return self._read(offset, np.empty(size, np.uint8))

    def _tell(self, size: int) -> None:
        if self._told is not None:
            self._told(size)

    def _read(self, offset: int, out: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Fill `out` from there on, and return it."""
        done = 0
        while done < out.size:
            count = os.preadv(self._descriptor, [out.data[done:]], offset + done)
            if not count:
                raise CacheCorruptError(
                    f"{self.path} ends after {offset + done} bytes; {offset + out.size} expected. Capture the shard again."
                )
            done += count
        return out


class Part(NamedTuple):
    """What a read takes of one chunk: its rows `first`.. are `rows` of the result. `runs` are the frames that they lie in, none of a chunk
    that is unpacked whole."""

    chunk: int
    first: int
    rows: slice
    runs: list[Run]


class Reading(NamedTuple):
    """Tokens `start`.. of an array, announced and not read yet."""

    file: ArrayFile
    start: int
    num_tokens: int
    parts: list[Part]


class _LastChunk(threading.local):
    """The chunk that a thread unpacked last of each array without frames: samples read in order then unpack every chunk once."""

    def __init__(self) -> None:
        self._chunks: dict[str, tuple[ArrayFile, int, NDArray[np.uint8]]] = {}

    def of(self, file: ArrayFile, chunk: int) -> NDArray[np.uint8]:
        known = self._chunks.get(file.spec.name)
        if known is not None and known[0] is file and known[1] == chunk:
            return known[2]
        decoded = file.decode(chunk)
        self._chunks[file.spec.name] = (file, chunk, decoded)
        return decoded
