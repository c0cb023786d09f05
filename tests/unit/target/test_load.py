import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config.schema import TargetSection
from pipeline.errors import TargetError
from pipeline.target.forward import forward_hidden
from pipeline.target.load import Target, load_target
from tests.unit.target.conftest import lone_rank, sample

Load = Callable[..., Target]
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def test_only_what_is_needed_is_built(target: Target, load: Load, tiny_target: Path) -> None:
    assert (len(target.decoder.layers), target.num_layers, target.config["num_hidden_layers"]) == (6, 8, 8)
    assert len(load(tiny_target, (2,)).decoder.layers) == 3
    assert len(load(tiny_target, (2,), final=True).decoder.layers) == 8
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert not target.model.training


def test_dtype_is_the_one_asked_for(load: Load, tiny_target: Path) -> None:
    half = load(tiny_target, dtype="bfloat16")
    assert {parameter.dtype for parameter in half.model.parameters()} == {torch.bfloat16}
    assert forward_hidden(half, [sample(9)])[0].hidden[3].dtype == torch.bfloat16


def test_weights_that_are_missing_are_not_made_up(load: Load, tiny_target: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_target, tmp_path / "copy"))
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.2.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"lacks 1 weights, among them \['model.layers.2.mlp.up_proj.weight'\]"):
        load(folder)
    load(folder, (0, 1))  # above what is needed, nothing is asked of the file


def test_weights_of_another_shape_are_refused(load: Load, tiny_target: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_target, tmp_path / "copy"))
    config = json.loads((folder / "config.json").read_text()) | {"intermediate_size": 96}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(TargetError, match="cannot be loaded"):
        load(folder)


@pytest.mark.parametrize(
    ("tp_size", "words"), [(3, "does not divide the 4 num_attention_heads"), (4, "does not divide the 2 num_key_value")]
)
def test_heads_that_ranks_do_not_divide(tiny_target: Path, tp_size: int, words: str) -> None:
    section = TargetSection(path=str(tiny_target), tp_size=tp_size)
    with pytest.raises(TargetError, match=rf"{words}.*Possible sizes: \[1, 2\]"):
        load_target(section, lone_rank(tp_size), (1, 3), False)


def test_targets_without_a_plan_or_without_a_head(tmp_path: Path, load: Load) -> None:
    from transformers import BertConfig, BertModel, GPTNeoConfig, GPTNeoForCausalLM

    neo = GPTNeoConfig(
        vocab_size=64, hidden_size=16, num_layers=4, num_heads=2, attention_types=[[["global"], 4]], max_position_embeddings=32
    )
    GPTNeoForCausalLM(neo).save_pretrained(tmp_path / "neo")
    with pytest.raises(TargetError, match="no tensor-parallel plan"):
        load_target(TargetSection(path=str(tmp_path / "neo"), tp_size=2), lone_rank(2), (1,), False)
    bert = BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=4, num_attention_heads=2, intermediate_size=16)
    BertModel(bert).save_pretrained(tmp_path / "bert")
    with pytest.raises(TargetError, match="keeps its decoder layers where they are not found"):
        load(tmp_path / "bert", (1,))


def _gemma3_wrapper() -> Any:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=SIZES, vision_config=vision, mm_tokens_per_image=4))


def _qwen_vl() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    vision = {"hidden_size": 16, "intermediate_size": 32, "depth": 2, "num_heads": 2, "out_hidden_size": 32, "patch_size": 14}
    text = SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision))


def _moe() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16))


def _hybrid() -> Any:
    from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

    linear = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    kinds = ["linear_attention", "full_attention"] * 3
    return Qwen3NextForCausalLM(Qwen3NextConfig(**SIZES, **linear, **experts, layer_types=kinds))


def _sliding() -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=4, attn_implementation="eager"))


@pytest.mark.parametrize("build", [_gemma3_wrapper, _qwen_vl, _moe, _hybrid, _sliding])
def test_other_architectures_give_their_own_states(build: Callable[[], Any], load: Load, tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = build().eval()
    whole.save_pretrained(tmp_path / "target")
    if build is _sliding:
        with pytest.raises(TargetError, match=r"Set model.target.attn_implementation=eager"):
            load(tmp_path / "target", (3, 1))
    cut = load(tmp_path / "target", (3, 1), attn_implementation="eager" if build is _sliding else "sdpa")
    assert (len(cut.decoder.layers), cut.num_layers, cut.hidden_size) == (4, 6, 32)
    assert not any("vis" in name for name, _ in cut.model.named_modules())
    samples = [sample(11, 1), sample(7, 2)]
    samples = [type(s)(s.sample_id, s.source, s.row, s.split, s.input_ids % 120 + 3, s.spans) for s in samples]
    for captured in forward_hidden(cut, samples):
        ids = torch.from_numpy(captured.tokens.input_ids).long()[None]
        with torch.no_grad():
            states = whole(input_ids=ids, output_hidden_states=True).hidden_states
        for layer in (1, 3):
            torch.testing.assert_close(captured.hidden[layer], states[layer + 1][0], rtol=1e-5, atol=1e-5)
