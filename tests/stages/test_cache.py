"""stages/cache.py as a user runs it: exit codes and output, and an append that is killed at any moment."""

import json
import random
import shutil
import sys
import time
from pathlib import Path

import pytest

from pipeline.cache.manifest import create_or_compare
from pipeline.cache.reader import Cache
from pipeline.config.load import to_yaml
from stages.cache import main
from tests.support import caches
from tests.support.launch import REPOSITORY, kill_group, run, run_ranks, start
from tests.support.tiny import write_chats
from tests.unit.capture.conftest import capture_config

STAGE = "stages/cache.py"
MORE = ("model.target.layer_ids=[1,3,5,2]", "capture.final=true")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return caches.write_cache(tmp_path_factory.mktemp("cache") / "c", caches.small_shards(), caches.manifest())


def test_info_as_json(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(cache), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] == Cache.open(cache).digest()


def test_exit_codes(cache: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    bad = shutil.copytree(cache, tmp_path / "bad")
    (bad / "shards/00002/samples.arrow").unlink()
    data = bad / "shards/00001/hidden.zarr/layer_4/c/0/0"
    data.write_bytes(data.read_bytes()[:-50] + b"x" * 50)
    still_open = tmp_path / "open"
    create_or_compare(still_open, caches.manifest())
    caches.write_target(still_open)
    caches.write_shard(still_open, 1, caches.small_shards()[1])
    for arguments, code, words in (
        (("verify", cache), 0, "no fault found in sizes"),
        (("verify", cache, "--full"), 0, "no fault found"),
        (("verify", still_open), 0, "the cache is not complete: 1 of 3 shards are captured"),
        (("verify", bad), 1, "shards/00002/samples.arrow"),
        (("verify", bad, "--full"), 1, "shards/00001/hidden.zarr/layer_4/c/0/0: its bytes were altered"),
        (("verify", tmp_path / "none"), 2, "is not a folder"),
        (("info", cache), 0, "hidden.zarr"),
        (("info", tmp_path), 2, "is not a cache"),
        (("diff", cache, bad), 0, "hold the same"),
        (("subset", cache, tmp_path / "out", "--layers", "4"), 0, "layers         [4]"),
        (("diff", cache, tmp_path / "out"), 1, "layer_ids: A [1, 4], B [4]"),
        (("subset", cache, tmp_path / "no", "--layers", "5"), 2, "append CONFIG.yaml"),
        (("append", tmp_path / "none.yaml"), 2, "no such file"),
    ):
        assert main([str(argument) for argument in arguments]) == code
        said = capfd.readouterr()
        assert words in said.out + said.err
    with pytest.raises(SystemExit) as stopped:
        main(["mend", str(cache)])
    assert stopped.value.code == 2


@pytest.mark.slow
def test_an_append_killed_at_any_moment_and_run_again_on_other_numbers_of_ranks(tiny_target: Path, tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", 60, seed=3)
    config = tmp_path / "config.yaml"
    config.write_text(to_yaml(capture_config(tiny_target, tmp_path, capture__shard_tokens=700)))
    run("stages/capture.py", str(config))
    shutil.copytree(tmp_path / "cache", tmp_path / "old")
    shutil.copytree(tmp_path / "cache", tmp_path / "whole")
    with open(tmp_path / "chats.jsonl", "ab") as stream:
        stream.write(write_chats(tmp_path / "more.jsonl", 30, seed=4).read_bytes())
    run(STAGE, "append", str(config), f"capture.path={tmp_path / 'whole'}", *MORE)
    whole, rng = Cache.open(tmp_path / "whole").digest(), random.Random(1)
    command = [sys.executable, str(REPOSITORY / STAGE), "append", str(config), *MORE]

    def markers() -> dict[str, bytes]:
        return {path.parent.name: path.read_bytes() for path in (tmp_path / "cache/shards").glob("[0-9]*/committed.json")}

    original, kills = markers(), 0
    for changed in (0, 3, 6, 12):
        process = start(command, tmp_path / "killed.log")
        try:
            end = time.monotonic() + 120
            while process.poll() is None and time.monotonic() < end:
                if sum(original.get(name) != data for name, data in markers().items()) >= changed and changed:
                    break
                if not changed and (tmp_path / "cache/.launch").exists():
                    time.sleep(rng.uniform(0, 3))
                    break
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.05))
            kills += process.poll() is None
        finally:
            kill_group(process)
    assert kills >= 3
    finished = run_ranks(STAGE, "append", str(config), *MORE, num_ranks=2)
    assert finished.ok
    assert Cache.open(tmp_path / "cache").digest() == whole
    for path in (tmp_path / "old/shards").rglob("*"):
        if path.is_file() and path.name != "committed.json":
            assert (tmp_path / "cache" / path.relative_to(tmp_path / "old")).read_bytes() == path.read_bytes()
    assert not list((tmp_path / "cache/shards").glob(".*"))
    finished = run(STAGE, "verify", str(tmp_path / "cache"), "--full")
    assert "no fault found" in finished.text


@pytest.mark.slow
def test_repair_and_remask(tiny_target: Path, tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", 20)
    config = tmp_path / "config.yaml"
    config.write_text(to_yaml(capture_config(tiny_target, tmp_path)))
    run("stages/capture.py", str(config))
    before = Cache.open(tmp_path / "cache").digest()
    data = tmp_path / "cache/shards/00001/hidden.zarr/layer_3/c/0/0"
    data.write_bytes(data.read_bytes()[:-9] + b"x" * 9)
    finished = run(STAGE, "repair", str(config))
    assert "faulty: shards/00001/hidden.zarr/layer_3/c/0/0" in finished.text
    assert "its digest is the same" in finished.text
    assert Cache.open(tmp_path / "cache").digest() == before
    run(STAGE, "remask", str(config), "data.validation_ds.fraction=0.6")
    index = Cache.open(tmp_path / "cache").index
    assert len(index.of_split("heldout")) > 6
