"""How small and how fast a cache is, on hidden states of a real target: `stages/bench.py cache`.

Rates are by processor time, summed over threads: those of one core, whatever else the machine does, without the waiting for
disks. So the codec alone, the floor, compares with our writer and reader around it. A MB is 10^6 bytes of states as the target
gave them, before any codec. Of several rounds the quickest counts.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.cache.codec import Bits, bits_of, decode_chunk, encode_chunk, new_states, take_rows
from pipeline.cache.commit import commit_shard, complete
from pipeline.cache.layout import CHUNK_TOKENS, FINAL, LOSSY, ArraySpec, shards_folder, temporary_folder
from pipeline.cache.lossy import take_quantised
from pipeline.cache.manifest import Manifest, create_or_compare
from pipeline.cache.reader import Cache
from pipeline.cache.recode import Codec, link_target, recoded_manifest
from pipeline.cache.writer import ShardWriter
from pipeline.errors import CacheError
from pipeline.records import CapturedSample
from pipeline.report.tables import table

CODECS: tuple[Codec, ...] = ("raw", "lossless", "int8", "int4")
CHUNKS = 24
"""Chunks that the codec alone is timed on, from all over the states."""
ROUNDS = 3


def bench_cache(path: Path, max_bytes: int) -> dict[str, Any]:
    """Size and speed of the states of a raw or lossless cache in every codec, on samples of at most `max_bytes` of states.

    Writes into a temporary folder (`TMPDIR`), which should lie on a disk like that of the caches. Raises `CacheError` when there are
    too few tokens to fill a chunk.
    """
    cache = Cache.open(path)
    recoded_manifest(cache, "raw")  # refuses a lossy cache
    samples = take_samples(cache, max_bytes)
    tokens = sum(sample.tokens.num_tokens for sample in samples)
    if tokens < CHUNK_TOKENS:
        raise CacheError(
            f"{path} has {tokens} tokens in these samples; {CHUNK_TOKENS} make a chunk. Name a larger cache, or a larger --mb."
        )
    raw = sum(cache.manifest.spec(name).width * cache.manifest.spec(name).item_bytes for name in cache.manifest.arrays)
    with tempfile.TemporaryDirectory() as name:
        codecs = {codec: _bench_codec(cache, samples, codec, Path(name) / codec) for codec in CODECS}
        saved = _torch_save_rate(samples, Path(name) / "torch_save")
        files = sum(entry.is_file() for entry in shards_folder(Path(name) / "lossless").rglob("*"))
    for found in codecs.values():
        found["bytes_per_token"] /= tokens
        found["of_raw"] = found["bytes_per_token"] / raw
    return {
        "cache": str(path),
        "layers": list(cache.manifest.layer_ids),
        "hidden_size": cache.manifest.hidden_size,
        "dtype": cache.manifest.dtype,
        "samples": len(samples),
        "tokens": tokens,
        "raw_bytes_per_token": raw,
        "codecs": codecs,
        "torch_save_samples_per_second": saved,
        "files": files,
        "torch_save_files": len(samples),
    }


def as_text(found: dict[str, Any]) -> str:
    """The same as a table."""
    header = ("codec", "bytes/token", "of raw", "encode MB/s", "decode MB/s", "write MB/s", "share", "read MB/s", "share", "samples/s")
    fields = ("bytes_per_token", "of_raw", "encode_mb_s", "decode_mb_s", "write_mb_s", "write_share", "read_mb_s", "read_share")
    rows = [[codec, *(found["codecs"][codec][field] for field in (*fields, "samples_per_second"))] for codec in found["codecs"]]
    shown = [[row[0], round(row[1]), row[2], *(round(v) if v > 9 else round(v, 2) for v in row[3:])] for row in rows]
    width, kind, saved = found["hidden_size"], found["dtype"], found["torch_save_samples_per_second"]
    return (
        f"{found['samples']} samples, {found['tokens']:,} tokens, layers {found['layers']}, {width} wide, {kind}; one core\n\n"
        f"{table(header, shown)}\n\n"
        f"one torch.save file a sample: {saved:.0f} samples/s at random, {found['torch_save_files']} files; here {found['files']} a shard"
    )


def take_samples(cache: Cache, max_bytes: int) -> list[CapturedSample]:
    """The first samples with all their states, of at most `max_bytes` together; one at least."""
    found: list[CapturedSample] = []
    size = 0
    for number in range(len(cache)):
        sample = cache.read(number, final=cache.manifest.final)
        states = [*sample.hidden.values(), *([sample.final] if sample.final is not None else [])]
        size += sum(state.nbytes for state in states)
        if size > max_bytes and found:
            break
        found.append(sample)
    return found


def _bench_codec(cache: Cache, samples: Sequence[CapturedSample], codec: Codec, folder: Path) -> dict[str, float]:
    manifest = _copy_manifest(cache, codec)
    encode, decode = _codec_rates(manifest, samples)
    states = sum(state.nbytes for sample in samples for state in states_of(sample).values())
    create_or_compare(folder, manifest)
    write = states / _quickest(lambda: _write(folder, manifest, samples)) / 1e6
    opened = write_copy(cache, samples, codec, folder)
    read = states / _quickest(lambda: _read(opened, range(len(samples)))) / 1e6
    at_random = np.random.default_rng(0).permutation(len(samples)).tolist()
    return {
        "bytes_per_token": float(sum(entry.stat().st_size for entry in shards_folder(folder).rglob("c/0/0"))),
        "encode_mb_s": encode,
        "decode_mb_s": decode,
        "write_mb_s": write,
        "read_mb_s": read,
        "write_share": write / encode,
        "read_share": read / decode,
        "samples_per_second": len(samples) / _quickest(lambda: _read(opened, at_random)),
    }


def write_copy(cache: Cache, samples: Sequence[CapturedSample], codec: Codec, folder: Path) -> Cache:
    """A cache of `samples` of `cache`, in one shard."""
    manifest = _copy_manifest(cache, codec)
    create_or_compare(folder, manifest)
    with ShardWriter(folder, 0, manifest, manifest.arrays) as writer:
        for sample in samples:
            writer.append(sample)
        records = writer.close()
    commit_shard(folder, 0, [sample.tokens for sample in samples], records)
    link_target(cache, folder)
    complete(folder)
    return Cache.open(folder, final=manifest.final)


def _copy_manifest(cache: Cache, codec: Codec) -> Manifest:
    return recoded_manifest(cache, codec).model_copy(update={"num_shards": 1})


def _codec_rates(manifest: Manifest, samples: Sequence[CapturedSample]) -> tuple[float, float]:
    """MB a second of the codec alone, in and out, over chunks of all arrays. Out is what a reader hands on: states, or codes and scales."""
    spent = np.zeros((ROUNDS, 2))
    size = 0
    for name in manifest.arrays:
        spec = manifest.spec(name)
        rows = bits_of(torch.cat([states_of(sample)[name] for sample in samples]))
        starts = np.unique(np.linspace(0, len(rows) - CHUNK_TOKENS, min(CHUNKS, max(1, len(rows) // CHUNK_TOKENS))).astype(int))
        chunks = [rows[start : start + CHUNK_TOKENS] for start in starts]
        size += len(chunks) * spec.chunk_bytes
        for turn in range(ROUNDS):
            begin = time.process_time()
            stored = [encode_chunk(chunk, spec).data for chunk in chunks]
            middle = time.process_time()
            for data in stored:
                _unpack(data, spec)
            spent[turn] += (middle - begin, time.process_time() - middle)
    encode, decode = size / spent.min(axis=0) / 1e6
    return float(encode), float(decode)


def _unpack(data: bytes, spec: ArraySpec) -> None:
    chunk = decode_chunk(data, spec, "bench")
    if spec.codec in LOSSY:
        take_quantised([chunk], 0, CHUNK_TOKENS, spec)
    else:
        bits: Bits = new_states(CHUNK_TOKENS, spec)[1]
        take_rows(chunk, spec, 0, bits)


def states_of(sample: CapturedSample) -> dict[str, torch.Tensor]:
    """By array."""
    states = {f"layer_{layer}": state for layer, state in sample.hidden.items()}
    return states if sample.final is None else {**states, FINAL: sample.final}


def _write(folder: Path, manifest: Manifest, samples: Sequence[CapturedSample]) -> None:
    """Through our writer onto the disk, and away again."""
    with ShardWriter(folder, 0, manifest, manifest.arrays, attempt="bench") as writer:
        for sample in samples:
            writer.append(sample)
        writer.close()
    shutil.rmtree(temporary_folder(folder, 0, "bench"))


def _read(cache: Cache, numbers: Sequence[int]) -> None:
    for number in numbers:
        cache.read(number, final=cache.manifest.final, dequantise=False)


def save_each(samples: Sequence[CapturedSample], folder: Path) -> None:
    """Each sample as a file of its own, by torch.save, with the same contents."""
    folder.mkdir()
    for number, sample in enumerate(samples):
        tokens = sample.tokens
        states = {name: state.clone() for name, state in states_of(sample).items()}
        content = {"input_ids": torch.from_numpy(tokens.input_ids.copy()), "spans": torch.from_numpy(tokens.spans.copy()), **states}
        torch.save(content, folder / f"{number}.pt")


def _torch_save_rate(samples: Sequence[CapturedSample], folder: Path) -> float:
    """Samples a second of random reads, when each is a file of its own with the same contents."""
    save_each(samples, folder)
    at_random = np.random.default_rng(0).permutation(len(samples)).tolist()

    def read() -> None:
        for number in at_random:
            torch.load(folder / f"{number}.pt", weights_only=True)

    return len(samples) / _quickest(read)


def _quickest(call: Callable[[], None]) -> float:
    """Processor seconds of the quickest of several rounds."""
    seconds = []
    for _ in range(ROUNDS):
        begin = time.process_time()
        call()
        seconds.append(time.process_time() - begin)
    return min(seconds)
