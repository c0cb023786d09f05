"""Pictures of a run, drawn without a display and without pyplot's global state."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

Records = Sequence[Mapping[str, Any]]
"""Lines of `metrics.jsonl`: each has `step` and some metrics."""


def plot_training(records: Records, path: Path, title: str) -> None:
    """PNG of three panels: loss over steps, acceptance length over steps, and accuracy by slot of the newest record that has it.

    Records without any of these give empty panels, so that a short run still has its picture.
    """
    figure = Figure(figsize=(15, 4.5), layout="constrained")
    loss, acceptance, slots = figure.subplots(1, 3)
    _lines(loss, records, {"loss": "training", "val_loss": "validation"}, "loss (weighted mean)")
    shown = {"accept_len": "training", "val_accept_len": "validation", "val_walk_accept_len": "validation, walk"}
    shown |= {"base_accept_len": "training, before the correction", "val_base_accept_len": "validation, before the correction"}
    _lines(acceptance, records, shown, "acceptance length (tokens a step)")
    for key, label in (("accuracy_by_slot", "training"), ("val_accuracy_by_slot", "validation")):
        newest = next((record for record in reversed(records) if record.get(key)), None)
        if newest is not None:
            values = newest[key]
            slots.plot(range(1, len(values) + 1), values, marker="o", label=f"{label}, step {newest['step']}")
    _finish(slots, "slot", "accuracy")
    slots.set_ylim(0, 1)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def plot_served(lengths: Mapping[int, int], path: Path, title: str) -> None:
    """PNG of how many decoding steps committed 1, 2, … tokens."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.bar(list(lengths), list(lengths.values()))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(xlabel="tokens committed in a step", ylabel="steps", title=title)
    figure.savefig(path, dpi=110)


def plot_histograms(panels: Sequence[tuple[str, Mapping[str, NDArray[np.int64]]]], path: Path, title: str) -> None:
    """PNG of a histogram a panel: its axis, and counts by name, which share their bins."""
    figure = Figure(figsize=(5 * len(panels), 4.5), layout="constrained")
    for axes, (label, values) in zip(np.atleast_1d(figure.subplots(1, len(panels))), panels, strict=True):
        every = np.concatenate(list(values.values()))
        bins = np.histogram_bin_edges(every, bins=min(60, max(1, int(every.max(initial=0) - every.min(initial=0)) + 1)))
        for name, numbers in values.items():
            axes.hist(numbers, bins=bins, histtype="step", linewidth=1.5, label=name)
        _finish(axes, label, "samples")
    figure.suptitle(title)
    figure.savefig(path, dpi=110)


def _lines(axes: Axes, records: Records, shown: Mapping[str, str], label: str) -> None:
    for key, name in shown.items():
        points = [(record["step"], record[key]) for record in records if key in record]
        if points:
            axes.plot(*zip(*points, strict=True), marker="." if len(points) < 50 else None, label=name)
    _finish(axes, "optimizer step", label)


def _finish(axes: Axes, xlabel: str, ylabel: str) -> None:
    axes.set(xlabel=xlabel, ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if axes.has_data():
        axes.legend()
