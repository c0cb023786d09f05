"""Products by oneDNN and by torch agree, gradients included, whichever the machine takes."""

import pytest
import torch
import torch.nn.functional as F

from pipeline.draft import matmul
from pipeline.draft.matmul import Linear, linear, times_transposed

needs_onednn = pytest.mark.skipif(matmul._onednn_linear is None, reason="this torch has no oneDNN")


@needs_onednn
@pytest.mark.parametrize("quicker", [True, False])
@pytest.mark.parametrize("rows", [0, 1, matmul.FEW_ROWS, 70])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("wide", "out_wide"), [(9, 17), (17, 9)])
def test_linear(quicker: bool, rows: int, bias: bool, wide: int, out_wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "ONEDNN", quicker)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, wide, rows, generator=generator).transpose(1, 2).requires_grad_()  # not contiguous
    weight = torch.randn(out_wide, wide, generator=generator).requires_grad_()
    inputs = [x, weight, *([torch.randn(out_wide, generator=generator).requires_grad_()] if bias else [])]
    by = torch.randn(2, rows, out_wide, generator=generator)
    found, expected = linear(*inputs), F.linear(*inputs)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(*(torch.autograd.grad((out * by).sum(), inputs) for out in (found, expected)), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    a, b = x.detach()[0], weight.detach()
    torch.testing.assert_close(times_transposed(a, b), a @ b.T)


@needs_onednn
def test_only_what_needs_a_gradient_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "ONEDNN", True)
    layer = Linear(5, 3)
    x = torch.randn(6, 5)
    layer(x).sum().backward()
    assert x.grad is None
    assert layer.weight.grad is not None
    layer.requires_grad_(False)
    x.requires_grad_()
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(6, 5))


def test_autocast_is_torch_s_own() -> None:
    layer = Linear(5, 3)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(6, 5)).dtype == torch.bfloat16
    assert Linear(5, 3).bfloat16()(torch.randn(6, 5, dtype=torch.bfloat16)).dtype == torch.bfloat16
