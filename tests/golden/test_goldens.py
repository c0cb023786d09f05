"""Every case in the folder of `--goldens` (default: `cases` beside this file) against our own code. Format: cases/README.md.

All sizes come from the case. A case of a family or with an option that is not built yet is skipped, by name.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.config.schema import ObjectiveSection
from pipeline.draft.attention import visible
from pipeline.draft.config import DraftConfig
from pipeline.draft.loss import ObjectiveSums, block_ids, embed_blocks, objective
from pipeline.draft.model import Draft, block_positions
from pipeline.errors import TargetError
from pipeline.records import DraftBatch, TargetBundle

KINDS = ("objective", "decode", "table")
FAMILIES = ("dflash", "kimi_k3")
OPTIONS = ("sliding_window",)


@dataclass(frozen=True)
class Case:
    values: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def group(self, prefix: str) -> dict[str, torch.Tensor]:
        """Tensors under `prefix`/, by the rest of their name."""
        return {name.removeprefix(f"{prefix}/"): tensor for name, tensor in self.tensors.items() if name.startswith(f"{prefix}/")}


def not_built(values: dict[str, Any]) -> str | None:
    """Why a case cannot be run yet."""
    if values["family"] not in FAMILIES:
        return f"family {values['family']} is not built yet"
    for name, value in values.get("options", {}).items():
        if name not in OPTIONS:
            return f"option {name}={value} is not built yet"
    return None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = metafunc.config.getoption("--goldens")
    root = Path(given) if given else Path(__file__).parent / "cases"
    folders = sorted(path.parent for path in root.glob("*/case.json"))
    assert folders, f"no golden case in {root}"
    metafunc.parametrize("folder", folders, ids=[folder.name for folder in folders])


def test_golden(folder: Path) -> None:
    values = json.loads((folder / "case.json").read_text())
    assert values["kind"] in KINDS
    if reason := not_built(values):
        pytest.skip(f"{folder.name}: {reason}")
    case = Case(values, load_file(folder / "tensors.safetensors"))
    {"objective": check_objective, "decode": check_decode, "table": check_table}[values["kind"]](case)


def check_table(case: Case) -> None:
    from pipeline.target.layers import default_layer_ids

    for key, expected in case.values["table"].items():
        depth, layers = map(int, key.split(","))
        if len(set(expected)) < len(expected):  # the reference repeats layers there; ours asks for explicit ids
            with pytest.raises(TargetError, match="repeats"):
                default_layer_ids(depth, layers)
        else:
            assert default_layer_ids(depth, layers) == tuple(expected), key


def build_draft(case: Case) -> Draft:
    draft = Draft(DraftConfig.from_json(case.values["draft_config"]))
    draft.load_state_dict(case.group("weights"))
    return draft.eval()


def build_bundle(draft: Draft, embedding: torch.Tensor, head: torch.Tensor) -> TargetBundle:
    """The target's part, with the scales and the soft cap that the draft's configuration says it has."""
    config = draft.config
    return TargetBundle(
        embedding=embedding,
        head=head,
        final_norm=torch.ones(config.hidden_size),
        config={},
        input_embedding_scale=config.input_embedding_scale,
        output_multiplier=config.output_multiplier,
        final_logit_softcapping=config.final_logit_softcapping,
    ).check()


def build_batch(case: Case) -> DraftBatch:
    inputs = case.group("inputs")
    ids, anchors = inputs["input_ids"], inputs["anchor_positions"]
    rows, tokens = ids.shape
    positions, remaining = inputs.get("position_ids"), inputs.get("doc_remaining")
    if positions is None:
        positions = torch.arange(tokens).expand(rows, tokens)
    if remaining is None:
        remaining = tokens - 1 - positions
    return DraftBatch(
        sample_ids=tuple(f"row {row}" for row in range(rows)),
        input_ids=ids,
        loss_mask=inputs["loss_mask"].bool(),
        features=inputs["hidden_states"],
        position_ids=positions,
        anchors=anchors,
        document_start=anchors - positions.gather(1, anchors),
        document_end=anchors + remaining.gather(1, anchors) + 1,
        block_valid=inputs["block_keep_mask"],
    ).check()


def check_objective(case: Case) -> None:
    draft, batch, outputs = build_draft(case), build_batch(case), case.group("outputs")
    target = case.group("weights_target")
    bundle = build_bundle(draft, target["embed_tokens.weight"], target["lm_head.weight"])
    block = draft.config.block_size
    kept = batch.block_valid.repeat_interleave(block, dim=1)  # rows of padding blocks are not compared

    embeddings = embed_blocks(block_ids(batch, draft.config), bundle)
    assert torch.equal(embeddings.flatten(1, 2)[kept], outputs["noise_embedding"][kept])
    window = case.values.get("options", {}).get("sliding_window")
    assert window == draft.config.sliding_window
    assert torch.equal(visible(batch, block, window)[:, 0][kept], outputs["attention_visible"][:, 0][kept])
    tokens = batch.input_ids.shape[1]
    positions, expected = block_positions(batch, block).flatten(1), outputs["position_ids_full"]
    assert torch.equal(batch.position_ids, expected[:, :tokens])
    assert torch.equal(positions[kept], expected[:, tokens:][kept])
    with torch.no_grad():
        hidden = draft(batch, embeddings).flatten(1, 2)
    torch.testing.assert_close(hidden[kept], outputs["output_hidden"][kept], **case.values["tolerance"])

    gamma = case.values.get("loss_decay_gamma")
    section = ObjectiveSection(name="uniform") if gamma is None else ObjectiveSection(name="decay", gamma=gamma)
    sums = objective(draft, bundle, batch, section)
    check_values(case, sums)
    torch.autograd.backward(sums.numerator / sums.denominator)
    expected_grads = case.group("grads")
    assert {name for name, _ in draft.named_parameters()} == set(expected_grads)
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close({name: parameter.grad}, {name: expected_grads[name]}, **case.values["tolerance"])


def check_values(case: Case, sums: ObjectiveSums) -> None:
    metrics = sums.metrics
    ours = {
        "loss": float(sums.numerator.detach() / sums.denominator),
        "loss_weight": float(sums.denominator),
        "valid_tokens": float(metrics.supervised.sum()),
        "correct_tokens": float(metrics.correct.sum()),
        "accuracy": metrics.accuracy,
        "valid_blocks": float(metrics.blocks),
        "accept_len_sum": float(metrics.accept_len_sum),
        "accept_len": metrics.accept_len,
    }
    rtol, atol = case.values["tolerance"]["rtol"], case.values["tolerance"]["atol"]
    expected = case.values["expect"]
    assert {name: ours[name] for name in expected} == pytest.approx(expected, rel=rtol, abs=atol)


def check_decode(case: Case) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from pipeline.decode.speculative import greedy_decode, speculative_decode

    draft, values, outputs = build_draft(case), case.values, case.group("outputs")
    target = Qwen3ForCausalLM(Qwen3Config(**values["target_config"])).eval()
    target.load_state_dict(case.group("weights_target"))
    bundle = build_bundle(draft, target.get_input_embeddings().weight.detach(), target.lm_head.weight.detach())
    prompt, stop_ids = case.tensors["inputs/prompt"][0].tolist(), values.get("stop_token_ids") or ()

    greedy = greedy_decode(target, prompt, values["max_new_tokens"], stop_ids)
    assert prompt + greedy.ids == outputs["greedy_ids"][0].tolist()
    served = speculative_decode(target, draft, bundle, prompt, values["max_new_tokens"], stop_ids)
    assert prompt + served.ids == outputs["speculative_ids"][0].tolist()
    assert (served.ids == greedy.ids) == values["expect"]["lossless"]
    assert served.step_lengths == outputs["acceptance_lengths"].tolist()
    assert served.acceptance_length == pytest.approx(values["expect"]["mean_acceptance_length"], rel=1e-6)
