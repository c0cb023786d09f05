"""A timed probe of this target on this machine: how fast it is captured, and how fast a draft eats what was captured.

All groups measure at the same time, as they would work, on batches of the corpus's own samples. What is written goes into the
launch's folder, on the disk of the cache, and is removed.
"""

import math
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch

from pipeline.cache.layout import FINAL
from pipeline.cache.manifest import Manifest
from pipeline.cache.writer import ShardWriter
from pipeline.capture.shards import forward_ahead
from pipeline.capture.sizes import CODECS, ChunkBytes, measure_chunk
from pipeline.config.schema import Config, ObjectiveSection
from pipeline.corpus.plan import plan_batches
from pipeline.draft.anchors import draw_anchors, usable_anchors
from pipeline.draft.batch import BatchShape, collate
from pipeline.draft.loss import objective
from pipeline.draft.model import Draft, DraftConfig
from pipeline.records import CapturedSample, DraftBatch, TargetBundle, TokenSample
from pipeline.runtime.launch import Launch
from pipeline.runtime.ranks import Ranks
from pipeline.target.load import Target

PROBE_SECONDS = 12.0
FEWEST_TOKENS = 8192
"""However slow the target is, so that the sizes of packed states can be told from them."""
DRAFT_SAMPLES = 16
"""Samples on which a draft's speed is measured."""
STATES_BYTES = 1 << 30
"""Most that is kept of the probe's states to look at."""


@dataclass(frozen=True)
class Probe:
    """Tokens a second of one group: `forward` of the target alone, `captured` with packing and writing, `trained` by one draft on one rank,
    reading left out. `chunks`: by codec and array. `tokens` were forwarded."""

    forward: float
    captured: float
    trained: float
    tokens: int
    chunks: Mapping[str, Mapping[str, ChunkBytes]]


def measure(config: Config, target: Target, manifest: Manifest, samples: Sequence[TokenSample], launch: Launch, ranks: Ranks) -> Probe:
    """Forward and capture batches of `samples` for some seconds each; every rank calls this with the same samples."""
    batches = _spread(_batches(config, samples))
    begin = time.perf_counter()
    list(forward_ahead(target, batches[:1]))  # the first forward pays for kernels and memory
    begin = time.perf_counter()
    list(forward_ahead(target, batches[:1]))
    if ranks.tp_rank == 0:  # all ranks of a group must forward the same batches
        seconds = max(1e-4, time.perf_counter() - begin)
        tokens = np.cumsum([sum(sample.num_tokens for sample in batch) for batch in batches])
        fewest = int(np.searchsorted(tokens, FEWEST_TOKENS)) + 1
        launch.tell(f"batches-{ranks.dp_rank}", min(len(batches), max(fewest, int(PROBE_SECONDS / seconds))))
    batches = batches[: launch.hear(f"batches-{ranks.dp_rank}", "the size of the probe")]
    num_tokens = sum(sample.num_tokens for batch in batches for sample in batch)
    bytes_a_token = len(manifest.arrays) * manifest.hidden_size * manifest.spec(manifest.arrays[0]).item_bytes
    kept: list[CapturedSample] = []
    begin = time.perf_counter()
    for captured in forward_ahead(target, batches):
        if sum(sample.tokens.num_tokens for sample in kept) * bytes_a_token < STATES_BYTES:
            kept += captured
    forward = num_tokens / (time.perf_counter() - begin)
    begin = time.perf_counter()
    _write(target, manifest, batches, launch, ranks)
    written = num_tokens / (time.perf_counter() - begin)
    return Probe(forward, written, 0.0, num_tokens, _chunks(manifest, kept))


