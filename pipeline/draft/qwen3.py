"""The Qwen3 backbone of a draft (DFLASH §2): attention with per-head norms and rotary embedding, and SwiGLU.

Letters: R rows, P positions, H hidden size, D head_dim, Hkv KV heads, G heads that share one of them.
"""

import torch
from torch import nn

from pipeline.draft.attention import Attend
from pipeline.draft.config import DraftConfig
from pipeline.draft.fused import RMSNorm, rms_norm, swiglu
from pipeline.draft.matmul import Linear, linear

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


class JoinedAttention(nn.Module):
    """An `Attention` whose projections are one product, and its norms and rotations one, of copies of its weights as they are now.

    For decoding, without gradients: of a block's few rows, to begin an operation takes as long as to do it.
    """

    def __init__(self, of: Attention) -> None:
        super().__init__()
        projections = (of.q_proj, of.k_proj, of.v_proj)
        self.kv_heads, self.head_dim = of.kv_heads, of.head_dim
        self.query_heads = of.q_proj.out_features // of.head_dim
        self.weight = torch.cat([proj.weight.detach() for proj in projections])
        self.bias = torch.cat([proj.bias.detach() for proj in projections]) if of.q_proj.bias is not None else None
        norms = (of.q_norm.weight.detach().expand(self.query_heads, -1), of.k_norm.weight.detach().expand(self.kv_heads, -1))
        self.norm, self.eps, self.o_proj = torch.cat(norms), of.q_norm.eps, of.o_proj

    def keys_values(self, x: torch.Tensor, by: Rotation) -> tuple[torch.Tensor, torch.Tensor]:
        """As of `Attention`."""
        key, value = self._heads(x, by, self.query_heads)
        return key.transpose(1, 2), value.transpose(1, 2)

    def forward(self, x: torch.Tensor, by: Rotation, attend: Attend) -> torch.Tensor:
        rotated, value = self._heads(x, by, 0)
        # Query heads stand KV head by KV head, so viewed as [R, P, Hkv, G, D] each KV head has its own.
        query = rotated[:, :, : self.query_heads].view(*x.shape[:-1], self.kv_heads, -1, self.head_dim)
        key = rotated[:, :, self.query_heads :]
        attended = attend(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
        mixed: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return mixed

    def _heads(self, x: torch.Tensor, by: Rotation, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Heads from the `first` on of rows x [R, P, H]: queries and keys [R, P, heads, D], and values [R, P, Hkv, D]."""
        start = first * self.head_dim
        flat = linear(x, self.weight[start:], None if self.bias is None else self.bias[start:])
        heads = flat.view(*x.shape[:-1], -1, self.head_dim)
        plain, value = heads[:, :, : -self.kv_heads], heads[:, :, -self.kv_heads :]
        cos, sin = by
        rotated = rotate(rms_norm(plain, self.norm[first:], self.eps), (cos.transpose(1, 2), sin.transpose(1, 2)))
        return rotated.to(value.dtype), value
