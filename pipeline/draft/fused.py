"""RMS norm and gated activations with gradients by hand: the same numbers, and half or less of what autograd would keep for them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) · weight over the last dimension of `x` [..., H]; the mean square in fp32, the result in the dtype of `x`."""
    if not torch.is_grad_enabled():  # a Function takes longer to call than these few rows take to norm when decoding
        return _normed(x, weight, eps)[0]
    out: torch.Tensor = _RMSNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The result, and 1 / rms(x) fp32 [..., 1]."""
    square = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
    inverse = square.div_(x.shape[-1]).add_(eps).rsqrt_()
    return ((x * inverse).to(x.dtype) * weight).to(x.dtype), inverse


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate) · up."""
    if not torch.is_grad_enabled():
        return F.silu(gate).mul_(up)
    out: torch.Tensor = _SwiGLU.apply(gate, up)  # type: ignore[no-untyped-call]
    return out


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


def situ(gate: torch.Tensor, up: torch.Tensor, beta: float, bound: float | None) -> torch.Tensor:
    """beta·tanh(gate / beta)·sigmoid(gate) · bound·tanh(up / bound), or · up without a bound: computed in fp32, in the dtype of `gate`."""
    out: torch.Tensor = _Situ.apply(gate, up, beta, bound)  # type: ignore[no-untyped-call]
    return out


class _RMSNorm(torch.autograd.Function):
    """With n = x / rms(x) and g the gradient by n: dx = (g - n · mean(g · n)) / rms(x)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        out, inverse = _normed(x, weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        normed, wide = x * inverse, weight.float()
        by_weight = grad * normed
        mean = (by_weight @ wide).div_(x.shape[-1]).unsqueeze(-1)
        d_x = (grad * wide).sub_(normed.mul_(mean)).mul_(inverse)
        return d_x.to(x.dtype), by_weight.flatten(0, -2).sum(0).to(weight.dtype), None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, up = ctx.saved_tensors
        d_gate: torch.Tensor = torch.ops.aten.silu_backward(grad * up, gate)
        return d_gate, F.silu(gate).mul_(grad)


class _Situ(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, beta: float, bound: float | None) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        ctx.bounds = beta, bound
        wide = gate.float()
        gated = (wide / beta).tanh_().mul_(beta).mul_(wide.sigmoid())
        linear = up.float() if bound is None else (up.float() / bound).tanh_().mul_(bound)
        return gated.mul_(linear).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        beta, bound = ctx.bounds
        wide, grad = gate.float(), grad.float()
        tanh, sigmoid = (wide / beta).tanh_(), wide.sigmoid()
        slope = (1 - tanh.square()) * sigmoid + beta * tanh * sigmoid * (1 - sigmoid)
        gated = beta * tanh * sigmoid
        if bound is None:
            return (grad * up * slope).to(gate.dtype), (grad * gated).to(up.dtype), None, None
        limited = (up.float() / bound).tanh_()
        d_up = grad * gated * (1 - limited.square())
        return (grad * bound * limited * slope).to(gate.dtype), d_up.to(up.dtype), None, None
