"""Stage one: a corpus and a frozen target in, a cache out.

    rank 0                                        the other ranks
    lock the cache, tokenise, plan, compare  ──►  read the plan
    load the target                               load the target
    create the cache: bundle, probe          ──►  compare the probe
    capture shards 0, 0 + dp, …                   capture theirs
    wait for all, complete the cache         ◄──  tell that they are done

Where a rank waits for another it waits for a file (`launch.py`). With `capture.parts` several launches do this beside one another, each
for its share of the shards; they meet in the cache's files alone, and the one that commits the last missing shard completes it.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TypeAlias

import numpy as np
from safetensors import SafetensorError

from pipeline.cache.bundle import save_bundle
from pipeline.cache.commit import check_complete, complete, missing_arrays, remove_leftovers, reopen
from pipeline.cache.layout import CONFIG_COPY, MANIFEST, target_folder, tokenizer_folder
from pipeline.cache.manifest import Manifest, create_or_compare, read_marker
from pipeline.capture.identity import expected_manifest, shards_of
from pipeline.capture.locks import capture_lock
from pipeline.capture.shards import Work, capture_shards
from pipeline.capture.sizes import free_bytes
from pipeline.capture.space import check_space, packed_share, raw_missing_bytes, with_need
from pipeline.config.load import to_yaml
from pipeline.config.schema import Config
from pipeline.corpus.chat import load_tokenizer
from pipeline.corpus.plan import shards_of_part
from pipeline.corpus.prepare import prepare
from pipeline.corpus.prepared import PreparedCorpus
from pipeline.errors import CacheError, ConfigError
from pipeline.runtime.files import FolderLock, atomic_file, atomic_folder, write_json
from pipeline.runtime.launch import Launch
from pipeline.runtime.logs import Progress
from pipeline.runtime.provenance import provenance
from pipeline.runtime.ranks import Ranks
from pipeline.target.forward import forward_hidden
from pipeline.target.head import bundle_of
from pipeline.target.load import Target, load_target
from pipeline.target.probe import PROBE_FILE, add_to_probe, check_padding, compare_probe, probe_states, save_probe

log = logging.getLogger(__name__)

Change: TypeAlias = Callable[[Config, Path, PreparedCorpus], Manifest | None]
"""What rank 0 does first, under the lock; a manifest that it returns takes the place of the cache's once the target has been compared."""


def capture(config: Config, ranks: Ranks, first: Change | None = None) -> None:
    """Capture the corpus of `config.data` into `config.capture.path`, or what is still missing there; every rank calls this.

    For `first` and what is raised see `planned`.
    """
    with planned(config, ranks, first) as (work, needs_target):
        if needs_target:
            _capture_pending(config, work)


@contextmanager
def planned(config: Config, ranks: Ranks, first: Change | None = None, *, may_end_early: bool = False) -> Iterator[tuple[Work, bool]]:
    """What a capture has around it: the plan, which every rank gets, with whether the target is needed for it; the lock, held as long as
    the block runs; and when the block ends, the cache is completed. `may_end_early`: it need not have captured everything.

    `first` is what rank 0 does to a cache before it looks for what is missing: setting damaged shards aside (`repair.py`), or
    deciding what it shall hold besides (`append.py`).
    Raises `CacheMismatchError` when the folder holds a cache of something else, `CacheLockedError` when another capture writes it.
    """
    if config.capture.path is None:
        raise ConfigError("capture.path is not set: give the folder of the cache to write.")
    if first is not None and config.capture.parts is not None:
        raise ConfigError(f"capture.parts is {config.capture.parts}: only a plain capture can be done in parts. Leave it out.")
    cache = Path(config.capture.path).expanduser()
    launch = Launch(cache, ranks)
    with launch.together():
        if ranks.is_main:
            with _disk_errors(cache, "the folder"):
                cache.mkdir(parents=True, exist_ok=True)
        with capture_lock(cache, *config.capture.part) if ranks.is_main else nullcontext():
            began = time.monotonic()
            if ranks.is_main:
                _plan(config, cache, launch, first)
            work, needs_target = _work(config, cache, launch, ranks)
            yield work, needs_target
            launch.tell(f"done-{ranks.rank}", True)
            if ranks.is_main:
                for rank in range(1, ranks.world_size):
                    launch.hear(f"done-{rank}", f"the shards of rank {rank}")
                _complete(config, work, time.monotonic() - began, may_end_early)
                launch.end()


