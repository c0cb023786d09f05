"""Where samples and their hidden states come from: a cache, or a live target. Nothing behind this module can tell which.

Samples are numbered in the order of their ids, so that a number means the same sample in both, and whatever the shards
of a cache look like.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.cache.reader import Cache
from pipeline.config.schema import Config
from pipeline.corpus.chat import load_saved_tokenizer, load_tokenizer
from pipeline.corpus.plan import plan_batches
from pipeline.corpus.prepare import open_prepared, prepare, prepared_folder
from pipeline.corpus.prepared import DESCRIPTION_FILE, PreparedCorpus
from pipeline.draft.anchors import Fit, has_usable_anchor
from pipeline.errors import CorpusError, DraftError, TrainingError
from pipeline.records import CapturedSample, TargetBundle, TokenSample
from pipeline.runtime.files import wait_for
from pipeline.runtime.ranks import Ranks
from pipeline.target.folder import read_config, target_fields
from pipeline.target.forward import forward_hidden
from pipeline.target.head import bundle_of
from pipeline.target.layers import CONVENTION, resolve_layer_ids
from pipeline.target.load import DTYPES, Target, load_target
from pipeline.target.probe import check_padding
from pipeline.train.divide import Division
from pipeline.train.feed import Source
from pipeline.train.identity import check_cache
from pipeline.train.order import Order

log = logging.getLogger(__name__)

TRAIN = "train"
SPECIAL = ("bos", "eos", "pad", "unk")


@dataclass(frozen=True, eq=False)
class TrainingData:
    """Samples by number, 0..n-1, and what is known of them without reading them.

    `split` str [n]; `num_tokens` int64 [n]; `usable` bool [n], whether there is a usable anchor, and `usable_partial` whether there would
    be with `anchor_fit: partial`. `used_token_ids` bool, true for ids that occur. `identity` changes when the states or the
    samples do; `states_identity` says what the states were taken from, field by field. `any_thread`: `source` may be called by several
    threads at once. `cached`: what other drafts need of the same open cache.
    """

    source: Source
    any_thread: bool
    split: NDArray[np.str_]
    num_tokens: NDArray[np.int64]
    usable: NDArray[np.bool_]
    usable_partial: NDArray[np.bool_]
    bundle: TargetBundle
    layer_ids: tuple[int, ...]
    dtype: torch.dtype
    special_ids: Mapping[str, int | None]
    used_token_ids: NDArray[np.bool_]
    identity: Mapping[str, Any]
    states_identity: Mapping[str, Any]
    cached: "CachedSamples | None" = None

    def check_mask_token(self, mask_token_id: int) -> None:
        """Raise `DraftError` when the mask token occurs in a sample: the draft could not tell a real token from an empty slot."""
        if mask_token_id < len(self.used_token_ids) and self.used_token_ids[mask_token_id]:
            raise DraftError(
                f"model.draft.mask_token_id {mask_token_id} occurs in the corpus. Choose an id that no sample holds: a reserved token, or "
                f"a row of the embedding beyond the tokenizer's length (it has {self.bundle.embedding.shape[0]} rows)."
            )


@dataclass(frozen=True, eq=False, slots=True)
class CachedSamples:
    """Samples of an open cache by number, each cut to `max_tokens`: `order` [n] are their places in it, `num_tokens` [places] their lengths
    there; sample i has the supervised spans `spans[offsets[i] : offsets[i + 1]]`."""

    cache: Cache
    order: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    spans: NDArray[np.int32]
    offsets: NDArray[np.int64]
    max_tokens: int

    @classmethod
    def of(cls, cache: Cache, max_tokens: int) -> "CachedSamples":
        index = cache.index
        kept = index.span_starts < max_tokens
        spans = np.stack((index.span_starts, np.minimum(index.span_lengths, max_tokens - index.span_starts)), axis=1)[kept]
        return cls(
            cache,
            np.argsort(index.sample_id, kind="stable"),
            np.minimum(index.num_tokens, max_tokens).astype(np.int64),
            spans,
            np.concatenate(([0], np.cumsum(kept)))[index.span_offsets],
            max_tokens,
        )

    def usable(self, block_size: int, fit: Fit) -> NDArray[np.bool_]:
        """bool [n], whether a sample has a usable anchor."""
        return has_usable_anchor(self.spans, self.offsets, self.num_tokens, block_size, fit)[self.order]

    def source(self, layer_ids: tuple[int, ...]) -> Source:
        """Samples with the states of `layer_ids`."""
        cache, order, max_tokens = self.cache, self.order, self.max_tokens
        return lambda numbers: [cache.read(int(order[n]), layer_ids, max_tokens=max_tokens, dequantise=False) for n in numbers]


def training_order(data: TrainingData, config: Config) -> Order:
    """The order of the training samples that have a usable anchor; the others are counted here, once, and never read."""
    training = data.split == TRAIN
    indices, lost = np.flatnonzero(training & data.usable), training & ~data.usable
    by_fit = f"; {int((lost & data.usable_partial).sum())} of them have one with model.objective.anchor_fit=partial" if lost.any() else ""
    counted = f"{len(indices)} training samples; {int(lost.sum())} left out, without a usable anchor{by_fit}"
    if not len(indices):
        raise TrainingError(f"{counted}. Lower model.draft.block_size ({config.model.draft.block_size}), or look at the corpus.")
    log.info(counted)
    section = config.data.train_ds
    return Order(
        seed=config.trainer.seed,
        indices=indices,
        num_tokens=data.num_tokens[indices],
        batch_size=section.samples_a_step,
        batch_tokens=section.global_batch_tokens,
        length_buckets=section.length_buckets,
    )


def division_of(config: Config, order: Order, dp_size: int) -> Division:
    """How global batches are shared out over `dp_size` ranks."""
    section = config.data.train_ds
    row = section.pack_tokens or section.micro_batch_tokens or int(order.num_tokens.max())
    accumulate = config.trainer.accumulate_grad_batches
    return Division(dp_size, accumulate, section.micro_batch_tokens, row if section.packing else None)


def validation_sets(data: TrainingData) -> dict[str, list[int]]:
    """Samples of every validation set, by its name."""
    return {str(name): np.flatnonzero(data.split == name).tolist() for name in np.unique(data.split) if name != TRAIN}


def open_data(config: Config, ranks: Ranks) -> TrainingData:
    """The data of `config.data.mode`. Every rank must call it."""
    return open_live(config, ranks) if config.data.mode == "online" else open_cache(config)


def open_cache(config: Config) -> TrainingData:
    """Samples and states of the cache, each cut to `data.max_tokens`; the target itself is not needed."""
    wanted, max_tokens = config.model.draft.target_layer_ids, config.data.max_tokens
    cache = Cache.open(str(config.cache_path), wanted)
    check_cache(config, cache)
    layer_ids, index = wanted or cache.manifest.layer_ids, cache.index
    samples = CachedSamples.of(cache, max_tokens)
    order, num_tokens = samples.order, samples.num_tokens
    return TrainingData(
        source=samples.source(layer_ids),
        any_thread=True,
        split=np.array(index.splits)[index.split][order],
        num_tokens=num_tokens[order],
        usable=samples.usable(config.model.draft.block_size, config.model.objective.anchor_fit),
        usable_partial=samples.usable(config.model.draft.block_size, "partial"),
        bundle=cache.bundle(),
        layer_ids=layer_ids,
        dtype=DTYPES[cache.manifest.dtype],
        special_ids=_special_ids(load_saved_tokenizer(cache.tokenizer_dir)),
        used_token_ids=index.used_token_ids,
        identity={"mode": "offline", "cache": cache.digest(), "max_tokens": int(num_tokens.max())},
        states_identity=cache.manifest.states_identity,
        cached=samples,
    )


def open_live(config: Config, ranks: Ranks) -> TrainingData:
    """The same samples, with states by a forward of the live target for each micro-batch, of at most `capture.batch_tokens` at a time.

    The corpus is prepared by the first rank; the others wait for its file, not in a collective, which could time out.
    """
    corpus = _prepared(config, ranks)
    section = config.model.target
    num_layers = read_config(section).get_text_config(decoder=True).num_hidden_layers
    layer_ids = config.model.draft.target_layer_ids or resolve_layer_ids(section, config.model.draft, num_layers)
    target = load_target(section, ranks, layer_ids, final=False)
    check_padding(target)
    ids, splits, spans = [], [], []
    used = np.zeros(target.vocab_size, dtype=np.bool_)
    for sample in map(corpus.sample, range(len(corpus))):
        ids.append(sample.sample_id)
        splits.append(sample.split)
        spans.append(sample.spans)
        used[sample.input_ids[sample.input_ids >= 0]] = True
    order, num_tokens = np.argsort(np.array(ids, dtype=object), kind="stable"), corpus.num_tokens
    fields = target_fields(section)
    offsets = np.concatenate(([0], np.cumsum([len(s) for s in spans])))
    usable, usable_partial = (found[order] for found in _usable(config, np.concatenate(spans), offsets, num_tokens))
    return TrainingData(
        source=_live_source(target, lambda number: corpus.sample(int(order[number])), config.capture.batch_tokens),
        any_thread=False,
        split=np.array(splits)[order],
        num_tokens=num_tokens[order],
        usable=usable,
        usable_partial=usable_partial,
        bundle=bundle_of(target),
        layer_ids=layer_ids,
        dtype=target.dtype,
        special_ids=_special_ids(load_tokenizer(section)),
        used_token_ids=used,
        identity={"mode": "online", "target": fields, "corpus": corpus.fingerprint},
        states_identity={**corpus.states_fields, "target": fields, "layer_convention": CONVENTION},
    )


def _live_source(target: Target, sample: Callable[[int], TokenSample], batch_tokens: int) -> Source:
    def source(numbers: Sequence[int]) -> list[CapturedSample]:
        samples = [sample(number) for number in numbers]
        captured: dict[int, CapturedSample] = {}
        for group in plan_batches(np.array([s.num_tokens for s in samples]), batch_tokens):
            captured |= zip(group, forward_hidden(target, [samples[place] for place in group]), strict=True)
        return [captured[place] for place in range(len(samples))]

    return source


def _prepared(config: Config, ranks: Ranks) -> PreparedCorpus:
    if ranks.is_main:
        return prepare(config)
    wait_for(prepared_folder(config) / DESCRIPTION_FILE, "the prepared corpus", lambda: None)
    corpus = open_prepared(config)
    if corpus is None:
        raise CorpusError(f"the prepared corpus in {prepared_folder(config)} vanished again; keep data.prepared_dir during a run.")
    return corpus


def _special_ids(tokenizer: Any) -> dict[str, int | None]:
    return {name: getattr(tokenizer, f"{name}_token_id") for name in SPECIAL}


def _usable(
    config: Config, spans: NDArray[np.int32], offsets: NDArray[np.int64], num_tokens: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which samples have a usable anchor: as configured, and with partial blocks."""
    size, fit = config.model.draft.block_size, config.model.objective.anchor_fit
    return has_usable_anchor(spans, offsets, num_tokens, size, fit), has_usable_anchor(spans, offsets, num_tokens, size, "partial")
