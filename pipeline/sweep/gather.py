"""From folders to what a report shows: trials of a sweep by its ledger, or any runs by their own files."""

import json
import logging
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from optuna.trial import FrozenTrial

from pipeline.cache.bundle import load_bundle
from pipeline.cache.layout import target_folder
from pipeline.config.load import Stage, load_config
from pipeline.config.schema import Config, ObjectiveSection
from pipeline.draft.export import load_draft
from pipeline.errors import ConfigError, PipelineError
from pipeline.report.page import Report
from pipeline.report.runs import Run, TargetSpeed, leaderboard
from pipeline.runtime.ranks import Ranks
from pipeline.sweep.account import FOLDER as GROUPS
from pipeline.sweep.ledger import SWEEP_CONFIG, Ledger, params_of, settled
from pipeline.sweep.space import label, overrides
from pipeline.sweep.speed import draft_seconds, target_speed
from pipeline.sweep.storage import without_ledger, without_password
from pipeline.train.checkpoint import checkpoints, read_state
from pipeline.train.watch import read_metrics

log = logging.getLogger(__name__)

EACH_RUN_ITS_OWN = ("name", "exp_manager", "trainer.seed", "trainer.devices", "data.num_workers", "evaluate", "sweep")


def gather(folders: Sequence[Path], target: TargetSpeed | None, device: torch.device) -> Report:
    """What is to be shown of one sweep, or of runs. Raises `ConfigError` for folders that are neither."""
    sweeps = [folder for folder in folders if (folder / SWEEP_CONFIG).is_file()]
    if sweeps and len(folders) > 1:
        raise ConfigError(f"a report is of one sweep or of runs; {sweeps[0]} is a sweep. Name it alone, or the folders in its trials/.")
    return _of_sweep(folders[0], target, device) if sweeps else _of_runs(folders, target, device)


def target_of(folders: Sequence[Path], ranks: Ranks) -> TargetSpeed:
    """The target that the first folder's configuration names, measured here with the block sizes of all."""
    first = folders[0] / SWEEP_CONFIG
    stage: Stage = "sweep" if first.is_file() else "train"
    config = load_config(stage, str(first if first.is_file() else folders[0] / "config.yaml"), [])
    runs = sorted((folders[0] / "trials").glob("*")) if first.is_file() else folders
    return target_speed(config, [_block_size(run, config) for run in runs], ranks)


def _of_sweep(folder: Path, target: TargetSpeed | None, device: torch.device) -> Report:
    words = overrides({"exp_manager.explicit_log_dir": str(folder)})
    config = settled(load_config("sweep", str(folder / SWEEP_CONFIG), words), own_answers=False)  # auto: of an earlier version
    if missing := without_ledger(config):
        raise ConfigError(
            f"{folder} is a sweep without its ledger: {missing} is missing (a relative path is from the current folder). Bring it back, "
            "or name folders in trials/."
        )
    ledger = Ledger(config)
    try:
        trials = ledger.trials()
        cache, again = (ledger.study.user_attrs.get(name) for name in ("cache", "command"))
    finally:
        ledger.close()
    runs = [_timed(_of_trial(config, trial), folder, config, device) for trial in trials]
    facts = [("ledger", ledger.told), ("study", config.name), ("cache", str(config.cache_path))]
    facts += [("cache digest", str(cache))] if cache is not None else []
    facts += [("sampler, pruner", f"{config.sweep.sampler}, {config.sweep.pruner}")]
    section = config.sweep
    saved = list(_saved(folder, runs, target))
    commands = _commands(runs, section.better, "accelerate launch --num_processes 1")  # as every trial was trained
    if commands and again is not None:
        commands.append(("Go on with this sweep, also with more trials than before:", f"accelerate launch {without_password(again)}"))
    return Report(config.name, section.monitor, section.better, runs, facts, saved, commands, target)


