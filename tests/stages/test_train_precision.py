"""bfloat16 is what is computed in, float32 what is kept."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from pipeline.runtime.ranks import start_ranks
from pipeline.train.checkpoint import checkpoints
from pipeline.train.loop import train
from tests.support.tiny import write_chats
from tests.support.training import config, repeatable


def test_bf16_mixed_computes_in_bfloat16_and_keeps_float32(tmp_path: Path, tiny_target: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 12, seed=3)
    last = {}
    for precision in ("fp32", "bf16-mixed"):
        changes = {"trainer__precision": precision, "trainer__max_steps": 20, "data__mode": "online", "model__optim__lr": 6e-4}
        wanted = config(tmp_path / precision, tiny_target, chats, model__target__dtype="bfloat16", **changes)
        assert train(wanted, start_ranks(1, None, 1))
        last[precision] = [line for line in repeatable(tmp_path / precision / "run") if "loss" in line][-1]
    run = tmp_path / "bf16-mixed" / "run"
    assert last["bf16-mixed"]["loss"] != last["fp32"]["loss"]
    assert last["bf16-mixed"]["loss"] == pytest.approx(last["fp32"]["loss"], rel=1e-2)
    saved = checkpoints(run / "checkpoints")[-1]
    weights, moments = load_file(saved / "draft.safetensors"), load_file(saved / "optimizer.safetensors")
    assert {tensor.dtype for tensor in [*weights.values(), *moments.values()]} == {torch.float32}
    norms = {name: tensor for name, tensor in weights.items() if "norm" in name}
    assert len(norms) == 2 + 4 * 2
    for name, tensor in norms.items():
        assert not torch.equal(tensor, torch.ones_like(tensor)), name
    exported = load_file(run / "export" / "model.safetensors")
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    assert all(torch.equal(exported[name], weights[name].bfloat16()) for name in weights)


@pytest.mark.slow
def test_norms_leave_1_in_200_steps(tmp_path: Path, tiny_target: Path) -> None:
    """Next to 1 bfloat16 has steps of 2^-8 and 2^-7, which an update of 6e-4 never makes: masters in bfloat16 would stay."""
    chats = write_chats(tmp_path / "chats.jsonl", 12, seed=3)
    changes = {"trainer__precision": "bf16-mixed", "trainer__max_steps": 200, "data__mode": "online", "model__optim__lr": 6e-4}
    assert train(config(tmp_path, tiny_target, chats, model__target__dtype="bfloat16", **changes), start_ranks(1, None, 1))
    saved = checkpoints(tmp_path / "run" / "checkpoints")[-1]
    for name, tensor in load_file(saved / "draft.safetensors").items():
        if "norm" in name:
            assert float((tensor - 1).abs().max()) > 2**-7, name
    assert {tensor.dtype for tensor in load_file(saved / "optimizer.safetensors").values()} == {torch.float32}
    for name, tensor in load_file(tmp_path / "run/export/model.safetensors").items():
        if "norm" in name:
            assert not torch.equal(tensor, torch.ones_like(tensor)), name
