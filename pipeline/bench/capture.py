"""What capture adds to a forward of the target: `stages/bench.py capture`.

On the same batches, in turns: capture as it runs (forward, hooks, packing, writing, commit), the bare forward of the layers up to the
deepest that is captured, and what one would write without a pipeline: the whole model with `output_hidden_states=True`.
"""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from pipeline.bench.timing import CLOCKS, Clock, in_turns, rate
from pipeline.cache.manifest import create_or_compare
from pipeline.capture.identity import manifest_of
from pipeline.capture.shards import Work, capture_shards
from pipeline.config.schema import Config
from pipeline.corpus.plan import plan_shards
from pipeline.corpus.prepare import prepare
from pipeline.errors import BenchError
from pipeline.records import TokenSample
from pipeline.report.tables import table
from pipeline.runtime.launch import Launch
from pipeline.runtime.logs import Progress
from pipeline.runtime.ranks import Ranks
from pipeline.target.folder import target_folder
from pipeline.target.load import Target, load_target


def bench_capture(config: Config, ranks: Ranks, max_tokens: int, rounds: int, clock: Clock) -> dict[str, Any]:
    """Tokens a second of each, on the first shards of the corpus of `config`, of about `max_tokens` tokens.

    The cache goes into a temporary folder (`TMPDIR`) and away again. Raises `BenchError` for more than one rank.
    """
    if ranks.world_size > 1:
        raise BenchError("capture is measured in one process; run it without a launcher.")
    corpus = prepare(config)
    shards = plan_shards(corpus.num_tokens, config.capture.shard_tokens)
    taken = [
        number
        for number in range(len(shards))
        if shards[number].start == 0 or _tokens(corpus.num_tokens, shards[number].stop) <= max_tokens
    ]
    manifest = manifest_of(config, corpus, len(shards))
    target = load_target(config.model.target, ranks, manifest.layer_ids, config.capture.final)
    whole = AutoModelForCausalLM.from_pretrained(target_folder(config.model.target.path, config.model.target.revision), dtype=target.dtype)
    whole.to(target.device).eval()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "cache"
        work = Work(
            cache=folder,
            manifest=manifest,
            corpus=corpus,
            lengths=corpus.num_tokens,
            shards=shards,
            pending=dict.fromkeys(range(len(shards)), manifest.arrays),
            larger=False,
            batch_tokens=config.capture.batch_tokens,
            raw_missing=0,
            launch=Launch(folder, ranks),
            ranks=ranks,
        )
        batches = [batch for shard in taken for batch in work.batches(shard)]
        ids = [torch.from_numpy(_padded(batch)).to(target.device) for batch in batches]
        ways = {"capture": _captures(work, target, taken), "bare": _forwards(target, ids), "naive": _whole_forwards(whole, ids)}
        seconds = in_turns(ways, rounds, clock, lambda name: shutil.rmtree(folder, ignore_errors=True))
    tokens = sum(sample.num_tokens for batch in batches for sample in batch)
    return {
        "settings": {
            "target": str(config.model.target.path),
            "dtype": config.model.target.dtype,
            "layers": list(manifest.layer_ids),
            "codec": manifest.codec,
            "batch_tokens": config.capture.batch_tokens,
            "threads": torch.get_num_threads(),
            "clock": clock,
            "rounds": rounds,
        },
        "tokens": tokens,
        "padded_tokens": sum(rows.numel() for rows in ids),
        "samples": sum(len(batch) for batch in batches),
        **rate("tokens_per_second", tokens, seconds["capture"]),
        **rate("bare_tokens_per_second", tokens, seconds["bare"]),
        **rate("naive_tokens_per_second", tokens, seconds["naive"]),
    }


def as_text(found: dict[str, Any]) -> str:
    """The same as a table."""
    names = {"capture": "tokens_per_second", "bare forward": "bare_tokens_per_second", "whole model": "naive_tokens_per_second"}
    ours = found["tokens_per_second"]
    rows = [[name, *(round(value) for value in (found[key], *found[f"{key}_range"])), ours / found[key]] for name, key in names.items()]
    settings = found["settings"]
    return (
        f"{settings['target']}, {settings['dtype']}, layers {settings['layers']}, {settings['codec']}: {found['samples']} samples, "
        f"{found['tokens']:,} tokens ({found['padded_tokens']:,} with padding); {CLOCKS[settings['clock']]}\n\n"
        f"{table(('', 'tokens/s', 'least', 'most', 'capture is'), rows)}"
    )


def _tokens(lengths: np.ndarray, stop: int) -> int:
    return int(lengths[:stop].sum())


def _padded(samples: Sequence[TokenSample]) -> np.ndarray:
    ids = np.zeros((len(samples), max(sample.num_tokens for sample in samples)), np.int64)
    for row, sample in enumerate(samples):
        ids[row, : sample.num_tokens] = sample.input_ids
    return ids


def _captures(work: Work, target: Target, shards: Sequence[int]) -> Callable[[], None]:
    """A cache in a folder that is not there yet."""

    def capture() -> None:
        work.cache.mkdir()
        create_or_compare(work.cache, work.manifest)
        with Progress(1, "tokens", "capturing", False) as progress:
            capture_shards(replace(work), target, shards, progress)

    return capture


def _forwards(target: Target, batches: Sequence[torch.Tensor]) -> Callable[[], None]:
    def forward() -> None:
        with torch.no_grad():
            for ids in batches:
                target.decoder(input_ids=ids, use_cache=False)
        _wait(target.device)

    return forward


def _whole_forwards(model: Any, batches: Sequence[torch.Tensor]) -> Callable[[], None]:
    def forward() -> None:
        with torch.no_grad():
            for ids in batches:
                model(input_ids=ids, output_hidden_states=True, use_cache=False)
        _wait(model.device)

    return forward


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
