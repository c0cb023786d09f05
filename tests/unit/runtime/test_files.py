"""Atomic writes and locks under kill -9 of real processes, and waiting for a file."""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

from pipeline.errors import CacheLockedError, PipelineError
from pipeline.runtime.files import FolderLock, atomic_file, atomic_folder, file_digest, lock_holder, wait_for, write_json
from tests.support.launch import kill_group, start

WRITER = """
import sys, time
from pipeline.runtime.files import atomic_file, atomic_folder
path, kind = sys.argv[1:]
if kind == "folder":
    with atomic_folder(path) as folder:
        (folder / "part").write_bytes(b"new")
        print("writing", flush=True)
        time.sleep(60)
else:
    with atomic_file(path) as stream:
        stream.write(b"new" * 100_000)
        print("writing", flush=True)
        time.sleep(60)
"""

HOLDER = """
import os, sys, time
from pipeline.runtime.files import FolderLock
with FolderLock(sys.argv[1]):
    if sys.argv[2] == "fork" and os.fork() == 0:
        time.sleep(60)
    print("held", flush=True)
    time.sleep(60)
"""


def wait_until_written(log: Path, text: str) -> None:
    end = time.monotonic() + 30
    while text not in log.read_text():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_whole_and_nothing_else_remains(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"old")
    with atomic_file(path) as stream:
        stream.write(b"new")
        stream.flush()
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert names(tmp_path) == ["a"]


def test_an_error_leaves_what_was_there(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"old")
    with pytest.raises(RuntimeError, match="half way"), atomic_file(tmp_path / "a") as stream:
        stream.write(b"new")
        raise RuntimeError("half way")
    with pytest.raises(RuntimeError, match="half way"), atomic_folder(tmp_path / "b") as folder:
        (folder / "part").write_bytes(b"new")
        raise RuntimeError("half way")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert names(tmp_path) == ["a"]


def test_a_folder_appears_whole_and_refuses_to_replace_one(tmp_path: Path) -> None:
    path = tmp_path / "b"
    with atomic_folder(path) as folder:
        (folder / "in").mkdir()
        (folder / "in" / "part").write_bytes(b"x")
        assert not path.exists()
    assert (path / "in" / "part").read_bytes() == b"x"
    with pytest.raises(FileExistsError), atomic_folder(path):
        pass
    assert names(tmp_path) == ["b"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_kill_9_in_the_middle_leaves_the_old_state(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "out" / "a"
    path.parent.mkdir()
    if kind == "file":
        path.write_bytes(b"old")
    log = tmp_path / "log"
    process = start([sys.executable, "-c", WRITER, str(path), kind], log)
    try:
        wait_until_written(log, "writing")
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    finally:
        kill_group(process)
    assert path.read_bytes() == b"old" if kind == "file" else not path.exists()
    leftovers = [name for name in names(path.parent) if name != "a"]
    assert len(leftovers) == 1
    assert leftovers[0].startswith(".a.")
    assert leftovers[0].endswith(".tmp")


def test_json_is_a_function_of_the_value(tmp_path: Path) -> None:
    write_json(tmp_path / "a", {"b": 1, "a": "é"})
    write_json(tmp_path / "b", {"a": "é", "b": 1})
    text = (tmp_path / "a").read_text()
    assert text == (tmp_path / "b").read_text() == '{\n  "a": "é",\n  "b": 1\n}\n'
    assert json.loads(text) == {"a": "é", "b": 1}
    assert file_digest(tmp_path / "a") == file_digest(tmp_path / "b")
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a", float("nan"))
    assert (tmp_path / "a").read_text() == text


def test_digest_is_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert file_digest(tmp_path / "a") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_a_lock_is_exclusive_within_a_process_and_comes_free(tmp_path: Path) -> None:
    with FolderLock(tmp_path):
        with pytest.raises(CacheLockedError, match=f"process {os.getpid()} on "), FolderLock(tmp_path):
            pass
        with pytest.raises(CacheLockedError), FolderLock(tmp_path):
            pass
    with FolderLock(tmp_path):
        pass


@pytest.mark.parametrize("kind", ["plain", "fork"])
def test_kill_9_frees_the_lock_even_when_a_forked_child_lives_on(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    log = tmp_path / "log"
    process = start([sys.executable, "-c", HOLDER, str(folder), kind], log)
    try:
        wait_until_written(log, "held")
        with pytest.raises(CacheLockedError, match=f"process {process.pid} on "), FolderLock(folder):
            pass
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with FolderLock(folder):
            pass
    finally:
        kill_group(process)


def test_a_worker_that_is_forked_under_the_lock_does_not_release_it(tmp_path: Path) -> None:
    with FolderLock(tmp_path):
        worker = multiprocessing.get_context("fork").Process(target=print)
        worker.start()
        worker.join(30)
        assert worker.exitcode == 0
        with pytest.raises(CacheLockedError), FolderLock(tmp_path):
            pass


def test_shared_locks_keep_out_exclusive_ones_only(tmp_path: Path) -> None:
    with FolderLock(tmp_path, shared=True), FolderLock(tmp_path, shared=True), FolderLock(tmp_path, ".lock-other"):
        other = FolderLock(tmp_path)
        with pytest.raises(CacheLockedError, match="in use by"):
            other.__enter__()
    with FolderLock(tmp_path), pytest.raises(CacheLockedError, match=f"process {os.getpid()}"), FolderLock(tmp_path, shared=True):
        pass


def test_who_holds_a_lock_can_be_asked(tmp_path: Path) -> None:
    assert lock_holder(tmp_path / ".lock") is None
    with FolderLock(tmp_path):
        assert str(lock_holder(tmp_path / ".lock")).startswith(f"process {os.getpid()} on ")
    assert lock_holder(tmp_path / ".lock") is None


def test_a_lock_can_be_waited_for(tmp_path: Path) -> None:
    first = FolderLock(tmp_path)
    first.__enter__()
    freed: list[float] = []

    def free() -> None:
        freed.append(time.monotonic())
        first.__exit__(None, None, None)

    timer = threading.Timer(0.3, free)
    timer.start()
    with FolderLock(tmp_path, wait_for_it="the other one"):
        assert freed, "the lock was had before it was free"
    timer.join()


def test_waiting_ends_when_the_file_is_there(tmp_path: Path) -> None:
    timer = threading.Timer(0.2, (tmp_path / "ready").touch)
    timer.start()
    wait_for(tmp_path / "ready", "the corpus", lambda: None)
    timer.join()
    wait_for(tmp_path / "ready", "the corpus", lambda: "not asked: the file is there")


def test_waiting_ends_with_the_reason_to_give_up(tmp_path: Path) -> None:
    reasons = iter([None, None, "rank 0 stopped"])
    with pytest.raises(PipelineError, match=r"the corpus did not come: rank 0 stopped .*ready"):
        wait_for(tmp_path / "ready", "the corpus", lambda: next(reasons))
