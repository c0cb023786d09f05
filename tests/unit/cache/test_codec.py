import numcodecs
import numpy as np
import pytest
import torch

from pipeline.cache.codec import bits_of, decode_chunk, encode_chunk, new_states, pack_index, take_rows, unpack_index
from pipeline.cache.frames import CRC_BYTES
from pipeline.cache.layout import CHUNK_TOKENS, DTYPES, ArraySpec
from pipeline.errors import CacheCorruptError

SPECS = [ArraySpec("layer_1", 8, dtype, codec) for dtype in DTYPES for codec in ("lossless", "raw")]


def chunk_of(spec: ArraySpec) -> torch.Tensor:
    return torch.randn(CHUNK_TOKENS, spec.width, generator=torch.Generator().manual_seed(1)).to(DTYPES[spec.dtype].torch_dtype)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_any_rows_of_a_chunk_come_back(spec: ArraySpec) -> None:
    rows = bits_of(chunk_of(spec))
    chunk = decode_chunk(encode_chunk(rows, spec).data, spec, "here")
    for start, stop in ((0, CHUNK_TOKENS), (0, 1), (CHUNK_TOKENS - 1, CHUNK_TOKENS), (7, 130)):
        _, out = new_states(stop - start, spec)
        take_rows(chunk, spec, start, out)
        assert np.array_equal(out, rows[start:stop])


@pytest.mark.parametrize("width", [8, 600])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lossless_is_numcodecs_shuffle_then_zstd(dtype: str, width: int) -> None:
    spec = ArraySpec("layer_1", width, dtype, "lossless")
    rows = bits_of(chunk_of(spec))
    shuffled = numcodecs.Zstd().decode(encode_chunk(rows, spec).data[:-CRC_BYTES])
    assert bytes(numcodecs.Shuffle(spec.item_bytes).decode(shuffled)) == rows.tobytes()


def test_states_widened_from_fewer_bits_take_no_more_than_before() -> None:
    narrow, wide = (ArraySpec("layer_1", 600, dtype, "lossless") for dtype in ("bfloat16", "float32"))
    states = chunk_of(narrow)
    size = len(encode_chunk(bits_of(states), narrow).data)
    assert size < 0.75 * states.nbytes
    assert len(encode_chunk(bits_of(states.float()), wide).data) < 1.01 * size


@pytest.mark.parametrize("bits", [5, 7])
def test_mantissas_of_few_bits_are_coded(bits: int) -> None:
    """As an inner computation in fewer bits leaves them; the plane of mantissas then is no noise, though nothing in it repeats itself."""
    spec = ArraySpec("layer_1", 600, "float16", "lossless")
    states = chunk_of(spec)
    rounded = bits_of(states) & np.uint16(0xFFFF << (10 - bits) & 0xFFFF)
    assert len(encode_chunk(rounded, spec).data) < len(encode_chunk(bits_of(states), spec).data) - (10 - bits - 0.5) * rounded.size / 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_noise_takes_no_more_than_it_is(dtype: str) -> None:
    spec = ArraySpec("layer_1", 600, dtype, "lossless")
    noise = np.random.default_rng(0).integers(0, 256, (CHUNK_TOKENS, spec.width * spec.item_bytes), np.uint8).view(f"<u{spec.item_bytes}")
    assert len(encode_chunk(noise, spec).data) < 1.001 * noise.nbytes


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_flipped_bit_anywhere_is_an_error(spec: ArraySpec) -> None:
    stored = encode_chunk(bits_of(chunk_of(spec)), spec).data
    for position in (0, len(stored) // 2, len(stored) - 1):
        damaged = bytearray(stored)
        damaged[position] ^= 4
        with pytest.raises(CacheCorruptError, match="file X, chunk 7"):
            decode_chunk(bytes(damaged), spec, "file X, chunk 7")
    for short in (b"", stored[:3], stored[:-1]):
        with pytest.raises(CacheCorruptError, match="file X"):
            decode_chunk(short, spec, "file X")


def test_a_chunk_of_another_size_is_an_error_though_its_checksum_is_right() -> None:
    for codec in ("lossless", "raw"):
        stored = encode_chunk(np.zeros((CHUNK_TOKENS, 4), np.uint16), ArraySpec("layer_1", 4, "bfloat16", codec)).data
        with pytest.raises(CacheCorruptError):
            decode_chunk(stored, ArraySpec("layer_1", 8, "bfloat16", codec), "here")


def test_index_round_trip_and_its_checksum() -> None:
    sizes = [10, 0, 7]
    data = pack_index(sizes)
    assert unpack_index(data, 17 + len(data), "here").tolist() == [[0, 10], [10, 0], [10, 7]]
    with pytest.raises(CacheCorruptError, match="here"):
        unpack_index(data, 16 + len(data), "here")
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1
        with pytest.raises(CacheCorruptError, match="here"):
            unpack_index(bytes(damaged), 17 + len(data), "here")


def test_an_index_that_marks_a_chunk_as_missing_is_an_error() -> None:
    # A Zarr writer leaves out chunks of zeros in this way; here every chunk is written, so one that is marked was lost.
    data = pack_index([10, 2**64 - 1])
    with pytest.raises(CacheCorruptError, match="misses a chunk"):
        unpack_index(data, 10 + len(data), "here")
