"""The training objective (DFLASH §3), as sums: a numerator with gradient, a denominator, and counts for metrics."""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pipeline.config.schema import ObjectiveSection
from pipeline.draft.config import DraftConfig
from pipeline.draft.groups import Place
from pipeline.draft.matmul import times_transposed
from pipeline.draft.metrics import BlockSums, accepted_prefix
from pipeline.draft.model import Draft
from pipeline.errors import DraftError
from pipeline.records import DraftBatch, TargetBundle

# Logits held at a time, in elements: 32 MiB of fp32.
CHUNK_LOGITS = 1 << 23


@dataclass(frozen=True, slots=True)
class ObjectiveSums:
    """Of one micro-batch. The loss is Σ numerators / Σ denominators over micro-batches and ranks.

    `numerator` fp32 [] = Σ w·m·CE, with gradient; `denominator` fp32 [] = Σ w·m, without; `correct` and `supervised`
    bool [R, N, B], for acceptance by block and the counts of `metrics`.
    """

    numerator: torch.Tensor
    denominator: torch.Tensor
    correct: torch.Tensor
    supervised: torch.Tensor

    @property
    def metrics(self) -> BlockSums:
        return BlockSums.of(self.correct, self.supervised)

    @property
    def accepted(self) -> torch.Tensor:
        """Matching prefix of every block, int64 [R, N], without the bonus token."""
        return accepted_prefix(self.correct, self.supervised)


def objective(draft: nn.Module, bundle: TargetBundle, batch: DraftBatch, section: ObjectiveSection) -> ObjectiveSums:
    """Run `draft` (a `Draft`, or a wrapper such as DDP with it as `.module`) on `batch` and score it.

    A batch without a supervised slot is legal: both sums are 0, and every parameter still gets a gradient, of zeros. Under
    `torch.no_grad` only the values are computed.
    """
    inner = getattr(draft, "module", draft)
    if not isinstance(inner, Draft):
        raise DraftError(f"the objective runs a Draft, not {type(inner).__name__}")
    if batch.anchors.shape[1] == 0:
        raise DraftError("a batch has no block; give it at least one, of padding if need be")
    config = inner.config
    kind = batch.anchors.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else inner.fc.weight.dtype
    bundle = replace(bundle, head=bundle.head.to(dtype))  # once, not for every group
    labels, supervised = block_labels(batch, config.block_size)
    weights = slot_weights(section, config.block_size, labels.device).expand(labels.shape)
    correct = torch.zeros_like(supervised)

    def score(hidden: torch.Tensor, place: Place) -> torch.Tensor:
        scored, label = supervised[place], labels[place][supervised[place]]
        loss, predicted = cross_entropy(hidden[scored], label, weights[place][scored], bundle)
        correct[place][scored] = predicted == label
        return loss

    numerator: torch.Tensor = draft(batch, embed_blocks(block_ids(batch, config), bundle), score)
    return ObjectiveSums(numerator, weights[supervised].sum(), correct, supervised)


def block_ids(batch: DraftBatch, config: DraftConfig) -> torch.Tensor:
    """What the slots are fed, int64 [R, N, B]: the anchor's token, then mask tokens."""
    ids = batch.anchors.new_full((*batch.anchors.shape, config.block_size), config.mask_token_id)
    # Padding blocks may point at a position without a token.
    ids[..., 0] = batch.input_ids.gather(1, batch.anchors).clamp(min=0)
    return ids


def embed_blocks(ids: torch.Tensor, bundle: TargetBundle) -> torch.Tensor:
    """[..., H], in the dtype of the target's embedding."""
    embedded = F.embedding(ids, bundle.embedding)
    return embedded if bundle.input_embedding_scale == 1.0 else embedded * bundle.input_embedding_scale


