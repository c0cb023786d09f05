"""What crosses a border between two packages: plain, frozen, and able to check itself.

Shape suffixes used in tensor code everywhere: R rows of a batch, S tokens of a row, H hidden size, L target layers,
N blocks (anchors) of a row, B slots of a block, V rows of the target's embedding.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.errors import CorpusError, DraftError, HiddenStateError, TargetError


@dataclass(frozen=True, slots=True)
class TokenSample:
    """One chat as the target reads it.

    `input_ids` int32 [S] (-1 where a position is fed as an embedding); `spans` int32 [n, 2], rows (start, length) of
    supervised tokens, ascending, disjoint and not touching; `row` counts rows of `source` from 0; `split` is "train" or the
    name of a validation set.
    """

    sample_id: str
    source: str
    row: int
    split: str
    input_ids: NDArray[np.int32]
    spans: NDArray[np.int32]

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)

    @property
    def num_supervised(self) -> int:
        return int(self.spans[:, 1].sum())

    @property
    def loss_mask(self) -> NDArray[np.bool_]:
        """bool [S], true where the token is the assistant's text or its end token."""
        mask = np.zeros(len(self.input_ids), dtype=np.bool_)
        for start, length in self.spans:
            mask[start : start + length] = True
        return mask

    def check(self) -> Self:
        """Raise `CorpusError` unless ids and spans have the shapes, types and bounds above."""
        where = f"sample {self.sample_id} ({self.source}, row {self.row})"
        if self.input_ids.dtype != np.int32 or self.input_ids.ndim != 1 or len(self.input_ids) == 0:
            raise CorpusError(f"{where}: input_ids is {self.input_ids.dtype} {self.input_ids.shape}, expected int32 [S >= 1]")
        if self.spans.dtype != np.int32 or self.spans.ndim != 2 or self.spans.shape[1] != 2:
            raise CorpusError(f"{where}: spans is {self.spans.dtype} {self.spans.shape}, expected int32 [n, 2]")
        starts, ends = self.spans[:, 0], self.spans.sum(axis=1)
        if (self.spans[:, 1] < 1).any() or (starts < 0).any() or (ends > self.num_tokens).any() or (starts[1:] <= ends[:-1]).any():
            raise CorpusError(
                f"{where}: supervised spans {self.spans.tolist()} must be ascending, apart from one another "
                f"and inside its {self.num_tokens} tokens"
            )
        return self

    def prefix(self, max_tokens: int) -> "TokenSample":
        """The first `max_tokens` tokens; spans are cut with them."""
        if self.num_tokens <= max_tokens:
            return self
        spans = self.spans[self.spans[:, 0] < max_tokens].copy()
        if len(spans):
            spans[-1, 1] = min(spans[-1, 1], max_tokens - spans[-1, 0])
        return replace(self, input_ids=self.input_ids[:max_tokens], spans=spans)


