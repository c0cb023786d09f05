"""Checkpoints: all that a run needs to go on, and nothing of the target.

    checkpoints/step_0000123/
      draft.safetensors        weights by name, float32
      average.safetensors      their running average, if one is kept
      optimizer.safetensors    the optimizers' state by parameter name: `layers.0.mlp.up_proj.weight.exp_avg`, …, float32
      rng.safetensors          generator states. Training itself draws from none: order and anchors are functions of the seed
      state.json               step, position, counts, metrics, whether the run ended here, checksums, and the fingerprint
                               of what must not change

A folder appears under its name only when it is complete. What is kept is read from the folders, so there is no list
of them that could be lost. Files are compared with their checksums when they are read; a damaged checkpoint is an error, never
passed over in silence: a disk that damages one may have damaged others, so which of them to trust is for a person to say.
"""

import hashlib
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

from pipeline.errors import CheckpointError
from pipeline.runtime.files import atomic_folder, file_digest, write_json
from pipeline.train.learner import Learner
from pipeline.train.order import Position
from pipeline.train.parts import placed_like, whole

FORMAT = 2
NAME = re.compile(r"step_(\d{7,})")
DRAFT, AVERAGE, OPTIMIZER, RNG = "draft.safetensors", "average.safetensors", "optimizer.safetensors", "rng.safetensors"


