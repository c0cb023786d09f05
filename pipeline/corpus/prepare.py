"""Chats to a prepared corpus: tokenised once, on all cores, under a fingerprint of their content.

    PREPARED_DIR/FINGERPRINT[:16]/
        parts/00000.arrow …   while it is made: one file a part, each there whole or not at all
        samples.arrow         Arrow IPC file, memory-mapped by readers (`schema.SAMPLES`)
        dropped.jsonl         one line a row that gave no sample: source, row, reason, detail
        prepared.json         fingerprint, its fields, counts; written last

A run that was killed, at any moment, is taken up by the next: parts that are there are not tokenised again, and the files
come out the same to the byte. The fingerprint is of the bytes of all sources in order, the tokenizer, the template and its
arguments, and the rules; never of paths, times or the number of processes.
"""

import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

from pipeline.config.schema import Config
from pipeline.corpus.assemble import account_for, check_splits, check_usable, part_is_whole, write_samples
from pipeline.corpus.duplicates import DUPLICATE, choose
from pipeline.corpus.job import LATER_RULES, Job, digest_of, plan, tokenizer_fields
from pipeline.corpus.parts import start_worker, work, write_part
from pipeline.corpus.prepared import DESCRIPTION_FILE, DROPPED_FILE, PreparedCorpus
from pipeline.corpus.schema import FORMAT_VERSION
from pipeline.corpus.sources import Part, as_text
from pipeline.errors import CorpusError
from pipeline.runtime.files import FolderLock, write_json
from pipeline.runtime.logs import Progress

__all__ = ["LATER_RULES", "Job", "open_prepared", "plan", "prepare", "prepared_folder", "tokenizer_fields"]

log = logging.getLogger(__name__)


def prepare(config: Config) -> PreparedCorpus:
    """Tokenise the corpus that `config.data` names, or open it where that has been done; resumes what was interrupted.

    While another process prepares the same corpus this one waits, and then opens what that one made, or goes on where it died.
    Raises `CorpusError` for sources that cannot be read or give no sample, `TemplateError` for a chat template whose turns cannot
    be located.
    """
    job = plan(config)
    with _disk_errors(job.folder):
        job.folder.mkdir(parents=True, exist_ok=True)
        with FolderLock(job.folder, wait_for_it="another process that tokenises this corpus"):
            if not (job.folder / DESCRIPTION_FILE).is_file():
                _tokenise(job, config.data.num_proc or len(os.sched_getaffinity(0)))
                _finish(job)
            shutil.rmtree(job.folder / "parts", ignore_errors=True)
    corpus = _open(job)
    _report(corpus)
    return corpus


def open_prepared(config: Config) -> PreparedCorpus | None:
    """The prepared corpus of `config`, or None while there is none. Reads all sources once, for their digest."""
    job = plan(config)
    return _open(job) if (job.folder / DESCRIPTION_FILE).is_file() else None


def prepared_folder(config: Config) -> Path:
    """Where `prepare(config)` puts the corpus; it is complete when `prepared.json` is in it."""
    return plan(config).folder


def _tokenise(job: Job, num_proc: int) -> None:
    """Write every part that is not there yet."""
    (job.folder / "parts").mkdir(exist_ok=True)
    for left_over in [*job.folder.glob(".*.tmp"), *job.folder.glob("parts/.*.tmp")]:
        left_over.unlink()
    waiting = [(part, path) for part, path in _places(job) if not part_is_whole(path, part)]
    rows = sum(part.num_rows for part in job.parts)
    done = rows - sum(part.num_rows for part, _ in waiting)
    if done:
        log.info("%d of %d rows were tokenised by an earlier run", done, rows)
    with Progress(rows, "rows", "tokenising", enabled=True, done=done) as progress:
        for num_rows in _written(job, waiting, min(num_proc, len(waiting))):
            progress.advance(num_rows)


