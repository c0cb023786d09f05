"""What lies in a cache is what the target computes: layer by layer, token by token, sample by sample."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.cache.reader import Cache
from pipeline.capture.run import capture
from pipeline.config.schema import TargetSection
from pipeline.target.forward import forward_hidden
from pipeline.target.load import load_target
from tests.support.tiny import write_chats
from tests.unit.capture.conftest import capture_config
from tests.unit.target.conftest import lone_rank

LAYERS = (5, 0, 3)


@pytest.fixture(scope="module")
def cache(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Cache:
    folder = tmp_path_factory.mktemp("parity")
    write_chats(folder / "chats.jsonl", 24, seed=5)
    capture(capture_config(tiny_target, folder, model__target__layer_ids=LAYERS, capture__final=True), lone_rank())
    return Cache.open(folder / "cache", final=True)


def test_stored_states_are_transformers_own(cache: Cache, tiny_target: Path) -> None:
    """A plain forward of the whole target on each chat, rendered directly: layer i is `hidden_states[i + 1]`, whatever the list's order."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    whole, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32), AutoTokenizer.from_pretrained(tiny_target)
    rows = [json.loads(line) for line in (cache.path.parent / "chats.jsonl").read_text().splitlines()]
    entering: list[torch.Tensor] = []
    whole.model.norm.register_forward_pre_hook(lambda module, args: entering.append(args[0][0]))
    assert sorted(cache.read(i).tokens.row for i in range(len(cache))) == list(range(24))
    for i in range(len(cache)):
        sample = cache.read(i, final=True)
        ids = tokenizer.apply_chat_template(rows[sample.tokens.row]["messages"], return_dict=False)
        np.testing.assert_array_equal(sample.tokens.input_ids, ids)
        with torch.no_grad():
            states = whole(torch.tensor([ids]), output_hidden_states=True).hidden_states
        for layer in LAYERS:
            scale = float(states[layer + 1].abs().max())
            torch.testing.assert_close(sample.hidden[layer], states[layer + 1][0], rtol=0, atol=1e-6 * scale)
        assert sample.final is not None
        torch.testing.assert_close(sample.final, entering.pop(), rtol=0, atol=1e-6 * float(sample.final.abs().max()))


def test_alone_and_in_the_stored_batch(cache: Cache, tiny_target: Path) -> None:
    target = load_target(TargetSection(path=str(tiny_target), dtype="float32"), lone_rank(), LAYERS, final=True)
    for i in range(len(cache)):
        stored = cache.read(i)
        (alone,) = forward_hidden(target, [stored.tokens])
        for layer in LAYERS:
            torch.testing.assert_close(
                stored.hidden[layer], alone.hidden[layer], rtol=0, atol=1e-6 * float(alone.hidden[layer].abs().max())
            )


def test_one_sample_a_forward_is_stored_bit_for_bit(tiny_target: Path, tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", 10, seed=6)
    capture(capture_config(tiny_target, tmp_path, capture__batch_tokens=1), lone_rank())
    cache = Cache.open(tmp_path / "cache")
    target = load_target(TargetSection(path=str(tiny_target), dtype="float32"), lone_rank(), cache.manifest.layer_ids, final=False)
    for i in range(len(cache)):
        stored = cache.read(i)
        (live,) = forward_hidden(target, [stored.tokens])
        for layer in cache.manifest.layer_ids:
            assert torch.equal(stored.hidden[layer].view(torch.int32), live.hidden[layer].view(torch.int32))
