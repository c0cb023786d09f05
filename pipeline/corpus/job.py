"""What a configuration asks to be tokenised, and by which rules: the parts of its sources, and the fingerprint of it all."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from pipeline.config.schema import Config, DataSection, InputSection
from pipeline.corpus.chat import MASK_RULES, load_tokenizer, read_template
from pipeline.corpus.samples import Reader, Rules
from pipeline.corpus.schema import FORMAT_VERSION
from pipeline.corpus.select import TRAIN
from pipeline.corpus.sources import PART_BYTES, PART_ROWS, Part, Source, divide_all, find_sources
from pipeline.corpus.turns import open_template, template_text

log = logging.getLogger(__name__)

LATER_RULES: dict[str, Any] = {
    name: DataSection.model_fields[name].default
    for name in ("too_long", "drop_duplicates", "loss_on", "one_sample_per_turn", "mask_reasoning")
}
"""Fields of `data`, with their defaults, that are part of the identity of samples only where they are not at their default: caches were
written before there were any."""


@dataclass(frozen=True, slots=True)
class Job:
    """All that decides what a prepared corpus holds, and where it lies. `states_fields` still lack the digest of the ids,
    `samples_fields` that of masks and splits: those are known at the end."""

    folder: Path
    fingerprint: str
    reader: Reader
    template_name: str
    drop_duplicates: bool
    sources: list[Source]
    parts: list[Part]
    states_fields: dict[str, Any]
    samples_fields: dict[str, Any]


def plan(config: Config) -> Job:
    """Find the sources, divide them into parts, try the template and take the fingerprint. Writes nothing."""
    data, target = config.data, config.model.target
    reader = reader_of(config)
    sources = find_sources(input_sets(data))
    parts = list(divide_all(sources))
    rules = reader.rules
    states_fields = {
        **tokenizer_fields(reader.template.tokenizer),
        "chat_template_kwargs": dict(target.chat_template_kwargs),
        "max_tokens": rules.max_tokens,
    }
    samples_fields = {
        "mask_rules": MASK_RULES,
        "min_supervised_tokens": rules.min_supervised,
        "heldout_fraction": rules.heldout_fraction,
        "validation_sets": list(data.validation_ds.datasets),
        **_other_rules(data),
    }
    digests: dict[int, list[str]] = {id(source): [] for source in sources}
    for part in parts:
        digests[id(part.source)].append(part.digest)
    contents = [[source.split, digests[id(source)], *([source.reading] if source.reading else [])] for source in sources]
    division = [FORMAT_VERSION, PART_ROWS, PART_BYTES]
    fingerprint = digest_of(json.dumps([division, states_fields, samples_fields, contents], sort_keys=True))
    return Job(
        folder=Path(data.prepared_dir).expanduser() / fingerprint[:16],
        fingerprint=fingerprint,
        reader=reader,
        template_name=target.chat_template or f"of the tokenizer in {target.path}",
        drop_duplicates=data.drop_duplicates,
        sources=sources,
        parts=parts,
        states_fields=states_fields,
        samples_fields=samples_fields,
    )


def input_sets(data: DataSection) -> dict[str, Sequence[InputSection]]:
    """The sources of every set, by its name."""
    return {TRAIN: data.train_ds.input_cfg, **{name: ds.input_cfg for name, ds in data.validation_ds.datasets.items()}}


def reader_of(config: Config) -> Reader:
    """The target's template, tried unless no source holds chats, and the rules that `data` sets."""
    data, target = config.data, config.model.target
    rules = Rules(
        max_tokens=data.max_tokens,
        min_supervised=data.min_supervised_tokens,
        heldout_fraction=data.validation_ds.fraction,
        too_long=data.too_long,
        loss_on=data.loss_on,
        one_sample_per_turn=data.one_sample_per_turn,
        mask_reasoning=data.mask_reasoning,
    )
    tokenizer = load_tokenizer(target)
    if not any(_holds_chats(given) for inputs in input_sets(data).values() for given in inputs):
        return Reader(open_template(tokenizer, target.chat_template_kwargs), rules)
    template = read_template(tokenizer, target.chat_template_kwargs)
    if not template.shape.end and not template.marked:
        log.warning("the chat template ends an answer with no special token of this tokenizer, so no end token is supervised")
    return Reader(template, rules)


def _holds_chats(given: InputSection) -> bool:
    return given.type not in ("text", "tokens") and "text" not in given.keys


def _other_rules(data: DataSection) -> dict[str, Any]:
    return {name: getattr(data, name) for name, default in LATER_RULES.items() if getattr(data, name) != default}


def tokenizer_fields(tokenizer: Any) -> dict[str, str]:
    """Digests of tokenizer and chat template. Of what the tokenizer does: saved again in other files it is the same one."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # every call sets both anew, so neither is part of what it is
    backend.no_padding()
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return {
        "tokenizer": digest_of(backend.to_str() + json.dumps(special, sort_keys=True)),
        "chat_template": digest_of(template_text(tokenizer)),
    }


def digest_of(text: str) -> str:
    """SHA-256 of a text, in hex."""
    return sha256(text.encode()).hexdigest()
