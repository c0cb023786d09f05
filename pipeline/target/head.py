"""What training needs of the target besides hidden states: embedding, head, final norm, and how the target scales them."""

import logging
import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from pipeline.errors import TargetError
from pipeline.records import TargetBundle
from pipeline.target.load import DTYPES, Target

log = logging.getLogger(__name__)


def bundle_of(target: Target) -> TargetBundle:
    """The bundle on the CPU, in the target's dtype, whole also under tensor parallelism (every rank of the group must call this).

    A tied head is the embedding's own tensor. Scales come from the config, and are compared with a real forward: `TargetError` when a
    target does something to its embeddings or logits that a factor (and a soft cap) cannot express and the config does not name.
    """
    weight = target.model.get_input_embeddings().weight
    embedding = whole(weight)
    output = target.model.get_output_embeddings()
    if output is None or getattr(output, "weight", None) is None:
        raise TargetError(f"the target ({type(target.model).__name__}) has no head matrix, so a draft cannot decode with it.")
    if output.weight.dtype not in DTYPES.values():
        raise TargetError(f"the target's head is quantised ({output.weight.dtype}); expected one of {', '.join(DTYPES)}, as drafts use it.")
    head = embedding if output.weight is weight else whole(output.weight)
    if getattr(output, "bias", None) is not None:
        raise TargetError("the target's head has a bias, which a DFlash draft cannot apply.")
    return TargetBundle(
        embedding=embedding,
        head=head,
        final_norm=_norm_scale(target),
        config=target.config,
        input_embedding_scale=_embedding_scale(target),
        output_multiplier=_output_multiplier(target, head),
        final_logit_softcapping=target.config.get("final_logit_softcapping") or None,
    ).check()


def whole(weight: torch.Tensor) -> torch.Tensor:
    """`weight` on the CPU, gathered when it is a DTensor (a collective: all ranks of its mesh take part)."""
    tensor = weight.full_tensor() if isinstance(weight, DTensor) else weight
    return tensor.detach().cpu()


def _output_multiplier(target: Target, head: torch.Tensor) -> float:
    """Factor on the logits before any soft cap. The config names a number, not what is done with it (of `logits_scaling`, Granite divides
    by it and HyperCLOVA X multiplies), so each is compared with the logits of a real forward."""
    seen: list[torch.Tensor] = []
    ids = torch.arange(min(8, target.vocab_size), device=target.device)[None]
    handle = target.norm.register_forward_hook(lambda module, args, output: seen.append(output))
    try:
        with torch.no_grad():
            logits = whole(target.model(input_ids=ids, use_cache=False).logits)[0].float()
    finally:
        handle.remove()
    plain = (whole(seen[-1])[0].to(head.dtype) @ head.T).float()
    cap, config = target.config.get("final_logit_softcapping"), target.config
    named = [config.get(name) for name in ("logits_scaling", "logit_scale", "lm_head_multiplier")]
    if base := config.get("dim_model_base"):  # MiniCPM, of which the final state is divided
        named.append(base / target.hidden_size)
    known = [1.0, *(factor for name in named if name for factor in (float(name), 1.0 / float(name)))]

    unmasked = ~(logits <= -1e4)  # some targets mask rows of the head that no token has; what is not a number is none of those

    def error(factor: float) -> float:
        expected = plain * factor
        expected = cap * torch.tanh(expected / cap) if cap else expected
        return float(torch.where(unmasked, (logits - expected).abs(), 0.0).max())

    factor = min(known, key=error)
    if not error(factor) <= 2e-2 * float(torch.where(unmasked, logits.abs(), 0.0).max()):
        raise TargetError(
            f"the logits of the target ({type(target.model).__name__}) are not a multiple of its final norm's output times its head"
            f"{f', capped at {cap}' if cap else ''} (the nearest factor known is {factor:.6g}), so a draft cannot decode with its head."
        )
    return factor


def _embedding_scale(target: Target) -> float:
    """What stands between the embedding's rows and the first layer's input: measured, and made exact by the config where it can be."""
    seen: list[torch.Tensor] = []

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    ids = torch.arange(min(64, target.vocab_size), device=target.device)[None]
    handle = target.decoder.layers[0].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with torch.no_grad():
            target.decoder(input_ids=ids, use_cache=False)
    finally:
        handle.remove()
    rows, entering = whole(target.model.get_input_embeddings().weight)[ids[0].cpu()].float(), seen[0][0].float().cpu()
    measured = float((rows * entering).sum() / rows.square().sum())
    root = math.sqrt(target.hidden_size)
    # Gemma rounds sqrt(H) in the model's dtype before it multiplies.
    named = [target.config.get(name) for name in ("embedding_multiplier", "scale_emb")]
    known = [1.0, root, float(torch.tensor(root, dtype=target.dtype)), *(float(factor) for factor in named if factor)]
    scale = min(known, key=lambda k: abs(k - measured))
    if not torch.allclose(entering, rows * scale, rtol=2e-2, atol=2e-3 * float(entering.abs().max())):
        raise TargetError(
            f"the first layer of the target ({type(target.decoder).__name__}) does not receive a multiple of its embeddings (the nearest "
            f"factor known is {scale:.6g}, measured {measured:.6g}), so a draft cannot be fed with them."
        )
    return scale


def _norm_scale(target: Target) -> torch.Tensor:
    """[H], the factor that the final norm applies: its weight, or 1 + weight where the target stores it so (Gemma), or 1 (OLMo)."""
    stored: Any = getattr(target.norm, "weight", None)
    weight = torch.ones(target.hidden_size, dtype=target.dtype) if stored is None else whole(stored)
    probe = torch.linspace(-1.0, 2.0, target.hidden_size, dtype=torch.float64)
    with torch.no_grad():
        out = target.norm(probe.to(target.device, target.dtype)[None]).double().cpu()[0]
    unit = probe / probe.square().mean().sqrt()
    errors = {shift: float((out - unit * (weight.double() + shift)).abs().max()) for shift in (0.0, 1.0)}
    shift = min(errors, key=lambda shift: errors[shift])
    if errors[shift] > 0.05 * float(out.abs().max()):  # such as a layer norm, which takes the mean away
        log.warning("the final norm %s is not an RMS norm; drafts that use final hidden states would need it", type(target.norm).__name__)
    return weight if shift == 0.0 else (weight.float() + shift).to(torch.float32)
