"""Which rows a slot sees, and attention that computes no more than that.

`visible` is the definition (DFLASH §2). Training never builds that mask: blocks are taken in the order of their anchors, a few at a
time (a tile), and a tile reads the context rows that all of its slots see without a mask, and the few others, and its own
slots, with a small one. The two parts are joined by their log-sum-exps.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from pipeline.records import DraftBatch

# Queries of a tile, all heads of one KV group counted: enough to keep matrix products busy, few enough to waste little.
# A GPU wants larger products, and its tiles run one after another.
TILE_QUERIES, DEVICE_TILE_QUERIES = 256, 4096

# Given query [R, Hkv, Q, G, D] and the block's own key [R, Hkv, Q, D] and value [R, Hkv, Q, Dv], attention over context and block.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def visible(batch: DraftBatch, block_size: int, window: int | None, causal: bool = False) -> torch.Tensor:
    """The definition: bool [R, 1, N·B, S + N·B], true where a slot (row) sees a context row or a slot (column).

    A slot sees the context rows of its document strictly below its anchor (with a `window` W, of those the rows less than W behind
    itself) and all slots of its own block (`causal`: those up to itself). A padding block sees its own slots and no context.
    """
    rows, tokens = batch.input_ids.shape
    slots = torch.arange(block_size, device=batch.anchors.device)
    anchors, starts, valid = (
        field.repeat_interleave(block_size, dim=1) for field in (batch.anchors, batch.document_start, batch.block_valid)
    )
    context = torch.arange(tokens, device=anchors.device)
    sees = _sees_context(anchors, starts, slots.repeat(batch.anchors.shape[1]), context, window) & valid.unsqueeze(-1)
    own = _sees_own(batch.anchors.shape[1], block_size, causal, anchors.device).expand(rows, -1, -1)
    return torch.cat((sees, own), dim=-1).unsqueeze(1)


def _sees_own(count: int, block_size: int, causal: bool, device: torch.device) -> torch.Tensor:
    """bool [Q, Q], Q = count · B: whether a slot sees another one of `count` blocks."""
    block = torch.arange(count, device=device).repeat_interleave(block_size)
    same = block.unsqueeze(-1) == block
    return same.tril() if causal else same


def _sees_context(
    anchors: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor, context: torch.Tensor, window: int | None
) -> torch.Tensor:
    """bool [..., Q, K]: whether query q (slot `slots[q]` of the block at `anchors[..., q]`) sees context row `context[k]`."""
    anchors, starts = anchors.unsqueeze(-1), starts.unsqueeze(-1)
    sees = (context >= starts) & (context < anchors)
    if window is not None:
        sees = sees & (anchors + slots.unsqueeze(-1) - context < window)
    return sees


@dataclass(frozen=True, slots=True)
class Tile:
    """Some blocks of one row, neighbours in the order of anchors. Pairs are half-open ranges.

    `slots` of the row's block stream; `shared` context rows that every slot of the tile sees; `rest` further context rows that
    only some see; `mask` bool [slots, slots + rest], the tile's own slots first.
    """

    row: int
    slots: tuple[int, int]
    shared: tuple[int, int]
    rest: tuple[int, int]
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class Plan:
    """How a batch is attended: `order` int64 [R, N] sorts the blocks; tiles by sliding window."""

    order: torch.Tensor
    tiles: dict[int | None, tuple[Tile, ...]]


def plan_tiles(batch: DraftBatch, block_size: int, windows: set[int | None], queries_per_slot: int, causal: bool = False) -> Plan:
    """Tiles for every window in `windows`. `queries_per_slot` is the number of heads that share one KV head; `causal` as in `visible`."""
    limit = torch.iinfo(torch.int64).max
    # Padding goes last, so that a batch with ascending anchors is in order already.
    order = torch.where(batch.block_valid, batch.anchors, limit).argsort(dim=1, stable=True)
    fields = torch.stack((batch.anchors, batch.document_start, batch.block_valid.long())).gather(2, order.expand(3, -1, -1))
    queries = TILE_QUERIES if order.device.type == "cpu" else DEVICE_TILE_QUERIES
    per_tile = max(1, queries // (block_size * queries_per_slot))
    tiles: dict[int | None, tuple[Tile, ...]] = {}
    on_host = fields.tolist()  # the one wait for the device
    for window in windows:
        found = []
        for row in range(order.shape[0]):
            anchors, starts, valid = (field[row] for field in on_host)
            for first, last in _runs(starts, valid, per_tile):
                low, high = (starts[first], anchors[last - 1]) if valid[first] else (0, 0)
                if window is None:
                    shared, rest = (low, max(low, anchors[first])) if valid[first] else (0, 0), (max(low, anchors[first]), high)
                else:
                    shared, rest = (0, 0), (max(low, anchors[first] - window + 1), high)
                rest = rest if rest[0] < rest[1] else (0, 0)
                mask = _tile_mask(fields[:2, row, first:last], rest, block_size, window, causal)
                found.append(Tile(row, (first * block_size, last * block_size), shared, rest, mask))
        tiles[window] = tuple(found)
    return Plan(order, tiles)


def _runs(starts: list[int], valid: list[int], per_tile: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most `per_tile` neighbouring blocks that are of one document, or all padding."""
    first = 0
    for block in range(1, len(starts) + 1):
        ends = block == len(starts) or valid[block] != valid[first] or (valid[block] and starts[block] != starts[first])
        if ends or block - first == per_tile:
            yield first, block
            first = block


