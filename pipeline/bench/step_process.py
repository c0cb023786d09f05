"""One measurement in a process of its own; `python -m pipeline.bench.step_process step|floor SETTINGS` prints one JSON object."""

import json
import resource
import sys

import torch

from pipeline.bench.step import StepSettings
from pipeline.bench.workload import build, floor_seconds, now


def measure_step(settings: StepSettings) -> dict[str, float]:
    """Of the second step; the first one warms up. Peak memory is that of the whole process, in MiB."""
    work = build(settings)
    for _ in range(2):
        work.draft.zero_grad(set_to_none=True)
        begin = now(settings)
        loss = work.step()
        seconds = now(settings) - begin
    return {"seconds": seconds, "loss": loss, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main(what: str, settings: StepSettings) -> None:
    torch.set_num_threads(settings.threads)
    if what == "step":
        found = measure_step(settings)
    else:
        parts = floor_seconds(settings)
        found = {"seconds": sum(parts.values()), **parts}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], StepSettings(**json.loads(sys.argv[2])))
