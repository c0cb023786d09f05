import json
from pathlib import Path

import pytest

from pipeline.bench.cache import CODECS, as_text, bench_cache
from pipeline.cache.info import info
from pipeline.errors import CacheError
from stages.bench import main
from tests.support import caches


def test_sizes_are_those_of_caches_and_every_rate_is_there(small_cache: Path) -> None:
    found = bench_cache(small_cache, 10**9)
    lengths = [length for shard in caches.SHARDS for length in shard]
    assert (found["samples"], found["tokens"]) == (len(lengths), sum(lengths))
    assert found["raw_bytes_per_token"] == len(caches.LAYERS) * caches.HIDDEN * 2
    assert list(found["codecs"]) == list(CODECS)
    for codec, values in found["codecs"].items():
        assert all(rate > 0 for rate in values.values()), codec
        assert values["of_raw"] == pytest.approx(values["bytes_per_token"] / found["raw_bytes_per_token"])
    # One shard here and three there: indices and rows that fill chunks up differ, hardly more than that.
    stored = sum(info(small_cache)["bytes"]["by_array"].values()) / sum(lengths)
    assert found["codecs"]["lossless"]["bytes_per_token"] == pytest.approx(stored, rel=0.03)
    assert found["torch_save_samples_per_second"] > 0
    assert (found["files"], found["torch_save_files"]) == (3 + 2 * len(caches.LAYERS), len(lengths))
    assert all(codec in as_text(found) for codec in CODECS)


def test_the_stage_ends_with_one_json_object(small_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "--cache", str(small_cache), "--mb", "0.1"]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert set(found["codecs"]["int8"]) >= {"bytes_per_token", "encode_mb_s", "decode_mb_s", "samples_per_second"}
    assert set(found) >= {"raw_bytes_per_token", "torch_save_samples_per_second", "files"}
    assert any(line.startswith("lossless") for line in text)
    assert main(["cache", "--cache", str(small_cache / "target")]) == 2
    assert "is not a cache" in capsys.readouterr().err


def test_caches_that_cannot_tell_are_refused(small_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="512 make a chunk"):
        bench_cache(small_cache, 1)
    lossy = caches.write_cache(tmp_path / "c", caches.small_shards(), caches.manifest(codec="int8"))
    with pytest.raises(CacheError, match="rounded a second time"):
        bench_cache(lossy, 10**9)
