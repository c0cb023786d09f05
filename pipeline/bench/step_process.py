"""One measurement in a process of its own; `python -m pipeline.bench.step_process step|floor SETTINGS` prints one JSON object."""

import json
import resource
import sys
from pathlib import Path

import torch

from pipeline.bench.step import StepSettings
from pipeline.bench.workload import build, floor_seconds, now
from pipeline.runtime.heap import keep_freed_memory


def measure_step(settings: StepSettings) -> dict[str, float]:
    """Of the second step; the first one warms up. Peak memory is that of the whole process, in MiB."""
    work = build(settings)
    for _ in range(2):
        work.draft.zero_grad(set_to_none=True)
        begin = now(settings)
        loss = work.step()
        seconds = now(settings) - begin
    return {"seconds": seconds, "loss": loss, "peak_mib": peak_mib()}


def peak_mib() -> float:
    """Most memory that this process had: its own mark where there is one, for Linux hands `ru_maxrss` on from the process before."""
    status = Path("/proc/self/status")
    marks = [line.split()[1] for line in status.read_text().splitlines() if line.startswith("VmHWM:")] if status.exists() else []
    return int(marks[0] if marks else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) / 1024


def main(what: str, settings: StepSettings) -> None:
    torch.set_num_threads(settings.threads)
    keep_freed_memory()  # as every rank does
    if what == "step":
        found = measure_step(settings)
    else:
        parts = floor_seconds(settings)
        found = {"seconds": sum(parts.values()), **parts}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], StepSettings(**json.loads(sys.argv[2])))
