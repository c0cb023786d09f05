"""Visibility, and that the tiles compute exactly what it says."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.draft import attend as backends
from pipeline.draft import attend_cpu, attention
from pipeline.draft.attend import attend
from pipeline.draft.attend_flex import flex_mask
from pipeline.draft.attention import plan_tiles, sort_blocks, visible
from pipeline.records import DraftBatch
from tests.support.drafts import any_batch, small_config

shapes = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10**6),
        "rows": st.integers(1, 3),
        "tokens": st.integers(3, 40),
        "blocks": st.integers(1, 9),
        "packed": st.booleans(),
        "block_size": st.integers(2, 5),
        "window": st.none() | st.integers(5, 30),
    }
)


def batch_of(shape: dict[str, int]) -> DraftBatch:
    config = small_config(block_size=shape["block_size"])
    return any_batch(shape["seed"], config, shape["rows"], shape["tokens"], shape["blocks"], bool(shape["packed"]))


@settings(max_examples=25, deadline=None)
@given(shapes)
def test_visible_key_by_key(shape: dict[str, int]) -> None:
    batch, size, window = batch_of(shape), shape["block_size"], shape["window"]
    tokens = batch.input_ids.shape[1]
    mask = visible(batch, size, window)
    assert mask.shape == (batch.anchors.shape[0], 1, batch.anchors.shape[1] * size, tokens + batch.anchors.shape[1] * size)
    for row, block in torch.cartesian_prod(torch.arange(mask.shape[0]), torch.arange(batch.anchors.shape[1])).tolist():
        anchor, start = int(batch.anchors[row, block]), int(batch.document_start[row, block])
        for slot in range(size):
            expected = {tokens + block * size + other for other in range(size)}
            if batch.block_valid[row, block]:
                expected |= {j for j in range(start, anchor) if window is None or anchor + slot - j < window}
            assert set(mask[row, 0, block * size + slot].nonzero().flatten().tolist()) == expected


@pytest.mark.parametrize("backend", [attend, backends._portable])
@settings(max_examples=25, deadline=None)
@given(
    shape=shapes,
    heads=st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1)]),
    tile_queries=st.sampled_from([1, 12, 256]),
    at_once=st.sampled_from([(1, 3, 0), (4, 8, 400), (64, 1024, 10**6)]),
    value_size=st.sampled_from([5, 8, 11]),
)
def test_tiles_agree_with_the_dense_mask(
    backend: Callable[..., torch.Tensor],
    shape: dict[str, int],
    heads: tuple[int, int],
    tile_queries: int,
    value_size: int,
    at_once: tuple[int, int, int],
) -> None:
    batch, size, window = batch_of(shape), shape["block_size"], shape["window"]
    (kv_heads, group), head_dim, (rows, blocks) = heads, 8, batch.anchors.shape
    generator = torch.Generator().manual_seed(shape["seed"])
    query = torch.randn(rows, kv_heads, blocks * size, group, head_dim, generator=generator, requires_grad=True)
    sizes, tokens = (head_dim, value_size), batch.input_ids.shape[1]
    own = [torch.randn(rows, kv_heads, blocks * size, channels, generator=generator, requires_grad=True) for channels in sizes]
    context = [torch.randn(rows, kv_heads, tokens, channels, generator=generator, requires_grad=True) for channels in sizes]
    weight = torch.randn(*query.shape[:-1], value_size, generator=generator)

    keys, values = (torch.cat((rows_of, slots), dim=2) for rows_of, slots in zip(context, own, strict=True))
    mask = visible(batch, size, window).unsqueeze(2)
    scores = torch.einsum("rhqgd,rhkd->rhgqk", query, keys) / head_dim**0.5
    dense = torch.einsum("rhgqk,rhkd->rhqgd", scores.masked_fill(~mask, float("-inf")).softmax(-1), values)
    inputs = [query, *own, *context]
    expected = torch.autograd.grad((dense * weight).sum(), inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "TILE_QUERIES", tile_queries)
        plan = plan_tiles(batch, size, {window}, group)
    order = (plan.order.unsqueeze(-1) * size + torch.arange(size)).flatten(1)  # slots in the plan's order
    sort = torch.arange(rows).unsqueeze(1), order
    in_order = [query.transpose(1, 2)[sort].transpose(1, 2), *(x.transpose(1, 2)[sort].transpose(1, 2) for x in own)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend_cpu, "ROUND_KEYS", at_once[0])
        patch.setattr(attend_cpu, "MOST_KEYS", at_once[1])
        patch.setattr(attend_cpu, "KEPT", at_once[2])
        tiled = backend(*in_order, (context[0], context[1]), plan.tiles[window])
        found = torch.autograd.grad((tiled * weight.transpose(1, 2)[sort].transpose(1, 2)).sum(), inputs)
    wanted = dense.transpose(1, 2)[sort].transpose(1, 2)
    torch.testing.assert_close(tiled, wanted, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


def test_all_that_is_kept_for_the_gradient_can_be_checkpointed() -> None:
    """Activation checkpointing frees what goes through torch's hooks for saved tensors, and nothing else."""
    batch = any_batch(3, small_config(block_size=4), rows=1, tokens=600, blocks=20)
    plan = plan_tiles(batch, 4, {None}, 2)
    query = torch.randn(1, 1, 80, 2, 8, requires_grad=True)
    key, value, context_key, context_value = (torch.randn(1, 1, count, 8) for count in (80, 80, 600, 600))
    pairs = 2 * int(visible(batch, 4, None)[..., :600].sum())
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = attend(query, key, value, (context_key, context_value), plan.tiles[None])
    assert sum(saved) > pairs > 10 * query.numel()
    assert not hasattr(out.grad_fn, "kept")
    # Also a second time: nothing is used up.
    first, second = (torch.autograd.grad(out.sum(), query, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_long_contexts_cross_the_kernels_passes() -> None:
    """Masks and sums must hold across the rows that are taken at once, in float32 and bfloat16, and for very large scores."""
    config = small_config(block_size=4)
    batch = any_batch(3, config, rows=1, tokens=1700, blocks=40, packed=True)
    for window in (None, 900):
        plan = plan_tiles(batch, 4, {window}, 2)
        order = (plan.order.unsqueeze(-1) * 4 + torch.arange(4)).flatten(1)[0]
        generator = torch.Generator().manual_seed(0)
        query = torch.randn(1, 1, 160, 2, 8, generator=generator)
        key, value = torch.randn(2, 1, 1, 160, 8, generator=generator)
        context_key, context_value = torch.randn(2, 1, 1, 1700, 8, generator=generator)
        mask = visible(batch, 4, window)[:, :, order]
        mask = torch.cat((mask[..., :1700], mask[..., 1700:][..., order]), dim=-1)
        keys, values = (torch.cat(pair, dim=2).repeat_interleave(2, dim=1) for pair in ((context_key, key), (context_value, value)))
        dense = F.scaled_dot_product_attention(query[:, 0].transpose(1, 2), keys, values, attn_mask=mask).transpose(1, 2)[:, None]
        torch.testing.assert_close(attend(query, key, value, (context_key, context_value), plan.tiles[window]), dense, rtol=1e-5, atol=1e-5)
        half = [x.bfloat16() for x in (query, key, value, context_key, context_value)]
        wild = [torch.where(torch.arange(160)[:, None, None] % 5 == 0, 300 * query, query), key, value]
        scores = torch.einsum("rhqgd,rhkd->rhgqk", wild[0].double(), torch.cat((context_key, key), dim=2).double()) / 8**0.5
        assert float(scores.masked_fill(~mask.unsqueeze(2), 0.0).amax()) > 200  # whose exponentials no float32 holds
        shares = scores.masked_fill(~mask.unsqueeze(2), float("-inf")).softmax(-1)
        exact = torch.einsum("rhgqk,rhkd->rhqgd", shares, torch.cat((context_value, value), dim=2).double())
        found = attend(wild[0], key, value, (context_key, context_value), plan.tiles[window])
        torch.testing.assert_close(found.double(), exact, rtol=1e-3, atol=1e-4)
        rounded = attend(half[0], half[1], half[2], (half[3], half[4]), plan.tiles[window])
        torch.testing.assert_close(rounded.float(), dense, rtol=0.05, atol=0.03)


@settings(max_examples=25, deadline=None)
@given(shapes, st.sampled_from([4, 256]))
def test_tiles_read_no_keys_of_other_documents(shape: dict[str, int], tile_queries: int) -> None:
    """A packed row costs what its documents cost alone: a tile has blocks of one document, and reads from its start to its last anchor."""
    batch, size, window = batch_of({**shape, "packed": True}), shape["block_size"], shape["window"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "TILE_QUERIES", tile_queries)
        plan = plan_tiles(batch, size, {window}, 1)
    row = torch.arange(len(batch.anchors)).unsqueeze(1)
    anchors, starts, valid = (field[row, plan.order] for field in (batch.anchors, batch.document_start, batch.block_valid))
    for tile in plan.tiles[window]:
        blocks = slice(tile.slots[0] // size, tile.slots[1] // size)
        if not valid[tile.row, blocks].any():
            assert tile.shared == tile.rest == (0, 0)
            continue
        assert len(set(starts[tile.row, blocks].tolist())) == 1
        start, last = int(starts[tile.row, blocks][0]), int(anchors[tile.row, blocks].max())
        read = [key for first, end in (tile.shared, tile.rest) for key in range(first, end)]
        assert len(read) == len(set(read))
        assert set(read) <= set(range(start, last))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@settings(max_examples=15, deadline=None)
@given(shape=shapes, heads=st.sampled_from([(1, 1), (1, 3), (2, 2)]), causal=st.booleans())
def test_flex_attention_agrees_with_the_tiles(shape: dict[str, int], heads: tuple[int, int], causal: bool) -> None:
    """Forward alone: flex_attention has no backward on a CPU, and is compiled on a GPU only."""
    batch, size, window = batch_of(shape), shape["block_size"], shape["window"]
    (kv_heads, group), (rows, blocks), tokens = heads, batch.anchors.shape, batch.input_ids.shape[1]
    generator = torch.Generator().manual_seed(shape["seed"])
    query = torch.randn(rows, kv_heads, blocks * size, group, 8, generator=generator)
    key, value = torch.randn(2, rows, kv_heads, blocks * size, 8, generator=generator)
    context = torch.randn(2, rows, kv_heads, tokens, 8, generator=generator)
    with pytest.MonkeyPatch.context() as patch:
        found = []
        for devices in (frozenset({"cpu"}), frozenset[str]()):
            patch.setattr(backends, "FLEX_DEVICES", devices)
            order, seen = backends.plan_attention(batch, size, {window}, group, causal, tokens)
            with torch.no_grad():
                found.append((order, attend(query, key, value, (context[0], context[1]), seen[window])))
    assert torch.equal(found[0][0], found[1][0])
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("tokens", "blocks", "size", "window"), [(700, 70, 10, None), (700, 40, 16, 300), (300, 64, 4, None)])
def test_tiles_that_flex_attention_skips(tokens: int, blocks: int, size: int, window: int | None) -> None:
    """What is left out is seen by no slot, what is taken whole is seen by all, and nothing is in both lists."""
    batch = any_batch(1, small_config(block_size=size), rows=2, tokens=tokens, blocks=blocks, packed=True)
    found = flex_mask(batch, size, window, False, tokens)
    order = sort_blocks(batch)[0]
    slots = (order.unsqueeze(-1) * size + torch.arange(size)).flatten(1)
    dense = visible(batch, size, window)[:, 0]
    dense = torch.stack([rows[at] for rows, at in zip(dense, slots, strict=True)])
    own = torch.stack([rows[:, tokens:][:, at] for rows, at in zip(dense, slots, strict=True)])
    whole = torch.cat((F.pad(dense[..., :tokens], (0, found.context - tokens)), own), dim=-1)
    queries, keys = whole.shape[1:]
    padded = F.pad(whole, (0, -keys % 128, 0, -queries % 128)).view(2, -(-queries // 128), 128, -(-keys // 128), 128)
    some, count = padded.any(dim=4).any(dim=2), padded.sum(dim=(2, 4))
    mask = found.mask
    for row in range(2):
        for tile in range(some.shape[1]):
            partial, full = (
                set(indices[row, 0, tile, : int(number[row, 0, tile])].tolist())
                for indices, number in ((mask.kv_indices, mask.kv_num_blocks), (mask.full_kv_indices, mask.full_kv_num_blocks))
                if indices is not None and number is not None
            )
            assert not partial & full
            assert partial | full == set(some[row, tile].nonzero().flatten().tolist())
            real = min(128, queries - 128 * tile)
            assert all(int(count[row, tile, key]) == real * 128 for key in full)
