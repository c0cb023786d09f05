import pytest

from pipeline.config.schema import DraftSection, TargetSection
from pipeline.errors import TargetError
from pipeline.target.layers import check_layer_ids, default_layer_ids, resolve_layer_ids


@pytest.mark.parametrize(
    ("n", "d", "ids"),
    [
        (12, 1, (6,)),
        (12, 2, (1, 9)),
        (12, 8, (1, 2, 3, 4, 6, 7, 8, 9)),
        (28, 5, (1, 7, 13, 19, 25)),
        (30, 5, (1, 8, 14, 20, 27)),
        (36, 5, (1, 9, 17, 25, 33)),
        (36, 6, (1, 7, 14, 20, 27, 33)),
        (4, 1, (2,)),
    ],
)
def test_default_layers(n: int, d: int, ids: tuple[int, ...]) -> None:
    assert default_layer_ids(n, d) == ids
    assert check_layer_ids(ids, n) == ids


@pytest.mark.parametrize(("n", "d", "words"), [(3, 1, "at least 4"), (6, 5, "repeats"), (4, 2, "repeats")])
def test_no_default_layers(n: int, d: int, words: str) -> None:
    with pytest.raises(TargetError, match=words):
        default_layer_ids(n, d)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "is empty"),
        ([1, 3, 1], "names layer 1 twice"),
        ([1, -1], "before or after the final norm"),
        ([1, 7], "before or after the final norm"),
        ([1, 8], r"\[8\] do not exist"),
        ([-2, 1], r"\[-2\] do not exist"),
    ],
)
def test_refused_layers(ids: list[int], words: str) -> None:
    with pytest.raises(TargetError, match=words) as error:
        check_layer_ids(ids, 8)
    assert "from 0 to 6" in str(error.value)


def test_order_is_kept_and_sections_take_precedence() -> None:
    assert check_layer_ids([5, 1, 3], 8) == (5, 1, 3)
    draft = DraftSection(target_layer_ids=(2, 4), num_hidden_layers=1)
    assert resolve_layer_ids(TargetSection(layer_ids=(6, 1)), draft, 8) == (6, 1)
    assert resolve_layer_ids(TargetSection(), draft, 8) == (2, 4)
    assert resolve_layer_ids(TargetSection(), DraftSection(num_hidden_layers=3), 8) == default_layer_ids(8, 3)
