"""Whether a cache is the one that a training's configuration means, and a target the one that a draft was trained on.

Training from a cache needs neither target nor corpus. But where its configuration names them and they are on this machine,
they are compared: a cache of another target or of other chats would train without any complaint, and serve badly. Fields that the
configuration leaves at their defaults are the cache's own affair.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.cache.manifest import Difference, check_identity
from pipeline.cache.reader import Cache
from pipeline.config.schema import Config, TargetSection
from pipeline.corpus.chat import load_tokenizer
from pipeline.corpus.prepare import LATER_RULES, open_prepared, prepare, tokenizer_fields
from pipeline.corpus.prepared import PreparedCorpus
from pipeline.errors import CorpusError, DraftError, TargetError
from pipeline.target.folder import find_target, target_fields

log = logging.getLogger(__name__)

TRAINED_ON = "trained_on.json"
"""Beside an exported draft: the states' identity that it was trained on."""
SERVED_OTHERWISE = ("target.dtype", "target.attn_implementation", "chat_template", "chat_template_kwargs")
"""A draft works with another one of these, and is accepted less often."""


def check_cache(config: Config, cache: Cache) -> None:
    """Raise `CacheMismatchError`, field by field, when `cache` is not of what `config` names. Every rank may call it; a corpus that is
    not tokenised here is tokenised by one of them, while the others wait for its lock."""
    manifest = cache.manifest
    states, samples = _named_settings(config, manifest.states_identity, manifest.samples_identity)
    if (target := find_target(config.model.target)) is not None:
        states |= _target_there(target, manifest.states_identity)
    elif config.model.target.path:
        log.info("model.target.path %s is not on this machine: not compared with the cache's target", config.model.target.path)
    check_identity(cache.path, manifest, states, samples)  # before the corpus, which may take longer
    if (corpus := _corpus(config, cache)) is not None:
        check_identity(cache.path, manifest, {"token_ids": corpus.states_fields["token_ids"]}, corpus.samples_fields)


def check_target(section: TargetSection, draft: Path) -> None:
    """Raise `DraftError`, field by field, when the exported `draft` was trained on another target; what it only suffers from is a warning.

    A draft that does not say what it was trained on is not compared.
    """
    try:
        trained_on: Any = json.loads((draft / TRAINED_ON).read_bytes())
        if not isinstance(trained_on, dict):
            raise ValueError(f"expected an object, found a {type(trained_on).__name__}")
    except FileNotFoundError:
        log.info("%s does not say which target it was trained on (%s): not compared", draft, TRAINED_ON)
        return
    except ValueError as error:
        raise DraftError(f"{draft / TRAINED_ON} cannot be read: {error}. Export the draft again, or remove the file.") from error
    run: dict[str, Any] = {
        **tokenizer_fields(load_tokenizer(section)),
        "chat_template_kwargs": section.chat_template_kwargs,
        "target": target_fields(section),
    }
    found = [difference for name in sorted(run) for difference in Difference.between(name, trained_on.get(name), run[name])]
    different = [f"\n  {one.field}: draft {one.cache}, run {one.run}" for one in found if not one.field.startswith(SERVED_OTHERWISE)]
    if different:
        raise DraftError(
            f"the draft {draft} was trained on another target than this run's; {len(different)} field(s) differ:{''.join(different)}\n"
            "Name the target that it was trained on in model.target.path, or train a draft on this one."
        )
    for one in found:
        log.warning(
            "%s: the draft was trained with %s, this run has %s; expect it to be accepted less often", one.field, one.cache, one.run
        )


def _named_settings(config: Config, captured: Mapping[str, Any], in_cache: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the configuration itself says of states and samples, as far as it says it; `captured` and `in_cache` are the cache's."""
    target, data = config.model.target, config.data
    states: dict[str, Any] = {}
    samples: dict[str, Any] = {}
    in_target = {name: getattr(target, name) for name in ("dtype", "attn_implementation") if name in target.model_fields_set}
    if in_target:
        states["target"] = {**captured.get("target", {}), **in_target}
    if "chat_template_kwargs" in target.model_fields_set:
        states["chat_template_kwargs"] = target.chat_template_kwargs
    if "max_tokens" in data.model_fields_set and data.max_tokens > captured["max_tokens"]:  # fewer: prefixes, which the cache has
        states["max_tokens"] = data.max_tokens
    if "min_supervised_tokens" in data.model_fields_set:
        samples["min_supervised_tokens"] = data.min_supervised_tokens
    for name, default in LATER_RULES.items():
        if name in data.model_fields_set and (getattr(data, name) != default or name in in_cache):
            samples[name] = getattr(data, name)
    if "fraction" in data.validation_ds.model_fields_set:
        samples["heldout_fraction"] = data.validation_ds.fraction
    if "datasets" in data.validation_ds.model_fields_set:
        samples["validation_sets"] = list(data.validation_ds.datasets)
    return states, samples


def _target_there(target: TargetSection, captured: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a target whose folder is on this machine; of a folder without weights, what can be told without them."""
    states: dict[str, Any] = {}
    try:
        fields = target_fields(target)
    except TargetError as error:
        log.info("the target is not compared with the cache's: %s", error)
    else:
        unnamed = {"dtype", "attn_implementation"} - target.model_fields_set
        states["target"] = {**fields, **{name: captured.get("target", {}).get(name) for name in unnamed}}
    try:
        states |= tokenizer_fields(load_tokenizer(target))
    except TargetError as error:
        log.info("the tokenizer is not compared with the cache's: %s", error)
    return states


def _corpus(config: Config, cache: Cache) -> PreparedCorpus | None:
    """The corpus that the configuration names, prepared as it was for the cache; None when it names none or its files are not here."""
    data = config.data
    states: Mapping[str, Any] = cache.manifest.states_identity
    samples: Mapping[str, Any] = cache.manifest.samples_identity
    if not data.train_ds.input_cfg or set(data.validation_ds.datasets) != set(samples["validation_sets"]):
        return None
    target = {
        "path": str(cache.tokenizer_dir),
        "revision": None,
        "chat_template": None,
        "trust_remote_code": False,  # nothing that a cache brings is executed
        "chat_template_kwargs": states["chat_template_kwargs"],
    }
    as_captured = config.model_copy(
        update={
            "model": config.model.model_copy(update={"target": config.model.target.model_copy(update=target)}),
            "data": data.model_copy(
                update={
                    "max_tokens": states["max_tokens"],
                    "min_supervised_tokens": samples["min_supervised_tokens"],
                    **{name: samples.get(name, default) for name, default in LATER_RULES.items()},
                    "validation_ds": data.validation_ds.model_copy(update={"fraction": samples["heldout_fraction"]}),
                }
            ),
        }
    )
    try:
        corpus = open_prepared(as_captured)
        if corpus is None:
            log.info("the chats of data.train_ds are not tokenised in %s: done now, to compare them with the cache", data.prepared_dir)
            corpus = prepare(as_captured)
    except (CorpusError, TargetError) as error:
        log.warning("the chats of data.train_ds are not compared with the cache's: %s", error)
    else:
        return corpus
    return None
