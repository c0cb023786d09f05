"""Every measurement that a stage offers, at toy sizes: it runs, and its last line is one JSON object with what it promises."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.bench.loader import drop_page_cache
from pipeline.config.load import to_yaml
from stages.bench import main
from tests.support.tiny import write_chats
from tests.unit.capture.conftest import capture_config

SHAPE = ["--layers", "2", "--hidden", "64", "--vocab", "300", "--block", "4"]


def printed(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert main(arguments) == 0
    *text, last = capsys.readouterr().out.splitlines()
    found: dict[str, Any] = json.loads(last)
    assert len(text) > 4
    assert found["settings"]
    return found


def rates(found: dict[str, Any], *names: str) -> None:
    for name in names:
        low, high = found[f"{name}_range"]
        assert 0 < low <= found[name] <= high, name


def test_capture(tiny_target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_chats(tmp_path / "chats.jsonl", 30)
    (tmp_path / "config.yaml").write_text(to_yaml(capture_config(tiny_target, tmp_path)))
    found = printed(["capture", str(tmp_path / "config.yaml"), "--tokens", "1600", "--threads", "1", "--rounds", "2"], capsys)
    rates(found, "tokens_per_second", "bare_tokens_per_second", "naive_tokens_per_second")
    assert 0 < found["tokens"] <= found["padded_tokens"]
    assert found["tokens"] <= 1600
    assert not (tmp_path / "cache").exists()


def test_loader(small_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(["loader", "--cache", str(small_cache), "--mb", "0.2", "--threads", "2", "--rounds", "2"], capsys)
    names = ("samples_per_second", "raw_samples_per_second", "torch_load_samples_per_second")
    rates(found, "codec_samples_per_second", *names, *(f"cold_{name}" for name in names))
    assert found["samples"] >= 2
    assert main(["loader", "--cache", str(small_cache), "--mb", "0"]) == 2
    assert "name a larger cache" in capsys.readouterr().err


def test_dropped_files_are_still_whole(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "x").write_bytes(content := os.urandom(10_000))
    drop_page_cache(tmp_path)
    assert (tmp_path / "deep" / "x").read_bytes() == content


@pytest.mark.parametrize("dtype", ["fp32", "bf16-mixed"])
def test_decode(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = printed(["decode", *SHAPE, "--seq", "40", "--committed", "2", "--threads", "1", "--rounds", "2", "--dtype", dtype], capsys)
    rates(found, *(f"{part}_seconds" for part in ("draft", "floor", "layers", "layers_floor", "head", "head_floor")))


def test_gpu_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--seq", "96", "--anchors", "6", "--heads", "4", "--kv-heads", "2", "--head-dim", "16", "--intermediate", "96"]
    capture = ["--target-layers", "8", "--batches", "2", "--rows", "2", "--tokens", "40", "--rounds", "2"]
    found = printed(["gpu", "--device", "cpu", *SHAPE, *small, *capture, "--peak-tflops", "1"], capsys)
    assert found["steps"]["tiled"]["mfu"] == pytest.approx(found["needed_tflop"] / found["steps"]["tiled"]["seconds"])
    rates(found["capture"], "tokens_per_second", "serial_tokens_per_second", "bare_tokens_per_second")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_gpu_without_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu"]) == 2
    assert "no GPU" in capsys.readouterr().err
