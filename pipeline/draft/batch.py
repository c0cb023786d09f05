"""Captured samples as the batch that a draft sees: one sample a row, or several packed into one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from pipeline.records import CapturedSample, DraftBatch, Quantised


@dataclass(frozen=True, slots=True)
class BatchShape:
    """What a batch's size depends on besides its samples: target layers in the draft's order, B, H and the states' dtype."""

    layer_ids: tuple[int, ...]
    block_size: int
    hidden_size: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class _Document:
    """A sample with its place: tokens [start, end) of `row`, blocks from first_block on, one for each of its `anchors`."""

    sample: CapturedSample
    anchors: NDArray[np.int64]
    row: int
    start: int
    first_block: int

    @property
    def end(self) -> int:
        return self.start + self.sample.tokens.num_tokens

    @property
    def end_block(self) -> int:
        return self.first_block + len(self.anchors)

    @property
    def tokens(self) -> tuple[int, slice]:
        return self.row, slice(self.start, self.end)

    @property
    def blocks(self) -> tuple[int, slice]:
        return self.row, slice(self.first_block, self.end_block)


def collate(
    samples: Sequence[CapturedSample],
    anchors: Sequence[NDArray[np.int64]],
    shape: BatchShape,
    rows: Sequence[Sequence[int]] | None = None,
    prefix_lengths: Sequence[NDArray[np.int64]] | None = None,
) -> DraftBatch:
    """`rows` says which samples, by their places in `samples`, lie one after another in each row; by default, one sample a row.

    Rows are padded on the right. There is one block an anchor; padding blocks repeat the row's last anchor and are invalid. `anchors` count
    inside their sample; `prefix_lengths`, one for each of them, are how many slots of its block are visible. Without samples it is the
    empty batch: one row whose only block is invalid, for a rank that must take part all the same.
    """
    rows = [(place,) for place in range(len(samples))] if rows is None else rows
    documents = _documents(samples, anchors, rows)
    num_rows = 1 + max((d.row for d in documents), default=0)
    tokens = max([shape.block_size, *(d.end for d in documents)])
    # A last document without an anchor still tells where its row ends: by a padding block.
    blocks = max([1, *(d.end_block + (len(d.anchors) == 0) for d in documents)])
    device = next((state.device for sample in samples for state in sample.hidden.values()), torch.device("cpu"))
    quantised = _quantised(documents, (num_rows, tokens), shape) if samples and samples[0].quantised is not None else None
    input_ids = torch.zeros(num_rows, tokens, dtype=torch.int64)
    loss_mask = torch.zeros(num_rows, tokens, dtype=torch.bool)
    starts = torch.zeros(num_rows, tokens, dtype=torch.int64)
    width = 0 if quantised else len(shape.layer_ids) * shape.hidden_size
    features = torch.zeros(num_rows, tokens, width, dtype=shape.dtype, device=device)
    keeps_final = bool(samples) and all(s.final is not None for s in samples)
    final = torch.zeros(num_rows, tokens, shape.hidden_size, dtype=shape.dtype, device=device) if keeps_final else None
    for document in documents:
        sample, at = document.sample, document.tokens
        # -1 stands where a position is fed as an embedding: never an anchor or a label, but it must not index a table either.
        input_ids[at] = torch.from_numpy(sample.tokens.input_ids.astype(np.int64)).clamp_(min=0)
        loss_mask[at] = torch.from_numpy(sample.tokens.loss_mask)
        starts[document.row, document.start :] = document.start
        if quantised is None:
            torch.cat([sample.hidden[layer] for layer in shape.layer_ids], dim=-1, out=features[at])
        if final is not None and sample.final is not None:
            final[at] = sample.final
    placed, document_start, document_end, valid = _blocks(documents, (num_rows, blocks), tokens)
    visible = None if prefix_lengths is None else torch.ones_like(placed)
    if visible is not None and prefix_lengths is not None:
        for document, place in zip(documents, (place for row in rows for place in row), strict=True):
            visible[document.blocks] = torch.from_numpy(prefix_lengths[place])
    return DraftBatch(
        sample_ids=tuple(s.tokens.sample_id for s in samples),
        input_ids=input_ids,
        loss_mask=loss_mask,
        features=features,
        position_ids=torch.arange(tokens) - starts,
        anchors=placed,
        document_start=document_start,
        document_end=document_end,
        block_valid=valid,
        final=final,
        quantised=quantised,
        prefix_lengths=visible,
    )


def _documents(samples: Sequence[CapturedSample], anchors: Sequence[NDArray[np.int64]], rows: Sequence[Sequence[int]]) -> list[_Document]:
    """Row by row, from left to right."""
    assert sorted(place for row in rows for place in row) == list(range(len(samples)))
    documents = []
    for number, row in enumerate(rows):
        start = first_block = 0
        for place in row:
            document = _Document(samples[place], anchors[place], number, start, first_block)
            documents.append(document)
            start, first_block = document.end, document.end_block
    return documents


def _blocks(documents: Sequence[_Document], size: tuple[int, int], tokens: int) -> tuple[torch.Tensor, ...]:
    """anchors, document_start, document_end int64 and block_valid bool, all [R, N]."""
    placed, starts = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
    ends, valid = torch.full(size, tokens, dtype=torch.int64), torch.zeros(size, dtype=torch.bool)
    for document in documents:
        at = document.blocks
        placed[at] = torch.from_numpy(document.anchors) + document.start
        starts[at] = document.start
        valid[at] = True
        # Of this document's own blocks, and of what follows: the next document, or padding.
        ends[document.row, document.first_block :] = document.end
        if len(document.anchors):
            placed[document.row, document.end_block :] = document.start + int(document.anchors[-1])
    return placed, starts, ends, valid


def _quantised(documents: Sequence[_Document], size: tuple[int, int], shape: BatchShape) -> Quantised:
    """[R, S, L, H] of samples of a lossy cache, padded with codes 0: about half the bytes of states to move to the device."""
    parts = [[(d.sample.quantised or {})[layer] for layer in shape.layer_ids] for d in documents]
    first = parts[0][0]

    def padded(of: Callable[[Quantised], torch.Tensor]) -> torch.Tensor:
        whole = of(first).new_zeros(*size, len(shape.layer_ids), of(first).shape[-1])
        for document, layers in zip(documents, parts, strict=True):
            torch.stack([of(layer) for layer in layers], dim=1, out=whole[document.tokens])
        return whole

    chunk, seen = torch.zeros(size, dtype=torch.int64), 0
    for document, layers in zip(documents, parts, strict=True):
        chunk[document.tokens] = layers[0].chunk + seen
        seen += len(layers[0].exponents)
    exponents = torch.cat([torch.stack([layer.exponents for layer in layers], dim=1) for layers in parts])
    return Quantised(padded(lambda q: q.codes), padded(lambda q: q.scales), exponents, chunk, first.group, first.dtype)
