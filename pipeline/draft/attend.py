"""Attention of blocks over their context and their own slots, by what is quick on the device.

On a CPU tiles of plain products (attend_cpu.py), on a GPU flex_attention where it can be compiled (attend_flex.py), elsewhere tiles
of torch's scaled dot product. All compute what `attention.visible` says, to rounding.
"""

from importlib.util import find_spec

import torch
import torch.nn.functional as F

from pipeline.draft.attend_cpu import attend_cpu
from pipeline.draft.attend_flex import FlexMask, attend_flex, flex_mask
from pipeline.draft.attention import Tile, plan_tiles, sort_blocks
from pipeline.records import DraftBatch

# What the slots of a batch see, as the backend wants it.
Seen = tuple[Tile, ...] | FlexMask

# Devices that flex_attention is taken on; its compiler for GPUs writes Triton.
FLEX_DEVICES = frozenset({"cuda"} if find_spec("triton") else ())


def plan_attention(
    batch: DraftBatch, block_size: int, windows: set[int | None], group: int, causal: bool, context_rows: int
) -> tuple[torch.Tensor, dict[int | None, Seen]]:
    """The order int64 [R, N] in which blocks are to be attended, and by sliding window what they see.

    `group` heads share a KV head; `causal` as in `visible`; context keys and values will be those of `context_rows` rows.
    """
    if batch.anchors.device.type in FLEX_DEVICES:
        return sort_blocks(batch)[0], {window: flex_mask(batch, block_size, window, causal, context_rows) for window in windows}
    plan = plan_tiles(batch, block_size, windows, group, causal)
    return plan.order, dict(plan.tiles)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: tuple[torch.Tensor, torch.Tensor], seen: Seen
) -> torch.Tensor:
    """Attention of all blocks: query [R, Hkv, N·B, G, D] (G heads share a KV head), key [R, Hkv, N·B, D] and value [R, Hkv, N·B, Dv],
    in the order of `plan_attention`; context keys and values of the same channels, [R, Hkv, C, ·]. Returns [R, Hkv, N·B, G, Dv]; the
    scale is D^-½."""
    if isinstance(seen, FlexMask):
        return attend_flex(query, key, value, context, seen)
    if query.device.type == "cpu":
        return attend_cpu(query, key, value, context, seen)
    return _portable(query, key, value, context, seen)


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