def _of_trial(config: Config, trial: FrozenTrial) -> Run:
    known, folder = trial.user_attrs, Path(config.log_dir) / trial.user_attrs.get("folder", f"trials/{trial.number:04d}")
    records = read_metrics(folder)
    return Run(
        name=f"{trial.number:04d}",
        folder=str(folder),
        state=trial.state.name,
        seed=int(known.get("seed", 0)),
        settings=params_of(trial),
        value=trial.value if trial.state.name == "COMPLETE" else next(reversed(trial.intermediate_values.values()), None),
        records=records,
        block_size=_block_size(folder, config),
        parameters=known.get("parameters"),
        seconds=known.get("seconds"),
        tokens_seen=_tokens(records),
        steps=int(known.get("steps", 0)) if trial.state.is_finished() else _last(records, "step"),
        error=known.get("error"),
    )


def _of_runs(folders: Sequence[Path], target: TargetSpeed | None, device: torch.device) -> Report:
    """Runs of `stages/train_draft.py`; what differs in their configurations is the setting."""
    configs = []
    for folder in folders:
        if not (folder / "config.yaml").is_file():
            raise ConfigError(f"{folder} is no run: it holds no config.yaml (and no {SWEEP_CONFIG}, as a sweep does).")
        configs.append(load_config("train", str(folder / "config.yaml"), []))
    flat = [dict(_leaves(config.model_dump(mode="json"))) for config in configs]
    names = [name for name in dict.fromkeys(name for one in flat for name in one) if not name.startswith(EACH_RUN_ITS_OWN)]
    differing = [name for name in names if len({repr(one.get(name)) for one in flat}) > 1]
    keep = configs[0].exp_manager.checkpoint_callback_params.settled(own_answers=False)  # as above
    runs = []
    for folder, config, values in zip(folders, configs, flat, strict=True):
        records, state, error = read_metrics(folder), dict[str, Any](), None
        try:
            state = read_state(found[-1]) if (found := checkpoints(folder / "checkpoints")) else {}
        except PipelineError as fault:  # of one run; it may also be writing at this moment
            log.warning("%s: %s", folder, fault)
            error = str(fault)
        ended = bool(state.get("final")) and (folder / "export").is_dir()
        run = Run(
            name=folder.name,
            folder=str(folder),
            state="COMPLETE" if ended else "UNREADABLE" if error else "RUNNING",
            seed=config.trainer.seed,
            settings={name: label(values.get(name)) for name in differing},
            value=state.get("metrics", {}).get(keep.monitor),
            records=records,
            block_size=config.model.draft.block_size,
            tokens_seen=_tokens(records),
            steps=_last(records, "step"),
            error=error,
        )
        runs.append(_timed(run, folder, config, device))
    title = configs[0].name if len(folders) == 1 else f"{len(folders)} runs"
    return Report(
        title,
        keep.monitor,
        keep.better,
        runs,
        [("runs", ", ".join(map(str, folders)))],
        [],
        _commands(runs, keep.better, "accelerate launch"),
        target,
    )


def _timed(run: Run, folder: Path, config: Config, device: torch.device) -> Run:
    """With what its export tells: parameters, and the time of a block; the embedding and head are those that the cache has."""
    export = Path(run.folder) / "export"
    if not export.is_dir() or run.state != "COMPLETE":
        return run
    try:
        parameters = sum(p.numel() for p in load_draft(export).parameters())
    except PipelineError as error:
        log.warning("%s is not timed: %s", run.folder, error)
        return run
    try:
        bundle = load_bundle(target_folder(Path(str(load_config("train", f"{run.folder}/config.yaml", []).cache_path))))
    except (OSError, PipelineError) as error:
        log.warning("drafts are not timed: the cache is not here (%s)", error)
        return replace(run, parameters=parameters)
    return replace(run, parameters=parameters, draft_seconds=draft_seconds(export, bundle, device))


