"""The DFlash draft: a few Qwen3-style layers that read the target's hidden states (DFLASH §2).

Own modules rather than a library's layers, so that keys come from two streams without tricks, and so that parameter names, dtypes
and what is computed are in view. Letters: R rows, S tokens, N blocks, B slots, C context rows, H hidden size, D head_dim.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import nn

from pipeline.draft.attend import attend
from pipeline.draft.attention import plan_tiles
from pipeline.draft.config import DraftConfig
from pipeline.draft.fused import rms_norm, swiglu
from pipeline.draft.groups import Place, places, sum_over
from pipeline.draft.matmul import Linear
from pipeline.records import DraftBatch

__all__ = ["Draft", "DraftConfig"]

Rotation = tuple[torch.Tensor, torch.Tensor]
# Given query [R, Hkv, Q, G, D] and the block's own key and value [R, Hkv, Q, D], attention over context and block.
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
# By layer, keys and values of context rows, each [R, Hkv, C, D].
Context = list[tuple[torch.Tensor, torch.Tensor]]
# Given hidden states [r, n, B, H] of some rows and blocks, and which those are, a sum over them, fp32 [].
Score = Callable[[torch.Tensor, Place], torch.Tensor]


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


def block_positions(batch: DraftBatch, block_size: int) -> torch.Tensor:
    """Positions of the slots inside their document, int64 [R, N, B]: the anchor's and on, past the document's end too."""
    slots = torch.arange(block_size, device=batch.anchors.device)
    return batch.position_ids.gather(1, batch.anchors).unsqueeze(-1) + slots


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


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


class DraftLayer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: torch.Tensor, by: Rotation, attend: Attend) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), by, attend)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Draft(nn.Module):
    """Parameters are named as servers expect (DFLASH §7). New weights: normal of 0.02, norms 1, biases 0, from torch's generator."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.fc = Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def context(self, features: torch.Tensor, position_ids: torch.Tensor) -> Context:
        """Keys and values, by layer, of the tokens with `features` [R, C, L·H] at `position_ids` [R, C]: each [R, Hkv, C, D]."""
        if not torch.is_autocast_enabled(features.device.type):
            features = features.to(self.fc.weight.dtype)
        hidden = self.hidden_norm(self.fc(features))
        by = rotation(self.config, position_ids)
        return [layer.self_attn.keys_values(hidden, by) for layer in self._layers()]

    def blocks(self, embeddings: torch.Tensor, position_ids: torch.Tensor, attend: Callable[[int], Attend]) -> torch.Tensor:
        """Block rows [R, P, H] through all layers and the final norm; `attend(i)` is the attention of layer i."""
        # The residual stream has the dtype of the weights, also where autocast multiplies in another.
        hidden, by = embeddings.to(self.fc.weight.dtype), rotation(self.config, position_ids)
        for index, layer in enumerate(self._layers()):
            hidden = layer(hidden, by, attend(index))
        out: torch.Tensor = self.norm(hidden)
        return out

    def forward(self, batch: DraftBatch, block_embeddings: torch.Tensor, score: Score | None = None) -> torch.Tensor:
        """Hidden states of all slots, [R, N, B, H], for `block_embeddings` [R, N, B, H].

        With `score`, which makes a sum [] of the hidden states of some rows and blocks, the sum of it over all of them, group by
        group: the way to train, since hidden states and activations of the whole batch then never exist at once.
        """
        config, (rows, count) = self.config, batch.anchors.shape
        seen = last_context_row(batch)
        context = self.context(batch.features[:, :seen], batch.position_ids[:, :seen])
        if score is None:
            return self._hidden(batch, block_embeddings, context)
        scorer = score

        def score_group(place: Place, shared: Sequence[torch.Tensor]) -> torch.Tensor:
            rows_of = [tensor[place[0]] for tensor in shared]
            pairs = list(zip(rows_of[::2], rows_of[1::2], strict=True))
            return scorer(self._hidden(_part(batch, place), block_embeddings[place], pairs), place)

        flat = [tensor for pair in context for tensor in pair]
        return sum_over(places(rows, count, config.block_size, batch.anchors.device), score_group, flat, list(self.parameters()))

    def _hidden(self, batch: DraftBatch, block_embeddings: torch.Tensor, context: Context) -> torch.Tensor:
        """[R, N, B, H], given the context's keys and values."""
        config, (rows, count) = self.config, batch.anchors.shape
        windows = {config.window(layer) for layer in range(config.num_hidden_layers)}
        plan = plan_tiles(batch, config.block_size, windows, config.num_attention_heads // config.num_key_value_heads)
        row = torch.arange(rows, device=plan.order.device).unsqueeze(1)
        at = block_positions(batch, config.block_size)[row, plan.order]

        def attention(index: int) -> Attend:
            return lambda query, key, value: attend(query, key, value, context[index], plan.tiles[config.window(index)])

        ordered = block_embeddings[row, plan.order].flatten(1, 2)
        hidden = self.blocks(ordered, at.flatten(1), attention)
        restored: torch.Tensor = hidden.view(rows, count, config.block_size, -1)[row, plan.order.argsort(dim=1)]
        return restored

    def _layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]


def last_context_row(batch: DraftBatch) -> int:
    """How many context rows any block can see. At least one, unseen if need be: all parameters then get a gradient, zero or not."""
    return max(1, int(torch.where(batch.block_valid, batch.anchors, 0).max()))


def _part(batch: DraftBatch, place: Place) -> DraftBatch:
    """Some rows and blocks of a batch. Features and final states are left whole, blocks read them through the context; and so are ids."""
    by_row = {name: getattr(batch, name)[place[0]] for name in ("input_ids", "loss_mask", "position_ids")}
    by_block = {name: getattr(batch, name)[place] for name in ("anchors", "document_start", "document_end", "block_valid")}
    return replace(batch, **by_row, **by_block)
