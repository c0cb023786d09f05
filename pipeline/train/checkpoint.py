"""Checkpoints: all that a run needs to go on, and nothing of the target.

    checkpoints/step_0000123/
      draft.safetensors        weights by name, float32
      optimizer.safetensors    the optimizer's state by parameter name: `layers.0.mlp.up_proj.weight.exp_avg`, …, float32
      rng.safetensors          generator states. Training itself draws from none: order and anchors are functions of the seed
      state.json               step, position, counts, metrics, and the fingerprint of what must not change

A folder appears under its name only when it is complete. What is kept is read from the folders, so there is no list
of them that could be lost.
"""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from pipeline.errors import CheckpointError
from pipeline.runtime.files import atomic_folder, write_json
from pipeline.train.order import Position

FORMAT = 1
NAME = re.compile(r"step_(\d{7,})")


@dataclass(frozen=True, slots=True)
class TrainState:
    """Where a run stands after `step` optimizer steps. `window` holds the sums since the last line of metrics, `metrics`
    the validation of this very step (empty when there was none)."""

    step: int = 0
    position: Position = field(default_factory=Position)
    samples_seen: int = 0
    tokens_seen: int = 0
    window: tuple[float, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob("step_*") if NAME.fullmatch(path.name) and (path / "state.json").is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def save_checkpoint(
    folder: Path, state: TrainState, draft: nn.Module, optimizer: torch.optim.Optimizer, fingerprint: Mapping[str, Any]
) -> Path:
    """Write the checkpoint of `state.step` into `folder`; of one that is there already, only `state.json`. Returns its path."""
    path = folder / f"step_{state.step:07d}"
    described = {"format": FORMAT, **asdict(state), "fingerprint": fingerprint}
    if path in checkpoints(folder):
        write_json(path / "state.json", described)
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with atomic_folder(path) as fresh:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in draft.state_dict().items()}, fresh / "draft.safetensors")
        moments = {
            f"{name}.{key}": value.detach().cpu().contiguous()
            for name, parameter in draft.named_parameters()
            for key, value in optimizer.state.get(parameter, {}).items()
        }
        save_file(moments, fresh / "optimizer.safetensors")
        save_file(_rng_states(), fresh / "rng.safetensors")
        write_json(fresh / "state.json", described)
        for file in fresh.glob("*.safetensors"):
            shutil.copymode(fresh / "state.json", file)  # safetensors lets nobody but the owner read what it writes
    return path


def load_checkpoint(path: Path, draft: nn.Module, optimizer: torch.optim.Optimizer, fingerprint: Mapping[str, Any]) -> TrainState:
    """Put the checkpoint at `path` into `draft` and `optimizer`. Raises `CheckpointError` when a file is missing or damaged,
    or when the checkpoint's fingerprint is not `fingerprint`, field by field."""
    stored = read_state(path)
    differences = list(_differences(stored["fingerprint"], json.loads(json.dumps(fingerprint))))
    if differences:
        raise CheckpointError(
            f"{path} belongs to a run with other settings:\n"
            + "\n".join(f"  {name}: {old} in the checkpoint, {new} in this run" for name, old, new in differences)
            + "\nRun with the checkpoint's settings to go on, or start anew in another exp_manager.explicit_log_dir."
        )
    try:
        draft.load_state_dict(_tensors(path / "draft.safetensors"))
    except RuntimeError as error:
        raise CheckpointError(f"{path / 'draft.safetensors'} does not fit the draft: {error}") from error
    parameters = dict(draft.named_parameters())
    for name, value in _tensors(path / "optimizer.safetensors").items():
        owner, key = name.rsplit(".", 1)
        if owner not in parameters:
            raise CheckpointError(f"{path / 'optimizer.safetensors'} holds {name}, which is no parameter of the draft")
        optimizer.state[parameters[owner]][key] = value.to(parameters[owner].device)
    _restore_rng(_tensors(path / "rng.safetensors"))
    kept = {name: stored[name] for name in ("step", "samples_seen", "tokens_seen", "metrics")}
    return TrainState(position=Position(**stored["position"]), window=tuple(stored["window"]), **kept)


def read_state(path: Path) -> dict[str, Any]:
    """`state.json` of the checkpoint at `path`. Raises `CheckpointError` when it cannot be read or is of another format."""
    file = path / "state.json"
    try:
        stored: dict[str, Any] = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}). Remove {path} to go on from the checkpoint before it.") from error
    if stored.get("format") != FORMAT:
        raise CheckpointError(f"{file} is of format {stored.get('format')}, expected {FORMAT}. It needs the version that wrote it.")
    return stored


def best_first(folder: Path, monitor: str, mode: Literal["max", "min"]) -> list[tuple[Path, float]]:
    """Checkpoints that have a value of the metric `monitor`, best first; of equal ones the older."""
    scored = [(path, read_state(path)["metrics"].get(monitor)) for path in checkpoints(folder)]
    return sorted([(p, v) for p, v in scored if v is not None], key=lambda item: -item[1] if mode == "max" else item[1])


def prune(folder: Path, monitor: str, mode: Literal["max", "min"], save_top_k: int) -> list[Path]:
    """Remove all checkpoints but the last and the `save_top_k` best by `monitor`; returns what was removed."""
    present = checkpoints(folder)
    keep = {path for path, _ in best_first(folder, monitor, mode)[:save_top_k]} | set(present[-1:])
    removed = [path for path in present if path not in keep]
    for path in removed:
        # First the file that makes it a checkpoint: a kill in the middle leaves nothing that looks like one.
        (path / "state.json").unlink()
        shutil.rmtree(path)
    return removed


def remove_leftovers(folder: Path) -> None:
    """Remove what a killed process left half written or half removed. Only for the one process that writes here."""
    whole = set(checkpoints(folder))
    for path in folder.iterdir() if folder.is_dir() else ():
        if path not in whole and path.is_dir():
            shutil.rmtree(path)


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}). Remove {file.parent} to go on from the checkpoint before it.") from error


def _differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted field, old and new value, wherever two JSON values differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _differences(old.get(key, "nothing"), new.get(key, "nothing"), f"{name}.{key}" if name else key)
    elif old != new:
        yield name, old, new


def _rng_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda.{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return states


def _restore_rng(states: dict[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if torch.cuda.is_available():
        for name, state in states.items():
            index = name.removeprefix("cuda.")
            if index.isdigit() and int(index) < torch.cuda.device_count():
                torch.cuda.set_rng_state(state, int(index))
