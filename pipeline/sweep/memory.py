"""How many drafts one process can train side by side."""

import os

import psutil
import torch

from pipeline.config.schema import Config
from pipeline.draft.model import Draft, DraftConfig
from pipeline.train.data import TrainingData

GPU_SHARE, CPU_SHARE = 0.85, 0.5
"""Of the memory that is free at the start, what a group may plan with; a machine's memory serves reading and file caches too."""
ACTIVATIONS = 24
"""Tensors [slots, H] in float32 that a layer keeps for its gradient: projections, norms, MLP and attention together, about."""


def num_parameters(config: Config, data: TrainingData) -> int:
    """Parameters of the draft of `config`. Raises `DraftError` for a draft that cannot be."""
    geometry = DraftConfig.build(config.model.draft, data.bundle, data.layer_ids, data.special_ids)
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Draft(geometry).parameters())


def draft_bytes(config: Config, data: TrainingData, device: torch.device) -> int:
    """What a draft holds from step to step: weights, gradients and two moments, the running average, and on a CPU the copy of a
    checkpoint that is being written. All float32."""
    copies = 4 + (config.trainer.ema_decay is not None) + (3 if device.type == "cpu" else 0)
    return 4 * copies * num_parameters(config, data)


def batch_bytes(config: Config, data: TrainingData) -> int:
    """Largest need of one step while it runs: the states of a global batch and their copy in a micro-batch, and the draft's activations.

    Drafts take turns, so a group needs it once, with the states of all its layers.
    """
    draft, train, hidden = config.model.draft, config.data.train_ds, int(data.bundle.embedding.shape[1])
    longest = int(data.num_tokens.max())
    tokens = train.global_batch_tokens or (train.samples_a_step or 1) * longest
    states = tokens * len(data.layer_ids) * hidden * data.dtype.itemsize * 2
    slots = max(1, tokens // longest) * config.model.objective.num_anchors * draft.block_size // config.trainer.accumulate_grad_batches
    return states + slots * hidden * 4 * ACTIVATIONS * draft.num_hidden_layers


def available_bytes(device: torch.device) -> int:
    """What this process may plan with; processes of one launch on one machine share its memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE)
    return int(psutil.virtual_memory().available * CPU_SHARE / max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))))
