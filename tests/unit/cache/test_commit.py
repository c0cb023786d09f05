import json
import os
import random
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pipeline.cache.commit import committed_shards, complete, remove_leftovers
from pipeline.cache.layout import shard_folder
from pipeline.cache.manifest import create_or_compare, read_manifest
from pipeline.cache.reader import Cache
from pipeline.cache.verify import verify
from pipeline.errors import CacheError
from tests.support import caches
from tests.support.processes import in_child, killed_after

LENGTHS = (300, 900, 7, 512)
NUM_SHARDS = 4


def capture_all(cache: str) -> None:
    """What a capture does to a cache: remove leftovers, write what is missing, complete it."""
    path = Path(cache)
    create_or_compare(path, caches.manifest(NUM_SHARDS))
    remove_leftovers(path)
    caches.write_target(path)
    for shard in sorted(set(range(NUM_SHARDS)) - committed_shards(path)):
        caches.write_shard(path, shard, caches.captured(LENGTHS, seed=shard), attempt=str(os.getpid()))
    complete(path)


def contents(cache: Path) -> dict[str, bytes]:
    return {str(path.relative_to(cache)): path.read_bytes() for path in sorted(cache.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 6))])
def test_killed_at_any_moment_and_run_again_gives_the_same_bytes(seed: int, tmp_path: Path) -> None:
    capture_all(str(tmp_path / "whole"))
    in_child(os.getpid)  # the server of processes starts with the first
    started = time.perf_counter()
    assert not killed_after(60, capture_all, str(tmp_path / "again"))
    longest = time.perf_counter() - started
    expected = contents(tmp_path / "whole")
    moments, kills = random.Random(seed), 0
    times: dict[int, int] = {}
    for _ in range(8):
        done = committed_shards(tmp_path / "killed")
        for shard in done:
            modified = shard_folder(tmp_path / "killed", shard).stat().st_mtime_ns
            assert times.setdefault(shard, modified) == modified, "a finished shard was done again"
        if killed_after(moments.uniform(0.1, 0.9) * longest, capture_all, str(tmp_path / "killed")):
            kills += 1
        elif kills:
            break
        else:  # the machine is faster than it was when it was timed
            shutil.rmtree(tmp_path / "killed")
            longest, times = longest / 2, {}
    capture_all(str(tmp_path / "killed"))
    found = contents(tmp_path / "killed")
    assert kills >= 1
    # Outside shards/ a kill may leave a half-written file under a name that nothing reads.
    assert {name: data for name, data in found.items() if not Path(name).name.startswith(".")} == expected
    assert Cache.open(tmp_path / "killed").digest() == Cache.open(tmp_path / "whole").digest()
    assert verify(tmp_path / "killed", full=True) == []


def test_leftovers_do_not_count_and_are_removed_by_shard(tmp_path: Path) -> None:
    create_or_compare(tmp_path, caches.manifest(1))
    caches.write_shard(tmp_path, 0, caches.captured([9]))
    for name in (".00000.tmp-7", ".00001.tmp-7", ".00001.tmp-8", "00002"):
        shutil.copytree(shard_folder(tmp_path, 0), tmp_path / "shards" / name)
    (tmp_path / "shards/00002/committed.json").unlink()
    assert committed_shards(tmp_path) == {0}
    assert [path.name for path in remove_leftovers(tmp_path, {1})] == [".00001.tmp-7", ".00001.tmp-8"]
    assert [path.name for path in remove_leftovers(tmp_path)] == [".00000.tmp-7"]
    assert sorted(path.name for path in (tmp_path / "shards").iterdir()) == ["00000", "00002"]


def test_a_shard_that_lost_its_marker_is_written_again(tmp_path: Path) -> None:
    create_or_compare(tmp_path, caches.manifest(1))
    caches.write_shard(tmp_path, 0, caches.captured([9]))
    before = contents(tmp_path / "shards/00000")
    (shard_folder(tmp_path, 0) / "committed.json").unlink()
    caches.write_shard(tmp_path, 0, caches.captured([9]))
    assert contents(tmp_path / "shards/00000") == before


def test_complete_counts_and_says_what_is_missing(tmp_path: Path) -> None:
    create_or_compare(tmp_path, caches.manifest())
    caches.write_shard(tmp_path, 1, caches.small_shards()[1])
    with pytest.raises(CacheError, match=r"2 of 3 shards are not captured yet \(first: \[0, 2\]\)"):
        complete(tmp_path)
    with pytest.raises(CacheError, match="1 of 3 shards are captured"):
        Cache.open(tmp_path)
    for shard in (0, 2):
        caches.write_shard(tmp_path, shard, caches.small_shards()[shard])
    with pytest.raises(CacheError, match=r"lacks \['bundle.safetensors', 'bundle.json'\]"):
        complete(tmp_path)
    caches.write_target(tmp_path)
    totals = complete(tmp_path).totals
    samples = [sample.tokens for shard in caches.small_shards() for sample in shard]
    assert totals is not None
    assert (totals.samples, totals.tokens, totals.supervised) == (
        len(samples),
        sum(sample.num_tokens for sample in samples),
        sum(sample.num_supervised for sample in samples),
    )
    assert totals.samples_by_split == {"train": len(samples)}


def test_completed_twice_and_by_several_at_once(tmp_path: Path) -> None:
    create_or_compare(tmp_path, caches.manifest())
    caches.write_target(tmp_path)
    for shard, samples in enumerate(caches.small_shards()):
        caches.write_shard(tmp_path, shard, samples)
    with ThreadPoolExecutor(6) as pool:
        results = list(pool.map(lambda _: complete(tmp_path), range(6)))
    after = contents(tmp_path)
    assert all(result == read_manifest(tmp_path) for result in results)
    complete(tmp_path)
    assert contents(tmp_path) == after
    assert verify(tmp_path, full=True) == []


def test_where_and_when_a_cache_was_written_changes_nothing(tmp_path: Path, small_cache: Path) -> None:
    caches.write_cache(tmp_path / "elsewhere", caches.small_shards(), caches.manifest())
    assert contents(tmp_path / "elsewhere") == contents(small_cache)
    moved = (tmp_path / "elsewhere").rename(tmp_path / "moved")
    assert Cache.open(moved).digest() == Cache.open(small_cache).digest()
    other = caches.write_cache(tmp_path / "other", caches.small_shards()[::-1], caches.manifest())
    assert Cache.open(other).digest() != Cache.open(small_cache).digest()
    text = json.dumps(json.loads((moved / "manifest.json").read_text()))
    assert str(tmp_path) not in text
