"""What the lossy codecs cost a draft: `stages/bench.py codecs`.

One configuration is trained from a lossless cache and from the same cache in `int8` and `int4`, over several seeds. A seed fixes the
draft's first weights, the order of samples and all anchors: runs of one seed differ in the codec alone, and are compared in pairs.
Every export is then scored on the lossless held-out states, which are those that serving would give it. Intervals are Student's.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pipeline.cache.info import info
from pipeline.cache.reader import Cache
from pipeline.cache.recode import Codec, recode
from pipeline.config.schema import Config
from pipeline.draft.export import load_draft
from pipeline.draft.loss import layout_of
from pipeline.errors import ConfigError, TrainingError
from pipeline.report.runs import T_975
from pipeline.report.tables import table
from pipeline.runtime.files import write_json
from pipeline.runtime.ranks import Ranks
from pipeline.train.data import TrainingData, open_cache, validation_sets
from pipeline.train.evaluate import score
from pipeline.train.loop import train
from pipeline.train.step import Sums

log = logging.getLogger(__name__)

LOSSLESS = "lossless"
LOSSY: tuple[Codec, ...] = ("int8", "int4")


@dataclass(frozen=True, slots=True)
class Interval:
    """The mean of paired differences and its 95 % interval."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, differences: Sequence[float]) -> "Interval":
        values = torch.tensor(differences, dtype=torch.float64)
        reach = T_975[min(len(values) - 1, len(T_975)) - 1] * float(values.std()) / math.sqrt(len(values))
        return cls(float(values.mean()), float(values.mean()) - reach, float(values.mean()) + reach)


def bench_codecs(config: Config, ranks: Ranks, num_seeds: int) -> dict[str, Any]:
    """Train `num_seeds` drafts of `config` a codec in `config.log_dir`, from `trainer.seed` on; what is there already is not done again.

    Raises `ConfigError` unless it is one process, two seeds at least, and an offline configuration whose cache is lossless and has
    held-out samples.
    """
    if ranks.world_size > 1 or num_seeds < 2 or config.data.mode != "offline" or config.cache_path is None:
        raise ConfigError("codecs are compared in one process, over two seeds or more, from the cache that data.cache names.")
    folder, source = Path(config.log_dir), Path(config.cache_path)
    data = open_cache(config)
    if not validation_sets(data):
        raise ConfigError(f"{source} has no held-out samples; set data.validation_ds when it is captured.")
    caches: dict[str, Path] = {LOSSLESS: source} | {codec: folder / "caches" / codec for codec in LOSSY}
    for codec in LOSSY:
        recode(source, caches[codec], codec)
    seeds = range(config.trainer.seed, config.trainer.seed + num_seeds)
    accept: dict[str, list[float]] = {codec: [] for codec in caches}
    for seed in seeds:
        for name, cache in caches.items():
            run = _with(config, cache, folder / name / f"seed_{seed}", seed)
            if not train(run, ranks):
                raise TrainingError(f"stopped at {run.log_dir}; the same command goes on from there.")
            accept[name].append(held_out_accept_len(run, data, Path(run.log_dir) / "export"))
            log.info("seed %d, %s: accept_len %.4f", seed, name, accept[name][-1])
    baseline = sum(accept[LOSSLESS]) / num_seeds
    found: dict[str, Any] = {"cache": str(source), "seeds": list(seeds), "accept_len": accept, "codecs": {}}
    for codec in LOSSY:
        change = Interval.of([a - b for a, b in zip(accept[codec], accept[LOSSLESS], strict=True)])
        sizes = info(caches[codec])
        found["codecs"][codec] = {
            "of_raw": sizes["bytes"]["hidden.zarr"] / sizes["raw_bytes"],
            "relative_error": relative_errors(source, caches[codec]),
            "accept_len_change": [change.mean, change.low, change.high],
            "accept_len_change_percent": [100 * value / baseline for value in (change.mean, change.low, change.high)],
            "less_than_1_percent_lost": change.low > -0.01 * baseline,
        }
    write_json(folder / "codecs.json", found)
    return found


def held_out_accept_len(config: Config, data: TrainingData, export: Path) -> float:
    """accept_len of an exported draft, computed in float32, over every usable anchor of all held-out samples of `data`."""
    draft = load_draft(export).float().eval()
    bundle = data.bundle.to(torch.device("cpu"), torch.float32)
    layout = layout_of(draft.config, config.model.objective)
    total = torch.zeros(len(Sums.zero(layout).values), dtype=torch.float64)
    with torch.no_grad():
        for numbers in validation_sets(data).values():
            for number in numbers:
                total += score(draft, bundle, config.model.objective, data.source([number])[0])[0]
    metrics = Sums(tuple(total.tolist()), layout).metrics()
    if not metrics:
        raise TrainingError("the held-out samples have no usable anchor; lower model.draft.block_size.")
    return float(metrics["accept_len"])


def relative_errors(exact: Path, rounded: Path) -> dict[str, float]:
    """By array, the root mean square of what was rounded away over that of the states, over all tokens."""
    first, second = Cache.open(exact), Cache.open(rounded)
    sums = {layer: torch.zeros(2, dtype=torch.float64) for layer in first.manifest.layer_ids}
    for number in range(len(first)):
        states, found = first.read(number).hidden, second.read(number).hidden
        for layer in sums:
            wanted = states[layer].double()
            sums[layer] += torch.stack(((found[layer].double() - wanted).square().sum(), wanted.square().sum()))
    return {f"layer_{layer}": float((error / size).sqrt()) for layer, (error, size) in sums.items()}


def as_text(found: dict[str, Any]) -> str:
    """The same as a table."""
    rows = []
    for codec, values in found["codecs"].items():
        mean, low, high = values["accept_len_change_percent"]
        errors = ", ".join(f"{name.removeprefix('layer_')}: {100 * error:.2f} %" for name, error in values["relative_error"].items())
        claim = "yes" if values["less_than_1_percent_lost"] else "not shown"
        rows.append([codec, f"{values['of_raw']:.3f}", errors, f"{mean:+.2f} % [{low:+.2f}, {high:+.2f}]", claim])
    runs = [[seed, *(found["accept_len"][codec][place] for codec in found["accept_len"])] for place, seed in enumerate(found["seeds"])]
    header = ("codec", "of raw", "relative error by layer", "accept_len against lossless, 95 % interval", "less than 1 % lost")
    return f"{table(('seed', *found['accept_len']), runs)}\n\n{table(header, rows)}"


def _with(config: Config, cache: Path, folder: Path, seed: int) -> Config:
    return config.model_copy(
        update={
            "data": config.data.model_copy(update={"cache": str(cache)}),
            "trainer": config.trainer.model_copy(update={"seed": seed}),
            "exp_manager": config.exp_manager.model_copy(update={"explicit_log_dir": str(folder)}),
        }
    )
