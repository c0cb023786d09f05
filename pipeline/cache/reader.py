"""Opens a complete cache and reads samples from it.

Opening compares sizes; reading compares checksums, so nothing is ever read as zeros or as something else than was written:
the manifest's seal, the index against the manifest, a shard's marker, samples, metadata, chunk indices and tables of frames when they
are first opened, every frame, or chunk that has none, when it is unpacked, the target's files when they are loaded.
"""

import shlex
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import torch

from pipeline.cache.bundle import load_bundle
from pipeline.cache.codec import new_states
from pipeline.cache.commit import check_complete
from pipeline.cache.index import Index, build_index, load_index, size_faults
from pipeline.cache.layout import (
    CONFIG_COPY,
    FINAL,
    GROUP_JSON,
    MARKER,
    SAMPLES,
    array_data,
    array_json,
    array_names,
    inside,
    shard_folder,
    target_folder,
    tokenizer_folder,
)
from pipeline.cache.manifest import Manifest, read_manifest
from pipeline.cache.openfiles import OpenFiles
from pipeline.errors import CacheCorruptError, CacheMismatchError
from pipeline.records import CapturedSample, Quantised, TargetBundle
from pipeline.runtime.files import file_digest

State = TypeVar("State", torch.Tensor, Quantised)


class Cache:
    """A complete cache, opened by `Cache.open`, or some shards of any. Reading is safe from several threads, and after a fork."""

    def __init__(self, path: Path, manifest: Manifest, index: Index) -> None:
        self.path = path
        self.manifest = manifest
        self.index = index
        self._files = OpenFiles(path, manifest, index)

    @classmethod
    def open(cls, path: Path | str, layer_ids: Sequence[int] | None = None, final: bool = False) -> "Cache":
        """Check that the cache is complete and that every file that will be read has the recorded size.

        `layer_ids` (default: all of the cache's) and `final` are what will be read. Raises `CacheError` when it is not a complete
        cache, `CacheMismatchError` when it lacks a layer, `CacheCorruptError` naming the files that are missing or cut.
        """
        cache = Path(path)
        manifest = read_manifest(cache)
        check_complete(cache, manifest)
        arrays = _wanted(cache, manifest, layer_ids, final)
        index = load_index(cache, manifest)
        _check_sizes(cache, manifest, index, arrays)
        return cls(cache, manifest, index)

    @classmethod
    def open_shards(cls, path: Path | str, shards: Sequence[int]) -> "Cache":
        """Committed shards, ascending, of a cache that need not be complete; it is as if there were no others."""
        manifest = read_manifest(Path(path))
        return cls(Path(path), manifest, build_index(Path(path), manifest, shards))

    def __len__(self) -> int:
        return len(self.index)

    def read(
        self,
        i: int,
        layer_ids: Sequence[int] | None = None,
        final: bool = False,
        max_tokens: int | None = None,
        dequantise: bool = True,
    ) -> CapturedSample:
        """Sample number `i` with the states of `layer_ids` (default: all), cut to its first `max_tokens` tokens.

        States are [S, H] in the cache's dtype. Those of layers of a lossy cache are left as they lie there, in `quantised`, unless they
        are to be dequantised here. Raises `CacheCorruptError` naming file and chunk when bytes were altered.
        """
        if not 0 <= i < len(self.index):
            raise IndexError(f"sample {i} of {len(self.index)}")
        names = _wanted(self.path, self.manifest, layer_ids, final)
        shard, offset = int(self.index.shard[i]), int(self.index.token_offset[i])
        tokens = self._files.samples(shard).sample(i - int(self.index.first_of_shard[shard]))
        if max_tokens is not None:
            tokens = tokens.prefix(max_tokens)
        readings = {name: self._files.begin(shard, name, offset, tokens.num_tokens) for name in names}
        states: dict[str, torch.Tensor] = {}
        quantised: dict[str, Quantised] = {}
        for name, reading in readings.items():
            spec = self.manifest.spec(name)
            if spec.lossy:
                found = self._files.read_quantised(reading)
                if dequantise or name == FINAL:
                    states[name] = found.dequantise()
                else:
                    quantised[name] = found
            else:
                states[name], bits = new_states(tokens.num_tokens, spec)
                self._files.read_rows(reading, bits)
        last = states.pop(FINAL, None)
        return CapturedSample(tokens, _by_layer(states), last, _by_layer(quantised) if quantised else None)

    @property
    def bytes_read(self) -> int:
        """Packed, by this process since the cache was opened (or since the fork)."""
        return self._files.bytes_read

    def bundle(self) -> TargetBundle:
        """Embedding, head, final norm and config of the target, on the CPU."""
        self._check_target_files()
        return load_bundle(target_folder(self.path))

    @property
    def tokenizer_dir(self) -> Path:
        """Folder for `AutoTokenizer.from_pretrained`: the target's tokenizer and chat template."""
        self._check_target_files("tokenizer/")
        return tokenizer_folder(self.path)

    def digest(self) -> str:
        """sha256 of identities and committed checksums: equal for caches that hold the same, wherever written by the same versions."""
        return self.manifest.digest([entry.marker_sha256 for entry in self.index.shards])

    def _check_target_files(self, start: str = "") -> None:
        folder = target_folder(self.path)
        for name, record in (self.manifest.target_files or {}).items():
            if name.startswith(start) and file_digest(inside(self.path, folder / name)) != record.sha256:
                raise CacheCorruptError(f"{folder / name} was altered: its checksum is wrong. Restore it from another copy of the cache.")


