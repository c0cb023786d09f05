"""Tensor parallelism: the same states and the same bundle on any number of ranks."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.config.schema import TargetSection
from pipeline.errors import TargetError
from pipeline.records import TokenSample
from pipeline.target.load import load_target
from tests.support.launch import spawn_ranks
from tests.support.tiny import TinyShape, write_target
from tests.unit.target.conftest import lone_rank

Arrays = dict[str, Any]


def _samples(first: int, n: int) -> list[TokenSample]:
    rng = np.random.default_rng(first)
    return [
        TokenSample(
            f"s{i}", "chats.jsonl", i, "train", rng.integers(3, 480, int(rng.integers(4, 50))).astype(np.int32), np.zeros((0, 2), np.int32)
        )
        for i in range(first, first + n)
    ]


def _collect(target: Any, dp_rank: int) -> Arrays:
    """States by sample and layer and the bundle; data-parallel rows forward different samples, and different numbers of them."""
    from pipeline.target.forward import forward_hidden
    from pipeline.target.head import bundle_of
    from pipeline.target.probe import check_padding, probe_states

    check_padding(target)
    bundle = bundle_of(target)
    assert (bundle.head is bundle.embedding) is target.config["tie_word_embeddings"]
    assert type(bundle.embedding) is torch.Tensor
    found: Arrays = {"embedding": bundle.embedding.numpy(), "head": bundle.head.numpy(), "norm": bundle.final_norm.numpy()}
    found |= {f"probe {name}": state.numpy() for name, state in probe_states(target).items()}
    for batch in range(2 + 2 * dp_rank):
        for captured in forward_hidden(target, _samples(100 * dp_rank + 3 * batch, 3)):
            for layer, state in captured.hidden.items():
                found[f"{captured.tokens.sample_id} {layer}"] = state.numpy()
            assert captured.final is not None
            found[f"{captured.tokens.sample_id} final"] = captured.final.numpy()
    return found


def _captured(rank: int, world_size: int, folder: str, tp_size: int) -> Arrays:
    from pipeline.runtime.ranks import start_ranks

    ranks = start_ranks(tp_size, None, 1)
    target = load_target(TargetSection(path=folder, dtype="float32", tp_size=tp_size), ranks, (5, 1), True)
    return _collect(target, ranks.dp_rank)


def _alone(folder: Path, dp_ranks: int = 1) -> list[Arrays]:
    target = load_target(TargetSection(path=str(folder), dtype="float32"), lone_rank(), (5, 1), True)
    return [_collect(target, dp_rank) for dp_rank in range(dp_ranks)]


def _refused(rank: int, world_size: int, folder: str) -> str:
    from pipeline.runtime.ranks import start_ranks

    ranks = start_ranks(world_size, None, 1)
    with pytest.raises(TargetError) as error:
        load_target(TargetSection(path=folder, dtype="float32", tp_size=world_size), ranks, (1,), False)
    return str(error.value)


def _compare(parts: list[Arrays], whole: list[Arrays]) -> None:
    """Every rank of `parts` holds what the lone rank that forwarded the same samples holds."""
    for part in parts:
        reference = next(one for one in whole if one.keys() == part.keys())
        for name, array in part.items():
            exact = name in ("embedding", "head", "norm")
            np.testing.assert_allclose(
                array, reference[name], rtol=0, atol=0 if exact else 1e-5 * np.abs(reference[name]).max(), err_msg=name
            )


@pytest.mark.slow
def test_tp_2_is_tp_1(tiny_target: Path) -> None:
    parts = spawn_ranks(_captured, 2, str(tiny_target), 2)
    _compare(parts, _alone(tiny_target))
    for name in parts[0]:
        np.testing.assert_array_equal(parts[0][name], parts[1][name], err_msg=name)


@pytest.mark.slow
def test_two_groups_of_two_that_share_nothing(tmp_path: Path) -> None:
    folder = write_target(tmp_path / "tied", shape=TinyShape(tied=True))
    parts = spawn_ranks(_captured, 4, str(folder), 2)
    _compare(parts, _alone(folder, 2))
    assert len({frozenset(part) for part in parts}) == 2


@pytest.mark.slow
def test_three_ranks_divide_three_heads_and_not_four(tmp_path: Path, tiny_target: Path) -> None:
    folder = write_target(tmp_path / "three", shape=TinyShape(hidden=48, heads=3, kv_heads=3))
    _compare(spawn_ranks(_captured, 3, str(folder), 3), _alone(folder))
    assert all("does not divide the 4 num_attention_heads" in words for words in spawn_ranks(_refused, 3, str(tiny_target)))