def time_draft(config: Config, target: Target, bundle: TargetBundle, samples: Sequence[TokenSample]) -> float:
    """Tokens a second of a draft's forward and backward, a sample at a time; 0 when no sample has a usable anchor.

    Every rank calls it with the same samples."""
    section = config.model.draft.model_copy(update={"mask_token_id": target.vocab_size - 1})
    geometry = DraftConfig.build(section, bundle, target.layer_ids, {})
    draft = Draft(geometry).to(target.device)
    mixed = config.trainer.precision == "bf16-mixed"
    moved = bundle.to(target.device, torch.bfloat16 if mixed else torch.float32)
    # Ranks of a group forward together: how many samples may depend on nothing that one rank alone knows, such as the time.
    captured = [one for batch in forward_ahead(target, [[sample] for sample in samples[:DRAFT_SAMPLES]]) for one in batch]
    tokens, seconds = 0, 0.0
    plain = config.model.objective.needs_final and not target.final  # nothing to distil from; cross-entropy takes about as long
    for batch in filter(None, [_draft_batch(config.model.objective, geometry, one) for one in captured]):
        begin = time.perf_counter()
        with torch.autocast(target.device.type, torch.bfloat16) if mixed else nullcontext():
            sums = objective(draft, moved, batch.to(target.device), ObjectiveSection() if plain else config.model.objective)
        torch.autograd.backward(sums.loss)
        float(sums.denominator)  # waits for the device
        if tokens or seconds:
            tokens += batch.input_ids.shape[1]
            seconds += time.perf_counter() - begin
        else:
            seconds = 1e-9  # the first step pays for kernels and memory
        if seconds > PROBE_SECONDS / 2:
            break
    return tokens / seconds if tokens else 0.0


def _draft_batch(section: ObjectiveSection, geometry: DraftConfig, captured: CapturedSample) -> DraftBatch | None:
    tokens = captured.tokens
    usable = usable_anchors(tokens.spans, tokens.num_tokens, geometry.block_size, section.anchor_fit, geometry.label_shift)
    if not len(usable):
        return None
    dtype = next(iter(captured.hidden.values())).dtype
    shape = BatchShape(geometry.target_layer_ids, geometry.block_size, geometry.hidden_size, dtype)
    return collate([captured], [draw_anchors(0, 0, tokens.sample_id, usable, section.num_anchors)], shape)


def _batches(config: Config, samples: Sequence[TokenSample]) -> list[list[TokenSample]]:
    """Batches as a shard would have them of samples from all over the corpus."""
    chosen = samples[:: max(1, math.ceil(sum(sample.num_tokens for sample in samples) / config.capture.shard_tokens))]
    lengths = np.array([sample.num_tokens for sample in chosen])
    return [[chosen[i] for i in batch] for batch in plan_batches(lengths, config.capture.batch_tokens)]


def _spread(batches: list[list[TokenSample]]) -> list[list[TokenSample]]:
    """The batches, which ascend in length, in an order of which any beginning is spread over all lengths."""
    places = sorted(range(len(batches)), key=lambda i: (i * 0.6180339887498949 + 0.5) % 1.0)
    return [batches[i] for i in places]


def _write(target: Target, manifest: Manifest, batches: Sequence[Sequence[TokenSample]], launch: Launch, ranks: Ranks) -> None:
    folder = launch.folder / f"probe-{ranks.rank}"  # not shared by a group: whoever is done first removes its own
    names = manifest.arrays[ranks.tp_rank :: ranks.tp_size]
    writer = ShardWriter(folder, 0, manifest, names, attempt=launch.token) if names else None
    try:
        for captured in forward_ahead(target, batches):
            for sample in captured:
                if writer is not None:
                    writer.append(sample)
        if writer is not None:
            writer.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _chunks(manifest: Manifest, captured: Sequence[CapturedSample]) -> dict[str, dict[str, ChunkBytes]]:
    found: dict[str, dict[str, ChunkBytes]] = {codec: {} for codec in CODECS}
    for name in manifest.arrays:
        states = [sample.final if name == FINAL else sample.hidden[int(name.removeprefix("layer_"))] for sample in captured]
        rows = torch.cat([state for state in states if state is not None])
        for codec in CODECS:
            found[codec][name] = measure_chunk(rows, manifest.model_copy(update={"codec": codec}).spec(name))
    return found
