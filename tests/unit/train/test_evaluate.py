import numpy as np
import pytest
import torch

from pipeline.draft.anchors import usable_anchors
from pipeline.draft.batch import BatchShape, collate
from pipeline.draft.loss import objective
from pipeline.records import CapturedSample
from pipeline.runtime.ranks import start_ranks
from pipeline.train.evaluate import score
from pipeline.train.learner import Learner
from pipeline.train.step import Sums, sums_vector
from tests.support.samples import HIDDEN, LAYERS, learner, sample


def _sample(length: int) -> CapturedSample:
    """Two answers, the second up to the end, and one of a single token between them."""
    mask = np.zeros(length, dtype=np.bool_)
    mask[20 : length // 2] = mask[length // 2 + 4 : length // 2 + 5] = mask[length // 2 + 7 :] = True
    return sample(0, length, mask, torch.Generator().manual_seed(1))


def _learning() -> Learner:
    """A draft that has a fair chance to be right: its head knows few words."""
    learning = learner(start_ranks(1, None, 1))
    learning.bundle.head[3:] = 0.0
    return learning


@torch.no_grad()
def test_score_is_the_sum_over_anchors_taken_one_hundred_at_a_time() -> None:
    learning, one = _learning(), _sample(900)  # more anchors than one forward takes
    usable = usable_anchors(one.tokens.spans, 900, 4, "partial")
    assert len(usable) > 512
    expected = torch.zeros(len(Sums.zero(learning.layout).values), dtype=torch.float64)
    for start in range(0, len(usable), 100):
        batch = collate([one], [usable[start : start + 100]], BatchShape(LAYERS, 4, HIDDEN, torch.float32))
        expected += sums_vector(objective(learning.draft, learning.bundle, batch, learning.objective), batch)
    expected[2:4] = torch.tensor((1.0, 900.0))
    found, _ = score(learning.draft, learning.bundle, learning.objective, one)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("fit", ["full", "partial"])
def test_the_walk_is_that_of_one_block_after_another(fit: str) -> None:
    learning, one = _learning(), _sample(160)
    ids = torch.from_numpy(one.tokens.input_ids.astype(np.int64))
    section = learning.objective.model_copy(update={"anchor_fit": fit})
    expected: list[int] = []
    for start, length in one.tokens.spans.tolist():
        at, end = start, start + length
        while at < end - 1:
            batch = collate([one], [np.array([at])], BatchShape(LAYERS, 4, HIDDEN, torch.float32))
            embedded = learning.bundle.embedding[torch.tensor([int(ids[at]), *[95] * 3])]
            hidden = learning.draft(batch, embedded[None, None])
            guess = (hidden[0, 0, 1:] @ learning.bundle.head.T).argmax(-1).tolist()
            taken = 0
            while taken < 3 and at + taken + 1 < end and guess[taken] == ids[at + taken + 1]:
                taken += 1
            expected.append(min(taken + 1, end - 1 - at))
            at += expected[-1]
    _, found = score(learning.draft, learning.bundle, section, one)
    assert found == expected
    assert sum(found) == 59 + 0 + 72
