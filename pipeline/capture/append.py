"""More into a complete cache: rows that the corpus has got, layers, the final hidden state. What is there is not touched.

Rank 0 decides what the larger cache shall be and compares all that must stay; then the target is loaded and compared with the
probe; only then the larger manifest takes the place of the old one, as open, and capture fills what is missing. Whatever
happens after that, the same command, or capture with the same configuration, goes on.
"""

import logging
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.cache.commit import check_complete
from pipeline.cache.manifest import ABSENT, Difference, Manifest, mismatch, read_manifest
from pipeline.cache.reader import Cache
from pipeline.cache.remask import check_same_tokens
from pipeline.cache.verify import verify
from pipeline.capture.identity import manifest_of, shards_of
from pipeline.capture.run import capture
from pipeline.config.schema import Config
from pipeline.corpus.plan import stored_order
from pipeline.corpus.prepared import PreparedCorpus
from pipeline.errors import CacheCorruptError, CacheError, CacheMismatchError
from pipeline.runtime.ranks import Ranks
from pipeline.target.probe import PROBE_FILE

log = logging.getLogger(__name__)

Segments = tuple[tuple[tuple[int, int], ...], ...]

MAY_GROW = {"states_identity.token_ids", "samples_identity.loss_masks", "samples_identity.splits", "samples_identity.validation_sets"}
"""Fields of the identities that change when rows are added, and by nothing else once the rules are the same."""


def append(config: Config, ranks: Ranks) -> None:
    """Make the cache `config.capture.path` the one that `config` asks for, by adding to it; every rank calls this.

    The corpus may have more rows, as long as those that are captured keep ids, tokens, masks, splits and order; `layer_ids` may name
    more layers, `capture.final` may be set. Raises `CacheMismatchError` for anything else.
    """
    capture(config, ranks, enlarge)


def enlarge(config: Config, cache: Path, corpus: PreparedCorpus) -> Manifest | None:
    """The manifest of the larger cache; None when an append is to be resumed, or when there is nothing to add."""
    found = read_manifest(cache)
    if found.state == "open":
        return None  # capture compares: it is this append, interrupted, or an error that names the fields
    check_complete(cache, found)
    asked = manifest_of(config, corpus, found.num_shards)
    _check_only_more(cache, found, asked)
    if faults := verify(cache):
        raise CacheCorruptError(f"{cache} has {len(faults)} fault(s), the first: {faults[0]}. Run repair before anything is added.")
    segments = found.segments
    if asked.states_identity["token_ids"] != found.states_identity["token_ids"]:
        segments = _segments(cache, found, corpus)
    shards = shards_of(config, corpus, segments)
    for shard in range(found.num_shards):
        rows = np.asarray(shards[shard])
        order = stored_order(corpus.num_tokens[rows])
        check_same_tokens(cache, shard, [corpus.sample(int(rows[i])) for i in order], masks=True)
    kept = {name: record for name, record in (found.target_files or {}).items() if name != PROBE_FILE}  # the probe gets the new layers
    larger = asked.model_copy(update={"num_shards": len(shards), "segments": segments, "target_files": kept})
    new = [name for name in larger.arrays if name not in found.arrays]
    if not new and len(shards) == found.num_shards:
        log.info("%s holds all that is asked for; nothing to add", cache)
        return None
    log.info("adding to %s: %d shards of new rows; to each shard: %s", cache, len(shards) - found.num_shards, ", ".join(new) or "nothing")
    return larger


def _check_only_more(cache: Path, found: Manifest, asked: Manifest) -> None:
    """Raise `CacheMismatchError` for a difference that no append can bring about."""
    if lost := [name for name in found.arrays if name not in asked.arrays]:
        wanted = list(dict.fromkeys((*found.layer_ids, *asked.layer_ids)))
        final = " capture.final=true" if found.final else ""
        raise CacheMismatchError(
            f"{cache} holds {list(found.arrays)}; the configuration leaves out {lost}, and an append takes nothing away. Give "
            f"model.target.layer_ids={wanted}{final}, or choose layers into another folder with subset."
        )
    left, right = found.model_dump(mode="json"), asked.model_dump(mode="json")
    fixed = ("states_identity", "samples_identity", "hidden_size", "dtype", "codec")
    different = [difference for name in fixed for difference in Difference.between(name, left[name], right[name])]
    different = [difference for difference in different if difference.field not in MAY_GROW or difference.cache == ABSENT]
    if different:
        raise CacheMismatchError(mismatch(cache, different))


def _segments(cache: Path, found: Manifest, corpus: PreparedCorpus) -> Segments:
    """The larger corpus, divided: what each capture brought so far, where it is now, and what is new."""
    index = Cache.open(cache).index
    ids = corpus.sample_ids()
    order = np.argsort(ids, kind="stable")
    places = np.minimum(np.searchsorted(ids, index.sample_id, sorter=order), len(ids) - 1)
    positions: NDArray[np.int64] = order[places]
    gone = np.flatnonzero(ids[positions] != index.sample_id)
    if len(gone):
        raise CacheMismatchError(
            f"{len(gone)} samples of {cache} are not in this configuration's corpus (the first: {index.sample_id[gone[0]]}). An append "
            "needs all of them, under the same ids: rows without an id of their own are named by their file's place among the sources and "
            "their line, so new files must come last and new lines at the end."
        )
    counts = [sum(end - start for start, end in ranges) for ranges in found.segments or (((0, len(index)),),)]
    if sum(counts) != len(index):
        raise CacheError(f"{cache}: its segments divide {sum(counts)} samples, the index has {len(index)}")
    members = [np.sort(part) for part in np.split(positions, np.cumsum(counts)[:-1])]
    new = np.setdiff1d(np.arange(len(ids)), positions)
    return tuple(_ranges(part) for part in (*members, new) if len(part))


def _ranges(numbers: NDArray[np.int64]) -> tuple[tuple[int, int], ...]:
    """Runs [start, end) of ascending numbers."""
    breaks = np.flatnonzero(np.diff(numbers) != 1)
    starts, ends = numbers[np.r_[0, breaks + 1]], numbers[np.r_[breaks, len(numbers) - 1]] + 1
    return tuple(zip(starts.tolist(), ends.tolist(), strict=True))
