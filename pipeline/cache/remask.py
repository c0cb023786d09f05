"""New loss masks or splits for the samples of a cache: `samples.arrow` is written anew, hidden states stay as they are.

States are causal and know nothing of masks. While shards of both kinds lie side by side the manifest says "remasking" and
nobody reads the cache; a run that was killed is taken up by the next.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path

from pipeline.cache.layout import MARKER, SAMPLES, inside, shard_folder
from pipeline.cache.manifest import FileRecord, read_marker, sealed_text
from pipeline.cache.samples import ShardSamples, first_difference, samples_file
from pipeline.errors import CacheMismatchError
from pipeline.records import TokenSample
from pipeline.runtime.files import atomic_file, file_digest


def replace_samples(cache: Path, shard: int, samples: Sequence[TokenSample]) -> None:
    """Put `samples`, in the order of the shard, in the place of those that are there; where that has been done, nothing.

    Raises `CacheMismatchError` naming the first sample whose id or tokens are others than the shard's.
    """
    folder = inside(cache, shard_folder(cache, shard))
    marker, _ = read_marker(cache, shard)
    path, data = inside(cache, folder / SAMPLES), samples_file(samples)
    record = FileRecord(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    if file_digest(path) != record.sha256:
        check_same_tokens(cache, shard, samples)
        with atomic_file(path) as file:
            file.write(data)
    num_supervised = sum(sample.num_supervised for sample in samples)
    new = marker.model_copy(update={"num_supervised": num_supervised, "files": {**marker.files, SAMPLES: record}})
    if new != marker:
        with atomic_file(folder / MARKER) as file:
            file.write(sealed_text(new))


def check_same_tokens(cache: Path, shard: int, samples: Sequence[TokenSample], masks: bool = False) -> None:
    """Raise `CacheMismatchError` unless the shard holds these samples in this order: ids and tokens; with `masks`, masks and splits too."""
    path = inside(cache, shard_folder(cache, shard) / SAMPLES)
    stored = ShardSamples.open(path, read_marker(cache, shard)[0].files[SAMPLES].sha256)
    columns = ("sample_id", "input_ids", *(("loss_mask", "split") if masks else ()))
    if found := first_difference(stored, samples, columns):
        position, column = found
        there = stored.sample(position).sample_id if position < len(stored) else "(none)"
        ours = samples[position].sample_id if position < len(samples) else "(none)"
        raise CacheMismatchError(
            f"{path}, sample {position}: its {column} is not that of the corpus (cache {there}, corpus {ours}). The corpus must hold what "
            "the cache was captured from, unchanged and in the same order; new rows may stand anywhere between."
        )
