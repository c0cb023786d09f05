"""The family, one row a member: what each changes, and what all else is, plain DFlash (DFLASH §6)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from pipeline.draft import dflash2, domino, plain
from pipeline.draft.config import DraftConfig
from pipeline.draft.layer import DraftLayer
from pipeline.draft.slots import Pick, Proposal, Scored, Slots
from pipeline.records import TargetBundle


@dataclass(frozen=True)
class Variant:
    """A member of the family. What it leaves out is as in plain DFlash.

    In training: `score` makes its losses of supervised slots; `terms` names them, with the slots' weight each is divided by; `means`
    are further figures, by name: a value of each slot and the weight it is averaged with ("supervised" is 1); `accepted` further
    acceptance lengths: which slots count as right.
    In decoding: `propose` makes tokens of a block's hidden states.
    """

    architecture: str = "DFlashDraftModel"
    projector_type: str | None = None
    causal: bool = False
    """Whether a slot sees only the slots before it, and itself."""
    layer: type[DraftLayer] = DraftLayer
    extend: Callable[[nn.Module, DraftConfig], None] = lambda draft, config: None
    """Adds to a draft what it has besides its layers."""
    faults: Callable[[DraftConfig], list[str]] = lambda config: []
    score: Callable[[nn.Module, TargetBundle, Slots, float], Scored] = plain.score
    propose: Callable[[nn.Module, torch.Tensor, torch.Tensor, TargetBundle, Pick], Proposal] = plain.propose
    terms: Mapping[str, str] = field(default_factory=lambda: {"loss": "weight"})
    means: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    accepted: Mapping[str, str] = field(default_factory=dict)


VARIANTS = {
    "dflash": Variant(),
    "dflash2": Variant(
        architecture="DFlash2DraftModel",
        layer=dflash2.ConvolvedLayer,
        extend=dflash2.extend,
        faults=dflash2.faults,
        score=dflash2.score,
        propose=dflash2.propose,
        terms={"base_loss": "weight", "selector_loss": "weight_of_hit"},
        means={"base_accuracy": ("base_correct", "supervised"), "candidate_recall": ("hit", "supervised")},
        accepted={"base_accept_len": "base_correct"},
    ),
    "domino": Variant(
        projector_type="domino",
        extend=domino.extend,
        faults=domino.faults,
        score=domino.score,
        propose=domino.propose,
        means={
            "final_loss": ("loss", "weight"),
            "base_loss": ("base_loss", "weight"),
            "lambda_base": ("base_share", "weight"),
            "base_accuracy": ("base_correct", "supervised"),
        },
        accepted={"base_accept_len": "base_correct"},
    ),
    "jetspec": Variant(causal=True),
}
