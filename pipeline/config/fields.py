"""The schema, walked: every field with its dotted path, for `--help`, for overrides and for suggestions."""

import difflib
import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from pipeline.config.schema import Config
from pipeline.config.section import Section

_LIMITS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))


def describe_fields() -> str:
    """One line a field, in the order of the schema: dotted path, type, default, meaning."""
    lines = []
    for path, field in all_fields():
        default = "required" if field.is_required() else shown(field.get_default(call_default_factory=True))
        head = f"{path}: {_type_name(field.annotation, field.metadata)} = {default}"
        lines.append(f"  {head:<66} {field.description or ''}".rstrip())
    return "\n".join(lines)


def all_fields(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Every field with its dotted path; entries of lists and of named sets are shown once, under `*`."""
    for name, field in section.model_fields.items():
        inner = _bare(field.annotation)
        if is_section(inner):
            yield from all_fields(inner, f"{prefix}{name}.")
            continue
        yield f"{prefix}{name}", field
        for argument in filter(is_section, get_args(inner)):
            yield from all_fields(argument, f"{prefix}{name}.*.")


def unknown_part(parts: Sequence[str]) -> str | None:
    """What is wrong with a dotted path, as `path: fault; suggestion`; None where the schema has it."""
    annotation: Any = Config
    for position, part in enumerate(parts):
        annotation, above, here = _bare(annotation), ".".join(parts[:position]), ".".join(parts[: position + 1])
        if is_section(annotation):
            if part not in annotation.model_fields:
                return f"{here}: unknown field; {_suggest(part, above, annotation)}"
            annotation = annotation.model_fields[part].annotation
        elif get_origin(annotation) is tuple:
            if not part.isdecimal():
                return f"{here}: a list is indexed by a number from 0, not by {part!r}"
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        else:
            return f"{here}: unknown field; {above} is a value and has no fields"
    return None


def is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, Section)


def shown(value: Any) -> str:
    """A value in YAML's own spelling, on one line."""
    if isinstance(value, tuple):
        value = list(value)
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("\n...")


def _suggest(name: str, above: str, section: type[Section]) -> str:
    """The nearest name in the section; failing that, the same or nearly the same name anywhere; failing that, what the section has."""
    close = difflib.get_close_matches(name, section.model_fields, n=1, cutoff=0.6)
    if close:
        return f"did you mean {above}.{close[0]}?".replace(" .", " ")
    places: dict[str, list[str]] = {}
    for path, _ in all_fields():
        places.setdefault(path.rpartition(".")[2], []).append(path)
    close = difflib.get_close_matches(name, places, n=1, cutoff=0.75)
    if close:
        return f"did you mean {' or '.join(places[close[0]])}?"
    return f"{above or 'the configuration'} has {', '.join(section.model_fields)}"


def _bare(annotation: Any) -> Any:
    """The type without `Annotated` and `| None`."""
    if get_origin(annotation) is Annotated:
        return _bare(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        members = [member for member in get_args(annotation) if member is not types.NoneType]
        return _bare(members[0]) if len(members) == 1 else annotation
    return annotation


def _type_name(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """A type as a person writes it: `int >= 1`, `bfloat16 | float32`, `list of int | null`."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_name(arguments[0], (*arguments[1:], *metadata))
    constraints = [c for item in metadata for c in (item.metadata if isinstance(item, FieldInfo) else [item])]
    limits = [f" {sign} {getattr(c, name)}" for c in constraints for name, sign in _LIMITS if getattr(c, name, None) is not None]
    if origin is Literal:
        name = " | ".join(str(argument) for argument in arguments)
    elif origin in (Union, types.UnionType):
        name = " | ".join(_type_name(argument) for argument in arguments)
    elif origin is tuple:
        name = f"list of {_type_name(arguments[0])}"
    elif origin is dict:
        name = f"mapping of {_type_name(arguments[1])}"
    elif is_section(annotation):
        name = "sections"
    else:
        name = "null" if annotation is types.NoneType else str(annotation.__name__)
    return name + " and".join(limits)
