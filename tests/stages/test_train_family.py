"""Every variant through stage two on a cache: packed rows, metrics, a stop and a resume, weights of a plain draft to start from, export."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.capture.run import capture
from pipeline.config.schema import Config
from pipeline.decode.speculative import greedy_decode, speculative_decode
from pipeline.draft.export import load_draft
from pipeline.errors import CacheMismatchError, CheckpointError
from pipeline.runtime.ranks import start_ranks
from pipeline.train.loop import train
from pipeline.train.watch import read_metrics
from tests.support.family import FEW, OBJECTIVES, SECTIONS
from tests.support.tiny import write_chats
from tests.support.training import after_line, config, repeatable, sigterm_to_self

pytestmark = pytest.mark.slow
Pair = tuple[str, str]
HELD_OUT = {"fraction": 0.3}


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> tuple[Path, Path]:
    """Chats, and a folder with a cache of them that has final states."""
    folder = tmp_path_factory.mktemp("cached")
    chats = write_chats(folder / "chats.jsonl", 24, seed=2)
    capture(config(folder, tiny_target, chats, capture__final=True, data__validation_ds=HELD_OUT), start_ranks(1, None, 1))
    return chats, folder


@pytest.fixture(autouse=True)
def _harmless_sigterm() -> Iterator[None]:
    """A signal that comes after the run is over must not end the tests."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: None)
    yield
    signal.signal(signal.SIGTERM, before)


def _config(folder: Path, target: Path, cached: tuple[Path, Path], pair: Pair, **changes: Any) -> Config:
    chats, where = cached
    draft = {"num_hidden_layers": 2, "block_size": 4, "mask_token_id": 511, **SECTIONS[pair[0]]}
    values = {
        "model__draft": draft,
        "model__objective": {"num_anchors": 8, **OBJECTIVES[pair[1]]},
        "data__train_ds": {"input_cfg": [{"path": str(chats)}], "global_batch_size": 4, "packing": True, "pack_tokens": 192},
        "data__validation_ds": HELD_OUT,
        "data__prepared_dir": str(where / "prepared"),
        "data__cache": str(where / "cache"),
        "trainer__max_steps": 10,
        "trainer__val_check_interval": 5,
        "exp_manager__checkpoint_callback_params": {"every_n_train_steps": 3, "save_top_k": 0},
    }
    return config(folder, target, chats, **{**values, **changes})


@pytest.mark.parametrize("pair", FEW)
def test_a_run_stopped_on_the_way_is_the_run_that_was_not(pair: Pair, tmp_path: Path, tiny_target: Path, cached: tuple[Path, Path]) -> None:
    ranks = start_ranks(1, None, 1)
    whole, parted = (_config(tmp_path / name, tiny_target, cached, pair) for name in ("whole", "parted"))
    assert train(whole, ranks)
    thread = after_line(tmp_path / "parted", 4, sigterm_to_self)
    finished = train(parted, ranks)
    thread.join()
    if not finished:  # as a rule; a machine may be done before the signal
        assert train(parted, ranks)
    lines = repeatable(tmp_path / "whole" / "run")
    assert repeatable(tmp_path / "parted" / "run") == lines
    trained, validated = ([line for line in lines if key in line] for key in ("loss", "val_loss"))
    assert len(trained) == 10
    assert len(validated) == 2
    assert trained[-1]["loss"] < trained[0]["loss"]
    for line, start in ((trained[-1], ""), (validated[-1], "val_")):
        for name in _figures(pair[0]):
            assert line[f"{start}{name}"] >= 0, name
    assert "val_walk_accept_len" in validated[-1]
    shares = [line["lambda_base"] for line in trained if "lambda_base" in line]
    assert shares == pytest.approx([max(0.0, 1 - step / 5) for step in range(10)] if "domino" in pair[0] else [])


