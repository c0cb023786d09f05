"""Log lines of one form, a file for each rank, and a progress bar that does not get in their way."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from pipeline.errors import ConfigError

BAR_SECONDS = 0.2
LINE_SECONDS = 10.0

_label: ContextVar[str] = ContextVar("label", default="")
_ours: list[logging.Handler] = []
_bars: list["Progress"] = []


def setup_logs(rank: int, folder: Path | None) -> None:
    """Log everything from INFO on to `FOLDER/rank{rank}.log` (appended), and on rank 0 to stderr as well.

    May be called again, when the folder is known; the earlier handlers are then replaced. Raises `ConfigError` for a folder
    that cannot be made or written.
    """
    while _ours:
        handler = _ours.pop()
        logging.getLogger().removeHandler(handler)
        handler.close()
    formatter = logging.Formatter(f"%(asctime)s %(levelname).1s r{rank} %(name)s: %(label)s%(message)s", datefmt="%Y-%m-%d %H:%M:%S")
    if rank == 0:
        _ours.append(_Console())
    if folder is not None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _ours.append(logging.FileHandler(folder / f"rank{rank}.log", encoding="utf-8"))
        except OSError as error:
            raise ConfigError(f"the folder of the run cannot be written: {error}. Name another in exp_manager.explicit_log_dir.") from error
    for handler in _ours:
        handler.setFormatter(formatter)
        handler.addFilter(_with_label)
        logging.getLogger().addHandler(handler)
    logging.getLogger("pipeline").setLevel(logging.INFO)


@contextmanager
def labelled(label: str) -> Iterator[None]:
    """What this thread logs begins with `label`: for several runs in one process."""
    token = _label.set(f"{label}: ")
    try:
        yield
    finally:
        _label.reset(token)


def _with_label(record: logging.LogRecord) -> bool:
    record.label = _label.get()
    return True


def log_to_file(message: str, *, with_traceback: bool = False) -> None:
    """Put an error into this rank's file only: the console shows it by other means."""
    record = logging.LogRecord("pipeline", logging.ERROR, "", 0, message, None, sys.exc_info() if with_traceback else None)
    for handler in _ours:
        if isinstance(handler, logging.FileHandler):
            handler.handle(record)


class Progress:
    """How far a loop has come, with rate and time left: a bar on a terminal, else one plain line at most every 10 s.

    `total` and `advance` count in `unit`; `done` is what an earlier run did already, which the rate leaves out. Nothing is
    shown unless `enabled` (rank 0, as a rule). The stream is stderr at the time of entry.
    """

    def __init__(
        self, total: int, unit: str, label: str, enabled: bool, *, done: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total, self.unit, self.label, self.enabled = total, unit, label, enabled
        self.done, self._first_done, self._clock = done, done, clock
        self.note = ""
        self._start = self._shown = 0.0
        self._stream: TextIO = sys.stderr
        self._is_bar = False

    def __enter__(self) -> Self:
        self._stream = sys.stderr
        self._is_bar = self._stream.isatty()
        self._start = self._shown = self._clock()
        if self.enabled and self._is_bar:
            _bars.append(self)
            self.redraw()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if not self.enabled:
            return
        if self in _bars:
            self.erase()
            _bars.remove(self)
        self._stream.write(f"{self.line()}{' (stopped)' if kind else ''}\n")
        self._stream.flush()

    def advance(self, count: int, note: str | None = None) -> None:
        """Count `count` more; `note`, when given, is shown behind the figures from now on (a loss, say)."""
        self.done += count
        self.note = self.note if note is None else note
        now = self._clock()
        if self.enabled and now - self._shown >= (BAR_SECONDS if self._is_bar else LINE_SECONDS):
            self._shown = now
            if self._is_bar:
                self.redraw()
            else:
                self._stream.write(self.line() + "\n")
                self._stream.flush()

    def line(self) -> str:
        """`label  42% 1.2M/2.8M tokens, 5.3k tokens/s, 4:12 left`"""
        elapsed = self._clock() - self._start
        rate = (self.done - self._first_done) / elapsed if elapsed > 0 else 0.0
        share = self.done / self.total if self.total else 1.0
        parts = [f"{self.label} {share:4.0%} {_short(self.done)}/{_short(self.total)} {self.unit}"]
        if rate > 0:
            parts.append(f"{_short(rate)} {self.unit}/s")
            left = self.total - self.done
            parts.append(f"{_clock_time(left / rate)} left" if left > 0 else f"{_clock_time(elapsed)} in all")
        return ", ".join(parts + [self.note] * bool(self.note))

    def redraw(self) -> None:
        filled = round(20 * min(1.0, self.done / self.total if self.total else 1.0))
        self._stream.write(f"\r\x1b[K[{'#' * filled}{'.' * (20 - filled)}] {self.line()}")
        self._stream.flush()

    def erase(self) -> None:
        self._stream.write("\r\x1b[K")


class _Console(logging.StreamHandler[TextIO]):
    """Lines go above the bar."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def emit(self, record: logging.LogRecord) -> None:
        for bar in _bars[-1:]:
            bar.erase()
        super().emit(record)
        for bar in _bars[-1:]:
            bar.redraw()


def _short(number: float) -> str:
    """Three digits at most before k, M, G or T: 999, 1.23k, 45.6M."""
    for suffix in ("", "k", "M", "G", "T"):
        if abs(number) < 999.5 or suffix == "T":
            break
        number /= 1000
    return f"{number:.3g}{suffix}"


def _clock_time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
