"""Ranks of a stage that start in a moment, so that a test can kill many: forked from one process that has the heavy imports already.

Run as a script it is that process: it reads a line of JSON for each launch, forks its ranks, and answers with their process ids.
"""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.support.launch import REPOSITORY, environment, free_port


class ForkedRanks:
    """`start` launches; ranks that the caller does not kill end by themselves."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def __enter__(self) -> Self:
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forked_ranks"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            cwd=REPOSITORY,
            text=True,
            start_new_session=True,
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.wait()
        for pipe in (self._server.stdin, self._server.stdout):
            assert pipe is not None
            pipe.close()

    def start(self, num_ranks: int, *arguments: str, stage: str = "capture") -> list[int]:
        """Process ids of the ranks of `stages/STAGE.py ARGUMENTS`."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        launch = {"stage": stage, "ranks": num_ranks, "port": free_port(), "arguments": arguments, "log": str(self._log)}
        self._server.stdin.write(json.dumps(launch) + "\n")
        self._server.stdin.flush()
        return list(json.loads(self._server.stdout.readline()))

    def wait(self, pids: list[int], timeout: float) -> None:
        """Until all have ended; an AssertionError with their log otherwise."""
        end = time.monotonic() + timeout
        while any(alive(pid) for pid in pids):
            assert time.monotonic() < end, f"{pids} still run after {timeout} s\n{self._log.read_text()}"
            time.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def kill(pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 30
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.002)


def _serve() -> None:
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401

    import pipeline.capture.run
    import pipeline.regenerate.local
    import pipeline.regenerate.server  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    for line in sys.stdin:
        launch = json.loads(line)
        pids = []
        for rank in range(launch["ranks"]):
            pid = os.fork()
            if pid == 0:
                _rank(launch, rank)
            pids.append(pid)
        print(json.dumps(pids), flush=True)


def _rank(launch: dict[str, object], rank: int) -> None:
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with open(str(launch["log"]), "ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        if launch["ranks"] != 1:
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": launch["ranks"], "MASTER_PORT": launch["port"]}
            os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in ranks.items()}})
        from pipeline.runtime.stage import run_stage

        stage, arguments = launch["stage"], launch["arguments"]
        assert isinstance(arguments, list)
        assert stage in ("capture", "regenerate")
        code = run_stage(stage, importlib.import_module(f"stages.{stage}").main, arguments)
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
