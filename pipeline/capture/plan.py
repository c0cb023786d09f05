"""`stages/capture.py CONFIG --plan`: what a capture will take, before it takes it."""

import logging
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.cache.layout import shard_files
from pipeline.cache.manifest import Manifest
from pipeline.capture.measure import Probe, measure, time_draft
from pipeline.capture.sizes import INDEX_BYTES, free_bytes, hidden_bytes, marker_bytes, raw_hidden_bytes, sample_bytes
from pipeline.config.schema import Config
from pipeline.corpus.chat import load_tokenizer
from pipeline.corpus.estimate import CorpusEstimate, estimate
from pipeline.corpus.plan import plan_shards
from pipeline.errors import CorpusError
from pipeline.report.tables import table
from pipeline.runtime.launch import Launch
from pipeline.runtime.ranks import Ranks
from pipeline.target.folder import read_config
from pipeline.target.head import bundle_of
from pipeline.target.layers import resolve_layer_ids
from pipeline.target.load import Target, load_target
from pipeline.target.probe import PROBE_TOKENS

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """What is predicted; sizes in bytes, of the cache that would be there at the end. `hidden` by codec."""

    corpus: CorpusEstimate
    manifest: Manifest
    shard_tokens: Sequence[int]
    hidden: dict[str, int]
    samples: int
    bundle: int
    other: int
    files: int
    free: int
    probe: Probe
    groups: int
    ranks: int
    epochs: float

    @property
    def total(self) -> int:
        """Of the codec that the configuration names."""
        return self.hidden[self.manifest.codec] + self.samples + self.bundle + self.other

    @property
    def capture_hours(self) -> float:
        return self.corpus.total_tokens / self.probe.captured / 3600

    @property
    def forward_hours(self) -> float:
        """Of one pass over the corpus by the target alone, which is what an epoch of online training adds."""
        return self.corpus.total_tokens / self.probe.forward / 3600

    @property
    def read_bytes_per_second(self) -> float:
        """All ranks together, each training without waiting."""
        return self.probe.trained * self.ranks * self.hidden[self.manifest.codec] / self.corpus.total_tokens

    @property
    def runs_that_pay(self) -> int:
        return max(1, math.ceil(self.capture_hours / (self.epochs * self.forward_hours)))


def plan(config: Config, ranks: Ranks) -> Plan | None:
    """Measure and predict; every rank calls this, rank 0 returns the plan. Nothing remains on the disk."""
    cache = Path(str(config.capture.path)).expanduser()
    new = [folder for folder in (cache, *cache.parents) if not folder.exists()]
    launch = Launch(cache, ranks)
    try:
        with launch.together():
            found = _plan(config, cache, launch, ranks)
            launch.tell(f"done-{ranks.rank}", True)
            if ranks.is_main:
                for rank in range(1, ranks.world_size):
                    launch.hear(f"done-{rank}", f"rank {rank}")
                launch.end()
    finally:
        if ranks.is_main:
            for folder in new:  # innermost first; what another process has put there stays
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()
    return found


def _plan(config: Config, cache: Path, launch: Launch, ranks: Ranks) -> Plan | None:
    section = config.model.target
    corpus = estimate(config)  # every rank by itself: they all need its samples
    seen = [[sample.sample_id, sample.num_tokens] for sample in corpus.samples]
    if ranks.is_main:
        launch.tell("samples", seen)
    if launch.hear("samples", "the samples of the probe") != seen:  # ranks of one group would forward different batches, and hang
        raise CorpusError(
            f"rank {ranks.rank} sees another corpus than rank 0: it was prepared in this very moment, or data.prepared_dir "
            f"({config.data.prepared_dir}) is not on a file system that all ranks share. Run --plan again."
        )
    text: Any = read_config(section).get_text_config(decoder=True)
    manifest = Manifest(
        states_identity={},
        samples_identity={},
        layer_ids=resolve_layer_ids(section, config.model.draft, text.num_hidden_layers),
        hidden_size=text.hidden_size,
        dtype=section.dtype,
        codec=config.capture.codec,
        final=config.capture.final,
        num_shards=1,
    )
    target = load_target(section, ranks, manifest.layer_ids, config.capture.final)
    bundle = bundle_of(target)
    mine = measure(config, target, manifest, corpus.samples, launch, ranks)
    mine = replace(mine, trained=time_draft(config, target, bundle, corpus.samples))
    launch.tell(f"rates-{ranks.rank}", [mine.forward, mine.captured, mine.trained])
    if not ranks.is_main:
        return None
    rates = [launch.hear(f"rates-{rank}", f"the probe of rank {rank}") for rank in range(ranks.world_size)]
    of_groups = np.array(rates[:: ranks.tp_size])
    probe = replace(
        mine, forward=float(of_groups[:, 0].sum()), captured=float(of_groups[:, 1].sum()), trained=float(np.mean([r[2] for r in rates]))
    )
    shards = shard_tokens_of(corpus, config.capture.shard_tokens)
    hidden = {
        codec: round(hidden_bytes(manifest.model_copy(update={"codec": codec}), shards, probe.chunks[codec])) for codec in probe.chunks
    }
    bundle_bytes, bundle_files = _bundle(config, target, manifest, bundle.head is bundle.embedding)
    return Plan(
        corpus=corpus,
        manifest=manifest,
        shard_tokens=shards,
        hidden=hidden | {"raw": raw_hidden_bytes(manifest, shards)},
        samples=round(sample_bytes(corpus.samples, len(shards), corpus.total_samples, corpus.total_tokens)),
        bundle=bundle_bytes,
        other=len(shards) * marker_bytes(manifest) + corpus.total_samples * INDEX_BYTES,
        files=len(shards) * (len(shard_files(manifest.arrays)) + 1) + bundle_files + 4,
        free=free_bytes(cache),
        probe=probe,
        groups=ranks.dp_size,
        ranks=ranks.world_size,
        epochs=_epochs(config, corpus.total_samples, corpus.total_tokens),
    )


