"""The ledger of a sweep: an Optuna study. Any Optuna tool reads it, also while the sweep runs.

Of each trial it has the parameters, the state (WAITING, RUNNING, COMPLETE, PRUNED, FAIL), the metric at every validation, and as
user attributes:

    seed          trainer.seed of the trial
    settings      the values of the space, as words after the configuration on the command line
    folder        where it is trained, relative to LOG_DIR
    cache         digest of the cache
    steps         optimizer steps: first those it is to make, at the end those it made
    parameters    of the draft
    seconds       of its own steps and validations, without reading
    metrics       of the last validation
    error         why it failed

A trial is RUNNING from the moment in which a process takes it until that process says how it ended. Whether that process still lives is
not in the ledger: it holds the lock of the trial's folder.
"""

import json
import logging
import secrets
import warnings
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import ExperimentalWarning
from optuna.samplers import BaseSampler
from optuna.storages import RDBStorage
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from pipeline.config.schema import Config
from pipeline.config.sweep import SweepSection
from pipeline.errors import ConfigError
from pipeline.runtime.files import atomic_file
from pipeline.sweep.space import Params, grid, label, suggest
from pipeline.sweep.storage import LEDGER, open_storage, without_password
from pipeline.train.watch import settle_monitors

log = logging.getLogger(__name__)

WAITING, RUNNING, COMPLETE, PRUNED, FAIL = (
    TrialState.WAITING,
    TrialState.RUNNING,
    TrialState.COMPLETE,
    TrialState.PRUNED,
    TrialState.FAIL,
)
SWEEP_CONFIG = "sweep.yaml"
"""In LOG_DIR: the configuration of the newest launch."""
SWEEP_ID = "sweep.id"
"""In LOG_DIR: random hex digits, which the study has too, as its attribute `id`."""
MAY_CHANGE = {"sampler", "pruner", "pruner_min_steps", "seeds", "trials", "steps", "hours", "side_by_side", "storage"}
"""Fields of `sweep` that may differ from launch to launch."""


NO_MATTER = {"cache", "prepared_dir", "num_proc", "num_workers"}
"""Fields of `data` that change nothing in a draft; a cache is known by its digest."""


