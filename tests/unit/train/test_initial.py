"""Weights to start from, out of every kind of file; nothing that is not weights, and nothing of another shape."""

import json
import logging
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from pipeline.draft.export import export_draft
from pipeline.draft.model import Draft
from pipeline.errors import CheckpointError
from pipeline.runtime.ranks import start_ranks
from pipeline.train.checkpoint import TrainState, take_snapshot, write_snapshot
from pipeline.train.initial import load_initial
from tests.support.samples import learner


@pytest.fixture
def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(8)
    return {name: torch.randn(p.shape, generator=generator) for name, p in _new().named_parameters()}


def _new() -> Draft:
    return learner(start_ranks(1, None, 1)).draft


def _holds(draft: Draft, weights: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(p, weights[name]) for name, p in draft.named_parameters())


def test_none_changes_nothing() -> None:
    draft = _new()
    assert load_initial(draft, None) is None
    assert _holds(draft, dict(_new().named_parameters()))


def test_a_file_and_what_is_left_out_of_it(tmp_path: Path, weights: dict[str, torch.Tensor], caplog: pytest.LogCaptureFixture) -> None:
    file, draft = tmp_path / "draft.safetensors", _new()
    save_file({**{f"module.{name}": w for name, w in weights.items()}, "module.embed_tokens.weight": torch.ones(3)}, file)
    with caplog.at_level(logging.INFO):
        told = load_initial(draft, str(file))
    assert _holds(draft, weights)
    assert told is not None
    assert (told["kind"], told["prefix"], told["tensors"]) == ("safetensors file", "module.", len(weights))
    assert set(told["sha256"]) == {"draft.safetensors"}
    assert "left out: module.embed_tokens.weight" in caplog.text


def test_an_export_in_bfloat16_and_in_pieces(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    short = {name: w.bfloat16() for name, w in weights.items()}
    source = _new()
    source.load_state_dict(weights)
    export_draft(source.to(torch.bfloat16), tmp_path / "export")
    draft = _new()
    assert load_initial(draft, str(tmp_path / "export"))
    assert _holds(draft, {name: w.float() for name, w in short.items()})
    assert draft.fc.weight.dtype == torch.float32
    (tmp_path / "pieces").mkdir()
    halves = [dict(list(short.items())[::2]), dict(list(short.items())[1::2])]
    for number, half in enumerate(halves):
        save_file(half, tmp_path / "pieces" / f"model-{number}.safetensors")
    index = {name: f"model-{number}.safetensors" for number, half in enumerate(halves) for name in half}
    (tmp_path / "pieces" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    again = _new()
    told = load_initial(again, str(tmp_path / "pieces"))
    assert _holds(again, {name: w.float() for name, w in short.items()})
    assert told is not None
    assert set(told["sha256"]) == {"model-0.safetensors", "model-1.safetensors"}
    (tmp_path / "pieces" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"fc.weight": "../export/model.safetensors"}})
    )
    with pytest.raises(CheckpointError, match="names files outside of the folder"):
        load_initial(_new(), str(tmp_path / "pieces"))


