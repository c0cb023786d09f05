"""How long a draft and its target take for a step, on this machine: what acceptance has to be weighed against."""

import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import DynamicCache

from pipeline.config.schema import Config
from pipeline.draft.export import load_draft
from pipeline.draft.model import joined
from pipeline.draft.serving import Serving
from pipeline.draft.slots import embed_blocks, likeliest
from pipeline.errors import PipelineError
from pipeline.records import TargetBundle
from pipeline.report.runs import TargetSpeed
from pipeline.runtime.ranks import Ranks
from pipeline.target.folder import read_config
from pipeline.target.load import load_target

log = logging.getLogger(__name__)

CONTEXT_TOKENS = 512
FORWARD_TOKENS = 512
REPEATS = 7


@torch.inference_mode()
def draft_seconds(export: Path, bundle: TargetBundle, device: torch.device) -> float | None:
    """Least time of one block behind `CONTEXT_TOKENS` tokens: the context's new tokens, the block, the head over its slots.

    None for a draft that is not served this way.
    """
    try:
        draft = joined(load_draft(export).to(device))
    except PipelineError as error:
        log.warning("%s is not timed: %s", export, error)
        return None
    config, dtype = draft.config, draft.fc.weight.dtype
    serving = Serving(draft, CONTEXT_TOKENS + 2 * (REPEATS + 2))
    width = len(config.target_layer_ids) * config.hidden_size
    serving.extend(torch.zeros(1, CONTEXT_TOKENS, width, dtype=dtype, device=device))
    bundle = bundle.to(device, dtype)
    block = torch.full((1, config.block_size), config.mask_token_id, device=device)

    def step() -> None:
        serving.extend(torch.zeros(1, 2, width, dtype=dtype, device=device))
        draft.variant.propose(draft, serving.hidden(embed_blocks(block, bundle).to(dtype)), block[:, 0], bundle, likeliest)

    return _least(step, device)


@torch.inference_mode()
def target_speed(config: Config, block_sizes: Sequence[int], ranks: Ranks) -> TargetSpeed:
    """The target of `config`, loaded whole. Raises `TargetError` when it cannot be."""
    section = config.model.target
    layers = read_config(section).get_text_config(decoder=True).num_hidden_layers
    target = load_target(section, ranks, (layers - 2,), final=True)
    model, device = target.model, target.device
    ids = torch.ones(1, CONTEXT_TOKENS, dtype=torch.int64, device=device)
    cache = DynamicCache()
    model(input_ids=ids, cache=cache, use_cache=True, logits_to_keep=1)

    def step(tokens: int) -> Callable[[], None]:
        def forward() -> None:
            model(input_ids=ids[:, :tokens], cache=cache, use_cache=True, logits_to_keep=tokens)
            cache.crop(-tokens)

        return forward

    one = _least(step(1), device)
    blocks = {size: _least(step(size), device) for size in sorted(set(block_sizes))}
    forward = _least(lambda: model(input_ids=ids[:, :FORWARD_TOKENS], use_cache=False, logits_to_keep=1), device)
    verified = ", ".join(f"{size} tokens {seconds * 1e3:.1f} ms" for size, seconds in blocks.items())
    how = f"measured on {device.type} behind {CONTEXT_TOKENS} tokens, one token {one * 1e3:.1f} ms, {verified}"
    return TargetSpeed(one, blocks, FORWARD_TOKENS / forward, how)


def _least(step: Callable[[], object], device: torch.device) -> float:
    step()
    seconds = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)  # whatever else runs on the machine only adds to it