def _by_layer(states: Mapping[str, State]) -> dict[int, State]:
    return {int(name.removeprefix("layer_")): state for name, state in states.items()}


def _wanted(cache: Path, manifest: Manifest, layer_ids: Sequence[int] | None, final: bool) -> tuple[str, ...]:
    """Names of the arrays to read."""
    layers = manifest.layer_ids if layer_ids is None else tuple(layer_ids)
    missing = [layer for layer in layers if layer not in manifest.layer_ids]
    if missing:
        raise CacheMismatchError(
            f"{cache} holds the target layers {list(manifest.layer_ids)}; this run needs {missing} as well. Name a subset in "
            f"model.draft.target_layer_ids, or add what is missing:\n  {append_command(cache, manifest, missing, final)}"
        )
    if final and not manifest.final:
        raise CacheMismatchError(
            f"{cache} does not hold the final hidden state, which this run needs. Add it:\n  {append_command(cache, manifest, (), True)}"
        )
    return array_names(layers, final)


def append_command(cache: Path, manifest: Manifest, layer_ids: Sequence[int], final: bool) -> str:
    """The command that adds layers, or the final hidden state, to the cache, from the configuration that capture keeps in it."""
    kept = cache / CONFIG_COPY
    settings = [f"capture.path={cache}"]
    if layer_ids:
        settings.append(f"model.target.layer_ids=[{','.join(str(layer) for layer in (*manifest.layer_ids, *layer_ids))}]")
    if final or manifest.final:
        settings.append("capture.final=true")
    command = ["python", "stages/cache.py", "append", str(kept) if kept.exists() else "CONFIG.yaml", *settings]
    return " ".join(shlex.quote(word) for word in command)


def _check_sizes(cache: Path, manifest: Manifest, index: Index, arrays: tuple[str, ...]) -> None:
    """Of every file that a read of `arrays` may open, and of the target's; `CacheCorruptError` names the first few at fault."""
    names = (MARKER, SAMPLES, GROUP_JSON, *(path(name) for name in arrays for path in (array_json, array_data)))

    def of_shard(shard: int) -> list[str]:
        return size_faults(shard_folder(cache, shard), {name: index.shards[shard].sizes[name] for name in names})

    with ThreadPoolExecutor() as pool:
        faults = [fault for found in pool.map(of_shard, range(manifest.num_shards)) for fault in found]
    target = target_folder(cache)
    target_sizes = {name: record.size for name, record in (manifest.target_files or {}).items() if inside(cache, target / name)}
    faults += size_faults(target, target_sizes)
    if faults:
        more = f"\n… and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise CacheCorruptError("\n".join(faults[:5]) + more + "\nRestore these files from a copy, or run stages/cache.py repair CONFIG.")
