"""Killed at random moments and run again, over and over: every row ends once, and the answers are those of a run that nobody disturbed.

KILLS=20 python -m pytest tests/stages/test_regenerate_kills.py --basetemp /tmp/kills
"""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import to_yaml
from pipeline.config.schema import Config
from pipeline.regenerate.local import regenerate_locally
from tests.support.faults import FaultServer, Reply, echo
from tests.support.forked_ranks import ForkedRanks, alive, kill
from tests.support.serve import transformers_serve
from tests.support.tiny import write_chats, write_jsonl
from tests.unit.regenerate.conftest import answers_of, chat, greedy_answers, read_jsonl, read_report, regenerate_config
from tests.unit.target.conftest import lone_rank

KILLS = int(os.environ.get("KILLS", "10"))
BAD_ROWS = 7


def _write_rows(folder: Path, rows: int) -> None:
    """Chats with a few rows between them that ask nothing."""
    write_chats(folder / "chats.jsonl", rows, seed=5)
    lines = (folder / "chats.jsonl").read_text().splitlines()
    for place in range(BAD_ROWS):
        lines.insert(place * rows // BAD_ROWS, "{broken")
    (folder / "chats.jsonl").write_text("\n".join(lines) + "\n")


def _journal_bytes(output: Path) -> int:
    return sum(path.stat().st_size for path in (output / "journal").glob("*.jsonl"))


def _kill_again_and_again(folder: Path, config: Config, world_sizes: tuple[int, ...], log: Path) -> int:
    """Run the stage and kill it after the journal has grown by some lines, `KILLS` times or until it is done first; then let it end.

    Returns the number of kills."""
    (folder / "config.yaml").write_text(to_yaml(config))
    output, rng, kills = Path(config.regenerate.output or ""), random.Random(3), 0
    with ForkedRanks(log) as ranks:
        while kills < KILLS:
            pids = ranks.start(world_sizes[kills % len(world_sizes)], str(folder / "config.yaml"), stage="regenerate")
            before, more = _journal_bytes(output), rng.choice((0, 1, 400, 3000))
            end = time.monotonic() + 120
            while _journal_bytes(output) < before + more and any(map(alive, pids)):
                assert time.monotonic() < end, log.read_text()
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.1 if more else 1.0))
            if not all(map(alive, pids)):  # a quick machine: it was done before
                break
            if len(pids) > 1 and rng.random() < 0.3:  # one rank alone; the others notice, and end
                kill([rng.choice(pids)])
                ranks.wait(pids, 60)
            kill(pids)
            kills += 1
        pids = ranks.start(world_sizes[0], str(folder / "config.yaml"), stage="regenerate")
        ranks.wait(pids, 300)
    return kills


def _check_account(folder: Path, config: Config, kills: int, rows: int) -> list[dict[str, Any]]:
    """Every row is in one of the two files, once, in order; returns the answers."""
    assert kills >= min(KILLS, 3)
    output, report = Path(config.regenerate.output or ""), read_report(folder)
    answers, failed = read_jsonl(output / "answers.jsonl"), read_jsonl(output / "failed.jsonl")
    assert [row["row"] for row in answers] == sorted({row["row"] for row in answers})
    assert sorted(row["row"] for row in answers + failed) == list(range(rows + BAD_ROWS))
    assert {row["reason"] for row in failed} == {"broken JSON"}
    assert len(failed) == report["failed"] == BAD_ROWS
    assert report["rows"] == report["done"] + report["cut"] + report["failed"] == rows + BAD_ROWS
    assert not list(output.rglob(".*.tmp"))
    return answers


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_local_run_killed_over_and_over_writes_the_same_bytes(answering_target: Path, tmp_path: Path) -> None:
    _write_rows(tmp_path, 50 * KILLS)
    config = regenerate_config(answering_target, tmp_path)
    whole = regenerate_config(answering_target, tmp_path, output=str(tmp_path / "whole"))
    regenerate_locally(whole, lone_rank())
    kills = _kill_again_and_again(tmp_path, config, (1, 2, 3), tmp_path / "ranks.log")
    _check_account(tmp_path, config, kills, 50 * KILLS)
    for name in ("answers.jsonl", "failed.jsonl", "report.json"):
        assert (tmp_path / "answers" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_run_by_transformers_serve_killed_over_and_over_answers_every_row_once(answering_target: Path, tmp_path: Path) -> None:
    _write_rows(tmp_path, 25 * KILLS)
    with transformers_serve(answering_target, tmp_path / "serve.log") as address:
        config = regenerate_config(answering_target, tmp_path, backend="server", servers=[address], concurrency=3)
        kills = _kill_again_and_again(tmp_path, config, (1,), tmp_path / "client.log")
    answers = _check_account(tmp_path, config, kills, 25 * KILLS)
    for row in answers[:: 2 * KILLS]:
        assert [text.strip() for text in answers_of(row)] == greedy_answers(answering_target, row)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", "server"])
def test_sigterm_ends_in_good_order_and_the_next_run_goes_on(answering_target: Path, tmp_path: Path, backend: str) -> None:
    rows = 400
    write_jsonl(tmp_path / "chats.jsonl", [chat(f"question {i}") for i in range(rows)])
    slow = FaultServer(lambda body, before: Reply(**{**vars(echo(body, before)), "seconds": 0.01}))
    with slow.running() as server, ForkedRanks(tmp_path / "ranks.log") as ranks:
        served = {"backend": "server", "servers": [server.address], "concurrency": 2} if backend == "server" else {"batch_size": 2}
        config = regenerate_config(answering_target, tmp_path, **served)
        (tmp_path / "config.yaml").write_text(to_yaml(config))
        [pid] = ranks.start(1, str(tmp_path / "config.yaml"), stage="regenerate")
        end = time.monotonic() + 120
        while _journal_bytes(tmp_path / "answers") == 0:
            assert time.monotonic() < end, (tmp_path / "ranks.log").read_text()
            time.sleep(0.01)
        os.kill(pid, signal.SIGTERM)
        ranks.wait([pid], 60)
        log = (tmp_path / "ranks.log").read_text()
        assert "stopped by SIGTERM" in log
        assert "Traceback" not in log
        assert not (tmp_path / "answers" / "report.json").exists()
        ranks.wait(ranks.start(1, str(tmp_path / "config.yaml"), stage="regenerate"), 300)
    answers = read_jsonl(tmp_path / "answers" / "answers.jsonl")
    assert [row["row"] for row in answers] == list(range(rows))
    if backend == "server":
        assert answers_of(answers[17]) == ["you said: question 17"]
        assert len(server.requests) <= rows + 2, "only what was in flight is asked twice"


@pytest.mark.slow
def test_two_ranks_write_what_one_writes(answering_target: Path, tmp_path: Path) -> None:
    _write_rows(tmp_path, 60)
    with ForkedRanks(tmp_path / "ranks.log") as ranks:
        for world in (1, 2):
            config = regenerate_config(answering_target, tmp_path, output=str(tmp_path / str(world)))
            (tmp_path / f"{world}.yaml").write_text(to_yaml(config))
            ranks.wait(ranks.start(world, str(tmp_path / f"{world}.yaml"), stage="regenerate"), 120)
    assert len(list((tmp_path / "2" / "journal").iterdir())) == 2
    assert min(path.stat().st_size for path in (tmp_path / "2" / "journal").iterdir()) > 0
    for name in ("answers.jsonl", "failed.jsonl", "report.json"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()
