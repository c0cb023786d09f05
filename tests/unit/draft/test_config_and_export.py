"""Geometry, what is refused, and the exported folder."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config.schema import DraftSection
from pipeline.draft.config import DraftConfig
from pipeline.draft.export import export_draft, load_draft
from pipeline.draft.published import from_json, to_json
from pipeline.draft.qwen3 import inverse_frequencies
from pipeline.errors import DraftError
from pipeline.records import TargetBundle
from tests.support.drafts import FULL, SLIDING, kimi_config, lively_draft, small_config
from tests.support.samples import MASK_TOKEN_ID, VOCAB, bundle

LAYERS_AND_MASK = {"target_layer_ids": [1, 3], "mask_token_id": 29}
SPECIAL = {"eos": 2, "pad": 2, "bos": None}


def build(target: TargetBundle | None = None, **section: Any) -> DraftConfig:
    return DraftConfig.build(DraftSection(**{"mask_token_id": MASK_TOKEN_ID, **section}), target or bundle(), (1, 3), SPECIAL)


def with_config(**changes: Any) -> TargetBundle:
    return replace(bundle(), config={**bundle().config, **changes})


def test_geometry_is_the_targets_unless_given() -> None:
    plain = build()
    assert (plain.hidden_size, plain.num_attention_heads, plain.num_key_value_heads, plain.head_dim) == (32, 4, 2, 8)
    assert (plain.intermediate_size, plain.vocab_size, plain.target_layer_ids) == (48, VOCAB, (1, 3))
    own = build(num_attention_heads=6, num_key_value_heads=3, head_dim=4, intermediate_size=10, target_layer_ids=(5, 2), rope_theta=7.0)
    assert (own.num_attention_heads, own.num_key_value_heads, own.head_dim, own.intermediate_size) == (6, 3, 4, 10)
    assert (own.target_layer_ids, own.rope_theta) == ((5, 2), 7.0)


def test_targets_without_head_dim_or_with_other_rope() -> None:
    assert build(with_config(head_dim=None)).head_dim == 8
    assert build(with_config(rope_parameters=None, rope_theta=123.0)).rope_theta == 123.0
    nested = {FULL: {"rope_theta": 9.0, "rope_type": "linear"}, SLIDING: {"rope_theta": 1.0}}
    assert build(with_config(rope_parameters=nested)).rope_theta == 9.0
    with pytest.raises(DraftError, match=r"rope_theta.*set model\.draft\.rope_theta"):
        build(with_config(rope_parameters=None))
    with pytest.raises(DraftError, match=r"no intermediate_size; set model\.draft\.intermediate_size"):
        build(with_config(intermediate_size=None))


def test_scales_of_the_target_are_the_drafts() -> None:
    scaled = build(replace(bundle(), input_embedding_scale=5.5, output_multiplier=0.5, final_logit_softcapping=30.0))
    exported = to_json(scaled)["dflash_config"]
    assert (exported["input_embedding_scale"], exported["output_multiplier"], exported["final_logit_softcapping"]) == (5.5, 0.5, 30.0)
    assert from_json(to_json(scaled)) == scaled
    assert set(to_json(build())["dflash_config"]) == {"target_layer_ids", "mask_token_id", "block_size"}
    # Of a published draft: at the top level as well, and a soft cap of 0 is none.
    elsewhere = from_json({**to_json(build()), "input_embedding_scale": 5.5, "final_logit_softcapping": 0.0})
    assert (elsewhere.input_embedding_scale, elsewhere.output_multiplier, elsewhere.final_logit_softcapping) == (5.5, 1.0, None)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"mask_token_id": None}, "mask_token_id is not set"),
        ({"mask_token_id": -1}, f"-1 is not a row .*0..{VOCAB - 1}"),
        ({"mask_token_id": VOCAB}, f"{VOCAB} is not a row"),
        ({"mask_token_id": 2}, "mask_token_id 2 is the tokenizer's eos and pad token"),
        ({"sliding_window": 15}, "sliding_window 15 is smaller than a block of 16"),
        ({"num_key_value_heads": 3}, "3 KV heads do not divide 4 heads"),
        ({"head_dim": 7}, "head_dim 7 is odd"),
        ({"target_layer_ids": (1, 1)}, r"name each once"),
        ({"target_layer_ids": (1, 7)}, r"must lie in 0..6 for a target of 8 layers"),
        ({"target_layer_ids": (-1,)}, r"must lie in 0..6"),
    ],
)
def test_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftError, match=message):
        build(**section)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(DraftError, match=r"odd.*smaller than a block.*not a row"):
        build(head_dim=7, sliding_window=3, mask_token_id=-5)


CONFIGS = {
    "plain": small_config(),
    "biased": small_config(attention_bias=True, rms_norm_eps=1e-5, rope_theta=1e6),
    "windowed": small_config(layer_types=(SLIDING, FULL), sliding_window=9),
    "scaled": small_config(input_embedding_scale=2.5, final_logit_softcapping=30.0),
    "kimi": kimi_config(rms_norm_eps=1e-5),
    "kimi, bare": kimi_config(shape={"q_lora_rank": None, "mla_use_output_gate": False, "activation_situ_linear_beta": None}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CONFIGS)
def test_round_trip(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    draft = lively_draft(CONFIGS[name]).to(dtype)
    export_draft(draft, tmp_path / "export")
    loaded = load_draft(tmp_path / "export")
    assert loaded.config == draft.config
    for (name_a, a), (name_b, b) in zip(draft.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert name_a == name_b
        assert b.dtype == dtype
        assert torch.equal(a, b)


def test_exported_files(tmp_path: Path) -> None:
    config = small_config()
    export_draft(lively_draft(config), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    layer = {
        *("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        *(f"self_attn.{part}" for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    }
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight", *(f"layers.{i}.{part}.weight" for i in range(2) for part in layer)}
    assert set(load_file(tmp_path / "model.safetensors")) == expected
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["architectures"] == ["DFlashDraftModel"]
    assert values["model_type"] == "qwen3"
    assert values["dflash_config"] == {"target_layer_ids": [1, 3], "mask_token_id": 29, "block_size": 3}
    assert values["block_size"] == 3
    assert values["num_target_layers"] == 8
    assert values["tie_word_embeddings"] is False
    assert values["is_causal"] is False
    assert values["dtype"] == "float32"
    assert values["rope_parameters"] == {"rope_type": "default", "rope_theta": values["rope_theta"]}


def test_transformers_reads_the_same_geometry_and_frequencies(tmp_path: Path) -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    config = small_config(rope_theta=1e6, head_dim=16, layer_types=(FULL, SLIDING), sliding_window=9)
    export_draft(lively_draft(config), tmp_path)
    read = Qwen3Config.from_pretrained(tmp_path)
    assert (read.hidden_size, read.head_dim, read.num_key_value_heads, read.sliding_window) == (12, 16, 1, 9)
    assert read.layer_types == [FULL, SLIDING]
    assert torch.equal(Qwen3RotaryEmbedding(read).inv_freq, inverse_frequencies(config, torch.device("cpu")))


def published(**changes: Any) -> dict[str, Any]:
    values = {**to_json(small_config(rope_theta=500.0)), **changes}
    return {key: value for key, value in values.items() if value is not None}


def test_published_configs() -> None:
    """As others write them: the base of RoPE in either place, the block size in either place, no layer types."""
    only_nested = published(rope_theta=None, layer_types=None, sliding_window=None)
    only_top = published(rope_parameters=None, rope_scaling=None, is_causal=None)
    scaled_null = {**published(rope_parameters=None), "rope_scaling": None}
    in_dflash = {**published(block_size=None), "dflash_config": {"block_size": 3, "target_layer_ids": [1, 3], "mask_token_id": 29}}
    top_block = {**published(), "dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": 29}}
    for values in (only_nested, only_top, scaled_null, in_dflash, top_block):
        assert from_json(values) == small_config(rope_theta=500.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 4.0}}, "rope_parameters of type 'yarn'"),
        ({"rope_parameters": {"full_attention": {"rope_type": "yarn", "rope_theta": 1.0}}}, "rope_parameters of type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling of type 'linear'"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"is_causal": True, "architectures": ["DFlash2DraftModel"]}, "keys of dflash2 and of jetspec"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"num_target_layers": None}, "lacks num_target_layers"),
        ({"dflash_config": {"target_layer_ids": [1]}}, "lacks mask_token_id"),
        ({"dflash_config": {"target_layer_ids": [1], "mask_token_id": 29, "projector_type": "mlp"}}, "projector_type 'mlp'"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types"),
        ({"block_size": 7}, "block_size 7 at the top level and 3 in dflash_config"),
        (
            {"output_multiplier": 2.0, "dflash_config": {**LAYERS_AND_MASK, "output_multiplier": 0.5}},
            "output_multiplier 2.0 at the top level and 0.5",
        ),
        ({"layer_types": [FULL, SLIDING], "sliding_window": 9, "use_sliding_window": False}, "use_sliding_window false, and layer_types"),
        ({"final_logit_softcapping": -3.0}, "final_logit_softcapping is -3.0, expected more than 0"),
    ],
)
def test_configs_that_would_be_computed_otherwise(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftError, match=message):
        from_json(published(**changes))


def damage(folder: Path, how: str) -> None:
    weights = load_file(folder / "model.safetensors")
    if how == "missing":
        del weights["norm.weight"]
    elif how == "extra":
        weights["embed_tokens.weight"] = torch.zeros(2, 2)
    elif how == "shape":
        weights["fc.weight"] = torch.zeros(3, 3)
    elif how == "codes":
        weights = {name: tensor.int() for name, tensor in weights.items()}
    save_file(weights, folder / "model.safetensors")
    if how == "cut":
        file = folder / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-10])
    if how == "no config":
        (folder / "config.json").unlink()
    if how == "half a config":
        (folder / "config.json").write_text('{"hidden_size": 12,')


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("missing", "norm.weight is missing"),
        ("extra", "embed_tokens.weight is not a tensor of this draft"),
        ("shape", r"fc.weight is \[3, 3\], expected \[12, 24\]"),
        ("cut", "damaged"),
        ("codes", "its tensors are int32"),
        ("no config", "config.json is missing"),
        ("half a config", "damaged"),
    ],
)
def test_damaged_exports_are_refused(how: str, message: str, tmp_path: Path) -> None:
    export_draft(lively_draft(small_config()), tmp_path)
    damage(tmp_path, how)
    with pytest.raises(DraftError, match=message):
        load_draft(tmp_path)


@pytest.mark.parametrize(
    "values",
    [
        {"hidden_size": "abc"},
        {"dflash_config": [1]},
        {"dflash_config": {"target_layer_ids": "1,3", "mask_token_id": 5}},
        {"rope_parameters": [1]},
        {"num_attention_heads": 0},
        {"head_dim": -8},
        None,
    ],
)
def test_a_config_of_nonsense_is_a_draft_error(values: dict[str, Any] | None, tmp_path: Path) -> None:
    export_draft(lively_draft(small_config()), tmp_path)
    path = tmp_path / "config.json"
    path.write_text("[1]" if values is None else json.dumps({**json.loads(path.read_text()), **values}))
    with pytest.raises(DraftError, match=r"wrong type|at least 1"):
        load_draft(tmp_path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DraftError, match="damaged"):
        load_draft(tmp_path)
    with pytest.raises(DraftError, match="not an exported draft"):
        load_draft(path)
