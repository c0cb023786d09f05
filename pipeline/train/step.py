"""One optimizer step: gradients of sums, added up over micro-batches and ranks, and divided once.

The backward pass runs from the numerator Σ w·m·CE, or from several, each with a denominator of its own. Only when all micro-batches
of all ranks are in is the gradient divided by their common denominator, so it does not depend on how samples are grouped.
Clipping comes after that, on the true gradient.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from pipeline.draft.loss import ObjectiveSums, objective
from pipeline.draft.metrics import BlockSums, Layout
from pipeline.errors import TrainingError
from pipeline.records import DraftBatch
from pipeline.runtime.ranks import Ranks
from pipeline.train.learner import Learner, total_norm
from pipeline.train.optim import set_learning_rate


@dataclass(frozen=True, slots=True)
class Sums:
    """What losses and metrics are made of, summed over micro-batches, ranks, and any number of steps or validation batches.

    `values`: numerator and denominator of the first term, samples, tokens, `BlockSums.vector`, then pairs: the other terms of
    `layout`, and its means.
    """

    values: tuple[float, ...]
    layout: Layout

    @classmethod
    def zero(cls, layout: Layout) -> "Sums":
        return cls((0.0,) * (_fixed(layout) + 2 * (len(layout.terms) - 1 + len(layout.means))), layout)

    def __add__(self, other: "Sums") -> "Sums":
        return Sums(tuple(a + b for a, b in zip(self.values, other.values, strict=True)), self.layout)

    @property
    def samples(self) -> int:
        return int(self.values[2])

    @property
    def tokens(self) -> int:
        return int(self.values[3])

    @property
    def loss(self) -> float:
        """Σ factors · Σ numerators / Σ denominators; nan when nothing was supervised, and a further term without a denominator is 0."""
        terms = (self.values[:2], *self._pairs()[: len(self.layout.terms) - 1])
        return sum(factor * a / b for factor, (a, b) in zip(self.layout.factors, terms, strict=True) if b) if self.values[1] else math.nan

    def metrics(self) -> dict[str, Any]:
        """loss, accept_len, accuracy, accuracy_by_slot (of the slots that predict), and what a variant has besides, by its name; empty
        when nothing was supervised."""
        if self.values[1] == 0:
            return {}
        blocks = BlockSums.from_vector(torch.tensor(self.values[4 : _fixed(self.layout)], dtype=torch.float64))
        names = (*self.layout.terms, *self.layout.means)
        pairs = dict(zip(names, (self.values[:2], *self._pairs()), strict=True))
        return {
            **{name: a / b for name, (a, b) in pairs.items() if b},
            "loss": self.loss,
            "accept_len": blocks.accept_len,
            "accuracy": blocks.accuracy,
            "accuracy_by_slot": [None if math.isnan(value) else value for value in blocks.accuracy_by_slot[self.layout.first_slot :]],
        }

    def _pairs(self) -> list[tuple[float, ...]]:
        """Numerator and denominator of further terms, then of means."""
        rest = self.values[_fixed(self.layout) :]
        return list(zip(rest[::2], rest[1::2], strict=True))


def _fixed(layout: Layout) -> int:
    """How many sums there are whatever the variant: four, and those of the blocks."""
    return 4 + 2 * layout.block_size + 2


def sums_vector(sums: ObjectiveSums, batch: DraftBatch) -> torch.Tensor:
    """The values of `Sums`, float64 on the batch's device, ready to be added up."""
    terms = torch.stack((sums.numerators.detach(), sums.denominators), dim=1).double()
    tokens = int(batch.document_end.amax(dim=1).sum()) if batch.sample_ids else 0
    counts = torch.tensor((len(batch.sample_ids), tokens), dtype=torch.float64, device=terms.device)
    return torch.cat((terms[0], counts, sums.metrics.vector().double(), terms[1:].flatten(), sums.means.double().flatten()))


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
    learner: Learner,
    batches: Iterator[DraftBatch],
    accumulate: int,
    rate: float,
    clip: float | None,
    stop: bool = False,
    done: float = 0.0,
) -> Step:
    """Take `accumulate` batches from `batches` and make one optimizer step at learning rate `rate`; `done` as in `objective`.

    Every rank must call it, and each of them, with whatever samples, runs the same collectives; `stop` travels with them, so
    that all ranks stop after the same step. Raises `TrainingError` on all ranks together when the loss or the gradient is
    not finite; weights are then those of before.
    """
    ranks = learner.ranks
    for optimizer in learner.optimizers:
        optimizer.zero_grad(set_to_none=True)
    total, seen, waiting = torch.zeros(1, dtype=torch.float64, device=ranks.device), [], []
    for number in range(accumulate):
        batch = next(batches)
        moved = batch.to(ranks.device)
        with nullcontext() if number == accumulate - 1 else learner.without_sync():
            with learner.accelerator.autocast():
                sums = objective(learner.model, learner.bundle, moved, learner.objective, done)
            if len(sums.numerators) == 1:
                torch.autograd.backward(sums.numerator)
            else:
                waiting.append(sums.numerators)
        total = total + sums_vector(sums, batch)
        seen.append((batch.sample_ids, sums.numerators.detach().sum()))
    total = reduce_sums(torch.cat((total, total.new_tensor([float(stop)]))), ranks)
    if waiting:
        _together(waiting, total, learner.layout)
    gradients = learner.gradients()
    # The wrapper averaged over all ranks, of which tp_size at a time hold the same samples: what is left is Σ / dp_size.
    torch._foreach_mul_(gradients, (ranks.dp_size / total[1].clamp(min=1e-30)).float())  # finite for any number of ranks
    norm = total_norm(gradients, learner)
    *values, stopped, grad_norm = torch.cat((total, norm.double().view(1))).tolist()
    if not all(map(math.isfinite, (*values, grad_norm))):
        raise _not_finite(seen, grad_norm, values[0] / max(values[1], 1e-30), ranks)
    if clip is not None:
        torch._foreach_mul_(gradients, (clip / (norm + 1e-6)).clamp(max=1.0))
    set_learning_rate(learner.optimizers, rate)
    for optimizer in learner.optimizers:
        optimizer.step()
    return Step(Sums(tuple(values), learner.layout), grad_norm, stopped > 0)


def _together(waiting: Sequence[torch.Tensor], total: torch.Tensor, layout: Layout) -> None:
    """The backward pass of objectives with several terms, from numerators [K] of all micro-batches at once.

    Each term has a denominator of its own, known only when the step's sums are in. What comes out is the gradient of the loss times
    the first denominator, by which all gradients are divided alike. Until then every micro-batch keeps K sets of gradients.
    """
    first, further = total[1:2], total[_fixed(layout) :][1 : 2 * len(layout.terms) - 2 : 2]
    denominators = torch.cat((first, further))
    scales = torch.where(denominators > 0, first / denominators, 0.0)
    torch.autograd.backward(torch.stack(tuple(waiting)).sum(dim=0) @ (scales * scales.new_tensor(layout.factors)).float())


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
