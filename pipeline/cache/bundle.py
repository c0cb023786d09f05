"""`target/`: what training needs of the target, so that stage two never loads it.

`bundle.safetensors` holds `embedding`, `head` (left out when tied) and `final_norm`; `bundle.json` the target's config and scales.
"""

import json
import os
import secrets
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError

from pipeline.errors import CacheCorruptError
from pipeline.records import TargetBundle
from pipeline.runtime.files import follow_umask, write_json

BUNDLE_FILES = ("bundle.safetensors", "bundle.json")
_SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")


def save_bundle(folder: Path, bundle: TargetBundle) -> None:
    """Write the bundle into `folder`, each of its two files in one step. Tensors must be on the CPU."""
    bundle.check()
    folder.mkdir(parents=True, exist_ok=True)
    tied = bundle.head.data_ptr() == bundle.embedding.data_ptr()
    tensors = {"embedding": bundle.embedding.contiguous(), "final_norm": bundle.final_norm.contiguous()}
    if not tied:
        tensors["head"] = bundle.head.contiguous()
    # save_file writes tensor by tensor; going through atomic_file would want the gigabytes as bytes first.
    temporary = folder / f".bundle.{os.getpid()}-{secrets.token_hex(4)}"
    try:
        safetensors.torch.save_file(tensors, temporary)
        follow_umask(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, folder / BUNDLE_FILES[0])
    finally:
        temporary.unlink(missing_ok=True)
    scales = {name: getattr(bundle, name) for name in _SCALES}
    write_json(folder / BUNDLE_FILES[1], {"config": dict(bundle.config), "tied": tied, **scales})


def load_bundle(folder: Path) -> TargetBundle:
    """The bundle of `folder` on the CPU; `CacheCorruptError` naming the file that is missing, damaged or does not fit."""
    path = folder / BUNDLE_FILES[1]
    try:
        value = json.loads(path.read_bytes())
        config, tied, scales = value["config"], value["tied"], {name: value[name] for name in _SCALES}
        path = folder / BUNDLE_FILES[0]
        tensors = safetensors.torch.load_file(path)
        embedding, final_norm = tensors["embedding"], tensors["final_norm"]
        head = embedding if tied else tensors["head"]
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise CacheCorruptError(f"{path} cannot be read: {error!r}. Copy it from another copy of the cache, or capture again.") from error
    return TargetBundle(embedding, head, final_norm, config, **scales).check()
