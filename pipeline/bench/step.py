"""Time and memory of one training step of a draft, forward and backward: `stages/bench.py step`.

Every measurement is a process of its own, started from this one, which stays small and imports no torch: a peak of memory is then that of
the step. With an opponent its processes and ours take turns, so that a ratio is one of the same minutes. The floor is the time of
the matrix products alone that such a step cannot do without (workload.py), measured last.
"""

import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pipeline.bench.timing import CLOCKS, Clock, median_of
from pipeline.errors import BenchError
from pipeline.report.tables import table

PEERS = {"nemo-automodel": "automodel", "specforge": "specforge"}
"""Opponents, and what the script that times them calls them."""

FP32 = "fp32"
"""The opponent that is this step itself, in fp32."""


@dataclass(frozen=True, slots=True)
class StepSettings:
    """One sample of `seq` tokens with `anchors` blocks of `block` slots, all of them supervised; five target layers are read. Geometry not
    named is that of the script that times the peers."""

    seq: int = 2048
    anchors: int = 256
    block: int = 16
    layers: int = 3
    hidden: int = 576
    vocab: int = 49152
    dtype: Literal["fp32", "bf16-mixed"] = "fp32"
    heads: int = 9
    kv_heads: int = 3
    head_dim: int = 64
    intermediate: int = 0
    threads: int = 2
    clock: Clock = "wall"
    device: Literal["cpu", "cuda"] = "cpu"

    @property
    def mlp_width(self) -> int:
        return self.intermediate or self.hidden * 8 // 3 // 64 * 64

    @property
    def supervised_slots(self) -> int:
        return self.anchors * (self.block - 1)


@dataclass(frozen=True, slots=True)
class Peer:
    """An opponent: its name, the script that times it (`FP32` has none), and the folder of its packages, where it is not installed."""

    name: str
    script: Path | None = None
    packages: Path | None = None


def bench_step(settings: StepSettings, rounds: int, peer: Peer | None = None) -> dict[str, Any]:
    """Median and range of `rounds` timed steps, each the second one of its process.

    Raises `BenchError` where a process fails, or the peer cannot be timed on this work.
    """
    if peer is not None:
        _check_peer(peer, settings)
    ours, theirs = [], []
    for _ in range(rounds):
        ours.append(_run_ours("step", settings))
        if peer is not None:
            theirs.append(_run_peer(peer, settings))
    floor = _run_ours("floor", settings)["seconds"]
    found: dict[str, Any] = {
        "settings": {**asdict(settings), "intermediate": settings.mlp_width, "rounds": rounds},
        **_summary(ours),
        "blocks": settings.anchors,
        "supervised_slots": settings.supervised_slots,
        "floor_seconds": floor,
    }
    found["seconds_per_floor"] = found["seconds"] / floor
    if peer is not None:
        found["peer"] = {"name": peer.name, **_summary(theirs)}
        found["speedup"] = found["peer"]["seconds"] / found["seconds"]
        found["peak_share"] = found["peak_mib"] / found["peer"]["peak_mib"]
    return found


def as_text(found: Mapping[str, Any]) -> str:
    """The same as a table."""
    settings = found["settings"]
    rows: list[Sequence[object]] = [_row("this step", found), ["products alone", found["floor_seconds"], "", "", "", ""]]
    if "peer" in found:
        rows.append(_row(found["peer"]["name"], found["peer"]))
        rows.append(["this step, times as fast", found["speedup"], "", "", round(found["peak_share"], 3), ""])
    shape = " ".join(f"{name} {settings[name]}" for name in ("seq", "anchors", "block", "layers", "hidden", "vocab", "dtype", "threads"))
    shown = table(("", "seconds", "least", "most", "peak MiB", "loss"), rows)
    return f"{shape}; {CLOCKS[settings['clock']]}\n\n{shown}\n\n{found['seconds_per_floor']:.2f} times the products alone"


def _row(name: str, found: Mapping[str, Any]) -> list[object]:
    return [name, found["seconds"], *found["seconds_range"], found["peak_mib"], round(found["loss"], 4)]


def _summary(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    return {
        **median_of("seconds", [run["seconds"] for run in runs]),
        "peak_mib": round(statistics.median(run["peak_mib"] for run in runs)),
        "loss": runs[0]["loss"],
    }


def _run_ours(what: Literal["step", "floor"], settings: StepSettings) -> dict[str, float]:
    printed = _run([sys.executable, "-m", "pipeline.bench.step_process", what, json.dumps(asdict(settings))], settings, None)
    found: dict[str, float] = json.loads(printed.splitlines()[-1])
    return found


def _check_peer(peer: Peer, settings: StepSettings) -> None:
    if peer.name == FP32:
        if peer.script is not None or peer.packages is not None:
            raise BenchError("fp32 is this step itself; leave --peer-script and --peer-packages out.")
        if settings.dtype == "fp32":
            raise BenchError("this step is in fp32 itself; to compare them, add --dtype bf16-mixed.")
        return
    if peer.script is None:
        raise BenchError(f"what times {peer.name} was not named; add --peer-script FILE.")
    if settings.dtype != "fp32":
        raise BenchError(f"{peer.name} is timed in fp32 only; leave --peer or --dtype {settings.dtype} out.")
    geometry = StepSettings(hidden=settings.hidden)
    if (settings.heads, settings.kv_heads, settings.head_dim) != (9, 3, 64) or settings.mlp_width != geometry.mlp_width:
        raise BenchError(f"{peer.name} is timed with 9 heads, 3 KV heads and 64 channels a head only; leave these options out.")


# The script asks for two threads and for clock time. What was asked for here is put in their place.
_PEER_PROGRAM = """
import runpy, sys, time, torch
threads, clock, *sys.argv = sys.argv[1:]
torch.set_num_threads(int(threads))
torch.set_num_threads = lambda count: None
if clock == "cpu":
    time.perf_counter = time.process_time
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def _run_peer(peer: Peer, settings: StepSettings) -> dict[str, float]:
    """One timed step: the second, as of ours."""
    if peer.name == FP32:
        return _run_ours("step", replace(settings, dtype="fp32"))
    shape = (settings.seq, settings.anchors, settings.block, settings.layers, settings.hidden, settings.vocab, 1)
    head = [sys.executable, "-c", _PEER_PROGRAM, str(settings.threads), settings.clock, str(peer.script), PEERS[peer.name]]
    printed = _run([*head, *map(str, shape)], settings, peer.packages)
    match = re.search(r"([\d.]+) s/step, peak (\d+) MiB, loss ([\d.]+)", printed)
    if match is None:
        raise BenchError(f"{peer.script} printed no time for {peer.name}:\n{printed[-500:]}")
    return {"seconds": float(match[1]), "peak_mib": float(match[2]), "loss": float(match[3])}


def _run(command: Sequence[str], settings: StepSettings, packages: Path | None) -> str:
    """What it prints. Children find our package where this process does."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [*([str(packages)] if packages else []), root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(settings.threads)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchError(
            f"a process that was to be timed ended with code {done.returncode}: {' '.join(command[1:4])}\n{done.stderr[-2000:]}"
        )
    return done.stdout
