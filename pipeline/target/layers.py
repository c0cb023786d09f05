"""Which layers are captured, under the one convention of this project.

Layer id i, 0-based, means the output of decoder layer i: `hidden_states[i + 1]` of a Hugging Face forward, id i + 1 for
engines that count from a layer's input. The ids -1 and n - 1 are refused, because serving engines disagree about them.
"""

from collections.abc import Sequence

from pipeline.config.schema import DraftSection, TargetSection
from pipeline.errors import TargetError

CONVENTION = "id i is the output of decoder layer i, counted from 0"


def default_layer_ids(num_target_layers: int, num_draft_layers: int) -> tuple[int, ...]:
    """Layers for a target of `num_target_layers` and a draft of `num_draft_layers`, evenly from 1 to n - 3 (DFLASH §1).

    Raises `TargetError` where the rule has no answer: fewer than 4 target layers, or two equal ids.
    """
    n, d = num_target_layers, num_draft_layers
    if n < 4:
        raise TargetError(f"the target has {n} decoder layers; the default layers need at least 4. Give model.target.layer_ids.")
    # Python's round, half to even: published drafts were made with it.
    ids = (n // 2,) if d == 1 else tuple(round(1 + j * (n - 4) / (d - 1)) for j in range(d))
    if len(set(ids)) < len(ids):
        raise TargetError(
            f"the default layers of a {d}-layer draft on a {n}-layer target are {list(ids)}, with repeats. Give model.target.layer_ids."
        )
    return ids


def check_layer_ids(layer_ids: Sequence[int], num_target_layers: int) -> tuple[int, ...]:
    """`layer_ids` as a tuple, in the order given; raises `TargetError` for an empty list, repeats, or ids outside 0..n-2."""
    ids, last = tuple(layer_ids), num_target_layers - 1
    allowed = f"The target has {num_target_layers} decoder layers; give ids from 0 to {last - 1} (id i is the output of layer i)."
    if not ids:
        raise TargetError(f"model.target.layer_ids is empty. {allowed}")
    if len(set(ids)) < len(ids):
        raise TargetError(f"model.target.layer_ids {list(ids)} names layer {next(i for i in ids if ids.count(i) > 1)} twice. {allowed}")
    outside = [i for i in ids if not 0 <= i < last]
    if -1 in outside or last in outside:
        raise TargetError(
            f"model.target.layer_ids {list(ids)}: engines disagree whether the last layer's output ({last}, or -1) comes before or after "
            f"the final norm, so it cannot be captured as a layer. {allowed} For the state before the final norm set capture.final=true."
        )
    if outside:
        raise TargetError(f"model.target.layer_ids {list(ids)}: {outside} do not exist. {allowed}")
    return ids


def resolve_layer_ids(target: TargetSection, draft: DraftSection, num_target_layers: int) -> tuple[int, ...]:
    """The layers to capture: those named for the target, else those that the draft names, else the default for its depth."""
    named = target.layer_ids if target.layer_ids is not None else draft.target_layer_ids
    return check_layer_ids(named if named is not None else default_layer_ids(num_target_layers, draft.num_hidden_layers), num_target_layers)
