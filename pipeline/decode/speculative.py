"""Greedy decoding of one text: by the target alone, and by target and draft together (DFLASH §5)."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache

from pipeline.draft.model import Draft
from pipeline.draft.serving import Serving
from pipeline.draft.slots import embed_blocks, likeliest
from pipeline.errors import DraftError, TargetError
from pipeline.records import TargetBundle

# Kinds of layers whose cache is keys and values by position, and can be cut back.
REWINDABLE = {"full_attention", "sliding_attention", "chunked_attention"}


@dataclass(frozen=True, slots=True)
class Decoded:
    """`ids`: the new tokens, the stop token included. `step_lengths`: tokens that each step committed; the first token comes from the
    prefill and belongs to no step, so that they add up to len(ids) - 1."""

    ids: list[int]
    step_lengths: list[int]

    @property
    def acceptance_length(self) -> float:
        """Σ lengths / steps; nan without a step. Of several answers, add up lengths and steps instead."""
        return sum(self.step_lengths) / len(self.step_lengths) if self.step_lengths else float("nan")


@torch.inference_mode()
def greedy_decode(target_model: Any, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Collection[int]) -> Decoded:
    """The target's own greedy answer, one token a forward, with a K/V cache; stops after `max_new_tokens` or a stop token."""
    check_request(prompt_ids, max_new_tokens)
    cache, ids = DynamicCache(), []
    feed = torch.tensor([list(prompt_ids)], device=target_model.device)
    while True:
        feed = _forward(target_model, feed, cache, 1)
        ids.append(int(feed))
        if len(ids) == max_new_tokens or ids[-1] in stop_ids:
            return Decoded(ids, [1] * (len(ids) - 1))


@torch.inference_mode()
def speculative_decode(
    target_model: Any, draft: Draft, bundle: TargetBundle, prompt_ids: Sequence[int], max_new_tokens: int, stop_ids: Collection[int]
) -> Decoded:
    """The same answer in fewer forwards of the target: `draft` proposes the next tokens, the target verifies them in one forward.

    `target_model` is a transformers causal model with all its layers; `bundle` its embedding and head, on the same device. Raises
    `TargetError` for a target whose state cannot be taken back, `DraftError` for a draft of another target.
    """
    check_request(prompt_ids, max_new_tokens)
    check_rewindable(target_model)
    config = draft.config
    layers = layers_of(target_model, draft)
    cache, serving = DynamicCache(), Serving(draft, len(prompt_ids) + max_new_tokens)
    block = torch.full((1, config.block_size), config.mask_token_id, device=target_model.device)
    masks = embed_blocks(block, bundle)
    with features_of(layers) as take:
        feed = torch.tensor([list(prompt_ids)], device=target_model.device)
        ids, lengths = [int(_forward(target_model, feed, cache, 1))], []
        serving.extend(take())
        while len(ids) < max_new_tokens and ids[-1] not in stop_ids:
            block[0, 0] = ids[-1]
            masks[:, :1] = embed_blocks(block[:, :1], bundle)
            proposal = draft.variant.propose(draft, serving.hidden(masks), block[:, 0], bundle, likeliest)
            proposed = torch.cat((block[:, :1], proposal.tokens), dim=1)
            drafted, verified = torch.cat((proposed, _forward(target_model, proposed, cache, proposed.shape[1]))).tolist()
            committed = _committed(drafted[1:], verified)
            features = take()[:, : len(committed)]
            new = _cut(committed, max_new_tokens - len(ids), stop_ids)
            ids += new
            lengths.append(len(new))
            # The last committed token is the next anchor: neither the target nor the draft has seen it yet.
            cache.crop(len(new) - len(drafted))
            serving.extend(features[:, : len(new)])
    return Decoded(ids, lengths)


def check_rewindable(target_model: Any) -> None:
    """Raise `TargetError` unless the target's cache is keys and values of tokens, which cropping takes back."""
    text = target_model.config.get_text_config(decoder=True)
    recurrent = sorted(set(getattr(text, "layer_types", None) or ()) - REWINDABLE)
    if (getattr(text, "linear_attn_config", None) or {}).get("kda_layers"):  # Kimi names them here
        recurrent.append("kda_layers")
    if recurrent or getattr(target_model, "_is_stateful", False):
        raise TargetError(
            f"the target ({type(target_model).__name__}) has recurrent layers{f' ({recurrent[0]})' if recurrent else ''}: after a rejected "
            "block their state cannot be taken back by cropping a cache, so it is not decoded speculatively here."
        )


def check_request(prompt_ids: Sequence[int], max_new_tokens: int) -> None:
    if len(prompt_ids) == 0 or max_new_tokens < 1:
        raise TargetError(
            f"nothing to decode: a prompt of {len(prompt_ids)} tokens, {max_new_tokens} new tokens asked for; give at least 1 each"
        )


def layers_of(target_model: Any, draft: Draft) -> list[Any]:
    """The decoder layers that the draft reads, in its order."""
    layers = target_model.get_decoder().layers
    hidden = target_model.get_input_embeddings().weight.shape[1]
    config = draft.config
    if len(layers) != config.num_target_layers or hidden != config.hidden_size:
        raise DraftError(
            f"the draft was made for a target of {config.num_target_layers} layers and hidden size {config.hidden_size}; this one has "
            f"{len(layers)} layers and hidden size {hidden}"
        )
    return [layers[index] for index in config.target_layer_ids]


def _forward(target_model: Any, ids: torch.Tensor, cache: DynamicCache, keep: int) -> torch.Tensor:
    """Feed `ids` [1, T] behind the cache; the greedy next tokens at the last `keep` of them, int64 [1, keep]."""
    logits = target_model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=keep).logits
    best: torch.Tensor = logits[:, -keep:].argmax(dim=-1)
    return best


@contextmanager
def features_of(layers: Sequence[Any]) -> Iterator[Callable[[], torch.Tensor]]:
    """While open, the outputs of `layers` in the latest forward, side by side: [1, T, L·H]."""
    seen: dict[int, torch.Tensor] = {}

    def keep(place: int) -> Callable[..., None]:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            seen[place] = output[0] if isinstance(output, tuple) else output

        return hook

    handles = [layer.register_forward_hook(keep(place)) for place, layer in enumerate(layers)]
    try:
        yield lambda: torch.cat([seen[place] for place in range(len(layers))], dim=-1)
    finally:
        for handle in handles:
            handle.remove()


def _committed(drafted: Sequence[int], verified: Sequence[int]) -> list[int]:
    """What a step commits: the prefix of `drafted` that the target would have written too, then the target's own next token."""
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == verified[accepted]:
        accepted += 1
    return [*drafted[:accepted], verified[accepted]]


def _cut(ids: list[int], room: int, stop_ids: Collection[int]) -> list[int]:
    """`ids` up to and with the first stop token, at most `room` of them."""
    for place, token in enumerate(ids[:room]):
        if token in stop_ids:
            return ids[: place + 1]
    return ids[:room]
