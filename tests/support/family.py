"""Which variants are trained on which objectives, and the sums of each, slot by slot in float64, by DFLASH §3 and §6 alone."""

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from pipeline.config.draft import ObjectiveSection
from pipeline.draft.config import DraftConfig
from pipeline.draft.kimi_config import LatentShape
from pipeline.draft.model import Draft
from pipeline.draft.slots import block_ids, embed_blocks
from pipeline.records import DraftBatch, TargetBundle
from tests.support.drafts import FULL, SLIDING, any_batch, lively_draft, small_config

DRAFTS: dict[str, dict[str, Any]] = {
    "dflash": {},
    "dflash2": {"variant": "dflash2", "conv_group_size": 4, "selector_rank": 5, "selector_top_k": 8},
    "three taps": {"variant": "dflash2", "conv_kernel_size": 3, "conv_group_size": 2, "selector_rank": 2, "selector_top_k": 12},
    "domino": {"variant": "domino", "emb_dim": 7, "gru_hidden_dim": 5},
    "domino, shifted": {"variant": "domino", "emb_dim": 7, "gru_hidden_dim": 5, "pure_draft_prefix_len": 1, "shift_label": True},
    "jetspec": {"variant": "jetspec"},
}
LATENT: dict[str, Any] = {"kv_lora_rank": 7, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 5, "q_lora_rank": 6}
# Plain DFlash in all else: windows, and the other backbone.
LAYERS: dict[str, dict[str, Any]] = {
    "windows": {"layer_types": (SLIDING, FULL), "sliding_window": 8},
    "kimi_k3": {"num_attention_heads": 2, "num_key_value_heads": 2, "latent": LatentShape(**LATENT)},
}
FAMILY = DRAFTS | LAYERS
# The same as fields of `model.draft`.
SECTIONS = DRAFTS | {"kimi_k3": {"backbone": "kimi_k3", "mla": LATENT}}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "decay": {"name": "decay", "gamma": 2.0},
    "uniform": {"name": "uniform"},
    "dpace": {"name": "dpace"},
    "dpace, confidence": {"name": "dpace", "dpace_weights": "cumulative_confidence", "dpace_alpha": 0.2},
    "dpace, continuation": {"name": "dpace", "dpace_weights": "continuation_value", "dpace_alpha": 0.0},
    "variable_prefix": {"name": "variable_prefix", "gamma": 1.5},
    "forward_kl": {"name": "distill", "temperature": 2.0, "gamma": 3.0},
    "reverse_kl": {"name": "distill", "temperature": 0.7, "weights": "uniform", "divergence": "reverse_kl"},
    "total_variation": {"name": "distill", "temperature": 1.3, "weights": "decay", "divergence": "total_variation"},
}
PAIRS = [
    (draft, objective)
    for draft in DRAFTS
    for objective in OBJECTIVES
    if not (draft.startswith("domino") and objective == "variable_prefix")
]
# One of each variant and backbone, and all kinds of objectives among them: for tests that take longer.
FEW = [
    *[("dflash2", "decay"), ("dflash2", "dpace"), ("domino, shifted", "decay"), ("jetspec", "forward_kl"), ("dflash", "variable_prefix")],
    ("kimi_k3", "decay"),
]


def section_of(objective: str) -> ObjectiveSection:
    return ObjectiveSection.model_validate({"selector_weight": 0.7, "lambda_start": 0.8, **OBJECTIVES[objective]})


def family_config(draft: str, **changes: Any) -> DraftConfig:
    return small_config(**{"block_size": 4, **FAMILY[draft], **changes})


def family_draft(draft: str, **changes: Any) -> Draft:
    """A draft whose weights are all large enough to matter, a variant's own too."""
    made = lively_draft(family_config(draft, **changes))
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "codebook" in name:
                parameter.normal_(0.0, 1.0, generator=generator)
            if "base_kernel" in name:
                parameter.normal_(0.5, 0.5, generator=generator)
    return made


