"""A world of one rank, and the tiny target loaded in it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config.schema import TargetSection
from pipeline.records import TokenSample
from pipeline.runtime.ranks import Ranks
from pipeline.target.load import Target, load_target

LAYERS = (1, 3, 5)


def lone_rank(tp_size: int = 1) -> Ranks:
    return Ranks(
        rank=0,
        world_size=1,
        local_rank=0,
        device=torch.device("cpu"),
        tp_size=tp_size,
        tp_rank=0,
        dp_rank=0,
        dp_size=1,
        mesh=None,
        tp_group=None,
    )


def sample(num_tokens: int, seed: int = 0) -> TokenSample:
    ids = np.random.default_rng(seed).integers(3, 480, num_tokens).astype(np.int32)
    return TokenSample(f"s{seed}", "chats.jsonl", seed, "train", ids, np.array([[num_tokens // 2, num_tokens - num_tokens // 2]], np.int32))


@pytest.fixture(scope="session")
def load() -> Callable[..., Target]:
    """`load(folder, layer_ids=…, final=…, **target section)` in float32."""

    def load(folder: Path, layer_ids: Sequence[int] = LAYERS, final: bool = False, **section: Any) -> Target:
        return load_target(TargetSection(path=str(folder), **{"dtype": "float32", **section}), lone_rank(), layer_ids, final)

    return load


@pytest.fixture(scope="session")
def target(load: Callable[..., Target], tiny_target: Path) -> Target:
    return load(tiny_target)
