"""Writes the arrays of one shard while the target goes on: rows are gathered into chunks, packed by a few threads and appended in order.

    append ─► queue (bounded in bytes) ─► one sequencing thread ─► pool: encode_chunk ─► the same thread: file, sha256, sizes

What is written depends on the rows alone, not on the timing of threads: each chunk is packed by one thread from its own bytes.
"""

import contextlib
import hashlib
import io
import os
import shutil
import threading
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import torch

from pipeline.cache.codec import Bits, StoredChunk, bits_of, bits_type, encode_chunk, pack_index
from pipeline.cache.frames import Frames, pack_table
from pipeline.cache.layout import CHUNK_TOKENS, DTYPES, FINAL, MARKER, ArraySpec, array_data, array_json, shard_folder, temporary_folder
from pipeline.cache.manifest import FileRecord, Manifest, read_marker
from pipeline.errors import CacheError
from pipeline.records import CapturedSample

QUEUE_BYTES = 1 << 28
"""Hidden states that may wait in a writer; a forward that is further ahead waits for the disk."""

PACKING_THREADS = max(1, min(4, os.cpu_count() or 1))


class ShardWriter:
    """The arrays of one shard that this process writes (other processes may write others of the same shard).

    All processes of one attempt name the same `attempt`, so that they share a temporary folder that no earlier, dying one
    writes to. Errors of the threads surface in the next `append` or in `close`. As a context manager it abandons what was not closed.
    """

    def __init__(
        self, cache: Path, shard: int, manifest: Manifest, arrays: tuple[str, ...], *, attempt: str = "0", queue_bytes: int = QUEUE_BYTES
    ) -> None:
        unknown = [name for name in arrays if name not in manifest.arrays]
        if unknown or not arrays:
            raise CacheError(f"shard {shard} has the arrays {manifest.arrays}; asked to write {arrays}")
        if (shard_folder(cache, shard) / MARKER).exists():
            there = [name for name in arrays if array_data(name) in read_marker(cache, shard)[0].files]
            if there:
                raise CacheError(
                    f"shard {shard} of {cache} is committed already with {there}; remove it first if it must be captured again"
                )
        self._folder = temporary_folder(cache, shard, attempt)
        self._dtype = DTYPES[manifest.dtype].torch_dtype
        self._width = manifest.hidden_size
        try:
            self._streams = {name: _ArrayStream(self._folder, manifest.spec(name)) for name in arrays}
        except OSError as error:
            raise self._disk_error(error) from error
        self._pending: deque[tuple[_ArrayStream, Future[StoredChunk]]] = deque()
        self._queue: deque[list[tuple[_ArrayStream, torch.Tensor]] | None] = deque()
        self._queued_bytes = 0
        self._queue_bytes = queue_bytes
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._records: dict[str, FileRecord] = {}
        self._pool = ThreadPoolExecutor(PACKING_THREADS, thread_name_prefix="pack")
        self._thread = threading.Thread(target=self._run, name=f"shard-{shard}", daemon=True)
        self._thread.start()

    def append(self, sample: CapturedSample) -> None:
        """Take the next sample of the shard; its tensors [S, H] must not be changed afterwards.

        Returns at once unless more than `queue_bytes` wait. Tensors on a device are copied by the writer's thread.
        """
        states = [(stream, self._checked(sample, name)) for name, stream in self._streams.items()]
        size = sum(state.nbytes for _, state in states)
        with self._changed:
            # A sample larger than the whole queue is let in when nothing else waits.
            self._changed.wait_for(lambda: self._error or self._queued_bytes == 0 or self._queued_bytes + size <= self._queue_bytes)
            self._raise()
            self._queue.append(states)
            self._queued_bytes += size
            self._changed.notify_all()

    def close(self) -> dict[str, FileRecord]:
        """Write what is left, tables of frames, chunk indices and metadata, all fsynced. Size and sha256 by path inside the shard."""
        self._stop(None)
        self._raise()
        return self._records

    def abandon(self) -> None:
        """Stop and remove what this process wrote of the shard."""
        self._stop(CacheError(f"{self._folder} was abandoned"))
        for stream in self._streams.values():
            stream.file.close()
            shutil.rmtree(stream.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # not empty while other processes write
            stream.folder.parent.rmdir()
            self._folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self._records:
            self.abandon()

    def _checked(self, sample: CapturedSample, name: str) -> torch.Tensor:
        state = sample.final if name == FINAL else sample.hidden.get(int(name.removeprefix("layer_")))
        expected = (sample.tokens.num_tokens, self._width)
        if state is None or state.shape != expected or state.dtype != self._dtype:
            found = "nothing" if state is None else f"{state.dtype} {tuple(state.shape)}"
            raise CacheError(f"sample {sample.tokens.sample_id}, {name}: {found}, expected {self._dtype} {expected}")
        return state.detach()

    def _disk_error(self, error: OSError) -> CacheError:
        return CacheError(f"cannot write {self._folder}: {error}. Free disk space or mend the disk, then run capture again.")

    def _raise(self) -> None:
        if isinstance(self._error, OSError):
            raise self._disk_error(self._error) from self._error
        if self._error is not None:
            raise self._error

    def _stop(self, error: BaseException | None) -> None:
        with self._changed:
            self._error = self._error or error
            self._queue.append(None)
            self._changed.notify_all()
        self._thread.join()
        self._pool.shutdown(cancel_futures=True)

    def _run(self) -> None:
        try:
            while (states := self._next()) is not None:
                for stream, state in states:
                    for chunk in stream.full_chunks(bits_of(state.cpu().contiguous())):
                        self._pack(stream, chunk)
                self._took(sum(state.nbytes for _, state in states))
            for stream in self._streams.values():
                if (rest := stream.last_chunk()) is not None:
                    self._pack(stream, rest)
            self._write_down_to(0)
            self._records = {path: record for stream in self._streams.values() for path, record in stream.finish().items()}
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._queue.clear()
                self._changed.notify_all()

    def _next(self) -> list[tuple["_ArrayStream", torch.Tensor]] | None:
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._error)
            if self._error is not None:
                raise self._error
            return self._queue.popleft()

    def _took(self, size: int) -> None:
        with self._changed:
            self._queued_bytes -= size
            self._changed.notify_all()

    def _pack(self, stream: "_ArrayStream", chunk: Bits) -> None:
        self._pending.append((stream, self._pool.submit(encode_chunk, chunk, stream.spec)))
        self._write_down_to(2 * PACKING_THREADS)

    def _write_down_to(self, limit: int) -> None:
        while len(self._pending) > limit:
            stream, packed = self._pending.popleft()
            stream.write(packed.result())


