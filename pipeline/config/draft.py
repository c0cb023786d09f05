"""The draft and its objective (DFLASH §3 and §6): their fields, and which of them go together."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline.config.section import LayerIds, NonNegative, Positive, Section

# Fields of a variant, which mean nothing to another one.
VARIANT_FIELDS = {
    "dflash2": ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
    "domino": ("emb_dim", "gru_hidden_dim", "pure_draft_prefix_len", "shift_label"),
}


class LatentSection(Section):
    """Sizes of latent attention, for `backbone: kimi_k3` only. Those that are not given are the target's, which then is a Kimi K3."""

    q_lora_rank: NonNegative | None = Field(None, description="rank of the queries' projection; 0: queries are projected in one step")
    kv_lora_rank: Positive | None = Field(None, description="rank of the latent that keys and values are expanded from")
    qk_nope_head_dim: Positive | None = Field(None, description="channels of a head's own part of its keys")
    qk_rope_head_dim: Positive | None = Field(None, description="channels of the keys that all heads share; they are not rotated")
    v_head_dim: Positive | None = Field(None, description="channels of a head's values")
    mla_use_output_gate: bool | None = Field(None, description="whether a gate scales what was attended to")


class DraftSection(Section):
    """The draft. Geometry that is not given is the target's own."""

    variant: Literal["dflash", "dflash2", "domino", "jetspec"] = Field("dflash", description="which member of the family")
    backbone: Literal["qwen3", "kimi_k3"] = Field("qwen3", description="whose attention and MLP its layers have")
    target_layer_ids: LayerIds | None = Field(None, description="target layers it reads, in this order; default: all of the cache's")
    num_hidden_layers: Positive = Field(5, description="depth")
    block_size: Annotated[int, Field(ge=2)] = Field(16, description="slots of a block, the anchor's included")
    mask_token_id: int | None = Field(None, description="id fed to slots without a token; must not occur in the corpus")
    num_attention_heads: Positive | None = Field(None, description="default: the target's")
    num_key_value_heads: Positive | None = Field(None, description="default: the target's")
    head_dim: Positive | None = Field(None, description="channels of a head; default: the target's")
    intermediate_size: Positive | None = Field(None, description="channels inside the MLP; default: the target's")
    rms_norm_eps: Annotated[float, Field(gt=0)] | None = Field(None, description="default: the target's")
    rope_theta: Annotated[float, Field(gt=0)] | None = Field(None, description="base of RoPE; default: the target's")
    attention_bias: bool = Field(False, description="biases in the projections of attention")
    sliding_window: Positive | None = Field(None, description="context rows a slot of a sliding layer can look back; default: all")
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] | None = Field(
        None, description="of every layer; default: all sliding with a sliding_window, all full without"
    )
    conv_kernel_size: Positive | None = Field(None, description="dflash2: taps of the convolution, in slots; default 2")
    conv_group_size: Positive | None = Field(None, description="dflash2: channels that share one correction; default 16")
    selector_rank: Positive | None = Field(None, description="dflash2: width of the selector's codebooks; default 256")
    selector_top_k: Positive | None = Field(None, description="dflash2: candidates of a slot; default 16")
    emb_dim: Positive | None = Field(None, description="domino: width between the correction's two projections; default 256")
    gru_hidden_dim: Positive | None = Field(None, description="domino: size of the GRU's state; default 1024")
    pure_draft_prefix_len: NonNegative | None = Field(None, description="domino: first predicting slots left uncorrected; default 0")
    shift_label: bool | None = Field(None, description="domino: slot k predicts the token at anchor + 1 + k; default false")
    mla: LatentSection = LatentSection()

    @property
    def label_shift(self) -> int:
        """Slot k predicts the token at anchor + k + shift."""
        return int(self.variant == "domino" and bool(self.shift_label))

    @model_validator(mode="after")
    def _fields_of_the_variant(self) -> "DraftSection":
        strange = {
            name: variant
            for variant, names in VARIANT_FIELDS.items()
            for name in names
            if variant != self.variant and getattr(self, name) is not None
        }
        if strange:
            named = ", ".join(f"{name} (of {variant})" for name, variant in strange.items())
            raise ValueError(f"variant {self.variant} has no {named}; leave it out, or choose that variant")
        if self.backbone != "qwen3" and self.variant != "dflash":
            raise ValueError(
                f"variant {self.variant} on backbone {self.backbone}: no server reads it; use variant dflash, or backbone qwen3"
            )
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise ValueError(f"layer_types names {len(self.layer_types)} layers; num_hidden_layers is {self.num_hidden_layers}")
        return self


class ObjectiveSection(Section):
    """What is minimised (DFLASH §3)."""

    name: Literal["decay", "uniform", "dpace", "variable_prefix", "distill"] = Field(
        "decay",
        description="cross-entropy with slot weights exp(-(k-1)/gamma), with 1, or with those of D-PACE; behind visible prefixes; or the "
        "divergence from the target's distribution, for which a cache needs the final hidden state",
    )
    gamma: Annotated[float, Field(gt=0)] = Field(7.0, description="decay constant, in slots")
    weights: Literal["decay", "uniform"] | None = Field(
        None, description="slot weights of variable_prefix and distill; default: decay, but uniform for distill of jetspec"
    )
    dpace_alpha: Annotated[float, Field(ge=0, le=1)] = Field(0.5, description="dpace: share of 1 in smoothed probabilities")
    dpace_weights: Literal["dpace", "cumulative_confidence", "continuation_value"] = Field(
        "dpace", description="dpace: the whole weights, or one factor of them alone"
    )
    prefix_base: Annotated[float, Field(gt=0)] = Field(0.9, description="variable_prefix: a prefix of l slots is drawn with weight base^l")
    divergence: Literal["forward_kl", "reverse_kl", "total_variation"] = Field("forward_kl", description="distill: what is minimised")
    temperature: Annotated[float, Field(gt=0)] = Field(1.0, description="distill: of both distributions; the KLs are scaled by its square")
    selector_weight: Annotated[float, Field(ge=0)] = Field(1.0, description="dflash2: of the selector's loss, beside 1 for the base's")
    lambda_start: Annotated[float, Field(ge=0, le=1)] = Field(1.0, description="domino: share of the uncorrected loss at the first step")
    lambda_ratio: Annotated[float, Field(gt=0, le=1)] = Field(0.5, description="domino: part of training in which that share falls to 0")
    num_anchors: Positive = Field(512, description="most anchors drawn from one sample an epoch")
    anchor_fit: Literal["full", "partial"] = Field("full", description="whether a block must fit before the sample's end")

    @model_validator(mode="after")
    def _weights_of_the_name(self) -> "ObjectiveSection":
        if self.weights is not None and self.name not in ("variable_prefix", "distill", self.weights):
            raise ValueError(
                f"weights {self.weights} is without effect: objective {self.name} says itself what slots weigh; leave weights out"
            )
        return self

    @property
    def needs_final(self) -> bool:
        """Whether the target's final hidden states are needed, from which its distribution is recomputed."""
        return self.name == "distill"


REFUSED = {
    ("domino", "variable_prefix"): "the correction's GRU starts at the anchor, and no server starts it behind a visible prefix",
}
"""Pairs of variant and objective that are not trained, and why."""


def refused_pair(draft: DraftSection, objective: ObjectiveSection) -> str | None:
    """Why this variant is not trained with this objective; None when it can be."""
    reason = REFUSED.get((draft.variant, objective.name))
    return reason and f"objective {objective.name} with variant {draft.variant}: {reason}"
