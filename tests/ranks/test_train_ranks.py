"""Training on several real ranks: the numbers of one, and no rank left waiting."""

import itertools
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pipeline.capture.run import capture
from pipeline.draft.anchors import usable_anchors
from pipeline.draft.batch import BatchShape
from pipeline.errors import TrainingError
from pipeline.records import CapturedSample, TokenSample
from pipeline.runtime.ranks import start_ranks
from pipeline.train.divide import Division
from pipeline.train.evaluate import validate
from pipeline.train.feed import Feed
from pipeline.train.loop import train
from pipeline.train.order import Order, Position
from pipeline.train.step import train_step
from tests.support.launch import accelerate_launch, run_ranks, spawn_ranks
from tests.support.samples import HIDDEN, LAYERS, captured, learner
from tests.support.tiny import write_chats
from tests.support.training import config, repeatable

pytestmark = pytest.mark.slow


def _feed(samples: list[CapturedSample]) -> Feed:
    def draw(tokens: TokenSample, epoch: int) -> Any:
        return usable_anchors(tokens.spans, tokens.num_tokens, 4, "partial")

    return Feed(lambda numbers: [samples[n] for n in numbers], draw, BatchShape(LAYERS, 4, HIDDEN, torch.float32), 0)


def _uneven(rank: int, world_size: int) -> tuple[list[tuple[int, int]], torch.Tensor, str]:
    """Global batches of 3 of 7 samples in 2 micro-batches: ranks have unequal ones, empty ones, none at all; then a bad sample."""
    ranks = start_ranks(1, None, 1)
    samples = captured(7, seed=6)
    order = Order(0, torch.arange(7).numpy(), torch.tensor([s.tokens.num_tokens for s in samples]).numpy(), 3)
    learning = learner(ranks)
    batches = _feed(samples).micro_batches(order, Position(), Division(ranks.dp_size, 2), ranks.dp_rank)
    seen: list[tuple[int, int]] = []
    for _ in range(6):
        step = train_step(learning, batches, 2, 1e-3, 1.0, stop=rank == 1 and len(seen) == 4)
        seen.append((step.sums.samples, step.sums.tokens))
        assert step.stop == (len(seen) == 5)
    weights = torch.cat([p.detach().flatten() for p in learning.draft.parameters()])
    bad = replace(samples[0], hidden={layer: state * torch.nan for layer, state in samples[0].hidden.items()})
    alone = Order(0, order.indices[:2], order.num_tokens[:2], 2)
    with pytest.raises(TrainingError) as error:
        train_step(
            learning, _feed([bad, samples[1]]).micro_batches(alone, Position(), Division(ranks.dp_size), ranks.dp_rank), 1, 1e-3, 1.0
        )
    assert torch.equal(weights, torch.cat([p.detach().flatten() for p in learning.draft.parameters()]))
    return seen, weights, str(error.value)


def test_ranks_without_samples_take_part_and_a_bad_sample_stops_all() -> None:
    expected = _one_rank()
    results = spawn_ranks(_uneven, 2, timeout=100)
    for seen, weights, message in results:
        assert seen == expected[0]
        assert (weights - expected[1]).norm() / expected[1].norm() < 1e-4
        assert "1 of the step's 2 samples were in micro-batches with a loss that is not finite, on rank " in message
        assert ": sample-0. The weights" in message
    assert torch.equal(results[0][1], results[1][1])


def _asked_on_one(rank: int, world_size: int) -> tuple[bool, int, bool]:
    """A validation with SIGTERM on rank 1 alone, after its first sample; then one without."""
    ranks, samples = start_ranks(1, None, 1), captured(8, seed=6)
    learning = learner(ranks)
    asked: list[int] = []
    read: list[int] = []

    def source(numbers: Sequence[int]) -> list[CapturedSample]:
        read.extend(numbers)
        if rank == 1:
            asked.append(signal.SIGTERM)
        return [samples[n] for n in numbers]

    data: Any = SimpleNamespace(source=source, any_thread=False)
    stopped = validate(learning, learning.evaluated(), data, {"one": range(4), "two": range(4, 8)}, 0, asked)
    count = len(read)
    return stopped is None, count, bool(validate(learning, learning.evaluated(), data, {"one": range(4)}, 0))


