"""Small caches of random states, written by the real writer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from pipeline.cache.bundle import save_bundle
from pipeline.cache.commit import commit_shard, complete
from pipeline.cache.layout import DTYPES, target_folder, tokenizer_folder
from pipeline.cache.manifest import Manifest, create_or_compare, read_manifest
from pipeline.cache.writer import ShardWriter
from pipeline.records import CapturedSample, TargetBundle, TokenSample

LAYERS = (1, 4)
HIDDEN = 24
VOCAB = 50
SHARDS = ((3, 700, 512, 40), (1024, 1), (5, 6, 600))
"""Tokens of every sample of every shard of the usual small cache: shorter than a chunk, longer, and ending on its edge."""


def captured(
    lengths: Sequence[int],
    seed: int = 0,
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    layers: Sequence[int] = LAYERS,
    final: bool = False,
    hidden: int = HIDDEN,
) -> list[CapturedSample]:
    """A sample for each length. Every other one has two supervised spans, the rest one; one in five is held out."""
    generator = torch.Generator().manual_seed(seed)
    kind = DTYPES[dtype].torch_dtype
    samples = []
    for row, length in enumerate(lengths):
        spans = [[0, 1], [length - 1, 1]] if row % 2 and length > 2 else [[length // 2, length - length // 2]]
        tokens = TokenSample(
            sample_id=f"chat-{seed}-{row}",
            source=f"part-{seed % 2}.jsonl",
            row=row,
            split="heldout" if row % 5 == 4 else "train",
            input_ids=torch.randint(0, VOCAB - 3, (length,), generator=generator, dtype=torch.int32).numpy(),
            spans=np.array(spans, np.int32),
        )
        states = {layer: torch.randn(length, hidden, generator=generator).to(kind) for layer in layers}
        last = torch.randn(length, hidden, generator=generator).to(kind) if final else None
        samples.append(CapturedSample(tokens.check(), states, last))
    return samples


def small_shards(**options: Any) -> list[list[CapturedSample]]:
    return [captured(lengths, seed=shard, **options) for shard, lengths in enumerate(SHARDS)]


def manifest(num_shards: int = len(SHARDS), **changes: Any) -> Manifest:
    fields: dict[str, Any] = {
        "states_identity": {"weights": "w1", "tokenizer": {"files": "t1", "template": "c1"}, "max_tokens": 2048},
        "samples_identity": {"mask_rules": 1, "split": {"fraction": 0.2}},
        "layer_ids": LAYERS,
        "hidden_size": HIDDEN,
        "dtype": "bfloat16",
        "codec": "lossless",
        "final": False,
    }
    return Manifest(**{**fields, "num_shards": num_shards, **changes})


def bundle(tied: bool = True) -> TargetBundle:
    generator = torch.Generator().manual_seed(3)
    embedding = torch.randn(VOCAB, HIDDEN, generator=generator)
    head = embedding if tied else torch.randn(VOCAB, HIDDEN, generator=generator)
    return TargetBundle(embedding, head, torch.ones(HIDDEN), {"hidden_size": HIDDEN, "model_type": "qwen3"}, final_logit_softcapping=30.0)


def write_shard(cache: Path, shard: int, samples: Sequence[CapturedSample], attempt: str = "0") -> None:
    """Write and commit one shard of a cache that has its manifest."""
    found = read_manifest(cache)
    with ShardWriter(cache, shard, found, found.arrays, attempt=attempt) as writer:
        for sample in samples:
            writer.append(sample)
        records = writer.close()
    commit_shard(cache, shard, [sample.tokens for sample in samples], records, attempt=attempt)


def write_target(cache: Path) -> None:
    """The bundle and a stand-in for the tokenizer's files."""
    save_bundle(target_folder(cache), bundle())
    tokenizer_folder(cache).mkdir(exist_ok=True)
    (tokenizer_folder(cache) / "tokenizer.json").write_text("{}")


def write_cache(folder: Path, shards: Sequence[Sequence[CapturedSample]], described: Manifest) -> Path:
    """A complete cache in `folder`."""
    create_or_compare(folder, described)
    write_target(folder)
    for shard, samples in enumerate(shards):
        write_shard(folder, shard, samples)
    complete(folder)
    return folder


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
