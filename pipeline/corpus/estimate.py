"""How large a corpus is in tokens, before it is tokenised: from rows all over it."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.config.schema import Config
from pipeline.corpus.job import plan
from pipeline.corpus.messages import Unusable
from pipeline.corpus.parts import piece_id, place_id
from pipeline.corpus.prepare import open_prepared
from pipeline.corpus.samples import Account
from pipeline.corpus.sources import read_part
from pipeline.errors import CorpusError
from pipeline.records import TokenSample

SAMPLE_ROWS = 4096
SAMPLE_PARTS = 16
PROBE_TOKENS = 1 << 16
"""Tokens of the samples that are kept for looking at, spread over the corpus."""


@dataclass(frozen=True)
class CorpusEstimate:
    """`num_tokens` int64 are lengths of samples in corpus order: of all when `exact`, else of those looked at, which stand for `scale`
    times as many (in samples and tokens alike, closely enough). `samples` are some of them, whole. `rows` counts the rows of all
    sources, `rows_read` those looked at."""

    num_tokens: NDArray[np.int64]
    samples: tuple[TokenSample, ...]
    scale: float
    exact: bool
    rows: int
    rows_read: int

    @property
    def total_samples(self) -> int:
        return round(len(self.num_tokens) * self.scale)

    @property
    def total_tokens(self) -> int:
        return round(int(self.num_tokens.sum()) * self.scale)


def estimate(config: Config) -> CorpusEstimate:
    """The prepared corpus of `config` where there is one; all rows of a small corpus; else `SAMPLE_ROWS` of up to `SAMPLE_PARTS` parts that
    are spread evenly, scaled up by the bytes of the parts. Writes nothing. Raises `CorpusError` when the rows looked at give no sample."""
    if (corpus := open_prepared(config)) is not None:
        step = max(1, math.ceil(int(corpus.num_tokens.sum()) / PROBE_TOKENS))
        samples = tuple(corpus.sample(i) for i in range(0, len(corpus), step))
        rows = int(corpus.counts["rows"])
        return CorpusEstimate(corpus.num_tokens, samples, 1.0, True, rows, rows)
    job = plan(config)
    rows = sum(part.num_rows for part in job.parts)
    if rows <= SAMPLE_ROWS:
        chosen, stride = list(job.parts), 1
    else:
        chosen = [job.parts[i] for i in np.unique(np.linspace(0, len(job.parts) - 1, SAMPLE_PARTS).astype(int))]
        stride = max(1, math.ceil(sum(part.num_rows for part in chosen) / SAMPLE_ROWS))
    samples_read: list[TokenSample] = []
    rows_read, share = 0, 0.0
    for part in chosen:
        account = Account()
        looked_at = list(read_part(part))[::stride]
        for row in looked_at:
            kept = job.reader.samples_of(row, part.source.split, account)
            for sample in [] if isinstance(kept, Unusable) else kept:
                ids, spans = sample.rendered.input_ids, sample.rendered.spans
                name = piece_id(sample.own_id or place_id(part.source, row.row), sample.piece)
                samples_read.append(TokenSample(name, part.source.name, row.row, sample.split, ids, spans))
        rows_read += len(looked_at)
        share += part.num_bytes * len(looked_at) / part.num_rows
    if not samples_read:
        raise CorpusError(f"none of {rows_read} rows looked at gives a sample; `stages/corpus.py prepare` lists why.")
    lengths = np.array([sample.num_tokens for sample in samples_read], dtype=np.int64)
    step = max(1, math.ceil(int(lengths.sum()) / PROBE_TOKENS))
    scale = sum(part.num_bytes for part in job.parts) / share
    return CorpusEstimate(lengths, tuple(samples_read[::step]), scale, rows_read == rows, rows, rows_read)