def test_a_validation_that_one_rank_is_asked_to_leave_is_left_by_all() -> None:
    (none_0, read_0, after_0), (none_1, read_1, after_1) = spawn_ranks(_asked_on_one, 2, timeout=100)
    assert none_0
    assert none_1
    assert after_0
    assert after_1
    assert (read_0, read_1) == (4, 2)  # of each set, one sample is read before it is left


def _one_rank() -> tuple[list[tuple[int, int]], torch.Tensor]:
    ranks, samples = start_ranks(1, None, 1), captured(7, seed=6)
    order = Order(0, torch.arange(7).numpy(), torch.tensor([s.tokens.num_tokens for s in samples]).numpy(), 3)
    learning = learner(ranks)
    batches = _feed(samples).micro_batches(order, Position(), Division(), 0)
    seen = [(s.sums.samples, s.sums.tokens) for s in (train_step(learning, batches, 1, 1e-3, 1.0) for _ in range(6))]
    assert [count for count, _ in seen] == [3, 3, 1, 3, 3, 1]
    return seen, torch.cat([p.detach().flatten() for p in learning.draft.parameters()])


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chats(tmp_path_factory.mktemp("chats") / "chats.jsonl", 24, seed=7)


def _same_numbers(folder: Path, other: Path) -> None:
    """Rates and samples exactly; losses and counts of acceptance within rounding."""
    for one, two in itertools.zip_longest(repeatable(folder), repeatable(other)):
        assert one.keys() == two.keys()
        for name in ("step", "epoch", "lr", "samples_seen", "tokens_seen"):
            assert one.get(name) == two.get(name)
        for name in one.keys() & {"loss", "val_loss", "val/heldout/loss"}:
            assert one[name] == pytest.approx(two[name], rel=1e-5), (one["step"], name)


def test_twenty_steps_by_accelerate_launch(tmp_path: Path, tiny_target: Path, chats: Path) -> None:
    from pipeline.config.load import to_yaml

    changes = {"trainer__max_steps": 20, "trainer__val_check_interval": 10, "trainer__accumulate_grad_batches": 2, "data__num_workers": 2}
    ranks = start_ranks(1, None, 1)
    alone = config(tmp_path, tiny_target, chats, **changes)
    capture(alone, ranks)
    assert train(alone, ranks)
    together = config(tmp_path, tiny_target, chats, exp_manager__explicit_log_dir=str(tmp_path / "two"), **changes)
    (tmp_path / "two.yaml").write_text(to_yaml(together))
    done = accelerate_launch("stages/train_draft.py", str(tmp_path / "two.yaml"), "trainer.devices=2", timeout=150)
    assert "world size 2 (dp 2 x tp 1)" in done.text
    _same_numbers(tmp_path / "run", tmp_path / "two")
    assert (tmp_path / "two" / "logs" / "rank1.log").exists()


def test_online_with_a_divided_target(tmp_path: Path, tiny_target: Path, chats: Path) -> None:
    from pipeline.config.load import to_yaml

    changes = {"trainer__max_steps": 8, "trainer__val_check_interval": 4, "data__mode": "online"}
    alone = config(tmp_path, tiny_target, chats, **changes)
    assert train(alone, start_ranks(1, None, 1))
    divided = config(tmp_path, tiny_target, chats, exp_manager__explicit_log_dir=str(tmp_path / "two"), **changes)
    (tmp_path / "two.yaml").write_text(to_yaml(divided))
    run_ranks("stages/train_draft.py", str(tmp_path / "two.yaml"), "model.target.tp_size=2", num_ranks=2, timeout=150)
    _same_numbers(tmp_path / "run", tmp_path / "two")
