"""The files of a cache that a process has open: only what a read touches, straight into the caller's memory.

Files are opened when first needed, each process for itself. A cache has more array files than a process may hold open, so the
least recently used are let go; `samples.arrow` files are memory-mapped, cost no descriptor, and stay.
"""

import hashlib
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path

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
"""Array files that a process keeps open."""


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

    def announce(self, shard: int, array: str, start: int, num_tokens: int) -> None:
        """Have the disk begin on what a read of these tokens will want, while others are unpacked."""
        self._array(shard, array).announce(start, num_tokens)

    def read_rows(self, shard: int, array: str, start: int, out: Bits) -> None:
        """Fill `out` [n, width] with rows start.. of an array."""
        file = self._array(shard, array)
        for chunk, first, rows in spans_of(start, len(out)):
            if file.has_frames:
                file.unpack_rows(chunk, first, out[rows])
            else:
                take_rows(self._last.of(file, chunk), file.spec, first, out[rows])

    def read_quantised(self, shard: int, array: str, start: int, num_tokens: int) -> Quantised:
        """Tokens start.. of an array with a lossy codec."""
        file = self._array(shard, array)
        begin, end = start // CHUNK_TOKENS, num_chunks(start + num_tokens)
        chunks = [self._last.of(file, chunk) for chunk in range(begin, end)]
        return take_quantised(chunks, start - begin * CHUNK_TOKENS, num_tokens, file.spec)

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
        """Checks the size and the checksum of the chunk index. `count` is told the bytes of every read."""
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
        data = self._pread(begin, found - begin)
        self._chunks = unpack_index(data[-tail:], found, str(path))
        without = int(self._chunks.sum(axis=1).max()) + tail == found
        self._frames = None if without or not table else FrameTable(data[:-tail], self._chunks, spec, str(path))

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def __len__(self) -> int:
        """Chunks in the file."""
        return len(self._chunks)

    def decode(self, chunk: int) -> NDArray[np.uint8]:
        """A chunk's bytes as `take_rows` wants them."""
        return decode_chunk(self.stored(chunk), self.spec, f"{self.path}, chunk {chunk}")

    @property
    def has_frames(self) -> bool:
        return self._frames is not None

    def unpack_rows(self, chunk: int, first: int, out: Bits) -> None:
        """Fill `out` [n, width] with rows first.. of a chunk, from the frames that they lie in."""
        unpack_rows(self.packed(chunk, first, len(out)), self.spec, first, out, f"{self.path}, chunk {chunk}")

    def packed(self, chunk: int, first: int, num_tokens: int) -> list[tuple[Run, bytes]]:
        """The frames with a chunk's rows first.., as they lie on the disk."""
        assert self._frames is not None
        return [(run, self._read(run.offset, run.size)) for run in self._frames.runs(chunk, first, num_tokens)]

    def announce(self, start: int, num_tokens: int) -> None:
        """Tokens start.. will be read."""
        if not hasattr(os, "posix_fadvise"):
            return
        if self._frames is None:
            first, last = self._chunks[start // CHUNK_TOKENS], self._chunks[num_chunks(start + num_tokens) - 1]
            ranges = [(int(first[0]), int(last.sum() - first[0]))]
        else:
            spans = [(chunk, first, rows.stop - rows.start) for chunk, first, rows in spans_of(start, num_tokens)]
            ranges = [(run.offset, run.size) for span in spans for run in self._frames.runs(*span)]
        for offset, size in ranges:
            os.posix_fadvise(self._descriptor, offset, size, os.POSIX_FADV_WILLNEED)

    def stored(self, chunk: int) -> bytes:
        """A chunk as it lies on the disk."""
        offset, size = (int(value) for value in self._chunks[chunk])
        return self._read(offset, size)

    def _read(self, offset: int, size: int) -> bytes:
        if self._told is not None:
            self._told(size)
        return self._pread(offset, size)

    def _pread(self, offset: int, size: int) -> bytes:
        data = os.pread(self._descriptor, size, offset)
        while len(data) < size:
            more = os.pread(self._descriptor, size - len(data), offset + len(data))
            if not more:
                raise CacheCorruptError(
                    f"{self.path} ends after {offset + len(data)} bytes; {offset + size} expected. Capture the shard again."
                )
            data += more
        return data


def spans_of(start: int, num_tokens: int) -> Iterator[tuple[int, int, slice]]:
    """Tokens start.. of an array by chunk: its number, its first row of them, and which of them."""
    row = 0
    while row < num_tokens:
        chunk, first = divmod(start + row, CHUNK_TOKENS)
        count = min(CHUNK_TOKENS - first, num_tokens - row)
        yield chunk, first, slice(row, row + count)
        row += count


class _LastChunk(threading.local):
    """The chunk that a thread unpacked last of each array: samples read in order then unpack every chunk once."""

    def __init__(self) -> None:
        self._chunks: dict[str, tuple[ArrayFile, int, NDArray[np.uint8]]] = {}

    def of(self, file: ArrayFile, chunk: int) -> NDArray[np.uint8]:
        known = self._chunks.get(file.spec.name)
        if known is not None and known[0] is file and known[1] == chunk:
            return known[2]
        decoded = file.decode(chunk)
        self._chunks[file.spec.name] = (file, chunk, decoded)
        return decoded
