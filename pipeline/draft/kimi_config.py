"""Sizes of the Kimi K3 backbone, and the part of a draft's `config.json` that is K3's (DFLASH §6 and §7)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.config.schema import LatentSection
from pipeline.errors import DraftError

ARCHITECTURE, MODEL_TYPE, ACTIVATION = "KimiK3DFlashDraftModel", "kimi_linear", "situ"
REQUIRED = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True, slots=True)
class LatentShape:
    """Sizes of multi-head latent attention and the bounds of SiTU, named as K3 names them.

    Queries and keys have `qk_nope_head_dim` + `qk_rope_head_dim` channels a head (none is rotated), values `v_head_dim`. Without a
    `q_lora_rank` queries are projected in one step; without `activation_situ_linear_beta` the MLP's linear half has no bound.
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    mla_use_output_gate: bool = True
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float | None = 25.0

    @classmethod
    def build(cls, section: LatentSection, target: Mapping[str, Any]) -> "LatentShape":
        """What `section` gives, else what the target's text config says, which then is a K3's. Raises `DraftError` for what neither has."""
        given = {name: value for name, value in section.model_dump().items() if value is not None}
        values = {**target, **given}
        if missing := [name for name in REQUIRED if values.get(name) is None]:
            raise DraftError(
                f"backbone kimi_k3: the target's config (model_type {target.get('model_type')!r}) has no {', '.join(missing)}; "
                f"set {', '.join(f'model.draft.mla.{name}' for name in missing)}"
            )
        return cls.from_json({**values, "mla_use_nope": True})

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "LatentShape":
        """The part of a `config.json` that is K3's. Raises `DraftError` for a size that is missing and for rotated keys."""
        if missing := [name for name in REQUIRED if values.get(name) is None]:
            raise DraftError(f"the draft's config.json lacks {', '.join(missing)}")
        if not values.get("mla_use_nope", True):
            raise DraftError("the draft's config.json has mla_use_nope false; Kimi K3's latent attention rotates nothing")
        bound = values.get("activation_situ_linear_beta", 25.0)
        return cls(
            **{name: int(values[name]) for name in REQUIRED},
            q_lora_rank=int(values.get("q_lora_rank") or 0) or None,
            mla_use_output_gate=bool(values.get("mla_use_output_gate", True)),
            activation_situ_beta=float(values.get("activation_situ_beta", 4.0) or 1.0),  # null is 1, as in K3's own code
            activation_situ_linear_beta=None if bound is None else float(bound),
        )

    def to_json(self, num_layers: int) -> dict[str, Any]:
        """K3's keys of the exported `config.json`. What a K3 has and its draft does not build is switched off by name, since a reader
        that finds no key takes K3's own value."""
        return {
            "architectures": [ARCHITECTURE],
            "model_type": MODEL_TYPE,
            "hidden_act": ACTIVATION,
            **{name: getattr(self, name) for name in self.__slots__},
            "mla_use_nope": True,
            "linear_attn_config": {"kda_layers": [], "full_attn_layers": list(range(1, num_layers + 1))},
            "attn_res_block_size": None,
            "num_experts": None,
            "num_shared_experts": 0,
            "num_nextn_predict_layers": 0,
        }

    def faults(self, num_heads: int, num_kv_heads: int) -> list[str]:
        """What of the sizes cannot work."""
        found = [f"{name} is {getattr(self, name)}, expected at least 1" for name in REQUIRED if getattr(self, name) < 1]
        if self.q_lora_rank is not None and self.q_lora_rank < 1:
            found.append(f"q_lora_rank is {self.q_lora_rank}, expected at least 1, or none")
        if num_kv_heads != num_heads:
            found.append(f"{num_kv_heads} KV heads for {num_heads} heads: latent attention gives every head its own keys")
        if self.activation_situ_beta <= 0 or (self.activation_situ_linear_beta or 1.0) <= 0:
            found.append(f"SiTU's bounds {self.activation_situ_beta} and {self.activation_situ_linear_beta} must be positive")
        return found


def is_kimi(values: Mapping[str, Any]) -> bool:
    """Whether a `config.json` is of a draft with this backbone."""
    return ARCHITECTURE in (values.get("architectures") or ()) or values.get("model_type") == MODEL_TYPE
