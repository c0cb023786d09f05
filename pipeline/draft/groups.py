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
CPU_SLOTS, DEVICE_SLOTS = 512, 8192


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
"""The sum [] of one group, given the shared tensors; besides those it depends on the parameters alone."""


def sum_over(
    groups: Sequence[Place], score: GroupScore, shared: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Σ score(place, shared) over `groups`, fp32 []. Its gradient reaches `shared` and `parameters`."""
    if not torch.is_grad_enabled() or not any(tensor.requires_grad for tensor in (*shared, *parameters)):
        return torch.stack([score(place, shared) for place in groups]).sum()
    total: torch.Tensor = _Sum.apply(groups, score, len(shared), *shared, *parameters)  # type: ignore[no-untyped-call]
    return total


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, groups: Sequence[Place], score: GroupScore, num_shared: int, *inputs: torch.Tensor) -> torch.Tensor:
        # Cut off from how they were made: what lies behind them goes backward once, when all groups have.
        shared = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs[:num_shared]]
        everything = [*shared, *inputs[num_shared:]]
        which = [index for index, tensor in enumerate(everything) if tensor.requires_grad]
        sums: list[torch.Tensor | None] = [None] * len(everything)
        scores = []
        for place in groups:
            with torch.enable_grad():
                one = score(place, shared)
            # A backward pass runs without autocast, in the dtypes that the forward left.
            with torch.autocast(one.device.type, enabled=False):
                grads = torch.autograd.grad(one, [everything[index] for index in which], allow_unused=True)
            for index, grad in zip(which, grads, strict=True):
                old = sums[index]
                # Not in place: gradients of two tensors may be one tensor.
                sums[index] = grad if old is None else old if grad is None else old + grad
            scores.append(one.detach())
        ctx.sums = sums
        return torch.stack(scores).sum()

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sums, ctx.sums = ctx.sums, None
        return None, None, None, *(None if grad is None else grad * upstream for grad in sums)
