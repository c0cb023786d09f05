"""The draft while it serves one text: it keeps the keys and values of the committed context."""

import torch
import torch.nn.functional as F

from pipeline.draft.matmul import ONEDNN, times_transposed
from pipeline.draft.model import Attend, Draft


class Serving:
    """Keys and values of a growing context, by layer, in buffers made once for `max_tokens` context rows and one block.

    Only features of committed tokens ever go in, so that nothing has to be taken back. The block's own keys and values are
    written behind the context, and over by whatever comes next.
    """

    def __init__(self, draft: Draft, max_tokens: int) -> None:
        config, weight = draft.config, draft.fc.weight
        shape = (1, config.num_key_value_heads, max_tokens + config.block_size, config.head_dim)
        self._draft = draft
        self._kept = [
            (torch.empty(shape, dtype=weight.dtype, device=weight.device), torch.empty(shape, dtype=weight.dtype, device=weight.device))
            for _ in range(config.num_hidden_layers)
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
            return _attention(query.flatten(2, 3), keys, values, mask).view(query.shape)

        return attend


def _attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Of queries [1, Hkv, Q, D] to keys and values [1, Hkv, K, D] where `mask` bool [Q, K] is true: [1, Hkv, Q, D]."""
    if query.device.type != "cpu" or not ONEDNN:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    # For so few queries and so many keys, plain products are quicker on a CPU than torch's kernel, which is made for many queries.
    query = query * query.shape[-1] ** -0.5
    out = []
    for head in range(query.shape[1]):
        scores = times_transposed(query[0, head], keys[0, head])
        if mask is not None:
            scores.masked_fill_(~mask, -torch.inf)
        out.append(times_transposed(scores.softmax(dim=-1), values[0, head].T))
    return torch.stack(out).unsqueeze(0)
