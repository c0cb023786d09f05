"""The same cache with another codec: what a capture of the same states with that codec would have written, file for file."""

from pathlib import Path
from typing import Literal

from pipeline.cache.commit import commit_shard, committed_shards, complete, remove_leftovers
from pipeline.cache.layout import FINAL, LOSSY, inside, target_folder
from pipeline.cache.manifest import PROGRESS_FIELDS, Manifest, create_or_compare
from pipeline.cache.reader import Cache
from pipeline.cache.subset import link_file
from pipeline.cache.writer import ShardWriter
from pipeline.errors import CacheError
from pipeline.runtime.files import FolderLock

Codec = Literal["raw", "lossless", "int8", "int4"]


def recode(source: Path, out: Path, codec: Codec) -> Manifest:
    """Write the complete cache `source` into `out` with `codec`; a run that was interrupted goes on.

    Raises `CacheError` when `source` has a lossy codec itself, `CacheMismatchError` when `out` holds another cache.
    """
    if out.resolve() == source.resolve():
        raise CacheError(f"{out} is the cache to be packed otherwise; give another folder.")
    cache = Cache.open(source, final=False)
    manifest = recoded_manifest(cache, codec)
    out.mkdir(parents=True, exist_ok=True)
    with FolderLock(out):
        create_or_compare(out, manifest)
        remove_leftovers(out)
        done = committed_shards(out)
        for shard in set(range(manifest.num_shards)) - done:
            first, end = (int(cache.index.first_of_shard[shard + k]) for k in (0, 1))
            samples = []
            with ShardWriter(out, shard, manifest, manifest.arrays, attempt="recode") as writer:
                for number in range(first, end):
                    sample = cache.read(number, manifest.layer_ids, FINAL in manifest.arrays)
                    samples.append(sample.tokens)
                    writer.append(sample)
                records = writer.close()
            commit_shard(out, shard, samples, records, attempt="recode")
        link_target(cache, out)
        return complete(out)


def recoded_manifest(cache: Cache, codec: Codec) -> Manifest:
    """The manifest, still open, of the same cache with `codec`; `CacheError` unless all bits are there to be packed."""
    found = cache.manifest
    if found.codec in LOSSY:
        raise CacheError(f"{cache.path} has the codec {found.codec}: it would be rounded a second time. Name a lossless or raw cache.")
    fixed = {name: getattr(found, name) for name in Manifest.model_fields if name not in PROGRESS_FIELDS}
    return Manifest(**{**fixed, "codec": codec})


def link_target(cache: Cache, out: Path) -> None:
    """The target's files of `cache` in the cache `out` as well."""
    for name in cache.manifest.target_files or {}:
        link_file(inside(cache.path, target_folder(cache.path) / name), inside(out, target_folder(out) / name))
