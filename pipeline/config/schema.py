"""The configuration, field by field: types, units and defaults. Immutable, and no field may be added by accident.

One schema serves every stage, so that one file can drive capture, training and evaluation; `load.py` says which fields
a stage cannot do without. Section names follow the habit of the ecosystem (DESIGN §6). No torch in here.
"""

from os.path import expanduser
from typing import Annotated, Literal

from pydantic import Field, model_validator

from pipeline.config.base import Fraction, LayerIds, NonNegative, Positive, Section
from pipeline.config.draft import DraftSection, LatentSection, ObjectiveSection, refused_pair

__all__ = ["Config", "DraftSection", "LatentSection", "ObjectiveSection", "Section"]


class TargetSection(Section):
    """The frozen model whose hidden states are captured."""

    path: str | None = Field(None, description="folder or hub id of the target")
    revision: str | None = Field(None, description="hub revision")
    dtype: Literal["bfloat16", "float16", "float32"] = Field("bfloat16", description="dtype of weights, forward and cache")
    tp_size: Positive = Field(1, description="ranks that hold one copy of the target together")
    layer_ids: LayerIds | None = Field(
        None, description="decoder layers to capture (0-based: id i is the output of layer i); default: from the draft's depth"
    )
    attn_implementation: Literal["sdpa", "eager", "flash_attention_2"] = Field("sdpa", description="transformers' attention")
    trust_remote_code: bool = Field(False, description="run code that the target's folder brings")
    chat_template: str | None = Field(None, description="file with a chat template in place of the tokenizer's own")
    chat_template_kwargs: dict[str, str | bool | int | float | None] = Field(
        default_factory=dict, description="arguments passed to the chat template, such as enable_thinking"
    )


class SchedSection(Section):
    """Learning rate by step: a linear rise, then a half cosine down to `min_lr`."""

    name: Literal["cosine"] = "cosine"
    warmup_steps: NonNegative | None = Field(None, description="steps of the rise; default: warmup_ratio of max_steps")
    warmup_ratio: Annotated[float, Field(ge=0, lt=1)] = 0.04
    min_lr: Annotated[float, Field(ge=0)] = 0.0


class OptimSection(Section):
    name: Literal["adamw"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 6e-4
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="decoupled; matrices only, never norms or biases")
    sched: SchedSection = SchedSection()


class ModelSection(Section):
    target: TargetSection = TargetSection()
    draft: DraftSection = DraftSection()
    objective: ObjectiveSection = ObjectiveSection()
    optim: OptimSection = OptimSection()

    @model_validator(mode="after")
    def _pair(self) -> "ModelSection":
        if reason := refused_pair(self.draft, self.objective):
            raise ValueError(reason)
        return self


class InputSection(Section):
    """One source of chats."""

    type: Literal["jsonl"] = "jsonl"
    path: str = Field(description="file; `*` and `?` match several, read in sorted order")


class TrainSetSection(Section):
    input_cfg: tuple[InputSection, ...] = Field((), description="where the chats are")
    global_batch_size: Positive = Field(8, description="samples an optimizer step, over all ranks and micro-batches")


class ValidationSetSection(Section):
    input_cfg: tuple[InputSection, ...] = Field(description="where the chats are")


class ValidationSection(Section):
    datasets: dict[str, ValidationSetSection] = Field(default_factory=dict, description="named validation sets")
    fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0, description="share of train_ds held out, by a hash of the sample, as the set `heldout`"
    )

    @model_validator(mode="after")
    def _names(self) -> "ValidationSection":
        for name in self.datasets:
            if name in ("train", "heldout") or not name.replace("_", "").replace("-", "").isalnum():
                raise ValueError(f"validation set {name!r}: use letters, digits, - and _; `train` and `heldout` are taken")
        return self


class DataSection(Section):
    mode: Literal["offline", "online"] = Field("offline", description="features from the cache, or from the live target")
    cache: str | None = Field(None, description="folder of the cache that training reads; default: capture.path")
    prepared_dir: str = Field("prepared", description="folder for tokenised corpora, shared by all runs")
    train_ds: TrainSetSection = TrainSetSection()
    validation_ds: ValidationSection = ValidationSection()
    max_tokens: Positive = Field(4096, description="tokens of a sample; what is longer is cut, and counted")
    min_supervised_tokens: Annotated[int, Field(ge=2)] = Field(2, description="samples with fewer are left out, and counted")
    num_proc: Positive | None = Field(None, description="processes that tokenise; default: all cores")
    num_workers: NonNegative = Field(2, description="threads that read the cache ahead of training, a rank")


