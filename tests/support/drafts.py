"""Small drafts, batches with everything that is allowed in them, and the draft's forward one slot at a time."""

import math

import numpy as np
import torch

from pipeline.draft.config import DraftConfig
from pipeline.draft.kimi_config import LatentShape
from pipeline.draft.model import Draft
from pipeline.records import DraftBatch

FULL, SLIDING = "full_attention", "sliding_attention"


def small_config(**changes: object) -> DraftConfig:
    """Two layers, two heads that share one KV head, blocks of three slots."""
    values: dict[str, object] = {
        "hidden_size": 12,
        "intermediate_size": 20,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": 30,
        "num_target_layers": 8,
        "target_layer_ids": (1, 3),
        "block_size": 3,
        "mask_token_id": 29,
        "layer_types": (FULL, FULL),
    }
    return DraftConfig(**{**values, **changes})  # type: ignore[arg-type]


def kimi_config(**changes: object) -> DraftConfig:
    """The same with Kimi K3's backbone: keys of 6 channels, values of 5; `shape` changes its sizes."""
    shape: dict[str, object] = {"kv_lora_rank": 7, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5, "q_lora_rank": 6}
    latent = LatentShape(**{**shape, **changes.pop("shape", {})})  # type: ignore[arg-type, dict-item]
    return small_config(**{"num_key_value_heads": 2, "latent": latent, **changes})


def lively_draft(config: DraftConfig, seed: int = 0) -> Draft:
    """A draft whose weights are large enough that every part of its input matters, norms and biases included."""
    draft = Draft(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim == 2 else 0.3
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, scale, generator=generator)
    return draft


