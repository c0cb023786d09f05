"""Processes for tests, always with a time limit, and with every rank's own words when something fails.

`run` starts one process, `run_ranks` one a rank with the environment that torchrun would give, `accelerate_launch` goes through
the launcher itself. `spawn_ranks` runs a function of the tests on several ranks that already share a gloo group.
"""

import gc
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


@dataclass(frozen=True)
class Finished:
    """Exit codes and outputs (stdout and stderr together), by rank; one entry for a launcher that mixes them."""

    codes: tuple[int, ...]
    outputs: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return all(code == 0 for code in self.codes)

    @property
    def text(self) -> str:
        return "\n".join(
            f"===== process {i}: exit {code} =====\n{out}" for i, (code, out) in enumerate(zip(self.codes, self.outputs, strict=True))
        )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without a launcher's variables, with the repository importable and one thread a process."""
    kept = {k: v for k, v in os.environ.items() if k not in DISTRIBUTED and not k.startswith(("ACCELERATE_", "TORCHELASTIC_"))}
    kept |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
    return kept | dict(extra or {})


def kill_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill the process and all that it started (it must lead its own session)."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def start(command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> "subprocess.Popen[bytes]":
    """Start `command` in a session of its own, output to `log`; the caller ends it, with `kill_group` at the latest."""
    with open(log, "ab") as stream:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT, env=environment(env), start_new_session=True
        )


def _finish(commands: Sequence[Sequence[str]], envs: Sequence[Mapping[str, str]], timeout: float, check: bool) -> Finished:
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{i}.log" for i in range(len(commands))]
        processes = [start(command, log, env) for command, log, env in zip(commands, logs, envs, strict=True)]
        end = time.monotonic() + timeout
        late = False
        try:
            # A rank that fails leaves the others waiting for it: they get a moment to say so, not the whole limit.
            while any(p.poll() is None for p in processes):
                if any(p.returncode not in (None, 0) for p in processes):
                    end = min(end, time.monotonic() + 15)
                late = time.monotonic() > end
                if late:
                    break
                time.sleep(0.05)
        finally:
            for process in processes:
                kill_group(process)
        finished = Finished(tuple(p.returncode for p in processes), tuple(log.read_text(errors="replace") for log in logs))
    if check and (late or not finished.ok):
        raise AssertionError(f"{'stopped at the time limit' if late else 'failed'}: {' '.join(commands[0])}\n{finished.text}")
    return finished


def run(
    script: str, *args: str, env: Mapping[str, str] | None = None, timeout: float = 120, check: bool = True, python: str = sys.executable
) -> Finished:
    """`python SCRIPT ARGS`, SCRIPT relative to the repository. `check` makes a failure an AssertionError with the output."""
    return _finish([[python, str(REPOSITORY / script), *args]], [env or {}], timeout, check)


def run_ranks(
    script: str, *args: str, num_ranks: int = 2, env: Mapping[str, str] | None = None, timeout: float = 120, check: bool = True
) -> Finished:
    """`python SCRIPT ARGS` on `num_ranks` CPU ranks with torchrun's environment; one exit code and output a rank."""
    command = [sys.executable, str(REPOSITORY / script), *args]
    port = str(free_port())
    envs = []
    for rank in range(num_ranks):
        world = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
        envs.append({"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, **world, **(env or {})})
    return _finish([command] * num_ranks, envs, timeout, check)


def accelerate_launch(
    script: str,
    *args: str,
    options: Sequence[str] | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
    check: bool = True,
) -> Finished:
    """`accelerate launch OPTIONS SCRIPT ARGS`. Without OPTIONS it takes the form that really gives two CPU ranks."""
    if options is None:
        options, env = (
            ("--multi_gpu", "--num_processes", "2", "--num_machines", "1", "--tee", "3"),
            {"ACCELERATE_USE_CPU": "true", **(env or {})},
        )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", str(free_port()), *options]
    return _finish([[*command, str(REPOSITORY / script), *args]], [env or {}], timeout, check)


def _enter(fn: Callable[..., Any], rank: int, world_size: int, folder: str, seconds: float, args: tuple[Any, ...]) -> None:
    """Body of a spawned rank: join the group, call `fn`, leave the result or the traceback in a file of its own."""
    import torch
    import torch.distributed as dist

    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)})
    os.environ.update({"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "127.0.0.1"})
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size, timeout=timedelta(seconds=seconds)
        )
        result = fn(rank, world_size, *args)
        Path(folder, f"{rank}.result").write_bytes(pickle.dumps(result))
        gc.collect()  # a device mesh that lives until the interpreter ends can abort it there
        if dist.is_initialized():
            dist.destroy_process_group()
    except BaseException:
        Path(folder, f"{rank}.error").write_text(traceback.format_exc())
        raise SystemExit(1) from None


def spawn_ranks(fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120) -> list[Any]:
    """Call `fn(rank, world_size, *args)` on `world_size` gloo ranks and return its results by rank.

    `fn` must be a function at the top of a module. A rank that fails or hangs makes an AssertionError that shows the
    traceback of every rank that has one.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_enter, args=(fn, rank, world_size, folder, timeout, args), daemon=True) for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        end = time.monotonic() + timeout
        while any(p.is_alive() for p in ranks) and time.monotonic() < end:
            if any(p.exitcode not in (None, 0) for p in ranks):
                end = min(end, time.monotonic() + 10)
            time.sleep(0.02)
        late = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for process in ranks:
            process.kill()
            process.join()
        errors = {int(path.stem): path.read_text() for path in sorted(Path(folder).glob("*.error"))}
        codes = [process.exitcode for process in ranks]
        if late or any(codes):
            shown = "\n".join(f"===== rank {rank} =====\n{text}" for rank, text in errors.items())
            raise AssertionError(f"{fn.__name__}: exit codes {codes}, stopped while still running: {late}\n{shown}")
        return [pickle.loads(Path(folder, f"{rank}.result").read_bytes()) for rank in range(world_size)]
