"""A draft divided over the ranks by FSDP2, as accelerate's own settings ask for, is the draft that is not: losses, checkpoints, export."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pipeline.capture.run import capture
from pipeline.config.load import to_yaml
from pipeline.runtime.ranks import start_ranks
from pipeline.train.checkpoint import checkpoints
from pipeline.train.loop import train
from tests.support.launch import accelerate_launch, run_ranks
from tests.support.tiny import write_chats
from tests.support.training import config, repeatable

pytestmark = pytest.mark.slow

DIVIDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
HALF, STEPS = 6, 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """A folder with a cache and a configuration: a running average, frozen parameters, accumulation, validations."""
    folder = tmp_path_factory.mktemp("divided")
    changes: dict[str, Any] = {
        "data__validation_ds": {"fraction": 0.25},
        "trainer__max_steps": STEPS,
        "trainer__val_check_interval": HALF,
        "trainer__ema_decay": 0.9,
        "trainer__accumulate_grad_batches": 2,
        "model__freeze_params": ["^hidden_norm"],
        "model__optim__sched": {"name": "constant"},
    }
    wanted = config(folder, tiny_target, write_chats(folder / "chats.jsonl", 20, seed=7), **changes)
    capture(wanted, start_ranks(1, None, 1))
    (folder / "config.yaml").write_text(to_yaml(wanted, named_only=True))
    return folder


def _overrides(folder: Path, name: str, *more: str) -> tuple[str, ...]:
    return str(folder / "config.yaml"), f"exp_manager.explicit_log_dir={folder / name}", *more


def _same_losses(one: Path, other: Path, rel: float) -> None:
    for a, b in zip(repeatable(one), repeatable(other), strict=True):
        assert a.keys() == b.keys()
        for name in a.keys() & {"loss", "grad_norm", "val_loss", "val/heldout/loss"}:
            assert a[name] == pytest.approx(b[name], rel=rel), (a["step"], name)


def _close(one: Path, other: Path) -> None:
    a, b = load_file(one), load_file(other)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].shape == b[name].shape
        assert float((a[name] - b[name]).norm()) <= 1e-4 * max(1e-3, float(b[name].norm())), name


def test_divided_and_copied_are_the_same_run(folder: Path) -> None:
    """Half of it divided, the other half copied to each rank, and the other way round: checkpoints are whole, so they serve both."""
    run_ranks("stages/train_draft.py", *_overrides(folder, "copied"), timeout=150)
    done = accelerate_launch(
        "stages/train_draft.py",
        *_overrides(folder, "divided"),
        options=("--use_fsdp", "--fsdp_version", "2", "--num_processes", "2", "--num_machines", "1", "--tee", "3"),
        env={"ACCELERATE_USE_CPU": "true"},
        timeout=150,
    )
    assert "divided over the ranks (FSDP2)" in done.text
    _same_losses(folder / "divided", folder / "copied", 1e-5)
    run_ranks("stages/train_draft.py", *_overrides(folder, "changed", f"trainer.max_steps={HALF}"), env=DIVIDED, timeout=150)
    run_ranks("stages/train_draft.py", *_overrides(folder, "changed"), timeout=150)
    run_ranks("stages/train_draft.py", *_overrides(folder, "back", f"trainer.max_steps={HALF}"), timeout=150)
    run_ranks("stages/train_draft.py", *_overrides(folder, "back"), env=DIVIDED, timeout=150)
    for name in ("divided", "changed", "back"):
        _same_losses(folder / name, folder / "copied", 1e-5)
        newest, expected = (checkpoints(folder / run / "checkpoints")[-1] for run in (name, "copied"))
        assert newest.name == expected.name == f"step_{STEPS:07d}"
        for file in ("draft.safetensors", "average.safetensors", "optimizer.safetensors"):
            _close(newest / file, expected / file)
        _close(folder / name / "export/model.safetensors", folder / "copied/export/model.safetensors")


def test_muon_on_divided_matrices(folder: Path, tiny_target: Path) -> None:
    muon = ("model.optim.name=muon", "trainer.max_steps=6")
    run_ranks("stages/train_draft.py", *_overrides(folder, "muon", *muon), env=DIVIDED, timeout=150)
    changes = {"data__validation_ds": {"fraction": 0.25}, "trainer__val_check_interval": HALF, "trainer__max_steps": 6}
    changes |= {"trainer__ema_decay": 0.9, "model__freeze_params": ["^hidden_norm"], "trainer__accumulate_grad_batches": 4}
    optim = {"name": "muon", "lr": 2e-3, "weight_decay": 0.01, "sched": {"name": "constant"}}
    alone = config(
        folder, tiny_target, folder / "chats.jsonl", exp_manager__explicit_log_dir=str(folder / "alone"), model__optim=optim, **changes
    )
    assert train(alone, start_ranks(1, None, 1))
    # It works in bfloat16 inside, which makes more of a rounding than AdamW does.
    _same_losses(folder / "muon", folder / "alone", 1e-4)
