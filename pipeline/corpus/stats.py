"""How long the samples of a prepared corpus are, how much of them is supervised, and where blocks can start."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.corpus.prepared import PreparedCorpus
from pipeline.records import TokenSample
from pipeline.runtime.logs import Progress

HEADER = ("split", "samples", "tokens", "median", "p95", "longest", "supervised", "anchors", "none", "partial", "none")
"""Columns of `Statistics.table`: lengths in tokens; anchors a sample and the share of samples without any, for whole blocks, then for
partial ones."""


@dataclass(frozen=True)
class Statistics:
    """By sample: `split` str [n]; `num_tokens`, `num_supervised` int64 [n]; `anchors` int64 [n, 2], positions that can start a block
    when it must fit before the sample's end, and when it need not."""

    split: NDArray[np.str_]
    num_tokens: NDArray[np.int64]
    num_supervised: NDArray[np.int64]
    anchors: NDArray[np.int64]

    def table(self) -> list[list[object]]:
        """Rows under `HEADER`: one for each split, and for all where there are several."""
        splits = [str(name) for name in dict.fromkeys(self.split.tolist())]
        rows = [self._row(name, self.split == name) for name in splits]
        return rows + ([self._row("all", np.ones(len(self.split), dtype=np.bool_))] if len(splits) > 1 else [])

    def panels(self) -> list[tuple[str, dict[str, NDArray[np.int64]]]]:
        """What to draw: the axis, and values by split."""
        splits = [str(name) for name in dict.fromkeys(self.split.tolist())]
        return [
            ("tokens of a sample", {name: self.num_tokens[self.split == name] for name in splits}),
            ("supervised tokens of a sample", {name: self.num_supervised[self.split == name] for name in splits}),
            ("usable anchors of a sample", {"full": self.anchors[:, 0], "partial": self.anchors[:, 1]}),
        ]

    def _row(self, name: str, here: NDArray[np.bool_]) -> list[object]:
        tokens, anchors = self.num_tokens[here], self.anchors[here]
        share = self.num_supervised[here].sum() / tokens.sum()
        median, p95 = np.percentile(tokens, [50, 95], method="higher").tolist()
        row: list[object] = [name, len(tokens), int(tokens.sum()), median, p95, int(tokens.max()), f"{share:.1%}"]
        for fit in (0, 1):
            row += [round(float(anchors[:, fit].mean()), 1), f"{(anchors[:, fit] == 0).mean():.1%}"]
        return row


def statistics(corpus: PreparedCorpus, anchors: Callable[[TokenSample], Sequence[int]]) -> Statistics:
    """One pass over the samples; `anchors` counts those of a sample, for whole and for partial blocks."""
    n = len(corpus)
    split: list[str] = []
    supervised, usable = np.empty(n, dtype=np.int64), np.empty((n, 2), dtype=np.int64)
    with Progress(n, "samples", "counting", enabled=True) as progress:
        for i in range(n):
            sample = corpus.sample(i)
            split.append(sample.split)
            supervised[i], usable[i] = sample.num_supervised, anchors(sample)
            progress.advance(1)
    return Statistics(np.array(split), corpus.num_tokens, supervised, usable)
