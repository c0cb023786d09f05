"""The draft while it serves: it keeps the keys and values of the committed context."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from pipeline.draft.attention import Attend
from pipeline.draft.matmul import ONEDNN, times_transposed
from pipeline.draft.model import Draft


class Serving:
    """Keys and values of a growing context, by layer, in buffers made once for `max_tokens` context rows and one block.

    Quickest with a draft that is `joined`. Several texts may grow side by side, each to a length of its own. A row of a buffer stands at
    its token's position, so nothing has to be taken back: what is not committed is not seen, and written over by whatever comes next.
    """

    def __init__(self, draft: Draft, max_tokens: int, texts: int = 1) -> None:
        config, weight = draft.config, draft.fc.weight
        rows = (texts, config.num_key_value_heads, max_tokens + config.block_size)
        self._draft = draft
        # Zeros, since rows that are not seen are still multiplied by 0.
        self._kept = [
            (weight.new_zeros(*rows, config.key_size), weight.new_zeros(*rows, config.value_size)) for _ in range(config.num_hidden_layers)
        ]
        self.lengths = [0] * texts

    def extend(self, features: torch.Tensor, start: int | None = None, lengths: Sequence[int] | None = None) -> None:
        """Add the next C tokens of every text, by their features [R, C, L·H]; all texts are then of one length. Texts that differ give
        the position `start` of the first, and how many tokens of each text are committed now."""
        first, count = max(self.lengths) if start is None else start, features.shape[1]
        positions = torch.arange(first, first + count, device=features.device).expand(features.shape[0], -1)
        for kept, new in zip(self._kept, self._draft.context(features, positions), strict=True):
            for buffer, rows in zip(kept, new, strict=True):
                buffer[:, :, first : first + count] = rows
        self.lengths = [first + count] * len(self.lengths) if lengths is None else list(lengths)

    def hidden(self, embeddings: torch.Tensor) -> torch.Tensor:
        """Hidden states [R, B, H] of the blocks that start right behind the contexts, from their slots' embeddings [R, B, H]."""
        starts = torch.tensor(self.lengths, device=embeddings.device).unsqueeze(1)
        positions = starts + torch.arange(embeddings.shape[1], device=embeddings.device)
        return self._draft.blocks(embeddings, positions, lambda layer: self._attention(layer, positions))

    def _attention(self, layer: int, positions: torch.Tensor) -> Attend:
        """Attention of blocks at `positions` [R, B], whose own keys and values go behind their contexts."""
        window, causal = self._draft.config.window(layer), self._draft.variant.causal
        end = max(self.lengths) + positions.shape[1]
        first = 0 if window is None else max(0, min(self.lengths) - window + 1)
        alike = len(set(self.lengths)) == 1

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            for buffer, own in zip(self._kept[layer], (key, value), strict=True):
                if alike:
                    buffer[:, :, end - own.shape[2] : end] = own
                else:
                    text = torch.arange(len(positions), device=positions.device).unsqueeze(1)
                    buffer[text, :, positions] = own.transpose(1, 2)
            keys, values = (buffer[:, :, first:end] for buffer in self._kept[layer])
            mask = None
            if causal or not alike or (window is not None and end > window):
                mask = _sees(positions, torch.arange(first, end, device=positions.device), window, causal)
                mask = mask.repeat_interleave(query.shape[3], dim=1).unsqueeze(1)
            out = _attention(query.flatten(2, 3), keys, values, mask)
            return out.reshape(*query.shape[:4], -1)

        return attend


def _attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Of queries [R, Hkv, Q, D] to keys [R, Hkv, K, D] and values [R, Hkv, K, Dv] where `mask` bool [R, 1, Q, K] is true."""
    if not ONEDNN or query.device.type != "cpu":
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask)
    # torch's kernel is made for many queries; for a block's few, plain products are quicker on a CPU.
    query = query * query.shape[-1] ** -0.5
    out = query.new_empty(*query.shape[:3], values.shape[-1])
    for text in range(query.shape[0]):
        for head in range(query.shape[1]):
            scores = times_transposed(query[text, head], keys[text, head])
            if mask is not None:
                scores.masked_fill_(~mask[text, 0], -math.inf)
            out[text, head] = times_transposed(scores.softmax(dim=-1), values[text, head].T)
    return out


def _sees(positions: torch.Tensor, rows: torch.Tensor, window: int | None, causal: bool) -> torch.Tensor:
    """bool [R, B, K]: whether a slot at `positions` [R, B] sees the row at position `rows` [K], of the context or of its own block."""
    at = positions.unsqueeze(-1)
    context = rows < at[:, :1]
    if window is not None:
        context = context & (at - rows < window)
    own = (rows >= at[:, :1]) & (rows <= (at if causal else at[:, -1:]))
    return (context | own).expand(-1, positions.shape[1], -1)
