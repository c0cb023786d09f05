"""Whatever the states are: what a lossy codec gives back is no further from them than half a step, and steps are what lossy.py says."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.cache.codec import bits_of, decode_chunk, encode_chunk
from pipeline.cache.layout import CHUNK_TOKENS, DTYPES, LOSSY, ArraySpec
from pipeline.cache.lossy import take_quantised
from pipeline.errors import HiddenStateError
from pipeline.records import Quantised

KINDS = ("normal", "outlier channels", "massive tokens", "zeros", "constant", "sparse", "huge", "denormal", "wide")


def states_of(kind: str, width: int, num_tokens: int, seed: int) -> torch.Tensor:
    """float32 [S, H]."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(num_tokens, width, generator=generator)
    if kind == "outlier channels":
        states[:, :: max(2, width // 3)] *= 3000
    elif kind == "massive tokens":
        states[:: max(2, num_tokens // 3), : max(1, width // 5)] *= 1e4
    elif kind in ("zeros", "constant"):
        states = torch.full_like(states, 0.0 if kind == "zeros" else 7.25)
    elif kind == "sparse":
        states *= torch.rand(states.shape, generator=generator) < 0.02
    elif kind in ("huge", "denormal"):
        states *= 1e38 if kind == "huge" else 1e-39
    elif kind == "wide":
        states *= torch.exp2(torch.randint(-120, 120, states.shape, generator=generator).float())
    return states


def round_trip(states: torch.Tensor, spec: ArraySpec) -> Quantised:
    chunk = torch.zeros(CHUNK_TOKENS, spec.width, dtype=states.dtype)
    chunk[: len(states)] = states
    stored = encode_chunk(bits_of(chunk), spec).data
    return take_quantised([decode_chunk(stored, spec, "here")], 0, len(states), spec)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    width=st.one_of(st.integers(1, 300), st.sampled_from([32, 128, 576])),
    num_tokens=st.sampled_from([1, 2, 100, CHUNK_TOKENS]),
    dtype=st.sampled_from(sorted(DTYPES)),
    codec=st.sampled_from(sorted(LOSSY)),
    seed=st.integers(0, 99),
)
@example(kind="wide", width=1, num_tokens=100, dtype="bfloat16", codec="int4", seed=0)
@example(kind="wide", width=1, num_tokens=100, dtype="bfloat16", codec="int4", seed=3)
def test_error_is_within_half_a_step(kind: str, width: int, num_tokens: int, dtype: str, codec: str, seed: int) -> None:
    largest = torch.finfo(DTYPES[dtype].torch_dtype).max
    states = states_of(kind, width, num_tokens, seed).clamp(-largest, largest).to(DTYPES[dtype].torch_dtype)
    packed = round_trip(states, ArraySpec("layer_1", width, dtype, codec))
    found, exact = packed.dequantise(), states.double()
    assert found.dtype == states.dtype
    assert bool(found.isfinite().all())
    powers = torch.exp2(packed.exponents.double())
    scales, group = packed.scales.double(), LOSSY[codec].group
    steps = scales.repeat_interleave(group, dim=1)[:, :width] * powers
    rounding = torch.finfo(states.dtype)
    bound = 0.5 * steps * (1 + 1e-5) + rounding.eps * exact.abs() + rounding.smallest_normal
    bound += torch.finfo(torch.bfloat16).smallest_normal * powers  # a scale has no less
    assert bool(((found.double() - exact).abs() <= bound).all())
    # A step is no larger than its formula says, up to the rounding of a scale to eight bits.
    level = torch.zeros(num_tokens, scales.shape[1] * group, dtype=torch.float64)
    level[:, :width] = exact / powers
    peak = level.view(num_tokens, -1, group).abs().amax(-1)
    counts = torch.tensor([min(group, width - start) for start in range(0, width, group)])
    rms = (level.view(num_tokens, -1, group).square().sum(-1) / counts).sqrt()
    formula = torch.maximum(peak / 127, LOSSY[codec].coarseness * rms)
    ends = 1e-37 + LOSSY[codec].coarseness * 2.0**-74  # of bfloat16, and of the root of float32's squares
    assert bool((scales <= formula * 1.0079 + ends).all())
    assert bool((packed.codes[exact == 0] == 0).all())


@pytest.mark.parametrize("codec", sorted(LOSSY))
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_states_that_are_not_finite_are_refused(codec: str, bad: float) -> None:
    states = torch.randn(CHUNK_TOKENS, 40)
    states[17, 3] = bad
    with pytest.raises(HiddenStateError, match="layer_1: hidden states are not finite"):
        encode_chunk(bits_of(states.bfloat16()), ArraySpec("layer_1", 40, "bfloat16", codec))


@pytest.mark.parametrize(("codec", "share", "error"), [("int8", 0.52, 0.012), ("int4", 0.272, 0.1)])
@pytest.mark.parametrize("kind", ["normal", "outlier channels", "massive tokens"])
def test_size_and_error_of_every_channel(codec: str, share: float, error: float, kind: str) -> None:
    states = states_of(kind, 576, CHUNK_TOKENS, 3).bfloat16()
    spec = ArraySpec("layer_1", 576, "bfloat16", codec)
    assert len(encode_chunk(bits_of(states), spec).data) <= share * spec.chunk_bytes
    found = round_trip(states, spec).dequantise()
    # Of ordinary tokens: beside a massive value the others of its group are lost, and only there.
    ordinary = np.flatnonzero(states.abs().amax(1).float().numpy() < 1e4 * 0.5) if kind == "massive tokens" else np.arange(CHUNK_TOKENS)
    by_channel: Any = (found.float() - states.float())[ordinary].norm(dim=0) / states.float()[ordinary].norm(dim=0)
    assert float(by_channel.max()) < error