@contextmanager
def _disk_errors(cache: Path, what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CacheError(f"{what} of {cache} cannot be written: {error}. Free disk space or mend capture.path, then run again.") from error


def _plan(config: Config, cache: Path, launch: Launch, first: Change | None) -> None:
    """Rank 0: prepare the corpus, take the identity, compare it with a cache that is there, and tell the others what to do."""
    corpus = prepare(config)
    larger = first(config, cache, corpus) if first else None
    manifest = larger or expected_manifest(config, cache, corpus)
    there = (cache / MANIFEST).exists()
    found = create_or_compare(cache, manifest) if there and not larger else None  # a refusal comes before the target is loaded
    if found is not None and found.state == "remasking":
        check_complete(cache, found)
    mine = shards_of_part(manifest.num_shards, *config.capture.part)
    remove_leftovers(cache, mine if config.capture.parts else None)
    missing = missing_arrays(cache, manifest)
    pending = {shard: missing[shard] for shard in mine if shard in missing}
    if found is not None and found.state == "complete" and pending:
        reopen(cache, found)
    if len(mine) > len(pending):
        of_part = f" of part {config.capture.parts}" if config.capture.parts else ""
        log.info("%d of %d shards%s are there already", len(mine) - len(pending), len(mine), of_part)
    _keep_provenance(config, cache, launch)
    launch.tell(
        "plan",
        {
            "prepared": str(corpus.path.absolute()),
            "manifest": manifest.model_dump(mode="json"),
            "pending": {str(shard): arrays for shard, arrays in pending.items()},
            "raw_missing": raw_missing_bytes(manifest, missing, _shard_tokens(config, corpus, manifest)),
            "larger": larger is not None,
            "needs_target": bool(pending) or not (target_folder(cache) / PROBE_FILE).exists(),
        },
    )


def _shard_tokens(config: Config, corpus: PreparedCorpus, manifest: Manifest) -> list[int]:
    return [int(corpus.num_tokens[np.asarray(rows)].sum()) for rows in shards_of(config, corpus, manifest.segments)]


def _keep_provenance(config: Config, cache: Path, launch: Launch) -> None:
    """What ran: one file a launch, in the cache's folder and no part of its identity."""
    folder = cache / "provenance"
    folder.mkdir(exist_ok=True)
    write_json(folder / f"{time.strftime('%Y%m%dT%H%M%S')}-{launch.token}.json", provenance(to_yaml(config)))
    with atomic_file(cache / CONFIG_COPY) as file:
        file.write(to_yaml(config).encode())


def _work(config: Config, cache: Path, launch: Launch, ranks: Ranks) -> tuple[Work, bool]:
    """The plan as every rank reads it, and whether the target is needed to carry it out."""
    plan = launch.hear("plan", "the tokenised corpus and the plan of rank 0")
    corpus, manifest = PreparedCorpus.open(plan["prepared"]), Manifest.model_validate(plan["manifest"])
    work = Work(
        cache=cache,
        manifest=manifest,
        corpus=corpus,
        lengths=corpus.num_tokens,
        shards=shards_of(config, corpus, manifest.segments),
        pending={int(shard): tuple(arrays) for shard, arrays in plan["pending"].items()},
        larger=plan["larger"],
        batch_tokens=config.capture.batch_tokens,
        raw_missing=plan["raw_missing"],
        launch=launch,
        ranks=ranks,
    )
    return work, plan["needs_target"]


def open_target(config: Config, work: Work) -> Target:
    """Load the target, make sure that it is the right one, and that there is a cache for its states. Every rank must call it."""
    target = load_target(config.model.target, work.ranks, work.manifest.layer_ids, config.capture.final)
    _warn_of_long_samples(target, int(work.lengths.max()))
    check_padding(target)
    _create(config, work, target)
    return target


def _capture_pending(config: Config, work: Work) -> None:
    """All pending shards."""
    target = open_target(config, work)
    if work.pending:
        check_disk(work, target)
    label = "capturing" if work.ranks.dp_size == 1 else f"capturing (the first of {work.ranks.dp_size} groups)"
    capture_some(work, target, sorted(work.pending), label)


def capture_some(work: Work, target: Target, shards: Sequence[int], label: str) -> None:
    """This group's share of `shards`, which are pending. Every rank must call it with the same ones."""
    ranks = work.ranks
    mine = shards[ranks.dp_rank :: ranks.dp_size]
    with Progress(sum(work.num_tokens(shard) for shard in mine), "tokens", label, ranks.is_main) as progress:
        try:
            capture_shards(work, target, mine, progress)
        except CacheError as error:
            if (told := with_need(error, work.cache, work.raw_missing)) is error:
                raise
            raise told from error


def check_disk(work: Work, target: Target) -> None:
    """Stop all ranks before the first shard when the disk is too small. Only where the states would not fit unpacked is a batch tried."""
    launch, ranks = work.launch, work.ranks
    if ranks.is_main:
        launch.tell("tight", work.raw_missing > free_bytes(work.cache))
    if not launch.hear("tight", "a look at the disk"):
        return
    if ranks.dp_rank == 0:
        batches = work.batches(min(work.pending))
        captured = forward_hidden(target, batches[len(batches) // 2])
        if ranks.is_main:
            check_space(work.cache, work.raw_missing, packed_share(work.manifest, captured))
            launch.tell("fits", True)
    launch.hear("fits", "a look at the size of packed states")


def _create(config: Config, work: Work, target: Target) -> None:
    """Create the cache with what training needs of the target, or compare the live target with the one that it was captured from."""
    ranks, folder = work.ranks, target_folder(work.cache)
    live = probe_states(target)
    # Gathering is a collective of the first group; the others have nothing to add.
    bundle = bundle_of(target) if ranks.dp_rank == 0 else None
    if ranks.is_main and bundle is not None:
        alone = FolderLock(work.cache, ".lock-target", wait_for_it="another part's capture, which writes the target's bundle")
        with _disk_errors(work.cache, "manifest or target bundle"), alone:
            if work.larger:
                compare_probe(folder, live, target.dtype)
                reopen(work.cache, work.manifest)
            else:
                create_or_compare(work.cache, work.manifest)
            if not (folder / PROBE_FILE).exists():  # written last: with it, all of the folder is there
                save_bundle(folder, bundle)
                shutil.rmtree(tokenizer_folder(work.cache), ignore_errors=True)
                with atomic_folder(tokenizer_folder(work.cache)) as fresh:
                    load_tokenizer(config.model.target).save_pretrained(fresh)
                save_probe(folder, live)
            add_to_probe(folder, live)
        work.launch.tell("created", True)
    work.launch.hear("created", "the cache and the target's bundle")
    compare_probe(folder, live, target.dtype)


def _warn_of_long_samples(target: Target, longest: int) -> None:
    if target.max_positions is not None and longest > target.max_positions:
        log.warning(
            "the longest sample has %d tokens and the target's config names %d positions: unless its rotary embedding is scaled, states "
            "beyond are poor; consider data.max_tokens=%d",
            longest,
            target.max_positions,
            target.max_positions,
        )


def _complete(config: Config, work: Work, seconds: float, may_end_early: bool) -> None:
    missing = len(missing_arrays(work.cache, work.manifest))
    if missing and may_end_early:
        log.info(
            "%d of %d shards of %s are not captured yet; the same command, or stages/capture.py, goes on from there",
            missing,
            work.manifest.num_shards,
            work.cache,
        )
        return
    if missing and config.capture.parts:
        log.info(
            "part %s of %s is captured; %d of %d shards are to come from other parts, and whoever commits the last completes the cache",
            config.capture.parts,
            work.cache,
            missing,
            work.manifest.num_shards,
        )
        return
    with _disk_errors(work.cache, "the index"):
        done = complete(work.cache)
    _summarise(work, done, seconds)


def _summarise(work: Work, done: Manifest, seconds: float) -> None:
    assert done.totals is not None
    files = [read_marker(work.cache, number)[0].files for number in range(done.num_shards)]
    stored = sum(record.size for shard in files for path, record in shard.items() if path.startswith("hidden.zarr/"))
    raw = done.totals.tokens * sum(work.manifest.spec(name).width * work.manifest.spec(name).item_bytes for name in work.manifest.arrays)
    captured = sum(work.num_tokens(shard) for shard in work.pending)
    log.info(
        "cache complete: %d samples, %d tokens, %d shards; hidden states %.3f GB, %.3f of raw, %.0f bytes a token; in %s",
        done.totals.samples,
        done.totals.tokens,
        done.num_shards,
        stored / 1e9,
        stored / raw,
        stored / done.totals.tokens,
        work.cache,
    )
    if captured:
        log.info("this run: %d tokens in %.1f s, loading included: %.0f tokens/s", captured, seconds, captured / seconds)
