"""A draft as a folder that servers load: `config.json` and `model.safetensors` (DFLASH §7)."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from pipeline.draft.model import Draft
from pipeline.draft.published import from_json, to_json
from pipeline.errors import DraftError
from pipeline.runtime.files import follow_umask

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {torch.float32, torch.bfloat16, torch.float16}


def export_draft(draft: Draft, folder: Path) -> None:
    """Write `draft` into `folder` (made if need be), in the dtype of its parameters. With `config.json`, the last file, it is whole."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in draft.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    follow_umask(folder / "model.safetensors")
    dtype = str(draft.fc.weight.dtype).removeprefix("torch.")
    values = {**to_json(draft.config), "dtype": dtype, "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(values, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors of a Hugging Face folder: the single one, else those that its index names, as transformers looks for them. Raises
    `ValueError` for a strange index."""
    if (folder / SINGLE).is_file() or not (folder / INDEX).is_file():
        return [folder / SINGLE]
    found: Any = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    files = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(files, dict) or not all(isinstance(name, str) for name in files.values()):
        raise ValueError(f"{INDEX} has no weight_map of tensors to files")
    names = sorted(set(files.values()))
    if outside := [name for name in names if Path(name).name != name]:
        raise ValueError(f"{INDEX} names files outside of the folder: {', '.join(outside)}")
    return [folder / name for name in names]


def load_draft(folder: Path) -> Draft:
    """The draft of `folder`, ours or a published one, in the dtype of its file or files, on the CPU.

    Raises `DraftError` for a missing or unreadable file, and for any tensor that is missing, unknown, of another shape than
    `config.json` says, or quantised.
    """
    for name, other in (("config.json", "config.json"), (SINGLE, INDEX)):
        if not (folder / name).is_file() and not (folder / other).is_file():
            raise DraftError(f"{folder} is not an exported draft: {folder / name} is missing")
    try:
        values = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        weights = {name: tensor for file in weight_files(folder) for name, tensor in load_file(file).items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise DraftError(f"{folder} holds a damaged draft: {error}; export it again") from error
    try:
        draft = Draft(from_json(values))
    except (TypeError, ValueError, AttributeError) as error:
        raise DraftError(f"{folder / 'config.json'} has a value of the wrong type: {error}; export the draft again") from error
    expected = draft.state_dict()
    faults = [f"{name} is missing" for name in expected if name not in weights]
    faults += [f"{name} is not a tensor of this draft" for name in weights if name not in expected]
    faults += [
        f"{name} is {list(weights[name].shape)}, expected {list(expected[name].shape)}"
        for name in expected
        if name in weights and weights[name].shape != expected[name].shape
    ]
    if faults:
        raise DraftError(f"{folder}/model.safetensors does not fit its config.json: " + "; ".join(faults))
    dtypes = {tensor.dtype for tensor in weights.values()}
    if strange := sorted(str(dtype).removeprefix("torch.") for dtype in dtypes - DTYPES):
        raise DraftError(
            f"{folder}/model.safetensors: its tensors are {', '.join(strange)}; expected weights in float32, bfloat16 or float16"
        )
    draft.load_state_dict(weights)
    return draft.to(dtypes.pop()) if len(dtypes) == 1 else draft
