"""Whatever the lengths, the layers and the codec: what was captured is what is read."""

import tempfile
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.cache.reader import Cache
from pipeline.cache.verify import verify
from tests.support import caches

edges = st.sampled_from([1, 2, 511, 512, 513, 1023, 1024, 1025])
lengths = st.lists(st.one_of(st.integers(1, 700), edges), min_size=1, max_size=6)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    shards=st.lists(lengths, min_size=1, max_size=3),
    dtype=st.sampled_from(["bfloat16", "float16", "float32"]),
    codec=st.sampled_from(["lossless", "raw", "int8", "int4"]),
    layers=st.lists(st.integers(0, 30), min_size=1, max_size=3, unique=True),
    final=st.booleans(),
    max_tokens=st.one_of(st.none(), st.integers(1, 1100)),
)
def test_round_trip(
    shards: list[list[int]],
    dtype: Literal["bfloat16", "float16", "float32"],
    codec: str,
    layers: list[int],
    final: bool,
    max_tokens: int | None,
) -> None:
    written = [caches.captured(shard, seed=k, dtype=dtype, layers=layers, final=final) for k, shard in enumerate(shards)]
    described = caches.manifest(len(shards), dtype=dtype, codec=codec, layer_ids=tuple(layers), final=final)
    with tempfile.TemporaryDirectory() as folder:
        cache = Cache.open(caches.write_cache(Path(folder) / "c", written, described), final=final)
        samples = [sample for shard in written for sample in shard]
        assert len(cache) == len(samples)
        for i, sample in enumerate(samples):
            found = cache.read(i, final=final, max_tokens=max_tokens)
            expected = sample.tokens.prefix(max_tokens or sample.tokens.num_tokens)
            assert np.array_equal(found.tokens.input_ids, expected.input_ids)
            assert np.array_equal(found.tokens.spans, expected.spans)
            assert list(found.hidden) == layers
            pairs = [(found.hidden[layer], sample.hidden[layer]) for layer in layers]
            if final:
                assert found.final is not None
                assert sample.final is not None
                pairs.append((found.final, sample.final))
            if codec in ("lossless", "raw"):
                assert all(caches.same_bits(state, whole[: expected.num_tokens]) for state, whole in pairs)
            else:
                unpacked = cache.read(i, max_tokens=max_tokens, dequantise=False).quantised
                assert unpacked is not None
                assert all(caches.same_bits(unpacked[layer].dequantise(), found.hidden[layer]) for layer in layers)
                assert all(state.shape == whole[: expected.num_tokens].shape and state.dtype == whole.dtype for state, whole in pairs)
                # A mean over few values can be anything up to the bound of each, which test_lossy.py holds.
                assert all(
                    relative_error(state, whole[: expected.num_tokens]) < {"int8": 0.02, "int4": 0.15}[codec]
                    for state, whole in pairs
                    if expected.num_tokens >= 256
                )
        assert verify(cache.path, full=True) == []
