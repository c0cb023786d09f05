"""One cache by several jobs that know nothing of one another, and jobs that are stopped, refused or left alone by a dead rank."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from pipeline.cache.commit import committed_shards
from pipeline.cache.manifest import read_manifest
from pipeline.cache.reader import Cache
from pipeline.capture.run import capture
from pipeline.config.load import load_config, to_yaml
from pipeline.errors import CacheLockedError
from tests.support.launch import REPOSITORY, free_port, kill_group, run, start
from tests.support.tiny import write_chats
from tests.unit.capture.conftest import capture_config
from tests.unit.target.conftest import lone_rank

STAGE = "stages/capture.py"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def job(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with config.yaml, a corpus of some twenty shards, and a cache of it in `whole`, captured without interruption."""
    folder = tmp_path_factory.mktemp("job")
    write_chats(folder / "chats.jsonl", 200, seed=9)
    (folder / "config.yaml").write_text(to_yaml(capture_config(tiny_target, folder, capture__shard_tokens=1500)))
    run(STAGE, str(folder / "config.yaml"), f"capture.path={folder / 'whole'}")
    return folder


def _command(job: Path, *overrides: str) -> list[str]:
    return [sys.executable, str(REPOSITORY / STAGE), str(job / "config.yaml"), *overrides]


def _until(what: str, log: Path, process: object, cache: Path, shards: int = 1) -> None:
    end = time.monotonic() + 120
    while len(committed_shards(cache)) < shards:
        assert time.monotonic() < end, f"{what}: {log.read_text()}"
        time.sleep(0.005)


def test_parts_that_start_at_the_same_moment_make_one_cache(job: Path, tmp_path: Path) -> None:
    """Nothing is prepared yet either: one tokenises, one creates, and the last to commit completes."""
    shared = (f"capture.path={tmp_path / 'cache'}", f"data.prepared_dir={tmp_path / 'prepared'}")
    logs = [tmp_path / f"{part}.log" for part in (1, 2, 3)]
    commands = [
        _command(job, *shared, f"capture.parts={part}/3", f"exp_manager.explicit_log_dir={tmp_path / str(part)}") for part in (1, 2, 3)
    ]
    processes = [start(command, log) for command, log in zip(commands, logs, strict=True)]
    try:
        assert [process.wait(200) for process in processes] == [0, 0, 0], "\n".join(log.read_text() for log in logs)
    finally:
        for process in processes:
            kill_group(process)
    texts = [log.read_text() for log in logs]
    assert sum("cache complete" in text for text in texts) >= 1
    assert not list((tmp_path / "cache").glob(".launch"))
    assert not list((tmp_path / "cache" / "shards").glob(".*"))
    assert Cache.open(tmp_path / "cache").digest() == Cache.open(job / "whole").digest()


def test_a_second_job_is_refused_and_sigterm_ends_the_first_in_order(job: Path, tmp_path: Path) -> None:
    cache, log = tmp_path / "cache", tmp_path / "log"
    process = start(_command(job, f"capture.path={cache}"), log)
    try:
        _until("first shard", log, process, cache)
        os.kill(process.pid, signal.SIGSTOP)  # so that it holds its lock for as long as we look
        for parts in ("null", "2/3"):
            config = load_config("capture", str(job / "config.yaml"), [f"capture.path={cache}", f"capture.parts={parts}"])
            with pytest.raises(CacheLockedError, match=f"in use by process {process.pid} on "):
                capture(config, lone_rank())
        os.kill(process.pid, signal.SIGTERM)
        os.kill(process.pid, signal.SIGCONT)
        assert process.wait(30) == 143, log.read_text()
    finally:
        kill_group(process)
    assert "stopped by SIGTERM" in log.read_text()
    assert not list((cache / "shards").glob(".*"))  # the shard in progress was given up and removed
    assert not list(cache.glob(".launch"))
    there = committed_shards(cache)
    assert 1 <= len(there) < read_manifest(cache).num_shards
    run(STAGE, *_command(job, f"capture.path={cache}")[2:])
    assert Cache.open(cache).digest() == Cache.open(job / "whole").digest()


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_is_killed_ends_the_others_with_one_error(job: Path, tmp_path: Path, dead: int) -> None:
    """Two ranks without a launcher that would notice, as under a plain `srun`."""
    cache = tmp_path / "cache"
    port = str(free_port())
    logs = [tmp_path / f"{rank}.log" for rank in (0, 1)]
    env = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    processes = [
        start(_command(job, f"capture.path={cache}"), log, {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank, log in enumerate(logs)
    ]
    try:
        # Rank 1 has all its work before it when one of the two dies, however quick or busy the machine; rank 0 waits for it at the end.
        while not list(cache.glob(".launch/*/plan.json")):
            assert processes[1].poll() is None, logs[1].read_text()
            time.sleep(0.005)
        os.kill(processes[1].pid, signal.SIGSTOP)
        _until("first shard", logs[0], processes[0], cache)
        processes[dead].kill()
        if dead == 0:
            os.kill(processes[1].pid, signal.SIGCONT)
        began = time.monotonic()
        assert processes[1 - dead].wait(60) == 2, logs[1 - dead].read_text()
        assert time.monotonic() - began < 30
    finally:
        for process in processes:
            kill_group(process)
    text = logs[1 - dead].read_text()
    assert text.count(f"rank {dead} of 2 died without a word") == 1
    assert "Traceback" not in text
    run(STAGE, *_command(job, f"capture.path={cache}")[2:])
    assert Cache.open(cache).digest() == Cache.open(job / "whole").digest()