def _tile_mask(blocks: torch.Tensor, rest: tuple[int, int], block_size: int, window: int | None, causal: bool) -> torch.Tensor:
    """bool [T·B, T·B + rest]; `blocks` int64 [2, T], anchors and document starts."""
    count, device = blocks.shape[1], blocks.device
    anchors, starts = blocks.repeat_interleave(block_size, dim=1)
    slots = torch.arange(block_size, device=device).repeat(count)
    sees = _sees_context(anchors, starts, slots, torch.arange(*rest, device=device), window)
    return torch.cat((_sees_own(count, block_size, causal, device), sees), dim=-1)


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: tuple[torch.Tensor, torch.Tensor], tiles: tuple[Tile, ...]
) -> torch.Tensor:
    """Attention of all blocks: query [R, Hkv, N·B, G, D] (G heads share a KV head), key [R, Hkv, N·B, D] and value [R, Hkv, N·B, Dv],
    in the plan's order; context keys and values of the same channels, [R, Hkv, C, ·]. Returns [R, Hkv, N·B, G, Dv]; the scale is D^-½."""
    if query.device.type == "cpu":
        channels, size = value.shape[-1], max(query.shape[-1], value.shape[-1])
        if query.shape[-1] < size:
            query = query * (size / query.shape[-1]) ** 0.5  # torch takes size^-½ for the scale
        # torch's CPU kernels want keys and values of one size, and zeros change neither.
        query, key, value, *cached = (F.pad(x, (0, size - x.shape[-1])) if x.shape[-1] < size else x for x in (query, key, value, *context))
        result: torch.Tensor = _CpuTiles.apply(query.contiguous(), key, value, *cached, tiles)  # type: ignore[no-untyped-call]
        return result[..., :channels]
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


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _CpuTiles(torch.autograd.Function):
    """Tiles over torch's CPU flash kernels, which hand out the log-sum-exp that joining two parts needs.

    The gradient of a joined softmax is that of its parts, each with the joined output and log-sum-exp in place of its own. Nothing
    is kept but the inputs, the output and one number a query; no keys are repeated for grouped heads.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context_key: torch.Tensor,
        context_value: torch.Tensor,
        tiles: tuple[Tile, ...],
    ) -> torch.Tensor:
        group = query.shape[3]
        queries = query.flatten(2, 3)
        out, lse = torch.empty_like(queries), queries.new_empty(queries.shape[:3], dtype=torch.float32)
        for tile in tiles:
            where = (tile.row, slice(None), slice(tile.slots[0] * group, tile.slots[1] * group))
            q = queries[where][None]
            keys, values = _masked_part(tile, key, context_key), _masked_part(tile, value, context_value)
            part, part_lse = _forward(q, keys, values, attn_mask=_bias(tile, group, q.dtype))
            if tile.shared[0] < tile.shared[1]:
                k, v = _shared_part(tile, context_key), _shared_part(tile, context_value)
                other, other_lse = _forward(q, k, v)
                part, part_lse = _join(part, part_lse, other, other_lse)
            out[where], lse[where] = part[0], part_lse[0]
        ctx.save_for_backward(query, key, value, context_key, context_value, out, lse)
        ctx.tiles = tiles
        return out.view(query.shape)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, context_key, context_value, out, lse = ctx.saved_tensors
        group = query.shape[3]
        queries, grad = query.flatten(2, 3), grad.contiguous().flatten(2, 3)
        d_query = torch.empty_like(queries)
        d_key, d_value = torch.empty_like(key), torch.empty_like(value)
        d_context_key, d_context_value = torch.zeros_like(context_key), torch.zeros_like(context_value)
        for tile in ctx.tiles:
            row, own, rest, shared = tile.row, slice(*tile.slots), slice(*tile.rest), slice(*tile.shared)
            where = (row, slice(None), slice(tile.slots[0] * group, tile.slots[1] * group))
            q, g, o, norm = queries[where][None], grad[where][None], out[where][None], lse[where][None]
            keys, values = _masked_part(tile, key, context_key), _masked_part(tile, value, context_value)
            dq, dk, dv = _backward(g, q, keys, values, o, norm, 0.0, False, attn_mask=_bias(tile, group, q.dtype))
            size = tile.slots[1] - tile.slots[0]
            d_key[row, :, own], d_value[row, :, own] = dk[0, :, :size], dv[0, :, :size]
            d_context_key[row, :, rest] += dk[0, :, size:]
            d_context_value[row, :, rest] += dv[0, :, size:]
            if tile.shared[0] < tile.shared[1]:
                k, v = _shared_part(tile, context_key), _shared_part(tile, context_value)
                more, dk, dv = _backward(g, q, k, v, o, norm, 0.0, False)
                dq = dq + more
                d_context_key[row, :, shared] += dk[0]
                d_context_value[row, :, shared] += dv[0]
            d_query[where] = dq[0]
        return d_query.view(query.shape), d_key, d_value, d_context_key, d_context_value, None


def _masked_part(tile: Tile, own: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
    """[1, Hkv, slots + rest, D]. Own slots come first: every query then meets a key that it sees in the kernel's first pass."""
    return torch.cat((own[tile.row, :, slice(*tile.slots)], context[tile.row, :, slice(*tile.rest)]), dim=1)[None]


def _shared_part(tile: Tile, context: torch.Tensor) -> torch.Tensor:
    return context[tile.row, :, slice(*tile.shared)][None]


def _bias(tile: Tile, group: int, dtype: torch.dtype) -> torch.Tensor:
    """The mask as what is added to scores: [1, 1, slots·G, slots + rest]."""
    bias = torch.zeros(tile.mask.shape, dtype=dtype).masked_fill_(~tile.mask, -math.inf)
    return bias.repeat_interleave(group, dim=0)[None, None]


def _join(a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over two disjoint sets of keys, from the attention over each: outputs [1, H, Q, D], log-sum-exps [1, H, Q]."""
    lse = torch.logaddexp(a_lse, b_lse)
    weight = (a_lse - lse).exp().unsqueeze(-1).to(a.dtype)
    return torch.lerp(b, a, weight), lse
