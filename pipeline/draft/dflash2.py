"""DFlash 2 (DFLASH §6): a short convolution around every sublayer, and a selector that walks a path through each slot's candidates.

Where both start they change nothing: the convolution passes its input through, and the selector adds 0 to every logit.
"""

from typing import cast

import torch
import torch.nn.functional as F
from torch import nn

from pipeline.draft.attention import Attend
from pipeline.draft.config import DraftConfig
from pipeline.draft.head import head_logits, head_losses_and_candidates
from pipeline.draft.layer import DraftLayer
from pipeline.draft.matmul import Linear
from pipeline.draft.qwen3 import Rotation
from pipeline.draft.slots import Pick, Proposal, Scored, Slots
from pipeline.records import TargetBundle


class Convolution(nn.Module):
    """Two causal convolutions over a block's slots, before a sublayer and after it, with kernels that depend on the sublayer's input.

    conv(x)_t = Σ_o (base[o] + correction_t[o]) ⊙ x_{t-o}; what lies before the block's first slot is zero.
    """

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.block_size, self.taps, self.groups = config.block_size, config.conv_kernel_size, config.hidden_size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, config.hidden_size))
        self.kernel_projection = Linear(config.hidden_size, 2 * self.taps * self.groups, bias=False)

    def start(self) -> None:
        nn.init.zeros_(self.kernel_projection.weight)
        nn.init.zeros_(self.base_kernel)
        nn.init.ones_(self.base_kernel[:, 0])

    def corrections(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the convolutions before and after, each [R, P, taps, groups], from the normed input of the sublayer [R, P, H]."""
        before, after = self.kernel_projection(x).unflatten(-1, (2, self.taps, self.groups)).unbind(dim=-3)
        return before, after

    def forward(self, x: torch.Tensor, correction: torch.Tensor, which: int) -> torch.Tensor:
        """[R, P, H], P a whole number of blocks; `which`: 0 before the sublayer, 1 after it."""
        shape = (x.shape[0], -1, self.block_size, self.groups, x.shape[-1] // self.groups)  # [R, N, B, groups, channels]
        blocks, base = x.view(shape), self.base_kernel[which].to(x.dtype).view(self.taps, self.groups, -1)
        correction = correction.reshape(*shape[:3], self.taps, self.groups, 1)
        out = (base[0] + correction[..., 0, :, :]) * blocks
        for offset in range(1, min(self.taps, self.block_size)):
            late = (base[offset] + correction[:, :, offset:, offset]) * blocks[:, :, :-offset]
            out = out + F.pad(late, (0, 0, 0, 0, offset, 0))
        return out.view(x.shape)


class ConvolvedLayer(DraftLayer):
    """norm → convolution → sublayer → convolution → add."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__(config)
        self.attention_conv = Convolution(config)
        self.mlp_conv = Convolution(config)

    def forward(self, x: torch.Tensor, by: Rotation, attend: Attend) -> torch.Tensor:
        normed = self.input_layernorm(x)
        before, after = self.attention_conv.corrections(normed)
        x = x + self.attention_conv(self.self_attn(self.attention_conv(normed, before, 0), by, attend), after, 1)
        normed = self.post_attention_layernorm(x)
        before, after = self.mlp_conv.corrections(normed)
        out: torch.Tensor = x + self.mlp_conv(self.mlp(self.mlp_conv(normed, before, 0)), after, 1)
        return out


class Selector(nn.Module):
    """Scores of a slot's candidates b behind a predecessor p: logit(b) + ⟨pred[p] ⊙ (W h), succ[b]⟩."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.hidden_projection = Linear(config.hidden_size, config.selector_rank, bias=False)

    def start(self) -> None:
        nn.init.normal_(self.predecessor_codebook, std=0.02)
        nn.init.zeros_(self.successor_codebook)

    def forward(self, gate: torch.Tensor, logits: torch.Tensor, candidates: torch.Tensor, predecessor: torch.Tensor) -> torch.Tensor:
        """fp32 [..., K], from `gate` = W h [..., r], candidates' logits and tokens [..., K], and predecessors int64 [...]."""
        pair = F.embedding(predecessor, self.predecessor_codebook) * gate
        return logits + (F.embedding(candidates, self.successor_codebook) @ pair.unsqueeze(-1)).squeeze(-1).float()


def faults(config: DraftConfig) -> list[str]:
    found = [f"{name} is {getattr(config, name)}, expected at least 1" for name in _SIZES if getattr(config, name) < 1]
    if config.conv_group_size > 0 and config.hidden_size % config.conv_group_size:
        found.append(f"conv_group_size {config.conv_group_size} does not divide the hidden size {config.hidden_size}")
    if not 1 <= config.selector_top_k <= config.vocab_size:
        found.append(f"selector_top_k is {config.selector_top_k}, expected 1..{config.vocab_size}")
    return found


_SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank")


def extend(draft: nn.Module, config: DraftConfig) -> None:
    """Add the selector to a draft of `ConvolvedLayer`s, and set what is new to where it changes nothing."""
    draft.candidate_selector = Selector(config)
    nn.init.normal_(draft.candidate_selector.hidden_projection.weight, std=0.02)
    for module in draft.modules():
        if isinstance(module, Convolution | Selector):
            module.start()


def score(draft: nn.Module, bundle: TargetBundle, slots: Slots, base_share: float) -> Scored:
    """Σ w·loss of the backbone's logits, and Σ w·CE over the candidates, behind the true predecessor, of slots whose true token is one."""
    selector = cast(Selector, draft.candidate_selector)
    (losses, best, wanted), logits, candidates = head_losses_and_candidates(slots.hidden, slots.loss, bundle, selector.top_k)
    weight = slots.weigh(losses.detach(), slice(None))
    predecessor = slots.tokens[slots.block, slots.slot - 1]
    scores = selector(selector.hidden_projection(slots.hidden), logits, candidates, predecessor)
    among = candidates == slots.tokens[slots.block, slots.slot].unsqueeze(1)
    hit = among.any(dim=1)
    chosen = candidates.gather(1, scores.argmax(dim=1, keepdim=True)).squeeze(1)
    selection = F.cross_entropy(scores, among.long().argmax(dim=1), reduction="none")
    kept = {
        "weight": weight,
        "weight_of_hit": weight * hit,
        "hit": hit,
        "correct": chosen == wanted,
        "base_correct": best == wanted,
    }
    return Scored(torch.stack((torch.dot(losses, weight), torch.dot(selection, kept["weight_of_hit"]))), kept)


def propose(draft: nn.Module, hidden: torch.Tensor, anchor: torch.Tensor, bundle: TargetBundle, pick: Pick) -> Proposal:
    """Walk the candidates of `hidden` [T, B, H] from the anchors' tokens [T] on."""
    selector = cast(Selector, draft.candidate_selector)
    logits, candidates = head_logits(hidden.to(bundle.head.dtype), bundle.head, bundle)[:, 1:].topk(selector.top_k, dim=-1)
    gates, token, path, scores = selector.hidden_projection(hidden[:, 1:]), anchor, [], []
    for gate, unary, tokens in zip(gates.unbind(1), logits.unbind(1), candidates.unbind(1), strict=True):
        scores.append(selector(gate, unary, tokens, token))
        token = tokens.gather(1, pick(scores[-1]).unsqueeze(1)).squeeze(1)
        path.append(token)
    return Proposal(torch.stack(path, dim=1), torch.stack(scores, dim=1), candidates)
