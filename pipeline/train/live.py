"""Online mode: the samples of a corpus, with states by a forward of the live target for each micro-batch."""

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.config.schema import Config
from pipeline.corpus.chat import load_tokenizer
from pipeline.corpus.plan import plan_batches
from pipeline.corpus.prepare import prepare
from pipeline.corpus.prepared import PreparedCorpus
from pipeline.draft.config import DraftConfig
from pipeline.records import CapturedSample, TokenSample
from pipeline.runtime.ranks import Ranks
from pipeline.target.folder import read_config, target_fields
from pipeline.target.forward import forward_hidden
from pipeline.target.head import bundle_of
from pipeline.target.layers import CONVENTION, resolve_layer_ids
from pipeline.target.load import Target, load_target
from pipeline.target.probe import check_padding
from pipeline.train.data import TrainingData, check_mask_token, own_answers, special_ids_of, usable_samples
from pipeline.train.feed import Source

log = logging.getLogger(__name__)


def open_live(config: Config, ranks: Ranks) -> TrainingData:
    """Samples of the corpus; at most `capture.batch_tokens` are forwarded at a time. Every rank must call it.

    The corpus is tokenised by one of the ranks while the others wait for its lock, and not in a collective, which could time out; when it
    cannot be, each of them says why. What can be wrong with the mask token is looked at before the target, which takes longer.
    """
    corpus, section, draft = prepare(config), config.model.target, config.model.draft
    text: Any = read_config(section).get_text_config(decoder=True)
    order, fields = corpus_fields(config, corpus, text.vocab_size)
    layer_ids = draft.target_layer_ids or resolve_layer_ids(section, draft, text.num_hidden_layers)
    if not draft.target_layer_ids and not section.layer_ids:
        log.warning(
            "this draft reads the target layers %s, chosen by its depth; from a cache it would read all that the cache has. Set "
            "model.draft.target_layer_ids to train the same draft in both modes",
            list(layer_ids),
        )
    target_is = target_fields(section)
    target = load_target(section, ranks, layer_ids, final=config.model.objective.needs_final)
    bundle = bundle_of(target)
    DraftConfig.build(draft, bundle, layer_ids, fields["special_ids"])  # an error in it comes first
    check_padding(target)
    return TrainingData(
        source=live_source(target, lambda number: corpus.sample(int(order[number])), config.capture.batch_tokens),
        any_thread=False,
        bundle=bundle,
        layer_ids=layer_ids,
        dtype=target.dtype,
        identity={"mode": "online", "target": target_is, "corpus": corpus.fingerprint},
        states_identity={**corpus.states_fields, "target": target_is, "layer_convention": CONVENTION},
        **fields,
    )


def corpus_fields(config: Config, corpus: PreparedCorpus, num_rows: int) -> tuple[NDArray[np.int64], dict[str, Any]]:
    """Of every sample by its number the place in the corpus, int64 [n], and the fields of `TrainingData` that corpus and tokenizer decide.

    Raises `DraftError` when the corpus holds the mask token, of an embedding of `num_rows`.
    """
    ids, splits, names, spans, used = [], [], [], [], np.zeros(0, dtype=np.bool_)
    for sample in map(corpus.sample, range(len(corpus))):
        ids.append(sample.sample_id)
        splits.append(sample.split)
        names.append(sample.source)
        spans.append(sample.spans)
        largest = int(sample.input_ids.max())
        if largest >= len(used):
            used = np.concatenate([used, np.zeros(largest + 1 - len(used), dtype=np.bool_)])
        used[sample.input_ids[sample.input_ids >= 0]] = True
    special_ids, mask = special_ids_of(load_tokenizer(config.model.target)), config.model.draft.mask_token_id
    if mask is not None and mask not in special_ids.values():  # which `DraftConfig` has words for
        check_mask_token(mask, used, num_rows)
    order, num_tokens = np.argsort(np.array(ids, dtype=object), kind="stable"), corpus.num_tokens
    source_names, source_code = np.unique(names, return_inverse=True)
    offsets = np.concatenate(([0], np.cumsum([len(s) for s in spans])))
    usable, usable_partial = (found[order] for found in usable_samples(config, np.concatenate(spans), offsets, num_tokens))
    return order, {
        "split": np.array(splits)[order],
        "source_code": source_code[order].astype(np.int32),
        "source_names": source_names.tolist(),
        "num_tokens": num_tokens[order],
        "usable": usable,
        "usable_partial": usable_partial,
        "used_token_ids": used,
        "special_ids": special_ids,
        "own_answers": own_answers(corpus.counts, sorted(set(splits))),
    }


def live_source(target: Target, sample: Callable[[int], TokenSample], batch_tokens: int) -> Source:
    """Samples with states by a forward of `target`."""

    def source(numbers: Sequence[int]) -> list[CapturedSample]:
        samples = [sample(number) for number in numbers]
        captured: dict[int, CapturedSample] = {}
        for group in plan_batches(np.array([s.num_tokens for s in samples]), batch_tokens):
            captured |= zip(group, forward_hidden(target, [samples[place] for place in group]), strict=True)
        return [captured[place] for place in range(len(samples))]

    return source
