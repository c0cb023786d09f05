"""Names, types and metadata of a cache: what lies where, and what each array's `zarr.json` says.

    CACHE/manifest.json            identities, layers, dtype, codec, totals            (manifest.py)
    CACHE/target/                  embedding, head, final norm, config, tokenizer      (bundle.py)
    CACHE/shards/00017/samples.arrow                                                   (samples.py)
    CACHE/shards/00017/hidden.zarr/layer_9/c/0/0      one file an array: chunks, table, index
    CACHE/shards/00017/committed.json                 a shard without it does not exist
    CACHE/index.arrow              one row a sample, rebuilt from the shards           (index.py)

Every path inside a cache is built here from a shard number and an array name, never from a string that a file brought.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from pipeline.errors import CacheCorruptError

FORMAT_VERSION: Final = 1
CHUNK_TOKENS = 512
"""Rows of one chunk. All chunks of an array are full; the last one is filled up with zero rows, as Zarr wants."""

FRAME_TOKENS, FRAME_BYTES = 64, 1 << 15
"""The least of a plane that is packed by itself (frames.py). Of less, a sample would unpack less that is not its own; it packs worse."""

MANIFEST = "manifest.json"
INDEX = "index.arrow"
MARKER = "committed.json"
SAMPLES = "samples.arrow"
HIDDEN = "hidden.zarr"
GROUP_JSON = f"{HIDDEN}/zarr.json"
FINAL = "final"
CONFIG_COPY = "provenance/config.yaml"
"""The configuration of the last capture or append, for whoever adds to the cache; no part of its identity."""


@dataclass(frozen=True, slots=True)
class StoredDtype:
    """How a torch dtype lies in a Zarr array. Zarr has no bfloat16: its bits are stored as uint16, the name in the attributes."""

    torch_dtype: torch.dtype
    zarr_type: str
    item_bytes: int


DTYPES = {
    "bfloat16": StoredDtype(torch.bfloat16, "uint16", 2),
    "float16": StoredDtype(torch.float16, "float16", 2),
    "float32": StoredDtype(torch.float32, "float32", 4),
}


@dataclass(frozen=True, slots=True)
class Lossy:
    """How a codec rounds (lossy.py): `group` channels share a scale of a token, at least `coarseness` · their root mean square."""

    group: int
    coarseness: float


LOSSY = {"int8": Lossy(group=32, coarseness=0.0), "int4": Lossy(group=128, coarseness=0.24)}
"""The codecs that do not keep every bit. Chosen by measurement on real states, see data_schemas/README.md."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of a shard: `width` values a token, of `dtype`, packed by `codec`."""

    name: str
    width: int
    dtype: str
    codec: str

    @property
    def item_bytes(self) -> int:
        return DTYPES[self.dtype].item_bytes

    @property
    def chunk_bytes(self) -> int:
        """Bytes of the states of one chunk before the codec."""
        return CHUNK_TOKENS * self.width * self.item_bytes

    @property
    def lossy(self) -> Lossy | None:
        return LOSSY.get(self.codec)

    @property
    def num_groups(self) -> int:
        """Scales of a token, of a lossy codec; the last group may have fewer channels."""
        return -(-self.width // self.lossy.group) if self.lossy else 0

    @property
    def stored_rows(self) -> int:
        """Rows of a chunk in the Zarr array: the tokens', and with a lossy codec one before them that holds the chunk's exponents."""
        return CHUNK_TOKENS + bool(self.lossy)

    @property
    def stored_width(self) -> int:
        """Values of a row in the Zarr array: the states, or with a lossy codec the bytes of codes and scales."""
        return self.width + 2 * self.num_groups

    @property
    def stored_bytes(self) -> int:
        """Bytes of one chunk as the Zarr array has it, before zstd."""
        return self.stored_rows * self.stored_width * (1 if self.lossy else self.item_bytes)

    @property
    def frames(self) -> int:
        """Frames of a chunk, over all planes; 0 with a codec that has none."""
        return self.item_bytes * CHUNK_TOKENS // self.frame_tokens if self.codec == "lossless" else 0

    @property
    def frame_tokens(self) -> int:
        """Tokens of a frame, which divide a chunk."""
        tokens = FRAME_TOKENS
        while tokens < CHUNK_TOKENS and tokens * self.width < FRAME_BYTES:
            tokens *= 2
        return tokens

    def metadata(self, num_tokens: int) -> str:
        """Text of the array's `zarr.json`, a Zarr v3 array [num_tokens, width] whose single shard holds all chunks.

        Each chunk: little-endian bytes, for `lossless` split into planes and packed by zstd in frames, then a crc32c, so that a damaged
        chunk is noticed when it is read, by us and by any other Zarr reader. With a lossy codec the array has bytes, a row more for
        each chunk, and is packed by zstd.
        """
        codecs: list[dict[str, object]] = [{"name": "bytes", "configuration": {"endian": "little"}}]
        if self.codec == "lossless":
            codecs.append({"name": "numcodecs.shuffle", "configuration": {"elementsize": self.item_bytes}})
        if self.codec != "raw":
            codecs.append({"name": "zstd", "configuration": {"level": 1, "checksum": False}})
        codecs.append({"name": "crc32c"})
        sharding = {
            "chunk_shape": [self.stored_rows, self.stored_width],
            "codecs": codecs,
            "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            "index_location": "end",
        }
        zarr_type = "uint8" if self.lossy else DTYPES[self.dtype].zarr_type
        attributes: dict[str, object] = {"dtype": self.dtype}
        if self.lossy:
            attributes |= {"codec": self.codec, "group": self.lossy.group, "hidden_size": self.width}
        chunks = num_chunks(num_tokens)
        value = {
            "zarr_format": 3,
            "node_type": "array",
            "shape": [num_tokens + chunks * (self.stored_rows - CHUNK_TOKENS), self.stored_width],
            "data_type": zarr_type,
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [chunks * self.stored_rows, self.stored_width]},
            },
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
            "fill_value": 0 if zarr_type.startswith("uint") else 0.0,
            "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
            "attributes": attributes,
            "dimension_names": ["row", "byte"] if self.lossy else ["token", "hidden"],
        }
        return json.dumps(value, indent=2) + "\n"


