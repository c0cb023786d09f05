"""One read for several drafts: caches that are open once in this process, and samples that are read, unpacked and moved once."""

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from pipeline.config.schema import Config
from pipeline.records import CapturedSample
from pipeline.train.data import TRAIN, CachedSamples, TrainingData, open_cache
from pipeline.train.divide import Division, Rows, divide
from pipeline.train.feed import Reading, Source, read, read_ahead
from pipeline.train.order import GlobalBatch, Order, Position


class Readings:
    """Caches by what of a configuration names and checks them. `layers` are all that the sweep can need (None: all of a cache's)."""

    def __init__(self, layers: tuple[int, ...] | None) -> None:
        self._layers = layers
        self._open: dict[str, TrainingData] = {}

    def base(self, config: Config) -> TrainingData:
        """The data of `config` before any draft has a say. Raises `CacheError` for a cache that cannot be read or lacks a layer."""
        final = config.model.objective.needs_final
        key = _text([final, config.data.model_dump(mode="json"), config.model.target.model_dump(mode="json"), config.cache_path])
        if key not in self._open:
            draft = config.model.draft.model_copy(update={"target_layer_ids": self._layers})
            self._open[key] = open_cache(config.model_copy(update={"model": config.model.model_copy(update={"draft": draft})}))
        return self._open[key]

    def of(self, config: Config) -> TrainingData:
        """The data as the draft of `config` sees it: its own layers, and the samples that its block size leaves a usable anchor."""
        base, draft = self.base(config), config.model.draft
        cached = _cached(base)
        return replace(
            base,
            layer_ids=draft.target_layer_ids or cached.cache.manifest.layer_ids,
            usable=cached.usable(draft, config.model.objective.anchor_fit),
            usable_partial=cached.usable(draft, "partial"),
        )

    def key(self, config: Config) -> str:
        """Equal for configurations whose runs, each alone, would read the same samples in the same order and micro-batches.

        Block size and anchors are in it only as far as they leave out other samples.
        """
        data, trainer = self.of(config), config.trainer
        used = np.flatnonzero((data.split == TRAIN) & data.usable)
        return _text(
            [
                data.identity,
                config.data.model_dump(mode="json"),
                [trainer.seed, trainer.precision, trainer.accumulate_grad_batches, trainer.val_decode_prompts],
                [config.model.target.model_dump(mode="json"), config.evaluate.model_dump(mode="json")],
                hashlib.sha256(used.tobytes()).hexdigest(),
            ]
        )


class SharedReading:
    """`source` reads from `base` the layers (and the final hidden state) that several drafts need together, once for all of them, and
    counts what that took.

    Samples come from it unpacked, on `device`.
    """

    def __init__(self, base: TrainingData, layer_ids: tuple[int, ...], final: bool, device: torch.device) -> None:
        self.layer_ids, self.final, self._device = layer_ids, final, device
        self._cache = _cached(base).cache
        self._bytes_before = self._cache.bytes_read
        self._source = _cached(base).source(layer_ids, final)
        self._lock = threading.Lock()
        self.seconds = 0.0
        self.tokens = 0

    @property
    def bytes_read(self) -> int:
        return self._cache.bytes_read - self._bytes_before

    def source(self, numbers: Sequence[int]) -> list[CapturedSample]:
        begin = time.perf_counter()
        samples = [_ready(sample, self._device) for sample in self._source(numbers)]
        with self._lock:  # several threads read
            self.seconds += time.perf_counter() - begin
            self.tokens += sum(sample.tokens.num_tokens for sample in samples)
        return samples


@dataclass(eq=False)
class SharedFeed:
    """The readings of a group, step by step, read ahead by `num_workers` threads. `waited_seconds` sums the time that the caller waited."""

    source: Source
    order: Order
    division: Division
    num_workers: int
    waited_seconds: float = 0.0
    _next: Position | None = None
    _readings: Iterator[Reading] | None = None

    def step(self, position: Position) -> list[Reading]:
        """The readings of the global batch at `position`; those of the batch after it come quickest next."""
        begin = time.perf_counter()
        if self._readings is None or self._next != position:
            self.close()
            self._readings = read_ahead(lambda item: read(self.source, *item), self._wanted(position), self.num_workers)
        count = len(divide(self.order.global_batch(position).num_tokens, self.division)[0])
        readings = [next(self._readings) for _ in range(count)]
        self._next = self.order.after(position)
        self.waited_seconds += time.perf_counter() - begin
        return readings

    def close(self) -> None:
        """End the threads; what they had read is dropped."""
        if self._readings is not None:
            self._readings.close()  # type: ignore[attr-defined]  # a generator
            self._readings = None

    def _wanted(self, position: Position) -> Iterator[tuple[GlobalBatch, Rows]]:
        while True:
            batch = self.order.global_batch(position)
            for rows in divide(batch.num_tokens, self.division)[0]:
                yield batch, rows
            position = self.order.after(position)


def _ready(sample: CapturedSample, device: torch.device) -> CapturedSample:
    """The sample's states on `device`, those of a lossy cache unpacked there: every draft then takes its layers from the same tensors."""
    hidden = {layer: state.to(device, non_blocking=True) for layer, state in sample.hidden.items()}
    hidden |= {layer: packed.to(device).dequantise() for layer, packed in (sample.quantised or {}).items()}
    final = None if sample.final is None else sample.final.to(device, non_blocking=True)
    return replace(sample, hidden=hidden, final=final, quantised=None)


def _cached(data: TrainingData) -> CachedSamples:
    assert data.cached is not None  # a sweep reads caches only
    return data.cached


def _text(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)