def any_batch(seed: int, config: DraftConfig, rows: int = 2, tokens: int = 13, blocks: int = 5, packed: bool = False) -> DraftBatch:
    """Rows of one document or several, padded at the end; anchors in any order, some near or over their document's end; some blocks
    are padding, with any anchor. Padding blocks claim the whole row as their document."""
    rng = np.random.default_rng(seed)
    fields = {name: np.zeros((rows, blocks), dtype=np.int64) for name in ("anchors", "start", "end")}
    positions = np.zeros((rows, tokens), dtype=np.int64)
    valid = rng.random((rows, blocks)) < 0.8
    for row in range(rows):
        used = int(rng.integers(max(3, tokens // 2), tokens + 1))
        cuts = sorted(rng.choice(np.arange(1, used), size=min(2, used - 1), replace=False).tolist()) if packed else []
        edges = [0, *cuts, used]
        for start, end in zip(edges, edges[1:], strict=False):
            positions[row, start:end] = np.arange(end - start)
        for block in range(blocks):
            document = int(rng.integers(len(edges) - 1))
            start, end = edges[document], edges[document + 1]
            anchor = int(rng.integers(start, end)) if valid[row, block] else int(rng.integers(tokens))
            fields["anchors"][row, block] = anchor
            fields["start"][row, block], fields["end"][row, block] = (start, end) if valid[row, block] else (0, tokens)
    generator = torch.Generator().manual_seed(seed)
    width = len(config.target_layer_ids) * config.hidden_size
    return DraftBatch(
        sample_ids=tuple(f"row {row}" for row in range(rows)),
        input_ids=torch.randint(0, config.vocab_size - 1, (rows, tokens), generator=generator),
        loss_mask=torch.rand(rows, tokens, generator=generator) < 0.7,
        features=torch.randn(rows, tokens, width, generator=generator),
        position_ids=torch.from_numpy(positions),
        anchors=torch.from_numpy(fields["anchors"]),
        document_start=torch.from_numpy(fields["start"]),
        document_end=torch.from_numpy(fields["end"]),
        block_valid=torch.from_numpy(valid),
    ).check()


def slow_forward(draft: Draft, batch: DraftBatch, embeddings: torch.Tensor) -> torch.Tensor:
    """The draft by DFLASH §2, slot by slot and key by key in float64; [R, N, B, H]."""
    config, weights = draft.config, {name: tensor.double() for name, tensor in draft.state_dict().items()}
    out = torch.zeros(embeddings.shape, dtype=torch.float64)
    for row in range(batch.anchors.shape[0]):
        for block in range(batch.anchors.shape[1]):
            out[row, block] = _slow_block(config, weights, batch, (row, block), embeddings[row, block].double())
    return out


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x / math.sqrt(float((x * x).mean()) + eps) * weight


def _turn(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    """Channel i and channel i + D/2 are one complex number, turned by position · theta^(-2i/D)."""
    half = len(x) // 2
    pairs = torch.complex(x[:half], x[half:])
    angles = torch.tensor([position * theta ** (-2 * i / len(x)) for i in range(half)], dtype=torch.float64)
    turned = pairs * torch.polar(torch.ones(half, dtype=torch.float64), angles)
    return torch.cat((turned.real, turned.imag))


def _slow_block(
    config: DraftConfig, weights: dict[str, torch.Tensor], batch: DraftBatch, where: tuple[int, int], x: torch.Tensor
) -> torch.Tensor:
    row = where[0]
    anchor, start = int(batch.anchors[where]), int(batch.document_start[where])
    seen = range(start, anchor) if bool(batch.block_valid[where]) else range(0)
    base = int(batch.position_ids[row, anchor])
    context = {
        j: _norm(weights["fc.weight"] @ batch.features[row, j].double(), weights["hidden_norm.weight"], config.rms_norm_eps) for j in seen
    }
    for layer in range(config.num_hidden_layers):
        own = {name.removeprefix(f"layers.{layer}."): tensor for name, tensor in weights.items() if name.startswith(f"layers.{layer}.")}
        window = config.sliding_window if config.layer_types[layer] == SLIDING else None
        normed = [_norm(x[slot], own["input_layernorm.weight"], config.rms_norm_eps) for slot in range(config.block_size)]
        for slot in range(config.block_size):
            keys = [(context[j], int(batch.position_ids[row, j])) for j in seen if window is None or anchor + slot - j < window]
            keys += [(normed[other], base + other) for other in range(config.block_size)]
            attention = _slow_attention if config.latent is None else _slow_latent_attention
            x[slot] = x[slot] + attention(config, own, normed[slot], base + slot, keys)
        for slot in range(config.block_size):
            y = _norm(x[slot], own["post_attention_layernorm.weight"], config.rms_norm_eps)
            x[slot] = x[slot] + _slow_mlp(config, own, y)
    return torch.stack([_norm(x[slot], weights["norm.weight"], config.rms_norm_eps) for slot in range(config.block_size)])


def _slow_attention(
    config: DraftConfig, own: dict[str, torch.Tensor], query_of: torch.Tensor, at: int, keys: list[tuple[torch.Tensor, int]]
) -> torch.Tensor:
    size, group = config.head_dim, config.num_attention_heads // config.num_key_value_heads

    def project(name: str, x: torch.Tensor, head: int) -> torch.Tensor:
        whole = own[f"self_attn.{name}.weight"] @ x + own.get(f"self_attn.{name}.bias", torch.zeros(1, dtype=torch.float64))
        return whole[head * size : (head + 1) * size]

    heads = []
    for head in range(config.num_attention_heads):
        query = _turn(_norm(project("q_proj", query_of, head), own["self_attn.q_norm.weight"], config.rms_norm_eps), at, config.rope_theta)
        scores, values = [], []
        for x, position in keys:
            key = _norm(project("k_proj", x, head // group), own["self_attn.k_norm.weight"], config.rms_norm_eps)
            scores.append(float(query @ _turn(key, position, config.rope_theta)) / math.sqrt(size))
            values.append(project("v_proj", x, head // group))
        heads.append(_mixed(scores, values))
    mixed: torch.Tensor = own["self_attn.o_proj.weight"] @ torch.cat(heads)
    return mixed + own.get("self_attn.o_proj.bias", torch.zeros(1, dtype=torch.float64))


def _mixed(scores: list[float], values: list[torch.Tensor]) -> torch.Tensor:
    shares = [math.exp(score - max(scores)) for score in scores]
    return torch.stack([share / sum(shares) * value for share, value in zip(shares, values, strict=True)]).sum(0)


def _slow_latent_attention(
    config: DraftConfig, own: dict[str, torch.Tensor], query_of: torch.Tensor, at: int, keys: list[tuple[torch.Tensor, int]]
) -> torch.Tensor:
    """Kimi K3's by DFLASH §6; positions play no part. The latents' norms have an epsilon of their own."""
    shape, weight = config.latent, {name.removeprefix("self_attn.").removesuffix(".weight"): tensor for name, tensor in own.items()}
    assert shape is not None
    size = shape.qk_nope_head_dim + shape.qk_rope_head_dim
    if shape.q_lora_rank is None:
        queries = weight["q_proj"] @ query_of
    else:
        queries = weight["q_b_proj"] @ _norm(weight["q_a_proj"] @ query_of, weight["q_a_layernorm"], 1e-6)
    heads = []
    for head in range(config.num_attention_heads):
        scores, values = [], []
        for x, _ in keys:
            down = weight["kv_a_proj_with_mqa"] @ x
            up = weight["kv_b_proj"] @ _norm(down[: shape.kv_lora_rank], weight["kv_a_layernorm"], 1e-6)
            first = head * (shape.qk_nope_head_dim + shape.v_head_dim)
            key = torch.cat((up[first : first + shape.qk_nope_head_dim], down[shape.kv_lora_rank :]))
            scores.append(float(queries[head * size : (head + 1) * size] @ key) / math.sqrt(size))
            values.append(up[first + shape.qk_nope_head_dim : first + shape.qk_nope_head_dim + shape.v_head_dim])
        heads.append(_mixed(scores, values))
    attended = torch.cat(heads)
    if shape.mla_use_output_gate:
        attended = attended / (1 + torch.exp(-weight["g_proj"] @ query_of))
    mixed: torch.Tensor = weight["o_proj"] @ attended
    return mixed


def _slow_mlp(config: DraftConfig, own: dict[str, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
    gate, up = own["mlp.gate_proj.weight"] @ y, own["mlp.up_proj.weight"] @ y
    linear = gate
    if config.latent is not None:
        beta, bound = config.latent.activation_situ_beta, config.latent.activation_situ_linear_beta
        linear = beta * torch.tanh(gate / beta)
        up = up if bound is None else bound * torch.tanh(up / bound)
    down: torch.Tensor = own["mlp.down_proj.weight"] @ (linear / (1 + torch.exp(-gate)) * up)
    return down