def group_metadata() -> str:
    """Text of the `zarr.json` of `hidden.zarr`, a plain Zarr v3 group."""
    return json.dumps({"zarr_format": 3, "node_type": "group", "attributes": {}}, indent=2) + "\n"


def num_chunks(num_tokens: int) -> int:
    return -(-num_tokens // CHUNK_TOKENS)


def array_names(layer_ids: tuple[int, ...], final: bool) -> tuple[str, ...]:
    """Names of the arrays of those layers, in that order, then of the final hidden state."""
    return (*(f"layer_{layer}" for layer in layer_ids), *((FINAL,) if final else ()))


def array_json(name: str) -> str:
    """Path of an array's metadata inside a shard."""
    return f"{HIDDEN}/{name}/zarr.json"


def array_data(name: str) -> str:
    """Path of an array's only data file inside a shard (Zarr's key of its single shard)."""
    return f"{HIDDEN}/{name}/c/0/0"


def shard_files(arrays: tuple[str, ...]) -> tuple[str, ...]:
    """Paths inside a shard of all files that its marker lists."""
    return (SAMPLES, GROUP_JSON, *(path(name) for name in arrays for path in (array_json, array_data)))


def shards_folder(cache: Path) -> Path:
    return cache / "shards"


def shard_folder(cache: Path, shard: int) -> Path:
    return shards_folder(cache) / f"{shard:05d}"


def temporary_folder(cache: Path, shard: int, attempt: str) -> Path:
    """Where the processes of one attempt write a shard together until it is committed."""
    return shards_folder(cache) / f".{shard:05d}.tmp-{attempt}"


def target_folder(cache: Path) -> Path:
    return cache / "target"


def tokenizer_folder(cache: Path) -> Path:
    """Where capture saves the tokenizer, its template included."""
    return target_folder(cache) / "tokenizer"


def inside(cache: Path, path: Path) -> Path:
    """`path` itself, unless a link on the way leads out of the cache: then `CacheCorruptError`."""
    if not path.resolve().is_relative_to(cache.resolve()):
        raise CacheCorruptError(f"{path} leads out of the cache, to {path.resolve()}. A cache must hold its own files; copy them in.")
    return path