def shard_tokens_of(corpus: CorpusEstimate, shard_tokens: int) -> list[int]:
    """Tokens of every shard. From a part of the corpus: as many shards as it gives for its size, all of the mean size."""
    planned = [int(corpus.num_tokens[rows.start : rows.stop].sum()) for rows in plan_shards(corpus.num_tokens, shard_tokens)]
    if corpus.exact:
        return planned
    # The last shard of a sample is not full; the ones before it say how full a shard gets.
    mean = np.mean(planned[:-1]) if len(planned) > 1 else min(shard_tokens, corpus.total_tokens)
    count = max(1, math.ceil(corpus.total_tokens / float(mean)))
    return [round(corpus.total_tokens / count)] * count


def _bundle(config: Config, target: Target, manifest: Manifest, tied: bool) -> tuple[int, int]:
    """Bytes and files of `target/`."""
    item = manifest.spec(manifest.arrays[0]).item_bytes
    rows = target.vocab_size * (1 if tied else 2) + 1
    probe = PROBE_TOKENS * len(manifest.arrays)
    with tempfile.TemporaryDirectory() as folder:
        load_tokenizer(config.model.target).save_pretrained(folder)
        sizes = [path.stat().st_size for path in Path(folder).rglob("*") if path.is_file()]
    headers = 2000  # of the two safetensors files, and bundle.json
    return (rows + probe) * manifest.hidden_size * item + sum(sizes) + headers, len(sizes) + 3


def _epochs(config: Config, num_samples: int, num_tokens: int) -> float:
    trainer = config.trainer
    if trainer.max_epochs is not None:
        return float(trainer.max_epochs)
    if trainer.max_steps is None:
        return 1.0
    size, tokens = config.data.train_ds.samples_a_step, config.data.train_ds.global_batch_tokens
    return trainer.max_steps * (size / num_samples if size else (tokens or 0) / num_tokens)


def as_text(plan: Plan) -> str:
    """The plan as tables, with what it assumes."""
    corpus, manifest, probe = plan.corpus, plan.manifest, plan.probe
    basis = f"all {corpus.rows:,} rows" if corpus.exact else f"estimated from {corpus.rows_read:,} of {corpus.rows:,} rows"
    raw = plan.hidden["raw"]
    fits = "fits" if plan.total <= plan.free else "DOES NOT FIT"
    layers = f"{list(manifest.layer_ids)}{' and final' if manifest.final else ''}, {manifest.hidden_size} wide, {manifest.dtype}"
    rows = [
        ("samples", f"{corpus.total_samples:,} ({basis})"),
        ("tokens", f"{corpus.total_tokens:,}, {corpus.num_tokens.mean():.0f} a sample, at most {corpus.num_tokens.max():,}"),
        ("layers", layers),
        ("shards, files", f"{len(plan.shard_tokens):,} shards, {plan.files:,} files"),
        ("samples.arrow", f"{plan.samples:,} bytes"),
        ("bundle", f"{plan.bundle:,} bytes"),
        ("index, markers", f"{plan.other:,} bytes"),
        ("in all", f"{plan.total / 1e9:.3f} GB with {manifest.codec}; {plan.free / 1e9:.3f} GB are free: {fits}"),
        ("capture", f"{probe.captured:,.0f} tokens/s by {plan.ranks} rank(s) in {plan.groups} group(s): {plan.capture_hours:.2f} hours"),
        ("target alone", f"{probe.forward:,.0f} tokens/s: {plan.forward_hours:.2f} hours for one pass"),
        ("training reads", f"{plan.read_bytes_per_second / 1e6:,.1f} MB/s, at {probe.trained:,.0f} tokens/s a rank"),
        ("break-even", f"{plan.runs_that_pay} draft run(s) of {plan.epochs:.1f} epoch(s)"),
    ]
    codecs = [
        [codec + (" *" if codec == manifest.codec else ""), f"{size:,}", f"{size / raw:.3f}", f"{size / corpus.total_tokens:,.0f}"]
        for codec, size in plan.hidden.items()
    ]
    notes = (
        f"Measured on {probe.tokens:,} tokens by each group; loading the target and tokenising come on top. The size of raw is computed,\n"
        "those of other codecs are from the probe's states. Training: forward and backward of the configured draft, one sample at a\n"
        "time, no optimizer. Break-even: capturing costs its hours once, training online the target's pass in every epoch of every run.\n"
        "Both on these ranks, with the draft's own steps alike and reading hidden behind them; that online training holds the target in\n"
        "memory is not counted."
    )
    body = "\n".join(f"{name:<15} {value}" for name, value in rows)
    return f"{body}\n\n{table(['hidden.zarr', 'bytes', 'of raw', 'a token'], codecs)}\n\n{notes}"