class Ledger:
    """The study of one sweep. What proposes or takes trials is called by one process at a time, which `claim.py` sees to."""

    def __init__(self, config: Config) -> None:
        """Open the study, or begin it. Raises `ConfigError` when it is one of another sweep."""
        self.folder = Path(config.log_dir)
        self.section: SweepSection = config.sweep
        self.told = without_password(config.sweep.storage or str(self.folder / LEDGER))
        self._seed = config.trainer.seed
        self.seeds = config.sweep.seeds or (config.trainer.seed,)
        self._opened = open_storage(config.sweep.storage, self.folder)
        self.study: Study = optuna.create_study(
            storage=self._opened,
            study_name=config.name,
            direction="maximize" if config.sweep.better == "max" else "minimize",
            pruner=_pruner(config),
            load_if_exists=True,
        )
        self.storage = self.study._storage  # which keeps ended trials in memory, and must see all that is done
        self._check(config)

    def close(self) -> None:
        self.storage.remove_session()
        if isinstance(self._opened, RDBStorage):
            self._opened.engine.dispose()

    def trials(self, *states: TrialState) -> list[FrozenTrial]:
        return self.study.get_trials(deepcopy=False, states=states or None)

    # ---- proposing

    def enqueue_grid(self) -> None:
        """Put every combination with every seed that is not there yet into the ledger, one seed after the other, so that trials that stand
        side by side have the same one."""
        known = {_key(params_of(trial), trial.user_attrs.get("seed")) for trial in self.trials()}
        for seed in self.seeds:
            for params in grid(self.section.space):
                if _key(params, seed) not in known:
                    self.study.enqueue_trial(params, user_attrs={"seed": seed})

    def enqueue_seeds(self) -> None:
        """Put every setting that a sampler chose, with every seed that it has not yet, into the ledger: also what a kill cut short, and
        seeds that were added later."""
        given: dict[str, tuple[dict[str, Any], set[int]]] = {}
        for trial in self.trials():
            if "seed" in trial.user_attrs:
                given.setdefault(_key(params_of(trial), None), (params_of(trial), set()))[1].add(trial.user_attrs["seed"])
        for params, seeds in given.values():
            for seed in self.seeds:
                if seed not in seeds:
                    self.study.enqueue_trial(params, user_attrs={"seed": seed})

    def waiting(self) -> list[FrozenTrial]:
        """Trials that may be begun: not those of a seed that is no longer asked for."""
        return [trial for trial in self.trials(WAITING) if trial.user_attrs.get("seed") in self.seeds]

    def propose(self) -> FrozenTrial:
        """A new setting by the sampler, running with the first seed; with the others it waits."""
        trial_id = self.storage.create_new_trial(self.storage.get_study_id_from_name(self.study.study_name))
        return self.described(trial_id)

    def described(self, trial_id: int) -> FrozenTrial:
        """The running trial with all that belongs to it: what a process that was killed while it proposed has left out is done now."""
        found = self.storage.get_trial(trial_id)
        # Seeded by the trial's number: what is proposed does not depend on how many processes propose, nor on restarts.
        self.study.sampler = _sampler(self.section.sampler, (self._seed * 1_000_003 + found.number) % 2**32)
        trial = Trial(self.study, trial_id)
        for name, values in self.section.space.items():
            suggest(trial, name, values)
        found = self.storage.get_trial(trial_id)
        if "seed" not in found.user_attrs:
            others = [one for one in self.trials() if one.number != found.number and params_of(one) == found.params]
            taken = {one.user_attrs["seed"] for one in others if "seed" in one.user_attrs}
            # Proposed once more, a setting is trained with a further seed: the same again would tell nothing new.
            self.set(trial_id, seed=self.seeds[0] if self.seeds[0] not in taken else max(taken) + 1)
            self.enqueue_seeds()
        return self.storage.get_trial(trial_id)

    # ---- the life of a trial

    def take(self, trial: FrozenTrial) -> FrozenTrial | None:
        """The waiting trial, running now; None when another process was quicker."""
        return self.described(trial._trial_id) if self.storage.set_trial_state_values(trial._trial_id, RUNNING) else None

    def set(self, trial_id: int, **attributes: Any) -> None:
        for name, value in attributes.items():
            self.storage.set_trial_user_attr(trial_id, name, value)

    def report(self, trial_id: int, step: int, value: float) -> None:
        """The metric at a validation; a resumed trial says it again."""
        self.storage.set_trial_intermediate_value(trial_id, step, value)

    def falls_behind(self, trial_id: int) -> bool:
        """Whether the pruner would end the trial after what it reported last."""
        return bool(self.study.pruner.prune(self.study, self.storage.get_trial(trial_id)))

    def end(self, trial_id: int, state: TrialState, value: float | None = None) -> None:
        """How a trial ended; nothing of it can be changed after that."""
        assert state not in (WAITING, RUNNING)
        self.storage.set_trial_state_values(trial_id, state, None if value is None else [value])

    # ---- the identity of the sweep

    def check_folder(self) -> None:
        """Raise `ConfigError` when the trials in the folder are of another ledger, or the ledger's in another folder: a trial would go on
        from what is none of its own."""
        file, known = self.folder / SWEEP_ID, self.study.user_attrs.get("id")
        here = file.read_text().strip() if file.exists() else None
        if known is not None:
            strange = known != here
        else:  # a ledger that is new, or older than this file
            strange = (self.folder / "trials").exists() and not any("folder" in trial.user_attrs for trial in self.trials())
        if strange:
            raise ConfigError(
                f"{self.folder} and the study {self.study.study_name} in {self.told} do not belong together: the folder holds trials of "
                "another study, or the study has its trials in another folder. Choose another exp_manager.explicit_log_dir, and where "
                "sweep.storage is shared another name; or bring back what belongs to this one."
            )
        if here is None:
            here = secrets.token_hex(16)
            with atomic_file(file) as stream:
                stream.write(f"{here}\n".encode())
        if known is None:
            self.study.set_user_attr("id", here)

    def check_cache(self, path: str, digest: str) -> None:
        """Raise `ConfigError` when trials of this sweep were trained on another cache."""
        name = f"cache {path}" if "data.cache" in self.section.space else "cache"
        known = self.study.user_attrs.get(name)
        if known not in (None, digest):
            raise ConfigError(
                f"the cache {path} is not the one that this sweep began with (digest {digest[:16]}, then {known[:16]}): its trials would "
                "not be comparable. Choose another exp_manager.explicit_log_dir, or bring the cache back."
            )
        if known is None:
            self.study.set_user_attr(name, digest)

    def _check(self, config: Config) -> None:
        now = _identity(config)
        known = self.study.user_attrs.get("configuration")
        if known is None:
            self.study.set_user_attr("configuration", now)
            return
        known, now = ({**one, "sweep": {"monitor": "val_accept_len", **one["sweep"]}} for one in (known, now))  # once the default
        if known != now:
            changed = "\n".join(f"  {name}: {old}, now {new}" for name, old, new in _changes(known, now))
            raise ConfigError(
                f"the sweep {config.name} in {config.log_dir} was begun with another configuration:\n{changed}\n"
                "Its trials would not be comparable. Choose another exp_manager.explicit_log_dir, and another name where sweep.storage is "
                "shared; or go back to these values."
            )


