"""What a cache holds and how large it is, from its manifest and markers alone: also of a cache that is still being filled."""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.cache.commit import committed_shards
from pipeline.cache.layout import HIDDEN, INDEX, MARKER, SAMPLES, array_data, shard_folder, target_folder
from pipeline.cache.manifest import Manifest, ShardMarker, read_manifest, read_marker
from pipeline.errors import CacheError


def info(cache: Path) -> dict[str, Any]:
    """A JSON-ready account of the cache; sizes in bytes, as recorded. `digest` is None unless the cache is complete and all markers read.

    `bytes` are kept apart: `hidden.zarr` (of which `by_array` the data files), `samples`, `bundle` (all of target/), `index`,
    `markers`. Shards whose marker cannot be read count as missing and are named in `unreadable`.
    """
    manifest = read_manifest(cache)
    markers, sha256s, unreadable = _markers(cache, manifest)
    whole = [shard for shard, marker in markers.items() if all(array_data(name) in marker.files for name in manifest.arrays)]
    missing = sorted(set(range(manifest.num_shards)) - set(whole))
    complete = manifest.state == "complete" and not missing
    captured = {name: sum(getattr(marker, f"num_{name}") for marker in markers.values()) for name in ("samples", "tokens", "supervised")}
    raw = captured["tokens"] * sum(manifest.spec(name).width * manifest.spec(name).item_bytes for name in manifest.arrays)
    sizes = _sizes(cache, manifest, markers)
    return {
        "path": str(cache),
        "format_version": manifest.format_version,
        "state": manifest.state,
        "digest": manifest.digest([sha256s[shard] for shard in range(manifest.num_shards)]) if complete else None,
        "states_identity": manifest.states_identity,
        "samples_identity": manifest.samples_identity,
        "layer_ids": list(manifest.layer_ids),
        "final": manifest.final,
        "hidden_size": manifest.hidden_size,
        "dtype": manifest.dtype,
        "codec": manifest.codec,
        "segments": manifest.segments,
        "corpus": manifest.corpus,
        "totals": manifest.totals.model_dump() if manifest.totals else None,
        "captured": captured,
        "shards": {"expected": manifest.num_shards, "present": len(whole), "missing": missing, "unreadable": unreadable},
        "bytes": sizes,
        "raw_bytes": raw,
    }


def _markers(cache: Path, manifest: Manifest) -> tuple[dict[int, ShardMarker], dict[int, str], list[int]]:
    """Markers of the shards that are there and their sha256, by shard; and the shards whose marker is damaged."""

    def read(shard: int) -> tuple[ShardMarker, bytes] | None:
        try:
            return read_marker(cache, shard)
        except CacheError:
            return None

    there = sorted(committed_shards(cache) & set(range(manifest.num_shards)))
    with ThreadPoolExecutor(16) as pool:
        found = dict(zip(there, pool.map(read, there), strict=True))
    markers = {shard: pair[0] for shard, pair in found.items() if pair}
    sha256s = {shard: hashlib.sha256(pair[1]).hexdigest() for shard, pair in found.items() if pair}
    return markers, sha256s, [shard for shard, pair in found.items() if pair is None]


def _sizes(cache: Path, manifest: Manifest, markers: Mapping[int, ShardMarker]) -> dict[str, Any]:
    files = [(name, record.size) for marker in markers.values() for name, record in marker.files.items()]
    if manifest.target_files is not None:
        bundle = sum(record.size for record in manifest.target_files.values())
    else:
        bundle = sum(path.lstat().st_size for path in target_folder(cache).rglob("*") if path.is_file())
    index = cache / INDEX
    return {
        "hidden.zarr": sum(size for name, size in files if name.startswith(f"{HIDDEN}/")),
        "by_array": {name: sum(size for file, size in files if file == array_data(name)) for name in manifest.arrays},
        "samples": sum(size for name, size in files if name == SAMPLES),
        "bundle": bundle,
        "index": manifest.index.size if manifest.index else index.stat().st_size if index.is_file() else 0,
        "markers": sum((shard_folder(cache, shard) / MARKER).stat().st_size for shard in markers),
    }


def _account(corpus: Mapping[str, Any]) -> str:
    dropped = ", ".join(f"{n:,} {reason}" for reason, n in sorted(corpus["dropped"].items(), key=lambda item: -item[1]))
    return f"{corpus['rows']:,} rows, {corpus['kept']:,} kept" + (f"; left out: {dropped}" if dropped else "")


def as_text(found: Mapping[str, Any]) -> str:
    """`info` for people: a table of two columns, then the identities."""
    shards, sizes, captured = found["shards"], found["bytes"], found["captured"]
    stored, raw, tokens = sizes["hidden.zarr"], found["raw_bytes"], captured["tokens"]
    share = f"{stored:,} bytes, {stored / raw:.3f} of raw, {stored / tokens:,.0f} a token" if raw else "0 bytes"
    rows = [
        ("cache", found["path"]),
        ("state", found["state"]),
        ("digest", found["digest"] or "(none until it is complete)"),
        ("layers", f"{found['layer_ids']}{' and final' if found['final'] else ''}, {found['hidden_size']} wide, {found['dtype']}"),
        ("codec", found["codec"]),
        ("shards", f"{shards['present']:,} of {shards['expected']:,}{_some(', missing', shards['missing'])}"),
        *([("corpus", _account(found["corpus"]))] if found["corpus"] else []),
        ("samples", f"{captured['samples']:,}"),
        ("tokens", f"{tokens:,}, {captured['supervised']:,} supervised"),
        *((f"  in {name}", f"{count:,} samples") for name, count in ((found["totals"] or {}).get("samples_by_split") or {}).items()),
        ("hidden.zarr", share),
        *((f"  {name}", f"{size:,} bytes") for name, size in sizes["by_array"].items()),
        *((name, f"{sizes[name]:,} bytes") for name in ("samples", "bundle", "index", "markers")),
    ]
    if found["segments"]:
        rows.append(
            ("appended", f"{len(found['segments']) - 1} times; the first capture brought {_samples_of(found['segments'][0]):,} samples")
        )
    lines = [f"{name:<14} {value}".rstrip() for name, value in rows]
    for name in ("states_identity", "samples_identity"):
        lines += ["", name, *(f"  {field}: {value}" for field, value in _leaves(found[name], ""))]
    return "\n".join(lines)


def _samples_of(segment: Any) -> int:
    return sum(end - start for start, end in segment)


def _some(words: str, numbers: list[int]) -> str:
    more = f" and {len(numbers) - 10} more" if len(numbers) > 10 else ""
    return f"{words} {', '.join(map(str, numbers[:10]))}{more}" if numbers else ""


def _leaves(value: Any, path: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        return [leaf for name in sorted(value) for leaf in _leaves(value[name], f"{path}.{name}" if path else name)]
    return [(path, value)]
