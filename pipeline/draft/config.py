"""The draft's geometry: what of it is asked for, what is the target's, and what cannot work."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.config.draft import VARIANT_FIELDS, DraftSection
from pipeline.draft.kimi_config import LatentShape
from pipeline.errors import DraftError
from pipeline.records import TargetBundle

FULL, SLIDING = "full_attention", "sliding_attention"
ROPE_THETA = 10000.0


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """Everything that decides the draft's shape and what it computes. Sizes as in a Qwen3 config; `vocab_size` is V, the
    rows of the target's embedding; `sliding_window` in tokens, for the layers whose type is `sliding_attention`. With `latent` the
    backbone is Kimi K3's, to which `head_dim`, RoPE and `attention_bias` mean nothing. Fields of a `variant` (as `DraftSection` explains
    them; the defaults are those of published drafts that leave them out) mean nothing to the others."""

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
    variant: str = "dflash"
    conv_kernel_size: int = 2
    conv_group_size: int = 16
    selector_rank: int = 256
    selector_top_k: int = 16
    emb_dim: int = 256
    gru_hidden_dim: int = 1024
    pure_draft_prefix_len: int = 0
    shift_label: bool = False

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
        own = {name: getattr(section, name) for name in VARIANT_FIELDS.get(section.variant, ())}
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
            layer_types=section.layer_types or (SLIDING if section.sliding_window else FULL,) * section.num_hidden_layers,
            sliding_window=section.sliding_window,
            rms_norm_eps=section.rms_norm_eps or float(target.get("rms_norm_eps") or 1e-6),
            # Only the base is the target's: the draft turns with plain RoPE, and its config says so.
            rope_theta=section.rope_theta or rope_theta_of(target) if latent is None else ROPE_THETA,
            attention_bias=section.attention_bias,
            max_position_embeddings=int(target.get("max_position_embeddings") or 32768),
            input_embedding_scale=bundle.input_embedding_scale,
            output_multiplier=bundle.output_multiplier,
            final_logit_softcapping=bundle.final_logit_softcapping,
            latent=latent,
            variant=section.variant,
            **{name: value for name, value in own.items() if value is not None},
        )

    @property
    def label_shift(self) -> int:
        """Slot k predicts the token at anchor + k + shift; slots below 1 - shift predict nothing."""
        return int(self.variant == "domino" and self.shift_label)

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


def _check_backbone(section: DraftSection) -> None:
    """Raise `DraftError` for a field of the other backbone: it would be without effect."""
    if section.backbone == "kimi_k3":
        strange = [name for name in ("head_dim", "rope_theta", "attention_bias", "sliding_window", "layer_types") if getattr(section, name)]
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
        if config.variant != "dflash":
            faults.append(f"variant {config.variant} on a Kimi K3 backbone, which no server reads")
    elif config.head_dim % 2:
        faults.append(f"head_dim {config.head_dim} is odd, and RoPE turns pairs")
    if config.final_logit_softcapping is not None and not config.final_logit_softcapping > 0:
        faults.append(f"final_logit_softcapping is {config.final_logit_softcapping}, expected more than 0")
    if config.block_size < 2:
        faults.append(f"block_size {config.block_size} leaves no slot to predict; use at least 2")
    if len(config.layer_types) != config.num_hidden_layers or not set(config.layer_types) <= {FULL, SLIDING}:
        faults.append(f"layer_types {list(config.layer_types)} must name {config.num_hidden_layers} layers, each {FULL} or {SLIDING}")
    if SLIDING in config.layer_types and (config.sliding_window is None or config.sliding_window < config.block_size):
        faults.append(f"sliding_window {config.sliding_window} is smaller than a block of {config.block_size}")
    if SLIDING not in config.layer_types and config.sliding_window is not None:
        faults.append(f"sliding_window is {config.sliding_window}, and layer_types names no {SLIDING}")
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


def rope_theta_of(values: Mapping[str, Any]) -> float:
    """RoPE's base: in `rope_parameters` (transformers 5; by layer type in some targets), else at the top level (4)."""
    nested = values.get("rope_parameters") or {}
    nested = nested.get(FULL, nested)
    theta = nested.get("rope_theta") or values.get("rope_theta")
    if theta is None:
        raise DraftError("no rope_theta in rope_parameters or at the top level of the config; set model.draft.rope_theta")
    return float(theta)
