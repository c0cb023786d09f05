"""The training objective (DFLASH §3), as sums: numerators with gradient, denominators, and counts for metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from pipeline.config.draft import ObjectiveSection
from pipeline.draft.config import DraftConfig
from pipeline.draft.groups import Place
from pipeline.draft.head import compute_dtype
from pipeline.draft.metrics import BlockSums, Layout, accepted_prefix
from pipeline.draft.model import Draft
from pipeline.draft.slots import (
    Slots,
    Teacher,
    block_ids,
    block_labels,
    block_tokens,
    embed_blocks,
    loss_of,
    slot_weights,
    teacher_of,
    weigh_by,
)
from pipeline.draft.variants import VARIANTS, Variant
from pipeline.errors import DraftError
from pipeline.records import DraftBatch, TargetBundle

__all__ = ["ObjectiveSums", "block_ids", "block_labels", "embed_blocks", "layout_of", "objective"]


@dataclass(frozen=True, slots=True)
class ObjectiveSums:
    """Of one micro-batch. The loss is Σ_k factors[k] · Σ numerators[k] / Σ denominators[k], summed over micro-batches and ranks before
    anything is divided.

    `numerators` fp32 [K], with gradient, and `denominators` fp32 [K]: Σ w·m·CE and Σ w·m, or a variant's; `means` fp32 [E, 2], sums
    and weights of the variant's further figures, as `layout` names them; `correct` and `supervised` bool [R, N, B], for
    acceptance by block and the counts of `metrics`.
    """

    numerators: torch.Tensor
    denominators: torch.Tensor
    means: torch.Tensor
    correct: torch.Tensor
    supervised: torch.Tensor
    layout: Layout

    @property
    def numerator(self) -> torch.Tensor:
        """[] of the first term, which for most variants is the only one."""
        return self.numerators[0]

    @property
    def denominator(self) -> torch.Tensor:
        return self.denominators[0]

    @property
    def loss(self) -> torch.Tensor:
        """[] of this micro-batch by itself, with gradient; a term without a denominator is 0."""
        factors = self.numerators.new_tensor(self.layout.factors)
        return (factors * self.numerators / torch.where(self.denominators > 0, self.denominators, 1.0)).sum()

    @property
    def metrics(self) -> BlockSums:
        return BlockSums.of(self.correct, self.supervised)

    @property
    def accepted(self) -> torch.Tensor:
        """Matching prefix of every block, int64 [R, N], without the bonus token."""
        return accepted_prefix(self.correct, self.supervised)


def layout_of(config: DraftConfig, section: ObjectiveSection) -> Layout:
    """Which sums there are for a draft and its objective."""
    variant = VARIANTS[config.variant]
    factors = (1.0, section.selector_weight)[: len(variant.terms)]
    means = (*variant.means, *variant.accepted)
    return Layout(config.block_size, 1 - config.label_shift, tuple(variant.terms), factors, means)


def base_share(section: ObjectiveSection, done: float) -> float:
    """Domino's λ when the part `done` (0..1) of training is done: falls in a line from `lambda_start` to 0."""
    return section.lambda_start * max(0.0, 1.0 - done / section.lambda_ratio)


def objective(
    draft: nn.Module,
    bundle: TargetBundle,
    batch: DraftBatch,
    section: ObjectiveSection,
    done: float = 1.0,
    teacher: Teacher | None = None,
) -> ObjectiveSums:
    """Run `draft` (a `Draft`, or a wrapper such as DDP with it as `.module`) on `batch` and score it.

    `done` is the part of training behind, for schedules; `teacher` gives the target's logits where they are needed, by default from
    the batch's final hidden states. A batch without a supervised slot is legal: all sums are 0, and every parameter still gets a
    gradient, of zeros. Under `torch.no_grad` only the values are computed. Raises `DraftError` for what cannot be scored.
    """
    inner = getattr(draft, "module", draft)
    if not isinstance(inner, Draft):
        raise DraftError(f"the objective runs a Draft, not {type(inner).__name__}")
    if batch.anchors.shape[1] == 0:
        raise DraftError("a batch has no block; give it at least one, of padding if need be")
    config, variant = inner.config, inner.variant
    bundle = replace(bundle, head=bundle.head.to(compute_dtype(inner.fc.weight)))  # once, not for every group
    teacher = (teacher or teacher_of(batch, bundle)) if section.needs_final else None
    _, supervised = block_labels(batch, config.block_size, config.label_shift)
    tokens = block_tokens(batch, config.block_size + config.label_shift)
    fixed = slot_weights(section, config, batch).expand(supervised.shape)
    share = base_share(section, done)
    kept: dict[str, torch.Tensor] = {"supervised": supervised}

    def score(hidden: torch.Tensor, place: Place) -> torch.Tensor:
        scored = supervised[place]
        row, block, slot = scored.nonzero(as_tuple=True)
        at = (row * scored.shape[1] + block, slot)
        mine = tokens[place].flatten(0, 1)
        before = batch.anchors[place][row, block] + slot + config.label_shift - 1
        loss = loss_of(section, mine[at[0], slot + config.label_shift], teacher, row + place[0].start, before)
        slots = Slots(hidden[scored], *at, mine, loss, weigh_by(section, fixed[place][scored], *at))
        terms, values = variant.score(inner, bundle, slots, share)
        for name, value in values.items():
            whole = kept.setdefault(name, torch.zeros(supervised.shape, dtype=value.dtype, device=value.device))
            whole[place][scored] = value.detach()
        return terms

    numerators: torch.Tensor = draft(batch, embed_blocks(block_ids(batch, config), bundle), score)
    return ObjectiveSums(
        numerators=numerators,
        denominators=torch.stack([kept[weight].sum() for weight in variant.terms.values()]),
        means=_means(kept, variant),
        correct=kept["correct"],
        supervised=supervised,
        layout=layout_of(config, section),
    )


def _means(kept: Mapping[str, torch.Tensor], variant: Variant) -> torch.Tensor:
    """fp32 [E, 2], in the order of `Layout.means`: weighted sums and their weights; then accepted tokens, bonus included, and blocks."""
    pairs = [((kept[value] * kept[weight]).sum(), kept[weight].sum()) for value, weight in variant.means.values()]
    for correct in variant.accepted.values():
        sums = BlockSums.of(kept[correct], kept["supervised"])
        pairs.append((sums.accept_len_sum, sums.blocks))
    if not pairs:
        return kept["weight"].new_zeros(0, 2)
    return torch.stack([torch.stack(pair).float() for pair in pairs])
