"""Speculative decoding at a temperature: texts distributed exactly as the target's own, in fewer forwards of the target (DFLASH §5).

Standard rejection sampling: a drafted token x, drawn from q, is kept with probability min(1, p(x) / q(x)), where p is what the target
would have drawn it from; in the place of the first that is not kept comes one drawn from (p - q)+, and behind a whole block one drawn
from p. Whatever q is, each text is then distributed as under p alone. Letters: T texts, D drafted tokens, V rows of the target's embedding.
"""

import hashlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from pipeline.decode.speculative import Decoded, check_request, check_rewindable, features_of, layers_of
from pipeline.draft.model import Draft
from pipeline.draft.serving import Serving
from pipeline.draft.slots import Proposal, embed_blocks
from pipeline.records import TargetBundle


@dataclass(frozen=True, slots=True)
class Request:
    """`texts` answers to one prompt, each of at most `max_new_tokens` and ended by a stop token, which it includes."""

    prompt_ids: Sequence[int]
    max_new_tokens: int
    stop_ids: Collection[int] = ()
    texts: int = 1


@dataclass(frozen=True, slots=True)
class Sampler:
    """How tokens are drawn of logits: at `temperature` > 0, of the fewest likeliest tokens that hold `top_p` of the probability."""

    temperature: float
    top_p: float
    generator: torch.Generator

    def distribution(self, logits: torch.Tensor) -> torch.Tensor:
        """fp32 [..., V], from logits [..., V]: 0 for a token that is never drawn."""
        rows = torch.softmax(logits.float() / self.temperature, dim=-1)
        if self.top_p == 1.0:
            return rows
        ordered, tokens = rows.sort(dim=-1, descending=True, stable=True)
        # A token is kept when those before it hold too little, so the likeliest always is.
        kept = ordered * (ordered.cumsum(dim=-1) - ordered < self.top_p)
        rows = torch.zeros_like(rows).scatter(-1, tokens, kept)
        return rows / rows.sum(dim=-1, keepdim=True)

    def draw(self, rows: torch.Tensor) -> torch.Tensor:
        """A token of each distribution, int64 [...], from rows [..., V]."""
        return torch.multinomial(rows.flatten(0, -2), 1, generator=self.generator).view(rows.shape[:-1])

    def pick(self, logits: torch.Tensor) -> torch.Tensor:
        """A token drawn of each row of logits [..., V]: how a draft makes its proposal."""
        return self.draw(self.distribution(logits))

    def drafted_from(self, proposal: Proposal, vocab_size: int) -> torch.Tensor:
        """q [T, D, V]: what `pick` drew the proposal's tokens from."""
        rows = self.distribution(proposal.logits)
        if proposal.candidates is None:
            return rows
        return rows.new_zeros(*rows.shape[:-1], vocab_size).scatter(-1, proposal.candidates, rows)


def sampler_for(temperature: float, top_p: float, seed: int, name: str, device: torch.device) -> Sampler:
    """A sampler that is a function of `seed` and of the `name` of what is decoded, and so of no order and no number of ranks."""
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return Sampler(temperature, top_p, torch.Generator(device).manual_seed(int.from_bytes(digest) >> 1))


# Of p and q, each [T, V], what is drawn from in the place of a token that was drawn from q and not kept.
Residual = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
# Given drafted tokens [T, D], q [T, D, V], p [T, D + 1, V] and a sampler: how many are kept, and what follows them, int64 [T] each.
Verify = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Sampler], tuple[torch.Tensor, torch.Tensor]]


