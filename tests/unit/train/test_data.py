from typing import Any

import pytest

from pipeline.train.data import own_answers

OWN, MIXED, EARLIER = {"samples": 3, "generated": 3}, {"samples": 3, "generated": 2}, {"samples": 3}


@pytest.mark.parametrize(
    ("account", "splits", "expected"),
    [
        ({"by_split": {"train": MIXED, "val": OWN}}, ["train", "val"], True),
        ({"by_split": {"train": OWN, "val": OWN, "other": MIXED}}, ["other", "train", "val"], False),
        ({"by_split": {"train": OWN, "val": EARLIER}}, ["train", "val"], False),
        ({"by_split": {"train": OWN}}, ["train"], None),
        ({}, ["train", "val"], False),  # a cache without an account, whose validation needs a metric all the same
        ({}, ["train"], None),
    ],
)
def test_whether_the_answers_validated_on_are_a_models_own(account: dict[str, Any], splits: list[str], expected: bool | None) -> None:
    assert own_answers(account, splits) is expected
