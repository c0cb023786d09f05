"""YAML file and overrides in, a `Config` out; or one error that lists every fault at once.

The file is laid over the defaults before `${a.b}` is resolved, so that an interpolation can name a field that the file leaves
alone. What a stage cannot do without is a table here and not part of the schema, because one file drives all stages.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal, TypeAlias, cast

import yaml
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from pipeline.config.fields import all_fields, describe_fields, shown, unknown_part
from pipeline.config.schema import Config
from pipeline.config.sweep import DimensionSection
from pipeline.errors import ConfigError

__all__ = ["Stage", "describe_fields", "load_config", "to_yaml"]

Stage: TypeAlias = Literal["corpus", "capture", "train", "sweep", "evaluate", "regenerate"]
Tree: TypeAlias = dict[Any, Any]

_UNRESOLVED = object()  # stands for a value whose fault has been listed already


def load_config(stage: Stage, path: str, overrides: Sequence[str]) -> Config:
    """Read the YAML file at `path`, apply `a.b=c` overrides, resolve `${a.b}`, check everything that `stage` needs.

    `model_fields_set` of each section holds the fields that file and overrides name.

    Raises `ConfigError` whose message lists each fault with its dotted path.
    """
    given = _read(path)
    faults = [fault for override in overrides if (fault := _apply(override, given))]
    config = _checked(given, faults)
    if config is not None:
        faults += _unmet(stage, config)
    if stage == "sweep":
        faults = list(dict.fromkeys([*faults, *_space_faults(given)]))
    if faults or config is None:
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        raise ConfigError(f"{path}: {count} in the configuration of {stage}\n" + "\n".join(f"  {fault}" for fault in faults))
    return config


def to_yaml(config: Config, *, named_only: bool = False) -> str:
    """The resolved configuration; `load_config` reads it back to an equal `Config`.

    Every field is written out, or with `named_only` those that file and overrides named: only they are compared with a cache, so
    what was silent then stays silent when the text is run again.
    """
    return yaml.safe_dump(config.model_dump(mode="json", exclude_unset=named_only), sort_keys=False, allow_unicode=True)


# ---- reading, overriding, merging, resolving


def _read(path: str) -> Tree:
    try:
        loaded = OmegaConf.load(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a YAML configuration, such as those in configs/") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error!s}") from error
    if not isinstance(loaded, DictConfig):
        raise ConfigError(f"{path}: holds a list, expected sections such as `model:` and `data:`")
    return cast(Tree, OmegaConf.to_container(loaded, resolve=False))


def _apply(override: str, given: Tree) -> str | None:
    """Set the field that `override` names inside `given`, or return what is wrong with it."""
    name, equals, text = override.partition("=")
    if not equals:
        return f"{override}: an override is written a.b=value"
    parts = name.split(".")
    if parts[:2] == ["sweep", "space"] and len(parts) > 3:
        # The names of fields are keys there: sweep.space.model.optim.lr={choice: …}, or sweep.space.model.optim.lr.choice=….
        end = len(parts) if unknown_part(parts[2:]) is None else -1
        parts[2:end] = [".".join(parts[2:end])]
    if fault := unknown_part(parts):
        return fault
    try:
        value = cast(Tree, OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]), resolve=False))["value"]
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        return f"{name}: {text!r} is not a YAML value: {' '.join(str(error).split())}"
    place: Any = given
    for position, part in enumerate(parts):
        last = position == len(parts) - 1
        key: Any = part
        if isinstance(place, list):
            if int(part) >= len(place):
                return f"{name}: the list has {len(place)} entries; an override can change one, not add one"
            key = int(part)
        elif not isinstance(place, dict):
            return f"{name}: {'.'.join(parts[:position])} is {place!r} in the file; override it as a whole"
        elif not last and place.get(part) is None:
            place[part] = [] if parts[position + 1].isdecimal() else {}
        if last:
            both = isinstance(place, dict) and isinstance(place.get(key), dict) and isinstance(value, dict)
            place[key] = _merge(place[key], value) if both else value
        else:
            place = place[key]
    return None


def _merge(below: Tree, above: Tree) -> Tree:
    """`above` laid over `below`, section by section; a list replaces a list. A section left empty in YAML (null) changes nothing."""
    merged = dict(below)
    for key, value in above.items():
        if not isinstance(merged.get(key), dict):
            merged[key] = value
        elif isinstance(value, dict):
            merged[key] = _merge(merged[key], value)
        elif value is not None:
            merged[key] = value
    return merged


def _named(resolved: Tree, given: Tree) -> Tree:
    """What `given` names of `resolved`: so a `Config` knows, by `model_fields_set`, which fields are the user's and which are defaults."""
    return {
        key: _named(resolved[key], value) if isinstance(resolved[key], dict) and isinstance(value, dict) else resolved[key]
        for key, value in given.items()
        if value is not None or not isinstance(resolved[key], dict)
    }


