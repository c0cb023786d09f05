"""What decides the answers of a folder, kept in it; a run with other settings, or on other prompts, is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config.schema import Config
from pipeline.errors import RegenerateError
from pipeline.regenerate.assemble import ANSWERS, FAILED, REPORT
from pipeline.regenerate.prompts import Digest
from pipeline.runtime.files import write_json

SETTINGS = "settings.json"
FORMAT_VERSION = 1
_ABSENT = object()


def settings_of(config: Config, prompts: Digest, target: Mapping[str, Any]) -> dict[str, Any]:
    """All that decides the answers. `target` is what is known of the target: digests of its files, or its name at a server.

    Addresses, concurrency and retries are no part of it.
    """
    section = config.regenerate
    sampled = section.temperature > 0
    return {
        "format_version": FORMAT_VERSION,
        "backend": section.backend,
        "target": dict(target),
        "chat_template_kwargs": dict(config.model.target.chat_template_kwargs),
        "prompts": {"rows": prompts.rows, "digest": prompts.digest},
        "max_new_tokens": section.max_new_tokens,
        "temperature": section.temperature,
        # Greedy decoding takes no notice of these.
        "top_p": section.top_p if sampled else None,
        "top_k": section.top_k if sampled else None,
        "seed": section.seed if sampled else None,
        "keep_reasoning": section.keep_reasoning,
    }


def open_output(path: str | None) -> Path:
    """The folder of answers, made where it is not there. Raises `RegenerateError` where it cannot be."""
    output = Path(path or "").expanduser()
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RegenerateError(f"regenerate.output {output} cannot be made: {error.strerror}; expected a folder for the answers.") from error
    return output


def create_or_compare(output: Path, settings: Mapping[str, Any]) -> None:
    """Keep the settings in a new folder of answers, or compare them with those that it was begun with.

    Raises `RegenerateError` with every field that differs.
    """
    path = output / SETTINGS
    if not path.exists():
        if any((output / "journal").glob("*.jsonl")):
            raise RegenerateError(
                f"{output} has a journal and no {SETTINGS}: it was copied in part. Copy it whole, or take another folder."
            )
        if foreign := [name for name in (ANSWERS, FAILED, REPORT) if (output / name).exists()]:
            raise RegenerateError(
                f"{output} has {', '.join(foreign)} and no {SETTINGS}, so that is not of a run of this stage, and would be written over. "
                "Name another folder in regenerate.output."
            )
        write_json(path, settings)
        return
    try:
        there = _flat(json.loads(path.read_bytes()))
    except (OSError, ValueError) as error:
        raise RegenerateError(f"{path} cannot be read: {error}. Restore it, or answer into another folder.") from error
    ours = _flat(json.loads(json.dumps(settings)))
    lines = [
        f"  {name}: the folder has {_shown(there.get(name, _ABSENT))}, this run {_shown(ours.get(name, _ABSENT))}"
        for name in sorted(there.keys() | ours.keys())
        if there.get(name, _ABSENT) != ours.get(name, _ABSENT)
    ]
    if lines:
        raise RegenerateError(
            f"{output} was begun with other settings or prompts, and answers of both would be mixed:\n"
            + "\n".join(lines)
            + "\nSet them back, or name another folder in regenerate.output."
        )


def _flat(value: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{above}{key}.") if isinstance(inner, dict) else {f"{above}{key}": inner}
    return flat


def _shown(value: object) -> str:
    return "nothing" if value is _ABSENT else json.dumps(value)
