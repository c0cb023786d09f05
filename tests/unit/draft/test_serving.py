"""The draft with its kept keys and values, against its own forward without any."""

from dataclasses import replace

import pytest
import torch

from pipeline.draft.config import DraftConfig
from pipeline.draft.model import joined
from pipeline.draft.serving import Serving
from pipeline.records import DraftBatch
from tests.support.drafts import FULL, SLIDING, any_batch, kimi_config, lively_draft, small_config

CONFIGS = {
    "dflash2": small_config(variant="dflash2", conv_group_size=4, selector_rank=5, selector_top_k=8),
    "plain": small_config(),
    "one window, one full": small_config(layer_types=(SLIDING, FULL), sliding_window=5, block_size=4),
    "biases": small_config(attention_bias=True),
    "kimi": kimi_config(),
    "causal": small_config(variant="jetspec"),
}


def block_behind(config: DraftConfig, features: torch.Tensor) -> DraftBatch:
    """One row of these features [1, C, L·H], and one block that sees all of them."""
    tokens = features.shape[1] + config.block_size
    one = torch.ones(1, 1, dtype=torch.int64)
    return replace(
        any_batch(0, config, rows=1, tokens=tokens, blocks=1),
        features=torch.cat((features, torch.full((1, config.block_size, features.shape[2]), 9.0)), dim=1),
        position_ids=torch.arange(tokens).unsqueeze(0),
        anchors=one * features.shape[1],
        document_start=one * 0,
        document_end=one * tokens,
        block_valid=one.bool(),
    ).check()


@pytest.mark.parametrize("name", CONFIGS)
def test_texts_of_several_lengths_grow_side_by_side(name: str) -> None:
    """Two extensions from a common position, of which each text keeps another number of rows."""
    config = CONFIGS[name]
    draft, generator = lively_draft(config), torch.Generator().manual_seed(0)
    features = torch.randn(3, 20, 2 * config.hidden_size, generator=generator)
    embeddings = torch.randn(3, config.block_size, config.hidden_size, generator=generator)
    serving = Serving(joined(draft), 20, texts=3)
    with torch.no_grad():
        serving.extend(features[:, :6])
        for kept in ([8, 11, 6], [9, 12, 13]):
            start = min(serving.lengths)
            wrong = features[:, start : start + 8].clone()
            for row, length in enumerate(kept):
                wrong[row, length - start :] = 50.0
            serving.extend(wrong, start, kept)
            found = serving.hidden(embeddings)
            for row, length in enumerate(kept):
                alone = draft(block_behind(config, features[row : row + 1, :length]), embeddings[row : row + 1, None])
                torch.testing.assert_close(found[row], alone[0, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_one_text_grows(name: str) -> None:
    config = CONFIGS[name]
    draft, generator = lively_draft(config), torch.Generator().manual_seed(1)
    features = torch.randn(1, 17, 2 * config.hidden_size, generator=generator)
    embeddings = torch.randn(1, config.block_size, config.hidden_size, generator=generator)
    serving = Serving(joined(draft), 17)
    with torch.no_grad():
        for start, end in ((0, 7), (7, 8), (8, 12), (12, 17)):
            serving.extend(features[:, start:end])
            alone = draft(block_behind(config, features[:, :end]), embeddings[:, None])
            torch.testing.assert_close(serving.hidden(embeddings), alone[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CONFIGS)
def test_joined_or_not_is_the_same(name: str, dtype: torch.dtype) -> None:
    config = CONFIGS[name]
    draft, generator = lively_draft(config).to(dtype), torch.Generator().manual_seed(2)
    features = torch.randn(2, 9, 2 * config.hidden_size, generator=generator).to(dtype)
    embeddings = torch.randn(2, config.block_size, config.hidden_size, generator=generator).to(dtype)
    found = []
    with torch.no_grad():
        for served in (draft, joined(draft)):
            serving = Serving(served, 9, texts=2)
            serving.extend(features[:, :6])
            serving.extend(features[:, 6:], 6, [9, 8])
            found.append(serving.hidden(embeddings))
    rtol, atol = (1e-5, 1e-6) if dtype == torch.float32 else (2e-2, 2e-2)
    torch.testing.assert_close(*found, rtol=rtol, atol=atol)
