"""Attention over tiles on a CPU: a few matrix products a tile, with as little as can be between them.

With s the scores in base 2 (log2 e is multiplied into the queries: torch's exp2 is four times as quick as its exp) and r a number a
query, e = 2^(s - r) over all keys a query sees gives out = Σ e·v / Σ e. Any r is right that keeps e in range; the largest score
in the query's own block is known at once, so that nobody looks for the largest of the context. Where scores of the context are so much
larger that e would overflow, all is done again with the true maxima.

Scores of a tile are held as [context rows, queries]: subtracting r, and in the backward pass the log-sum-exp, is then a bias that the
product adds by itself, and a row of ones under the values makes Σ e one more row of the second product. Own slots are
products of whole blocks. What is kept for the backward pass are the inputs, the output, two numbers a query, and as many of the e as fit
into a budget; the others are computed again.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from pipeline.draft.attention import Tile
from pipeline.draft.matmul import times_transposed

# Context rows of a product are multiples of the one, for oneDNN makes a program for every shape that it meets, and at most the other, so
# that scores stay in the cache between products.
ROUND_KEYS, MOST_KEYS = 64, 1024
# Of the e of one layer and group of blocks, how many are kept: 256 MiB.
KEPT = 1 << 26
# Σ 2^(s - r) may not be larger.
LARGEST_SUM = 2.0**64


def attend_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: tuple[torch.Tensor, torch.Tensor], tiles: tuple[Tile, ...]
) -> torch.Tensor:
    """As `attend`. Computed in float32 where the inputs are narrower, by autocast or by themselves."""
    with torch.autocast("cpu", enabled=False):
        room = KEPT if torch.is_grad_enabled() else 0
        result: torch.Tensor = _CpuTiles.apply(query, key, value, *context, (tiles, room))  # type: ignore[no-untyped-call]
    return result


class _CpuTiles(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context_key: torch.Tensor,
        context_value: torch.Tensor,
        plan: tuple[tuple[Tile, ...], int],
    ) -> torch.Tensor:
        tiles, room = plan
        parts = _Parts(query, key, value, context_key, context_value, tiles)
        scores = parts.own_scores()
        reference = scores.amax(dim=-1)
        sums, kept = parts.context_sums(reference, room)
        if not bool((sums[..., -1, :] < LARGEST_SUM).all()):
            reference = torch.maximum(reference, parts.context_maxima())
            kept.clear()
            sums, kept = parts.context_sums(reference, room)
        own = scores.sub_(reference.unsqueeze(-1)).exp2_()
        total = sums[..., -1, :] + own.sum(dim=-1)
        out = sums[..., :-1, :].mT + (parts.by_block(own) @ parts.by_block(parts.value)).flatten(2, 3)
        out /= total.unsqueeze(-1)
        # All of it by `save_for_backward`, which activation checkpointing listens to.
        ctx.save_for_backward(query, key, value, context_key, context_value, out, total, reference, *kept)
        ctx.tiles = tiles
        return out.view(*query.shape[:-1], -1).to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, context_key, context_value, out, total, reference, *kept = ctx.saved_tensors
        inputs = (query, key, value, context_key, context_value)
        parts = _Parts(*inputs, ctx.tiles)
        # With shares e / Σ e, all that is formed of shares and gradients is formed of e and gradients / Σ e.
        # Contiguous, for a gradient may come in the layout of the output, at which oneDNN takes a thousand times as long.
        grad = (_wide(grad).flatten(2, 3) / total.unsqueeze(-1)).contiguous()
        delta = (grad * out).sum(dim=-1)
        # Own slots, block by block.
        own = parts.own_scores().sub_(reference.unsqueeze(-1)).exp2_()
        blocks, by_out = parts.by_block(own), parts.by_block(grad)
        d_value = (blocks.mT @ by_out).flatten(2, 3)
        d_scores = (by_out @ parts.by_block(parts.value).mT).sub_(parts.by_block(delta.unsqueeze(-1))).mul_(blocks)
        d_query = (d_scores @ parts.by_block(parts.key)).flatten(2, 3)
        d_key = (d_scores.mT @ parts.by_block(parts.query)).flatten(2, 3)
        # The context, tile by tile.
        d_context_key, d_context_value = (x.new_zeros(x.shape, dtype=parts.query.dtype) for x in (context_key, context_value))
        keys = parts.context_key.mT.to(query.dtype).contiguous()
        d_query_of_context = torch.zeros_like(parts.query.mT, memory_format=torch.contiguous_format)
        # What is summed up over queries or rows is multiplied in the dtype of the inputs, as torch's own kernels do.
        narrow_grad, narrow_query = grad.to(query.dtype), parts.query.to(query.dtype)
        for number, (queries, seen, tile) in enumerate(parts.places()):
            powers = kept[number] if number < len(kept) else parts.powers(queries, seen, tile, reference)
            d_context_value[seen] += times_transposed(powers.to(query.dtype), narrow_grad[queries].T)
            d_scores = times_transposed(parts.context_value[seen], grad[queries], -delta[queries], powers).to(query.dtype)
            d_context_key[seen] += times_transposed(d_scores, narrow_query[queries].T)
            columns = (*queries[:2], slice(None), queries[2])
            d_query_of_context[columns] += times_transposed(keys[(*seen[:2], slice(None), seen[2])], d_scores.T)
        d_query += d_query_of_context.mT
        # Queries carry log2(e) / sqrt(D); what is left of it for keys is 1 / log2(e).
        found = (
            d_query.mul_(parts.scale).view(inputs[0].shape),
            d_key.mul_(math.log(2)),
            d_value,
            d_context_key.mul_(math.log(2)),
            d_context_value,
        )
        return *(part.to(like.dtype) for part, like in zip(found, inputs, strict=True)), None


# Row, KV head, and queries or context rows.
_Place = tuple[int, int, slice]


class _Parts:
    """The inputs as the products want them: `query` [R, Hkv, Q, D], Q = N·B·G, times log2(e) / sqrt(D); context rows that tiles read."""

    def __init__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        context_key: torch.Tensor,
        context_value: torch.Tensor,
        tiles: tuple[Tile, ...],
    ) -> None:
        self.group, self.scale, self.tiles = query.shape[3], query.shape[4] ** -0.5, tiles
        self.query = (_wide(query) * (self.scale * math.log2(math.e))).flatten(2, 3).contiguous()
        self.key, self.value = _wide(key).contiguous(), _wide(value).contiguous()
        self.block_size, self.context_rows = tiles[0].block_size, context_key.shape[2]
        # What has to be copied of the context ends with the last row that any tile reads.
        last = max((rows.stop for _, (_, _, rows), _ in self.places()), default=0)
        self.context_key, self.context_value = _wide(context_key[:, :, :last]), _wide(context_value[:, :, :last])

    def by_block(self, x: torch.Tensor) -> torch.Tensor:
        """[R, Hkv, N·n, ·] as [R, Hkv, N, n, ·]."""
        return x.view(*x.shape[:2], self.key.shape[2] // self.block_size, -1, x.shape[-1])

    def own_scores(self) -> torch.Tensor:
        """[R, Hkv, Q, B], -inf where a slot does not see another one of its block."""
        scores = self.by_block(self.query) @ self.by_block(self.key).mT
        own = self.tiles[0].mask[: self.block_size, : self.block_size]
        if not bool(own.all()):
            scores.masked_fill_(~own.repeat_interleave(self.group, dim=0), -math.inf)
        return scores.flatten(2, 3)

    def places(self) -> Iterator[tuple[_Place, _Place, Tile]]:
        """By tile, KV head and some of the context rows that the tile sees, which queries there are and which rows are read for them."""
        for tile in self.tiles:
            queries = slice(tile.slots[0] * self.group, tile.slots[1] * self.group)
            for first in range(*tile.context, MOST_KEYS):
                size = min(MOST_KEYS, -(-(tile.context[1] - first) // ROUND_KEYS) * ROUND_KEYS)
                rows = slice(first, min(first + size, self.context_rows))
                for head in range(self.key.shape[1]):
                    yield (tile.row, head, queries), (tile.row, head, rows), tile

    def powers(self, queries: _Place, seen: _Place, tile: Tile, reference: torch.Tensor) -> torch.Tensor:
        """2^(scores - reference), 0 where a slot does not see a row: [context rows, queries]. `reference` [R, Hkv, Q]."""
        powers = times_transposed(self.context_key[seen], self.query[queries], -reference[queries]).exp2_()
        return self._hide(powers, seen[2], tile, 0.0)

    def context_sums(self, reference: torch.Tensor, room: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Σ 2^(scores - reference)·value over the context, and below it Σ 2^(scores - reference): [R, Hkv, Dv + 1, Q]; and the powers of
        the first `places`, as many as have room."""
        rows, heads, count, channels = self.context_value.shape
        values = self.context_value.new_ones(rows, heads, channels + 1, count)
        values[..., :-1, :] = self.context_value.mT
        sums: torch.Tensor = self.query.new_zeros(*values.shape[:3], self.query.shape[2])
        kept = []
        for queries, seen, tile in self.places():
            powers = self.powers(queries, seen, tile, reference)
            sums[(*queries[:2], slice(None), queries[2])] += times_transposed(values[(*seen[:2], slice(None), seen[2])], powers.T)
            room -= powers.numel()
            if room >= 0:
                kept.append(powers)
        return sums, kept

    def context_maxima(self) -> torch.Tensor:
        """The largest score of every query in its context, [R, Hkv, Q]; -inf where it sees none."""
        maxima: torch.Tensor = self.query.new_full(self.query.shape[:3], -math.inf)
        for queries, seen, tile in self.places():
            scores = times_transposed(self.context_key[seen], self.query[queries])
            maxima[queries] = torch.maximum(maxima[queries], self._hide(scores, seen[2], tile, -math.inf).amax(dim=0))
        return maxima

    def _hide(self, x: torch.Tensor, rows: slice, tile: Tile, by: float) -> torch.Tensor:
        """`x` [context rows, queries] of a tile, in place, with `by` where a slot does not see a row."""
        first, last = max(tile.rest[0], rows.start), min(tile.rest[1], rows.stop)
        if first < last:
            hidden = ~tile.mask[:, len(tile.mask) + first - tile.rest[0] : len(tile.mask) + last - tile.rest[0]].T
            some = x[first - rows.start : last - rows.start]
            some.view(last - first, -1, self.group).masked_fill_(hidden.unsqueeze(-1), by)
        x[max(0, tile.context[1] - rows.start) :] = by
        return x


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
