"""What other readers see: stock zarr-python and stock Arrow open a cache's files and find the same values."""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import zarr

from pipeline.cache.layout import DTYPES, LOSSY
from pipeline.cache.reader import Cache
from pipeline.cache.schemas import schemas
from tests.support import caches
from tests.support.launch import REPOSITORY

SCHEMAS = REPOSITORY / "data_schemas"


# zarr-python warns of every codec that the Zarr specification does not list; ours is the one that it ships.
@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")
# In a wide array a lossless chunk has many frames.
@pytest.mark.parametrize(("dtype", "codec", "hidden"), list(product(DTYPES, ("lossless", "raw"), (caches.HIDDEN, 600))))
def test_stock_zarr_reads_the_same_bits(dtype: Any, codec: str, hidden: int, tmp_path: Path) -> None:
    samples = caches.captured((600, 3, 424, 1, 30), dtype=dtype, final=True, hidden=hidden)
    caches.write_cache(tmp_path / "c", [samples], caches.manifest(1, dtype=dtype, codec=codec, final=True, hidden_size=hidden))
    group = zarr.open_group(tmp_path / "c/shards/00000/hidden.zarr", mode="r")
    assert set(group.array_keys()) == {"layer_1", "layer_4", "final"}
    for name in group.array_keys():
        array = group[name]
        assert isinstance(array, zarr.Array)
        states = [sample.final if name == "final" else sample.hidden[int(name[6:])] for sample in samples]
        expected = torch.cat([state for state in states if state is not None])
        assert array.shape == tuple(expected.shape)
        assert array.attrs["dtype"] == dtype
        assert array.shards == (1536, hidden)
        assert array.chunks == (512, hidden)
        found = np.asarray(array[:])
        assert found.dtype == {"bfloat16": "uint16"}.get(dtype, dtype)
        assert found.tobytes() == expected.view(torch.uint8).numpy().tobytes()
        assert np.array_equal(np.asarray(array[510:515]), found[510:515])


@pytest.mark.filterwarnings("ignore:Numcodecs codecs are not in the Zarr version 3 specification")
@pytest.mark.parametrize("codec", sorted(LOSSY))
def test_stock_zarr_undoes_a_lossy_codec(codec: str, tmp_path: Path) -> None:
    samples = caches.captured((600, 3, 424, 1, 30), final=True)
    path = caches.write_cache(tmp_path / "c", [samples], caches.manifest(1, codec=codec, final=True))
    array = zarr.open_array(path / "shards/00000/hidden.zarr/layer_4", mode="r")
    width, group = array.attrs["hidden_size"], array.attrs["group"]
    assert isinstance(width, int)
    assert isinstance(group, int)
    assert (array.attrs["dtype"], array.attrs["codec"], array.shape[0]) == ("bfloat16", codec, 1058 + 3)
    # As data_schemas/README.md tells other readers.
    stored = np.asarray(array[:])
    exponents = stored[::513, :width].view(np.int8).astype(float)
    rows = np.delete(stored, np.s_[::513], axis=0)
    codes, scales = rows[:, :width].view(np.int8), rows[:, width:].copy().view("<u2").astype(np.uint32) << 16
    token = np.arange(len(rows))
    states = codes * scales.view(np.float32)[:, np.arange(width) // group] * 2.0 ** exponents[token // 512]
    ours = torch.cat([Cache.open(path).read(i).hidden[4] for i in range(len(samples))])
    assert torch.equal(torch.from_numpy(states).bfloat16(), ours)


def test_one_file_an_array_and_nothing_else(small_cache: Path) -> None:
    shard = small_cache / "shards/00001"
    found = {str(path.relative_to(shard)) for path in shard.rglob("*") if path.is_file()}
    arrays = {f"hidden.zarr/layer_{layer}/{name}" for layer in caches.LAYERS for name in ("zarr.json", "c/0/0")}
    assert found == {"samples.arrow", "committed.json", "hidden.zarr/zarr.json"} | arrays


def test_stock_arrow_reads_the_samples(small_cache: Path) -> None:
    with pa.memory_map(str(small_cache / "shards/00000/samples.arrow")) as source:
        rows = pa.ipc.open_file(source).read_all().to_pylist()
    offset = 0
    for row, sample in zip(rows, caches.small_shards()[0], strict=True):
        tokens = sample.tokens
        assert row["sample_id"] == tokens.sample_id
        assert (row["source"], row["row"], row["split"]) == (tokens.source, tokens.row, tokens.split)
        assert row["input_ids"] == tokens.input_ids.tolist()
        assert [[span["start"], span["length"]] for span in row["loss_mask"]] == tokens.spans.tolist()
        assert (row["num_tokens"], row["num_supervised"], row["token_offset"]) == (tokens.num_tokens, tokens.num_supervised, offset)
        offset += tokens.num_tokens


def test_schemas_on_disk_are_those_of_the_code() -> None:
    # After a change of format: python -m pipeline.cache.schemas data_schemas
    for name, text in schemas().items():
        assert (SCHEMAS / name).read_text() == text, name
