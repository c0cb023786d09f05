"""What learns: the draft as it is wrapped for one or several ranks, its optimizers and its running average.

On several ranks the draft is copied to each (DDP), or divided over them where the launch asks for that by accelerate's own
settings (`accelerate launch --use_fsdp --fsdp_version 2`, or a configuration file that says so). Divided, a rank holds its part of
weights, gradients and optimizer state. The draft is one unit of FSDP2: its weights are whole while a step runs, because its
blocks form their gradients inside its forward (draft/groups.py), where the hooks of inner units would be too late.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from shutil import which
from typing import Any, Literal

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.state import AcceleratorState
from accelerate.utils import parse_flag_from_env
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from pipeline.config.schema import Config, ObjectiveSection
from pipeline.config.training import TrainerSection
from pipeline.draft.attention import Attend
from pipeline.draft.loss import layout_of
from pipeline.draft.metrics import Layout
from pipeline.draft.model import Draft, draft_with
from pipeline.draft.qwen3 import Rotation
from pipeline.errors import ConfigError, LaunchError
from pipeline.records import TargetBundle
from pipeline.runtime.ranks import Ranks
from pipeline.train.optim import build_optimizers, step_weight
from pipeline.train.parts import own_part, whole


@dataclass(frozen=True, eq=False)
class Learner:
    """`model` is `draft` as wrapped for several ranks; `average` holds the running average by parameter name, if one is kept. Both, and
    the optimizers' state, are float32. `bundle` is frozen and in no wrapper."""

    draft: Draft
    model: nn.Module
    optimizers: tuple[torch.optim.Optimizer, ...]
    average: dict[str, torch.Tensor] | None
    bundle: TargetBundle
    objective: ObjectiveSection
    accelerator: Accelerator
    ranks: Ranks

    @property
    def layout(self) -> Layout:
        """Which sums a step has."""
        return layout_of(self.draft.config, self.objective)

    @property
    def is_divided(self) -> bool:
        """Whether every rank holds a part of the weights only."""
        return isinstance(self.draft.fc.weight, DTensor)

    def gradients(self) -> list[torch.Tensor]:
        """This rank's part of every gradient."""
        return [own_part(p.grad) for p in self.draft.parameters() if p.grad is not None]

    def without_sync(self) -> AbstractContextManager[None]:
        """For the micro-batches of a step but its last: gradients then cross ranks once. A divided draft adds up its parts each time,
        or every rank would have to hold whole gradients."""
        return nullcontext() if self.is_divided else self.accelerator.no_sync(self.model)

    def update_average(self, decay: float, step: int) -> None:
        """Take the weights after step `step` (0-based) into the running average."""
        if self.average is not None:
            weights = [own_part(p.detach()) for p in self.draft.parameters()]
            torch._foreach_lerp_([own_part(value) for value in self.average.values()], weights, step_weight(decay, step))

    def evaluated(self) -> Draft:
        """The draft that is validated and exported: with the running average where there is one, and whole on this rank.

        Every rank must call it. It shares the weights' memory where it can: use it before the next step.
        """
        if self.average is None and not self.is_divided:
            return self.draft
        weights = self.average or dict(self.draft.named_parameters())
        return draft_with(self.draft.config, {name: whole(value.detach()) for name, value in weights.items()})


def build_learner(config: Config, draft: Draft, bundle: TargetBundle, accelerator: Accelerator, ranks: Ranks) -> Learner:
    """Wrap `draft` (on the CPU, float32, with frozen parameters marked) as `config` and the launch say, with new optimizers. Every rank
    must call it, with equal weights."""
    trainer = config.trainer
    draft = draft.to(ranks.device)
    _wrap_layers(draft, trainer)
    if divided_launch() and ranks.world_size > 1:
        # Over all ranks, as copies would be: those of one tensor-parallel group, which train on the same samples, included.
        fully_shard(draft, mesh=init_device_mesh(ranks.device.type, (ranks.world_size,)), reshard_after_forward=False)
        model: nn.Module = draft
    else:
        model = accelerator.prepare_model(draft)
    compute = torch.bfloat16 if trainer.precision == "bf16-mixed" else torch.float32
    return Learner(
        draft=draft,
        model=model,
        optimizers=build_optimizers(draft, config.model.optim),
        average=None if trainer.ema_decay is None else {name: p.detach().clone() for name, p in draft.named_parameters()},
        bundle=bundle.to(ranks.device, compute),
        objective=config.model.objective,
        accelerator=accelerator,
        ranks=ranks,
    )


