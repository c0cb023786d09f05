"""Which rows a slot sees, and attention that computes no more than that.

`visible` is the definition (DFLASH §2). Training never builds that mask: blocks are taken in the order of their anchors, a few at a
time (a tile), and a tile reads the context rows that all of its slots see without a mask, and the few others, and its own
slots, with a small one.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from pipeline.records import DraftBatch

# Queries of a tile, all heads of one KV group counted: enough to keep matrix products busy, few enough to waste little.
# A GPU wants larger products, and its tiles run one after another.
TILE_QUERIES, DEVICE_TILE_QUERIES = 768, 4096

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
    block_size: int

    @property
    def context(self) -> tuple[int, int]:
        """All context rows that any slot of the tile sees."""
        if self.shared[0] == self.shared[1]:
            return self.rest
        return self.shared[0], max(self.shared[1], self.rest[1])


@dataclass(frozen=True, slots=True)
class Plan:
    """How a batch is attended: `order` int64 [R, N] sorts the blocks; tiles by sliding window."""

    order: torch.Tensor
    tiles: dict[int | None, tuple[Tile, ...]]


def sort_blocks(batch: DraftBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """The order int64 [R, N] of blocks by their anchors, padding last, and in it anchors, document starts and validity, int64 [3, R, N]."""
    limit = torch.iinfo(torch.int64).max
    order = torch.where(batch.block_valid, batch.anchors, limit).argsort(dim=1, stable=True)
    return order, torch.stack((batch.anchors, batch.document_start, batch.block_valid.long())).gather(2, order.expand(3, -1, -1))


def plan_tiles(batch: DraftBatch, block_size: int, windows: set[int | None], queries_per_slot: int, causal: bool = False) -> Plan:
    """Tiles for every window in `windows`. `queries_per_slot` is the number of heads that share one KV head; `causal` as in `visible`."""
    order, fields = sort_blocks(batch)
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
                found.append(Tile(row, (first * block_size, last * block_size), shared, rest, mask, block_size))
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
