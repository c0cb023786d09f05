"""Fields of variants and objectives, and which of them go together."""

from pathlib import Path

import pytest

from pipeline.config.load import load_config
from pipeline.config.schema import Config
from pipeline.errors import ConfigError


def load(tmp_path: Path, text: str) -> Config:
    (tmp_path / "config.yaml").write_text(text)
    return load_config("corpus", str(tmp_path / "config.yaml"), ["data.train_ds.input_cfg=[{path: x}]", "model.target.path=t"])


def test_every_variant_with_its_own_fields(tmp_path: Path) -> None:
    own = {
        "dflash2": "conv_kernel_size: 3, conv_group_size: 8, selector_rank: 4, selector_top_k: 5",
        "domino": "emb_dim: 3, gru_hidden_dim: 4, pure_draft_prefix_len: 1, shift_label: true",
        "jetspec": "sliding_window: 32, num_hidden_layers: 2, layer_types: [sliding_attention, full_attention]",
    }
    for variant, fields in own.items():
        config = load(tmp_path, f"model: {{draft: {{variant: {variant}, {fields}}}}}")
        assert config.model.draft.variant == variant
        assert config.model.draft.label_shift == (variant == "domino")
    assert load(tmp_path, "model: {objective: {name: distill, divergence: total_variation}}").model.objective.needs_final


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{draft: {variant: dflash, emb_dim: 3}}", r"model\.draft: .*variant dflash has no emb_dim \(of domino\)"),
        (
            "{draft: {variant: domino, selector_rank: 3, conv_group_size: 2}}",
            r"domino has no conv_group_size \(of dflash2\), selector_rank \(of dflash2\)",
        ),
        ("{draft: {variant: dflash2, backbone: kimi_k3}}", "variant dflash2 on backbone kimi_k3: no server reads it"),
        ("{draft: {num_hidden_layers: 3, layer_types: [full_attention]}}", "layer_types names 1 layers; num_hidden_layers is 3"),
        (
            "{draft: {variant: domino}, objective: {name: variable_prefix}}",
            "model: .*objective variable_prefix with variant domino: the correction's GRU starts at the anchor",
        ),
        ("{draft: {variant: eagle}}", r"model\.draft\.variant"),
        ("{objective: {name: decay, weights: uniform}}", r"model\.objective: .*weights uniform is without effect: objective decay"),
        ("{objective: {name: distill, divergence: js}}", r"model\.objective\.divergence"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, f"model: {text}")
