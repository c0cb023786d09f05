"""Every case in the folder of `--goldens` (default: `cases` beside this file) against our own code. Format: cases/README.md.

All sizes come from the case. A family or an option that is not known is a failure, never a skip.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pipeline.config.schema import ObjectiveSection
from pipeline.draft.attention import visible
from pipeline.draft.loss import ObjectiveSums, block_ids, embed_blocks, objective
from pipeline.draft.model import Draft, block_positions
from pipeline.draft.published import from_json
from pipeline.errors import TargetError
from pipeline.records import DraftBatch, TargetBundle

KINDS = ("objective", "decode", "table")
FAMILIES = ("dflash", "dflash2", "domino", "jetspec", "kimi_k3")
OPTIONS = ("sliding_window", "loss_type", "prefix_weight_base", "selector_loss_weight", "shift_label", "lambda_base", "kd_temperature")


@dataclass(frozen=True)
class Case:
    values: dict[str, Any]
    tensors: dict[str, torch.Tensor]

    def group(self, prefix: str) -> dict[str, torch.Tensor]:
        """Tensors under `prefix`/, by the rest of their name."""
        return {name.removeprefix(f"{prefix}/"): tensor for name, tensor in self.tensors.items() if name.startswith(f"{prefix}/")}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    given = metafunc.config.getoption("--goldens")
    root = Path(given) if given else Path(__file__).parent / "cases"
    folders = sorted(path.parent for path in root.glob("*/case.json"))
    assert folders, f"no golden case in {root}"
    metafunc.parametrize("folder", folders, ids=[folder.name for folder in folders])


def test_golden(folder: Path) -> None:
    values = json.loads((folder / "case.json").read_text())
    assert values["kind"] in KINDS
    assert values["family"] in FAMILIES
    assert set(values.get("options", {})) <= set(OPTIONS)
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
    family = case.values["family"]
    config = replace(from_json(case.values["draft_config"]), variant="dflash" if family == "kimi_k3" else family)
    draft = Draft(config)
    draft.load_state_dict(case.group("weights"))
    return draft.eval()


def build_section(case: Case) -> ObjectiveSection:
    """Our fields for the reference's arguments; a schedule is to be read at its beginning."""
    gamma, options = case.values.get("loss_decay_gamma"), case.values.get("options", {})
    weights = "uniform" if gamma is None else "decay"
    name = "distill" if "kd_temperature" in options else "variable_prefix" if options.get("loss_type") == "variable_prefix" else weights
    values = {
        "name": name,
        "weights": weights,
        "gamma": gamma,
        "temperature": options.get("kd_temperature"),
        "prefix_base": options.get("prefix_weight_base"),
        "selector_weight": options.get("selector_loss_weight"),
        "lambda_start": options.get("lambda_base"),
    }
    return ObjectiveSection.model_validate({name: value for name, value in values.items() if value is not None})


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
        prefix_lengths=inputs.get("prefix_lengths"),
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
    assert torch.equal(visible(batch, block, window, draft.variant.causal)[:, 0][kept], outputs["attention_visible"][:, 0][kept])
    tokens = batch.input_ids.shape[1]
    positions, expected = block_positions(batch, block).flatten(1), outputs["position_ids_full"]
    assert torch.equal(batch.position_ids, expected[:, :tokens])
    assert torch.equal(positions[kept], expected[:, tokens:][kept])
    with torch.no_grad():
        hidden = draft(batch, embeddings).flatten(1, 2)
    torch.testing.assert_close(hidden[kept], outputs["output_hidden"][kept], **case.values["tolerance"])

    logits = case.tensors.get("inputs/target_logits")
    sums = objective(draft, bundle, batch, build_section(case), 0.0, None if logits is None else lambda row, at: logits[row, at])
    check_values(case, sums)
    torch.autograd.backward(sums.loss)
    expected_grads = case.group("grads")
    assert {name for name, _ in draft.named_parameters()} == set(expected_grads)
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None, name
        torch.testing.assert_close({name: parameter.grad}, {name: expected_grads[name]}, **case.values["tolerance"])


def check_values(case: Case, sums: ObjectiveSums) -> None:
    metrics = sums.metrics
    ours = {
        "loss": float(sums.loss.detach()),
        "loss_weight": float(sums.denominator),
        "valid_tokens": float(metrics.supervised.sum()),
        "correct_tokens": float(metrics.correct.sum()),
        "accuracy": metrics.accuracy,
        "valid_blocks": float(metrics.blocks),
        "accept_len_sum": float(metrics.accept_len_sum),
        "accept_len": metrics.accept_len,
        **further_values(sums),
    }
    rtol, atol = case.values["tolerance"]["rtol"], case.values["tolerance"]["atol"]
    expected = case.values["expect"]
    assert {name: ours[name] for name in expected} == pytest.approx(expected, rel=rtol, abs=atol)


def further_values(sums: ObjectiveSums) -> dict[str, float]:
    """What a variant reports besides, under the reference's names."""
    terms = zip(sums.layout.terms, sums.numerators.tolist(), sums.denominators.tolist(), strict=True)
    pairs = {name: (a, b) for name, a, b in terms if name != "loss"}
    pairs |= dict(zip(sums.layout.means, sums.means.tolist(), strict=True))
    values = {name: a / b if b else 0.0 for name, (a, b) in pairs.items()}
    for ours, theirs in (("base_accept_len", "base_accept_len_sum"), ("base_accuracy", "base_correct_tokens")):
        if ours in pairs:
            values[theirs] = pairs[ours][0]
    return values


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
