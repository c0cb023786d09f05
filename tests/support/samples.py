"""Captured samples of random states and the frozen parts of a random target, for tests of training that need no model."""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.config.schema import Config, DraftSection
from pipeline.corpus.chat import spans_of
from pipeline.draft.model import Draft, DraftConfig
from pipeline.records import CapturedSample, TargetBundle, TokenSample
from pipeline.runtime.ranks import Ranks
from pipeline.train.learner import Learner, build_learner, start_accelerator

LAYERS = (1, 3, 5)
HIDDEN = 32
VOCAB = 96
MASK_TOKEN_ID = VOCAB - 1


def bundle(seed: int = 0) -> TargetBundle:
    """Untied embedding and head of `VOCAB` rows, and a Qwen3 config of matching sizes."""
    generator = torch.Generator().manual_seed(seed)
    config = {
        "num_hidden_layers": 8,
        "hidden_size": HIDDEN,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": 512,
    }
    return TargetBundle(
        embedding=torch.randn(VOCAB, HIDDEN, generator=generator),
        head=torch.randn(VOCAB, HIDDEN, generator=generator) * HIDDEN**-0.5,
        final_norm=torch.ones(HIDDEN),
        config=config,
    ).check()


def captured(n: int, seed: int = 0, shortest: int = 12, longest: int = 60) -> list[CapturedSample]:
    """`n` samples of very unequal length, with final states; each has one or two supervised spans, of unequal length too."""
    rng = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for row in range(n):
        length = int(rng.integers(shortest, longest + 1))
        mask = np.zeros(length, dtype=np.bool_)
        start = int(rng.integers(1, 4))
        mask[start : start + int(rng.integers(2, max(3, length // 2)))] = True
        if length > 30:
            mask[length - int(rng.integers(3, 12)) :] = True
        samples.append(sample(row, length, mask, generator))
    return samples


def sample(row: int, length: int, mask: NDArray[np.bool_], generator: torch.Generator) -> CapturedSample:
    """One sample of random ids and states; `mask` bool [length] says what is supervised."""
    tokens = TokenSample(
        sample_id=f"sample-{row}",
        source="synthetic",
        row=row,
        split="train",
        input_ids=torch.randint(0, VOCAB - 1, (length,), generator=generator, dtype=torch.int32).numpy(),
        spans=spans_of(mask),
    )
    hidden = {layer: torch.randn(length, HIDDEN, generator=generator) for layer in LAYERS}
    final = torch.randn(length, HIDDEN, generator=torch.Generator().manual_seed(row))
    return CapturedSample(tokens.check(), hidden, final).check()


def learner(
    ranks: Ranks,
    precision: Literal["fp32", "bf16-mixed"] = "fp32",
    fit: Literal["full", "partial"] = "partial",
    *,
    optimizer: Literal["adamw", "muon"] = "adamw",
    ema_decay: float | None = None,
    draft: Mapping[str, Any] | None = None,
    objective: Mapping[str, Any] | None = None,
) -> Learner:
    """A new draft of two layers and blocks of 4 for `bundle()`, the same on every rank; `draft` and `objective` change their sections."""
    frozen = bundle()
    section = DraftSection.model_validate({"num_hidden_layers": 2, "block_size": 4, "mask_token_id": MASK_TOKEN_ID, **(draft or {})})
    torch.manual_seed(0)
    made = Draft(DraftConfig.build(section, frozen, LAYERS, {}))
    config = Config.model_validate(
        {
            "model": {
                "objective": {"gamma": 2.0, "anchor_fit": fit, **(objective or {})},
                "optim": {"name": optimizer, "weight_decay": 0.1},
            },
            "trainer": {"precision": precision, "ema_decay": ema_decay},
        }
    )
    return build_learner(config, made, frozen, start_accelerator(precision), ranks)