class _ArrayStream:
    """One array's file as it grows: chunks one after the other, then where their frames end, and their index."""

    def __init__(self, shard: Path, spec: ArraySpec) -> None:
        self.spec = spec
        self.folder = (shard / array_json(spec.name)).parent
        shutil.rmtree(self.folder, ignore_errors=True)  # left by a killed run that used the same attempt name
        self.path = shard / array_data(spec.name)
        self.path.parent.mkdir(parents=True)
        self.file = io.FileIO(self.path, "xb")
        self.sha256 = hashlib.sha256()
        self.size = 0
        self.chunk_sizes: list[int] = []
        self.frames: list[Frames] = []
        self.num_tokens = 0
        self._partial: Bits = np.empty((0, spec.width), bits_type(spec.item_bytes))
        self._filled = 0

    def full_chunks(self, rows: Bits) -> list[Bits]:
        """The chunks [512, width] that `rows` completes; the rest is kept for the next call."""
        chunks, start = [], 0
        self.num_tokens += len(rows)
        while start < len(rows):
            if self._filled == 0 and len(rows) - start >= CHUNK_TOKENS:
                chunks.append(rows[start : start + CHUNK_TOKENS])
                start += CHUNK_TOKENS
                continue
            if self._filled == 0:
                self._partial = np.empty((CHUNK_TOKENS, self.spec.width), rows.dtype)
            count = min(CHUNK_TOKENS - self._filled, len(rows) - start)
            self._partial[self._filled : self._filled + count] = rows[start : start + count]
            start, self._filled = start + count, self._filled + count
            if self._filled == CHUNK_TOKENS:
                chunks.append(self._partial)
                self._filled = 0
        return chunks

    def last_chunk(self) -> Bits | None:
        """The rows that filled no chunk, with zero rows after them."""
        if self._filled == 0:  # the buffer, if there is one, went out as a full chunk and may be in packing right now
            return None
        self._partial[self._filled :] = 0
        return self._partial

    def write(self, chunk: StoredChunk) -> None:
        """The next chunk."""
        self._append(chunk.data)
        self.chunk_sizes.append(len(chunk.data))
        self.frames.append(chunk.frames)

    def _append(self, data: bytes) -> None:
        self.sha256.update(data)
        self.size += len(data)
        view = memoryview(data)
        while view:
            view = view[self.file.write(view) :]

    def finish(self) -> dict[str, FileRecord]:
        """Frames and index, fsync, metadata; the records of the array's two files."""
        if self.num_tokens == 0:
            raise CacheError(f"{self.path}: no sample was appended; a shard holds at least one")
        self._append(pack_table(self.frames, self.spec))
        self._append(pack_index(self.chunk_sizes))
        os.fsync(self.file.fileno())
        self.file.close()
        metadata = self.spec.metadata(self.num_tokens).encode()
        with open(self.folder / "zarr.json", "xb") as file:
            file.write(metadata)
            file.flush()
            os.fsync(file.fileno())
        return {
            array_json(self.spec.name): FileRecord(size=len(metadata), sha256=hashlib.sha256(metadata).hexdigest()),
            array_data(self.spec.name): FileRecord(size=self.size, sha256=self.sha256.hexdigest()),
        }
