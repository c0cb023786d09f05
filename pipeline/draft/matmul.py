"""Matrix products of float32 on CPUs, by the quicker of the two libraries that torch brings.

torch hands them to MKL, which gives processors that are not Intel's its code for AVX2. oneDNN, to which torch hands other dtypes,
has AVX-512 for all: on an AMD EPYC 2.2 times the products a second, equal to MKL's to rounding. Everywhere else, and for a few rows,
where reading the weights is what takes the time, products are torch's own.
"""

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

# Code for every shape of a product is kept, up to 1024 shapes in each of two caches: 700 MiB, where batches are of many lengths. A step
# has far fewer shapes. Both are read when the first product is made.
for _cache in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "128")

FEW_ROWS = 4
"""With fewer rows than that, MKL is as quick."""

# What torch's compiler writes for a linear layer on a CPU: x [..., K], weight [N, K] of any strides, bias [N] -> [..., N]. There only
# where torch was built with oneDNN.
_onednn_linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
ONEDNN = _onednn_linear is not None and torch.backends.cpu.get_cpu_capability() == "AVX512"
"""Whether oneDNN is the quicker one here. By what the machine is, not by a measurement: a machine gives the same bits every time."""


def times_transposed(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, by: torch.Tensor | None = None) -> torch.Tensor:
    """(a [M, K] times the transpose of b [N, K] + bias [N]) * by [M, N], in one pass where oneDNN does it; [M, N], without a gradient.

    `b` may have any strides; an `a` whose rows are apart is copied.
    """
    if _is_quicker(a, b):
        return _onednn(a, b, bias, by)
    result = a @ b.T if bias is None else torch.addmm(bias, a, b.T)
    return result if by is None else result.mul_(by)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K] times the transpose of `weight` [N, K], plus `bias` [N]: `F.linear`, with its gradients."""
    plain = torch.is_autocast_enabled(x.device.type) or torch.compiler.is_compiling() or type(weight) not in (torch.Tensor, nn.Parameter)
    if plain or not _is_quicker(x, weight):
        # By rows: a slice of a single text has strides that torch takes for a batch's, and it would copy the weight for each of them.
        return F.linear(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], weight.shape[0])
    if not torch.is_grad_enabled():
        return _onednn(x, weight, bias)
    result: torch.Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return result


class Linear(nn.Linear):
    """torch's, by `linear`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


def _is_quicker(a: torch.Tensor, b: torch.Tensor) -> bool:
    return ONEDNN and a.device.type == "cpu" and a.dtype == b.dtype == torch.float32 and a.numel() >= FEW_ROWS * a.shape[-1] > 0


def _onednn(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None, by: torch.Tensor | None = None) -> torch.Tensor:
    assert _onednn_linear is not None
    result: torch.Tensor = _onednn_linear(a, b, bias, "none", [], "") if by is None else _onednn_linear.binary(a, by, b, bias, "mul")
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        rows, d_weight = grad.flatten(0, -2), None
        d_x = _onednn(grad, weight.T) if wants_x else None
        if wants_weight:
            # The left factor is copied, turned round: let it be the smaller one. The gradient may so be a transposed view.
            left, right = rows.T, x.flatten(0, -2).T
            d_weight = _onednn(left, right) if len(left) <= len(right) else _onednn(right, left).T
        return d_x, d_weight, rows.sum(0) if wants_bias else None