def start_accelerator(precision: Literal["fp32", "bf16-mixed"]) -> Accelerator:
    """Accelerate for one run: how the draft is copied to several ranks, and autocast. Weights stay as they are, float32."""
    # Its state is the process's, and a second run in this process may want another precision.
    AcceleratorState._reset_state()
    divided = os.environ.pop("ACCELERATE_USE_FSDP", None)  # divided here, by `build_learner`; its own way wants inner units
    try:
        return Accelerator(
            mixed_precision="bf16" if precision == "bf16-mixed" else "no",
            kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)],
        )
    finally:
        if divided is not None:
            os.environ["ACCELERATE_USE_FSDP"] = divided


def divided_launch() -> bool:
    """Whether accelerate's settings of this launch ask for FSDP. Raises `LaunchError` for what of them cannot be followed; wrapping
    policies and kinds of state dict have no effect here."""
    if not parse_flag_from_env("ACCELERATE_USE_FSDP"):
        return False
    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise LaunchError("accelerate was launched with FSDP version 1; the draft is divided by FSDP2 only. Add --fsdp_version 2.")
    if parse_flag_from_env("FSDP_OFFLOAD_PARAMS"):
        raise LaunchError("accelerate was launched with --fsdp_offload_params, which this trainer does not have. Launch without it.")
    return True


def total_norm(gradients: list[torch.Tensor], learner: Learner) -> torch.Tensor:
    """Norm of the whole gradient, fp32 [], the same on every rank."""
    norm = nn.utils.get_total_norm(gradients)
    if learner.is_divided:
        square = norm.square()
        dist.all_reduce(square)
        norm = square.sqrt()
    return norm


def check_compiler(trainer: TrainerSection) -> None:
    """Raise `ConfigError` when the draft is to be compiled and this machine cannot."""
    if not trainer.compile:
        return
    names = [name for name in (os.environ.get("CXX"), "g++", "clang++") if name]
    if not any(which(name) for name in names):
        raise ConfigError(
            f"trainer.compile is true, and no C++ compiler was found (looked for {', '.join(names)}). Install one, name it in CXX, or set "
            "trainer.compile to false."
        )
    if torch.cuda.is_available() and find_spec("triton") is None:
        raise ConfigError("trainer.compile is true, and triton is not installed, which compiling for a GPU needs: pip install triton.")


def _wrap_layers(draft: Draft, trainer: TrainerSection) -> None:
    """Compile the layers and have them form activations twice, as `trainer` says; names of parameters stay as they are."""
    for layer in draft.layers:
        call: Any = layer.forward
        if trainer.compile:
            call = partial(_around_attention, torch.compile(call, dynamic=True))
        if trainer.gradient_checkpointing:
            call = partial(checkpoint, call, use_reentrant=False)
        if trainer.compile or trainer.gradient_checkpointing:
            layer.forward = call


class _AsItIs:
    """Attention between compiled parts: its tiles differ from batch to batch, and would have the layer compiled anew for each."""

    def __init__(self, attend: Attend) -> None:
        self.attend = attend

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.attend(query, key, value)


def _around_attention(compiled: Any, x: torch.Tensor, by: Rotation, attend: Attend) -> torch.Tensor:
    out: torch.Tensor = compiled(x, by, _AsItIs(attend))
    return out
