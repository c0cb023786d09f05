"""Seconds, and calls that take turns, so that what is compared was measured in the same minutes."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

Clock = Literal["wall", "cpu"]
"""What seconds are: those of the clock, or those that processors spent, over all threads: for machines that do other things besides."""

CLOCKS = {"wall": "clock time", "cpu": "processor time of all threads"}


def now(clock: Clock) -> float:
    return time.process_time() if clock == "cpu" else time.perf_counter()


def in_turns(
    ways: Mapping[str, Callable[[], None]], rounds: int, clock: Clock, before: Callable[[str], None] = lambda name: None
) -> dict[str, list[float]]:
    """Seconds of every call of `ways`, by name: `rounds` each, in an order that turns, after a call of each that does not count.

    `before(name)` runs ahead of every call and is not timed.
    """
    for name, call in ways.items():
        before(name)
        call()
    found: dict[str, list[float]] = {name: [] for name in ways}
    names = list(ways)
    for turn in range(rounds):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            before(name)
            begin = now(clock)
            ways[name]()
            found[name].append(now(clock) - begin)
    return found


def rate(name: str, amount: float, seconds: list[float]) -> dict[str, Any]:
    """`amount` a second, by the median, and the range, under `name` and `name`_range."""
    return {name: amount / statistics.median(seconds), f"{name}_range": [amount / max(seconds), amount / min(seconds)]}


def median_of(name: str, seconds: list[float]) -> dict[str, Any]:
    """The median and the range, under `name` and `name`_range."""
    return {name: statistics.median(seconds), f"{name}_range": [min(seconds), max(seconds)]}
