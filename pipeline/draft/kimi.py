"""The Kimi K3 backbone of a draft (DFLASH §6): dense latent attention without positions, and SiTU in the MLP.

Called as the Qwen3 backbone's two modules are, and all around them is the same. What differs: keys and values of a head are
expanded from one small latent a token; all heads share one further slice of the key; nothing is rotated and heads are not normed; a gate
made of the layer's input scales what was attended to; and the MLP's activation is bounded. Letters as in `qwen3`, without grouped heads.

Without positions nothing tells the mask tokens of a block apart: slots 1..B-1 have the same hidden state, in the reference as well, and
the draft proposes one token for all of them.
"""

import torch
from torch import nn

from pipeline.draft.attention import Attend
from pipeline.draft.config import DraftConfig
from pipeline.draft.fused import RMSNorm, situ
from pipeline.draft.kimi_config import LatentShape
from pipeline.draft.matmul import Linear
from pipeline.draft.qwen3 import Rotation

# Of the latents' norms, whatever `rms_norm_eps` says: K3's own code leaves it at its default.
LATENT_EPS = 1e-6


class BoundedMLP(nn.Module):
    """down(situ(gate(x)) · bound(up(x)))."""

    def __init__(self, config: DraftConfig, shape: LatentShape) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.beta, self.bound = shape.activation_situ_beta, shape.activation_situ_linear_beta

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down_proj(situ(self.gate_proj(x), self.up_proj(x), self.beta, self.bound))
        return down


class LatentAttention(nn.Module):
    """Projections and latent norms; who sees whom is the caller's `Attend`, which scales by (qk_nope + qk_rope)^-½."""

    def __init__(self, config: DraftConfig, shape: LatentShape) -> None:
        super().__init__()
        hidden, heads, query_size = config.hidden_size, config.num_attention_heads, config.key_size
        self.shape, self.heads = shape, heads
        if shape.q_lora_rank is None:
            self.q_proj = Linear(hidden, heads * query_size, bias=False)
        else:
            self.q_a_proj = Linear(hidden, shape.q_lora_rank, bias=False)
            self.q_a_layernorm = RMSNorm(shape.q_lora_rank, LATENT_EPS)
            self.q_b_proj = Linear(shape.q_lora_rank, heads * query_size, bias=False)
        self.kv_a_proj_with_mqa = Linear(hidden, shape.kv_lora_rank + shape.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(shape.kv_lora_rank, LATENT_EPS)
        self.kv_b_proj = Linear(shape.kv_lora_rank, heads * (shape.qk_nope_head_dim + shape.v_head_dim), bias=False)
        self.o_proj = Linear(heads * shape.v_head_dim, hidden, bias=False)
        if shape.mla_use_output_gate:
            self.g_proj = Linear(hidden, heads * shape.v_head_dim, bias=False)

    def keys_values(self, x: torch.Tensor, by: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Of context or block rows x [R, P, H]: keys [R, heads, P, qk_nope + qk_rope], values [R, heads, P, v_head_dim]."""
        latent, shared = self.kv_a_proj_with_mqa(x).split((self.shape.kv_lora_rank, self.shape.qk_rope_head_dim), dim=-1)
        expanded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        own, value = expanded.split((self.shape.qk_nope_head_dim, self.shape.v_head_dim), dim=-1)
        return torch.cat((own, shared.unsqueeze(1).expand(-1, self.heads, -1, -1)), dim=-1), value

    def forward(self, x: torch.Tensor, by: Rotation, attend: Attend) -> torch.Tensor:
        key, value = self.keys_values(x, by)
        flat = self.q_proj(x) if self.shape.q_lora_rank is None else self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query = flat.unflatten(-1, (self.heads, 1, -1)).transpose(1, 2)
        attended = attend(query, key, value).transpose(1, 2).flatten(2)
        if self.shape.mla_use_output_gate:
            attended = attended * self.g_proj(x).sigmoid()
        mixed: torch.Tensor = self.o_proj(attended)
        return mixed
