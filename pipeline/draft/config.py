"""The draft's geometry, and its `config.json` as servers read it (DFLASH §7)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.config.schema import DraftSection
from pipeline.draft.kimi_config import ACTIVATION, LatentShape, is_kimi
from pipeline.errors import DraftError
from pipeline.records import TargetBundle

FULL, SLIDING = "full_attention", "sliding_attention"
ROPE_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Everything that decides the draft's shape and what it computes. Sizes as in a Qwen3 config; `vocab_size` is V, the
    rows of the target's embedding; `sliding_window` in tokens, for the layers whose type is `sliding_attention`. With `latent` the
    backbone is Kimi K3's, to which `head_dim`, RoPE and `attention_bias` mean nothing."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    rms_norm_eps: float = 1e-6
    rope_theta: float = ROPE_THETA
    attention_bias: bool = False
    max_position_embeddings: int = 32768
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    latent: LatentShape | None = None

    def __post_init__(self) -> None:
        faults = [*_geometry_faults(self), *_layer_faults(self)]
        if not 0 <= self.mask_token_id < self.vocab_size:
            faults.append(
                f"mask_token_id {self.mask_token_id} is not a row of the target's embedding (0..{self.vocab_size - 1}); choose a reserved "
                "token, or a row beyond the tokenizer's length"
            )
        if faults:
            raise DraftError("the draft's configuration cannot work: " + "; ".join(faults))

    @classmethod
    def build(
        cls, section: DraftSection, bundle: TargetBundle, layer_ids: tuple[int, ...], special_ids: Mapping[str, int | None]
    ) -> "DraftConfig":
        """The draft of `section` for the target of `bundle`; geometry that the section leaves out is the target's.

        `layer_ids` are the target layers it reads where the section names none. `special_ids` names the tokenizer's
        special tokens ("eos", "pad", …), none of which may be the mask token. Raises `DraftError`.
        """
        target, rows = bundle.config, bundle.embedding.shape[0]
        mask = section.mask_token_id
        if mask is None:
            raise DraftError(f"model.draft.mask_token_id is not set; name a token that occurs in no sample, of the embedding's {rows} rows")
        taken = [name for name, token in special_ids.items() if token == mask]
        if taken:
            raise DraftError(f"model.draft.mask_token_id {mask} is the tokenizer's {' and '.join(taken)} token; choose a reserved one")

        def geometry(name: str, *fallback: int) -> int:
            value = getattr(section, name) or target.get(name) or (fallback[0] if fallback else None)
            if value is None:
                raise DraftError(f"the target's config has no {name}; set model.draft.{name}")
            return int(value)

        _check_backbone(section)
        latent = LatentShape.build(section.mla, target) if section.backbone == "kimi_k3" else None
        heads = geometry("num_attention_heads")
        hidden_size = bundle.embedding.shape[1]
        return cls(
            hidden_size=hidden_size,
            intermediate_size=geometry("intermediate_size"),
            num_hidden_layers=section.num_hidden_layers,
            num_attention_heads=heads,
            num_key_value_heads=geometry("num_key_value_heads", heads) if latent is None else section.num_key_value_heads or heads,
            head_dim=geometry("head_dim", hidden_size // int(target.get("num_attention_heads") or heads)),
            vocab_size=rows,
            num_target_layers=int(target["num_hidden_layers"]),
            target_layer_ids=section.target_layer_ids or layer_ids,
            block_size=section.block_size,
            mask_token_id=mask,
            layer_types=(SLIDING if section.sliding_window else FULL,) * section.num_hidden_layers,
            sliding_window=section.sliding_window,
            rms_norm_eps=section.rms_norm_eps or float(target.get("rms_norm_eps") or 1e-6),
            # Only the base is the target's: the draft turns with plain RoPE, and its config says so.
            rope_theta=section.rope_theta or _rope_theta(target) if latent is None else ROPE_THETA,
            attention_bias=section.attention_bias,
            max_position_embeddings=int(target.get("max_position_embeddings") or 32768),
            input_embedding_scale=bundle.input_embedding_scale,
            output_multiplier=bundle.output_multiplier,
            final_logit_softcapping=bundle.final_logit_softcapping,
            latent=latent,
        )

    @property
    def key_size(self) -> int:
        """Channels of a head's queries and keys."""
        return self.head_dim if self.latent is None else self.latent.qk_nope_head_dim + self.latent.qk_rope_head_dim

    @property
    def value_size(self) -> int:
        """Channels of a head's values."""
        return self.head_dim if self.latent is None else self.latent.v_head_dim

    def window(self, layer: int) -> int | None:
        """Sliding window of draft layer `layer` in tokens; None when it sees the whole context."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def to_json(self) -> dict[str, Any]:
        """The exported `config.json`, without the dtype."""
        extras = {
            "input_embedding_scale": self.input_embedding_scale if self.input_embedding_scale != 1.0 else None,
            "output_multiplier": self.output_multiplier if self.output_multiplier != 1.0 else None,
            "final_logit_softcapping": self.final_logit_softcapping,
        }
        return {
            "architectures": ["DFlashDraftModel"],
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_hidden_layers,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "vocab_size": self.vocab_size,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "tie_word_embeddings": False,
            "is_causal": False,
            "num_target_layers": self.num_target_layers,
            "block_size": self.block_size,
            "dflash_config": {
                "target_layer_ids": list(self.target_layer_ids),
                "mask_token_id": self.mask_token_id,
                "block_size": self.block_size,
                **{key: value for key, value in extras.items() if value is not None},
            },
            **(self._qwen3_json() if self.latent is None else self.latent.to_json(self.num_hidden_layers)),
        }

    def _qwen3_json(self) -> dict[str, Any]:
        """The keys of the Qwen3 backbone alone. RoPE's base stands in both places where a transformers version looks for it."""
        return {
            "model_type": "qwen3",
            "hidden_act": "silu",
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "attention_bias": self.attention_bias,
            "layer_types": list(self.layer_types),
            "sliding_window": self.sliding_window,
            "use_sliding_window": SLIDING in self.layer_types,
            "max_window_layers": self.num_hidden_layers,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "DraftConfig":
        """The draft of a `config.json`, ours or a published one. Raises `DraftError` for what this package would compute otherwise."""
        dflash = values.get("dflash_config") or {}
        merged = {**values, **dflash}
        required = (
            *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
            *("num_target_layers", "target_layer_ids", "block_size", "mask_token_id"),
        )
        if missing := [name for name in required if merged.get(name) is None]:
            raise DraftError(f"the draft's config.json lacks {', '.join(missing)}")
        if values.get("is_causal") or dflash.get("causal"):
            raise DraftError("the draft's config.json asks for causal blocks; plain DFlash blocks see their slots in both directions")
        if dflash.get("projector_type") or "conv_kernel_size" in dflash:
            raise DraftError("the draft's config.json is of another variant than plain DFlash")
        latent = LatentShape.from_json(values) if is_kimi(values) else None
        activation = "silu" if latent is None else ACTIVATION
        if values.get("hidden_act", activation) != activation:
            raise DraftError(f"the draft's config.json has hidden_act {values['hidden_act']!r}, expected {activation!r}")
        layers, heads = int(values["num_hidden_layers"]), int(values["num_attention_heads"])
        given = values.get("layer_types")
        sliding = bool(values.get("sliding_window")) and (given is not None or values.get("use_sliding_window", False))
        types = tuple(given) if given is not None else (SLIDING if sliding else FULL,) * layers
        return cls(
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
            final_logit_softcapping=merged.get("final_logit_softcapping") or None,
            latent=latent,
        )


def _check_backbone(section: DraftSection) -> None:
    """Raise `DraftError` for a field of the other backbone: it would be without effect."""
    if section.backbone == "kimi_k3":
        strange = [name for name in ("head_dim", "rope_theta", "attention_bias", "sliding_window") if getattr(section, name)]
    else:
        strange = [f"mla.{name}" for name, value in section.mla.model_dump().items() if value is not None]
    if strange:
        raise DraftError(f"backbone {section.backbone} has no {', '.join(strange)}: leave out model.draft.{', model.draft.'.join(strange)}")


def _geometry_faults(config: DraftConfig) -> list[str]:
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    faults = [f"{name} is {getattr(config, name)}, expected at least 1" for name in sizes if getattr(config, name) < 1]
    if not faults and config.num_attention_heads % config.num_key_value_heads:
        faults.append(f"{config.num_key_value_heads} KV heads do not divide {config.num_attention_heads} heads")
    if config.latent is not None:
        faults += config.latent.faults(config.num_attention_heads, config.num_key_value_heads)
        if SLIDING in config.layer_types:
            faults.append("a sliding window, which a Kimi K3 draft's config cannot tell a server")
    elif config.head_dim % 2:
        faults.append(f"head_dim {config.head_dim} is odd, and RoPE turns pairs")
    if config.block_size < 2:
        faults.append(f"block_size {config.block_size} leaves no slot to predict; use at least 2")
    if len(config.layer_types) != config.num_hidden_layers or not set(config.layer_types) <= {FULL, SLIDING}:
        faults.append(f"layer_types {list(config.layer_types)} must name {config.num_hidden_layers} layers, each {FULL} or {SLIDING}")
    if SLIDING in config.layer_types and (config.sliding_window is None or config.sliding_window < config.block_size):
        faults.append(f"sliding_window {config.sliding_window} is smaller than a block of {config.block_size}")
    return faults


def _layer_faults(config: DraftConfig) -> list[str]:
    ids, count = config.target_layer_ids, config.num_target_layers
    faults = []
    if not ids or len(set(ids)) != len(ids):
        faults.append(f"target_layer_ids {list(ids)} must be at least one layer and name each once")
    # The output of the last layer is where engines disagree: before the final norm by a hook, after it in `hidden_states`.
    if any(not 0 <= layer < count - 1 for layer in ids):
        faults.append(f"target_layer_ids {list(ids)} must lie in 0..{count - 2} for a target of {count} layers")
    return faults


def _rope_theta(values: Mapping[str, Any]) -> float:
    """RoPE's base: in `rope_parameters` (transformers 5; by layer type in some targets), else at the top level (4)."""
    nested = values.get("rope_parameters") or {}
    nested = nested.get(FULL, nested)
    theta = nested.get("rope_theta") or values.get("rope_theta")
    if theta is None:
        raise DraftError("no rope_theta in rope_parameters or at the top level of the config; set model.draft.rope_theta")
    return float(theta)


def _plain_rope_theta(values: Mapping[str, Any]) -> float:
    """RoPE's base of a draft. Any scaling is refused: a key that is read and not applied would change what is served."""
    for where in ("rope_parameters", "rope_scaling"):
        rope = values.get(where) or {}
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise DraftError(f"the draft's config.json has {where} of type {kind!r}; only 'default' (plain RoPE) is built")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise DraftError(f"the draft's config.json has a partial_rotary_factor in {where}; only whole heads are turned")
    if values.get("partial_rotary_factor") not in (None, 1.0):
        raise DraftError("the draft's config.json has a partial_rotary_factor; only whole heads are turned")
    return _rope_theta(values)
