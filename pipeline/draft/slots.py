"""Blocks of a batch, slot by slot: what they are fed, what they are to predict, and how much each slot weighs (DFLASH §2 and §3)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from pipeline.config.draft import ObjectiveSection
from pipeline.draft.config import DraftConfig
from pipeline.draft.fused import rms_norm
from pipeline.draft.head import SlotLoss, compute_dtype, cross_entropy, divergence, head_logits, largest
from pipeline.errors import DraftError
from pipeline.records import DraftBatch, TargetBundle

# The target's logits fp32 [M, V] after the tokens at `row` and `position`, int64 [M] each.
Teacher = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Weights fp32 [c] of the supervised slots in a slice, which holds whole blocks, given their losses [c].
Weigh = Callable[[torch.Tensor, slice], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Slots:
    """The supervised slots of some blocks: M rows, block by block and in the order of slots.

    `hidden` [M, H], with gradient; `block` and `slot` int64 [M]; `tokens` int64 [blocks, B + shift], the true tokens from each
    block's anchor on; `loss` of the rows under any logits; `weigh` what of their weights does not depend on the variant.
    """

    hidden: torch.Tensor
    block: torch.Tensor
    slot: torch.Tensor
    tokens: torch.Tensor
    loss: SlotLoss
    weigh: Weigh


class Scored(NamedTuple):
    """What a variant made of `Slots`: `terms` fp32 [K], sums with gradient, one for each of the variant's losses; `kept`, by name,
    a value [M] for each slot, "weight" and "correct" among them."""

    terms: torch.Tensor
    kept: dict[str, torch.Tensor]


class Proposal(NamedTuple):
    """What T blocks draft: `tokens` int64 [T, D], each picked by its `logits` fp32 [T, D, C], which are of the tokens `candidates` int64
    [T, D, C] (None: of the whole vocabulary). D is what follows the anchor, in order."""

    tokens: torch.Tensor
    logits: torch.Tensor
    candidates: torch.Tensor | None = None


# Given logits [..., C], which to take, int64 [...].
Pick = Callable[[torch.Tensor], torch.Tensor]


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The greedy `Pick`."""
    return largest(logits.flatten(0, -2))[1].view(logits.shape[:-1])


def embed_blocks(ids: torch.Tensor, bundle: TargetBundle) -> torch.Tensor:
    """[..., H], in the dtype of the target's embedding."""
    embedded = F.embedding(ids, bundle.embedding)
    return embedded if bundle.input_embedding_scale == 1.0 else embedded * bundle.input_embedding_scale


def block_ids(batch: DraftBatch, config: DraftConfig) -> torch.Tensor:
    """What the slots are fed, int64 [R, N, B]: the tokens of the visible prefix (of the anchor alone, if the batch names none), then
    mask tokens. Nothing behind the document's end is visible."""
    tokens = block_tokens(batch, config.block_size)
    slots = torch.arange(config.block_size, device=tokens.device)
    visible = 1 if batch.prefix_lengths is None else batch.prefix_lengths.unsqueeze(-1)
    inside = (slots == 0) | (batch.anchors.unsqueeze(-1) + slots < batch.document_end.unsqueeze(-1))
    # Padding blocks may point at a position without a token.
    return torch.where((slots < visible) & inside, tokens.clamp(min=0), config.mask_token_id)


def block_tokens(batch: DraftBatch, count: int) -> torch.Tensor:
    """The tokens of the row from each anchor on, int64 [R, N, count]; the row's last one again where it ends before."""
    at = batch.anchors.unsqueeze(-1) + torch.arange(count, device=batch.anchors.device)
    flat = at.clamp(max=batch.input_ids.shape[1] - 1).flatten(1)
    return batch.input_ids.gather(1, flat).view(at.shape)


