"""Weights to start from (`model.init_from_checkpoint`), from whatever kind of file holds them. Nothing in them is executed.

a checkpoint of ours          its running average where it has one
a Hugging Face folder         ours (LOG_DIR/export) or a published draft: model.safetensors, or an index and its files
a .safetensors file
a folder of torch DCP         its index is a pickle, of which only the classes that describe tensors are let in
"""

import json
import logging
import pickle
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_dcp

from pipeline.draft.config import DraftConfig
from pipeline.draft.export import INDEX, SINGLE, weight_files
from pipeline.draft.model import Draft, new_in_variant
from pipeline.draft.published import from_json
from pipeline.errors import CheckpointError, DraftError
from pipeline.runtime.files import file_digest
from pipeline.train.checkpoint import read_validated

log = logging.getLogger(__name__)

DCP_INDEX = ".metadata"
COMPUTED = (
    *("rope_theta", "rms_norm_eps", "num_attention_heads", "target_layer_ids", "sliding_window", "layer_types", "variant", "latent"),
    *("block_size", "mask_token_id", "shift_label", "pure_draft_prefix_len"),
    *("input_embedding_scale", "output_multiplier", "final_logit_softcapping"),
)
"""Of a draft's geometry, and of what it is fed and asked, what shapes do not show."""
DCP_CLASSES = {
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath", "Path"},
    "collections": {"OrderedDict"},
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties"),
        *("TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
}


@dataclass(frozen=True, eq=False)
class Weights:
    """What a place holds: shapes by name, and how to read some of them."""

    kind: str
    shapes: Mapping[str, Sequence[int]]
    read: Callable[[Sequence[str]], Mapping[str, torch.Tensor]]
    digests: Mapping[str, str]


def load_initial(draft: Draft, place: str | None) -> dict[str, Any] | None:
    """Put the weights at `place` into `draft`, whatever dtype they have there; returns what to remember of it. None changes nothing.

    Names may have one prefix in common (`module.`, `model.`). What is of no parameter of the draft, such as a copy of the target's
    embedding, is left out and said; so is what the draft's variant has and plain DFlash has not, which stays as it was made: a plain
    draft can be the start of any variant. Raises `CheckpointError` when nothing can be read, or tensors are missing or of another shape.
    """
    if place is None:
        return None
    path = Path(place).expanduser()
    try:
        weights = _open(path)
        parameters = dict(draft.named_parameters())
        kept = new_in_variant(draft.config)
        prefix = _prefix([name for name in parameters if name not in kept], weights.shapes, path)
        if any(prefix + name in weights.shapes for name in kept):
            kept = set()
        parameters = {name: parameter for name, parameter in parameters.items() if name not in kept}
        _check_fit(parameters, weights, prefix, path)
        found = weights.read([prefix + name for name in parameters])
    except (OSError, ValueError, SafetensorError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"model.init_from_checkpoint: {path} cannot be read: {error}") from error
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(found[prefix + name])
    left_out = sorted(set(weights.shapes) - {prefix + name for name in parameters})
    log.info("weights of %s (%s): %d tensors, %d left out", path, weights.kind, len(parameters), len(left_out))
    if kept:
        log.info("not in it, and left as they were made: %s", ", ".join(sorted(kept)))
    if left_out:
        log.info("left out: %s", ", ".join(left_out[:20]) + (" …" if len(left_out) > 20 else ""))
    _compare_config(draft.config, path)
    return {"path": str(place), "kind": weights.kind, "prefix": prefix, "tensors": len(parameters), "sha256": dict(weights.digests)}


def _open(path: Path) -> Weights:
    if path.suffix == ".safetensors" and path.is_file():
        return _safetensors("safetensors file", {path})
    if (path / DCP_INDEX).is_file():
        return _dcp(path)
    if (path / "state.json").is_file():
        return _own_checkpoint(path)
    if (path / INDEX).is_file() or (path / SINGLE).is_file():
        return _safetensors("Hugging Face folder", set(weight_files(path)))
    raise CheckpointError(
        f"model.init_from_checkpoint: {path} {'is none of what is read' if path.exists() else 'does not exist'}. Expected a checkpoint of "
        f"this trainer (…/checkpoints/step_…), a folder with {SINGLE} or {INDEX}, a .safetensors file, or a DCP folder (with {DCP_INDEX}). "
        "Files of torch.save are not read, since they may run code: convert them to safetensors."
    )


def _safetensors(kind: str, files: set[Path]) -> Weights:
    where: dict[str, Path] = {}
    shapes: dict[str, Sequence[int]] = {}
    for file in sorted(files):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - no mapping
                where[name], shapes[name] = file, opened.get_slice(name).get_shape()

    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for file in sorted({where[name] for name in names}):
            with safe_open(file, "pt") as opened:
                found |= {name: opened.get_tensor(name) for name in names if where[name] == file}
        return found

    return Weights(kind, shapes, read, {file.name: file_digest(file) for file in files})


def _own_checkpoint(path: Path) -> Weights:
    file, checksum, tensors = read_validated(path)
    return Weights(
        f"checkpoint of ours, {file}",
        {name: list(t.shape) for name, t in tensors.items()},
        lambda names: tensors,
        {file: checksum},
    )


class _IndexUnpickler(pickle.Unpickler):
    """Of DCP's `.metadata`: the classes that describe tensors, dtypes, and nothing that could act."""

    def find_class(self, module: str, name: str) -> Any:
        if name in DCP_CLASSES.get(module, ()) or (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"its {DCP_INDEX} asks for {module}.{name}, which describes no tensor; it was not run")


class _DcpReader(FileSystemReader):
    """Reads tensors with torch's own reader, which loads their bytes with weights_only; the index goes through `_IndexUnpickler`."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        with open(Path(self.path) / DCP_INDEX, "rb") as stream:
            try:
                metadata = _IndexUnpickler(stream).load()
            except (OSError, pickle.UnpicklingError):
                raise
            except Exception as error:  # bytes that are no pickle raise whatever they happen to ask for
                raise ValueError(f"its {DCP_INDEX} is damaged: {error}") from error
        if not isinstance(metadata, Metadata):
            raise ValueError(f"its {DCP_INDEX} is not the index of a DCP checkpoint")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


def _dcp(path: Path) -> Weights:
    index = _DcpReader(path).read_metadata()
    described = {name: item for name, item in index.state_dict_metadata.items() if isinstance(item, TensorStorageMetadata)}

    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        tensors = {name: torch.empty(described[name].size, dtype=described[name].properties.dtype) for name in names}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that one process reads it is meant
            try:
                load_dcp(tensors, storage_reader=_DcpReader(path), no_dist=True)
            except CheckpointException as error:  # no `Exception`, and its own text is several tracebacks
                causes = {f"{type(failure[0]).__name__}: {failure[0]}".splitlines()[0] for failure in error.failures.values()}
                raise ValueError(f"its data is missing or damaged: {'; '.join(sorted(causes))}") from error
        return tensors

    shapes = {name: list(item.size) for name, item in described.items()}
    return Weights("torch DCP folder", shapes, read, {DCP_INDEX: file_digest(path / DCP_INDEX)})


def _prefix(parameters: Sequence[str], shapes: Mapping[str, Sequence[int]], path: Path) -> str:
    """What stands before the draft's names in the file: the prefix under which most of them are."""
    counted: dict[str, int] = {}
    for name in shapes:
        for parameter in parameters:
            if name == parameter or name.endswith(f".{parameter}"):
                prefix = name.removesuffix(parameter)
                counted[prefix] = counted.get(prefix, 0) + 1
    # `norm.weight` is also the end of other names, so only whole sets of names compete.
    whole = [prefix for prefix, count in counted.items() if count == len(parameters)]
    if len(whole) > 1 and "" not in whole:
        raise ValueError(
            f"it holds the draft's tensors several times, under {', '.join(sorted(whole))}; keep one of them in a file of its own"
        )
    if "" in whole or not counted:
        return ""
    return max(whole or counted, key=lambda prefix: (counted[prefix], -len(prefix)))


def _check_fit(parameters: Mapping[str, torch.Tensor], weights: Weights, prefix: str, path: Path) -> None:
    """Raise `CheckpointError` with every tensor that does not fit: missing, of another shape, or one more in a part that the draft has."""
    faults = []
    for name, parameter in parameters.items():
        shape = weights.shapes.get(prefix + name)
        if shape is None:
            faults.append(f"{prefix}{name} is missing")
        elif list(shape) != list(parameter.shape):
            faults.append(f"{prefix}{name} is {list(shape)}, the draft's is {list(parameter.shape)}")
    parts = {f"{prefix}{name.split('.')[0]}." for name in parameters}
    known = {prefix + name for name in parameters}
    faults += [
        f"{name} is not in the draft"
        for name in sorted(weights.shapes)
        if name not in known and any(name.startswith(part) for part in parts) and not name.endswith(("inv_freq", ".exp_avg", ".exp_avg_sq"))
    ]
    if faults:
        shown = "; ".join(faults[:12]) + (f"; and {len(faults) - 12} more" if len(faults) > 12 else "")
        raise CheckpointError(
            f"model.init_from_checkpoint: {path} ({weights.kind}) is of another geometry than model.draft asks for: {shown}. Change "
            "model.draft, or start from other weights."
        )


def _compare_config(draft: DraftConfig, path: Path) -> None:
    """Warn of what the config.json beside the weights has otherwise and no shape shows."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return
    try:
        there, here = asdict(from_json(json.loads(file.read_text()))), asdict(draft)
    except (DraftError, ValueError, TypeError, AttributeError) as error:
        log.warning("%s is not compared with this draft: %s", file, error)
        return
    for name in COMPUTED:
        if there[name] != here[name]:
            log.warning("%s: %s was %s for these weights, this run has %s", file, name, there[name], here[name])
