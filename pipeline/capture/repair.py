"""Damaged parts of a cache set aside, so that capture makes them again, and them alone."""

import logging
from pathlib import Path

from pipeline.cache.commit import check_complete, discard_shard, reopen
from pipeline.cache.layout import INDEX, MANIFEST, inside, target_folder
from pipeline.cache.manifest import create_or_compare, read_manifest
from pipeline.cache.verify import verify_with_progress
from pipeline.capture.identity import expected_manifest
from pipeline.capture.run import capture
from pipeline.config.schema import Config
from pipeline.corpus.prepared import PreparedCorpus
from pipeline.errors import CacheCorruptError
from pipeline.runtime.ranks import Ranks
from pipeline.target.probe import PROBE_FILE

log = logging.getLogger(__name__)


def repair(config: Config, ranks: Ranks) -> None:
    """Look the cache `config.capture.path` through, every byte of it, and capture again what is faulty; every rank calls this.

    Raises `CacheMismatchError` when `config` is not what it was captured from, `CacheCorruptError` when the manifest is lost or altered:
    nothing then says what the shards are.
    """
    cache = Path(config.capture.path or ".").expanduser()
    before = read_manifest(cache).index_content_sha256 if ranks.is_main else None
    capture(config, ranks, set_aside)
    if ranks.is_main and before is not None:
        if read_manifest(cache).index_content_sha256 == before:
            log.info("the cache is what it was; its digest is the same")
        else:
            log.warning(
                "the digest is not the one of before: what was captured again was rounded or packed otherwise (another device, "
                "tensor-parallel size, batch or version)"
            )


def set_aside(config: Config, cache: Path, corpus: PreparedCorpus) -> None:
    """Remove faulty shards, index and target files of the cache, after comparing it with `config`; shards that are sound stay."""
    found = create_or_compare(cache, expected_manifest(config, cache, corpus))
    if found.state == "remasking":
        check_complete(cache, found)
    faults = verify_with_progress(cache, full=True)
    for fault in faults:
        log.warning("faulty: %s", fault)
    if any(fault.file == MANIFEST for fault in faults):
        raise CacheCorruptError(
            f"{cache}: {next(fault for fault in faults if fault.file == MANIFEST)}. Which of them are wrong cannot be told without "
            f"{INDEX}; restore it from a copy, or capture into another folder."
        )
    bad = sorted({fault.shard for fault in faults if fault.shard is not None})
    bundle = any(fault.file.startswith("target/") for fault in faults)
    if found.state == "complete" and (bad or bundle):
        reopen(cache, found, keep_target=not bundle)
    for shard in bad:
        discard_shard(cache, shard)
    if any(fault.file == INDEX for fault in faults):
        inside(cache, cache / INDEX).unlink(missing_ok=True)
    if bundle:
        inside(cache, target_folder(cache) / PROBE_FILE).unlink(missing_ok=True)  # without it, capture writes all of the folder
    log.info("%d faults; to be captured again: %s", len(faults), f"shards {bad}" if bad else "no shard")
