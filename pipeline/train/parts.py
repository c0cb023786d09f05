"""Tensors that may be divided over the ranks (FSDP2): put together, this rank's part, and divided again. Whole ones pass through."""

import torch
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Put together from all ranks, which must all call it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds, sharing memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def placed_like(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The whole `value` on the device of `like`, divided over the ranks as that is. Nothing is sent."""
    value = value.to(like.device)
    if isinstance(like, DTensor) and value.shape == like.shape:
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return value
