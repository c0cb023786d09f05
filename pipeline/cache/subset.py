"""A smaller cache out of a larger one: some of its layers, splits or samples.

Files whose bytes stay the same are linked (copied to another disk); a shard of which only some samples are kept is written anew.
"""

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.cache.commit import commit_linked, commit_shard, committed_shards, complete, remove_leftovers
from pipeline.cache.layout import FINAL, MANIFEST, inside, shard_files, shard_folder, target_folder, temporary_folder
from pipeline.cache.manifest import Manifest, create_or_compare, read_marker
from pipeline.cache.reader import Cache
from pipeline.cache.writer import ShardWriter
from pipeline.errors import CacheError
from pipeline.runtime.files import FolderLock


@dataclass(frozen=True, slots=True)
class Choice:
    """What is kept: layers in this order (None: all), the final hidden state (None: if it is there), splits (None: all), and the
    number of samples (None: all). Samples are chosen by a hash of their id, so that fewer are always some of more."""

    layer_ids: tuple[int, ...] | None = None
    final: bool | None = None
    splits: tuple[str, ...] | None = None
    num_samples: int | None = None


def subset(source: Path, out: Path, choice: Choice) -> Manifest:
    """Write what `choice` names of the complete cache `source` into `out`; a run that was interrupted goes on.

    Raises `CacheMismatchError` for layers that are not there or when `out` holds another cache, `CacheError` for an unknown split, a
    choice of nothing, or samples out of a cache with a lossy codec.
    """
    final = None if choice.final is None else bool(choice.final)
    cache = Cache.open(source, choice.layer_ids, bool(final))
    found = cache.manifest
    kept = _kept(cache, choice)
    plan = _plan(cache, kept)
    if out.resolve() == source.resolve():
        raise CacheError(f"{out} is the cache itself; name another folder for the subset.")
    manifest = Manifest(
        states_identity=found.states_identity if kept.all() else {**found.states_identity, "subset": _named(cache, choice)},
        samples_identity=found.samples_identity,
        layer_ids=choice.layer_ids or found.layer_ids,
        hidden_size=found.hidden_size,
        dtype=found.dtype,
        codec=found.codec,
        final=found.final if final is None else final,
        num_shards=len(plan),
        segments=found.segments if kept.all() else None,
    )
    out.mkdir(parents=True, exist_ok=True)
    with FolderLock(out):
        if not (out / MANIFEST).exists() and any(path.name != ".lock" for path in out.iterdir()):
            raise CacheError(f"{out} is not empty and holds no cache; name another folder for the subset.")
        create_or_compare(out, manifest)
        remove_leftovers(out)
        done = committed_shards(out)
        for shard, numbers in enumerate(plan):
            if shard not in done:
                _write(cache, out, manifest, shard, numbers)
        for name in found.target_files or {}:
            place = target_folder(out) / name
            link_file(inside(source, target_folder(source) / name), inside(out, place))
        return complete(out)


def _kept(cache: Cache, choice: Choice) -> NDArray[np.bool_]:
    """bool [samples], true for those that are chosen."""
    index = cache.index
    kept = np.ones(len(index), np.bool_)
    if choice.splits is not None:
        if unknown := [name for name in choice.splits if name not in index.splits]:
            raise CacheError(f"{cache.path} has the splits {list(index.splits)}, not {unknown}.")
        kept = np.isin(index.split, [index.splits.index(name) for name in choice.splits])
    if choice.num_samples is not None and choice.num_samples < kept.sum():
        candidates = np.flatnonzero(kept)
        keys = [hashlib.blake2b(str(name).encode(), digest_size=8, person=b"subset").digest() for name in index.sample_id[candidates]]
        chosen = candidates[sorted(range(len(keys)), key=keys.__getitem__)[: choice.num_samples]]
        kept = np.zeros(len(index), np.bool_)
        kept[chosen] = True
    if not kept.any():
        raise CacheError(f"no sample of {cache.path} is in the subset; a cache holds at least one.")
    if not kept.all() and cache.manifest.codec not in ("lossless", "raw"):
        raise CacheError(
            f"{cache.path} has the codec {cache.manifest.codec}: samples would be rounded a second time. Choose layers only, or capture."
        )
    return kept


def _plan(cache: Cache, kept: NDArray[np.bool_]) -> list[list[int]]:
    """Sample numbers of each new shard: a shard that is kept whole stays one, what is kept of others is gathered up to a shard's size."""
    index, limit = cache.index, max(entry.num_tokens for entry in cache.index.shards)
    plan: list[list[int]] = []
    gathered: list[int] = []
    for first, end in zip(index.first_of_shard[:-1].tolist(), index.first_of_shard[1:].tolist(), strict=True):
        numbers = (first + np.flatnonzero(kept[first:end])).tolist()
        whole = len(numbers) == end - first
        if gathered and (whole or int(index.num_tokens[gathered + numbers].sum()) > limit):
            plan.append(gathered)
            gathered = []
        if whole:
            plan.append(numbers)
        else:
            gathered += numbers
    return plan + [gathered] * bool(gathered)


def _named(cache: Cache, choice: Choice) -> dict[str, Any]:
    """What the identity says of a choice of samples: of which cache, which splits, how many."""
    return {"of": cache.digest(), "splits": sorted(choice.splits or ()) or None, "num_samples": choice.num_samples}


def _write(cache: Cache, out: Path, manifest: Manifest, shard: int, numbers: Sequence[int]) -> None:
    source = int(cache.index.shard[numbers[0]])
    first, end = (int(cache.index.first_of_shard[source + k]) for k in (0, 1))
    if len(numbers) == end - first and numbers[0] == first:
        marker, _ = read_marker(cache.path, source)
        folder = temporary_folder(out, shard, "subset")
        names = shard_files(manifest.arrays)
        for name in names:
            link_file(inside(cache.path, shard_folder(cache.path, source) / name), folder / name)
        files = {name: marker.files[name] for name in names}
        commit_linked(out, marker.model_copy(update={"shard": shard, "files": files}), attempt="subset")
        return
    samples = []
    with ShardWriter(out, shard, manifest, manifest.arrays, attempt="subset") as writer:
        for number in numbers:
            sample = cache.read(number, manifest.layer_ids, FINAL in manifest.arrays)
            samples.append(sample.tokens)
            writer.append(sample)
        records = writer.close()
    commit_shard(out, shard, samples, records, attempt="subset")


def link_file(source: Path, place: Path) -> None:
    """`place` with the bytes of `source`: another name of the same file, or a copy where the disk has no such links."""
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists() and place.samefile(source):
        return
    place.unlink(missing_ok=True)
    try:
        os.link(source, place, follow_symlinks=True)
    except OSError:
        with open(source, "rb") as old, open(place, "xb") as new:
            shutil.copyfileobj(old, new)
            new.flush()
            os.fsync(new.fileno())  # a marker that is written after it must not outlive it