def block_labels(batch: DraftBatch, block_size: int, shift: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels int64 and whether a slot is supervised, bool, both [R, N, B].

    Slot k is to predict the token at anchor + k + `shift`, if that lies behind the anchor and the visible prefix, in the anchor's
    document, and the loss mask is true there.
    """
    slots = torch.arange(block_size, device=batch.anchors.device)
    at = batch.anchors.unsqueeze(-1) + slots + shift
    first = 1 - shift if batch.prefix_lengths is None else batch.prefix_lengths.unsqueeze(-1)
    inside = (slots >= first) & (at < batch.document_end.unsqueeze(-1)) & batch.block_valid.unsqueeze(-1)
    flat = at.clamp(max=batch.input_ids.shape[1] - 1).flatten(1)
    return batch.input_ids.gather(1, flat).view(at.shape), inside & batch.loss_mask.gather(1, flat).view(at.shape)


def slot_weights(section: ObjectiveSection, config: DraftConfig, batch: DraftBatch) -> torch.Tensor:
    """fp32, broadcast to [R, N, B]: exp(-(k - f)/gamma), f a block's first slot that predicts, or 1. Others are never used."""
    slots = torch.arange(config.block_size, dtype=torch.float32, device=batch.anchors.device)
    if not _decays(section, config.variant):
        return torch.ones_like(slots)
    first = 1 - config.label_shift if batch.prefix_lengths is None else batch.prefix_lengths.unsqueeze(-1)
    return torch.exp(-(slots - first).clamp(min=0) / section.gamma)


def _decays(section: ObjectiveSection, variant: str) -> bool:
    if section.name in ("variable_prefix", "distill"):
        default = "uniform" if section.name == "distill" and variant == "jetspec" else "decay"
        return (section.weights or default) == "decay"
    return section.name == "decay"


def dpace_weights(section: ObjectiveSection, losses: torch.Tensor, supervised: torch.Tensor) -> torch.Tensor:
    """D-PACE's weights fp32 [..., B], from the cross-entropies of supervised slots [..., B]; what the others hold is not looked at.

    q = (1 - alpha)·exp(-CE) + alpha, 1 where unsupervised; C = the product of q up to a slot; the weight is Σ of C over the supervised
    slots from there on, or one of its two factors alone.
    """
    smooth = torch.where(supervised, (1 - section.dpace_alpha) * torch.exp(-losses) + section.dpace_alpha, 1.0)
    confidence = smooth.cumprod(dim=-1)
    if section.dpace_weights == "cumulative_confidence":
        return confidence
    # Σ_{j≥k} C_j·m_j / C_k, from the last slot back: a C that is too small for float32 would make 0 / 0 of a quotient.
    rest = [supervised[..., -1].to(losses.dtype)]
    for slot in reversed(range(losses.shape[-1] - 1)):
        rest.append(supervised[..., slot] + smooth[..., slot + 1] * rest[-1])
    value = torch.stack(rest[::-1], dim=-1)
    return value if section.dpace_weights == "continuation_value" else confidence * value


def weigh_by(section: ObjectiveSection, fixed: torch.Tensor, block: torch.Tensor, slot: torch.Tensor) -> Weigh:
    """The weights of rows: `fixed` [M], or D-PACE's, for which every block must come whole."""
    if section.name != "dpace":
        return lambda losses, rows: fixed[rows]

    def weigh(losses: torch.Tensor, rows: slice) -> torch.Tensor:
        if not len(losses):
            return fixed[rows]
        at = (block[rows] - block[rows][0], slot[rows])
        grid = losses.new_zeros(int(at[0][-1]) + 1, int(slot.max()) + 1)
        supervised = torch.zeros_like(grid, dtype=torch.bool)
        grid[at], supervised[at] = losses.detach(), True
        return dpace_weights(section, grid, supervised)[at]

    return weigh


def teacher_of(batch: DraftBatch, bundle: TargetBundle) -> Teacher:
    """The target itself, recomputed from its final hidden states on the rows asked for: its norm, once, and its head.

    `batch.final` is the state before the norm (capture takes it there). Raises `DraftError` when the batch has none, or when the
    target's norm is not known to be an RMS norm.
    """
    eps = bundle.config.get("rms_norm_eps")
    if eps is None:
        raise DraftError(
            "the target's config has no rms_norm_eps: its final norm is not an RMS norm, from which its logits could be recomputed"
        )

    def teacher(row: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        if batch.final is None:  # an empty batch has none, and is not asked
            raise DraftError(
                "distillation needs the target's final hidden states, and this batch has none: capture with capture.final=true"
            )
        dtype = compute_dtype(bundle.head)
        normed = rms_norm(batch.final[row, position].to(dtype), bundle.final_norm.to(dtype), float(eps))
        return head_logits(normed, bundle.head.to(dtype), bundle)

    return teacher


def loss_of(section: ObjectiveSection, labels: torch.Tensor, teacher: Teacher | None, row: torch.Tensor, before: torch.Tensor) -> SlotLoss:
    """What is minimised on M slots: `labels` int64 [M], and the place `row`, `before` int64 [M] of the token before each label."""
    if teacher is None:
        return cross_entropy(labels)
    known = teacher
    return divergence(section.divergence, section.temperature, lambda rows: known(row[rows], before[rows]))
