"""The Qwen3 backbone of a draft (DFLASH §2): attention with per-head norms and rotary embedding, and SwiGLU.

Letters: R rows, P positions, H hidden size, D head_dim, Hkv KV heads, G heads that share one of them.
"""

import torch
from torch import nn

from pipeline.draft.attention import Attend
from pipeline.draft.config import DraftConfig
from pipeline.draft.fused import RMSNorm, swiglu
from pipeline.draft.matmul import Linear

Rotation = tuple[torch.Tensor, torch.Tensor]


def inverse_frequencies(config: DraftConfig, device: torch.device) -> torch.Tensor:
    """RoPE's frequencies, fp32 [D/2]: theta^(-2i/D). Computed where used, so no cast of the draft can touch them."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    return 1.0 / config.rope_theta**exponents


def rotation(config: DraftConfig, position_ids: torch.Tensor) -> Rotation:
    """Cosine and sine for `position_ids` [R, P], fp32 [R, 1, P, D/2]: one angle a pair, for all heads."""
    angles = position_ids.unsqueeze(-1).float() * inverse_frequencies(config, position_ids.device)
    return angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)


def rotate(x: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Rotary embedding in Qwen3's convention, which pairs channel i with channel i + D/2: x [..., D]."""
    cos, sin = (part.to(x.dtype) for part in by)
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) · up(x))."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down_proj(swiglu(self.gate_proj(x), self.up_proj(x)))
        return down


class Attention(nn.Module):
    """Projections, per-head norms and rotary embedding; who sees whom is the caller's `Attend`."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        size, bias = config.head_dim, config.attention_bias
        self.kv_heads, self.head_dim = config.num_key_value_heads, size
        self.q_proj = Linear(config.hidden_size, config.num_attention_heads * size, bias=bias)
        self.k_proj = Linear(config.hidden_size, config.num_key_value_heads * size, bias=bias)
        self.v_proj = Linear(config.hidden_size, config.num_key_value_heads * size, bias=bias)
        self.o_proj = Linear(config.num_attention_heads * size, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(size, config.rms_norm_eps)
        self.k_norm = RMSNorm(size, config.rms_norm_eps)

    def keys_values(self, x: torch.Tensor, by: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """Of context or block rows x [R, P, H] at the positions of `by`: two of [R, Hkv, P, D]."""
        key, value = (proj(x).unflatten(-1, (self.kv_heads, self.head_dim)).transpose(1, 2) for proj in (self.k_proj, self.v_proj))
        return rotate(self.k_norm(key), by).to(value.dtype), value

    def forward(self, x: torch.Tensor, by: Rotation, attend: Attend) -> torch.Tensor:
        key, value = self.keys_values(x, by)
        query = self.q_proj(x).unflatten(-1, (self.kv_heads, -1, self.head_dim)).transpose(1, 2)
        cos, sin = by
        query = rotate(self.q_norm(query), (cos.unsqueeze(3), sin.unsqueeze(3))).to(value.dtype)
        mixed: torch.Tensor = self.o_proj(attend(query, key, value).transpose(1, 2).flatten(2))
        return mixed
