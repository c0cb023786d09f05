"""The plan of a capture against the capture, and a disk that is too small or becomes full."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cache.commit import committed_shards
from pipeline.cache.info import info
from pipeline.cache.reader import Cache
from pipeline.capture.plan import as_text, plan
from pipeline.capture.run import capture
from pipeline.config.load import to_yaml
from tests.support.launch import REPOSITORY, accelerate_launch, kill_group, run, start
from tests.support.tiny import write_chats
from tests.unit.capture.conftest import capture_config
from tests.unit.target.conftest import lone_rank

STAGE = "stages/capture.py"
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_predicted_sizes_are_the_actual_ones(tiny_target: Path, tmp_path: Path, dtype: str) -> None:
    write_chats(tmp_path / "chats.jsonl", 300, seed=4)
    config = capture_config(tiny_target, tmp_path, model__target__dtype=dtype, capture__shard_tokens=9000, capture__final=True)
    predicted = plan(config, lone_rank())
    assert predicted is not None
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "prepared").exists()
    for codec in predicted.hidden:
        section = config.capture.model_copy(update={"path": str(tmp_path / codec), "codec": codec})
        capture(config.model_copy(update={"capture": section}), lone_rank())
        actual = info(tmp_path / codec)
        sizes = actual["bytes"]
        assert predicted.hidden[codec] == pytest.approx(sizes["hidden.zarr"], rel=0 if codec == "raw" else 0.05)
        assert predicted.samples == pytest.approx(sizes["samples"], rel=0.05)
        assert predicted.bundle == pytest.approx(sizes["bundle"], rel=0.05)
        assert len(predicted.shard_tokens) == actual["shards"]["expected"]
        assert predicted.corpus.total_tokens == actual["totals"]["tokens"]
    text = as_text(predicted)
    for name in ("samples", "tokens", "shards, files", "in all", "capture", "training reads", "break-even", *predicted.hidden):
        assert f"\n{name}" in f"\n{text}"


def test_the_command_plans_on_the_ranks_that_run_it(tiny_target: Path, tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", 100, seed=4)
    (tmp_path / "config.yaml").write_text(to_yaml(capture_config(tiny_target, tmp_path)))
    finished = accelerate_launch(STAGE, str(tmp_path / "config.yaml"), "--plan", "model.target.tp_size=2")
    assert "by 2 rank(s) in 1 group(s)" in finished.text
    assert finished.text.count("break-even") == 1
    assert not (tmp_path / "cache").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB of its own; skipped where none may be mounted."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(place)], check=False).returncode:
        pytest.skip("needs to mount a tmpfs")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def test_a_disk_that_is_too_small_and_one_that_becomes_full(tiny_target: Path, tmp_path: Path, small_disk: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", 25, seed=4)
    write_chats(tmp_path / "many.jsonl", 600, seed=4)
    config = capture_config(tiny_target, tmp_path, capture__shard_tokens=250)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    common = (str(tmp_path / "config.yaml"), f"capture.path={small_disk / 'cache'}")
    refused = run(STAGE, *common, f"data.train_ds.input_cfg.0.path={tmp_path / 'many.jsonl'}", check=False)
    assert refused.codes == (2,)
    assert "what is to be captured takes about" in refused.text
    assert committed_shards(small_disk / "cache") == set()
    subprocess.run(["rm", "-rf", str(small_disk / "cache")], check=True)

    log, filler = tmp_path / "log", small_disk / "filler"
    process = start([sys.executable, str(REPOSITORY / STAGE), *common], log)
    try:
        end = time.monotonic() + 120
        while not committed_shards(small_disk / "cache") and process.poll() is None:
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.002)
        with open(filler, "wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))
        assert process.wait(60) == 2, log.read_text()
    finally:
        kill_group(process)
    text = log.read_text()
    assert "Traceback" not in text
    assert "No space left on device" in text
    assert f"{small_disk / 'cache'}" in text
    filler.unlink()
    there = committed_shards(small_disk / "cache")
    run(STAGE, *common)
    whole = config.model_copy(update={"capture": config.capture.model_copy(update={"path": str(tmp_path / "whole")})})
    capture(whole, lone_rank())
    assert 1 <= len(there) < Cache.open(tmp_path / "whole").manifest.num_shards
    assert Cache.open(small_disk / "cache").digest() == Cache.open(tmp_path / "whole").digest()
