"""The end of a run: the journal as one file of answers in the order of the input, the rows that failed, and the account.

OUTPUT/answers.jsonl    rows that are done or cut, as the corpus reads them
OUTPUT/failed.jsonl     the others: id, source, row, reason, detail, and whether the next run tries them again
OUTPUT/report.json      counts; rows in = done + cut + failed. Written last
"""

import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

from pipeline.config.load import to_yaml
from pipeline.config.schema import Config
from pipeline.errors import RegenerateError
from pipeline.regenerate.journal import Ended, Ledger
from pipeline.runtime.files import atomic_file, write_json
from pipeline.runtime.provenance import provenance

log = logging.getLogger(__name__)

ANSWERS, FAILED, REPORT, PROVENANCE = "answers.jsonl", "failed.jsonl", "report.json", "provenance.json"


def assemble(output: Path, num_rows: int) -> dict[str, Any]:
    """Write the three files from the journal and return the report; each file is there whole or not at all.

    Raises `RegenerateError` when a row has no end, or when none was answered.
    """
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    example = ""
    with atomic_file(output / ANSWERS) as answers, atomic_file(output / FAILED) as failed:
        for ended in Ledger(output).read(num_rows):
            counts[ended.state] += 1
            counts["tokens"] += ended.num_tokens
            counts["shortened"] += ended.shortened
            counts["inexact"] += ended.exact is False
            counts["again"] += ended.again
            if ended.state == "failed":
                reasons[ended.reason or "unknown"] += 1
                example = example or f"{ended.row['source']} row {ended.row['row']}: {ended.detail or ended.reason}"
            (failed if ended.state == "failed" else answers).write(_line(ended))
    report = {
        "rows": num_rows,
        **{state: counts[state] for state in ("done", "cut", "failed")},
        "failed_by_reason": dict(sorted(reasons.items())),
        "failed_tried_again_by_the_next_run": counts["again"],
        "chats_shortened": counts["shortened"],
        "chats_rendered_otherwise": counts["inexact"],
        "tokens": counts["tokens"],
    }
    write_json(output / REPORT, report)
    _tell(output, report, example)
    return report


def keep_provenance(config: Config, output: Path) -> None:
    """What ran last; no part of the settings."""
    write_json(output / PROVENANCE, provenance(to_yaml(config)))


def _line(ended: Ended) -> bytes:
    row = ended.row
    if ended.state == "failed":
        row = {**row, "reason": ended.reason, "detail": ended.detail or "", "again": ended.again}
    return json.dumps(row, ensure_ascii=False).encode() + b"\n"


def _tell(output: Path, report: dict[str, Any], example: str) -> None:
    log.info(
        "%d rows: %d done, %d cut at the token limit, %d failed; %d tokens; in %s",
        *(report[name] for name in ("rows", "done", "cut", "failed", "tokens")),
        output / ANSWERS,
    )
    if report["failed"]:
        log.warning("%d rows failed: %s; listed in %s", report["failed"], report["failed_by_reason"], output / FAILED)
    if report["failed_tried_again_by_the_next_run"]:
        log.warning("the same command tries %d of them again", report["failed_tried_again_by_the_next_run"])
    if otherwise := report["chats_rendered_otherwise"]:
        log.info(
            "the chat template renders %d chats as other tokens than the target wrote (text that is tokenised in another way, thinking or "
            "special tokens that it puts otherwise): a draft learns the rendered ones",
            otherwise,
        )
    if not report["rows"]:
        raise RegenerateError("the corpus holds no row, so there was nothing to answer. Check the paths in data.train_ds.input_cfg.")
    if report["rows"] == report["failed"]:
        raise RegenerateError(
            f"none of {report['rows']} rows was answered: {report['failed_by_reason']}, such as {example}. All are in {output / FAILED}."
        )