def family_batch(seed: int, config: DraftConfig, section: ObjectiveSection, packed: bool = False, **size: int) -> DraftBatch:
    """`any_batch` with final states and visible prefixes, as the objective needs them."""
    batch = any_batch(seed, config, packed=packed, **size)
    generator = torch.Generator().manual_seed(seed)
    if section.needs_final:
        batch = replace(batch, final=torch.randn(*batch.input_ids.shape, config.hidden_size, generator=generator) * 3)
    if section.name == "variable_prefix":
        lengths = torch.randint(min(2, config.block_size - 1), config.block_size, batch.anchors.shape, generator=generator)
        batch = replace(batch, prefix_lengths=lengths)
    return batch


class SlowSums(NamedTuple):
    """Numerators (with gradient) and denominators by term; by block, how many slots were accepted, refined and base; and counts."""

    numerators: torch.Tensor
    denominators: list[float]
    accepted: list[int]
    base_accepted: list[int]
    correct: int
    hits: int


def slow_sums(draft: Draft, bundle: TargetBundle, batch: DraftBatch, section: ObjectiveSection, share: float) -> SlowSums:
    """The objective, one slot at a time."""
    hidden = draft(batch, embed_blocks(block_ids(batch, draft.config), bundle)).double()
    terms = [torch.zeros((), dtype=torch.float64) for _ in range(2 if draft.config.variant == "dflash2" else 1)]
    denominators, accepted, base_accepted = [0.0] * len(terms), [], []
    correct = hits = 0
    for row in range(batch.anchors.shape[0]):
        for block in range(batch.anchors.shape[1]):
            slots = _supervised(draft.config, batch, row, block)
            if not slots:
                continue
            losses, base, right, base_right, selected = _slots(draft, bundle, batch, section, (row, block), hidden[row, block])
            first = 1 - draft.config.label_shift if batch.prefix_lengths is None else int(batch.prefix_lengths[row, block])
            weights = _weights(section, draft.config, slots, first, [float(x.detach()) for x in (base if selected else losses)])
            for place, weight in enumerate(weights):
                denominators[0] += weight
                if draft.config.variant == "domino":
                    terms[0] = terms[0] + weight * ((1 - share) * losses[place] + share * base[place])
                else:
                    terms[0] = terms[0] + weight * (base if selected else losses)[place]
                if selected and (selection := selected[place]) is not None:
                    terms[1] = terms[1] + weight * selection
                    denominators[1] += weight
                    hits += 1
            correct += sum(right)
            accepted.append(_prefix(right))
            base_accepted.append(_prefix(base_right))
    return SlowSums(torch.stack(terms), denominators, accepted, base_accepted, correct, hits)


def _prefix(right: list[bool]) -> int:
    return next((place for place, good in enumerate(right) if not good), len(right))


def _supervised(config: DraftConfig, batch: DraftBatch, row: int, block: int) -> list[int]:
    if not batch.block_valid[row, block]:
        return []
    anchor, end = int(batch.anchors[row, block]), int(batch.document_end[row, block])
    first = 1 - config.label_shift if batch.prefix_lengths is None else int(batch.prefix_lengths[row, block])
    labels = {slot: anchor + slot + config.label_shift for slot in range(first, config.block_size)}
    return [slot for slot, at in labels.items() if at < end and bool(batch.loss_mask[row, at])]


def _weights(section: ObjectiveSection, config: DraftConfig, slots: list[int], first: int, losses: list[float]) -> list[float]:
    if section.name == "dpace":
        confidence, rest, product = [], [], 1.0
        for loss in losses:
            product *= (1 - section.dpace_alpha) * math.exp(-loss) + section.dpace_alpha
            confidence.append(product)
        for place in range(len(losses)):
            rest.append(sum(confidence[place:]))
        return {
            "dpace": rest,
            "cumulative_confidence": confidence,
            "continuation_value": [a / b for a, b in zip(rest, confidence, strict=True)],
        }[section.dpace_weights]
    uniform = section.name == "uniform" or section.weights == "uniform"
    if section.name == "distill" and section.weights is None and config.variant == "jetspec":
        uniform = True
    return [1.0 if uniform else math.exp(-(slot - first) / section.gamma) for slot in slots]


class _Slots(NamedTuple):
    """Of each slot: loss, base loss, whether right, whether the base was right, and DFlash 2's selection loss (None: not among them)."""

    losses: list[torch.Tensor]
    bases: list[torch.Tensor]
    right: list[bool]
    base_right: list[bool]
    selected: list[torch.Tensor | None]


