"""Hybrid mode: the first epoch captures what it trains on, so that no stage has to run before it; later epochs read the cache.

The cache is the one that capture writes, to the byte: the same shards by the same code, a window of `data.hybrid_shards` at a time and
always before the first batch that needs one. Training reads states from committed shards only, never the target's own, so its numbers are
those of a run on the complete cache in the same order, whatever was captured before a run was stopped. That order is a function of seed
and corpus like any other: the first epoch takes one window after the other, shuffled inside, and every later epoch is the usual one.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.cache.bundle import load_bundle
from pipeline.cache.commit import complete
from pipeline.cache.layout import MARKER, shard_folder, target_folder
from pipeline.cache.reader import Cache
from pipeline.capture.run import capture_some, check_disk, open_target, planned
from pipeline.capture.shards import Work
from pipeline.config.schema import Config
from pipeline.draft.config import DraftConfig
from pipeline.errors import ConfigError
from pipeline.records import CapturedSample
from pipeline.runtime.files import wait_for
from pipeline.runtime.ranks import Ranks
from pipeline.target.folder import read_config
from pipeline.target.load import DTYPES, Target
from pipeline.train.data import TrainingData
from pipeline.train.live import corpus_fields, live_source

WINDOWS_OPEN = 3
"""Windows whose files are kept open: the one that is trained on, and those before and after it that threads may still read."""


@contextmanager
def open_hybrid(config: Config, ranks: Ranks) -> Iterator[TrainingData]:
    """The samples of the corpus, captured as training needs them, for as long as the block runs. Every rank must call it.

    Raises `ConfigError` for an objective that needs the final hidden state where `capture.final` does not keep it.
    """
    if config.model.objective.needs_final and not config.capture.final:
        raise ConfigError(
            f"model.objective.name is {config.model.objective.name}, which needs the final hidden state: set capture.final=true."
        )
    with planned(config, ranks, may_end_early=True) as (work, needs_target):
        draft = config.model.draft
        text: Any = read_config(config.model.target).get_text_config(decoder=True)
        order, fields = corpus_fields(config, work.corpus, text.vocab_size)
        states = _States(config, work, order)
        if needs_target:
            states.open_target()
        bundle = load_bundle(target_folder(work.cache))
        layer_ids = draft.target_layer_ids or work.manifest.layer_ids
        DraftConfig.build(draft, bundle, layer_ids, fields["special_ids"])  # an error in it comes before the first window
        yield TrainingData(
            source=states.read,
            any_thread=True,
            bundle=bundle,
            layer_ids=layer_ids,
            dtype=DTYPES[work.manifest.dtype],
            identity={"mode": "hybrid", "cache": work.manifest.digest([]), "hybrid_shards": config.data.hybrid_shards},
            states_identity=work.manifest.states_identity,
            windows=states.windows,
            ready=states.ready,
            live=states.live,
            **fields,
        )


@dataclass(frozen=True, eq=False, slots=True)
class _Part:
    """Some samples by number: `numbers` int64 [n], ascending, and the place of each in `cache`."""

    cache: Cache
    numbers: NDArray[np.int64]
    places: NDArray[np.int64]

    @classmethod
    def of(cls, cache: Cache, numbers: NDArray[np.int64]) -> "_Part":
        """Numbers ascend with ids, so the same order of both brings them together."""
        places = np.argsort(cache.index.sample_id, kind="stable")
        assert len(places) == len(numbers)
        return cls(cache, numbers, places)

    def read(self, number: int, layer_ids: Sequence[int], final: bool) -> CapturedSample:
        place = self.places[np.searchsorted(self.numbers, number)]
        return self.cache.read(int(place), layer_ids, final, dequantise=False)


class _States:
    """Hidden states of samples by number: captured when they are first needed, then read. `windows` int64 [n], of every sample."""

    def __init__(self, config: Config, work: Work, order: NDArray[np.int64]) -> None:
        self._config, self._work, self._order = config, work, order
        self._layer_ids = config.model.draft.target_layer_ids or work.manifest.layer_ids
        self._pending = set(work.pending)
        self._target: Target | None = None
        self._lock = Lock()
        self._windows: OrderedDict[int, _Part] = OrderedDict()
        self._whole: _Part | None = None
        self._later_calls = 0
        shard = np.empty(len(order), dtype=np.int64)
        for number, rows in enumerate(work.shards):
            shard[np.asarray(rows)] = number
        self.windows = shard[order] // config.data.hybrid_shards

    def open_target(self) -> Target:
        """Loaded when it is first needed; every rank must call it."""
        if self._target is None:
            self._target = open_target(self._config, self._work)
            if self._pending:
                check_disk(self._work, self._target)
        return self._target

    def ready(self, epoch: int, numbers: Sequence[int]) -> None:
        """In the first epoch, capture up to the last window that the samples `numbers` are in; after it, all that is missing.

        Every rank must call it with the same arguments and at the same place between its steps.
        """
        last = max((int(self.windows[number]) for number in numbers), default=-1) if epoch == 0 else int(self.windows.max())
        for window in range(last + 1):
            self._capture([shard for shard in self._shards(window) if shard in self._pending])
        if epoch == 0:
            self.open_target()  # validations need it, whatever is captured
            return
        if self._whole is None:
            self._finish()
        # Batches are asked for ahead of the step that they are for, which may still be one of the first epoch.
        self._later_calls += 1
        if self._later_calls > 2 * self._config.data.num_workers + 1:
            self._target = None

    def read(self, numbers: Sequence[int]) -> list[CapturedSample]:
        """From committed shards; safe from several threads."""
        final = self._config.model.objective.needs_final
        return [(self._whole or self._window(int(self.windows[n]))).read(n, self._layer_ids, final) for n in numbers]

    def live(self, numbers: Sequence[int]) -> list[CapturedSample]:
        """By a forward of the target, as online mode has them."""
        corpus, order = self._work.corpus, self._order
        source = live_source(self.open_target(), lambda number: corpus.sample(int(order[number])), self._config.capture.batch_tokens)
        return source(numbers)

    def _shards(self, window: int) -> range:
        size = self._config.data.hybrid_shards
        return range(window * size, min((window + 1) * size, self._work.manifest.num_shards))

    def _capture(self, shards: Sequence[int]) -> None:
        if not shards:
            return
        work, target = self._work, self.open_target()
        raw_missing = work.raw_missing * sum(map(work.num_tokens, shards)) // sum(map(work.num_tokens, work.pending))
        capture_some(replace(work, raw_missing=raw_missing), target, shards, f"capturing shards {shards[0]} to {shards[-1]}")
        for shard in shards:  # other groups capture some of them
            wait_for(shard_folder(work.cache, shard) / MARKER, f"shard {shard}", work.launch.check)
        self._pending -= set(shards)

    def _window(self, window: int) -> _Part:
        """A window's shards, opened; those used last stay open."""
        with self._lock:
            if window not in self._windows:
                cache = Cache.open_shards(self._work.cache, self._shards(window))
                self._windows[window] = _Part.of(cache, np.flatnonzero(self.windows == window))
            self._windows.move_to_end(window)
            if len(self._windows) > WINDOWS_OPEN:
                self._windows.popitem(last=False)
            return self._windows[window]

    def _finish(self) -> None:
        """From here on the cache is complete, and is read as one."""
        work = self._work
        if work.ranks.is_main:
            complete(work.cache)
            work.launch.tell("complete", True)
        work.launch.hear("complete", "the index of the cache")
        self._whole = _Part.of(Cache.open(work.cache, self._layer_ids), np.arange(len(self.windows)))
        with self._lock:
            self._windows.clear()