@dataclass(frozen=True, slots=True)
class Quantised:
    """States [S, H] of one layer, or [R, S, L, H] of a batch, as a lossy cache holds them.

    `codes` int8 [..., H]; `scales` bfloat16 [..., G], one for each `group` channels, the last of which may be fewer; `exponents` int8
    [C, H] (or [C, L, H]), one row a chunk of the cache; `chunk` int64 [S] (or [R, S]), the row of `exponents` that a token goes with.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    exponents: torch.Tensor
    chunk: torch.Tensor
    group: int
    dtype: torch.dtype

    def dequantise(self) -> torch.Tensor:
        """code · scale · 2^exponent in `dtype`, on the device that the parts lie on.

        The product is exact in float32 (8 by 8 bits and a power of two) and is rounded once: every device gives the same bits.
        """
        powers = (self.exponents.to(torch.int32) + 127 << 23).view(torch.float32)
        scales = self.scales.float().repeat_interleave(self.group, dim=-1)[..., : self.codes.shape[-1]]
        states = self.codes.float().mul_(scales).mul_(powers[self.chunk])
        largest = torch.finfo(self.dtype).max  # a scale is rounded up, which must not make the largest values infinite
        return states.clamp_(-largest, largest).to(self.dtype)

    def to(self, device: torch.device) -> Self:
        parts = {name: getattr(self, name).to(device, non_blocking=True) for name in ("codes", "scales", "exponents", "chunk")}
        return replace(self, **parts)


@dataclass(frozen=True, slots=True)
class CapturedSample:
    """A sample with the target's hidden states: `hidden[i]` [S, H] is the output of decoder layer i (0-based), `final`
    [S, H] the state that goes into the target's final norm, where it was asked for. `quantised` stands in the place of `hidden`, which is
    then empty, where states of a lossy cache are to be dequantised on another device."""

    tokens: TokenSample
    hidden: Mapping[int, torch.Tensor]
    final: torch.Tensor | None = None
    quantised: Mapping[int, Quantised] | None = None

    def features(self, layer_ids: tuple[int, ...]) -> torch.Tensor:
        """The states of `layer_ids` side by side, in that order: [S, L·H]."""
        return torch.cat([self.hidden[layer] for layer in layer_ids], dim=-1)

    def check(self) -> Self:
        """Raise `HiddenStateError` for states that are not finite, all zero, or equal at every position (S > 1)."""
        named = [(f"layer {layer}", state) for layer, state in self.hidden.items()]
        if self.final is not None:
            named.append(("final", self.final))
        for name, state in named:
            where = f"sample {self.tokens.sample_id} ({self.tokens.source}, row {self.tokens.row}), {name}"
            if state.ndim != 2 or state.shape[0] != self.tokens.num_tokens:
                raise HiddenStateError(f"{where}: states {tuple(state.shape)}, expected [{self.tokens.num_tokens}, H]")
            if not bool(torch.isfinite(state).all()):
                raise HiddenStateError(f"{where}: states are not finite. Capture in bfloat16 or float32, or leave the sample out.")
            if not bool(state.any()):
                raise HiddenStateError(f"{where}: states are all zero. The target's weights were not loaded, or a hook did not run.")
            # Causal models give equal states only where all tokens so far are equal; the ids tell the two apart.
            varied = bool((self.tokens.input_ids != self.tokens.input_ids[0]).any())
            if varied and bool((state == state[0]).all()):
                raise HiddenStateError(f"{where}: states are the same at all {state.shape[0]} positions.")
        return self


@dataclass(frozen=True, slots=True)
class TargetBundle:
    """All that training needs of the target besides hidden states, frozen.

    `embedding` and `head` [V, H] (the same tensor when tied), `final_norm` [H], `config` the target's `config.json`
    (text part). Logits are `softcap(output_multiplier · (h @ head.T))`; block inputs are `input_embedding_scale · embedding[ids]`.
    """

    embedding: torch.Tensor
    head: torch.Tensor
    final_norm: torch.Tensor
    config: Mapping[str, Any]
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None

    def check(self) -> Self:
        if self.embedding.ndim != 2 or self.embedding.shape != self.head.shape:
            raise TargetError(f"embedding {tuple(self.embedding.shape)} and head {tuple(self.head.shape)} must both be [V, H]")
        if self.final_norm.shape != self.embedding.shape[1:]:
            raise TargetError(f"final norm {tuple(self.final_norm.shape)} does not fit the hidden size {self.embedding.shape[1]}")
        return self

    def to(self, device: torch.device, dtype: torch.dtype) -> "TargetBundle":
        """The same bundle on `device` in `dtype`; a tied head stays the embedding's own tensor."""
        embedding = self.embedding.to(device, dtype)
        head = embedding if self.head is self.embedding else self.head.to(device, dtype)
        return replace(self, embedding=embedding, head=head, final_norm=self.final_norm.to(device, dtype))


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """What one forward and backward of the draft sees: R rows, each one sample or several packed documents, `sample_ids` of all.

    `input_ids` int64 [R, S] (right-padded with 0); `loss_mask` bool [R, S]; `features` [R, S, L·H]; `position_ids` int64
    [R, S], inside the token's document; by block, int64 or bool [R, N]: `anchors` (row index of slot 0; any order is right,
    ascending is fastest), `document_start` and `document_end` (row indices of the anchor's document, end exclusive) and
    `block_valid` (false for padding).
    A block sees context rows in [document_start, anchor) and its own slots; slot k stands at row anchor + k and has a
    label when anchor + k < document_end and the loss mask is true there. `final` [R, S, H] only where an objective needs it, and
    `prefix_lengths` int64 [R, N], how many slots of a block show their token: 1, the anchor's own, where there is none.
    `quantised` [R, S, L, H], of a lossy cache: `features` are [R, S, 0] until `to` has moved it to the device and made them of it.
    """

    sample_ids: tuple[str, ...]
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    features: torch.Tensor
    position_ids: torch.Tensor
    anchors: torch.Tensor
    document_start: torch.Tensor
    document_end: torch.Tensor
    block_valid: torch.Tensor
    final: torch.Tensor | None = None
    quantised: Quantised | None = None
    prefix_lengths: torch.Tensor | None = None

    def check(self) -> Self:
        rows, tokens = self.input_ids.shape
        for name in ("loss_mask", "position_ids"):
            if getattr(self, name).shape != (rows, tokens):
                raise DraftError(f"{name} {tuple(getattr(self, name).shape)}, expected {(rows, tokens)}")
        if self.features.shape[:2] != (rows, tokens):
            raise DraftError(f"features {tuple(self.features.shape)}, expected [{rows}, {tokens}, L*H]")
        for name in ("document_start", "document_end", "block_valid"):
            if getattr(self, name).shape != self.anchors.shape:
                raise DraftError(f"{name} {tuple(getattr(self, name).shape)}, expected {tuple(self.anchors.shape)}")
        inside = (self.document_start <= self.anchors) & (self.anchors < self.document_end) & (self.document_end <= tokens)
        if not bool((inside | ~self.block_valid).all()):
            raise DraftError("an anchor lies outside its document")
        return self

    def to(self, device: torch.device) -> "DraftBatch":
        moved = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in self.__slots__
            if isinstance(getattr(self, name), torch.Tensor)
        }
        if self.quantised is not None:
            moved |= {"features": self.quantised.to(device).dequantise().flatten(2), "quantised": None}
        return replace(self, **moved)
