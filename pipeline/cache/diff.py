"""Two caches side by side: every field of their manifests, and every file of their shards by its recorded checksum."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pipeline.cache.commit import committed_shards
from pipeline.cache.manifest import Difference, FileRecord, read_manifest, read_marker
from pipeline.errors import CacheError


def diff(a: Path, b: Path) -> list[str]:
    """One line for each field, shard or file in which the caches differ, none if they hold the same; paths, times and hosts do not count.

    Raises `CacheError` when one of them has no readable manifest.
    """
    ours, theirs = read_manifest(a), read_manifest(b)
    left, right = (found.model_dump(mode="json", exclude={"index"}) for found in (ours, theirs))
    lines = [
        f"{difference.field}: A {difference.cache}, B {difference.run}"
        for name in sorted(left)
        for difference in Difference.between(name, left[name], right[name])
    ]
    shards = sorted(committed_shards(a) | committed_shards(b))
    with ThreadPoolExecutor(16) as pool:
        lines += [line for found in pool.map(lambda shard: _shard_lines(a, b, shard), shards) for line in found]
    return lines


def _shard_lines(a: Path, b: Path, shard: int) -> list[str]:
    left, right = _files(a, shard), _files(b, shard)
    where = f"shards/{shard:05d}"
    for side, files in (("A", left), ("B", right)):
        if isinstance(files, str):
            return [f"{where}: in {side}, {files}"]
    assert isinstance(left, dict)
    assert isinstance(right, dict)
    lines = []
    for name in sorted(left.keys() | right.keys()):
        one, other = left.get(name), right.get(name)
        if one is None or other is None:
            lines.append(f"{where}/{name}: only in {'B' if one is None else 'A'}")
        elif one != other:
            lines.append(f"{where}/{name}: A {one.size} bytes, sha256 {one.sha256[:12]}; B {other.size} bytes, sha256 {other.sha256[:12]}")
    return lines


def _files(cache: Path, shard: int) -> dict[str, FileRecord] | str:
    """Records of the shard's files, or why there are none."""
    if not committed_shards(cache, (shard,)):
        return "not there"
    try:
        return read_marker(cache, shard)[0].files
    except CacheError as error:
        return f"its marker is unusable: {error}"