def block_labels(batch: DraftBatch, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels int64 and whether a slot is supervised, bool, both [R, N, B]. Slot k ≥ 1 is to predict the token at anchor + k, if
    that lies in the anchor's document and the loss mask is true there."""
    slots = torch.arange(block_size, device=batch.anchors.device)
    at = batch.anchors.unsqueeze(-1) + slots
    inside = (slots >= 1) & (at < batch.document_end.unsqueeze(-1)) & batch.block_valid.unsqueeze(-1)
    flat = at.clamp(max=batch.input_ids.shape[1] - 1).flatten(1)
    labels = batch.input_ids.gather(1, flat).view(at.shape)
    return labels, inside & batch.loss_mask.gather(1, flat).view(at.shape)


def slot_weights(section: ObjectiveSection, block_size: int, device: torch.device) -> torch.Tensor:
    """fp32 [B]: exp(-(k - 1)/gamma) for slot k ≥ 1, or 1; what slot 0 gets is never used."""
    slots = torch.arange(block_size, dtype=torch.float32, device=device)
    return torch.exp(-(slots - 1) / section.gamma) if section.name == "decay" else torch.ones_like(slots)


def cross_entropy(
    hidden: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, bundle: TargetBundle
) -> tuple[torch.Tensor, torch.Tensor]:
    """Σ weights·CE of the target's frozen head on `hidden` [M, H], fp32 [], and the argmax of every row, int64 [M].

    Rows go through the head in chunks, and their gradient with respect to `hidden` is formed on the way, so that no more than
    a chunk of logits ever exists and none is computed twice.
    """
    loss, predicted = _HeadLoss.apply(hidden, labels, weights, bundle)  # type: ignore[no-untyped-call]
    return loss, predicted


def head_logits(hidden: torch.Tensor, head: torch.Tensor, bundle: TargetBundle) -> torch.Tensor:
    """The target's logits of `hidden` [M, H] (in the dtype of `head`), fp32 [M, V], scaled and capped as the target does."""
    logits = times_transposed(hidden, head).float()
    if bundle.output_multiplier != 1.0:
        logits *= bundle.output_multiplier
    if bundle.final_logit_softcapping is not None:
        logits = logits.div_(bundle.final_logit_softcapping).tanh_().mul_(bundle.final_logit_softcapping)
    return logits


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, bundle: TargetBundle
    ) -> tuple[torch.Tensor, torch.Tensor]:
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        head = bundle.head.to(dtype)
        wants_grad = ctx.needs_input_grad[0]
        grad = torch.empty_like(hidden) if wants_grad else None
        losses, predicted = torch.empty_like(weights), torch.empty_like(labels)
        size = max(1, CHUNK_LOGITS // head.shape[0])
        with torch.autocast(kind, enabled=False):
            for start in range(0, len(labels), size):
                rows = slice(start, start + size)
                logits = head_logits(hidden[rows].to(dtype), head, bundle)
                label = labels[rows].unsqueeze(1)
                at_label = logits.gather(1, label)
                top, best = logits.max(dim=1, keepdim=True)
                slope = _head_slope(logits, bundle) if wants_grad else None
                probabilities = torch.softmax(logits, dim=1, out=logits)
                # The likeliest row has p ≥ 1/V, so this logarithm is exact however unlikely the label is.
                losses[rows] = (top - probabilities.gather(1, best).log() - at_label).squeeze(1)
                predicted[rows] = best.squeeze(1)
                if grad is not None:
                    probabilities.scatter_add_(1, label, torch.full_like(at_label, -1.0))
                    probabilities *= weights[rows].unsqueeze(1)
                    if slope is not None:
                        probabilities *= slope
                    grad[rows] = times_transposed(probabilities.to(dtype), head.T).to(grad.dtype)
        if grad is not None:
            ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(predicted)
        return torch.dot(losses, weights), predicted

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return grad * upstream, None, None, None


def _head_slope(logits: torch.Tensor, bundle: TargetBundle) -> torch.Tensor | float | None:
    """d logits / d (hidden @ head.T), elementwise, from the logits themselves; None where it is 1."""
    cap, multiplier = bundle.final_logit_softcapping, bundle.output_multiplier
    if cap is not None:
        return (1 - (logits / cap).square()) * multiplier
    return None if multiplier == 1.0 else multiplier
