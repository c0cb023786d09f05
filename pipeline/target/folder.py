"""The target's files: where they are, what they say without being loaded, and a digest of the weights."""

import hashlib
import json
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig

from pipeline.config.schema import TargetSection
from pipeline.errors import TargetError

SAMPLE_BYTES = 1024
SAMPLE_PLACES = 4
WHOLE_BYTES = 65536
WANTED = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]  # what is downloaded of a target

# What decides the states besides the weights. Named one by one, and not as a digest of config.json, so that a difference
# can be read, and so that a folder saved again by another version of transformers is still the same target.
CONFIG_FIELDS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "hidden_act",
    "rms_norm_eps",
    "rope_parameters",
    "sliding_window",
    "layer_types",
    "num_experts",
    "num_local_experts",
    "num_experts_per_tok",
    "attn_logit_softcapping",
    "query_pre_attn_scalar",
    "embedding_multiplier",
    "residual_multiplier",
    "attention_multiplier",
)


def target_folder(path: str | None, revision: str | None) -> Path:
    """Folder of the target. A local folder is used as it is, without the network; anything else is taken as a hub id.

    Raises `TargetError` when there is no such folder, when it holds no config or no safetensors, or when the hub has no answer.
    """
    if path is None:
        raise TargetError("model.target.path is not set: give the folder or the hub id of the target.")
    folder = Path(path).expanduser()
    if not folder.exists():
        folder = _from_hub(path, revision)
    if not folder.is_dir():
        raise TargetError(f"model.target.path {path} is a file; expected a folder with config.json and *.safetensors.")
    if not (folder / "config.json").is_file():
        raise TargetError(f"model.target.path {path} has no config.json; expected a folder that transformers' save_pretrained wrote.")
    return folder


def find_target(section: TargetSection) -> TargetSection | None:
    """`section` with the folder of the target in place of a hub id, if it is on this machine; None otherwise. Never asks the hub."""
    folder = Path(section.path or "").expanduser()
    if section.path and not folder.exists() and section.path.count("/") == 1 and not section.path.startswith((".", "/", "~")):
        try:
            folder = Path(snapshot_download(section.path, revision=section.revision, allow_patterns=WANTED, local_files_only=True))
        except (HFValidationError, LocalEntryNotFoundError, OSError):
            return None
    return section.model_copy(update={"path": str(folder), "revision": None}) if section.path and folder.is_dir() else None


def _from_hub(path: str, revision: str | None) -> Path:
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise TargetError(f"model.target.path {path} does not exist. Give a folder on this machine, or a hub id of the form owner/name.")
    try:
        return Path(snapshot_download(path, revision=revision, allow_patterns=WANTED))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise TargetError(
            f"model.target.path {path} is not a folder on this machine, and the hub did not give it: {error}. Give a local folder, or "
            f"download it first."
        ) from error


def read_config(section: TargetSection) -> Any:
    """The target's transformers config, wrapper included; sizes are in its `get_text_config(decoder=True)`.

    Raises `TargetError` for a config that cannot be read, or that asks for the folder's own code without `trust_remote_code`.
    """
    folder = target_folder(section.path, section.revision)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=section.trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError) as error:
        if "trust_remote_code" in str(error):
            raise TargetError(
                f"target {section.path} brings its own code. Read it, then set model.target.trust_remote_code=true to run it."
            ) from error
        raise TargetError(f"config.json of target {section.path} cannot be used: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """Safetensors files of the target, as transformers would choose them. Raises `TargetError` when one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TargetError(f"{index} cannot be read: {error!r}. Copy or download it again.") from error
    elif (folder / "model.safetensors").is_file():
        names = ["model.safetensors"]
    else:
        raise TargetError(
            f"target {folder} has neither model.safetensors nor model.safetensors.index.json. Other formats are not read: "
            f"load it once with transformers and save it again with save_pretrained."
        )
    files = [folder / name for name in names]
    for file in files:
        if not file.is_file():
            raise TargetError(f"target {folder}: {file.name} is named by its index and missing. Copy or download the folder again.")
    return files


def _tensors(file: Path) -> Iterator[tuple[str, str, list[int], int, int]]:
    """(name, dtype, shape, first byte in the file, byte length) of every tensor, from the safetensors header."""
    with open(file, "rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        try:
            header = json.loads(stream.read(length) if length < file.stat().st_size else b"")
        except ValueError:
            raise TargetError(f"{file} is not a safetensors file: its header cannot be read. Copy or download it again.") from None
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            yield name, entry["dtype"], entry["shape"], 8 + length + begin, end - begin


def _sampled(file: Path, entry: tuple[str, str, list[int], int, int]) -> tuple[str, bytes]:
    """Name of a tensor and the digest of its dtype, shape, and bytes at fixed places in it."""
    name, dtype, shape, begin, size = entry
    digest = hashlib.sha256(json.dumps([name, dtype, shape]).encode())
    if size <= WHOLE_BYTES:
        places = [(0, size)]
    else:
        places = [(k * (size - SAMPLE_BYTES) // (SAMPLE_PLACES - 1), SAMPLE_BYTES) for k in range(SAMPLE_PLACES)]
    with open(file, "rb", buffering=0) as stream:
        for offset, length in places:
            stream.seek(begin + offset)
            data = stream.read(length)
            if len(data) < length:
                raise TargetError(f"{file} ends inside tensor {name}. Copy or download it again.")
            digest.update(data)
    return name, digest.digest()


def weights_digest(path: str, revision: str | None = None) -> str:
    """sha256 hex over the names, dtypes, shapes and sampled bytes of the target's tensors.

    Small tensors are read whole, of larger ones `SAMPLE_PLACES` pieces of `SAMPLE_BYTES`: a 70B target takes seconds. A fine-tune
    changes almost every tensor almost everywhere, so it differs; an edit of a few rows of one large tensor can go unseen.
    The same under any split into files and any tensor-parallel size.
    """
    files = weight_files(target_folder(path, revision))
    entries = [(file, entry) for file in files for entry in _tensors(file)]
    with ThreadPoolExecutor(16) as pool:  # the reads wait for a file system, often a remote one
        sampled = sorted(pool.map(lambda pair: _sampled(*pair), entries))
    digest = hashlib.sha256()
    for _, tensor in sampled:
        digest.update(tensor)
    return digest.hexdigest()


def target_fields(section: TargetSection) -> dict[str, Any]:
    """The target's part of the states' identity, from its files alone: architecture, dimensions, weights digest, dtype, attention."""
    config = read_config(section)
    text = config.get_text_config(decoder=True).to_dict()
    fields: dict[str, Any] = {"architecture": (config.architectures or [None])[0]}
    fields |= {name: text[name] for name in CONFIG_FIELDS if text.get(name) is not None}
    fields["weights_digest"] = weights_digest(section.path or "", section.revision)
    fields |= {"dtype": section.dtype, "attn_implementation": section.attn_implementation}
    return fields
