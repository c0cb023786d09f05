"""The samples that a run trains and validates on, and where their hidden states come from; here, from a cache.

Nothing behind this module can tell a cache from a live target (`live.py`) or from both (`hybrid.py`). Samples are numbered in the
order of their ids, so that a number means the same sample everywhere, whatever the shards of a cache look like.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.cache.reader import Cache
from pipeline.config.schema import Config, DraftSection
from pipeline.corpus.chat import load_saved_tokenizer
from pipeline.corpus.entries import entries_of
from pipeline.draft.anchors import Fit, has_usable_anchor
from pipeline.errors import DraftError, TrainingError
from pipeline.records import TargetBundle
from pipeline.target.load import DTYPES
from pipeline.train.divide import Division
from pipeline.train.feed import Ready, Source
from pipeline.train.identity import check_cache
from pipeline.train.order import Mixture, Order

log = logging.getLogger(__name__)

TRAIN = "train"
SPECIAL = ("bos", "eos", "pad", "unk")


@dataclass(frozen=True, eq=False)
class TrainingData:
    """Samples by number, 0..n-1, and what is known of them without reading them.

    `split` str [n]; `source_code` int32 [n], codes into `source_names`; `num_tokens` int64 [n]; `usable` bool [n], whether there is
    a usable anchor, and `usable_partial` whether there would be with `anchor_fit: partial`. `used_token_ids` bool, true for ids that
    occur. `identity` changes when the states or the samples do; `states_identity` says what the states were taken from, field by field.
    `any_thread`: `source` may be called by several threads at once. In hybrid mode `windows` int64 [n] are those of shards that the first
    epoch follows, `ready` must be called before samples are read, and `live` gives them without the cache. `cached`: what other drafts
    need of the same open cache. `own_answers`: whether all answers of the validation sets are a model's own; None without such sets.
    """

    source: Source
    any_thread: bool
    split: NDArray[np.str_]
    source_code: NDArray[np.int32]
    source_names: Sequence[str]
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
    own_answers: bool | None
    windows: NDArray[np.int64] | None = None
    ready: Ready | None = None
    live: Source | None = None
    cached: "CachedSamples | None" = None

    def check_mask_token(self, mask_token_id: int) -> None:
        """Raise `DraftError` when the mask token occurs in a sample: the draft could not tell a real token from an empty slot."""
        check_mask_token(mask_token_id, self.used_token_ids, self.bundle.embedding.shape[0])

    def for_validation(self, epoch: int) -> "TrainingData":
        """The same data to validate on in `epoch`. In hybrid mode's first one most of it is not in the cache yet: the live target gives it,
        and later the cache, whatever was captured when."""
        if self.ready is not None:
            self.ready(epoch, ())
        return replace(self, source=self.live, any_thread=False) if self.live is not None and epoch == 0 else self


def check_mask_token(mask_token_id: int, used_token_ids: NDArray[np.bool_], num_rows: int) -> None:
    """Raise `DraftError` when the mask token is one of the ids that samples use."""
    if mask_token_id < len(used_token_ids) and used_token_ids[mask_token_id]:
        raise DraftError(
            f"model.draft.mask_token_id {mask_token_id} occurs in the corpus. Choose an id that no sample holds: a reserved token, or "
            f"a row of the embedding beyond the tokenizer's length (it has {num_rows} rows)."
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

    def usable(self, draft: DraftSection, fit: Fit) -> NDArray[np.bool_]:
        """bool [n], whether a sample has a usable anchor."""
        return has_usable_anchor(self.spans, self.offsets, self.num_tokens, draft.block_size, fit, draft.label_shift)[self.order]

    def source(self, layer_ids: tuple[int, ...], final: bool) -> Source:
        """Samples with the states of `layer_ids`, and the final hidden state if asked for."""
        cache, order, max_tokens = self.cache, self.order, self.max_tokens
        return lambda numbers: [cache.read(int(order[n]), layer_ids, final, max_tokens=max_tokens, dequantise=False) for n in numbers]


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
    weighed = section.input_cfg and section.input_cfg[0].weight is not None
    return Order(
        seed=config.trainer.seed,
        indices=indices,
        num_tokens=data.num_tokens[indices],
        batch_size=section.samples_a_step,
        batch_tokens=section.global_batch_tokens,
        length_buckets=section.length_buckets,
        mixture=_mixture(data, config, indices) if weighed else None,
        windows=None if data.windows is None else data.windows[indices],
    )


def _mixture(data: TrainingData, config: Config, indices: NDArray[np.int64]) -> Mixture:
    """The weights of `data.train_ds.input_cfg`, which all have one, and the entry of each of the samples `indices`."""
    inputs = config.data.train_ds.input_cfg
    codes, place = np.unique(data.source_code[indices], return_inverse=True)
    entry = np.array(entries_of(config.data, [data.source_names[code] for code in codes]), dtype=np.int64)[place]
    mixture = Mixture(tuple(given.weight or 0.0 for given in inputs), entry)
    for given, quota, count in zip(inputs, mixture.quotas(), mixture.counts(), strict=True):
        if not count:
            raise TrainingError(f"no training sample with a usable anchor is from {given.path}, of weight {given.weight:g}. Leave it out.")
        log.info("%s: %d samples with weight %g: %d an epoch, %.2f times each", given.path, count, given.weight, quota, quota / count)
    return mixture


def division_of(config: Config, order: Order, dp_size: int) -> Division:
    """How global batches are shared out over `dp_size` ranks."""
    section = config.data.train_ds
    row = section.pack_tokens or section.micro_batch_tokens or int(order.num_tokens.max())
    accumulate = config.trainer.accumulate_grad_batches
    return Division(dp_size, accumulate, section.micro_batch_tokens, row if section.packing else None)


def validation_sets(data: TrainingData) -> dict[str, list[int]]:
    """Samples of every validation set, by its name."""
    return {str(name): np.flatnonzero(data.split == name).tolist() for name in np.unique(data.split) if name != TRAIN}


def open_cache(config: Config) -> TrainingData:
    """Samples and states of the cache, each cut to `data.max_tokens`; the target itself is not needed."""
    wanted, max_tokens = config.model.draft.target_layer_ids, config.data.max_tokens
    final = config.model.objective.needs_final
    cache = Cache.open(str(config.cache_path), wanted, final)
    check_cache(config, cache)
    layer_ids, index = wanted or cache.manifest.layer_ids, cache.index
    samples = CachedSamples.of(cache, max_tokens)
    order, num_tokens = samples.order, samples.num_tokens
    return TrainingData(
        source=samples.source(layer_ids, final),
        any_thread=True,
        split=np.array(index.splits)[index.split][order],
        source_code=index.source[order],
        source_names=index.sources,
        num_tokens=num_tokens[order],
        usable=samples.usable(config.model.draft, config.model.objective.anchor_fit),
        usable_partial=samples.usable(config.model.draft, "partial"),
        bundle=cache.bundle(),
        layer_ids=layer_ids,
        dtype=DTYPES[cache.manifest.dtype],
        special_ids=special_ids_of(load_saved_tokenizer(cache.tokenizer_dir)),
        used_token_ids=index.used_token_ids,
        identity={"mode": "offline", "cache": cache.digest(), "max_tokens": int(num_tokens.max())},
        states_identity=cache.manifest.states_identity,
        own_answers=own_answers(cache.manifest.corpus or {}, index.splits),
        cached=samples,
    )


def own_answers(account: Mapping[str, Any], splits: Sequence[str]) -> bool | None:
    """`TrainingData.own_answers` by the account of a corpus (`PreparedCorpus.counts`) that has these `splits`. Where it does not say, as
    one of an earlier version: False."""
    validation = [account.get("by_split", {}).get(name, {}) for name in splits if name != TRAIN]
    return all(sums.get("generated", -1) == sums.get("samples") for sums in validation) if validation else None


def special_ids_of(tokenizer: Any) -> dict[str, int | None]:
    return {name: getattr(tokenizer, f"{name}_token_id") for name in SPECIAL}


def usable_samples(
    config: Config, spans: NDArray[np.int32], offsets: NDArray[np.int64], num_tokens: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which samples have a usable anchor: as configured, and with partial blocks."""
    size, fit, shift = config.model.draft.block_size, config.model.objective.anchor_fit, config.model.draft.label_shift
    as_configured = has_usable_anchor(spans, offsets, num_tokens, size, fit, shift)
    return as_configured, has_usable_anchor(spans, offsets, num_tokens, size, "partial", shift)
