"""The draft while it serves one text: it keeps the keys and values of the committed context."""

import torch
import torch.nn.functional as F

from pipeline.draft.attention import Attend
from pipeline.draft.model import Draft


class Serving:
    """Keys and values of a growing context, by layer, in buffers made once for `max_tokens` context rows and one block.

    Only features of committed tokens ever go in, so that nothing has to be taken back. The block's own keys and values are
    written behind the context, and over by whatever comes next.
    """

    def __init__(self, draft: Draft, max_tokens: int) -> None:
        config, weight = draft.config, draft.fc.weight
        rows = (1, config.num_key_value_heads, max_tokens + config.block_size)
        self._draft = draft
        self._kept = [
            (weight.new_empty(*rows, config.key_size), weight.new_empty(*rows, config.value_size)) for _ in range(config.num_hidden_layers)
        ]
        self.length = 0

    def extend(self, features: torch.Tensor) -> None:
        """Add the next C tokens of the context, by their features [1, C, L·H]."""
        count = features.shape[1]
        positions = torch.arange(self.length, self.length + count, device=features.device).unsqueeze(0)
        for kept, new in zip(self._kept, self._draft.context(features, positions), strict=True):
            for buffer, rows in zip(kept, new, strict=True):
                buffer[:, :, self.length : self.length + count] = rows
        self.length += count

    def hidden(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Hidden states [1, B, H] of the block that starts right behind the context, from its slots' embeddings [1, B, H]."""
        positions = torch.arange(self.length, self.length + embeddings.shape[1], device=embeddings.device).unsqueeze(0)
        return self._draft.blocks(embeddings, positions, self._attention)

    def _attention(self, layer: int) -> Attend:
        window = self._draft.config.window(layer)

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            slots = key.shape[2]
            end = self.length + slots
            first, mask = 0, None
            if window is not None and end > window:
                first = max(0, self.length - window + 1)
                behind = torch.arange(self.length, end, device=key.device).unsqueeze(1) - torch.arange(first, end, device=key.device)
                own = torch.arange(first, end, device=key.device) >= self.length
                mask = ((behind < window) | own).repeat_interleave(query.shape[3], dim=0)
            keys, values = (buffer[:, :, first:end] for buffer in self._kept[layer])
            keys[:, :, -slots:], values[:, :, -slots:] = key, value
            out = F.scaled_dot_product_attention(query.flatten(2, 3), keys, values, attn_mask=mask)
            return out.reshape(*query.shape[:4], -1)

        return attend
