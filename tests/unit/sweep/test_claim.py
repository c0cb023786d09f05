"""Who takes which trials; nothing is trained here."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.capture.run import capture
from pipeline.config.load import load_config
from pipeline.runtime.ranks import start_ranks
from pipeline.sweep.claim import MOST_AT_ONCE, Claims, Taken
from pipeline.sweep.ledger import FAIL, RUNNING, WAITING, Ledger, params_of
from pipeline.sweep.reading import Readings
from tests.support.sweeps import GRID, write_sweep
from tests.support.tiny import write_chats
from tests.support.training import config

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def claims_of(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Callable[..., Claims]:
    """Makes what one process has of a sweep in the folder NAME."""
    folder = tmp_path_factory.mktemp("claims")
    chats = write_chats(folder / "chats.jsonl", 20, seed=3)
    capture(config(folder, tiny_target, chats, model__target__layer_ids=[1, 2, 4]), start_ranks(1, None, 1))

    def make(name: str, section: dict[str, Any], processes: int = 1, **changes: Any) -> Claims:
        file = str(write_sweep(folder / name, tiny_target, chats, folder / "cache", section, **changes))
        base = load_config("sweep", file, [])
        Path(base.log_dir).mkdir(exist_ok=True)

        def config_of(words: Any) -> Any:
            return load_config("train", file, list(words))

        return Claims(base, Ledger(base), Readings(None), config_of, torch.device("cpu"), None, processes)

    return make


def _end(group: list[Taken]) -> None:
    """As when their process is gone."""
    for trial in group:
        trial.lock.__exit__(None, None, None)


def test_processes_take_different_trials_and_those_of_a_dead_one(claims_of: Callable[..., Claims]) -> None:
    section = {"space": GRID, "seeds": [0, 1], "side_by_side": 3}
    first, second = claims_of("dead", section), claims_of("dead", section)
    mine, theirs = first.take_group(), second.take_group()
    assert [trial.number for trial in mine] == [0, 1, 2]
    assert [trial.number for trial in theirs] == [3]  # the others have another seed, and so another order
    rest = second.take_group() + first.take_group()
    assert [trial.number for trial in rest] == [4, 5, 6, 7]
    assert first.take_group() == []
    _end(mine)
    assert [trial.number for trial in second.take_group()] == [0, 1, 2]
    assert {trial.state for trial in first.ledger.trials()} == {RUNNING}


def test_auto_leaves_trials_for_the_other_processes_of_a_launch(claims_of: Callable[..., Claims]) -> None:
    first, second = (claims_of("shared", {"space": GRID}, processes=2) for _ in range(2))
    assert [len(one.take_group()) for one in (first, second, first)] == [2, 2, 0]


def test_block_sizes_that_leave_out_other_samples_do_not_stand_side_by_side(claims_of: Callable[..., Claims]) -> None:
    claims = claims_of("orders", {"space": {"model.draft.block_size": {"choice": [4, 40, 5]}}})
    groups = [claims.take_group(), claims.take_group()]
    assert [[trial.config.model.draft.block_size for trial in group] for group in groups] == [[4, 5], [40]]


def test_a_budget_of_trials_and_of_steps(claims_of: Callable[..., Claims]) -> None:
    assert len(claims_of("trials", {"space": GRID, "trials": 3}).take_group()) == 3
    claims = claims_of("steps", {"space": GRID, "steps": 20})
    assert len(claims.take_group()) == 3  # of 8 steps each: the third is begun at 16
    assert claims.take_group() == []
    assert len(claims.ledger.trials(WAITING)) == 1


def test_a_proposal_that_was_cut_short_is_completed(claims_of: Callable[..., Claims]) -> None:
    section = {"space": {"model.optim.lr": {"uniform": [1e-4, 1e-3]}}, "sampler": "random", "trials": 4, "seeds": [5, 6]}
    claims = claims_of("cut", section)
    ledger = claims.ledger
    ledger.storage.create_new_trial(ledger.storage.get_study_id_from_name(ledger.study.study_name))
    seeds = [trial.config.trainer.seed for trial in claims.take_group()]
    assert set(seeds) == {5}
    waiting = ledger.trials(WAITING)
    assert [trial.user_attrs["seed"] for trial in waiting] == [6] * len(seeds)
    same = claims_of("cut again", section)
    assert [t.config.model.optim.lr for t in same.take_group()] == [t.params["model.optim.lr"] for t in ledger.trials(RUNNING)]


def test_steps_of_epochs_count_before_they_are_made(claims_of: Callable[..., Claims]) -> None:
    claims = claims_of("epochs", {"space": GRID, "steps": 7}, trainer__max_steps=None, trainer__max_epochs=1)
    group = claims.take_group()
    steps = [trial.user_attrs["steps"] for trial in claims.ledger.trials(RUNNING)]
    assert len(group) < 4
    assert sum(steps[:-1]) < 7 <= sum(steps)


RANGE = {"model.optim.lr": {"uniform": [1e-4, 1e-3]}}


def test_settings_that_read_something_else_are_in_the_budget(claims_of: Callable[..., Claims]) -> None:
    space = {**RANGE, "data.train_ds.global_batch_size": {"integers": [1, 90]}}
    claims = claims_of("misses", {"space": space, "sampler": "random", "trials": 2})
    groups = [claims.take_group() for _ in range(4)]
    assert [len(group) for group in groups] == [1, 1, 0, 0]
    assert len(claims.ledger.trials()) == 2


def test_settings_that_cannot_be_are_in_the_budget_and_do_not_end_it(claims_of: Callable[..., Claims]) -> None:
    heads: dict[str, Any] = {"model.draft.num_attention_heads": {"choice": [4, 3, 5, 7, 9, 11, 13, 15]}}  # KV heads divide the first alone
    claims = claims_of("failures", {"space": {**RANGE, **heads}, "sampler": "random", "trials": 24, "side_by_side": 2})
    while claims.take_group():
        pass
    assert len(claims.ledger.trials()) == 24
    assert len(claims.ledger.trials(FAIL)) > 12
    grid = claims_of("failed grid", {"space": {"model.draft.num_attention_heads": {"choice": [3, 5, 7, 4, 8]}}, "trials": 4})
    while grid.take_group():
        pass
    assert [trial.state for trial in grid.ledger.trials()] == [FAIL] * 3 + [RUNNING, WAITING]


def _pairs(ledger: Ledger) -> list[tuple[Any, int]]:
    return sorted((params_of(trial)["model.optim.lr"], trial.user_attrs["seed"]) for trial in ledger.trials())


def test_a_budget_is_for_settings_with_all_their_seeds(claims_of: Callable[..., Claims]) -> None:
    """Settings are proposed in groups of one seed; were the budget spent on those alone, nothing would be compared in pairs."""
    for name, budget in (("paired trials", {"trials": 6}), ("paired steps", {"steps": 6 * 8})):
        claims = claims_of(name, {"space": RANGE, "sampler": "random", "seeds": [5, 6, 7], **budget})
        groups = [[trial.config.trainer.seed for trial in claims.take_group()] for _ in range(4)]
        assert groups == [[5, 5], [6, 6], [7, 7], []]
        rates = {rate for rate, _ in _pairs(claims.ledger)}
        assert _pairs(claims.ledger) == sorted((rate, seed) for rate in rates for seed in (5, 6, 7))


def test_seeds_that_a_kill_cut_short_or_that_were_added_later_are_trained(claims_of: Callable[..., Claims]) -> None:
    section = {"space": RANGE, "sampler": "random", "trials": 3, "seeds": [5, 6, 7]}
    ledger = claims_of("seeds", {**section, "seeds": [5]}).ledger
    first = ledger.propose()
    ledger.study.enqueue_trial(first.params, user_attrs={"seed": 6})  # as when the process is killed before the third
    ledger.close()
    claims = claims_of("seeds", section)
    assert [trial.config.trainer.seed for _ in range(4) for trial in claims.take_group()] == [5, 6, 7]
    more = claims_of("seeds", {**section, "trials": 5, "seeds": [5, 6, 7, 8]})
    rate = first.params["model.optim.lr"]
    assert [(t.config.trainer.seed, t.config.model.optim.lr) for t in more.take_group()] == [(8, rate)]
    assert [trial.config.trainer.seed for trial in more.take_group()] == [5]  # one is left for a new setting
    fewer = claims_of("seeds", {**section, "trials": 9, "seeds": [5]})
    assert {trial.config.trainer.seed for trial in fewer.take_group()} == {5}


def test_a_budget_of_hours_is_not_begun_all_at_once(claims_of: Callable[..., Claims]) -> None:
    claims = claims_of("hours", {"space": RANGE, "sampler": "random", "hours": 1})
    assert len(claims.take_group()) == MOST_AT_ONCE
