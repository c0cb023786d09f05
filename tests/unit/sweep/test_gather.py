"""What a report takes from the folders of a sweep."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.load import to_yaml
from pipeline.errors import ConfigError
from pipeline.report.runs import Run
from pipeline.sweep import gather, ledger
from pipeline.sweep.storage import without_ledger
from tests.support.training import config


def _run(folder: Path, layers: list[int], objective: str) -> Run:
    folder.mkdir()
    known = {"fingerprint": {"draft": {"target_layer_ids": layers}, "objective": {"name": objective}}}
    (folder / "provenance.json").write_text(json.dumps(known))
    return Run(folder.name, str(folder), "COMPLETE", 0, {}, 1.0, [], 4)


def test_each_draft_alone_would_have_read_its_own_states(tmp_path: Path) -> None:
    """Two layers and the final state were read, 3 bytes a token; only what distils needs the last."""
    runs = [_run(tmp_path / "0000", [4], "decay"), _run(tmp_path / "0001", [1, 4], "distill")]
    group = {"layer_ids": [1, 4], "final": True, "bytes_read": 300, "tokens_read": 100, "tokens_fed": {"0": 100, "1": 90}}
    assert gather._alone(group, runs) == pytest.approx(100 * 1 + 90 * 3)


@pytest.mark.parametrize("storage", [None, "{}/journal.log", "sqlite:///{}/other.db"])
def test_no_ledger_is_begun_by_looking_for_one(tmp_path: Path, storage: str | None) -> None:
    section: dict[str, Any] = {"space": {"model.optim.lr": {"choice": [1e-3]}}}
    if storage is not None:
        section["storage"] = storage.format(tmp_path)
    found = config(tmp_path, tmp_path, tmp_path, exp_manager__explicit_log_dir=str(tmp_path), sweep=section)
    missing = without_ledger(found)
    assert missing is not None
    missing.touch()
    assert without_ledger(found) is None
    elsewhere = config(tmp_path, tmp_path, tmp_path, sweep={**section, "storage": "postgresql://host/name"})
    assert without_ledger(elsewhere) is None


def test_a_report_of_a_sweep_without_its_journal_is_refused(tmp_path: Path) -> None:
    section = {"space": {"model.optim.lr": {"choice": [1e-3]}}, "storage": str(tmp_path / "journal.log")}
    asked = config(tmp_path, tmp_path, tmp_path, data__cache=str(tmp_path), sweep=section)
    (tmp_path / "sweep.yaml").write_text(to_yaml(asked, named_only=True))
    with pytest.raises(ConfigError, match=r"without its ledger.*journal\.log is missing"):
        gather._of_sweep(tmp_path, None, None)  # type: ignore[arg-type]  # no device is used
    assert not (tmp_path / "journal.log").exists()


def test_a_sampler_that_is_not_installed_here_does_not_keep_its_sweep_from_being_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="cmaes needs cmaes, which is not installed"):
        ledger.check_sampler("cmaes")
    section = {"space": {"model.optim.lr": {"uniform": [1e-3, 2e-3]}}, "sampler": "cmaes", "trials": 1}
    opened = ledger.Ledger(config(tmp_path, tmp_path, tmp_path, exp_manager__explicit_log_dir=str(tmp_path), sweep=section))
    assert opened.trials() == []
    opened.close()
