"""One layer of the draft: attention and MLP of its backbone, with pre-norm residuals (DFLASH §2)."""

import torch
from torch import nn

from pipeline.draft.attention import Attend
from pipeline.draft.config import DraftConfig
from pipeline.draft.fused import RMSNorm
from pipeline.draft.kimi import BoundedMLP, LatentAttention
from pipeline.draft.qwen3 import MLP, Attention, JoinedAttention, Rotation


class DraftLayer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        latent = config.latent
        self.self_attn: Attention | LatentAttention | JoinedAttention
        self.self_attn = Attention(config) if latent is None else LatentAttention(config, latent)
        self.mlp = MLP(config) if latent is None else BoundedMLP(config, latent)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, by: Rotation, attend: Attend) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), by, attend)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out
