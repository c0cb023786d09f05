"""A longer run stays as it began: the same open files, no memory that grows. The hour on a real target is run by hand."""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.capture.run import capture
from pipeline.config.load import to_yaml
from pipeline.runtime.ranks import start_ranks
from pipeline.train.watch import read_metrics
from tests.support.launch import REPOSITORY, kill_group, start
from tests.support.tiny import write_chats
from tests.support.training import config

STEPS, EVERY = 600, 15
WARM = 150  # steps in which buffers and thread pools find their size


@pytest.mark.slow
def test_memory_and_open_files_do_not_grow(tmp_path: Path, tiny_target: Path) -> None:
    changes: dict[str, Any] = {
        "data__validation_ds": {"fraction": 0.25},
        "data__num_workers": 2,
        "trainer__max_steps": STEPS,
        "trainer__val_check_interval": EVERY,
        "trainer__log_every_n_steps": EVERY,
        "trainer__ema_decay": 0.99,
        "exp_manager__create_tensorboard_logger": True,
    }
    wanted = config(tmp_path, tiny_target, write_chats(tmp_path / "chats.jsonl", 24, seed=2), **changes)
    capture(wanted, start_ranks(1, None, 1))
    (tmp_path / "config.yaml").write_text(to_yaml(wanted, named_only=True))
    run = start([sys.executable, str(REPOSITORY / "stages/train_draft.py"), str(tmp_path / "config.yaml")], tmp_path / "log")
    process, seen = psutil.Process(run.pid), []
    try:
        end = time.monotonic() + 250
        while run.poll() is None:
            assert time.monotonic() < end
            step = max((record["step"] for record in read_metrics(tmp_path / "run")), default=0)
            if WARM <= step < STEPS:
                seen.append((step, process.num_fds(), process.memory_info().rss))
            time.sleep(0.05)
    finally:
        kill_group(run)
    assert run.returncode == 0, (tmp_path / "log").read_text()
    first = [(files, memory) for step, files, memory in seen if step < (WARM + STEPS) // 2]
    second = [(files, memory) for step, files, memory in seen if step >= (WARM + STEPS) // 2]
    assert min(len(first), len(second)) >= 10
    # A checkpoint in hand has a file or two open, and its copy in memory: the usual number of files is compared, and the least memory.
    assert statistics.median(files for files, _ in second) <= statistics.median(files for files, _ in first)
    assert max(files for files, _ in second) <= max(files for files, _ in first) + 2
    grown = min(memory for _, memory in second) - min(memory for _, memory in first)
    assert grown < 16e6, f"{grown / 1e6:.1f} MB more in the second half"