def _written(job: Job, waiting: Sequence[tuple[Part, Path]], num_proc: int) -> Iterator[int]:
    """Numbers of rows of parts, as they get done."""
    if num_proc <= 1:
        for part, path in waiting:
            write_part(job.reader, part, path)
            yield part.num_rows
        return
    # Spawned, not forked: the parent may hold threads of torch or of the tokenizer. The executor's `with` would wait for parts in progress.
    pool = ProcessPoolExecutor(num_proc, get_context("spawn"), initializer=start_worker, initargs=(job.reader,))
    try:
        for future in as_completed([pool.submit(work, part, path) for part, path in waiting]):
            yield future.result()
    except BrokenProcessPool as error:
        raise CorpusError(
            f"a process that tokenises was killed or could not start, expected {num_proc} to run. If memory ran out, lower data.num_proc. "
            f"Run again: the parts that are done are kept."
        ) from error
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _finish(job: Job) -> None:
    """Parts to the files that readers see."""
    places = _places(job)
    choice = choose(places, job.drop_duplicates)
    totals = account_for(places, choice, job.folder)
    check_usable(totals, job.template_name, job.folder)
    written = write_samples(places, choice, job.folder)
    check_splits(written["by_split"], list(dict.fromkeys(source.split for source in job.sources)), job.folder)
    digests, by_split = written["digests"], written["by_split"]
    rows = Counter[int]()
    for part in job.parts:
        rows[id(part.source)] += part.num_rows
    description = {
        "format_version": FORMAT_VERSION,
        "fingerprint": job.fingerprint,
        "states_fields": {**job.states_fields, "token_ids": digest_of(digests["lengths"] + digests["input_ids"])},
        "samples_fields": {
            **job.samples_fields,
            "loss_masks": digest_of(digests["spans_of_samples"] + digests["spans"]),
            "splits": digests["splits"],
        },
        "samples_bytes": written["bytes"],
        "counts": {
            **totals.counts(),
            "duplicates": len(choice.repeats),
            "also_in_validation": choice.leaked,
            "tokens": sum(sums["tokens"] for sums in by_split.values()),
            "supervised": sum(sums["supervised"] for sums in by_split.values()),
            "by_split": by_split,
        },
        "sources": [
            {"name": source.name, "path": as_text(source.path), "split": source.split, "rows": rows[id(source)], **source.reading}
            for source in job.sources
        ],
    }
    write_json(job.folder / DESCRIPTION_FILE, description)


def _open(job: Job) -> PreparedCorpus:
    corpus = PreparedCorpus.open(job.folder)
    if corpus.fingerprint != job.fingerprint:
        raise CorpusError(
            f"{job.folder} holds a corpus of fingerprint {corpus.fingerprint}, expected {job.fingerprint}. Remove it and run again."
        )
    return corpus


def _report(corpus: PreparedCorpus) -> None:
    counts = corpus.counts
    log.info(
        "prepared corpus %s: %d samples from %d rows, %d tokens, %d supervised; %d cut to max_tokens, %d supervised on the last turn only",
        corpus.path,
        counts["kept"],
        counts["rows"],
        counts["tokens"],
        counts["supervised"],
        counts["truncated"],
        counts["last_turn_only"],
    )
    if counts["after_prompt"]:
        log.info(
            "%d last answers are read after the generation prompt, which opens a think block that the template does not show in a chat; "
            "`stages/corpus.py preview` shows how",
            counts["after_prompt"],
        )
    if counts["duplicates"] and DUPLICATE not in counts["dropped"] | counts["left_out"]:
        log.warning(
            "%d samples have the same tokens as another one; %d of them are for training and in a validation set too. "
            "data.drop_duplicates=true leaves them out",
            counts["duplicates"],
            counts["also_in_validation"],
        )
    if counts["dropped"] or counts["left_out"]:
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(counts["dropped"].items(), key=lambda item: -item[1]))
        pieces = f"; and {sum(counts['left_out'].values())} samples of other rows" if counts["left_out"] else ""
        log.warning(
            "%d rows left out (%s)%s, listed in %s", counts["rows"] - counts["kept"], reasons or "none", pieces, corpus.path / DROPPED_FILE
        )


def _places(job: Job) -> list[tuple[Part, Path]]:
    return [(part, job.folder / "parts" / f"{i:05}.arrow") for i, part in enumerate(job.parts)]


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CorpusError(
            f"the prepared corpus {folder} cannot be written: {error}. Check data.prepared_dir and the space left there."
        ) from error
