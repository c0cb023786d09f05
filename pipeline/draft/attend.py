"""Attention of blocks over their context and their own slots, tile by tile, by what is quick on the device."""

import torch
import torch.nn.functional as F

from pipeline.draft.attend_cpu import attend_cpu
from pipeline.draft.attention import Tile


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: tuple[torch.Tensor, torch.Tensor], tiles: tuple[Tile, ...]
) -> torch.Tensor:
    """Attention of all blocks: query [R, Hkv, N·B, G, D] (G heads share a KV head), key [R, Hkv, N·B, D] and value [R, Hkv, N·B, Dv],
    in the plan's order; context keys and values of the same channels, [R, Hkv, C, ·]. Returns [R, Hkv, N·B, G, Dv]; the scale is D^-½."""
    if query.device.type == "cpu":
        return attend_cpu(query, key, value, context, tiles)
    return _portable(query, key, value, context, tiles)


def _portable(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: tuple[torch.Tensor, torch.Tensor], tiles: tuple[Tile, ...]
) -> torch.Tensor:
    """The same by plain differentiable torch, for any device."""
    group = query.shape[3]
    rows: list[list[torch.Tensor]] = [[] for _ in range(query.shape[0])]
    for tile in tiles:
        parts = (slice(*tile.slots), slice(*tile.rest), slice(*tile.shared))
        keys, values = (
            torch.cat((own[tile.row, :, parts[0]], cached[tile.row, :, parts[1]], cached[tile.row, :, parts[2]]), dim=1)
            for own, cached in zip((key, value), context, strict=True)
        )
        mask = F.pad(tile.mask, (0, tile.shared[1] - tile.shared[0]), value=True)
        queries = query[tile.row, :, parts[0]].flatten(1, 2)
        out = F.scaled_dot_product_attention(queries[None], keys[None], values[None], attn_mask=mask.repeat_interleave(group, dim=0))
        rows[tile.row].append(out[0].view(out.shape[1], -1, group, out.shape[-1]))
    return torch.stack([torch.cat(parts, dim=1) for parts in rows])