def _slots(
    draft: Draft, bundle: TargetBundle, batch: DraftBatch, section: ObjectiveSection, where: tuple[int, int], hidden: torch.Tensor
) -> _Slots:
    config, row, anchor = draft.config, where[0], int(batch.anchors[where])
    losses, bases, right, base_right, selected = _Slots([], [], [], [], [])
    for slot in _supervised(config, batch, *where):
        at = anchor + slot + config.label_shift
        label = int(batch.input_ids[row, at])
        base = _logits(hidden[slot], bundle)
        final = base
        if config.variant == "domino" and slot >= config.pure_draft_prefix_len + 1 - config.label_shift:
            final = base + _correction(draft, bundle, batch.input_ids[row, anchor:at], hidden[slot])
        teacher = None
        if section.needs_final:
            assert batch.final is not None
            state = batch.final[row, at - 1].double()
            normed = state / torch.sqrt((state * state).mean() + bundle.config["rms_norm_eps"]) * bundle.final_norm.double()
            teacher = _logits(normed, bundle)
        wanted = label if teacher is None else int(teacher.argmax())
        base_right.append(int(base.argmax()) == wanted)
        losses.append(_loss(section, final, label, teacher))
        bases.append(_loss(section, base, label, teacher))
        if config.variant == "dflash2":
            chosen, selection = _selection(draft, base, hidden[slot], int(batch.input_ids[row, at - 1]), label)
            right.append(chosen == wanted)
            selected.append(selection)
        else:
            right.append(int(final.argmax()) == wanted)
    return _Slots(losses, bases, right, base_right, selected)


def _logits(hidden: torch.Tensor, bundle: TargetBundle) -> torch.Tensor:
    logits = bundle.head.double() @ hidden * bundle.output_multiplier
    cap = bundle.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _loss(section: ObjectiveSection, logits: torch.Tensor, label: int, teacher: torch.Tensor | None) -> torch.Tensor:
    if teacher is None:
        return -torch.log(torch.softmax(logits, 0)[label])
    heat = section.temperature
    p, q = torch.softmax(teacher / heat, 0), torch.softmax(logits / heat, 0)
    if section.divergence == "forward_kl":
        return heat**2 * (p * torch.log(p / q)).sum()
    if section.divergence == "reverse_kl":
        return heat**2 * (q * torch.log(q / p)).sum()
    return 0.5 * (p - q).abs().sum()


def _selection(draft: Draft, logits: torch.Tensor, hidden: torch.Tensor, before: int, label: int) -> tuple[int, torch.Tensor | None]:
    weights = {name: p.double() for name, p in draft.named_parameters() if name.startswith("candidate_selector.")}
    gate = weights["candidate_selector.predecessor_codebook"][before] * (weights["candidate_selector.hidden_projection.weight"] @ hidden)
    candidates = sorted(range(len(logits)), key=lambda token: -float(logits[token].detach()))[: draft.config.selector_top_k]
    scores = torch.stack([logits[t] + gate @ weights["candidate_selector.successor_codebook"][t] for t in candidates])
    loss = -torch.log(torch.softmax(scores, 0)[candidates.index(label)]) if label in candidates else None
    return candidates[int(scores.argmax())], loss


def _correction(draft: Draft, bundle: TargetBundle, read: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """A GRU by its equations over the tokens `read`, then two matrices with SiLU between."""
    weights = {name: p.double() for name, p in draft.named_parameters()}
    state = torch.zeros(draft.config.gru_hidden_dim, dtype=torch.float64)
    for token in read:
        x = bundle.embedding[token].double() * bundle.input_embedding_scale
        reset_x, update_x, new_x = (weights["prefix_gru.weight_ih_l0"] @ x).chunk(3)
        reset_h, update_h, new_h = (weights["prefix_gru.weight_hh_l0"] @ state).chunk(3)
        update = torch.sigmoid(update_x + update_h)
        state = (1 - update) * torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h) + update * state
    narrow = weights["embed_proj.0.weight"] @ torch.cat((hidden, state))
    return weights["embed_proj.2.weight"] @ (narrow * torch.sigmoid(narrow))
