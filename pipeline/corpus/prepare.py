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

import json
import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from pipeline.config.schema import Config, DataSection
from pipeline.corpus.assemble import account_for, check_splits, check_usable, part_is_whole, write_samples
from pipeline.corpus.chat import MASK_RULES, load_tokenizer, read_template
from pipeline.corpus.duplicates import choose
from pipeline.corpus.parts import start_worker, work, write_part
from pipeline.corpus.prepared import DESCRIPTION_FILE, DROPPED_FILE, PreparedCorpus
from pipeline.corpus.samples import Reader, Rules
from pipeline.corpus.schema import FORMAT_VERSION
from pipeline.corpus.select import TRAIN
from pipeline.corpus.sources import PART_BYTES, PART_ROWS, Part, Source, divide_all, find_sources
from pipeline.errors import CorpusError
from pipeline.runtime.files import FolderLock, write_json
from pipeline.runtime.logs import Progress

log = logging.getLogger(__name__)

LATER_RULES: dict[str, Any] = {
    name: DataSection.model_fields[name].default
    for name in ("too_long", "drop_duplicates", "loss_on", "one_sample_per_turn", "mask_reasoning")
}
"""Fields of `data`, with their defaults, that are part of the identity of samples only where they are not at their default: caches were
written before there were any."""


@dataclass(frozen=True, slots=True)
class Job:
    """All that decides what a prepared corpus holds, and where it lies. `states_fields` still lack the digest of the ids,
    `samples_fields` that of masks and splits: those are known at the end."""

    folder: Path
    fingerprint: str
    reader: Reader
    template_name: str
    drop_duplicates: bool
    sources: list[Source]
    parts: list[Part]
    states_fields: dict[str, Any]
    samples_fields: dict[str, Any]


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


def plan(config: Config) -> Job:
    """Find the sources, divide them into parts, try the template and take the fingerprint. Writes nothing."""
    data, target = config.data, config.model.target
    tokenizer = load_tokenizer(target)
    template = read_template(tokenizer, target.chat_template_kwargs)
    if not template.shape.end and not template.marked:
        log.warning("the chat template ends an answer with no special token of this tokenizer, so no end token is supervised")
    sets = {TRAIN: data.train_ds.input_cfg, **{name: ds.input_cfg for name, ds in data.validation_ds.datasets.items()}}
    sources = find_sources(sets)
    parts = list(divide_all(sources))
    rules = rules_of(data)
    states_fields = {
        **tokenizer_fields(tokenizer),
        "chat_template_kwargs": dict(target.chat_template_kwargs),
        "max_tokens": rules.max_tokens,
    }
    samples_fields = {
        "mask_rules": MASK_RULES,
        "min_supervised_tokens": rules.min_supervised,
        "heldout_fraction": rules.heldout_fraction,
        "validation_sets": list(data.validation_ds.datasets),
        **_other_rules(data),
    }
    digests: dict[int, list[str]] = {id(source): [] for source in sources}
    for part in parts:
        digests[id(part.source)].append(part.digest)
    contents = [[source.split, digests[id(source)], *([source.reading] if source.reading else [])] for source in sources]
    division = [FORMAT_VERSION, PART_ROWS, PART_BYTES]
    fingerprint = _digest(json.dumps([division, states_fields, samples_fields, contents], sort_keys=True))
    return Job(
        folder=Path(data.prepared_dir).expanduser() / fingerprint[:16],
        fingerprint=fingerprint,
        reader=Reader(template, rules),
        template_name=target.chat_template or f"of the tokenizer in {target.path}",
        drop_duplicates=data.drop_duplicates,
        sources=sources,
        parts=parts,
        states_fields=states_fields,
        samples_fields=samples_fields,
    )


def rules_of(data: DataSection) -> Rules:
    """The rules that `data` of a configuration sets."""
    return Rules(
        max_tokens=data.max_tokens,
        min_supervised=data.min_supervised_tokens,
        heldout_fraction=data.validation_ds.fraction,
        too_long=data.too_long,
        loss_on=data.loss_on,
        one_sample_per_turn=data.one_sample_per_turn,
        mask_reasoning=data.mask_reasoning,
    )


def _other_rules(data: DataSection) -> dict[str, Any]:
    return {name: getattr(data, name) for name, default in LATER_RULES.items() if getattr(data, name) != default}


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
        "states_fields": {**job.states_fields, "token_ids": _digest(digests["lengths"] + digests["input_ids"])},
        "samples_fields": {
            **job.samples_fields,
            "loss_masks": _digest(digests["spans_of_samples"] + digests["spans"]),
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
            {"name": source.name, "path": str(source.path), "split": source.split, "rows": rows[id(source)], **source.reading}
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
    if counts["dropped"]:
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(counts["dropped"].items(), key=lambda item: -item[1]))
        log.warning("%d rows left out (%s), listed in %s", counts["rows"] - counts["kept"], reasons, corpus.path / DROPPED_FILE)


def _places(job: Job) -> list[tuple[Part, Path]]:
    return [(part, job.folder / "parts" / f"{i:05}.arrow") for i, part in enumerate(job.parts)]


def tokenizer_fields(tokenizer: Any) -> dict[str, str]:
    """Digests of tokenizer and chat template. Of what the tokenizer does: saved again in other files it is the same one."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # every call sets both anew, so neither is part of what it is
    backend.no_padding()
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return {
        "tokenizer": _digest(backend.to_str() + json.dumps(special, sort_keys=True)),
        "chat_template": _digest(tokenizer.get_chat_template()),
    }


def _digest(text: str) -> str:
    return sha256(text.encode()).hexdigest()


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CorpusError(
            f"the prepared corpus {folder} cannot be written: {error}. Check data.prepared_dir and the space left there."
        ) from error