def settled(config: Config, own_answers: bool) -> Config:
    """`config` with metrics' names in place of auto, by whether all answers that trials are validated on are a model's own."""
    return settle_monitors(config, own_answers).model_copy(update={"sweep": config.sweep.settled(own_answers)})


def params_of(trial: FrozenTrial) -> dict[str, Any]:
    """Parameters of a trial, those of a waiting one too."""
    fixed: Mapping[str, Any] = trial.system_attrs.get("fixed_params", {})
    return {**fixed, **trial.params}


def _key(params: Params, seed: int | None) -> str:
    return json.dumps([{name: label(value) for name, value in params.items()}, seed], sort_keys=True)


def _sampler(name: str, seed: int) -> BaseSampler:
    samplers = optuna.samplers
    if name == "tpe":
        return samplers.TPESampler(seed=seed, constant_liar=True)  # trials that run side by side keep apart
    if name == "qmc":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)  # of its interface, which this line alone uses
            return samplers.QMCSampler(seed=seed, warn_independent_sampling=False)
    if name == "cmaes":
        return samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False)
    if name == "gp":
        return samplers.GPSampler(seed=seed)
    return samplers.RandomSampler(seed=seed)  # of a grid everything is enqueued


def check_sampler(name: str) -> None:
    """Raise `ConfigError` for a sampler whose package is not installed. Reading a ledger needs none."""
    package = {"qmc": "scipy", "gp": "scipy", "cmaes": "cmaes"}.get(name)
    if package is not None and find_spec(package) is None:
        raise ConfigError(f"sweep.sampler: {name} needs {package}, which is not installed: pip install {package}.")


def _pruner(config: Config) -> optuna.pruners.BasePruner:
    section = config.sweep
    first = section.pruner_min_steps or config.trainer.val_check_interval
    if section.pruner == "none":
        return optuna.pruners.NopPruner()
    if first is None:
        raise ConfigError(f"sweep.pruner: {section.pruner} looks at validations on the way; set trainer.val_check_interval.")
    if section.pruner == "median":
        return optuna.pruners.MedianPruner(n_warmup_steps=first)
    return optuna.pruners.SuccessiveHalvingPruner(min_resource=first)


def _identity(config: Config) -> dict[str, Any]:
    """What makes trials comparable: the configuration as far as it was given, but for how much is spent and how."""
    elsewhere: Any = {"exp_manager": True, "evaluate": True, "capture": True, "model": {"target"}, "data": NO_MATTER}
    given = config.model_dump(mode="json", exclude_unset=True, exclude=elsewhere)
    given["sweep"] = {name: value for name, value in given["sweep"].items() if name not in MAY_CHANGE}
    kept: dict[str, Any] = json.loads(json.dumps(given))
    return kept


def _changes(old: Any, new: Any, name: str = "") -> Iterable[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            yield from _changes(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif old != new:
        yield name, old, new
