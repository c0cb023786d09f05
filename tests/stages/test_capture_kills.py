"""Killed at random moments, run again, over and over, on one, two and three ranks: nothing is lost, nothing is done twice.

The usual run has a few kills. All twenty, with the log of every rank in the test's folder:

    KILLS=20 python -m pytest tests/stages/test_capture_kills.py --basetemp /tmp/kills
"""

import os
import random
import time
from pathlib import Path

import pytest

from pipeline.cache.commit import committed_shards
from pipeline.cache.reader import Cache
from pipeline.cache.verify import verify
from pipeline.capture.run import capture
from pipeline.config.load import to_yaml
from tests.support.forked_ranks import ForkedRanks, alive, kill
from tests.support.tiny import write_chats
from tests.unit.capture.conftest import capture_config
from tests.unit.target.conftest import lone_rank

KILLS = int(os.environ.get("KILLS", "5"))


def _stamps(cache: Path, shards: set[int]) -> dict[str, tuple[int, int]]:
    """Inode and time of every file of those shards."""
    files = [file for shard in sorted(shards) for file in (cache / "shards" / f"{shard:05d}").rglob("*") if file.is_file()]
    return {str(file.relative_to(cache)): (file.stat().st_ino, file.stat().st_mtime_ns) for file in files}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_killed_at_random_moments_over_and_over(tiny_target: Path, tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", 120 * KILLS, seed=9)
    config = capture_config(tiny_target, tmp_path, capture__shard_tokens=2000)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    whole = tmp_path / "whole"
    capture(config.model_copy(update={"capture": config.capture.model_copy(update={"path": str(whole)})}), lone_rank())

    cache, rng = tmp_path / "cache", random.Random(1)
    kept: dict[str, tuple[int, int]] = {}
    kills = 0
    with ForkedRanks(tmp_path / "ranks.log") as ranks:
        while kills < KILLS:
            num_ranks = 1 + kills % 3
            pids = ranks.start(num_ranks, str(tmp_path / "config.yaml"))
            before, more = len(committed_shards(cache)), rng.choice((0, 1, 2))
            end = time.monotonic() + 120
            while more and len(committed_shards(cache)) < before + more and any(map(alive, pids)):
                assert time.monotonic() < end
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.3 if more else 2.0))
            if not all(map(alive, pids)):  # a quick machine: it was done before
                ranks.wait(pids, 60)
                break
            if rng.random() < 0.3:  # one rank alone; the others notice, and end
                kill([rng.choice(pids)])
                ranks.wait(pids, 60)
            kill(pids)
            kills += 1
            assert _stamps(cache, {int(name.split("/")[1]) for name in kept}) == kept
            kept = _stamps(cache, committed_shards(cache))
        ranks.wait(ranks.start(3, str(tmp_path / "config.yaml")), 300)
    assert kills >= min(KILLS, 3)
    after = _stamps(cache, committed_shards(cache))
    assert {name: after[name] for name in kept} == kept
    assert len(kept) > 0
    assert not list((cache / "shards").glob(".*"))
    assert Cache.open(cache).digest() == Cache.open(whole).digest()
    assert verify(cache, full=True) == []
