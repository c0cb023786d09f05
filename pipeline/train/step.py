"""One optimizer step: gradients of sums, added up over micro-batches and ranks, and divided once.

The backward pass runs from the numerator Σ w·m·CE. Only when all micro-batches of all ranks are in is the gradient divided by
their common denominator, so it does not depend on how samples are grouped. Clipping comes after that, on the true gradient.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pipeline.draft.loss import ObjectiveSums, objective
from pipeline.draft.metrics import BlockSums
from pipeline.errors import TrainingError
from pipeline.records import DraftBatch
from pipeline.runtime.ranks import Ranks
from pipeline.train.learner import Learner, total_norm
from pipeline.train.optim import set_learning_rate


@dataclass(frozen=True, slots=True)
class Sums:
    """What losses and metrics are made of, summed over micro-batches, ranks, and any number of steps or validation batches."""

    values: tuple[float, ...]

    @classmethod
    def zero(cls, block_size: int) -> "Sums":
        return cls((0.0,) * (4 + 2 * block_size + 2))

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(tuple(a + b for a, b in zip(self.values, other.values, strict=True)))

    @property
    def samples(self) -> int:
        return int(self.values[2])

    @property
    def tokens(self) -> int:
        return int(self.values[3])

    @property
    def loss(self) -> float:
        """Σ numerators / Σ denominators; nan when nothing was supervised."""
        return self.values[0] / self.values[1] if self.values[1] else math.nan

    def metrics(self) -> dict[str, Any]:
        """loss, accept_len, accuracy, accuracy_by_slot (slots 1..B-1); empty when nothing was supervised."""
        if self.values[1] == 0:
            return {}
        blocks = BlockSums.from_vector(torch.tensor(self.values[4:], dtype=torch.float64))
        return {
            "loss": self.loss,
            "accept_len": blocks.accept_len,
            "accuracy": blocks.accuracy,
            "accuracy_by_slot": [None if math.isnan(value) else value for value in blocks.accuracy_by_slot[1:]],
        }


def sums_vector(sums: ObjectiveSums, batch: DraftBatch) -> torch.Tensor:
    """numerator, denominator, samples, tokens, then `BlockSums.vector`: float64 on the batch's device, ready to be added up."""
    device = sums.numerator.device
    scalars = torch.stack((sums.numerator.detach(), sums.denominator)).double()
    tokens = int(batch.document_end.amax(dim=1).sum()) if batch.sample_ids else 0
    counts = torch.tensor((len(batch.sample_ids), tokens), dtype=torch.float64, device=device)
    return torch.cat((scalars, counts, sums.metrics.vector().double()))


def reduce_sums(vector: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """Sum over the data-parallel ranks. Ranks of one tensor-parallel group hold the same samples, which count once."""
    if ranks.world_size > 1:
        vector = vector if ranks.tp_rank == 0 else torch.zeros_like(vector)
        dist.all_reduce(vector)
    return vector


@dataclass(frozen=True, slots=True)
class Step:
    """What one step did, over all ranks: sums, the norm of the gradient before clipping, and whether any rank asked to stop."""

    sums: Sums
    grad_norm: float
    stop: bool


def train_step(
    learner: Learner, batches: Iterator[DraftBatch], accumulate: int, rate: float, clip: float | None, stop: bool = False
) -> Step:
    """Take `accumulate` batches from `batches` and make one optimizer step at learning rate `rate`.

    Every rank must call it, and each of them, with whatever samples, runs the same collectives; `stop` travels with them, so
    that all ranks stop after the same step. Raises `TrainingError` on all ranks together when the loss or the gradient is
    not finite; weights are then those of before.
    """
    ranks = learner.ranks
    for optimizer in learner.optimizers:
        optimizer.zero_grad(set_to_none=True)
    total, seen = torch.zeros(1, dtype=torch.float64, device=ranks.device), []
    for number in range(accumulate):
        batch = next(batches)
        moved = batch.to(ranks.device)
        with nullcontext() if number == accumulate - 1 else learner.without_sync():
            with learner.accelerator.autocast():
                sums = objective(learner.model, learner.bundle, moved, learner.objective)
            torch.autograd.backward(sums.numerator)
        total = total + sums_vector(sums, batch)
        seen.append((batch.sample_ids, sums.numerator.detach()))
    total = reduce_sums(torch.cat((total, total.new_tensor([float(stop)]))), ranks)
    gradients = learner.gradients()
    # The wrapper averaged over all ranks, of which tp_size at a time hold the same samples: what is left is Σ / dp_size.
    torch._foreach_mul_(gradients, (ranks.dp_size / total[1].clamp(min=torch.finfo(torch.float32).tiny)).float())
    norm = total_norm(gradients, learner)
    *values, stopped, grad_norm = torch.cat((total, norm.double().view(1))).tolist()
    if not (math.isfinite(grad_norm) and math.isfinite(values[0])):
        raise _not_finite(seen, grad_norm, values[0] / max(values[1], 1e-30), ranks)
    if clip is not None:
        torch._foreach_mul_(gradients, (clip / (norm + 1e-6)).clamp(max=1.0))
    set_learning_rate(learner.optimizers, rate)
    for optimizer in learner.optimizers:
        optimizer.step()
    return Step(Sums(tuple(values)), grad_norm, stopped > 0)


def _not_finite(seen: Sequence[tuple[tuple[str, ...], torch.Tensor]], grad_norm: float, loss: float, ranks: Ranks) -> TrainingError:
    """The error with the samples of the whole global batch, which every rank gathers; suspects are micro-batches with a bad loss."""
    mine = [(ids, bool(torch.isfinite(numerator))) for ids, numerator in seen]
    everyone: list[list[tuple[tuple[str, ...], bool]]] = [mine]
    if ranks.world_size > 1:
        everyone = [[] for _ in range(ranks.world_size)]
        dist.all_gather_object(everyone, mine)
    everything = sorted({sample for rank in everyone for ids, _ in rank for sample in ids})
    suspects = {number: sorted({s for ids, fine in rank if not fine for s in ids}) for number, rank in enumerate(everyone)}
    where = "; ".join(f"on rank {number}: {', '.join(ids)}" for number, ids in suspects.items() if ids)
    count = len({sample for ids in suspects.values() for sample in ids})
    told = (
        f"{count} of the step's {len(everything)} samples were in micro-batches with a loss that is not finite, {where}"
        if where
        else f"every loss of its {len(everything)} samples is finite, the gradient is not: {', '.join(everything)}"
    )
    return TrainingError(
        f"the loss ({loss:.4g}) or the gradient (norm {grad_norm:.4g}) of this step is not finite; {told}. The weights were left as they "
        "were. Check the cache (its checksums and these samples' states), or lower model.optim.lr."
    )
