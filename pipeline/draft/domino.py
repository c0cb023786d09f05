"""Domino (DFLASH §6): the backbone's logits of a slot, corrected by what was written in the block so far.

A GRU reads the tokens from the anchor on; its state before a slot's label and the slot's hidden state go through a narrow
projection, and what comes out is added to the logits of the slots from `first_corrected` on.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from pipeline.draft.config import DraftConfig
from pipeline.draft.head import compute_dtype, head_logits, head_slope, rows_at_once
from pipeline.draft.matmul import Linear, times_transposed
from pipeline.draft.slots import Pick, Proposal, Scored, Slots, embed_blocks
from pipeline.records import TargetBundle


def first_corrected(config: DraftConfig) -> int:
    """The first slot whose logits are corrected."""
    return config.pure_draft_prefix_len + 1 - config.label_shift


def faults(config: DraftConfig) -> list[str]:
    found = [
        f"{name} is {getattr(config, name)}, expected at least 1" for name in ("emb_dim", "gru_hidden_dim") if getattr(config, name) < 1
    ]
    if not 0 <= config.pure_draft_prefix_len < config.block_size - 1 + config.label_shift:
        found.append(f"pure_draft_prefix_len {config.pure_draft_prefix_len} leaves no slot of a block of {config.block_size} to correct")
    return found


def extend(draft: nn.Module, config: DraftConfig) -> None:
    """Add the GRU and the projection to a plain draft."""
    draft.prefix_gru = nn.GRU(config.hidden_size, config.gru_hidden_dim, bias=False, batch_first=True)
    narrow = Linear(config.hidden_size + config.gru_hidden_dim, config.emb_dim, bias=False)
    wide = Linear(config.emb_dim, config.vocab_size, bias=False)
    for linear in (narrow, wide):
        nn.init.normal_(linear.weight, std=0.02)
    draft.embed_proj = nn.Sequential(narrow, nn.SiLU(), wide)


def score(draft: nn.Module, bundle: TargetBundle, slots: Slots, base_share: float) -> Scored:
    """Σ w·((1 - λ)·loss of the corrected logits + λ·loss of the backbone's), λ the `base_share`."""
    config, gru, projection = _parts(draft)
    # The state before a label has read all tokens up to the one before it: as many as the label is away from the anchor.
    read, _ = gru(embed_blocks(slots.tokens[:, :-1], bundle).to(_weight(gru).dtype))
    state = read[slots.block, slots.slot - 1 + config.label_shift]
    narrow = projection[1](projection[0](torch.cat((slots.hidden, state.to(slots.hidden.dtype)), dim=1)))
    corrected = slots.slot >= first_corrected(config)
    task = _Task(bundle, slots, corrected, base_share)
    total, weight, losses, base_losses, correct, base_correct = _Corrected.apply(slots.hidden, narrow, projection[2].weight, task)  # type: ignore[no-untyped-call]
    kept = {
        "weight": weight,
        "loss": losses,
        "base_loss": base_losses,
        "correct": correct,
        "base_correct": base_correct,
        "base_share": torch.full_like(weight, base_share),
    }
    return Scored(total.view(1), kept)


class _Task(NamedTuple):
    """What `_Corrected` needs besides tensors with gradient. `corrected` bool [M]."""

    bundle: TargetBundle
    slots: Slots
    corrected: torch.Tensor
    base_share: float


class _Corrected(torch.autograd.Function):
    """Both losses of every row from one product with the head, chunk by chunk, and all gradients formed on the way.

    The projection's gradient is a sum over rows, so the rows' weights must be known when a chunk is done: chunks hold whole blocks.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, narrow: torch.Tensor, wide: torch.Tensor, task: _Task) -> tuple[torch.Tensor, ...]:
        bundle, slots, share, dtype = task.bundle, task.slots, task.base_share, compute_dtype(hidden)
        head, matrix = bundle.head.to(dtype), wide.to(dtype)
        needed = any(ctx.needs_input_grad[:3])
        grads = [torch.zeros_like(tensor) for tensor in (hidden, narrow, wide)] if needed else []
        weight, losses, base_losses = torch.empty(3, len(hidden), dtype=torch.float32, device=hidden.device)
        correct, base_correct = torch.empty(2, len(hidden), dtype=torch.bool, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _whole_blocks(slots.block, rows_at_once(head)):
                small = narrow[rows].to(dtype) * task.corrected[rows].unsqueeze(1)
                base = head_logits(hidden[rows].to(dtype), head, bundle)
                final = base + times_transposed(small, matrix)
                slope = head_slope(base, bundle) if needed else None
                losses[rows], best, wanted = slots.loss(final, rows)
                base_losses[rows], base_best, _ = slots.loss(base, rows)
                correct[rows], base_correct[rows] = best == wanted, base_best == wanted
                weight[rows] = slots.weigh(losses[rows], rows)
                if not needed:
                    continue
                # What stands in the place of the logits now is the gradient by them.
                final *= (1 - share) * weight[rows].unsqueeze(1)
                by_final = final.to(dtype)
                grads[1][rows] = (times_transposed(by_final, matrix.T) * task.corrected[rows].unsqueeze(1)).to(narrow.dtype)
                grads[2] += times_transposed(by_final.T, small.T).to(wide.dtype)
                if share:
                    final += base.mul_(share * weight[rows].unsqueeze(1))
                if slope is not None:
                    final *= slope
                grads[0][rows] = times_transposed(final.to(dtype), head.T).to(hidden.dtype)
        ctx.grads = grads
        ctx.mark_non_differentiable(weight, losses, base_losses, correct, base_correct)
        total = (1 - share) * torch.dot(losses, weight) + share * torch.dot(base_losses, weight)
        return total, weight, losses, base_losses, correct, base_correct

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        return *(grad * upstream.to(grad.dtype) for grad in ctx.grads), None


def _whole_blocks(block: torch.Tensor, most: int) -> Iterator[slice]:
    """Slices of at most `most` rows that divide no block (one block may be longer by itself); `block` int64 [M], ascending."""
    start = end = 0
    for count in torch.unique_consecutive(block, return_counts=True)[1].tolist():
        if end + count - start > most and end > start:
            yield slice(start, end)
            start = end
        end += count
    if end > start:
        yield slice(start, end)


def propose(draft: nn.Module, hidden: torch.Tensor, anchor: torch.Tensor, bundle: TargetBundle, pick: Pick) -> Proposal:
    """Slot by slot, each behind the tokens picked before it; with `shift_label` the first of `hidden` [T, B, H] drafts too."""
    config, gru, projection = _parts(draft)
    first = 1 - config.label_shift
    base = head_logits(hidden[:, first:].to(bundle.head.dtype), bundle.head, bundle)
    state, token, path, logits = None, anchor, [], []
    for slot in range(first, config.block_size):
        read, state = gru(embed_blocks(token.unsqueeze(1), bundle).to(_weight(gru).dtype), state)
        one = base[:, slot - first]
        if slot >= first_corrected(config):
            one = one + projection(torch.cat((hidden[:, slot], read[:, 0].to(hidden.dtype)), dim=-1)).float()
        logits.append(one)
        token = pick(one)
        path.append(token)
    return Proposal(torch.stack(path, dim=1), torch.stack(logits, dim=1))


def _parts(draft: nn.Module) -> tuple[DraftConfig, nn.GRU, nn.Sequential]:
    return cast(DraftConfig, draft.config), cast(nn.GRU, draft.prefix_gru), cast(nn.Sequential, draft.embed_proj)


def _weight(gru: nn.GRU) -> torch.Tensor:
    return cast(torch.Tensor, gru.weight_ih_l0)
