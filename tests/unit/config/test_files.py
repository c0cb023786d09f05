"""Every file in configs/ loads with every stage that it is for."""

from pathlib import Path

import pytest

from pipeline.config.fields import all_fields
from pipeline.config.load import Stage, load_config

CONFIGS = Path(__file__).resolve().parents[3] / "configs"
STAGES: dict[str, tuple[Stage, ...]] = {"capture": ("corpus", "capture"), "train": ("train", "evaluate"), "sweep": ("sweep", "train")}
FILES = [(path, stage) for folder, stages in STAGES.items() for path in sorted((CONFIGS / folder).glob("*.yaml")) for stage in stages]


@pytest.mark.parametrize(("path", "stage"), FILES, ids=[f"{path.parent.name}/{path.stem}-{stage}" for path, stage in FILES])
def test_it_loads(path: Path, stage: Stage) -> None:
    assert load_config(stage, str(path), []).model.target.path


def test_there_is_a_file_for_every_size_of_machine() -> None:
    trained = {path.stem for path, stage in FILES if stage == "train"}
    assert trained >= {"quickstart", "smollm2-cpu", "qwen3-8b", "qwen3-235b-a22b"}
    published = load_config("train", str(CONFIGS / "train/qwen3-8b.yaml"), [])
    draft, objective, optim = published.model.draft, published.model.objective, published.model.optim
    assert (draft.num_hidden_layers, draft.block_size, objective.gamma, objective.num_anchors) == (5, 16, 7.0, 512)
    assert (optim.lr, optim.sched.name, optim.sched.warmup_ratio) == (6e-4, "cosine", 0.04)


def test_every_field_says_what_it_means() -> None:
    assert [path for path, field in all_fields() if not field.description] == []
