"""A draft's `config.json`, as servers read it (DFLASH §7): written, and read again, ours or a published one."""

import logging
from collections.abc import Mapping
from typing import Any

from pipeline.config.draft import VARIANT_FIELDS
from pipeline.draft.config import FULL, ROPE_THETA, SLIDING, DraftConfig, rope_theta_of
from pipeline.draft.kimi_config import ACTIVATION, LatentShape, is_kimi
from pipeline.draft.variants import VARIANTS, Variant
from pipeline.errors import DraftError

REQUIRED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    *("num_target_layers", "target_layer_ids", "block_size", "mask_token_id"),
)
# What z-lab's class reads from `dflash_config`, or else from the top level.
SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
EITHER = (*REQUIRED, *SCALES, *(name for names in VARIANT_FIELDS.values() for name in names))
# Qwen3's own value of `max_window_layers`, where a config leaves it out.
MAX_WINDOW_LAYERS = 28

log = logging.getLogger(__name__)


def to_json(config: DraftConfig) -> dict[str, Any]:
    """The exported `config.json`, without the dtype."""
    variant = VARIANTS[config.variant]
    return {
        "architectures": [variant.architecture],
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": config.vocab_size,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "tie_word_embeddings": False,
        "is_causal": variant.causal,
        "num_target_layers": config.num_target_layers,
        "block_size": config.block_size,
        "dflash_config": _dflash_json(config),
        **(_qwen3_json(config) if config.latent is None else config.latent.to_json(config.num_hidden_layers)),
    }


def _dflash_json(config: DraftConfig) -> dict[str, Any]:
    variant = VARIANTS[config.variant]
    where_it_differs = {
        "input_embedding_scale": config.input_embedding_scale if config.input_embedding_scale != 1.0 else None,
        "output_multiplier": config.output_multiplier if config.output_multiplier != 1.0 else None,
        "final_logit_softcapping": config.final_logit_softcapping,
        "causal": variant.causal or None,
        "projector_type": variant.projector_type,
    }
    return {
        "target_layer_ids": list(config.target_layer_ids),
        "mask_token_id": config.mask_token_id,
        "block_size": config.block_size,
        **{key: value for key, value in where_it_differs.items() if value is not None},
        **{name: getattr(config, name) for name in VARIANT_FIELDS.get(config.variant, ())},
    }


def _qwen3_json(config: DraftConfig) -> dict[str, Any]:
    """The keys of the Qwen3 backbone alone. RoPE's base stands in both places where a transformers version looks for it."""
    return {
        "model_type": "qwen3",
        "hidden_act": "silu",
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "attention_bias": config.attention_bias,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "use_sliding_window": SLIDING in config.layer_types,
        "max_window_layers": config.num_hidden_layers,
    }