def residual(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """(p - q)+, normalised."""
    left = (p - q).clamp(min=0)
    total = left.sum(dim=-1, keepdim=True)
    # Where nothing is left p equals q and every token is kept, but for rounding.
    return torch.where(total > 0, left / total, p)


def verify(
    tokens: torch.Tensor, q: torch.Tensor, p: torch.Tensor, sampler: Sampler, replaced_from: Residual = residual
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rejection sampling of drafted tokens: a `Verify`."""
    count, text = tokens.shape[1], torch.arange(len(tokens), device=tokens.device)
    at = tokens.unsqueeze(-1)
    p_drafted, q_drafted = p[:, :count].gather(-1, at).squeeze(-1), q.gather(-1, at).squeeze(-1)
    chance = torch.rand(tokens.shape, generator=sampler.generator, device=tokens.device)
    kept = (chance * q_drafted < p_drafted).long().cumprod(dim=1).sum(dim=1)
    own = p[text, kept]
    other = replaced_from(own, q[text, kept.clamp(max=count - 1)])
    return kept, sampler.draw(torch.where((kept == count).unsqueeze(-1), own, other))


@torch.inference_mode()
def speculative_sample(
    target_model: Any, draft: Draft, bundle: TargetBundle, request: Request, sampler: Sampler, verify: Verify = verify
) -> list[Decoded]:
    """Independent answers to one prompt, side by side; `target_model`, `bundle` and what is raised as for `speculative_decode`.

    Texts come to differ in length. The target's cache then holds what all of them have, and a text that is ahead is fed its newest tokens
    again: every token stands at its own position, and the target masks nothing but the future.
    """
    check_request(request.prompt_ids, request.max_new_tokens)
    check_rewindable(target_model)
    config, device, prompt = draft.config, target_model.device, len(request.prompt_ids)
    texts = _Texts(request, config.block_size, device)
    cache, serving = DynamicCache(), Serving(draft, prompt + request.max_new_tokens + config.block_size, request.texts)
    slots = embed_blocks(torch.full((request.texts, config.block_size), config.mask_token_id, device=device), bundle)
    with features_of(layers_of(target_model, draft)) as take:
        logits = target_model(input_ids=texts.ids[:, :prompt], cache=cache, use_cache=True, logits_to_keep=1).logits
        texts.commit(sampler.pick(logits[:, -1:]))
        serving.extend(take())
        while texts.any_open:
            anchors = texts.last()
            slots[:, :1] = embed_blocks(anchors, bundle)
            proposal = draft.variant.propose(draft, serving.hidden(slots), anchors.squeeze(1), bundle, sampler.pick)
            first, end = texts.put(proposal.tokens)
            logits = target_model(input_ids=texts.ids[:, first:end], cache=cache, use_cache=True).logits
            p = sampler.distribution(texts.behind(logits, first, proposal.tokens.shape[1] + 1))
            kept, following = verify(proposal.tokens, sampler.drafted_from(proposal, p.shape[-1]), p, sampler)
            texts.commit(_followed(proposal.tokens, kept, following), kept)
            serving.extend(take(), first, (texts.lengths - 1).tolist())
            cache.crop(texts.shortest - 1 - end)
    return texts.decoded()


def _followed(tokens: torch.Tensor, kept: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """`tokens` [T, D] with `following` [T] behind the first `kept` [T] of each text: [T, D + 1]."""
    return torch.cat((tokens, following.unsqueeze(1)), dim=1).scatter(1, kept.unsqueeze(1), following.unsqueeze(1))


class _Texts:
    """The ids of all texts, one a row, with room behind each; how long each is, prompt included; and which are still open."""

    def __init__(self, request: Request, block_size: int, device: torch.device) -> None:
        self._prompt, self._limit = len(request.prompt_ids), len(request.prompt_ids) + request.max_new_tokens
        self.ids = torch.zeros(request.texts, self._limit + block_size + 1, dtype=torch.int64, device=device)
        self.ids[:, : self._prompt] = torch.tensor(list(request.prompt_ids), device=device)
        self.lengths = torch.full((request.texts,), self._prompt, device=device)
        self._open = torch.ones_like(self.lengths, dtype=torch.bool)
        self._stops = torch.tensor(sorted(request.stop_ids), dtype=torch.int64, device=device)
        self._steps: list[torch.Tensor] = []

    @property
    def any_open(self) -> bool:
        return bool(self._open.any())

    @property
    def shortest(self) -> int:
        """The length of the shortest open text, or of the shortest at all."""
        return int((self.lengths[self._open] if self.any_open else self.lengths).min())

    def last(self) -> torch.Tensor:
        """The newest token of each text, int64 [T, 1]."""
        return self.ids.gather(1, self.lengths.unsqueeze(1) - 1)

    def put(self, tokens: torch.Tensor) -> tuple[int, int]:
        """Write drafted tokens [T, D] behind every text; the half-open range of positions that the target must be fed."""
        self._write(tokens)
        return self.shortest - 1, int(self.lengths[self._open].max()) + tokens.shape[1]

    def behind(self, logits: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """Of logits [T, F, V] at positions from `first` on, those at each text's newest token and the next, [T, count, V]. What a text gets
        that is not open is of no meaning."""
        at = (self.lengths - 1 - first).clamp(0, logits.shape[1] - count).unsqueeze(1) + torch.arange(count, device=logits.device)
        return logits.gather(1, at.unsqueeze(-1).expand(-1, -1, logits.shape[-1]))

    def commit(self, tokens: torch.Tensor, kept: torch.Tensor | None = None) -> None:
        """Add to each open text the first `kept` + 1 (default: the first) of tokens [T, n], cut at its limit and behind a stop token."""
        count = torch.ones_like(self.lengths) if kept is None else kept + 1
        self._write(tokens)
        order = torch.arange(tokens.shape[1], device=tokens.device)
        first_stop = torch.where(torch.isin(tokens, self._stops), order, tokens.shape[1]).amin(dim=1)
        step = torch.minimum(count, self._limit - self.lengths).minimum(first_stop + 1) * self._open
        self.lengths = self.lengths + step
        self._open = self._open & (self.lengths < self._limit) & (step <= first_stop)
        self._steps.append(step)

    def decoded(self) -> list[Decoded]:
        rows = zip(self.ids.tolist(), self.lengths.tolist(), torch.stack(self._steps).T.tolist(), strict=True)
        return [Decoded(ids[self._prompt : length], [step for step in steps[1:] if step]) for ids, length, steps in rows]

    def _write(self, tokens: torch.Tensor) -> None:
        self.ids.scatter_(1, self.lengths.unsqueeze(1) + torch.arange(tokens.shape[1], device=tokens.device), tokens)
