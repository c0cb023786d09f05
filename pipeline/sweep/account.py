"""What one reading for several drafts took: LOG_DIR/groups/*.json, one file a group and process."""

import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.runtime.files import write_json
from pipeline.sweep.reading import SharedReading

FOLDER = "groups"
EVERY_SECONDS = 20.0


@dataclass(eq=False)
class Account:
    """Written every so often, so that a kill loses little of it; at the end by `write`.

    seconds: wall time; read_seconds: in reading and unpacking, all threads together; waited_seconds: for readings that were not there
    yet; own_seconds: by trial, its steps and validations; bytes_read: packed; tokens_fed: by trial, what it trained on and
    was validated with.
    """

    folder: Path
    trials: Sequence[int]
    reading: SharedReading
    steps: int = 0
    fed: dict[int, int] = field(default_factory=dict)
    begun: float = field(default_factory=time.time)
    _start: float = field(default_factory=time.perf_counter)
    _written: float = field(default_factory=time.perf_counter)

    def feed(self, trials: Sequence[int], tokens: int) -> None:
        for number in trials:
            self.fed[number] = self.fed.get(number, 0) + tokens

    def note(self, waited_seconds: float, own_seconds: Mapping[int, float]) -> None:
        """One more step of the group."""
        self.steps += 1
        if time.perf_counter() - self._written > EVERY_SECONDS:
            self.write(waited_seconds, own_seconds)

    def write(self, waited_seconds: float, own_seconds: Mapping[int, float]) -> None:
        self._written = time.perf_counter()
        (self.folder / FOLDER).mkdir(parents=True, exist_ok=True)
        name = f"{time.strftime('%Y%m%dT%H%M%S', time.gmtime(self.begun))}-{socket.gethostname()}-{os.getpid()}-{self.trials[0]:04d}.json"
        write_json(
            self.folder / FOLDER / name,
            {
                "trials": list(self.trials),
                "layer_ids": list(self.reading.layer_ids),
                "final": self.reading.final,
                "steps": self.steps,
                "seconds": self._written - self._start,
                "read_seconds": self.reading.seconds,
                "waited_seconds": waited_seconds,
                "own_seconds": {str(number): seconds for number, seconds in own_seconds.items()},
                "tokens_fed": {str(number): tokens for number, tokens in self.fed.items()},
                "tokens_read": self.reading.tokens,
                "bytes_read": self.reading.bytes_read,
            },
        )
