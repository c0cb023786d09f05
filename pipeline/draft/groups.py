"""A sum over groups of blocks, with each group's gradient formed before the next group runs.

Blocks never see one another; all that they share is the context's keys and values, and the weights. So a group can go
forward, be scored and go backward by itself, and only one group's activations exist at a time. Nothing is computed twice.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

Place = tuple[slice, slice]
"""Rows and blocks of a batch."""

# Slots that run together: on a CPU about what its caches hold, elsewhere enough to fill the device.
CPU_SLOTS, DEVICE_SLOTS = 1024, 8192


def places(valid: torch.Tensor, block_size: int) -> list[Place]:
    """Rectangles that cover the blocks of `valid` bool [rows, blocks], each of at most the slots that run together, or one block.

    Those of padding alone are left out, which rows of unequal numbers of anchors have much of. At least one stays: all parameters then get
    a gradient, of zeros.
    """
    rows, blocks = valid.shape
    most = max(1, (CPU_SLOTS if valid.device.type == "cpu" else DEVICE_SLOTS) // block_size)
    width, height = min(most, blocks), max(1, most // blocks)
    everything = [
        (slice(row, min(row + height, rows)), slice(block, min(block + width, blocks)))
        for row in range(0, rows, height)
        for block in range(0, blocks, width)
    ]
    needed = torch.stack([valid[place].any() for place in everything]).tolist()
    return [place for place, is_needed in zip(everything, needed, strict=True) if is_needed] or everything[:1]


GroupScore = Callable[[Place, Sequence[torch.Tensor]], torch.Tensor]
"""The sums [K] of one group, given the shared tensors; besides those they depend on the parameters alone."""


def sum_over(
    groups: Sequence[Place], score: GroupScore, shared: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Σ score(place, shared) over `groups`, fp32 [K]. Its gradient reaches `shared` and `parameters`.

    The gradients of the K sums are kept apart, so that each can be scaled afterwards; every sum beyond the first costs a backward pass
    of its own, in time, and one more set of gradients.
    """
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in (*shared, *parameters)):
        return torch.stack([score(place, shared) for place in groups]).sum(dim=0)
    total: torch.Tensor = _Sum.apply(groups, score, len(shared), *shared, *parameters)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, groups: Sequence[Place], score: GroupScore, num_shared: int, *inputs: torch.Tensor) -> torch.Tensor:
        # Cut off from how they were made: what lies behind them goes backward once, when all groups have.
        shared = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs[:num_shared]]
        everything = [*shared, *inputs[num_shared:]]
        which = [index for index, tensor in enumerate(everything) if tensor.requires_grad]
        sums: list[list[torch.Tensor | None]] = []
        scores = []
        # The gradients of two tensors may be one tensor; only what we added up ourselves is added to in place.
        ours: set[tuple[int, int]] = set()
        for place in groups:
            with torch.enable_grad():
                terms = score(place, shared).unbind()
            sums = sums or [[None] * len(everything) for _ in terms]
            for number, term in enumerate(terms):
                # A backward pass runs without autocast, in the dtypes that the forward left.
                with torch.autocast(term.device.type, enabled=False):
                    wanted = [everything[index] for index in which]
                    grads = torch.autograd.grad(term, wanted, allow_unused=True, retain_graph=number + 1 < len(terms))
                for index, grad in zip(which, grads, strict=True):
                    old = sums[number][index]
                    if old is None or grad is None:
                        sums[number][index] = grad if old is None else old
                    else:
                        sums[number][index] = old.add_(grad) if (number, index) in ours else old + grad
                        ours.add((number, index))
            scores.append(torch.stack(terms).detach())
        ctx.sums = sums
        return torch.stack(scores).sum(dim=0)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sums = ctx.sums
        if len(sums) == 1:
            ctx.sums = None  # of several sums, each may go backward by itself
        return None, None, None, *(_weighted(grads, upstream) for grads in zip(*sums, strict=True))


def _weighted(grads: Sequence[torch.Tensor | None], weights: torch.Tensor) -> torch.Tensor | None:
    """Σ weights[k]·grads[k]; None where no sum depends on the tensor."""
    total: torch.Tensor | None = None
    for grad, weight in zip(grads, weights.unbind(), strict=True):
        if grad is not None:
            total = grad * weight if total is None else total.addcmul_(grad, weight.to(grad.dtype))
    return total
