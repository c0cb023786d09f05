"""The Kimi K3 backbone: whose sizes it takes, what its `config.json` says, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.config.schema import DraftSection
from pipeline.draft.config import DraftConfig
from pipeline.draft.export import export_draft, load_draft
from pipeline.draft.kimi_config import LatentShape
from pipeline.draft.published import from_json, to_json
from pipeline.draft.serving import Serving
from pipeline.errors import DraftError
from pipeline.records import TargetBundle
from tests.support.drafts import kimi_config, lively_draft
from tests.support.samples import MASK_TOKEN_ID, VOCAB, bundle

SIZES: dict[str, Any] = {"kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}


def kimi_target(**changes: Any) -> TargetBundle:
    """With a text config as a Kimi K3 has it: linear attention, experts, extra heads and all."""
    values = {
        "model_type": "kimi_linear",
        "num_hidden_layers": 8,
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": VOCAB,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 512,
        **SIZES,
        "q_lora_rank": 12,
        "mla_use_output_gate": True,
        "activation_situ_beta": 3.0,
        "activation_situ_linear_beta": 20.0,
        "linear_attn_config": {"kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8]},
        "attn_res_block_size": 12,
        "num_experts": 896,
        "num_shared_experts": 2,
        "num_nextn_predict_layers": 1,
    }
    return replace(bundle(), config={**values, **changes})


def build(target: TargetBundle, **section: Any) -> DraftConfig:
    values = {"backbone": "kimi_k3", "mask_token_id": MASK_TOKEN_ID, "num_hidden_layers": 2, **section}
    return DraftConfig.build(DraftSection(**values), target, (1, 3), {})


def test_sizes_are_the_targets() -> None:
    config = build(kimi_target())
    assert config.latent == LatentShape(
        **SIZES, q_lora_rank=12, mla_use_output_gate=True, activation_situ_beta=3.0, activation_situ_linear_beta=20.0
    )
    assert (config.num_attention_heads, config.key_size, config.value_size, config.rms_norm_eps) == (4, 12, 6, 1e-5)
    own = build(kimi_target(), num_attention_heads=6, mla={"q_lora_rank": 0, "v_head_dim": 10, "mla_use_output_gate": False})
    assert own.latent is not None
    assert (own.latent.q_lora_rank, own.latent.v_head_dim, own.latent.mla_use_output_gate) == (None, 10, False)
    assert (own.num_attention_heads, own.num_key_value_heads) == (6, 6)


def test_any_target_with_explicit_sizes() -> None:
    config = build(bundle(), mla=SIZES)
    assert config.latent == LatentShape(**SIZES)
    assert config.num_key_value_heads == config.num_attention_heads == 4
    assert build(replace(bundle(), config={**bundle().config, "rope_parameters": None}), mla=SIZES) == config


def test_the_config_is_the_drafts_and_not_the_targets() -> None:
    values = to_json(build(kimi_target()))
    assert (values["architectures"], values["model_type"], values["hidden_act"]) == (["KimiK3DFlashDraftModel"], "kimi_linear", "situ")
    assert {name: values[name] for name in SIZES} == SIZES
    off = {"num_experts": None, "num_shared_experts": 0, "num_nextn_predict_layers": 0, "attn_res_block_size": None}
    assert {name: values[name] for name in off} == off
    assert values["linear_attn_config"] == {"kda_layers": [], "full_attn_layers": [1, 2]}
    assert values["mla_use_nope"] is True
    assert not {name for name in values if "rope" in name} - {"qk_rope_head_dim", "mla_use_nope"}
    assert not {"layer_types", "sliding_window", "attention_bias"} & set(values)


def test_exported_keys(tmp_path: Path) -> None:
    export_draft(lively_draft(kimi_config()), tmp_path)
    parts = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj", "g_proj")
    layer = {
        *("input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        *(f"self_attn.{part}" for part in parts),
    }
    expected = {"fc.weight", "hidden_norm.weight", "norm.weight", *(f"layers.{i}.{part}.weight" for i in range(2) for part in layer)}
    assert set(load_file(tmp_path / "model.safetensors")) == expected
    bare = lively_draft(kimi_config(shape={"q_lora_rank": None, "mla_use_output_gate": False}))
    names = {name.split("self_attn.")[1] for name in bare.state_dict() if "layers.0.self_attn" in name}
    assert names == {f"{part}.weight" for part in ("q_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "o_proj")}


def test_a_loaded_draft_serves_the_same(tmp_path: Path) -> None:
    draft = lively_draft(kimi_config(shape={"v_head_dim": 9}))
    export_draft(draft, tmp_path)
    generator = torch.Generator().manual_seed(0)
    features, embeddings = torch.randn(1, 9, 24, generator=generator), torch.randn(1, 3, 12, generator=generator)
    out = []
    for one, cuts in ((draft, (0, 9)), (load_draft(tmp_path), (0, 2, 3, 9))):
        serving = Serving(one, 9)
        with torch.no_grad():
            for start, end in zip(cuts, cuts[1:], strict=False):
                serving.extend(features[:, start:end])
            out.append(serving.hidden(embeddings))
    torch.testing.assert_close(out[0], out[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            {"sliding_window": 32, "rope_theta": 5.0},
            r"kimi_k3 has no rope_theta, sliding_window: leave out model\.draft\.rope_theta",
        ),
        ({"head_dim": 8}, "no head_dim"),
        ({"attention_bias": True}, "no attention_bias"),
        ({"num_key_value_heads": 2}, "2 KV heads for 4 heads"),
        ({"backbone": "qwen3", "mla": {"v_head_dim": 3}}, r"qwen3 has no mla\.v_head_dim: leave out model\.draft\.mla\.v_head_dim"),
    ],
)
def test_fields_of_the_other_backbone_are_refused(section: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftError, match=message):
        build(kimi_target(rope_parameters={"rope_type": "default", "rope_theta": 1.0}), **section)


def test_a_target_that_is_no_kimi_needs_the_sizes() -> None:
    with pytest.raises(DraftError, match=r"no qk_nope_head_dim, .*; set model\.draft\.mla\.qk_nope_head_dim, model\.draft\.mla\.qk"):
        build(bundle(), mla={"kv_lora_rank": 4})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"v_head_dim": None}, "lacks v_head_dim"),
        ({"mla_use_nope": False}, "rotates nothing"),
        ({"hidden_act": "silu"}, "hidden_act 'silu', expected 'situ'"),
        ({"num_key_value_heads": 1}, "1 KV heads for 2 heads"),
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        ({"activation_situ_beta": -1.0}, "must be positive"),
    ],
)
def test_configs_that_cannot_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftError, match=message):
        from_json({**to_json(kimi_config()), **changes})


def test_what_a_published_config_leaves_out() -> None:
    values = to_json(kimi_config(rms_norm_eps=1e-5))
    for name in (
        "activation_situ_beta",
        "activation_situ_linear_beta",
        "mla_use_nope",
        "mla_use_output_gate",
        "rms_norm_eps",
        "hidden_act",
    ):
        del values[name]
    assert from_json(values) == kimi_config(rms_norm_eps=1e-5)
    assert from_json({**values, "architectures": None, "rope_parameters": {"rope_theta": 1.0}}).latent == kimi_config().latent