def _figures(draft: str) -> set[str]:
    refined = {"base_loss", "base_accuracy", "base_accept_len"}
    own = {"dflash2": refined | {"selector_loss", "candidate_recall"}, "domino, shifted": refined | {"final_loss", "lambda_base"}}
    return {"loss", "accept_len", "accuracy", *own.get(draft, set())}


@pytest.mark.parametrize("draft", SECTIONS)
def test_a_plain_draft_is_the_start_and_the_export_is_decoded_with(
    draft: str, tmp_path: Path, tiny_target: Path, cached: tuple[Path, Path]
) -> None:
    from transformers import AutoModelForCausalLM

    from tests.unit.decode.test_speculative import bundle_of

    ranks = start_ranks(1, None, 1)
    once: dict[str, Any] = {"trainer__max_steps": 1, "trainer__val_check_interval": 1}
    base = "kimi_k3" if draft == "kimi_k3" else "dflash"
    assert train(_config(tmp_path / "plain", tiny_target, cached, (base, "decay"), **once), ranks)
    once["model__init_from_checkpoint"] = str(tmp_path / "plain" / "run" / "export")
    for name, which in (("again", base), ("started", draft)):
        assert train(_config(tmp_path / name, tiny_target, cached, (which, "decay"), **once), ranks)
    plain, started = (read_metrics(tmp_path / name / "run")[0] for name in ("again", "started"))
    if draft == "jetspec":  # the same weights, other blocks
        assert started["loss"] == pytest.approx(plain["loss"], rel=0.1)
    elif "shifted" not in draft:
        assert started.get("base_loss", started["loss"]) == pytest.approx(plain["loss"], rel=1e-6)
    exported = load_draft(tmp_path / "started" / "run" / "export").float().eval()
    assert exported.config.variant == SECTIONS[draft].get("variant", "dflash")
    assert (exported.config.latent is not None) == (draft == "kimi_k3")
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32).eval()
    served = speculative_decode(model, exported, bundle_of(model), [5, 6, 7], 12, ())
    assert served.ids == greedy_decode(model, [5, 6, 7], 12, ()).ids


def test_the_weights_of_another_backbone_are_no_start(tmp_path: Path, tiny_target: Path, cached: tuple[Path, Path]) -> None:
    ranks = start_ranks(1, None, 1)
    once: dict[str, Any] = {"trainer__max_steps": 1, "trainer__val_check_interval": 1}
    assert train(_config(tmp_path / "plain", tiny_target, cached, ("dflash", "decay"), **once), ranks)
    once["model__init_from_checkpoint"] = str(tmp_path / "plain" / "run" / "export")
    with pytest.raises(CheckpointError, match=r"of another geometry than model.draft asks for: .*kv_b_proj.weight is missing"):
        train(_config(tmp_path / "started", tiny_target, cached, ("kimi_k3", "decay"), **once), ranks)


def test_a_cache_without_final_states_is_refused_with_the_command_that_adds_them(tmp_path: Path, tiny_target: Path) -> None:
    chats = write_chats(tmp_path / "chats.jsonl", 8, seed=2)
    plain = config(tmp_path, tiny_target, chats)
    ranks = start_ranks(1, None, 1)
    capture(plain, ranks)
    distilled = config(tmp_path, tiny_target, chats, model__objective={"name": "distill"})
    with pytest.raises(
        CacheMismatchError, match=r"does not hold the final hidden state.*\n  python stages/cache\.py append .*capture\.final=true"
    ):
        train(distilled, ranks)


def test_online_and_from_the_cache_the_teacher_is_the_same(tmp_path: Path, tiny_target: Path, cached: tuple[Path, Path]) -> None:
    ranks, pair = start_ranks(1, None, 1), ("jetspec", "forward_kl")
    losses = []
    for name, mode in (("offline", "offline"), ("online", "online")):
        assert train(_config(tmp_path / name, tiny_target, cached, pair, data__mode=mode, trainer__max_steps=4), ranks)
        losses.append([line["loss"] for line in read_metrics(tmp_path / name / "run") if "loss" in line])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
