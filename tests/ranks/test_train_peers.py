"""A rank that dies, stops without a word, or has an error of its own: the others end too, and say why."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from pipeline.capture.run import capture
from pipeline.config.load import to_yaml
from pipeline.runtime.ranks import start_ranks
from pipeline.train.watch import read_metrics
from tests.support.launch import REPOSITORY, free_port, kill_group, start
from tests.support.tiny import write_chats
from tests.support.training import config

pytestmark = pytest.mark.slow

TRAIN = str(REPOSITORY / "stages/train_draft.py")


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """A folder with a cache, and the configuration of a training that ends by itself after hours only."""
    folder = tmp_path_factory.mktemp("endless")
    chats = write_chats(folder / "chats.jsonl", 16, seed=5)
    changes = {"data__validation_ds": {"fraction": 0.0}, "capture__shard_tokens": 512}
    wanted = config(folder, tiny_target, chats, trainer__max_steps=10**6, **changes)
    capture(wanted, start_ranks(1, None, 1))
    (folder / "config.yaml").write_text(to_yaml(wanted, named_only=True))
    return folder


@contextmanager
def _two_ranks(endless: Path, folder: Path, *overrides: str, before: Sequence[str] = ()) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Both ranks as processes, with torchrun's environment and no launcher above them; `before` stands before the first rank's command."""
    port = str(free_port())
    command = [sys.executable, TRAIN, str(endless / "config.yaml"), f"exp_manager.explicit_log_dir={folder / 'run'}", *overrides]
    ranks = []
    for rank in ("0", "1"):
        world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        env = {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **world}
        ranks.append(start([*before, *command] if rank == "0" else command, folder / f"{rank}.log", env))
    try:
        yield ranks
    finally:
        for process in ranks:
            kill_group(process)


def _until(what: Callable[[], bool], *processes: "subprocess.Popen[bytes]", seconds: float = 100) -> None:
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        assert all(process.poll() is None for process in processes)
        time.sleep(0.02)


def _is_training(folder: Path) -> bool:
    return len(read_metrics(folder / "run")) > 3


@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_the_other(endless: Path, tmp_path: Path, killed: int) -> None:
    with _two_ranks(endless, tmp_path) as ranks:
        _until(lambda: _is_training(tmp_path), *ranks)
        ranks[killed].kill()
        assert ranks[1 - killed].wait(60) == 2
    said = (tmp_path / f"{1 - killed}.log").read_text()
    assert "another rank of 2 is gone" in said
    assert "Traceback" not in said


def test_a_rank_that_hangs_is_waited_for_as_long_as_asked(endless: Path, tmp_path: Path) -> None:
    with _two_ranks(endless, tmp_path, "trainer.timeout_seconds=20") as ranks:
        _until(lambda: _is_training(tmp_path), *ranks)
        ranks[1].send_signal(signal.SIGSTOP)
        assert ranks[0].wait(60) == 2
    assert "did not come to a meeting of all ranks in time" in (tmp_path / "0.log").read_text()


def test_the_error_of_one_rank_ends_both_and_is_told(endless: Path, tmp_path: Path) -> None:
    """A file of the cache that goes away in the middle: the rank that reads it next says which; the other, that a peer is gone."""
    shutil.copytree(endless / "cache", tmp_path / "cache")
    with _two_ranks(endless, tmp_path, f"data.cache={tmp_path / 'cache'}") as ranks:
        _until(lambda: _is_training(tmp_path), *ranks)
        for path in (tmp_path / "cache" / "shards").glob("*/hidden.zarr/layer_1/c/0/0"):
            os.truncate(path, 10)
        assert [process.wait(60) for process in ranks] == [2, 2]
    said = [(tmp_path / f"{rank}.log").read_text() for rank in (0, 1)]
    assert any("layer_1" in text for text in said)
    assert all("error" in text and "Traceback" not in text for text in said)


def test_a_full_disk_ends_all_ranks_with_the_same_words_and_leaves_the_older_checkpoint(endless: Path, tmp_path: Path) -> None:
    overrides = ["exp_manager.checkpoint_callback_params.every_n_train_steps=2"]
    with _two_ranks(endless, tmp_path, *overrides, "trainer.max_steps=4") as ranks:
        assert [process.wait(100) for process in ranks] == [0, 0]
    limited = ("bash", "-c", 'ulimit -f 64; exec "$@"', "bash")  # 64 kB a file: less than a checkpoint's, more than a log's
    with _two_ranks(endless, tmp_path, *overrides, before=limited) as ranks:
        assert [process.wait(100) for process in ranks] == [2, 2]
    for rank in (0, 1):
        said = (tmp_path / f"{rank}.log").read_text()
        assert "step_0000006 cannot be written: " in said
        assert "The checkpoint before it, step_0000004, is whole" in said
        assert "Traceback" not in said
    assert [path.name for path in (tmp_path / "run/checkpoints").iterdir()] == ["step_0000004"]


def test_under_accelerate_launch(endless: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", str(free_port())]
    command += ["--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--tee", "3", TRAIN, str(endless / "config.yaml")]
    launcher = start([*command, f"exp_manager.explicit_log_dir={tmp_path / 'run'}"], tmp_path / "log", {"ACCELERATE_USE_CPU": "true"})
    try:
        _until(lambda: _is_training(tmp_path), launcher)
        ranks = {
            child.environ()["RANK"]: child for child in psutil.Process(launcher.pid).children(recursive=True) if TRAIN in child.cmdline()
        }
        ranks["1"].kill()
        assert launcher.wait(100) != 0
    finally:
        kill_group(launcher)
    said = (tmp_path / "log").read_text()
    assert "another rank of 2 is gone" in said
    assert "Signal 9 (SIGKILL)" in said or "exitcode  : -9" in said
