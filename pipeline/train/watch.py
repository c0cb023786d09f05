"""What a run says while it goes: `metrics.jsonl`, one aligned line on the console, and trackers such as TensorBoard."""

import json
import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker, WandBTracker

from pipeline.config.schema import Config
from pipeline.config.training import ExpManagerSection
from pipeline.errors import ConfigError, TrainingError
from pipeline.runtime.files import atomic_file
from pipeline.train.feed import Feed

log = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
PROJECT = "dflash"
TRACKERS = ("tensorboard", "wandb", "trackio")


def check_trackers(section: ExpManagerSection) -> None:
    """Raise `ConfigError` for a tracker that is asked for and not installed."""
    missing = [name for name in TRACKERS if getattr(section, f"create_{name}_logger") and find_spec(name) is None]
    if missing:
        fields = ", ".join(f"exp_manager.create_{name}_logger" for name in missing)
        raise ConfigError(f"{fields}: true, and {', '.join(missing)} is not installed: pip install {' '.join(missing)}.")


def start_trackers(config: Config, folder: Path) -> list[GeneralTracker]:
    """The trackers that `config` asks for, writing below `folder` where they write files."""
    section = config.exp_manager
    trackers: list[GeneralTracker] = []
    if section.create_tensorboard_logger:
        trackers.append(TensorBoardTracker(config.name, folder / "tensorboard"))
    if section.create_wandb_logger:
        wanted = {"project": PROJECT, "name": config.name, "dir": str(folder), **section.wandb_logger_kwargs}
        trackers.append(WandBTracker(wanted.pop("project"), **wanted))
    if section.create_trackio_logger:
        trackers.append(TrackioTracker(PROJECT, name=config.name))
    for tracker in trackers:
        tracker.start()
    if section.create_wandb_logger or section.create_trackio_logger:
        for tracker in trackers[section.create_tensorboard_logger :]:
            tracker.store_init_configuration(config.model_dump(mode="json"))
    return trackers


class Watch:
    """Writes lines of metrics into LOG_DIR and to the trackers. Only for the first rank: on others nothing is opened."""

    def __init__(self, config: Config, folder: Path, num_steps: int, enabled: bool) -> None:
        self._path, self._num_steps = folder / METRICS, num_steps
        self._trackers = start_trackers(config, folder) if enabled else []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for tracker in self._trackers:
            tracker.finish()

    def record(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line; a killed run loses none that it had written. Raises `TrainingError` when the disk does not take it."""
        try:
            with open(self._path, "a", encoding="utf-8") as stream:
                stream.write(json.dumps({"step": step, **metrics}) + "\n")
        except OSError as error:
            raise TrainingError(
                f"{self._path} cannot be written: {error}. Free space or mend that disk, then run the same command again: it goes on "
                "from the newest checkpoint."
            ) from error
        figures = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        for tracker in self._trackers:
            tracker.log(figures, step=step)

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
        names = ("val_loss", "val_accept_len", "val_walk_accept_len", "val_served_accept_len", "val_accuracy")
        width = len(str(self._num_steps))
        found = "  ".join(f"{name} {metrics[name]:.4f}" for name in names if name in metrics)
        log.info("step %*d/%d  %s", width, step, self._num_steps, found or "nothing to validate on")


class Clock:
    """Wall time, and time spent waiting for data, since it was last read; what runs inside `paused` does not count. `reads` counts."""

    def __init__(self, feed: Feed) -> None:
        self.reads = 0
        self._feed = feed
        self._seconds = self._waited = 0.0
        self._begin()

    def read(self) -> tuple[float, float]:
        """Seconds, and of them those spent waiting; begins anew."""
        self._end()
        read = self._seconds, self._waited
        self._seconds = self._waited = 0.0
        self.reads += 1
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
