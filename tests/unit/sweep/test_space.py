import pytest

from pipeline.config.sweep import DimensionSection
from pipeline.sweep.space import grid, of_all_layers, overrides, settings
from pipeline.sweep.storage import without_password

SPACE = {
    "model.draft.target_layer_ids": DimensionSection(choice=([4], [1, 4], None)),
    "model.optim.lr": DimensionSection(choice=(1e-5, 0.1)),
}


def test_values_come_back_as_they_were_given() -> None:
    found = [settings(SPACE, params) for params in grid(SPACE)]
    assert len(found) == 6
    assert found[0] == {"model.draft.target_layer_ids": [4], "model.optim.lr": 1e-5}
    assert overrides(found[2]) == ["model.draft.target_layer_ids=[1, 4]", "model.optim.lr=1.0e-05"]
    assert overrides(found[5]) == ["model.draft.target_layer_ids=null", "model.optim.lr=0.1"]
    with pytest.raises(KeyError):
        settings(SPACE, {"model.optim.lr": 0.1})


def test_layers_of_all_choices() -> None:
    assert of_all_layers([[4], [1, 4]]) == (4, 1)
    assert of_all_layers([[4], None]) is None


def test_passwords_of_a_storage_are_told_to_nobody() -> None:
    command = "stages/sweep.py a.yaml sweep.storage=postgresql://me:se%40cret:x@host:5432/db name=b@c"
    assert without_password(command) == "stages/sweep.py a.yaml sweep.storage=postgresql://me:***@host:5432/db name=b@c"
    assert without_password("sqlite:///runs/a@b/study.db") == "sqlite:///runs/a@b/study.db"
