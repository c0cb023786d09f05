"""Validation: every usable anchor of the held-out samples, and the walk that serving would take through their answers.

Sums only, added up over batches and ranks before anything is divided; so the numbers are those of one rank, up to rounding.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from pipeline.config.schema import ObjectiveSection
from pipeline.draft.anchors import draw_prefixes, usable_anchors
from pipeline.draft.batch import BatchShape, collate
from pipeline.draft.loss import ObjectiveSums, layout_of, objective
from pipeline.draft.metrics import Layout, accepted_prefix, walk_lengths
from pipeline.draft.model import Draft
from pipeline.errors import TrainingError
from pipeline.records import CapturedSample, DraftBatch, TargetBundle
from pipeline.runtime.ranks import Ranks
from pipeline.train.data import TrainingData
from pipeline.train.feed import read_ahead
from pipeline.train.learner import Learner
from pipeline.train.step import Sums, reduce_sums, sums_vector

BLOCKS_AT_ONCE = 512
SERVED = ObjectiveSection()
"""An objective whose figures are what serving commits: blocks behind their anchor alone, against the text itself."""


def validate(
    learner: Learner, draft: Draft, data: TrainingData, sets: Mapping[str, Sequence[int]], num_workers: int, asked: Sequence[int] = ()
) -> dict[str, Any] | None:
    """Metrics of `draft` (`learner.evaluated()`) on every set in `sets` (sample numbers by name), as `val/NAME/loss` and so on, and of all
    together as `val_loss` and so on.

    loss, accept_len, accuracy and accuracy_by_slot are over usable anchors, walk_accept_len over the answers (DFLASH §4). Sets
    of which nothing can be scored give no metric. Every rank must call it; the data-parallel ranks share the samples. When `asked` is
    filled on any of them meanwhile, none goes on, and all return None; a divided target's ranks, which forward together, do go on.
    Raises `TrainingError` on all ranks when a loss is not finite.
    """
    found = validate_each([(learner, draft)], data, sets, num_workers, asked)
    if found is None:
        return None
    if isinstance(found[0], TrainingError):
        raise found[0]
    return found[0]


def validate_each(
    drafts: Sequence[tuple[Learner, Draft]],
    data: TrainingData,
    sets: Mapping[str, Sequence[int]],
    num_workers: int,
    asked: Sequence[int] = (),
) -> list[dict[str, Any] | TrainingError] | None:
    """`validate` of several drafts that learn on the same ranks, from one reading of the samples: of each its metrics, or its own fault."""
    ranks, sizes = drafts[0][0].ranks, [len(Sums.zero(learner.layout).values) for learner, _ in drafts]
    totals = [torch.zeros(len(sets), size + 2, dtype=torch.float64, device=ranks.device) for size in sizes]
    bad: list[list[str]] = [[] for _ in drafts]
    with torch.no_grad():
        for row, numbers in enumerate(sets.values()):
            mine = list(numbers[ranks.dp_rank :: ranks.dp_size])
            for sample in read_ahead(lambda number: data.source([number])[0], mine, num_workers if data.any_thread else 0):
                if given_up(asked, ranks):
                    break
                for (learner, draft), size, total, faulty in zip(drafts, sizes, totals, bad, strict=True):
                    with learner.accelerator.autocast():  # not around the source: a live target keeps its own dtype
                        sums, lengths = score(draft, learner.bundle, learner.objective, sample)
                    if not torch.isfinite(sums).all():
                        faulty.append(sample.tokens.sample_id)
                    total[row, :size] += sums
                    total[row, size:] += torch.tensor((sum(lengths), len(lengths)), device=ranks.device)
    found: list[dict[str, Any] | TrainingError] = []
    for (learner, _), total, faulty in zip(drafts, totals, bad, strict=True):
        stops = total.new_full((1, total.shape[1]), given_up(asked, ranks))
        *rows, (stopped, *_) = reduce_sums(torch.cat((total, stops)), ranks).tolist()
        if stopped:
            return None
        finite = all(math.isfinite(value) for row in rows for value in row)
        found.append(_by_set(sets, rows, learner.layout) if finite else _not_finite(faulty, ranks))
    return found


def _by_set(sets: Iterable[str], rows: Sequence[Sequence[float]], layout: Layout) -> dict[str, Any]:
    metrics: dict[str, Any] = {}
    for name, row in zip(sets, rows, strict=True):
        metrics |= {f"val/{name}/{key}": value for key, value in _metrics(row, layout).items()}
    pooled = [sum(column) for column in zip(*rows, strict=True)] if rows else [0.0] * (len(Sums.zero(layout).values) + 2)
    return metrics | {f"val_{key}": value for key, value in _metrics(pooled, layout).items()}


def given_up(asked: Sequence[int], ranks: Ranks) -> bool:
    """Whether this rank leaves a validation unfinished. Ranks that forward one target together would wait for it there, so they do not."""
    return bool(asked) and ranks.tp_size == 1


def _not_finite(bad: Sequence[str], ranks: Ranks) -> TrainingError:
    everyone: list[Sequence[str]] = [bad]
    if ranks.world_size > 1:
        everyone = [[] for _ in range(ranks.world_size)]
        dist.all_gather_object(everyone, bad)
    names = sorted({name for rank in everyone for name in rank})
    told = ", ".join(names[:20]) + (" …" if len(names) > 20 else "")
    return TrainingError(
        f"the validation loss is not finite for {len(names)} sample(s): {told}. Check the cache (its checksums and these samples' states); "
        "where it is most samples, the draft diverged: lower model.optim.lr."
    )


def score(draft: Draft, bundle: TargetBundle, section: ObjectiveSection, sample: CapturedSample) -> tuple[torch.Tensor, list[int]]:
    """`sums_vector` over all usable anchors of `sample`, and the lengths of the steps that a walk through its answers takes.

    The walk needs the accepted length at every token of an answer; near its end a block may be too long to be a usable
    anchor, so those few are scored besides, without being counted in the sums. It asks what serving would commit: where the
    objective's own figures tell something else (behind visible prefixes, or against the teacher), all of them are.
    """
    tokens, config, device = sample.tokens, draft.config, draft.fc.weight.device
    usable = usable_anchors(tokens.spans, tokens.num_tokens, config.block_size, section.anchor_fit, config.label_shift)
    answers = np.concatenate([np.zeros(0, np.int64), *(np.arange(start, start + length - 1) for start, length in tokens.spans)])
    as_served = section.name not in ("variable_prefix", "distill")
    rest = np.setdiff1d(answers, usable) if as_served else answers
    dtype = next(state.dtype for states in (sample.hidden, sample.quantised or {}) for state in states.values())
    shape = BatchShape(config.target_layer_ids, config.block_size, config.hidden_size, dtype)
    whole = collate([sample], [np.zeros(0, np.int64)], shape).to(device)
    total = torch.zeros(len(Sums.zero(layout_of(config, section)).values), dtype=torch.float64, device=device)
    accepted = np.zeros(tokens.num_tokens, dtype=np.int64)
    for chunk, batch in _blocks(whole, usable):
        drawn = None
        if section.name == "variable_prefix":
            visible = draw_prefixes(0, 0, tokens.sample_id, chunk, config.block_size, section.prefix_base)
            drawn = torch.from_numpy(visible)[None].to(device)
        sums = objective(draft, bundle, replace(batch, prefix_lengths=drawn), section)
        total += sums_vector(sums, batch)
        if as_served:
            accepted[chunk] = _accepted_in_answer(sums, chunk, tokens.spans, config.label_shift)
    for chunk, batch in _blocks(whole, rest):
        sums = objective(draft, bundle, batch, section if as_served else SERVED)
        accepted[chunk] = _accepted_in_answer(sums, chunk, tokens.spans, config.label_shift)
    total[2:4] = torch.tensor((1, tokens.num_tokens))  # however many batches it took, it is one sample
    return total, [step for start, length in tokens.spans for step in walk_lengths(accepted[start : start + length], int(length))]


def _blocks(whole: DraftBatch, anchors: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], DraftBatch]]:
    """The one-row batch `whole` with `anchors`, some at a time."""
    for start in range(0, len(anchors), BLOCKS_AT_ONCE):
        chunk = anchors[start : start + BLOCKS_AT_ONCE]
        placed = torch.from_numpy(chunk)[None].to(whole.anchors.device)
        yield (
            chunk,
            replace(
                whole,
                anchors=placed,
                document_start=torch.zeros_like(placed),
                document_end=torch.full_like(placed, int(whole.document_end[0, 0])),
                block_valid=torch.ones_like(placed, dtype=torch.bool),
            ),
        )


def _accepted_in_answer(sums: ObjectiveSums, anchors: NDArray[np.int64], spans: NDArray[np.int32], shift: int) -> NDArray[np.int64]:
    """Accepted length of each block, int64 [N], counting only slots in the answer that its anchor is in: an answer's steps end with it."""
    span = np.searchsorted(spans[:, 0], anchors, side="right") - 1
    room = torch.from_numpy(spans[span].sum(axis=1) - anchors).to(sums.supervised.device)
    inside = torch.arange(sums.supervised.shape[-1], device=room.device) + shift < room.unsqueeze(-1)
    return accepted_prefix(sums.correct[0], sums.supervised[0] & inside).cpu().numpy()


def _metrics(row: Sequence[float], layout: Layout) -> dict[str, Any]:
    *values, tokens, steps = row
    walk = {"walk_accept_len": tokens / steps} if steps else {}
    return Sums(tuple(values), layout).metrics() | walk
