"""Values and gradients by hand against the plain formulas."""

import pytest
import torch
import torch.nn.functional as F

from pipeline.draft.fused import rms_norm, situ, swiglu


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype).requires_grad_()


def test_swiglu() -> None:
    gate, up = random(4, 3), random(4, 3, seed=1)
    torch.testing.assert_close(swiglu(gate, up), F.silu(gate) * up)
    assert torch.autograd.gradcheck(swiglu, (gate, up))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("beta", "bound"), [(4.0, 25.0), (0.8, 0.5), (1.0, None)])
def test_situ(beta: float, bound: float | None, dtype: torch.dtype) -> None:
    gate, up, seed = random(40, 3, dtype=dtype), random(40, 3, dtype=dtype, seed=1), random(40, 3, dtype=dtype, seed=2).detach()
    out = situ(gate, up, beta, bound)
    linear = up.double() if bound is None else bound * torch.tanh(up.double() / bound)
    exact = beta * torch.tanh(gate.double() / beta) * torch.sigmoid(gate.double()) * linear
    tolerance = 1e-5 if dtype == torch.float32 else 0.01
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)
    ours, theirs = torch.autograd.grad(out, (gate, up), seed), torch.autograd.grad(exact, (gate, up), seed.double())
    for found, expected in zip(ours, theirs, strict=True):
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm(dtype: torch.dtype) -> None:
    x, weight = random(6, 4, 8, dtype=dtype), random(8, dtype=torch.float32, seed=1)
    transposed = x.transpose(0, 1)
    out = rms_norm(transposed, weight, 1e-6)
    exact = F.rms_norm(transposed.float(), (8,), weight, 1e-6)
    assert out.dtype == dtype
    tolerance = 2e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(out.float(), exact, rtol=tolerance, atol=tolerance)
    seed = random(4, 6, 8, dtype=dtype, seed=2).detach()
    ours = torch.autograd.grad(out, (x, weight), seed)
    theirs = torch.autograd.grad(exact, (x, weight), seed.float())
    for found, expected in zip(ours, theirs, strict=True):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found.float(), expected.float(), rtol=tolerance, atol=tolerance)
