"""How quickly samples come out of a cache at random, as training wants them: `stages/bench.py loader`.

The same samples in the same order, by as many threads as cores are asked for, in turns: from a `lossless` copy of the cache, from a
`raw` one, from one `torch.save` file a sample, and the codec alone on the frames that these reads touch, with their bytes in memory.
Then the first three again with the page cache dropped of their files before every round.
"""

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.bench.cache import save_each, take_samples, write_copy
from pipeline.bench.timing import CLOCKS, Clock, in_turns, rate
from pipeline.cache.codec import Bits, new_states, unpack_rows
from pipeline.cache.layout import ArraySpec, array_data, shard_folder
from pipeline.cache.openfiles import ArrayFile, Part
from pipeline.cache.reader import Cache
from pipeline.cache.recode import recoded_manifest
from pipeline.errors import BenchError
from pipeline.report.tables import table

KINDS = {
    "lossless": "samples_per_second",
    "codec alone": "codec_samples_per_second",
    "raw": "raw_samples_per_second",
    "torch.save": "torch_load_samples_per_second",
}


def bench_loader(path: Path, max_bytes: int, threads: int, rounds: int, clock: Clock) -> dict[str, Any]:
    """Samples a second, on copies of the first samples of a raw or lossless cache, of at most `max_bytes` of states.

    Copies go into a temporary folder (`TMPDIR`), which should lie on a disk like that of the caches. Cold reads are by clock time. Raises
    `BenchError` when there are too few samples to read at random.
    """
    cache = Cache.open(path)
    recoded_manifest(cache, "raw")  # refuses a lossy cache
    samples = take_samples(cache, max_bytes)
    if len(samples) < 2:
        raise BenchError(f"{path} has {len(samples)} samples within these bytes; name a larger cache, or a larger --mb.")
    order = np.random.default_rng(0).permutation(len(samples)).tolist()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(threads) as pool:
        folder = Path(name)

        def each(read: Callable[[int], object]) -> Callable[[], None]:
            def all_of_them() -> None:
                deque(pool.map(read, order), maxlen=0)

            return all_of_them

        copies = {codec: write_copy(cache, samples, codec, folder / codec) for codec in ("lossless", "raw")}
        save_each(samples, folder / "saved")
        ways = {
            "lossless": each(lambda number: copies["lossless"].read(number, final=cache.manifest.final)),
            "codec alone": each(_unpackings(copies["lossless"])),
            "raw": each(lambda number: copies["raw"].read(number, final=cache.manifest.final)),
            "torch.save": each(lambda number: torch.load(folder / "saved" / f"{number}.pt", weights_only=True)),
        }
        warm = in_turns(ways, rounds, clock)
        folders = {"lossless": folder / "lossless", "raw": folder / "raw", "torch.save": folder / "saved"}
        cold = in_turns({kind: ways[kind] for kind in folders}, rounds, "wall", lambda kind: drop_page_cache(folders[kind]))
    found: dict[str, Any] = {
        "settings": {
            "cache": str(path),
            "layers": list(cache.manifest.layer_ids),
            "hidden_size": cache.manifest.hidden_size,
            "dtype": cache.manifest.dtype,
            "threads": threads,
            "clock": clock,
            "rounds": rounds,
        },
        "samples": len(samples),
        "tokens": sum(sample.tokens.num_tokens for sample in samples),
    }
    for kind, key in KINDS.items():
        found |= rate(key, len(samples), warm[kind])
        if kind in cold:
            found |= rate(f"cold_{key}", len(samples), cold[kind])
    return found


def as_text(found: dict[str, Any]) -> str:
    """The same as a table."""
    rows = []
    for kind, key in KINDS.items():
        row = [kind, *(round(value) for value in (found[key], *found[f"{key}_range"]))]
        rows.append([*row, round(found[f"cold_{key}"]) if f"cold_{key}" in found else ""])
    settings = found["settings"]
    return (
        f"{found['samples']} samples, {found['tokens']:,} tokens, layers {settings['layers']}, {settings['hidden_size']} wide, "
        f"{settings['dtype']}; {settings['threads']} threads, {CLOCKS[settings['clock']]}, at random\n\n"
        f"{table(('', 'samples/s', 'least', 'most', 'page cache dropped'), rows)}\n\n"
        f"lossless reads at {found['samples_per_second'] / found['codec_samples_per_second']:.2f} of its codec's speed"
    )


def drop_page_cache(folder: Path) -> None:
    """Of all files below `folder`, which are written out first."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


def _unpackings(cache: Cache) -> Callable[[int], None]:
    """The codec on all that a read of a sample touches."""
    work = [list(_touched(cache, number)) for number in range(len(cache))]

    def unpack_sample(number: int) -> None:
        for packed, part, spec, out in work[number]:
            unpack_rows(packed, part.runs, spec, part.first, out[part.rows], "bench")

    return unpack_sample


def _touched(cache: Cache, number: int) -> Iterator[tuple[NDArray[np.uint8], Part, ArraySpec, Bits]]:
    """By chunk, the frames that have rows of a sample's states, and where its rows go."""
    index, manifest = cache.index, cache.manifest
    shard, start, tokens = int(index.shard[number]), int(index.token_offset[number]), int(index.num_tokens[number])
    for array in manifest.arrays:
        spec = manifest.spec(array)
        file = _file(cache, shard, array)
        out: Bits = new_states(tokens, spec)[1]
        for part in file.parts(start, tokens):
            yield file.packed(part.runs), part, spec, out


def _file(cache: Cache, shard: int, array: str) -> ArrayFile:
    entry = cache.index.shards[shard]
    return ArrayFile(
        shard_folder(cache.path, shard) / array_data(array), cache.manifest.spec(array), entry.num_tokens, entry.sizes[array_data(array)]
    )
