import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from pipeline.errors import CacheCorruptError, CacheMismatchError, HiddenStateError, TargetError
from pipeline.target.forward import forward_hidden
from pipeline.target.load import Target
from pipeline.target.probe import PROBE_FILE, PROBE_TOKENS, check_padding, compare_probe, probe_ids, probe_states, save_probe
from tests.support.tiny import write_target
from tests.unit.target.conftest import sample

Load = Callable[..., Target]

# A target that looks behind a token: it adds the mean of the whole row, padding included.
LEAKY = """\
from transformers import Qwen3Config, Qwen3ForCausalLM


class LeakyConfig(Qwen3Config):
    model_type = "leaky"


class LeakyForCausalLM(Qwen3ForCausalLM):
    config_class = LeakyConfig

    def __init__(self, config):
        super().__init__(config)
        inner = self.model.layers[0].forward

        def forward(hidden_states, *args, **kwargs):
            return inner(hidden_states + hidden_states.mean(dim=1, keepdim=True), *args, **kwargs)

        self.model.layers[0].forward = forward
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_padding_is_seen_to_be_harmless(load: Load, tiny_target: Path, dtype: str) -> None:
    check_padding(load(tiny_target, dtype=dtype, final=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_target_that_sees_padding_is_refused(load: Load, tiny_target: Path, tmp_path: Path, dtype: str) -> None:
    folder = Path(shutil.copytree(tiny_target, tmp_path / f"leaky_{dtype}"))
    config = json.loads((folder / "config.json").read_text())
    code = {"AutoConfig": "leaky.LeakyConfig", "AutoModelForCausalLM": "leaky.LeakyForCausalLM"}
    (folder / "config.json").write_text(
        json.dumps(config | {"model_type": "leaky", "auto_map": code, "architectures": ["LeakyForCausalLM"]})
    )
    (folder / "leaky.py").write_text(LEAKY)
    leaky = load(folder, dtype=dtype, trust_remote_code=True)
    assert forward_hidden(leaky, [sample(9)])
    with pytest.raises(TargetError, match="padding changes real tokens of this target: at layer 1"):
        check_padding(leaky)


def test_states_that_are_not_finite_are_seen_before_any_sample(load: Load, tiny_target: Path) -> None:
    target = load(tiny_target)
    with torch.no_grad():
        target.model.get_input_embeddings().weight[int(probe_ids(512)[5])] = float("inf")
    with pytest.raises(HiddenStateError, match="layer_1 are not finite for a fixed sample"):
        probe_states(target)


def test_probe_tells_targets_apart(load: Load, tiny_target: Path, tmp_path: Path) -> None:
    target = load(tiny_target, final=True)
    stored = probe_states(target)
    assert set(stored) == {"layer_1", "layer_3", "layer_5", "final"}
    assert all(state.shape == (PROBE_TOKENS, 64) for state in stored.values())
    full, half = torch.float32, torch.bfloat16
    save_probe(tmp_path, stored)
    compare_probe(tmp_path, stored, full)
    compare_probe(tmp_path, probe_states(load(tiny_target, (5, 3))), full)
    compare_probe(tmp_path, probe_states(load(tiny_target, dtype="bfloat16")), half)
    with pytest.raises(CacheMismatchError, match="the live target's states of layer_1 differ"):
        compare_probe(tmp_path, probe_states(load(write_target(tmp_path / "other", seed=1))), full)
    with pytest.raises(CacheMismatchError, match="layer_1"):
        compare_probe(tmp_path, stored | {"layer_1": stored["layer_3"]}, half)
    with pytest.raises(CacheMismatchError, match="layer_3"):
        compare_probe(tmp_path, stored | {"layer_3": torch.full_like(stored["layer_3"], float("nan"))}, full)
    (tmp_path / PROBE_FILE).write_bytes(b"short")
    with pytest.raises(CacheCorruptError, match=PROBE_FILE):
        compare_probe(tmp_path, stored, full)
