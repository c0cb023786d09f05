"""The space of a sweep, as Optuna has it. Pure: no study, no file.

A parameter is a field's dotted name. Optuna keeps numbers, text, booleans and null; any other value of a choice, such as a list of
layers, goes by its YAML text.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any, TypeAlias

from optuna.trial import Trial

from pipeline.config.fields import shown
from pipeline.config.sweep import DimensionSection

Params: TypeAlias = Mapping[str, Any]
"""By dotted name, what Optuna keeps of a value."""


def suggest(trial: Trial, name: str, values: DimensionSection) -> None:
    """Have the study's sampler choose a value for the trial, unless it has one."""
    if values.choice is not None:
        trial.suggest_categorical(name, [label(value) for value in values.choice])
        return
    low, high = values.ends
    if values.integers is not None:
        trial.suggest_int(name, int(low), int(high))
    else:
        trial.suggest_float(name, low, high, log=values.log_uniform is not None)


def grid(space: Mapping[str, DimensionSection]) -> list[dict[str, Any]]:
    """Every combination of the choices; the last field changes fastest."""
    choices = [[label(value) for value in values.choice or ()] for values in space.values()]
    return [dict(zip(space, combination, strict=True)) for combination in product(*choices)]


def settings(space: Mapping[str, DimensionSection], params: Params) -> dict[str, Any]:
    """The values that `params` stand for. Raises `KeyError` for a parameter that is missing or a value that the space does not have."""
    return {name: _value(values, params[name]) for name, values in space.items()}


def overrides(values: Mapping[str, Any]) -> list[str]:
    """The same as words after the configuration on a command line."""
    return [f"{name}={shown(value)}" for name, value in values.items()]


def label(value: Any) -> Any:
    """What Optuna keeps of a value."""
    return value if value is None or isinstance(value, bool | int | float | str) else shown(value)


def of_all_layers(values: Sequence[Sequence[int] | None]) -> tuple[int, ...] | None:
    """All layers of several choices, in the order in which they come; None when one of them is all that a cache has."""
    if any(layers is None for layers in values):
        return None
    return tuple(dict.fromkeys(layer for layers in values for layer in layers or ()))


def _value(values: DimensionSection, kept: Any) -> Any:
    if values.choice is None:
        return kept
    return {label(value): value for value in values.choice}[kept]
