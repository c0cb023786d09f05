"""Two questions to a live target: does padding change real tokens, and is this the target that a cache was captured from?"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from pipeline.errors import CacheCorruptError, CacheMismatchError, HiddenStateError, TargetError
from pipeline.runtime.files import atomic_file
from pipeline.target.forward import run_layers
from pipeline.target.load import Target

PROBE_FILE = "probe.safetensors"  # beside the bundle in a cache's target folder
PROBE_TOKENS = 96
SHORT_TOKENS = 24

# Relative error of one token's state (L2): the median token, and the worst. Half precision and other kernels or numbers of ranks
# change the rounding, and a mixture of experts may then choose other experts for a few tokens; another target changes all of them.
TOLERANCES = {torch.float32: (1e-4, 1e-2), torch.bfloat16: (5e-2, 2.0), torch.float16: (2e-2, 2.0)}


def probe_ids(vocab_size: int) -> torch.Tensor:
    """int64 [PROBE_TOKENS], a fixed walk over the vocabulary."""
    return (torch.arange(PROBE_TOKENS, dtype=torch.int64) * 7919 + 17) % vocab_size


def probe_states(target: Target) -> dict[str, torch.Tensor]:
    """States of the probe by array name (`layer_9`, `final`): [PROBE_TOKENS, H] on the CPU, in the target's dtype.

    Raises `HiddenStateError` when they are not finite.
    """
    ids = probe_ids(target.vocab_size)[None].to(target.device)
    states = run_layers(target, ids, torch.ones_like(ids, dtype=torch.bool))
    names = [f"layer_{layer}" for layer in target.layer_ids] + (["final"] if target.final else [])
    for name, state in zip(names, states, strict=True):
        if not bool(state.isfinite().all()):
            raise HiddenStateError(
                f"the target's states of {name} are not finite for a fixed sample: its weights are broken, or {target.dtype} overflows. "
                f"Try model.target.dtype=bfloat16 or float32."
            )
    return {name: state[0].cpu() for name, state in zip(names, states, strict=True)}


def save_probe(folder: Path, states: Mapping[str, torch.Tensor]) -> None:
    with atomic_file(folder / PROBE_FILE) as stream:
        stream.write(save({name: state.contiguous() for name, state in states.items()}))


def add_to_probe(folder: Path, live: Mapping[str, torch.Tensor]) -> None:
    """Store those of `live` that the probe in `folder` does not have yet; what it has stays."""
    stored = load_file(folder / PROBE_FILE)
    if live.keys() - stored.keys():
        save_probe(folder, {**live, **stored})


def compare_probe(folder: Path, live: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Raise `CacheMismatchError` unless `live` (of `probe_states`) are the probe's states stored in `folder`, within rounding of `dtype`.

    Arrays that only one side has are left alone. Raises `CacheCorruptError` when the file is missing or damaged.
    """
    path = folder / PROBE_FILE
    try:
        stored = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CacheCorruptError(f"{path} cannot be read: {error}. Restore it from a copy of the cache.") from error
    for name in sorted(stored.keys() & live.keys()):
        if stored[name].shape != live[name].shape:
            raise CacheMismatchError(f"{path}: {name} is {[*stored[name].shape]}, the live target gives {[*live[name].shape]}.")
        median, worst = _errors(stored[name], live[name])
        allowed_median, allowed_worst = TOLERANCES[dtype]
        if not (median <= allowed_median and worst <= allowed_worst):
            raise CacheMismatchError(
                f"{path}: the live target's states of {name} differ from those stored by {median:.2g} (median token; allowed "
                f"{allowed_median:.2g}) and {worst:.2g} (worst; allowed {allowed_worst:.2g}). Files and settings agree, so look for "
                f"another version of transformers, another attention kernel, or broken weights on this device; or use another folder."
            )


def check_padding(target: Target) -> None:
    """Raise `TargetError` when a sample's states depend on the padding behind it or on its neighbours in the batch."""
    ids = probe_ids(target.vocab_size).repeat(2, 1)
    ids[1, SHORT_TOKENS:] = 0
    real = torch.ones_like(ids, dtype=torch.bool)
    real[1, SHORT_TOKENS:] = False
    batch = run_layers(target, ids.to(target.device), real.to(target.device))
    short = (ids[1:, :SHORT_TOKENS].to(target.device), real[1:, :SHORT_TOKENS].to(target.device))
    alone = run_layers(target, *short)
    allowed_median, allowed_worst = TOLERANCES[target.dtype]
    for layer, padded, exact in zip((*target.layer_ids, "final"), batch, alone, strict=False):
        median, worst = _errors(exact[0], padded[1, :SHORT_TOKENS])
        if not (median <= allowed_median and worst <= allowed_worst):
            raise TargetError(
                f"padding changes real tokens of this target: at layer {layer} a sample of {SHORT_TOKENS} tokens, alone and in a batch "
                f"padded to {PROBE_TOKENS}, differs by {median:.2g} (median token; allowed {allowed_median:.2g}) and {worst:.2g} (worst; "
                f"allowed {allowed_worst:.2g}). Its attention is not causal, or model.target.attn_implementation does not work here."
            )


def _errors(expected: torch.Tensor, found: torch.Tensor) -> tuple[float, float]:
    """Median and worst relative L2 error of a token; states [S, H]. Not a number where a state is not finite."""
    expected, found = expected.float(), found.float()
    errors = (expected - found).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-6)
    return float(errors.median()), float(errors.max())
