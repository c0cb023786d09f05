"""One process. Several are in tests/ranks."""

import dataclasses

import pytest
import torch

from pipeline.errors import LaunchError
from pipeline.runtime.ranks import start_ranks, stop_ranks


def test_a_plain_process_is_a_world_of_one(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="pipeline"):
        ranks = start_ranks(1, None, 1)
    stop_ranks()
    assert (ranks.rank, ranks.world_size, ranks.local_rank) == (0, 1, 0)
    assert (ranks.tp_size, ranks.tp_rank, ranks.dp_size, ranks.dp_rank) == (1, 0, 1, 0)
    assert ranks.mesh is None
    assert ranks.tp_group is None
    assert ranks.is_main
    assert ranks.device == torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    assert "world size 1" in caplog.text
    with pytest.raises(dataclasses.FrozenInstanceError):
        ranks.rank = 1  # type: ignore[misc]


def test_fewer_processes_than_asked_for_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match=r"trainer.devices=4 x trainer.num_nodes=2 asks for 8 processes, but 1 run"):
        start_ranks(1, 4, 2)
    with pytest.raises(LaunchError, match="tp_size=2 does not divide the world size 1"):
        start_ranks(2, None, 1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(LaunchError, match="WORLD_SIZE is 2, but accelerate sees a world of 1"):
        start_ranks(1, None, 1)
    monkeypatch.delenv("WORLD_SIZE")
    start_ranks(1, 1, 1)
    stop_ranks()
