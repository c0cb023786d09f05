"""Acceptance and accuracy of blocks, as sums (DFLASH §4)."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray


def accepted_prefix(correct: torch.Tensor, supervised: torch.Tensor) -> torch.Tensor:
    """Length of the matching prefix of every block, int64 [...], from bool [..., B].

    Only supervised slots count; one without supervision (slot 0, a masked hole) neither breaks the prefix nor lengthens it.
    """
    unbroken = (correct | ~supervised).long().cumprod(dim=-1)
    return (unbroken * supervised).sum(dim=-1)


@dataclass(frozen=True, slots=True)
class Layout:
    """Which sums a draft and its objective have, by name. The loss is Σ factors[k] · Σ numerators / Σ denominators of terms[k]; `means`
    are further figures, each one sum over another. `first_slot` is the first that predicts."""

    block_size: int
    first_slot: int = 1
    terms: tuple[str, ...] = ("loss",)
    factors: tuple[float, ...] = (1.0,)
    means: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockSums:
    """Sums over scored blocks, detached, to be added over batches and ranks before anything is divided.

    `correct` and `supervised` int64 [B], by slot; `accept_len_sum` int64 [], over the `blocks` int64 [] with a supervised slot, the
    bonus token of each included.
    """

    correct: torch.Tensor
    supervised: torch.Tensor
    accept_len_sum: torch.Tensor
    blocks: torch.Tensor

    @classmethod
    def of(cls, correct: torch.Tensor, supervised: torch.Tensor) -> "BlockSums":
        """From bool [R, N, B]."""
        scored = supervised.any(dim=-1)
        accepted = accepted_prefix(correct, supervised)
        return cls(
            correct=(correct & supervised).sum(dim=(0, 1)),
            supervised=supervised.sum(dim=(0, 1)),
            accept_len_sum=(accepted + 1)[scored].sum(),
            blocks=scored.sum(),
        )

    def __add__(self, other: "BlockSums") -> "BlockSums":
        return BlockSums.from_vector(self.vector() + other.vector())

    def vector(self) -> torch.Tensor:
        """All sums in one int64 [2·B + 2], for a reduction over ranks."""
        return torch.cat((self.correct, self.supervised, self.accept_len_sum.view(1), self.blocks.view(1)))

    @classmethod
    def from_vector(cls, vector: torch.Tensor) -> "BlockSums":
        slots = (len(vector) - 2) // 2
        return cls(vector[:slots], vector[slots:-2], vector[-2], vector[-1])

    @property
    def accept_len(self) -> float:
        """Mean tokens that a block commits; nan without a scored block."""
        return _ratio(self.accept_len_sum, self.blocks)

    @property
    def accuracy(self) -> float:
        return _ratio(self.correct.sum(), self.supervised.sum())

    @property
    def accuracy_by_slot(self) -> list[float]:
        """[B]; slot 0, which predicts nothing, is nan."""
        return [_ratio(correct, supervised) for correct, supervised in zip(self.correct, self.supervised, strict=True)]


def _ratio(part: torch.Tensor, whole: torch.Tensor) -> float:
    return float(part) / float(whole) if int(whole) else float("nan")


def walk_lengths(accepted: NDArray[np.int64], num_answer_tokens: int) -> list[int]:
    """Committed tokens of each step that serving this answer would take (DFLASH §4, `walk_accept_len`).

    `accepted[i]`: matching prefix of the block anchored at the answer's token i, for i in 0..num_answer_tokens-2 at least. The
    answer's first token comes from the prefill and belongs to no step; the last step is cut at the answer's end, so that the
    lengths add up to `num_answer_tokens` - 1.
    """
    lengths, at, last = [], 0, num_answer_tokens - 1
    while at < last:
        lengths.append(min(int(accepted[at]) + 1, last - at))
        at += lengths[-1]
    return lengths
