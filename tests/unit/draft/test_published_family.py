"""What a server finds of each variant: names of tensors, keys of config.json; and what is read back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.draft.export import export_draft, load_draft
from pipeline.draft.published import from_json, to_json
from pipeline.errors import DraftError
from tests.support.drafts import FULL, SLIDING, lively_draft, small_config
from tests.support.family import DRAFTS, family_config, family_draft

CONV = {
    f"layers.{i}.{which}_conv.{name}"
    for i in (0, 1)
    for which in ("attention", "mlp")
    for name in ("base_kernel", "kernel_projection.weight")
}
SELECTOR = {f"candidate_selector.{name}" for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")}
HEAD = {"prefix_gru.weight_ih_l0", "prefix_gru.weight_hh_l0", "embed_proj.0.weight", "embed_proj.2.weight"}
TENSORS = {
    "dflash": set(),
    "dflash2": CONV | SELECTOR,
    "three taps": CONV | SELECTOR,
    "domino": HEAD,
    "domino, shifted": HEAD,
    "jetspec": set(),
}
KEYS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": {"conv_kernel_size": 2, "conv_group_size": 4, "selector_rank": 5, "selector_top_k": 8},
    "three taps": {"conv_kernel_size": 3, "conv_group_size": 2, "selector_rank": 2, "selector_top_k": 12},
    "domino": {"projector_type": "domino", "emb_dim": 7, "gru_hidden_dim": 5, "pure_draft_prefix_len": 0, "shift_label": False},
    "domino, shifted": {"projector_type": "domino", "emb_dim": 7, "gru_hidden_dim": 5, "pure_draft_prefix_len": 1, "shift_label": True},
    "jetspec": {"causal": True},
}


@pytest.mark.parametrize("name", DRAFTS)
def test_exported_files(name: str, tmp_path: Path) -> None:
    draft = family_draft(name)
    export_draft(draft, tmp_path)
    plain = set(family_draft("dflash").state_dict())
    assert set(load_file(tmp_path / "model.safetensors")) == plain | TENSORS[name]
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["architectures"] == ["DFlash2DraftModel" if "selector_rank" in KEYS[name] else "DFlashDraftModel"]
    assert values["is_causal"] == (name == "jetspec")
    assert values["dflash_config"] == {"target_layer_ids": [1, 3], "mask_token_id": 29, "block_size": 4, **KEYS[name]}
    loaded = load_draft(tmp_path)
    assert loaded.config == draft.config
    assert all((tensor == draft.state_dict()[key]).all() for key, tensor in loaded.state_dict().items())


def test_shapes_are_those_of_the_published_drafts() -> None:
    shapes = {name: list(tensor.shape) for name, tensor in family_draft("three taps").state_dict().items()}
    assert shapes["layers.0.attention_conv.base_kernel"] == [2, 3, 12]
    assert shapes["layers.1.mlp_conv.kernel_projection.weight"] == [2 * 3 * 12 // 2, 12]
    assert shapes["candidate_selector.predecessor_codebook"] == shapes["candidate_selector.successor_codebook"] == [30, 2]
    shapes = {name: list(tensor.shape) for name, tensor in family_draft("domino").state_dict().items()}
    assert (shapes["embed_proj.0.weight"], shapes["embed_proj.2.weight"]) == ([7, 12 + 5], [30, 7])


def test_what_a_published_config_leaves_out() -> None:
    """Only an architecture, only the projector's type, only one of two signs of causal blocks."""
    plain = to_json(small_config(block_size=4))

    def read(dflash: dict[str, Any], **changes: Any) -> Any:
        return from_json({**plain, **changes, "dflash_config": {**plain["dflash_config"], **dflash}})

    assert read({}, architectures=["Qwen3DFlash2DraftModel"]) == small_config(block_size=4, variant="dflash2")
    assert read({"selector_rank": 9}) == small_config(block_size=4, variant="dflash2", selector_rank=9)
    assert read({"projector_type": "domino"}) == small_config(block_size=4, variant="domino", pure_draft_prefix_len=0, shift_label=False)
    for causal in (read({}, is_causal=True), read({"causal": True})):
        assert causal == family_config("jetspec")


@pytest.mark.parametrize("name", DRAFTS)
def test_fields_at_the_top_level(name: str) -> None:
    """Where z-lab's class looks for what `dflash_config` has not. Some of them, such as how many candidates there are, no weight shows."""
    config, values = family_config(name), to_json(family_config(name))
    moved = {key: value for key, value in values["dflash_config"].items() if key not in ("projector_type", "causal")}
    kept = {key: value for key, value in values["dflash_config"].items() if key not in moved}
    assert from_json({**values, **moved, "dflash_config": kept}) == config


def test_a_published_config_with_all_that_others_write_besides() -> None:
    """Keys of transformers that tell nothing about what is computed, and those of a target's config left behind."""
    others = {
        "auto_map": {"AutoModel": "modeling_dflash.DFlashDraftModel"},
        "transformers_version": "4.57.1",
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "quantization_config": None,
        "tie_word_embeddings": True,
        "max_window_layers": 36,
    }
    values = to_json(small_config())
    assert from_json({**values, **others}) == small_config()
    unused = {"shift_label": False, "pure_draft_prefix_len": 0, "selector_rank": None, "projector_type": None}
    assert from_json({**values, "dflash_config": {**values["dflash_config"], **unused}}) == small_config()


def test_layer_types_that_a_config_leaves_out_are_those_of_transformers() -> None:
    from transformers import Qwen3Config

    plain = {key: value for key, value in to_json(small_config()).items() if key not in ("layer_types", "max_window_layers")}
    for window in ({}, {"max_window_layers": 1}, {"max_window_layers": 0}, {"max_window_layers": 1, "use_sliding_window": False}):
        values = {**plain, "sliding_window": 9, "use_sliding_window": True, **window}
        read = Qwen3Config(**values)
        assert list(from_json(values).layer_types) == read.layer_types
        assert from_json(values).sliding_window == (read.sliding_window if SLIDING in read.layer_types else None)


def test_sliding_layers_of_which_nobody_says_whether_they_are_causal(caplog: pytest.LogCaptureFixture) -> None:
    values = to_json(small_config(layer_types=(FULL, SLIDING), sliding_window=9))
    told = from_json(values)
    assert not caplog.records
    assert from_json({key: value for key, value in values.items() if key != "is_causal"}) == told
    assert "sliding layers and no is_causal" in caplog.text


@pytest.mark.parametrize("files", [1, 3])
def test_weights_in_several_files(files: int, tmp_path: Path) -> None:
    draft = lively_draft(small_config())
    export_draft(draft, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    where = {name: f"model-{number % files}.safetensors" for number, name in enumerate(weights)}
    for file in set(where.values()):
        save_file({name: tensor for name, tensor in weights.items() if where[name] == file}, tmp_path / file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": where}))
    loaded = load_draft(tmp_path).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights.items())
    index.write_text(json.dumps({"weight_map": {"fc.weight": "../elsewhere.safetensors"}}))
    with pytest.raises(DraftError, match="names files outside of the folder"):
        load_draft(tmp_path)
    index.write_text(json.dumps({"weight_map": {**where, "norm.weight": "model-9.safetensors"}}))
    with pytest.raises(DraftError, match="damaged"):
        load_draft(tmp_path)


def test_keys_of_two_variants_are_refused() -> None:
    values = to_json(family_config("domino"))
    with pytest.raises(DraftError, match="keys of domino and of jetspec; expected those of one variant"):
        from_json({**values, "is_causal": True})
