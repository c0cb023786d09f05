"""Attention by torch's flex_attention, compiled, with a block mask that skips what no slot of a tile sees: for GPUs.

Keys are the context, padded to whole tiles, and behind it all slots. Which tiles a tile of queries reads follows from its blocks'
anchors alone, so the mask is made of them directly: nothing of queries times keys ever exists. Uncompiled, as on a CPU, flex_attention
computes all scores, and forward only: enough to compare it with the tiled backend, not to train with.
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from pipeline.draft.attention import sort_blocks
from pipeline.records import DraftBatch

TILE = 128
"""Queries, and keys, of a tile."""


@dataclass(frozen=True, slots=True)
class FlexMask:
    """What the slots of a batch see, in the order of anchors: its context padded to `context` rows, and their own blocks."""

    context: int
    mask: BlockMask


def flex_mask(batch: DraftBatch, block_size: int, window: int | None, causal: bool, context_rows: int) -> FlexMask:
    """Of `batch` with its blocks sorted; `context_rows` are those that keys are given of."""
    order, (anchors, starts, valid) = sort_blocks(batch)
    slots = order.shape[1] * block_size
    context = -(-context_rows // TILE) * TILE
    # The context rows [low, high) that each slot sees.
    slot = torch.arange(slots, device=order.device)
    high = torch.where(valid.bool(), anchors, 0).repeat_interleave(block_size, dim=1)
    low = starts.repeat_interleave(block_size, dim=1)
    if window is not None:
        low = torch.maximum(low, high + slot % block_size - window + 1)

    def sees(row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        own = key - context
        in_block = (own >= 0) & (own // block_size == query // block_size)
        if causal:
            in_block = in_block & (own <= query)
        seen: torch.Tensor = in_block | ((key >= low[row, query]) & (key < high[row, query]))
        return seen

    first = torch.arange(0, context, TILE, device=order.device)
    some = (low.unsqueeze(-1) < first + TILE) & (high.unsqueeze(-1) > first) & (low < high).unsqueeze(-1)
    every = (low.unsqueeze(-1) <= first) & (high.unsqueeze(-1) >= first + TILE)
    some, every = _by_tile(some, False).any(dim=2), _by_tile(every, True).all(dim=2)
    # Slots of a tile's blocks, which may begin in the tile before and end in the next one.
    tile = torch.arange(0, slots, TILE, device=order.device)
    begin, end = tile // block_size * block_size, ((tile + TILE - 1).clamp(max=slots - 1) // block_size + 1) * block_size
    own = (begin.unsqueeze(-1) < tile + TILE) & (end.unsqueeze(-1) > tile)
    own = own.expand(order.shape[0], -1, -1)
    partial = torch.cat((some & ~every, own), dim=-1)
    full = torch.cat((every, torch.zeros_like(own)), dim=-1)
    mask = BlockMask.from_kv_blocks(*_listed(partial), *_listed(full), BLOCK_SIZE=TILE, mask_mod=sees, seq_lengths=(slots, context + slots))
    return FlexMask(context, mask)


def _by_tile(seen: torch.Tensor, padding: bool) -> torch.Tensor:
    """[R, Q, K] as [R, tiles, TILE, K]."""
    return F.pad(seen, (0, 0, 0, -seen.shape[1] % TILE), value=padding).unflatten(1, (-1, TILE))  # type: ignore[no-untyped-call, no-any-return]


def _listed(tiles: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How many tiles of keys are marked in `tiles` bool [R, Q, K], int32 [R, 1, Q], and which, those first, int32 [R, 1, Q, K]."""
    order = tiles.int().argsort(dim=-1, descending=True, stable=True)
    return tiles.sum(dim=-1, dtype=torch.int32).unsqueeze(1), order.int().unsqueeze(1)


def attend_flex(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: tuple[torch.Tensor, torch.Tensor], seen: FlexMask
) -> torch.Tensor:
    """As `attend`."""
    padding = (0, 0, 0, seen.context - context[0].shape[2])
    keys, values = (torch.cat((F.pad(cached, padding), own), dim=2) for cached, own in zip(context, (key, value), strict=True))
    heads = query.transpose(2, 3).flatten(1, 2)  # heads that share keys stand side by side
    out = _flex(query.device.type)(heads, keys, values, block_mask=seen.mask, enable_gqa=query.shape[3] > 1)
    result: torch.Tensor = out.view(*query.shape[:2], query.shape[3], query.shape[2], -1).transpose(2, 3)
    return result


@cache
def _flex(device: str) -> Any:
    return torch.compile(flex_attention, dynamic=True) if device == "cuda" else flex_attention