def test_other_rope_beside_the_same_shapes_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    export_draft(_new(), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = config["rope_theta"] = 5e5
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_initial(_new(), str(tmp_path))
    assert "rope_theta was 500000.0 for these weights, this run has 10000.0" in caplog.text


def test_another_meaning_of_the_same_shapes_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What slots predict, what they are fed, and what their logits go through."""
    domino = {"variant": "domino", "emb_dim": 4, "gru_hidden_dim": 4}
    export_draft(learner(start_ranks(1, None, 1), draft=domino).draft, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["dflash_config"] |= {"shift_label": True, "mask_token_id": 7, "output_multiplier": 0.5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_initial(learner(start_ranks(1, None, 1), draft=domino).draft, str(tmp_path))
    for told in ("shift_label was True", "mask_token_id was 7", "output_multiplier was 0.5"):
        assert f"{told} for these weights" in caplog.text


def test_a_checkpoint_of_ours_gives_its_average(tmp_path: Path) -> None:
    learning = learner(start_ranks(1, None, 1), ema_decay=0.9)
    with torch.no_grad():
        learning.draft.fc.weight += 1
    learning.update_average(0.9, 30)
    snapshot = take_snapshot(learning, TrainState(step=3), {})
    assert snapshot is not None
    path, draft = write_snapshot(tmp_path, snapshot), _new()
    told = load_initial(draft, str(path))
    assert told is not None
    assert told["kind"] == "checkpoint of ours, average.safetensors"
    assert _holds(draft, dict(learning.evaluated().named_parameters()))
    assert not torch.equal(draft.fc.weight, learning.draft.fc.weight)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_dcp_folder_with_optimizer_state_beside(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    state: dict[str, Any] = {"model": {f"draft.{name}": w.bfloat16() for name, w in weights.items()}, "step": 7, "lr": 1e-3}
    state["optim"] = {"state": {f"draft.{name}": {"exp_avg": w} for name, w in weights.items()}}
    save_dcp(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    draft = _new()
    told = load_initial(draft, str(tmp_path / "dcp"))
    assert told is not None
    assert (told["kind"], told["prefix"]) == ("torch DCP folder", "model.draft.")
    assert _holds(draft, {name: w.bfloat16().float() for name, w in weights.items()})


class _Act:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_index_of_a_dcp_folder_cannot_run_anything(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    save_dcp(weights, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "dcp" / ".metadata").write_bytes(pickle.dumps(_Act(tmp_path / "acted")))
    with pytest.raises(CheckpointError, match=r"asks for posix\.mkdir, which describes no tensor; it was not run"):
        load_initial(_new(), str(tmp_path / "dcp"))
    assert not (tmp_path / "acted").exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("name", "content"), [(".metadata", b""), ("__0_0.distcp", b"half a file"), ("__0_0.distcp", None)], ids=["index", "data", "no data"]
)
def test_a_damaged_dcp_folder_is_one_error(tmp_path: Path, weights: dict[str, torch.Tensor], name: str, content: bytes | None) -> None:
    save_dcp(weights, checkpoint_id=tmp_path / "dcp", no_dist=True)
    (tmp_path / "dcp" / name).unlink()
    if content is not None:
        (tmp_path / "dcp" / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=r"cannot be read: its .* damaged: "):
        load_initial(_new(), str(tmp_path / "dcp"))


@pytest.mark.parametrize("text", ["[]", "{}", '{"weight_map": []}', '{"weight_map": {"fc.weight": 3}}'])
def test_an_index_of_another_form_is_one_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(CheckpointError, match="has no weight_map of tensors to files"):
        load_initial(_new(), str(tmp_path))
    (tmp_path / "state.json").write_text("[]")
    with pytest.raises(CheckpointError, match="expected an object, found a list"):
        load_initial(_new(), str(tmp_path))


def test_another_geometry_is_refused_tensor_by_tensor(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    file = tmp_path / "other.safetensors"
    lacking = {name: w for name, w in weights.items() if name != "norm.weight"}
    save_file({**lacking, "fc.weight": torch.ones(32, 64), "layers.2.mlp.up_proj.weight": torch.ones(3)}, file)
    draft = _new()
    with pytest.raises(CheckpointError) as error:
        load_initial(draft, str(file))
    assert "is of another geometry" in str(error.value)
    assert "fc.weight is [32, 64], the draft's is [32, 96]" in str(error.value)
    assert "norm.weight is missing; layers.2.mlp.up_proj.weight is not in the draft" in str(error.value)
    assert _holds(draft, dict(_new().named_parameters()))


def test_what_is_not_weights_is_refused(tmp_path: Path, weights: dict[str, torch.Tensor]) -> None:
    torch.save(weights, tmp_path / "weights.pt")
    (tmp_path / "bad.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(CheckpointError, match="does not exist"):
        load_initial(_new(), str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match=r"is none of what is read.*since they may run code"):
        load_initial(_new(), str(tmp_path / "weights.pt"))
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_initial(_new(), str(tmp_path / "bad.safetensors"))
    save_file({f"{tree}.{name}": w.clone() for tree in ("model", "ema") for name, w in weights.items()}, tmp_path / "twice.safetensors")
    with pytest.raises(CheckpointError, match=r"several times, under ema\., model\."):
        load_initial(_new(), str(tmp_path / "twice.safetensors"))
