"""Whether what is still to be captured fits on the disk: asked before the first shard, and again after each."""

import errno
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from pipeline.cache.layout import FINAL
from pipeline.cache.manifest import Manifest, ShardMarker
from pipeline.capture.sizes import free_bytes, measure_chunk, raw_hidden_bytes, stored_share
from pipeline.errors import CacheError
from pipeline.records import CapturedSample

log = logging.getLogger(__name__)


def raw_missing_bytes(manifest: Manifest, missing: Mapping[int, tuple[str, ...]], tokens: Sequence[int]) -> int:
    """Of the arrays that shards lack, before any codec; `tokens` by shard."""
    each = sum(raw_hidden_bytes(manifest, [tokens[shard]]) * len(names) / len(manifest.arrays) for shard, names in missing.items())
    return round(each)


def packed_share(manifest: Manifest, captured: Sequence[CapturedSample]) -> float:
    """What the cache's codec leaves of the states of some samples."""
    shares = []
    for name in manifest.arrays:
        states = [sample.final if name == FINAL else sample.hidden[int(name.removeprefix("layer_"))] for sample in captured]
        spec = manifest.spec(name)
        shares.append(measure_chunk(torch.cat([state.cpu() for state in states if state is not None]), spec).full / spec.chunk_bytes)
    return sum(shares) / len(shares)


def check_space(cache: Path, raw_bytes: int, share: float) -> None:
    """Raise `CacheError` unless `raw_bytes`, packed to `share`, fit on the disk of `cache`."""
    need, free = raw_bytes * share, free_bytes(cache)
    if need > free:
        raise CacheError(
            f"{cache}: what is to be captured takes about {need / 1e9:.3f} GB ({share:.2f} of {raw_bytes / 1e9:.3f} GB raw), and "
            f"{free / 1e9:.3f} GB are free there. Free disk space, name another folder in capture.path, or capture fewer layers or "
            "samples; stages/capture.py CONFIG --plan shows the sizes."
        )


class SpaceLeft:
    """Warns once when the rest of a running capture will not fit any more. `raw_bytes` are all that was missing at the start."""

    def __init__(self, cache: Path, manifest: Manifest, raw_bytes: int) -> None:
        self._cache, self._manifest, self._raw_bytes = cache, manifest, raw_bytes
        self._warned = False

    def look(self, marker: ShardMarker, done: float) -> None:
        """After `marker`'s shard was committed, when `done` (0 to 1) of this group's work is behind it; others are taken to be as far."""
        share = stored_share(self._manifest, [marker])
        need, free = self._raw_bytes * (1 - done) * (share or 1.0), free_bytes(self._cache)
        if need > free and not self._warned:
            self._warned = True
            log.warning(
                "the rest of the capture takes about %.3f GB, and %.3f GB are free in %s: it will stop before its end, and go on "
                "when there is space and it is run again",
                need / 1e9,
                free / 1e9,
                self._cache,
            )


def with_need(error: CacheError, cache: Path, raw_bytes: int) -> CacheError:
    """`error`, with what is needed where a full disk caused it."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)):
        cause = cause.__cause__
    if cause is None:
        return error
    return CacheError(
        f"{error} When this run began, {raw_bytes / 1e9:.3f} GB of states, before packing, were to come; in {cache} "
        f"{free_bytes(cache) / 1e9:.3f} GB are free now. Shards that are committed stay."
    )
