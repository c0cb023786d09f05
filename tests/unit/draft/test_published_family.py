"""What a server finds of each variant: names of tensors, keys of config.json; and what is read back."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pipeline.draft.export import export_draft, load_draft
from pipeline.draft.published import from_json, to_json
from pipeline.errors import DraftError
from tests.support.drafts import small_config
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


def test_keys_of_two_variants_are_refused() -> None:
    values = to_json(family_config("domino"))
    with pytest.raises(DraftError, match="keys of domino and of jetspec; expected those of one variant"):
        from_json({**values, "is_causal": True})
