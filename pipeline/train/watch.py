"""What a run says while it goes: `metrics.jsonl`, one aligned line on the console, and trackers such as TensorBoard."""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from pipeline.runtime.files import atomic_file
from pipeline.train.feed import Feed

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"


class Watch:
    """Writes lines of metrics into `folder` and to the accelerator's trackers. Only for the first rank."""

    def __init__(self, folder: Path, num_steps: int, accelerator: Accelerator) -> None:
        self._path, self._num_steps, self._accelerator = folder / METRICS, num_steps, accelerator

    def record(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line; a killed run loses none that it had written."""
        with open(self._path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, **metrics}) + "\n")
        if self._accelerator.trackers:
            self._accelerator.log({name: value for name, value in metrics.items() if isinstance(value, int | float)}, step=step)

    def train_line(self, step: int, metrics: Mapping[str, Any]) -> None:
        width = len(str(self._num_steps))
        log.info(
            "step %*d/%d  epoch %d  loss %7.4f  accept %5.3f  acc %5.3f  lr %.2e  grad %8.3f  %7.0f tokens/s  waiting %3.0f %%",
            width,
            step,
            self._num_steps,
            metrics["epoch"],
            metrics.get("loss", float("nan")),
            metrics.get("accept_len", float("nan")),
            metrics.get("accuracy", float("nan")),
            metrics["lr"],
            metrics["grad_norm"],
            metrics["tokens_per_second"],
            100 * metrics["data_wait_share"],
        )

    def validation_line(self, step: int, metrics: Mapping[str, Any]) -> None:
        names = ("val_loss", "val_accept_len", "val_walk_accept_len", "val_accuracy")
        width = len(str(self._num_steps))
        found = "  ".join(f"{name} {metrics[name]:.4f}" for name in names if name in metrics)
        log.info("step %*d/%d  %s", width, step, self._num_steps, found or "nothing to validate on")


class Clock:
    """Wall time, and time spent waiting for data, since it was last read; what runs inside `paused` does not count."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._seconds = self._waited = 0.0
        self._begin()

    def read(self) -> tuple[float, float]:
        """Seconds, and of them those spent waiting; begins anew."""
        self._end()
        read = self._seconds, self._waited
        self._seconds = self._waited = 0.0
        self._begin()
        return read

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._end()
        yield
        self._begin()

    def _begin(self) -> None:
        self._since, self._waited_before = time.perf_counter(), self._feed.waited_seconds

    def _end(self) -> None:
        self._seconds += time.perf_counter() - self._since
        self._waited += self._feed.waited_seconds - self._waited_before


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`, without a last one that a kill cut short."""
    path = folder / METRICS
    lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
    return [json.loads(line) for line in lines[:-1]]


def cut_metrics(folder: Path, step: int, validated: bool) -> None:
    """Take away what a stopped run wrote after the checkpoint at `step`, and of that step's validation unless the checkpoint has it
    (`validated`): the resumed run writes it again."""
    if not (folder / METRICS).exists():
        return
    kept = [r for r in read_metrics(folder) if r["step"] < step or (r["step"] == step and (validated or "lr" in r))]
    with atomic_file(folder / METRICS) as stream:
        stream.write("".join(json.dumps(record) + "\n" for record in kept).encode())
