"""What follows from a backbone without positions."""

from dataclasses import replace

import torch

from tests.support.drafts import any_batch, kimi_config, lively_draft


def test_positions_play_no_part() -> None:
    config = kimi_config()
    draft, batch = lively_draft(config), any_batch(0, config, packed=True)
    embeddings = torch.randn(*batch.anchors.shape, 3, 12, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(draft(batch, embeddings), draft(replace(batch, position_ids=batch.position_ids + 17), embeddings))


def test_all_mask_tokens_of_a_block_come_out_alike() -> None:
    """As in the reference's golden. A limit of the backbone as it is defined, not a fault here: see the module."""
    config = kimi_config(block_size=5)
    draft, batch = lively_draft(config), any_batch(0, config)
    generator = torch.Generator().manual_seed(0)
    anchor, mask = torch.randn(*batch.anchors.shape, 1, 12, generator=generator), torch.randn(1, 1, 1, 12, generator=generator)
    with torch.no_grad():
        hidden = draft(batch, torch.cat((anchor, mask.expand(*anchor.shape[:2], 4, -1)), dim=2))
    torch.testing.assert_close(hidden[:, :, 2:], hidden[:, :, 1:2].expand(-1, -1, 3, -1), rtol=1e-5, atol=1e-5)
    assert float((hidden[:, :, 0] - hidden[:, :, 1]).abs().max()) > 0.1
