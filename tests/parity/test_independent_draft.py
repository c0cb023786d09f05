"""An exported draft in the reference's own class. Runs where `dflash` is installed (pip install --no-deps dflash==0.1.0)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.draft.export import export_draft
from pipeline.draft.qwen3 import inverse_frequencies
from pipeline.draft.serving import Serving
from tests.support.drafts import FULL, SLIDING, lively_draft, small_config

GEOMETRY: dict[str, dict[str, Any]] = {
    "plain": {},
    "biased, one KV head": {"attention_bias": True, "rope_theta": 1e6, "rms_norm_eps": 1e-5},
    "windowed": {"layer_types": (SLIDING, FULL), "sliding_window": 9},
}


@pytest.mark.parametrize("name", GEOMETRY)
def test_loads_strictly_and_computes_the_same(name: str, tmp_path: Path) -> None:
    reference: Any = pytest.importorskip("dflash.model", reason="dflash is not installed")
    config = small_config(num_attention_heads=4, num_key_value_heads=2, head_dim=8, **GEOMETRY[name])
    draft = lively_draft(config)
    export_draft(draft, tmp_path)
    theirs, info = reference.DFlashDraftModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(theirs.rotary_emb.inv_freq, inverse_frequencies(config, torch.device("cpu")))
    assert (theirs.block_size, theirs.mask_token_id, list(theirs.target_layer_ids)) == (3, 29, [1, 3])
    generator = torch.Generator().manual_seed(0)
    features, embeddings = torch.randn(1, 20, 24, generator=generator), torch.randn(1, 3, 12, generator=generator)
    serving = Serving(draft, 20)
    with torch.no_grad():
        serving.extend(features)
        ours = serving.hidden(embeddings)
        expected = theirs.eval()(target_hidden=features, noise_embedding=embeddings, position_ids=torch.arange(23).unsqueeze(0))
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