def _checked(given: Tree, faults: list[str]) -> Config | None:
    merged = _merge(Config().model_dump(mode="json"), given)
    return _validate(_named(_resolve(OmegaConf.create(merged), "", faults), given), faults)


def _resolve(node: Any, path: str, faults: list[str]) -> Any:
    """Plain values with interpolations replaced. Resolved one by one, so that every one that fails is listed."""
    if isinstance(node, DictConfig):
        return {key: _resolve_child(node, key, path + str(key), faults) for key in node}
    if isinstance(node, ListConfig):
        return [_resolve_child(node, i, f"{path}{i}", faults) for i in range(len(node))]
    return node


def _resolve_child(node: Any, key: Any, path: str, faults: list[str]) -> Any:
    try:
        return _resolve(node[key], f"{path}.", faults)
    except OmegaConfBaseException as error:
        faults.append(f"{path}: {str(error).splitlines()[0]}")
        return _UNRESOLVED


# ---- checking


def _validate(values: Tree, faults: list[str]) -> Config | None:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        messages: dict[str, list[str]] = {}
        ends: dict[str, str] = {}
        for item in error.errors(include_url=False):
            location, found = _locate(item["loc"], values, keep_last=item["type"] == "missing")
            if found is _UNRESOLVED:
                continue
            path = ".".join(location)
            # A field that may be of several types has one message for each.
            messages.setdefault(path, []).append(_message(item["type"], item["msg"], location))
            if item["type"] not in ("extra_forbidden", "missing", "value_error"):
                ends[path] = f"; found {repr(found) if isinstance(found, str) else shown(found)}"
        # What concerns several sections has no path.
        faults += [
            (f"{path}: " if path else "") + ", or ".join(dict.fromkeys(texts)) + ends.get(path, "") for path, texts in messages.items()
        ]
        return None


def _locate(loc: tuple[int | str, ...], values: Any, keep_last: bool) -> tuple[list[str], Any]:
    """The part of a pydantic location that exists in `values` (it adds names of union members), and the value found there."""
    location: list[str] = []
    for position, part in enumerate(loc):
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            if keep_last and position == len(loc) - 1:
                location.append(str(part))
            break
        location.append(str(part))
    return location, values


def _message(kind: str, text: str, location: list[str]) -> str:
    if kind == "extra_forbidden":
        return (unknown_part(location) or "").partition(": ")[2] or "unknown field"
    if kind == "missing":
        return "not set, and it has no default"
    if kind in ("model_type", "dict_type"):
        return "expected a section of fields"
    return text.removeprefix("Value error, ").removeprefix("Input ")


def _space_faults(given: Tree) -> Iterator[str]:
    """Fields of `sweep.space` that are not there or that a sweep sets itself, and values that a field does not take."""
    resolved = _resolve(OmegaConf.create(_merge(Config().model_dump(mode="json"), given)), "", [])
    space = resolved["sweep"]["space"] if isinstance(resolved["sweep"], dict) else None
    if not space:
        yield "sweep.space: not set, and a sweep needs it (by dotted name, the values of a field to try)"
    for name, entry in space.items() if isinstance(space, dict) else ():
        reason = SET_BY_SWEEPS.get(name) or SET_BY_SWEEPS.get(name.split(".")[0])
        if fault := unknown_part(name.split(".")):
            yield f"sweep.space: {fault}"
        elif reason is not None:
            yield f"sweep.space: {name} cannot be swept: {reason}"
        else:
            # Faults of other fields may go away once those have their values of the space too: then they are the trial's.
            found = [fault for value in _samples(entry) for fault in _faults_of(name, value, given)]
            yield from (f"sweep.space: {fault}" for fault in found if fault.startswith((f"{name}:", f"{name}.")))


