from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.errors import TargetError
from pipeline.target.head import bundle_of
from pipeline.target.load import Target
from tests.support.tiny import TinyShape, write_target
from tests.unit.target.test_load import SIZES, _gemma3_wrapper, _hybrid, _moe, _qwen_vl

Load = Callable[..., Target]


def test_untied(target: Target, load: Load, tiny_target: Path) -> None:
    from transformers import AutoModelForCausalLM

    bundle, whole = bundle_of(target), AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    assert torch.equal(bundle.embedding, whole.model.embed_tokens.weight)
    assert torch.equal(bundle.head, whole.lm_head.weight)
    assert torch.equal(bundle.final_norm, whole.model.norm.weight)
    assert (bundle.input_embedding_scale, bundle.output_multiplier, bundle.final_logit_softcapping) == (1.0, 1.0, None)
    assert bundle.config["num_hidden_layers"] == 8
    assert bundle.config["rope_parameters"]["rope_theta"]


def test_tied_head_is_the_embedding(load: Load, tmp_path: Path) -> None:
    bundle = bundle_of(load(write_target(tmp_path / "tied", shape=TinyShape(layers=4, tied=True)), (1,)))
    assert bundle.head is bundle.embedding


def _gemma2() -> Any:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    return Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=3.0))


def _gemma3() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    return Gemma3ForCausalLM(Gemma3TextConfig(**SIZES))


def _granite() -> Any:
    from transformers import GraniteConfig, GraniteForCausalLM

    return GraniteForCausalLM(GraniteConfig(**SIZES, embedding_multiplier=12.0, logits_scaling=8.0, residual_multiplier=0.22))


def _hyperclovax() -> Any:
    from transformers import HyperCLOVAXConfig, HyperCLOVAXForCausalLM

    return HyperCLOVAXForCausalLM(HyperCLOVAXConfig(**SIZES, embedding_multiplier=3.0, logits_scaling=0.125))


def _cohere() -> Any:
    from transformers import Cohere2Config, Cohere2ForCausalLM

    return Cohere2ForCausalLM(Cohere2Config(**SIZES, logit_scale=0.25))


@pytest.mark.parametrize(
    ("build", "dtype"),
    [(_gemma2, "float32"), (_gemma2, "bfloat16"), (_gemma3, "float32"), (_granite, "float32"), (_hyperclovax, "float32")],
)
def test_scaled_targets(build: Callable[[], Any], dtype: str, load: Load, tmp_path: Path) -> None:
    """What the bundle says reproduces the target's first layer input and its logits."""
    torch.manual_seed(0)
    model = build().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.uniform_(-0.5, 0.5) if name.endswith("norm.weight") else parameter.mul_(10)
    model.save_pretrained(tmp_path / "target")
    attention = "eager" if build is _gemma2 else "sdpa"
    target = load(tmp_path / "target", (1,), final=True, dtype=dtype, attn_implementation=attention)
    bundle = bundle_of(target)
    ids = torch.arange(3, 40)[None]
    seen: dict[str, torch.Tensor] = {}
    target.decoder.layers[0].register_forward_pre_hook(lambda module, args: seen.setdefault("in", args[0]))
    target.norm.register_forward_pre_hook(lambda module, args: seen.setdefault("final", args[0]))
    with torch.no_grad():
        logits = target.model(ids).logits[0]
    assert torch.equal(seen["in"][0], bundle.embedding[ids[0]] * torch.tensor(bundle.input_embedding_scale).to(target.dtype))
    if dtype == "float32":
        final = seen["final"][0]
        normed = final * torch.rsqrt(final.square().mean(-1, keepdim=True) + target.config["rms_norm_eps"]) * bundle.final_norm
        expected = bundle.output_multiplier * (normed @ bundle.head.T)
        if cap := bundle.final_logit_softcapping:
            expected = cap * torch.tanh(expected / cap)
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("build", [_gemma3_wrapper, _qwen_vl, _moe, _hybrid])
def test_wrappers_without_their_towers_and_cut_stacks_give_logits(build: Callable[[], Any], load: Load, tmp_path: Path) -> None:
    torch.manual_seed(0)
    build().save_pretrained(tmp_path / "target")
    for dtype in ("float32", "bfloat16"):
        assert bundle_of(load(tmp_path / "target", (1,), dtype=dtype)).output_multiplier == 1.0


def test_layer_norm_targets_keep_their_multiplier(load: Load, tmp_path: Path) -> None:
    _cohere().save_pretrained(tmp_path / "target")
    assert bundle_of(load(tmp_path / "target", (1,))).output_multiplier == 0.25


def test_a_norm_without_weights(load: Load, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from transformers import NanoChatConfig, NanoChatForCausalLM, OlmoConfig, OlmoForCausalLM

    OlmoForCausalLM(OlmoConfig(**{name: size for name, size in SIZES.items() if name != "head_dim"})).save_pretrained(tmp_path / "olmo")
    bundle = bundle_of(load(tmp_path / "olmo", (1,)))
    assert torch.equal(bundle.final_norm, torch.ones(SIZES["hidden_size"]))
    assert "is not an RMS norm" in caplog.text
    # This one norms its embeddings too.
    NanoChatForCausalLM(NanoChatConfig(**SIZES)).save_pretrained(tmp_path / "nanochat")
    with pytest.raises(TargetError, match="does not receive a multiple of its embeddings"):
        bundle_of(load(tmp_path / "nanochat", (1,)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_of_another_make_are_refused(dtype: str, target: Target, load: Load, tiny_target: Path) -> None:
    """A factor that the config does not name would be trained and served without."""
    target = load(tiny_target, (1,), dtype=dtype)
    head = target.model.get_output_embeddings()
    assert bundle_of(target).output_multiplier == 1.0
    for factor in (1.25, float("nan")):
        handle = head.register_forward_hook(lambda module, args, output, factor=factor: output * factor)
        with pytest.raises(TargetError, match="are not a multiple of its final norm's output"):
            bundle_of(target)
        handle.remove()
    head.weight.data = head.weight.data.to(torch.float8_e4m3fn)
    with pytest.raises(TargetError, match=r"head is quantised \(torch\.float8_e4m3fn\)"):
        bundle_of(target)
