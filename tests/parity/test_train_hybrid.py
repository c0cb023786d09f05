"""Hybrid mode: the cache of a capture, to the byte, and the numbers of a run on it, however often it was stopped on the way."""

import multiprocessing
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.cache.reader import Cache
from pipeline.cache.verify import verify
from pipeline.capture.run import capture
from pipeline.config.load import to_yaml
from pipeline.config.schema import Config
from pipeline.runtime.ranks import start_ranks
from pipeline.train.loop import train
from pipeline.train.watch import read_metrics
from tests.support.launch import run_ranks
from tests.support.tiny import write_chats
from tests.support.training import config, repeatable

pytestmark = pytest.mark.slow

STEPS = 16  # of 6 an epoch


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", 24, seed=2)


def _config(folder: Path, target: Path, chats: Path, **changes: Any) -> Config:
    """Windows of two small shards, and validations within the first epoch."""
    wanted = {
        "data__mode": "hybrid",
        "data__hybrid_shards": 2,
        "capture__shard_tokens": 400,
        "trainer__max_steps": STEPS,
        "trainer__val_check_interval": 4,
        "exp_manager__checkpoint_callback_params": {"every_n_train_steps": 3, "save_top_k": 0},
        **changes,
    }
    return config(folder, target, chats, **wanted)


def _files(cache: Path) -> dict[str, bytes]:
    """All that a cache is, without what tells of runs."""
    names = ("shards", "target")
    found = [path for name in names for path in (cache / name).rglob("*") if path.is_file() and not path.name.startswith(".")]
    return {str(path.relative_to(cache)): path.read_bytes() for path in [*found, cache / "index.arrow", cache / "manifest.json"]}


def _weights(folder: Path) -> bytes:
    return (folder / "run/export/model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, chats: Path) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    assert train(_config(folder, tiny_target, chats), start_ranks(1, None, 1))
    return folder


def test_the_cache_is_that_of_a_capture_and_a_run_on_it_is_the_same(tmp_path: Path, whole: Path, tiny_target: Path, chats: Path) -> None:
    captured = _config(tmp_path, tiny_target, chats, data__mode="offline")
    capture(captured, start_ranks(1, None, 1))
    assert _files(tmp_path / "cache") == _files(whole / "cache")
    assert Cache.open(whole / "cache").manifest.num_shards > 3
    for workers in (0, 2):  # on a cache that is complete before it begins
        log_dir = str(tmp_path / f"workers-{workers}" / "run")
        again = _config(tmp_path, tiny_target, chats, exp_manager__explicit_log_dir=log_dir, data__num_workers=workers)
        assert train(again, start_ranks(1, None, 1))
        assert repeatable(Path(log_dir)) == repeatable(whole / "run")
        assert _weights(Path(log_dir).parent) == _weights(whole)
    assert _files(tmp_path / "cache") == _files(whole / "cache")


def test_shards_come_as_they_are_needed(tmp_path: Path, tiny_target: Path, chats: Path) -> None:
    """A run that ends in its first epoch has captured no more than it took; capture goes on from there."""
    short = _config(tmp_path, tiny_target, chats, trainer__max_steps=1, trainer__val_check_interval=None)
    assert train(short, start_ranks(1, None, 1))
    there = [path for path in (tmp_path / "cache/shards").iterdir() if path.name.isdigit()]
    assert len(there) == 2
    assert not (tmp_path / "cache/index.arrow").exists()
    capture(short, start_ranks(1, None, 1))
    assert not verify(tmp_path / "cache", full=True)


def _run(config: Config) -> bool:
    return train(config, start_ranks(1, None, 1))


def _last_step(folder: Path) -> int:
    return max((int(line["step"]) for line in read_metrics(folder / "run")), default=0)


def _shards(folder: Path) -> int:
    return len(list((folder / "cache/shards").glob("[0-9]*/committed.json")))


def test_kill_9_in_the_first_epoch(tmp_path: Path, whole: Path, tiny_target: Path, chats: Path) -> None:
    """Killed while it captures, and after a step: the same run and the same cache."""
    settings = _config(tmp_path, tiny_target, chats)
    moments: list[Callable[[], bool]] = [lambda: _shards(tmp_path) >= 3, lambda: _last_step(tmp_path) >= 5]
    for there in moments:
        child = multiprocessing.get_context("spawn").Process(target=_run, args=(settings,))
        child.start()
        while not there() and child.is_alive():
            time.sleep(0.001)
        child.kill()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    assert _run(settings)
    assert repeatable(tmp_path / "run") == repeatable(whole / "run")
    assert _weights(tmp_path) == _weights(whole)
    assert _files(tmp_path / "cache") == _files(whole / "cache")


@pytest.mark.parametrize("tp_size", [1, 2])
def test_on_two_ranks(tmp_path: Path, whole: Path, tiny_target: Path, chats: Path, tp_size: int) -> None:
    """Data-parallel groups capture a window together; with a divided target each rank of the group writes some layers."""
    (tmp_path / "two.yaml").write_text(to_yaml(_config(tmp_path, tiny_target, chats)))
    run_ranks("stages/train_draft.py", str(tmp_path / "two.yaml"), f"model.target.tp_size={tp_size}", num_ranks=2, timeout=200)
    assert not verify(tmp_path / "cache", full=True)
    if tp_size == 1:
        assert _files(tmp_path / "cache") == _files(whole / "cache")
    for one, two in zip(repeatable(tmp_path / "run"), repeatable(whole / "run"), strict=True):
        for name in ("step", "epoch", "lr", "samples_seen", "tokens_seen"):
            assert one.get(name) == two.get(name)
        for name in one.keys() & {"loss", "val_loss"}:
            assert one[name] == pytest.approx(two[name], rel=1e-5), (one["step"], name)
