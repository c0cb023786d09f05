"""What a cache is captured from, as the fields that a later run is compared with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.cache.layout import MANIFEST
from pipeline.cache.manifest import Manifest, read_manifest
from pipeline.config.schema import Config
from pipeline.corpus.plan import Segments, plan_segments
from pipeline.corpus.prepared import PreparedCorpus
from pipeline.target.folder import read_config, target_fields
from pipeline.target.layers import CONVENTION, resolve_layer_ids
from pipeline.target.load import check_tp


def shards_of(config: Config, corpus: PreparedCorpus, segments: Segments | None) -> list[Sequence[int]]:
    """The corpus samples of every shard. A corpus that is not the one that `segments` divide is planned without them: it differs anyway."""
    try:
        return plan_segments(corpus.num_tokens, config.capture.shard_tokens, segments)
    except ValueError:
        return plan_segments(corpus.num_tokens, config.capture.shard_tokens, None)


def expected_manifest(config: Config, cache: Path, corpus: PreparedCorpus) -> Manifest:
    """What `cache` must say of itself to be the one that `config` asks for. How it was divided when more was appended is its own affair."""
    segments = read_manifest(cache).segments if (cache / MANIFEST).exists() else None
    manifest = manifest_of(config, corpus, len(shards_of(config, corpus, segments)))
    return manifest.model_copy(update={"segments": segments})


def manifest_of(config: Config, corpus: PreparedCorpus, num_shards: int) -> Manifest:
    """The manifest of the cache that `config` asks for, from files alone: the target is not loaded, only its digest taken.

    The number of ranks, the tensor-parallel size and `capture.batch_tokens` are no part of it: a cache is resumed with others. The
    size of a shard is, since it decides which samples a shard number means. Raises `TargetError` for layers or a
    tensor-parallel size that the target does not have.
    """
    section, capture = config.model.target, config.capture
    text: Any = read_config(section).get_text_config(decoder=True)
    layer_ids = resolve_layer_ids(section, config.model.draft, text.num_hidden_layers)
    if section.tp_size > 1:
        check_tp(text, section.tp_size, str(section.path))
    return Manifest(
        states_identity={
            **corpus.states_fields,
            "target": target_fields(section),
            "layer_convention": CONVENTION,
            "shard_tokens": capture.shard_tokens,
        },
        samples_identity=corpus.samples_fields,
        layer_ids=layer_ids,
        hidden_size=text.hidden_size,
        dtype=section.dtype,
        codec=capture.codec,
        final=capture.final,
        num_shards=num_shards,
        corpus=corpus.counts,
    )