def from_json(values: Mapping[str, Any]) -> DraftConfig:
    """The draft of a `config.json`, ours or a published one. Raises `DraftError` for what this package would compute otherwise."""
    dflash = values.get("dflash_config") or {}
    merged = {**values, **dflash}
    if missing := [name for name in REQUIRED if merged.get(name) is None]:
        raise DraftError(f"the draft's config.json lacks {', '.join(missing)}")
    for name in EITHER:
        if None not in (values.get(name), dflash.get(name)) and values[name] != dflash[name]:
            raise DraftError(
                f"the draft's config.json has {name} {values[name]} at the top level and {dflash[name]} in dflash_config, and servers "
                "differ in which they read; leave the wrong one out"
            )
    variant = _variant(values, dflash)
    latent = LatentShape.from_json(values) if is_kimi(values) else None
    activation = "silu" if latent is None else ACTIVATION
    if values.get("hidden_act", activation) != activation:
        raise DraftError(f"the draft's config.json has hidden_act {values['hidden_act']!r}, expected {activation!r}")
    layers, heads = int(values["num_hidden_layers"]), int(values["num_attention_heads"])
    types = _layer_types(values, layers)
    if SLIDING in types and not VARIANTS[variant].causal and values.get("is_causal") is None and latent is None:
        log.warning(
            "the draft's config.json has sliding layers and no is_causal: slots of a block are taken to see one another, as in training; "
            "z-lab's class lets those of sliding layers see only slots before them. Add is_causal to say which"
        )
    return DraftConfig(
        hidden_size=int(values["hidden_size"]),
        intermediate_size=int(values["intermediate_size"]),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=int(values.get("num_key_value_heads") or heads),
        head_dim=int(values.get("head_dim") or int(values["hidden_size"]) // max(1, heads)),
        vocab_size=int(values["vocab_size"]),
        num_target_layers=int(merged["num_target_layers"]),
        target_layer_ids=tuple(int(layer) for layer in merged["target_layer_ids"]),
        block_size=int(merged["block_size"]),
        mask_token_id=int(merged["mask_token_id"]),
        layer_types=types,
        sliding_window=int(values["sliding_window"]) if SLIDING in types and values.get("sliding_window") else None,
        rms_norm_eps=float(values.get("rms_norm_eps", 1e-6 if latent is None else 1e-5)),
        rope_theta=_plain_rope_theta(values) if latent is None else ROPE_THETA,
        attention_bias=bool(values.get("attention_bias", False)) if latent is None else False,
        max_position_embeddings=int(values.get("max_position_embeddings", 32768)),
        # Like z-lab's class: at the top level too, and a soft cap of 0 is none.
        input_embedding_scale=float(merged.get("input_embedding_scale") or 1.0),
        output_multiplier=float(merged.get("output_multiplier") or 1.0),
        final_logit_softcapping=float(merged.get("final_logit_softcapping") or 0.0) or None,
        latent=latent,
        variant=variant,
        **_options(variant, merged),
    )


def _layer_types(values: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Of every layer, as transformers reads a Qwen3 config: where no types are named, those from `max_window_layers` on are sliding."""
    given, uses = values.get("layer_types"), values.get("use_sliding_window")
    if given is None:
        first = int(values.get("max_window_layers", MAX_WINDOW_LAYERS)) if uses and values.get("sliding_window") else layers
        return tuple(FULL if layer < first else SLIDING for layer in range(layers))
    if SLIDING in given and uses is False:
        raise DraftError(
            "the draft's config.json has use_sliding_window false, and layer_types names sliding_attention: servers differ in which of "
            "them they go by; make both say the same"
        )
    return tuple(given)


def _options(variant: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """A variant's own fields, as far as `values` have them."""
    given = {name: values[name] for name in VARIANT_FIELDS.get(variant, ()) if values.get(name) is not None}
    return {name: value if isinstance(value, bool) else int(value) for name, value in given.items()}


def _variant(values: Mapping[str, Any], dflash: Mapping[str, Any]) -> str:
    """Which variant a `config.json` tells of, by the keys that servers go by."""
    projector, known = dflash.get("projector_type"), [variant.projector_type for variant in VARIANTS.values()]
    if projector not in known:
        built = " or ".join(repr(name) for name in known if name)
        raise DraftError(f"the draft's config.json has projector_type {projector!r}; only {built} is built")
    found = [name for name, variant in VARIANTS.items() if _tells_of(name, variant, values, dflash)]
    if len(found) > 1:
        raise DraftError(f"the draft's config.json has keys of {' and of '.join(found)}; expected those of one variant")
    return found[0] if found else "dflash"


def _tells_of(name: str, variant: Variant, values: Mapping[str, Any], dflash: Mapping[str, Any]) -> bool:
    """Whether anything in a `config.json` is of this variant, and not of a plain draft."""
    plain, own = VARIANTS["dflash"], variant.architecture.removesuffix("DraftModel")
    return (
        (variant.architecture != plain.architecture and any(own in given for given in values.get("architectures") or ()))
        or (variant.projector_type is not None and dflash.get("projector_type") == variant.projector_type)
        # Either sign will do: the reference's own export says is_causal false of every draft.
        or (variant.causal and bool(values.get("is_causal") or dflash.get("causal")))
        # A field that is null, false or 0 says that it is not used.
        or any(dflash.get(field) for field in VARIANT_FIELDS.get(name, ()))
    )


def _plain_rope_theta(values: Mapping[str, Any]) -> float:
    """RoPE's base of a draft. Any scaling is refused: a key that is read and not applied would change what is served."""
    for where in ("rope_parameters", "rope_scaling"):
        whole = values.get(where) or {}
        for rope in (whole, *(whole.get(layers) or {} for layers in (FULL, SLIDING))):
            kind = rope.get("rope_type", rope.get("type", "default"))
            if kind != "default":
                raise DraftError(f"the draft's config.json has {where} of type {kind!r}; only 'default' (plain RoPE) is built")
            if rope.get("partial_rotary_factor", 1.0) != 1.0:
                raise DraftError(f"the draft's config.json has a partial_rotary_factor in {where}; only whole heads are turned")
    if values.get("partial_rotary_factor") not in (None, 1.0):
        raise DraftError("the draft's config.json has a partial_rotary_factor; only whole heads are turned")
    return rope_theta_of(values)
