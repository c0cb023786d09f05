"""DFlash as it first was, every slot by itself (DFLASH §2 and §3). JetSpec is the same, with causal blocks: no file of its own."""

import torch
from torch import nn

from pipeline.draft.head import head_logits, head_losses
from pipeline.draft.slots import Pick, Proposal, Scored, Slots
from pipeline.records import TargetBundle


def score(draft: nn.Module, bundle: TargetBundle, slots: Slots, base_share: float) -> Scored:
    """Σ w·loss."""
    losses, best, wanted = head_losses(slots.hidden, slots.loss, bundle)
    weight = slots.weigh(losses.detach(), slice(None))
    return Scored(torch.dot(losses, weight).view(1), {"weight": weight, "correct": best == wanted})


def propose(draft: nn.Module, hidden: torch.Tensor, anchor: torch.Tensor, bundle: TargetBundle, pick: Pick) -> Proposal:
    """A token for every slot of `hidden` [T, B, H] behind the anchor's."""
    # Slot 0 predicts nothing, but a head over all B slots is no dearer than over B - 1 (and on CPUs often cheaper).
    logits = head_logits(hidden.to(bundle.head.dtype), bundle.head, bundle)[:, 1:]
    return Proposal(pick(logits), logits)
