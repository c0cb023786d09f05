"""Capture as a user runs it: one process, several, killed and run again."""

import random
import shutil
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from pipeline.cache.commit import committed_shards
from pipeline.cache.reader import Cache
from pipeline.config.load import to_yaml
from tests.support.launch import REPOSITORY, accelerate_launch, kill_group, run, run_ranks, start
from tests.support.tiny import build_tokenizer, chats, write_jsonl
from tests.unit.capture.conftest import capture_config

STAGE = "stages/capture.py"
ODD = "Ж"  # its first byte is in no other chat, and not in the probe


@pytest.fixture(scope="module")
def job(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with config.yaml, a corpus of some 40 shards, and a cache of it in `whole`, captured without interruption."""
    folder = tmp_path_factory.mktemp("job")
    odd = {"messages": [{"role": "user", "content": f"What is {ODD}?"}, {"role": "assistant", "content": "A letter."}]}
    rows = chats(400, seed=9)
    write_jsonl(folder / "chats.jsonl", [*rows[:150], odd, *rows[150:]])
    (folder / "config.yaml").write_text(to_yaml(capture_config(tiny_target, folder, capture__shard_tokens=1700)))
    finished = run(STAGE, str(folder / "config.yaml"), f"capture.path={folder / 'whole'}")
    assert "world size 1 on cpu" in finished.text
    return folder


def _stamps(cache: Path, shards: set[int]) -> dict[int, tuple[int, int]]:
    found = {shard: (cache / "shards" / f"{shard:05d}" / "committed.json").stat() for shard in shards}
    return {shard: (stat.st_ino, stat.st_mtime_ns) for shard, stat in found.items()}


def _kill_when(command: list[str], cache: Path, shards: int, delay: float, log: Path) -> set[int]:
    """Start `command`, kill it and its children `delay` seconds after `shards` more shards are there; those that are there then."""
    before = len(committed_shards(cache))
    process = start(command, log)
    try:
        end = time.monotonic() + 120
        while len(committed_shards(cache)) < before + shards and process.poll() is None and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(delay)
        assert process.poll() is None, log.read_text()
    finally:
        kill_group(process)
    return committed_shards(cache)


@pytest.mark.slow
def test_killed_anywhere_and_run_again_on_other_numbers_of_ranks(job: Path) -> None:
    cache, config, rng = job / "killed", str(job / "config.yaml"), random.Random(0)
    whole = Cache.open(job / "whole")
    alone = [sys.executable, str(REPOSITORY / STAGE), config, f"capture.path={cache}"]
    kept: dict[int, tuple[int, int]] = {}
    for shards in (0, 1, 4, 7):
        there = _kill_when(alone, cache, shards, rng.uniform(0, 0.2), job / "killed.log")
        assert _stamps(cache, set(kept)) == kept  # what was finished is not done again
        kept = _stamps(cache, there)
    assert 12 <= len(kept) < whole.manifest.num_shards
    for ranks in (3, 2):
        if ranks == 3:
            finished = run_ranks(STAGE, config, f"capture.path={cache}", num_ranks=3, timeout=240)
            assert "world size 3 (dp 3 x tp 1)" in finished.text
        else:
            shutil.rmtree(cache / "shards" / "00007")
            kept.pop(7, None)
            finished = run_ranks(STAGE, config, f"capture.path={cache}", num_ranks=2)
        assert _stamps(cache, set(kept)) == kept
        assert not list((cache / "shards").glob(".*"))
        assert Cache.open(cache).digest() == whole.digest()


@pytest.mark.slow
def test_two_ranks_are_two_and_give_what_one_gives(job: Path) -> None:
    finished = accelerate_launch(
        STAGE, str(job / "config.yaml"), f"capture.path={job / 'two'}", "exp_manager.explicit_log_dir=" + str(job / "two_logs")
    )
    assert "world size 2 (dp 2 x tp 1) on cpu over gloo" in finished.text
    assert (job / "two_logs" / "logs" / "rank1.log").exists()
    assert Cache.open(job / "two").digest() == Cache.open(job / "whole").digest()


@pytest.mark.slow
@pytest.mark.parametrize("layer_ids", ["[1,3,5]", "[3]"])  # with one layer the second rank of a pair has nothing to write
def test_two_pairs_of_ranks_write_one_cache(job: Path, tmp_path: Path, layer_ids: str) -> None:
    cache = tmp_path / "cache"
    overrides = (f"capture.path={cache}", "model.target.tp_size=2", f"model.target.layer_ids={layer_ids}", "capture.shard_tokens=9000")
    finished = run_ranks(STAGE, str(job / "config.yaml"), *overrides, num_ranks=4, timeout=240)
    assert "world size 4 (dp 2 x tp 2)" in finished.text
    whole, pairs = Cache.open(job / "whole"), Cache.open(cache)
    states = {(sample := whole.read(i)).tokens.sample_id: sample for i in range(len(whole))}
    assert len(pairs) == len(states)
    for i in range(len(pairs)):
        sample = pairs.read(i)
        for layer, state in sample.hidden.items():
            expected = states[sample.tokens.sample_id].hidden[layer]
            torch.testing.assert_close(state, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.slow
def test_a_launch_of_another_size_writes_nothing(job: Path) -> None:
    cache = job / "refused"
    options = ("--cpu", "--num_processes", "2", "--num_machines", "1")
    for finished in (
        accelerate_launch(STAGE, str(job / "config.yaml"), f"capture.path={cache}", options=options, check=False),
        run(STAGE, str(job / "config.yaml"), f"capture.path={cache}", "trainer.devices=2", check=False),
        run(STAGE, str(job / "config.yaml"), f"capture.path={cache}", "model.target.tp_size=2", check=False),
    ):
        assert not finished.ok
        assert 'Traceback (most recent call last):\n  File "' + str(REPOSITORY) not in finished.text
        assert "error: " in finished.text
    assert not cache.exists()


@pytest.mark.slow
def test_one_rank_fails_and_all_end_with_its_reason(job: Path, tiny_target: Path, tmp_path: Path) -> None:
    """One token that a single chat holds has a broken embedding: only the rank that captures this chat can notice."""
    sick = Path(shutil.copytree(tiny_target, tmp_path / "sick"))
    whole, token = Cache.open(job / "whole"), build_tokenizer()(ODD).input_ids[0]
    (shard,) = (int(whole.index.shard[i]) for i in range(len(whole)) if token in whole.read(i).tokens.input_ids)
    failing, other = shard % 2, 1 - shard % 2
    tensors = load_file(sick / "model.safetensors")
    tensors["model.embed_tokens.weight"][token] = float("nan")
    save_file(tensors, sick / "model.safetensors", metadata={"format": "pt"})
    overrides = [f"capture.path={tmp_path / 'cache'}", f"model.target.path={sick}"]
    finished = run_ranks(STAGE, str(job / "config.yaml"), *overrides, check=False, timeout=100)
    assert finished.codes == (2, 2), finished.text
    assert finished.text.count("states are not finite") == 1
    assert "states are not finite" in finished.outputs[failing]
    assert f"rank {failing} failed: sample" in (job / "run" / "logs" / f"rank{other}.log").read_text()
    assert shard not in committed_shards(tmp_path / "cache")


@pytest.mark.slow
def test_a_disk_that_takes_no_more(job: Path, tmp_path: Path) -> None:
    """A limit on file sizes stands for the full disk: it stops the bundle, or the layers of a large shard in the writer's thread."""
    arguments = f"{job / 'config.yaml'} capture.path={tmp_path / 'cache'} capture.shard_tokens=100000"
    for kibibytes, words in ((40, "bundle"), (2000, "cannot write")):
        log = tmp_path / f"{kibibytes}.log"
        process = start(["bash", "-c", f"ulimit -f {kibibytes}; exec {sys.executable} {REPOSITORY / STAGE} {arguments}"], log)
        try:
            assert process.wait(120) == 2, log.read_text()
        finally:
            kill_group(process)
        assert "Traceback" not in log.read_text()
        assert words in log.read_text()
        assert "free disk space" in log.read_text().lower()


def test_configurations_of_the_repository_are_complete() -> None:
    from pipeline.config.load import load_config

    paths = sorted((REPOSITORY / "configs" / "capture").glob("*.yaml"))
    assert len(paths) >= 3
    for path in paths:
        config = load_config("capture", str(path), [])
        assert config.capture.path
        assert yaml.safe_load(path.read_text())["name"].endswith("capture")