def _samples(entry: Any) -> tuple[Any, ...]:
    try:
        return DimensionSection.model_validate(entry).samples
    except ValidationError:
        return ()  # told already, where it stands


def _faults_of(name: str, value: Any, given: Tree) -> list[str]:
    tree, faults = deepcopy(given), list[str]()
    if fault := _apply(f"{name}={shown(value)}", tree):
        return [fault]
    _checked(tree, faults)
    return faults


SET_BY_SWEEPS = {
    "sweep": "it is what the sweep itself is told",
    "name": "trials are named by their numbers",
    "exp_manager": "every trial has a folder of its own, and the rest of it changes nothing in a draft",
    "trainer.seed": "name the seeds in sweep.seeds",
    "trainer.devices": "each trial is trained by one process",
    "trainer.num_nodes": "each trial is trained by one process",
    "data.mode": "a sweep reads a cache",
}

# ---- what a stage cannot do without: path of the field, whether it is there

_Need: TypeAlias = tuple[str, Callable[[Config], bool]]
_TARGET: _Need = ("model.target.path", lambda c: c.model.target.path is not None)
_CHATS: _Need = ("data.train_ds.input_cfg", lambda c: len(c.data.train_ds.input_cfg) > 0)
_CACHE: _Need = ("data.cache", lambda c: c.cache_path is not None)
_CAPTURE: _Need = ("capture.path", lambda c: c.capture.path is not None)
_MASK: _Need = ("model.draft.mask_token_id", lambda c: c.model.draft.mask_token_id is not None)
_OUTPUT: _Need = ("regenerate.output", lambda c: c.regenerate.output is not None)
_LENGTH: _Need = ("trainer.max_steps", lambda c: (c.trainer.max_steps or c.trainer.max_epochs) is not None)

_NEEDS: Mapping[str, tuple[_Need, ...]] = {
    "corpus": (_TARGET, _CHATS),
    "capture": (_TARGET, _CHATS, _CAPTURE),
    "train": (_CACHE, _MASK, _LENGTH),
    "sweep": (_CACHE, _MASK, _LENGTH, ("data.mode", lambda c: c.data.mode == "offline")),
    "train online": (_TARGET, _CHATS, _MASK, _LENGTH),
    "train hybrid": (_TARGET, _CHATS, _CAPTURE, _MASK, _LENGTH),
    "regenerate": (_TARGET, _CHATS, _OUTPUT),
    "regenerate by server": (
        _CHATS,
        _OUTPUT,
        ("regenerate.servers", lambda c: len(c.regenerate.servers) > 0),
        ("regenerate.model", lambda c: (c.regenerate.model or c.model.target.path) is not None),
    ),
    "evaluate": (_TARGET, ("evaluate.input_cfg", lambda c: len(c.evaluate.input_cfg) > 0)),
}


def _unmet(stage: Stage, config: Config) -> Iterator[str]:
    descriptions = {path: field.description for path, field in all_fields()}
    what: str = stage
    if stage == "train" and config.data.mode != "offline":
        what = f"train {config.data.mode}"
    elif stage == "regenerate" and config.regenerate.backend == "server":
        what = "regenerate by server"
    for path, there in _NEEDS[what]:
        if not there(config) and not (stage == "sweep" and path in config.sweep.space):
            if path == "data.mode":
                yield f"data.mode: {config.data.mode}, and a sweep trains from a cache: offline"
            else:
                yield f"{path}: not set, and {what} needs it ({descriptions[path]})"