def _saved(folder: Path, runs: Sequence[Run], target: TargetSpeed | None) -> Iterator[tuple[str, str, str]]:
    """Measured by the groups; against it what the same trials would have read alone, and what the target would have had to forward."""
    groups = [json.loads(path.read_text()) for path in sorted((folder / GROUPS).glob("*.json"))]
    tokens, read = (sum(group[name] for group in groups) for name in ("tokens_read", "bytes_read"))
    if not tokens or not read:
        return
    fed = sum(sum(group["tokens_fed"].values()) for group in groups)
    alone = sum(_alone(group, runs) for group in groups)
    wall, reading = (sum(group[name] for group in groups) for name in ("seconds", "read_seconds"))
    own = sum(sum(group["own_seconds"].values()) for group in groups)
    yield "bytes read", _bytes(read), f"measured; each draft alone would have read {_bytes(alone)} in all: {alone / read:.1f} times as much"
    yield "tokens read", f"{tokens:,}", f"measured; the drafts were fed {fed:,} in all"
    yield "reading and unpacking", f"{reading:.1f} s", f"measured, all threads; alone about {reading * alone / read:.1f} s"
    yield "wall time of the groups", f"{wall:.1f} s", f"measured; the drafts' own steps and validations are {own:.1f} s of it"
    if target is not None and target.tokens_per_second:
        rate = target.tokens_per_second
        online = own + fed / rate
        yield "target not run", f"{fed / rate:,.0f} s", f"predicted: online, {fed:,} tokens are forwarded, at {rate:,.0f} a second"
        yield "online in all", f"{online:,.0f} s", f"predicted: {online / wall:.1f} times this, without loading the target for each"


def _alone(group: Mapping[str, Any], runs: Sequence[Run]) -> float:
    """Bytes that the trials of a group would have read each by itself: their own states of all that they were fed."""
    read = len(group["layer_ids"]) + bool(group.get("final"))
    share = {run.name: _num_states(run) or read for run in runs}
    of_state = group["bytes_read"] / group["tokens_read"] / read if group["tokens_read"] else 0.0
    return float(sum(of_state * tokens * share[f"{int(number):04d}"] for number, tokens in group["tokens_fed"].items()))


def _num_states(run: Run) -> int | None:
    """States of a token that a run reads: of its target layers, and the final one where its objective needs that."""
    try:
        known = json.loads((Path(run.folder) / "provenance.json").read_text())["fingerprint"]
        return len(known["draft"]["target_layer_ids"]) + ObjectiveSection(name=known["objective"]["name"]).needs_final
    except (OSError, KeyError, ValueError):
        return None


def _commands(runs: Sequence[Run], mode: str, launch: str) -> list[tuple[str, str]]:
    rows = leaderboard(runs, mode, None)
    if not rows:
        return []
    sign = 1 if mode == "max" else -1
    best = max(rows[0].runs, key=lambda run: sign * (run.value or 0.0))
    given, new = shlex.quote(f"{best.folder}/config.yaml"), "exp_manager.explicit_log_dir=runs/again"
    return [
        (f"Train the best run ({best.name}) again, into a new folder:", f"{launch} stages/train_draft.py {given} {new}"),
        (
            "Its draft was exported when it ended, as servers load it. Decode prompts with it and the target:",
            f"accelerate launch stages/evaluate.py {given} 'evaluate.input_cfg=[{{path: PROMPTS.jsonl}}]'",
        ),
        ("Take the export along:", f"cp -r {shlex.quote(best.folder + '/export')} DRAFT"),
    ]


def _block_size(folder: Path, config: Config) -> int:
    try:
        found = yaml.safe_load((folder / "config.yaml").read_text())["model"]["draft"]["block_size"]
    except (OSError, KeyError, TypeError):
        return config.model.draft.block_size
    return int(found)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}" if path else name)
    else:
        yield path, value


def _tokens(records: Sequence[Mapping[str, Any]]) -> int:
    return _last(records, "tokens_seen")


def _last(records: Sequence[Mapping[str, Any]], name: str) -> int:
    return int(next((line[name] for line in reversed(records) if name in line), 0))


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e3:,.1f} kB"
