"""New mask rules or another split for a cache that stays: the corpus is prepared anew, the target is not needed."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from pipeline.cache.commit import check_complete, complete, reopen
from pipeline.cache.manifest import Manifest, check_identity, read_manifest
from pipeline.cache.remask import replace_samples
from pipeline.cache.verify import verify
from pipeline.capture.identity import shards_of
from pipeline.config.schema import Config
from pipeline.corpus.plan import stored_order
from pipeline.corpus.prepare import prepare
from pipeline.errors import CacheCorruptError, CacheMismatchError, ConfigError
from pipeline.runtime.files import FolderLock
from pipeline.runtime.logs import Progress

log = logging.getLogger(__name__)


def remask(config: Config) -> Manifest:
    """Give the samples of the cache `config.capture.path` the loss masks and splits that `config.data` says; a killed run is taken up.

    Only the tokenizer of `model.target` is read; that in the cache's own target/tokenizer will do. Raises `CacheMismatchError` when the
    corpus or its tokens are not those of the cache: rules that drop or add samples need a subset, an append or a new capture.
    """
    if config.capture.path is None:
        raise ConfigError("capture.path is not set: give the folder of the cache.")
    cache = Path(config.capture.path).expanduser()
    read_manifest(cache)
    corpus = prepare(config)
    with FolderLock(cache):
        found = read_manifest(cache)
        if found.state == "open":
            check_complete(cache, found)
        try:
            check_identity(cache, found, {**corpus.states_fields, "shard_tokens": config.capture.shard_tokens}, {})
        except CacheMismatchError as error:
            raise CacheMismatchError(
                f"{error}\nA remask keeps the samples that are there, in their order; only masks and splits may be others."
            ) from error
        if found.state == "complete" and found.samples_identity == corpus.samples_fields:
            log.info("%s has these masks and splits already", cache)
            return found
        if found.state == "complete" and (faults := verify(cache)):
            raise CacheCorruptError(f"{cache} has {len(faults)} fault(s), the first: {faults[0]}. Run repair before masks are changed.")
        shards = shards_of(config, corpus, found.segments)

        def rewrite(shard: int) -> None:
            rows = np.asarray(shards[shard])
            replace_samples(cache, shard, [corpus.sample(int(rows[i])) for i in stored_order(corpus.num_tokens[rows])])

        reopen(cache, found.model_copy(update={"samples_identity": corpus.samples_fields, "corpus": corpus.counts}), state="remasking")
        with ThreadPoolExecutor(os.cpu_count()) as pool, Progress(len(shards), "shards", "remasking", enabled=True) as progress:
            for _ in pool.map(rewrite, range(len(shards))):
                progress.advance(1)
        return complete(cache)
