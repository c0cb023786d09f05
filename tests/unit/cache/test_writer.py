import hashlib
import os
import resource
import signal
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from pipeline.cache.commit import commit_shard, committed_shards
from pipeline.cache.layout import shard_folder, temporary_folder
from pipeline.cache.manifest import FileRecord, create_or_compare
from pipeline.cache.reader import Cache
from pipeline.cache.writer import ShardWriter
from pipeline.errors import CacheError
from pipeline.records import CapturedSample
from tests.support import caches
from tests.support.processes import in_child


def write(cache: Path, samples: list[CapturedSample], arrays: tuple[str, ...], queue_bytes: int = 1 << 20) -> dict[str, FileRecord]:
    with ShardWriter(cache, 0, create_or_compare(cache, caches.manifest(1)), arrays, queue_bytes=queue_bytes) as writer:
        for sample in samples:
            writer.append(sample)
        return writer.close()


def test_the_same_samples_are_the_same_bytes_whatever_the_timing(tmp_path: Path) -> None:
    samples = caches.captured([50, 900, 1500, 3, 512] * 4)
    arrays = ("layer_1", "layer_4")
    records = [write(tmp_path / str(k), samples, arrays, queue_bytes) for k, queue_bytes in enumerate((1 << 30, 1, 1 << 16))]
    assert records[0] == records[1] == records[2]
    for path, record in records[0].items():
        data = (temporary_folder(tmp_path / "0", 0, "0") / path).read_bytes()
        assert (record.size, record.sha256) == (len(data), hashlib.sha256(data).hexdigest())


def test_samples_that_end_with_a_chunk_are_stored_and_not_zeros(tmp_path: Path) -> None:
    """The last chunk is still being packed when the shard ends: nothing may touch its buffer then. Wide arrays keep the packers busy."""
    layers, width, shards = tuple(range(1, 9)), 2048, 16
    described = caches.manifest(shards, layer_ids=layers, hidden_size=width)
    captured = [
        [
            CapturedSample(narrow.tokens, {layer: torch.randn(narrow.tokens.num_tokens, width).bfloat16() for layer in layers})
            for narrow in caches.captured([300, 212], seed=shard)
        ]
        for shard in range(shards)
    ]
    cache = Cache.open(caches.write_cache(tmp_path, captured, described))
    for number, sample in enumerate(sample for shard in captured for sample in shard):
        stored = cache.read(number, layers)
        assert all(caches.same_bits(stored.hidden[layer], sample.hidden[layer]) for layer in layers), number


def test_two_writers_share_a_shard_and_one_commits(tmp_path: Path) -> None:
    samples = caches.captured([700, 30])
    caches.write_cache(tmp_path / "one", [samples], caches.manifest(1))
    records = {**write(tmp_path / "two", samples, ("layer_4",)), **write(tmp_path / "two", samples, ("layer_1",))}
    commit_shard(tmp_path / "two", 0, [sample.tokens for sample in samples], records)
    names = {str(path.relative_to(tmp_path / "one")) for path in (tmp_path / "one/shards").rglob("*") if path.is_file()}
    assert names == {str(path.relative_to(tmp_path / "two")) for path in (tmp_path / "two/shards").rglob("*") if path.is_file()}
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in names)


def test_an_array_that_nobody_wrote_or_that_is_too_short_is_not_committed(tmp_path: Path) -> None:
    samples = caches.captured([700, 30])
    tokens = [sample.tokens for sample in samples]
    records = write(tmp_path, samples, ("layer_1",))
    with pytest.raises(CacheError, match=r"missing .*layer_4"):
        commit_shard(tmp_path, 0, tokens, records)
    records |= write(tmp_path, samples[:1], ("layer_4",))
    with pytest.raises(CacheError, match="layer_4 does not have the 730 tokens of the shard's samples"):
        commit_shard(tmp_path, 0, tokens, records)
    assert committed_shards(tmp_path) == set()


def test_states_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    found = create_or_compare(tmp_path, caches.manifest(1))
    good = caches.captured([9])[0]
    wrong = {
        "torch.float32": CapturedSample(good.tokens, {layer: state.float() for layer, state in good.hidden.items()}),
        r"\(8, 24\)": CapturedSample(good.tokens, {layer: state[:8] for layer, state in good.hidden.items()}),
        "layer_4: nothing": CapturedSample(good.tokens, {1: good.hidden[1]}),
    }
    with ShardWriter(tmp_path, 0, found, found.arrays) as writer:
        for message, sample in wrong.items():
            with pytest.raises(CacheError, match=f"chat-0-0.*{message}"):
                writer.append(sample)
    with pytest.raises(CacheError, match="layer_9"):
        ShardWriter(tmp_path, 0, found, ("layer_9",))
    with pytest.raises(CacheError, match="no sample was appended"):
        write(tmp_path, [], ("layer_1",))


def test_abandoned_or_failed_work_leaves_nothing(tmp_path: Path) -> None:
    found = create_or_compare(tmp_path, caches.manifest(1))
    writer = ShardWriter(tmp_path, 0, found, found.arrays)
    writer.append(caches.captured([3000])[0])
    writer.abandon()
    with suppress(ZeroDivisionError), ShardWriter(tmp_path, 0, found, found.arrays) as writer:
        writer.append(caches.captured([3000])[0])
        raise ZeroDivisionError
    assert list((tmp_path / "shards").iterdir()) == []


def test_a_committed_shard_is_not_written_again(tmp_path: Path) -> None:
    caches.write_cache(tmp_path, [caches.captured([9])], caches.manifest(1))
    before = (shard_folder(tmp_path, 0) / "committed.json").read_bytes()
    with pytest.raises(CacheError, match="committed already"):
        write(tmp_path, caches.captured([9]), ("layer_1",))
    assert (shard_folder(tmp_path, 0) / "committed.json").read_bytes() == before


def _write_with_files_limited(cache: str) -> str:
    # The kernel refuses to let a file grow past the limit: the nearest thing to a full disk that needs no rights.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))
    try:
        write(Path(cache), caches.captured([4000]), ("layer_1",))
    except CacheError as error:
        return str(error)
    return "written"


def test_a_disk_that_takes_no_more_is_an_error_that_says_so(tmp_path: Path) -> None:
    message = in_child(_write_with_files_limited, str(tmp_path))
    assert "cannot write" in message
    assert "File too large" in message
    assert committed_shards(tmp_path) == set()


def _peak_growth(cache: str, megabytes: int) -> int:
    """Bytes by which the peak of resident memory grows while that much is written."""
    found = create_or_compare(Path(cache), caches.manifest(1, codec="raw"))
    state = torch.ones(16384, caches.HIDDEN, dtype=torch.bfloat16)
    tokens = caches.captured([16384])[0].tokens
    with ShardWriter(Path(cache), 0, found, ("layer_1",), queue_bytes=1 << 22) as writer:
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(megabytes * 1_000_000 // state.nbytes):
            writer.append(CapturedSample(tokens, {1: state.clone()}))
        writer.close()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) * 1024


def test_memory_does_not_grow_with_the_shard(tmp_path: Path) -> None:
    growth = in_child(_peak_growth, str(tmp_path), 300)
    assert growth < 60_000_000
    assert os.path.getsize(temporary_folder(tmp_path, 0, "0") / "hidden.zarr/layer_1/c/0/0") > 290_000_000
