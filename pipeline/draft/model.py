"""The DFlash draft: a few layers, Qwen3's or Kimi K3's, that read the target's hidden states (DFLASH §2).

Own modules rather than a library's layers, so that keys come from two streams without tricks, and so that parameter names, dtypes
and what is computed are in view. Letters: R rows, S tokens, N blocks, B slots, C context rows, H hidden size, D and Dv
channels of a head's keys and values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from pipeline.draft.attend import attend, plan_attention
from pipeline.draft.attention import Attend
from pipeline.draft.config import DraftConfig
from pipeline.draft.fused import RMSNorm
from pipeline.draft.groups import Place, places, sum_over
from pipeline.draft.layer import DraftLayer
from pipeline.draft.matmul import Linear
from pipeline.draft.qwen3 import Attention, JoinedAttention, rotation
from pipeline.draft.variants import VARIANTS
from pipeline.errors import DraftError
from pipeline.records import DraftBatch

__all__ = ["Draft", "DraftConfig"]

# By layer, keys and values of context rows, [R, Hkv, C, D] and [R, Hkv, C, Dv].
Context = list[tuple[torch.Tensor, torch.Tensor]]
# Given hidden states [r, n, B, H] of some rows and blocks, and which those are, sums over them, fp32 [K].
Score = Callable[[torch.Tensor, Place], torch.Tensor]


def block_positions(batch: DraftBatch, block_size: int) -> torch.Tensor:
    """Positions of the slots inside their document, int64 [R, N, B]: the anchor's and on, past the document's end too."""
    slots = torch.arange(block_size, device=batch.anchors.device)
    return batch.position_ids.gather(1, batch.anchors).unsqueeze(-1) + slots


class Draft(nn.Module):
    """Parameters are named as servers expect (DFLASH §7). New weights: normal of 0.02, norms 1, biases 0, from torch's generator;
    those of a variant as its own file says."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config, self.variant = config, VARIANTS[config.variant]
        if faults := self.variant.faults(config):
            raise DraftError(f"the draft's configuration cannot work: {'; '.join(faults)}")
        self.fc = Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.layers = nn.ModuleList(self.variant.layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        self.variant.extend(self, config)

    def context(self, features: torch.Tensor, position_ids: torch.Tensor) -> Context:
        """Keys and values, by layer, of the tokens with `features` [R, C, L·H] at `position_ids` [R, C]."""
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

        With `score`, which makes sums [K] of the hidden states of some rows and blocks, their sums [K] over all of them, group by
        group: the way to train, since hidden states and activations of the whole batch then never exist at once.
        """
        seen = last_context_row(batch)
        context = self.context(batch.features[:, :seen], batch.position_ids[:, :seen])
        context = [(key.contiguous(), value.contiguous()) for key, value in context]  # once, for all tiles of all groups
        if score is None:
            return self._hidden(batch, block_embeddings, context)
        scorer = score

        def score_group(place: Place, shared: Sequence[torch.Tensor]) -> torch.Tensor:
            rows_of = [tensor[place[0]] for tensor in shared]
            pairs = list(zip(rows_of[::2], rows_of[1::2], strict=True))
            return scorer(self._hidden(_part(batch, place), block_embeddings[place], pairs), place)

        flat = [tensor for pair in context for tensor in pair]
        return sum_over(places(batch.block_valid, self.config.block_size), score_group, flat, list(self.parameters()))

    def _hidden(self, batch: DraftBatch, block_embeddings: torch.Tensor, context: Context) -> torch.Tensor:
        """[R, N, B, H], given the context's keys and values."""
        config, (rows, count) = self.config, batch.anchors.shape
        windows = {config.window(layer) for layer in range(config.num_hidden_layers)}
        group = config.num_attention_heads // config.num_key_value_heads
        order, seen = plan_attention(batch, config.block_size, windows, group, self.variant.causal, context[0][0].shape[2])
        row = torch.arange(rows, device=order.device).unsqueeze(1)
        at = block_positions(batch, config.block_size)[row, order]

        def attention(index: int) -> Attend:
            return lambda query, key, value: attend(query, key, value, context[index], seen[config.window(index)])

        ordered = block_embeddings[row, order].flatten(1, 2)
        hidden = self.blocks(ordered, at.flatten(1), attention)
        restored: torch.Tensor = hidden.view(rows, count, config.block_size, -1)[row, order.argsort(dim=1)]
        return restored

    def _layers(self) -> list[DraftLayer]:
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]


def new_in_variant(config: DraftConfig) -> set[str]:
    """Names of the parameters that a draft has because of its variant: those a plain DFlash draft of the same geometry lacks."""
    with torch.device("meta"):
        ours, plain = (Draft(replace(config, variant=variant)) for variant in (config.variant, "dflash"))
    return set(ours.state_dict()) - set(plain.state_dict())


def draft_with(config: DraftConfig, weights: Mapping[str, torch.Tensor]) -> Draft:
    """A draft whose parameters are `weights`, in their memory and dtype, and take no gradient."""
    with torch.device("meta"):
        draft = Draft(config)
    draft.load_state_dict(weights, assign=True)
    return draft.requires_grad_(False)


def joined(draft: Draft) -> Draft:
    """`draft` to decode with, a block at a time: the same parameters, but for copies of those of its attention that are joined. What is
    changed in `draft` afterwards, the copies do not follow."""
    served = draft_with(draft.config, draft.state_dict())
    for layer in served._layers():
        if isinstance(layer.self_attn, Attention):
            layer.self_attn = JoinedAttention(layer.self_attn)
    return served


def last_context_row(batch: DraftBatch) -> int:
    """How many context rows any block can see. At least one, unseen if need be: all parameters then get a gradient, zero or not."""
    return max(1, int(torch.where(batch.block_valid, batch.anchors, 0).max()))


def _part(batch: DraftBatch, place: Place) -> DraftBatch:
    """Some rows and blocks of a batch. Features and final states are left whole, blocks read them through the context; and so are ids."""
    by_row = {name: getattr(batch, name)[place[0]] for name in ("input_ids", "loss_mask", "position_ids")}
    by_block = {name: getattr(batch, name)[place] for name in ("anchors", "document_start", "document_end", "block_valid")}
    return replace(batch, **by_row, **by_block)
