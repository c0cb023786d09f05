import json
import shutil
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config.schema import TargetSection
from pipeline.errors import TargetError
from pipeline.target.folder import read_config, target_fields, target_folder, weight_files, weights_digest


@pytest.fixture
def copy(tiny_target: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_target, tmp_path / "copy"))


def test_digest_is_of_the_weights_alone(copy: Path, tiny_target: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    split = tmp_path / "split"
    AutoModelForCausalLM.from_pretrained(tiny_target).save_pretrained(split, max_shard_size="200KB")
    assert len(weight_files(split)) > 2
    assert weights_digest(str(split)) == weights_digest(str(tiny_target)) == weights_digest(str(copy))


@pytest.mark.parametrize("change", ["fine-tune", "one tensor", "dtype", "renamed"])
def test_digest_tells_targets_of_one_shape_apart(copy: Path, change: str) -> None:
    before, file = weights_digest(str(copy)), copy / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.3.mlp.up_proj.weight"
    if change == "fine-tune":
        tensors = {key: value + 1e-5 * torch.randn_like(value) for key, value in tensors.items()}
    elif change == "one tensor":
        tensors[name] = tensors[name] * 1.001
    elif change == "dtype":
        tensors[name] = tensors[name].bfloat16()
    else:
        tensors[name + "_"] = tensors.pop(name)
    save_file(tensors, file, metadata={"format": "pt"})
    assert weights_digest(str(copy)) != before


def test_large_tensors_are_sampled_at_both_ends_and_between(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    weight = torch.zeros(3 * 2**20, dtype=torch.uint8)
    digests = set()
    for place in (None, 0, 2**20, 2 * 2**20, len(weight) - 1):
        changed = weight.clone()
        if place is not None:
            changed[place] = 1
        save_file({"w": changed}, tmp_path / "model.safetensors")
        digests.add(weights_digest(str(tmp_path)))
    assert len(digests) == 5


def test_missing_folder_and_hub_id_are_refused_at_once(tmp_path: Path) -> None:
    began = time.monotonic()
    for path, words in [
        (None, "model.target.path is not set"),
        (str(tmp_path / "nowhere"), "does not exist"),
        ("./nowhere", "does not exist"),
        ("nobody/nothing", "not a folder on this machine"),
        (str(tmp_path), "no config.json"),
    ]:
        with pytest.raises(TargetError, match=words):
            target_folder(path, None)
    assert time.monotonic() - began < 10


def test_incomplete_folders_are_refused(copy: Path) -> None:
    file = copy / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) - 10])
    with pytest.raises(TargetError, match="ends inside tensor"):
        weights_digest(str(copy))
    file.write_bytes(whole[:3])
    with pytest.raises(TargetError, match="header cannot be read"):
        weights_digest(str(copy))
    file.unlink()
    with pytest.raises(TargetError, match=r"neither model.safetensors nor"):
        weight_files(copy)
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(TargetError, match=r"model-00001-of-00002.safetensors is named by its index and missing"):
        weight_files(copy)


def test_own_code_needs_consent(copy: Path) -> None:
    file = copy / "config.json"
    config = json.loads(file.read_text()) | {"model_type": "unheard_of", "auto_map": {"AutoConfig": "configuration_x.XConfig"}}
    file.write_text(json.dumps(config))
    (copy / "configuration_x.py").write_text("raise SystemExit('the code of the folder was run')\n")
    with pytest.raises(TargetError, match="trust_remote_code=true"):
        read_config(TargetSection(path=str(copy)))


def test_fields_name_what_decides_the_states(tiny_target: Path, copy: Path) -> None:
    fields = target_fields(TargetSection(path=str(tiny_target)))
    assert fields["architecture"] == "Qwen3ForCausalLM"
    assert (fields["num_hidden_layers"], fields["hidden_size"], fields["dtype"]) == (8, 64, "bfloat16")
    assert fields == target_fields(TargetSection(path=str(copy)))
    assert json.loads(json.dumps(fields)) == fields
    file = copy / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1e-3}))
    changed = target_fields(TargetSection(path=str(copy)))
    assert {name for name in fields if fields[name] != changed[name]} == {"rms_norm_eps"}


@pytest.mark.parametrize(("name", "content"), [("model.safetensors", b"\xff" * 100), ("model.safetensors.index.json", b"{")])
def test_headers_and_indices_of_nonsense(copy: Path, name: str, content: bytes) -> None:
    (copy / name).write_bytes(content)
    with pytest.raises(TargetError, match=f"{name}.*Copy or download it again"):
        weights_digest(str(copy))
