"""The formats of a cache as schemas, made from the code: `python -m pipeline.cache.schemas DIR` writes them, a test holds them equal."""

import json
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.cache.index import INDEX_SCHEMA
from pipeline.cache.layout import DTYPES, LOSSY, ArraySpec
from pipeline.cache.manifest import SEAL, Manifest, Sealed, ShardMarker
from pipeline.cache.samples import SAMPLES_SCHEMA


def schemas() -> dict[str, str]:
    """File name in data_schemas/ and its text, for every format of the cache."""
    values: dict[str, Any] = {
        "manifest.schema.json": _sealed_schema(Manifest),
        "committed.schema.json": _sealed_schema(ShardMarker),
        "samples.arrow.json": _arrow(SAMPLES_SCHEMA),
        "index.arrow.json": _arrow(INDEX_SCHEMA),
        "hidden.zarr.json": {
            f"{dtype}, {codec}": json.loads(ArraySpec("layer_9", 4096, dtype, codec).metadata(1000))
            for dtype in DTYPES
            for codec in ("lossless", "raw", *LOSSY)
        },
    }
    return {name: json.dumps(value, indent=2, ensure_ascii=False) + "\n" for name, value in values.items()}


def _sealed_schema(model: type[Sealed]) -> dict[str, Any]:
    schema = model.model_json_schema(mode="serialization")
    schema["properties"][SEAL] = {"type": "string", "pattern": "^[0-9a-f]{64}$", "description": "of this file without this line"}
    schema["required"] = [*schema["required"], SEAL]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def _arrow(schema: pa.Schema) -> dict[str, Any]:
    return {
        "columns": {field.name: {"type": str(field.type), "nullable": field.nullable} for field in schema},
        "metadata": sorted(key.decode() for key in schema.metadata or {}),
    }


def write_schemas(folder: Path) -> None:
    for name, text in schemas().items():
        (folder / name).write_text(text)


if __name__ == "__main__":
    write_schemas(Path(sys.argv[1]))
