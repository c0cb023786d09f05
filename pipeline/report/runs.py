"""What a report knows of runs: plain values, put together elsewhere."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

T_975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093),
)
"""Student's t of 97.5 % for 1, 2, … degrees of freedom."""
PARTS = 3
"""Into which a range is cut to tell how much it matters."""


@dataclass(frozen=True)
class Run:
    """One training. `settings` are the values of the fields in which runs differ; `value` is the metric by which they are compared, as
    of the end. `draft_seconds`: of one block, on the machine that made the report."""

    name: str
    folder: str
    state: str
    seed: int
    settings: Mapping[str, Any]
    value: float | None
    records: Sequence[Mapping[str, Any]]
    block_size: int
    parameters: int | None = None
    seconds: float | None = None
    tokens_seen: int = 0
    steps: int = 0
    error: str | None = None
    draft_seconds: float | None = None

    @property
    def ended(self) -> bool:
        """Whether it came to its end, with a metric that it can be compared by."""
        return self.state == "COMPLETE" and self.value is not None and math.isfinite(self.value)

    @property
    def validated(self) -> Mapping[str, Any]:
        """The last line of metrics with a validation."""
        return next((line for line in reversed(self.records) if "val_loss" in line), {})


@dataclass(frozen=True)
class Estimate:
    """A mean and half its 95 % interval (Student's), None of a single value."""

    mean: float
    half: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        mean, count = sum(values) / len(values), len(values)
        if count < 2:
            return cls(mean, None, count)
        spread = math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
        return cls(mean, T_975[min(count - 1, len(T_975)) - 1] * spread / math.sqrt(count), count)


@dataclass(frozen=True)
class Row:
    """One setting over its seeds. `behind`: by how much it is worse than the best setting, over the seeds that both have."""

    settings: Mapping[str, Any]
    runs: Sequence[Run]
    value: Estimate
    behind: Estimate | None
    draft_seconds: float | None
    speedup: float | None

    @property
    def parameters(self) -> int | None:
        return self.runs[0].parameters

    @property
    def walk(self) -> float | None:
        """Mean val_walk_accept_len, what serving would see."""
        return _mean([run.validated.get("val_walk_accept_len") for run in self.runs])

    @property
    def accuracy_by_slot(self) -> list[float]:
        slots = [run.validated["val_accuracy_by_slot"] for run in self.runs if run.validated.get("val_accuracy_by_slot")]
        return [_mean(values) or 0.0 for values in zip(*slots, strict=True)] if slots else []


@dataclass(frozen=True)
class TargetSpeed:
    """Seconds of the target's step: for one token, and by block size for a block to verify; tokens a second of plain forwards."""

    one: float
    blocks: Mapping[int, float]
    tokens_per_second: float | None
    how: str

    def speedup(self, accept_len: float, draft_seconds: float, block_size: int) -> float:
        """Tokens a second with the draft over those without: a step drafts a block, verifies it and commits `accept_len` tokens."""
        return accept_len * self.one / (draft_seconds + self.blocks.get(block_size, self.one))


def leaderboard(runs: Sequence[Run], mode: str, target: TargetSpeed | None) -> list[Row]:
    """Settings that came to an end, best first."""
    by_setting: dict[str, list[Run]] = {}
    for run in runs:
        if run.ended:
            by_setting.setdefault(repr(sorted(run.settings.items(), key=str)), []).append(run)
    sign = 1 if mode == "max" else -1
    ordered = sorted(by_setting.values(), key=lambda group: -sign * _mean_value(group))
    rows = []
    for group in ordered:
        draft = _mean([run.draft_seconds for run in group])
        row = Row(group[0].settings, group, Estimate.of([run.value or 0.0 for run in group]), _behind(group, ordered[0]), draft, None)
        if draft is not None and target is not None and row.walk is not None:
            row = Row(row.settings, group, row.value, row.behind, draft, target.speedup(row.walk, draft, group[0].block_size))
        rows.append(row)
    return rows


def effects(runs: Sequence[Run]) -> dict[str, tuple[dict[Any, Estimate], float]]:
    """By setting: the metric at each of its values, and the share of the variance over runs that these means explain (η²). Of a range,
    of which every run has a value of its own, the share is that of its `PARTS`: of single values it would always be all."""
    ended = [run for run in runs if run.ended]
    values = [run.value or 0.0 for run in ended]
    total = sum((value - sum(values) / len(values)) ** 2 for value in values) if values else 0.0
    found: dict[str, tuple[dict[Any, Estimate], float]] = {}
    for name in ended[0].settings if ended else ():
        groups: dict[Any, list[float]] = {}
        for run in ended:
            groups.setdefault(run.settings[name], []).append(run.value or 0.0)
        if len(groups) < 2:
            continue
        mean = sum(values) / len(values)
        ordered = sorted(groups, key=lambda value: (isinstance(value, str), value if isinstance(value, str) else float(value or 0)))
        shared = _in_parts([groups[value] for value in ordered]) if is_range(ordered) else list(groups.values())
        between = sum(len(group) * (sum(group) / len(group) - mean) ** 2 for group in shared)
        found[name] = ({value: Estimate.of(groups[value]) for value in ordered}, between / total if total else 0.0)
    return dict(sorted(found.items(), key=lambda item: -item[1][1]))


def is_range(values: Iterable[Any]) -> bool:
    """Whether these are so many numbers that they are points of a range rather than choices."""
    values = list(values)
    return len(values) > 2 * PARTS and all(isinstance(value, int | float) for value in values)


def _in_parts(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """`PARTS` neighbouring parts of about as many groups each."""
    edges = [round(part * len(groups) / PARTS) for part in range(PARTS + 1)]
    return [[value for group in groups[low:high] for value in group] for low, high in pairwise(edges)]


def _behind(group: Sequence[Run], best: Sequence[Run]) -> Estimate | None:
    if group is best:
        return None
    reference = {run.seed: run.value for run in best}
    differences = [(reference[run.seed] or 0.0) - (run.value or 0.0) for run in group if run.seed in reference]
    return Estimate.of(differences) if differences else None


def _mean_value(group: Sequence[Run]) -> float:
    return sum(run.value or 0.0 for run in group) / len(group)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