@dataclass(frozen=True, slots=True)
class TrainState:
    """Where a run stands after `step` optimizer steps. `window` holds the sums since the last line of metrics, `metrics`
    the validation of this very step (empty when there was none); `best` is the best value of the metric `judged_by` that
    early stopping has seen, and `stale` how many validations in a row were not better. `rate` is the learning rate of the last step."""

    step: int = 0
    position: Position = field(default_factory=Position)
    samples_seen: int = 0
    tokens_seen: int = 0
    window: tuple[float, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: float | None = None
    stale: int = 0
    judged_by: str | None = None
    rate: float | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Snapshot:
    """A checkpoint in memory: `files` are tensors on the CPU by file name, `described` is what `state.json` holds besides checksums."""

    name: str
    described: Mapping[str, Any]
    files: Mapping[str, Mapping[str, torch.Tensor]]


def take_snapshot(learner: Learner, state: TrainState, fingerprint: Mapping[str, Any], *, final: bool = False) -> Snapshot | None:
    """A copy of all that a checkpoint holds, for the rank that writes it; None on the others. Every rank must call it."""
    is_main = learner.ranks.is_main
    if not is_main and not learner.is_divided:
        return None
    named = dict(learner.draft.named_parameters())
    moments = {
        f"{name}.{key}": value
        for name, parameter in named.items()
        for optimizer in learner.optimizers
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    wanted: dict[str, Mapping[str, torch.Tensor]] = {DRAFT: named, OPTIMIZER: moments}
    if learner.average is not None:
        wanted[AVERAGE] = learner.average
    files: dict[str, Mapping[str, torch.Tensor]] = {name: _copied(tensors, is_main) for name, tensors in wanted.items()}
    described = {"format": FORMAT, **asdict(state), "final": final, "fingerprint": fingerprint}
    return Snapshot(f"step_{state.step:07d}", described, files | {RNG: _rng_states()}) if is_main else None


def write_snapshot(folder: Path, snapshot: Snapshot) -> Path:
    """Write `snapshot` into `folder`; of a checkpoint that is there already, only `state.json`. Returns its path.

    Raises `CheckpointError` when the disk does not take it; older checkpoints are then as they were.
    """
    path = folder / snapshot.name
    try:
        if path in checkpoints(folder):
            _write_state(path, {**snapshot.described, "files": read_state(path)["files"]})
            return path
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_folder(path) as fresh:
            for name, tensors in snapshot.files.items():
                save_file(dict(tensors), fresh / name)
            digests = {name: file_digest(fresh / name) for name in snapshot.files}
            _write_state(fresh, {**snapshot.described, "files": digests})
            for name in snapshot.files:
                shutil.copymode(fresh / "state.json", fresh / name)  # safetensors lets nobody but the owner read what it writes
    except (OSError, SafetensorError) as error:
        older = [found.name for found in checkpoints(folder) if found != path]
        left = f"The checkpoint before it, {older[-1]}, is whole" if older else "There is no older checkpoint"
        raise CheckpointError(
            f"the checkpoint {path} cannot be written: {error}. {left}. Free space or mend that disk, then run the same command again."
        ) from error
    return path


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, oldest first."""
    found = [path for path in folder.glob("step_*") if NAME.fullmatch(path.name) and (path / "state.json").is_file()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def load_checkpoint(path: Path, learner: Learner, fingerprint: Mapping[str, Any]) -> TrainState:
    """Put the checkpoint at `path` into `learner` and the generators. Every rank must call it.

    Raises `CheckpointError` when a file is damaged, or its fingerprint is not `fingerprint`, field by field.
    """
    stored = read_state(path)
    differences = list(_differences(stored["fingerprint"], json.loads(json.dumps(fingerprint))))
    if differences:
        raise CheckpointError(
            f"{path} belongs to a run with other settings:\n"
            + "\n".join(f"  {name}: {old} in the checkpoint, {new} in this run" for name, old, new in differences)
            + "\nRun with the checkpoint's settings to go on, or start anew in another exp_manager.explicit_log_dir."
        )
    named = dict(learner.draft.named_parameters())
    _fill(named, path, DRAFT, stored)
    if learner.average is not None:
        _fill(learner.average, path, AVERAGE, stored)
    owners = {p: optimizer for optimizer in learner.optimizers for group in optimizer.param_groups for p in group["params"]}
    for name, value in read_tensors(path, OPTIMIZER, stored).items():
        owner, key = name.rsplit(".", 1)
        if owner not in named or named[owner] not in owners:
            raise CheckpointError(f"{path / OPTIMIZER} holds {name}, which is of no parameter that is trained")
        owners[named[owner]].state[named[owner]][key] = placed_like(value, named[owner])
    _restore_rng(read_tensors(path, RNG, stored))
    kept = {name: stored[name] for name in ("step", "samples_seen", "tokens_seen", "metrics", "best", "stale")}
    kept |= {name: stored.get(name) for name in ("judged_by", "rate")}  # which checkpoints of earlier versions do not have
    return TrainState(position=Position(**stored["position"]), window=tuple(stored["window"]), **kept)


def read_state(path: Path) -> dict[str, Any]:
    """`state.json` of the checkpoint at `path`. Raises `CheckpointError` when it cannot be read or is of another format."""
    file = path / "state.json"
    try:
        stored: Any = json.loads(file.read_text())
        if not isinstance(stored, dict):
            raise ValueError(f"expected an object, found a {type(stored).__name__}")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}). {_instead(path)}") from error
    if stored.get("format") != FORMAT:
        raise CheckpointError(f"{file} is of format {stored.get('format')}, expected {FORMAT}. It needs the version that wrote it.")
    if stored.pop("checksum", None) != _checksum(stored):
        raise CheckpointError(f"{file} is damaged: its checksum is not the one that was recorded. {_instead(path)}")
    return stored


def read_tensors(path: Path, name: str, stored: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of one file of the checkpoint at `path`, whose `state.json` is `stored`. Raises `CheckpointError` unless the
    file is, byte for byte, the one that was written."""
    file = path / name
    try:
        digest = file_digest(file)
        if digest != stored["files"].get(name):
            raise CheckpointError(f"{file} is damaged: its checksum is not the one that was recorded. {_instead(path)}")
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read ({error}). {_instead(path)}") from error


def read_validated(path: Path) -> tuple[str, str, dict[str, torch.Tensor]]:
    """Of the weights that the checkpoint at `path` was validated with, the running average where there is one: their file, its checksum,
    and the tensors by name."""
    stored = read_state(path)
    name = AVERAGE if AVERAGE in stored["files"] else DRAFT
    return name, stored["files"][name], read_tensors(path, name, stored)


def best_first(folder: Path, monitor: str, mode: Literal["max", "min"]) -> list[tuple[Path, float]]:
    """Checkpoints that have a value of the metric `monitor`, best first; of equal ones the older."""
    scored = [(path, read_state(path)["metrics"].get(monitor)) for path in checkpoints(folder)]
    return sorted([(p, v) for p, v in scored if v is not None], key=lambda item: -item[1] if mode == "max" else item[1])


def prune(folder: Path, monitor: str, mode: Literal["max", "min"], save_top_k: int) -> list[Path]:
    """Remove all checkpoints but the last, those at which a run ended, and the `save_top_k` best by `monitor`; returns what was removed."""
    present = checkpoints(folder)
    keep = {path for path, _ in best_first(folder, monitor, mode)[:save_top_k]} | set(present[-1:])
    removed = [path for path in present if path not in keep and not read_state(path)["final"]]
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


def _write_state(path: Path, stored: dict[str, Any]) -> None:
    write_json(path / "state.json", {**stored, "checksum": _checksum(stored)})


def _checksum(stored: Mapping[str, Any]) -> str:
    """Of `state.json`, by its values."""
    return hashlib.sha256(json.dumps(stored, sort_keys=True).encode()).hexdigest()


def _instead(path: Path) -> str:
    older = [found.name for found in checkpoints(path.parent) if found.name < path.name]
    return f"Remove {path} to go on from the checkpoint before it{f', {older[-1]}' if older else ' (there is none: from the start)'}."


def _copied(tensors: Mapping[str, torch.Tensor], keep: bool) -> dict[str, torch.Tensor]:
    """Copies on the CPU, put together from all ranks; empty unless `keep`, for a rank that only takes part."""
    copies = {}
    for name, tensor in tensors.items():
        value = whole(tensor.detach())
        if keep:
            copies[name] = value.to("cpu", copy=True).contiguous()
    return copies


def _fill(into: Mapping[str, torch.Tensor], path: Path, name: str, stored: Mapping[str, Any]) -> None:
    """Copy the tensors of a file into those of the same names."""
    found = read_tensors(path, name, stored)
    faults = [f"{key} is missing" for key in into if key not in found] + [f"{key} is unknown" for key in found if key not in into]
    faults += [
        f"{key} is {list(found[key].shape)}, not {list(into[key].shape)}"
        for key in into
        if key in found and found[key].shape != into[key].shape
    ]
    if faults:
        raise CheckpointError(f"{path / name} does not fit the draft: {'; '.join(faults)}")
    with torch.no_grad():
        for key, tensor in into.items():
            tensor.copy_(placed_like(found[key], tensor))


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
