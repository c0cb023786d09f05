"""What a run says while it goes: `metrics.jsonl`, one aligned line on the console, and trackers such as TensorBoard."""

import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker, WandBTracker
from safetensors import SafetensorError

from pipeline.config.schema import Config
from pipeline.config.training import ExpManagerSection
from pipeline.errors import ConfigError, DiskError
from pipeline.runtime.files import atomic_file
from pipeline.train.feed import bound_by_reading

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


def settle_monitors(config: Config, own_answers: bool | None) -> Config:
    """`config` with the metrics that checkpoints are chosen and training is stopped by, in place of auto; as it is where nothing validates
    (`own_answers` None)."""
    if own_answers is None:
        return config
    judges = {name: getattr(config.exp_manager, name).settled(own_answers) for name in ("checkpoint_callback_params", "early_stopping")}
    return config.model_copy(update={"exp_manager": config.exp_manager.model_copy(update=judges)})


def check_monitors(config: Config, sets: Mapping[str, bool]) -> None:
    """Raise `ConfigError` when early stopping is to judge by a metric that no validation will give, before hours went by; warn when
    checkpoints are to be chosen by one. `sets` says of each validation set whether any of its samples has a usable anchor."""
    keep, early = config.exp_manager.checkpoint_callback_params, config.exp_manager.early_stopping
    if early.patience is not None and (reason := never_given(early.monitor, config, sets)):
        raise ConfigError(f"exp_manager.early_stopping.patience is set, and its monitor is {early.monitor}: {reason}")
    if keep.monitor != "auto" and keep.save_top_k and (reason := never_given(keep.monitor, config, sets)):
        log.warning("no checkpoint is kept for being the best: its monitor is %s, and %s", keep.monitor, reason)


def never_given(monitor: str, config: Config, sets: Mapping[str, bool]) -> str | None:
    """Why no validation will give the metric `monitor`; None where one will. `sets` as in `check_monitors`."""
    if not sets:
        return "there is no validation set to judge by; set data.validation_ds."
    if monitor.startswith("val/") and monitor.split("/")[1] not in sets:
        return f"there is no such validation set, only {', '.join(sorted(sets))}."
    if monitor == "val_served_accept_len" and not config.trainer.val_decode_prompts:
        return "trainer.val_decode_prompts is 0, so nothing is decoded; set it."
    judged: Iterable[bool] = [sets[monitor.split("/")[1]]] if monitor.startswith("val/") else sets.values()
    if not any(judged) and not monitor.endswith(("walk_accept_len", "served_accept_len")):
        return "none of its samples has a usable anchor (model.draft.block_size, model.objective.anchor_fit)."
    return None


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
        try:
            tracker.start()
            if tracker.name != "tensorboard":
                tracker.store_init_configuration(config.model_dump(mode="json"))
        except Exception as error:  # a key that is missing, a server that does not answer, an argument that it does not know
            raise ConfigError(
                f"exp_manager.create_{tracker.name}_logger is true, and {tracker.name} does not start: {type(error).__name__}: {error}. "
                f"Mend that, or set it to false{'; wandb needs no server with WANDB_MODE=offline' if tracker.name == 'wandb' else ''}."
            ) from error
    return trackers


@contextmanager
def to_disk(path: Path) -> Iterator[None]:
    """Raises `DiskError` when the disk does not take what is written to `path` inside."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise DiskError(
            f"{path} cannot be written: {error}. Free space or mend that disk, then run the same command again: it goes on "
            "from the newest checkpoint."
        ) from error


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
        """Append one line; a killed run loses none that it had written. Raises `DiskError` when the disk does not take it."""
        with to_disk(self._path), open(self._path, "a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, **metrics}) + "\n")
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


class Waited(Protocol):
    """What is read ahead; `waited_seconds` sums the time that the caller waited for it."""

    waited_seconds: float


class Clock:
    """Wall time, time spent waiting for data, and tokens trained on since it was last read; what runs inside `paused` does not count.

    `tokens_seen` are those of before, by the run that this one goes on from too: its time is not known here.
    """

    def __init__(self, feed: Waited, tokens_seen: int) -> None:
        self._tokens_seen = tokens_seen
        self._feed, self._advised = feed, False
        self._total: tuple[float, float] | None = None  # without the first reading: it waits for the first batch, and for much besides
        self._seconds = self._waited = 0.0
        self._begin()

    def read(self, tokens_seen: int) -> tuple[float, float, int]:
        """Seconds, of them those spent waiting, and tokens, of which `tokens_seen` are seen now; begins anew."""
        self._end()
        tokens, self._tokens_seen = tokens_seen - self._tokens_seen, tokens_seen
        read = self._seconds, self._waited
        self._seconds = self._waited = 0.0
        self._total = (0.0, 0.0) if self._total is None else (self._total[0] + read[0], self._total[1] + read[1])
        self._begin()
        return *read, tokens

    def advice(self, num_workers: int) -> str | None:
        """What is to be said of the time spent waiting, once in a run."""
        seconds, waited = self._total or (0.0, 0.0)
        said = None if self._advised else bound_by_reading(waited, seconds, num_workers)
        self._advised = said is not None or self._advised
        return said

    @contextmanager
    def paused(self) -> Iterator[None]:
        self._end()
        yield
        self._begin()

    @contextmanager
    def running(self) -> Iterator[None]:
        """For a training that takes turns with others: what runs outside does not count."""
        self._begin()
        yield
        self._end()

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
