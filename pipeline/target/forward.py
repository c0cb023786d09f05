"""Samples in, hidden states out: one forward of the frozen target over a right-padded batch.

No mask is needed to keep padding out: attention is causal and padding stands behind the real tokens, so nothing real can see
it, and SDPA takes its quick causal path. `check_padding` (probe.py) proves it on the live target. Only flash attention gets a mask,
for it then leaves the padding out.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from torch import nn

from pipeline.errors import TargetError
from pipeline.records import CapturedSample, TokenSample
from pipeline.target.load import Target


@dataclass(frozen=True)
class Flight:
    """A forward that may still be running on the device.

    States are packed: [T, H], the samples' real tokens one after another. `suspect` bool [layers (+ final), samples] is true where
    states are not finite or do not vary.
    """

    samples: tuple[TokenSample, ...]
    hidden: Mapping[int, torch.Tensor]
    final: torch.Tensor | None
    suspect: torch.Tensor
    arrival: torch.Event | None = None

    def to_host(self) -> Self:
        """The same on the CPU. On a GPU the copies are queued behind the forward; `land` waits for their arrival."""
        device = self.suspect.device
        if device.type == "cpu":
            return self
        hidden = {layer: _pinned(state) for layer, state in self.hidden.items()}
        final, suspect = None if self.final is None else _pinned(self.final), _pinned(self.suspect)
        arrival = torch.Event(device)
        arrival.record()
        return replace(self, hidden=hidden, final=final, suspect=suspect, arrival=arrival)

    def land(self) -> list[CapturedSample]:
        """The captured samples, views into the packed states. Waits for the device; raises `HiddenStateError` for unusable states."""
        if self.arrival is not None:
            self.arrival.synchronize()
        captured, start = [], 0
        for tokens in self.samples:
            rows = slice(start, start + tokens.num_tokens)
            states = {layer: state[rows] for layer, state in self.hidden.items()}
            captured.append(CapturedSample(tokens, states, None if self.final is None else self.final[rows]))
            start += tokens.num_tokens
        # One look at the device a batch; the slow check, which names layer and sample, runs on suspects alone.
        for index in self.suspect.any(dim=0).nonzero().flatten().tolist():
            captured[index].check()
        return captured


def _pinned(state: torch.Tensor) -> torch.Tensor:
    host = torch.empty(state.shape, dtype=state.dtype, pin_memory=True)
    return host.copy_(state, non_blocking=True)


def forward_hidden(target: Target, samples: Sequence[TokenSample]) -> list[CapturedSample]:
    """States of `samples` as one batch: for each layer [S, H] of the sample's own length, in `target.dtype` on `target.device`.

    Raises `TargetError` for ids that the target has no embedding for, `HiddenStateError` for states that cannot be trained on.
    """
    return start_forward(target, samples).land()


def start_forward(target: Target, samples: Sequence[TokenSample]) -> Flight:
    """As `forward_hidden`, without waiting for the device."""
    lengths = np.array([sample.num_tokens for sample in samples])
    ids = np.zeros((len(samples), lengths.max()), dtype=np.int64)
    for row, sample in enumerate(samples):
        ids[row, : sample.num_tokens] = sample.input_ids
    if ids.min() < 0 or ids.max() >= target.vocab_size:
        row, position = np.argwhere((ids < 0) | (ids >= target.vocab_size))[0]
        sample = samples[row]
        raise TargetError(
            f"sample {sample.sample_id} ({sample.source}, row {sample.row}) has id {ids[row, position]} at position {position}; the target "
            f"embeds ids from 0 to {target.vocab_size - 1}. The corpus was tokenised for another target, or holds audio or images."
        )
    real = np.arange(ids.shape[1]) < lengths[:, None]
    states = run_layers(target, torch.from_numpy(ids).to(target.device), torch.from_numpy(real).to(target.device))
    rows = None if real.all() else torch.from_numpy(np.flatnonzero(real)).to(target.device)
    packed = [_pack(state, rows) for state in states]
    suspect = torch.stack([_suspect(state, lengths) for state in packed])
    return Flight(
        samples=tuple(samples),
        hidden=dict(zip(target.layer_ids, packed, strict=False)),
        final=packed[-1] if target.final else None,
        suspect=suspect,
    )


@torch.no_grad()  # not inference mode: online training back-propagates through what reads these states
def run_layers(target: Target, ids: torch.Tensor, real: torch.Tensor) -> list[torch.Tensor]:
    """States [R, S, H] of `target.layer_ids` in that order, then the final norm's input if asked for; ids int64, real bool [R, S]."""
    seen: dict[int, torch.Tensor] = {}

    def keep(place: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            seen[place] = output[0] if isinstance(output, tuple) else output

        return hook

    def keep_final(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        seen[len(target.layer_ids)] = inputs[0]

    hooks = [target.decoder.layers[layer].register_forward_hook(keep(place)) for place, layer in enumerate(target.layer_ids)]
    if target.final:
        hooks.append(target.norm.register_forward_pre_hook(keep_final))
    try:
        mask = real.long() if target.attn_implementation == "flash_attention_2" else None
        target.decoder(input_ids=ids, attention_mask=mask, use_cache=False)
    except torch.OutOfMemoryError as error:
        raise TargetError(
            f"a forward of {ids.shape[0]} samples of up to {ids.shape[1]} tokens does not fit on {target.device}: lower "
            f"capture.batch_tokens (or data.max_tokens), or raise model.target.tp_size. ({error})"
        ) from error
    finally:
        for handle in hooks:
            handle.remove()
    states = [seen[place] for place in range(len(target.layer_ids) + target.final)]
    for state in states:
        if state.dtype != target.dtype or state.shape != (*ids.shape, target.hidden_size):
            raise TargetError(
                f"the target gave states {state.dtype} {tuple(state.shape)}, expected {target.dtype} {(*ids.shape, target.hidden_size)}."
            )
    return states


def _pack(state: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    flat = state.flatten(0, 1)
    return flat if rows is None else flat.index_select(0, rows)


def _suspect(state: torch.Tensor, lengths: np.ndarray) -> torch.Tensor:
    """bool [samples]: not finite, or the same at every position (all zero included). `state` [T, H]."""
    pieces = torch.split(state, lengths.tolist())  # amin and amax carry NaN on; together they are seven times as quick as aminmax
    low, high = torch.stack([piece.amin(dim=0) for piece in pieces]), torch.stack([piece.amax(dim=0) for piece in pieces])
    return ~(low.isfinite() & high.isfinite()).all(dim=-1) | (low == high).all(dim=-1)
