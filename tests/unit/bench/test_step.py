import json
from pathlib import Path

import pytest
import torch

from pipeline.bench.step import StepSettings, as_text
from pipeline.bench.step_process import measure_step
from pipeline.bench.workload import build, floor_seconds, step_products
from stages.bench import main

TOY = StepSettings(seq=64, anchors=6, block=4, layers=2, hidden=64, vocab=300, heads=4, kv_heads=2, head_dim=16, threads=1)
TOY_OPTIONS = ["--seq", "64", "--anchors", "6", "--block", "4", "--layers", "1", "--hidden", "64", "--vocab", "300", "--threads", "1"]
KEYS = {"settings", "seconds", "seconds_range", "peak_mib", "blocks", "supervised_slots", "loss", "floor_seconds"}


def test_the_work_is_what_it_is_said_to_be() -> None:
    work = build(TOY)
    assert work.batch.features.shape == (1, 64, 5 * 64)
    assert work.batch.anchors.shape == (1, 6)
    assert measure_step(TOY)["loss"] == pytest.approx(work.step(), rel=1e-5)
    assert all(parameter.grad is not None for parameter in work.draft.parameters())


def test_products_of_a_step() -> None:
    products = list(step_products(TOY, build(TOY).batch))
    by_name = {name: sum(p.flops for p in products if p.name == name) for name in {p.name for p in products}}
    slots, context = 6 * 4, int(build(TOY).batch.anchors.max())
    assert by_name["head"] == by_name["head, backward"] == 2 * 6 * 3 * 64 * 300
    assert by_name["features"] == 2 * 2 * context * 5 * 64 * 64
    widths = slots * (2 * 64 + 2 * 32 + 3 * TOY.mlp_width) + context * 2 * 32
    assert by_name["projections"] == 3 * 2 * 2 * 64 * widths
    pairs = sum(int(anchor) + 4 for anchor in build(TOY).batch.anchors[0]) * 4 * 4
    assert by_name["attention, scores"] == pytest.approx(3 * 2 * 2 * 16 * pairs)
    assert set(floor_seconds(TOY)) == set(by_name)


def test_half_precision_computes_the_same_step() -> None:
    settings = StepSettings(**{name: getattr(TOY, name) for name in TOY.__slots__ if name != "dtype"}, dtype="bf16-mixed")
    assert build(settings).bundle.head.dtype == torch.bfloat16
    assert build(settings).step() == pytest.approx(build(TOY).step(), rel=0.01)


@pytest.mark.slow
def test_the_stage_ends_with_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "peer.py"
    script.write_text(
        "import sys, time, torch\ntorch.set_num_threads(2)\n"
        "assert time.perf_counter is time.process_time and torch.get_num_threads() == 1\n"
        "assert sys.argv[1:] == ['automodel', '64', '6', '4', '1', '64', '300', '1']\nprint('x: 1.50 s/step, peak 2000 MiB, loss 5.7000')\n"
    )
    options = ["--rounds", "1", "--clock", "cpu", "--peer", "nemo-automodel", "--peer-script", str(script)]
    assert main(["step", *TOY_OPTIONS, *options]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert set(found) >= KEYS
    assert (found["blocks"], found["supervised_slots"]) == (6, 18)
    assert found["peer"] == {"name": "nemo-automodel", "seconds": 1.5, "seconds_range": [1.5, 1.5], "peak_mib": 2000, "loss": 5.7}
    assert found["speedup"] == pytest.approx(1.5 / found["seconds"])
    assert 50 < found["peak_mib"] < 2000
    assert any(line.startswith("nemo-automodel") for line in text)
    assert as_text(found).splitlines() == text[:-1]
    script.write_text("raise SystemExit('not installed')")
    assert main(["step", *TOY_OPTIONS, *options]) == 2
    assert "not installed" in capsys.readouterr().err


@pytest.mark.slow
def test_half_precision_beside_fp32(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["step", *TOY_OPTIONS, "--rounds", "1", "--dtype", "bf16-mixed", "--peer", "fp32"]) == 0
    *text, last = capsys.readouterr().out.splitlines()
    found = json.loads(last)
    assert found["settings"]["dtype"] == "bf16-mixed"
    assert found["peer"]["name"] == "fp32"
    assert found["speedup"] == pytest.approx(found["peer"]["seconds"] / found["seconds"])
    # The same step, but rounded: near in its loss, and not the same process twice.
    assert found["loss"] != found["peer"]["loss"] == pytest.approx(found["loss"], rel=0.01)
    assert any(line.startswith("fp32") for line in text)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--peer", "fp32"], "is in fp32 itself"),
        (["--peer", "fp32", "--dtype", "bf16-mixed", "--peer-script", "x.py"], "leave --peer-script"),
        (["--peer", "specforge"], "add --peer-script"),
        (["--peer", "specforge", "--peer-script", "x.py", "--dtype", "bf16-mixed"], "in fp32 only"),
    ],
)
def test_a_peer_that_cannot_be_timed(options: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["step", *TOY_OPTIONS, *options]) == 2
    assert reason in capsys.readouterr().err


def test_no_rounds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["step", *TOY_OPTIONS, "--rounds", "0"])
    assert "at least 1" in capsys.readouterr().err
