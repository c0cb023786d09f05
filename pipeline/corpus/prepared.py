"""A prepared corpus, opened: samples by index from a memory-mapped file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from pipeline.corpus.schema import FORMAT_VERSION, SAMPLES
from pipeline.errors import CorpusError
from pipeline.records import TokenSample

SAMPLES_FILE = "samples.arrow"
DROPPED_FILE = "dropped.jsonl"
DESCRIPTION_FILE = "prepared.json"  # written last: a folder without it is not complete


class PreparedCorpus:
    """Samples of one tokenised corpus, in the order of its sources and rows; `len()` of them.

    `fingerprint` is of content and never of paths. `states_fields` are what the target's states depend on (tokenizer, template
    and its arguments, max_tokens, a digest of all token ids in order), `samples_fields` what only masks and splits do. `counts`
    is the account of all rows: rows = kept + Σ dropped; kept rows give `samples`. `num_tokens` int64 [n] are the samples' lengths.
    """

    def __init__(self, path: Path, description: Mapping[str, Any], batches: list[pa.RecordBatch]) -> None:
        self.path = path
        self.fingerprint: str = description["fingerprint"]
        self.states_fields: dict[str, Any] = description["states_fields"]
        self.samples_fields: dict[str, Any] = description["samples_fields"]
        self.counts: dict[str, Any] = description["counts"]
        self._batches = batches
        self.num_tokens: NDArray[np.int64] = np.concatenate(
            [np.zeros(0, dtype=np.int64), *(batch.column("num_tokens").to_numpy().astype(np.int64) for batch in batches)]
        )
        self._ends = np.cumsum([batch.num_rows for batch in batches], dtype=np.int64)

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open the folder of a complete prepared corpus. Raises `CorpusError` when something of it is missing or short."""
        path = Path(path)
        try:
            description = json.loads((path / DESCRIPTION_FILE).read_bytes())
            found = (description["format_version"], (path / SAMPLES_FILE).stat().st_size)
            expected = (FORMAT_VERSION, description["samples_bytes"])
            if found != expected:
                raise CorpusError(f"{path / SAMPLES_FILE}: (format version, bytes) is {found}, expected {expected}. {_again(path)}")
            reader = pa.ipc.open_file(pa.memory_map(str(path / SAMPLES_FILE)))
            if not reader.schema.equals(SAMPLES):
                raise CorpusError(
                    f"{path / SAMPLES_FILE} has other columns than this version writes: {reader.schema.names}. {_again(path)}"
                )
            batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
            corpus = cls(path, description, batches)
        except (OSError, ValueError, KeyError) as error:  # pyarrow's ArrowInvalid is a ValueError
            raise CorpusError(f"the prepared corpus in {path} cannot be read: {error}. {_again(path)}") from error
        if len(corpus) != corpus.counts["samples"]:
            raise CorpusError(f"{path / SAMPLES_FILE} holds {len(corpus)} samples, expected {corpus.counts['samples']}. {_again(path)}")
        return corpus

    @property
    def fields(self) -> dict[str, dict[str, Any]]:
        return {"states": self.states_fields, "samples": self.samples_fields}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def sample_ids(self) -> NDArray[Any]:
        """str [n], the ids of all samples in order."""
        return np.array([name for batch in self._batches for name in batch.column("sample_id").to_pylist()], dtype=object)

    def sample(self, index: int) -> TokenSample:
        """Sample `index` (0 .. len - 1), read from the mapped file."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        place = int(np.searchsorted(self._ends, index, side="right"))
        batch = self._batches[place]
        row = index - (int(self._ends[place]) - batch.num_rows)
        spans = batch.column("loss_mask")[row].values
        return TokenSample(
            sample_id=batch.column("sample_id")[row].as_py(),
            source=batch.column("source")[row].as_py(),
            row=batch.column("row")[row].as_py(),
            split=batch.column("split")[row].as_py(),
            input_ids=batch.column("input_ids")[row].values.to_numpy().copy(),  # a view of the map would be read-only
            spans=np.stack((spans.field("start").to_numpy(), spans.field("length").to_numpy()), axis=1),
        )


def _again(path: Path) -> str:
    return f"Remove {path} and run again; the corpus is then tokenised anew."