class CaptureSection(Section):
    path: str | None = Field(None, description="folder of the cache to write")
    shard_tokens: Positive = Field(262144, description="tokens of a shard, the unit of resuming")
    batch_tokens: Positive = Field(16384, description="tokens of one forward of the target, padding included")
    codec: Literal["lossless", "raw", "int8", "int4"] = Field(
        "lossless", description="how hidden states are packed; int8 and int4 round them: data_schemas/README.md has what that costs"
    )
    final: bool = Field(False, description="also keep the state before the target's final norm")
    parts: str | None = Field(
        None,
        pattern=r"^[1-9]\d*/[1-9]\d*$",
        description='"3/16": only the third of 16 parts of the shards, for jobs that know nothing of one another',
    )

    @model_validator(mode="after")
    def _part_is_one_of_them(self) -> "CaptureSection":
        part, of = self.part
        if part > of:
            raise ValueError(f"parts is {self.parts}: give one of 1/{of} to {of}/{of}")
        return self

    @property
    def part(self) -> tuple[int, int]:
        """(i, n) of `parts`, counted from 1; (1, 1) for everything."""
        part, of = (self.parts or "1/1").split("/")
        return int(part), int(of)


class TrainerSection(Section):
    max_steps: Positive | None = Field(None, description="optimizer steps; or give max_epochs")
    max_epochs: Positive | None = None
    accumulate_grad_batches: Positive = Field(1, description="micro-batches into which a rank divides its share of a step")
    gradient_clip_val: Annotated[float, Field(gt=0)] | None = Field(1.0, description="norm of the gradient of the whole step")
    precision: Literal["fp32", "bf16-mixed"] = Field("fp32", description="compute; weights and optimizer are fp32 either way")
    val_check_interval: Positive | None = Field(None, description="steps between validations; default: only at the end")
    log_every_n_steps: Positive = 10
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="of initial weights, sample order and anchors")
    devices: Positive | None = Field(None, description="processes a node; a launch with another number is refused")
    num_nodes: Positive = 1

    @model_validator(mode="after")
    def _length(self) -> "TrainerSection":
        if self.max_steps is not None and self.max_epochs is not None:
            raise ValueError("max_steps and max_epochs are both set; give one")
        return self


class CheckpointSection(Section):
    every_n_train_steps: Positive | None = Field(None, description="default: val_check_interval")
    monitor: str = Field(
        "val_accept_len",
        pattern=r"^val(_|/[\w-]+/)(loss|accept_len|accuracy|walk_accept_len)$",
        description="metric of the validation: val_accept_len, val_walk_accept_len, val_loss, val_accuracy; of one set, val/NAME/loss",
    )
    mode: Literal["max", "min"] = "max"
    save_top_k: NonNegative = Field(1, description="best checkpoints kept beside the last")


class ExpManagerSection(Section):
    explicit_log_dir: str | None = Field(None, description="folder of the run; default: runs/NAME")
    resume_if_exists: bool = Field(True, description="go on from the newest checkpoint of the folder; false: refuse a folder with one")
    create_tensorboard_logger: bool = False
    checkpoint_callback_params: CheckpointSection = CheckpointSection()


class EvaluateSection(Section):
    """Speculative decoding of prompts with target and draft."""

    draft: str | None = Field(None, description="folder of an exported draft; default: the run's own export")
    input_cfg: tuple[InputSection, ...] = Field((), description="chats; the last user turn is answered")
    max_new_tokens: Positive = 128
    max_prompts: Positive | None = Field(None, description="default: all")


class Config(Section):
    name: str = Field("run", description="of the run; names its folder")
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    capture: CaptureSection = CaptureSection()
    trainer: TrainerSection = TrainerSection()
    exp_manager: ExpManagerSection = ExpManagerSection()
    evaluate: EvaluateSection = EvaluateSection()

    @property
    def log_dir(self) -> str:
        return expanduser(self.exp_manager.explicit_log_dir or f"runs/{self.name}")

    @property
    def cache_path(self) -> str | None:
        path = self.data.cache or self.capture.path
        return expanduser(path) if path else None
