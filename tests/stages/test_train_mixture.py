"""A mixture, packed and by tokens: weights are training's own, and a stopped run goes on with the same samples on other ranks."""

import logging
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.capture.run import capture
from pipeline.config.schema import Config
from pipeline.errors import CheckpointError, TrainingError
from pipeline.runtime.ranks import start_ranks
from pipeline.train import feed
from pipeline.train.data import open_cache, training_order
from pipeline.train.loop import train
from pipeline.train.order import Position
from pipeline.train.watch import read_metrics
from tests.support.launch import spawn_ranks
from tests.support.tiny import write_chats
from tests.support.training import config, repeatable


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Path:
    """A cache of two files, captured without weights."""
    folder = tmp_path_factory.mktemp("cached")
    for name, count in (("many", 20), ("few", 8)):
        write_chats(folder / f"{name}.jsonl", count, seed=count)
    capture(_config(folder, folder, tiny_target, weights=None), start_ranks(1, None, 1))
    return folder


def _config(folder: Path, cached: Path, target: Path, weights: tuple[float, float] | None = (0.25, 0.75), **changes: Any) -> Config:
    entries: list[dict[str, Any]] = [{"path": str(cached / f"{name}.jsonl")} for name in ("many", "few")]
    for entry, weight in zip(entries, weights or (), strict=False):
        entry["weight"] = weight
    section = {"input_cfg": entries, "global_batch_tokens": 250, "micro_batch_tokens": 192, "packing": True, "length_buckets": 2}
    wanted = {"capture__path": str(cached / "cache"), "data__prepared_dir": str(cached / "prepared"), "data__train_ds": section, **changes}
    return config(folder, target, cached / "unused", data__validation_ds={"fraction": 0.0}, **wanted)


def test_one_cache_serves_any_mixture(cached: Path, tiny_target: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = _config(cached, cached, tiny_target)
    data = open_cache(settings)
    with caplog.at_level(logging.INFO):
        order = training_order(data, settings)
    samples = [int(n) for step in range(order.steps(0)) for n in order.global_batch(Position(0, step)).samples]
    few = data.source_names.index("few.jsonl")
    share = sum(int(data.source_code[n] == few) for n in samples) / len(samples)
    assert len(samples) == len(order.indices)
    assert share == pytest.approx(0.75, abs=0.5 / len(samples))
    assert "few.jsonl: 8 samples with weight 0.75: " in caplog.text
    assert training_order(data, _config(cached, cached, tiny_target, weights=None)).mixture is None
    empty = {**settings.data.model_dump(), "train_ds": {"input_cfg": [{"path": str(cached / "*.jsonl"), "weight": 1.0}]}}
    assert training_order(data, settings.model_validate({**settings.model_dump(), "data": empty})).mixture is not None
    with pytest.raises(TrainingError, match=r"no training sample with a usable anchor is from .*few\.jsonl"):
        training_order(_without(data, few), settings)


def _without(data: Any, source: int) -> Any:
    from dataclasses import replace

    return replace(data, usable=data.usable & (data.source_code != source))


def _stop_at(folder: Path, step: int) -> None:
    def watch() -> None:
        while all(record["step"] < step for record in read_metrics(folder / "run")):
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()


def _train(rank: int, world_size: int, settings: Config, stop_at: int | None) -> bool:
    if stop_at is not None and rank == 0:
        _stop_at(Path(settings.log_dir).parent, stop_at)
    return train(settings, start_ranks(1, None, 1))


@pytest.mark.slow
def test_a_stopped_run_goes_on_at_another_world_size(tmp_path: Path, cached: Path, tiny_target: Path) -> None:
    """2 ranks, stopped inside an epoch, then 1: the samples of every step are those of a run on one rank that was not stopped."""
    whole = _config(tmp_path / "whole", cached, tiny_target, trainer__max_epochs=2, trainer__max_steps=None)
    assert train(whole, start_ranks(1, None, 1))
    stopped = _config(tmp_path / "stopped", cached, tiny_target, trainer__max_epochs=2, trainer__max_steps=None)
    assert spawn_ranks(_train, 2, stopped, 4, timeout=150) == [False, False]
    done = read_metrics(tmp_path / "stopped/run")[-1]["step"]
    assert train(stopped, start_ranks(1, None, 1))
    lines, expected = repeatable(tmp_path / "stopped/run"), repeatable(tmp_path / "whole/run")
    assert done < len(expected)
    for found, wanted in zip(lines, expected, strict=True):
        for name in ("step", "epoch", "lr", "samples_seen", "tokens_seen"):
            assert found[name] == wanted[name]
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-4)
    other = _config(tmp_path / "stopped", cached, tiny_target, weights=(0.5, 0.5), trainer__max_epochs=2, trainer__max_steps=None)
    with pytest.raises(CheckpointError, match="mixture"):
        train(other, start_ranks(1, None, 1))


def test_a_run_that_is_bound_by_reading_says_so(
    cached: Path, tmp_path: Path, tiny_target: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, and never in a run of seconds; with the limits at nothing, whatever this machine's disk is."""
    for mode, limit, times in (("offline", feed.BOUND_SECONDS, 0), ("offline", 0.0, 1), ("online", 0.0, 0)):
        caplog.clear()
        monkeypatch.setattr(feed, "BOUND_SHARE", 0.0)
        monkeypatch.setattr(feed, "BOUND_SECONDS", limit)
        log_dir = str(tmp_path / f"{mode}-{limit}" / "run")
        settings = _config(tmp_path, cached, tiny_target, trainer__max_steps=3, data__mode=mode, exp_manager__explicit_log_dir=log_dir)
        assert train(settings, start_ranks(1, None, 1))
        assert sum("this run is bound by reading" in record.message for record in caplog.records) == times
        assert all(0 <= line["data_wait_share"] <= 1 for line in read_metrics(Path(log_dir)) if "lr" in line)
