"""How a draft is trained and watched: `model.optim`, `trainer` and `exp_manager` of the configuration."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeline.config.section import Fraction, Monitor, NonNegative, Positive, Section


class SchedSection(Section):
    """Learning rate by step: a linear rise to `lr`, then what `name` says. The same on any number of ranks."""

    name: Literal["cosine", "linear", "constant", "wsd"] = Field(
        "cosine", description="after the rise: half a cosine or a line down to min_lr; lr to the end; or lr, then a line down (wsd)"
    )
    warmup_steps: NonNegative | None = Field(None, description="steps of the rise; default: warmup_ratio of the run")
    warmup_ratio: Fraction = Field(0.04, description="share of the run's steps in which the rate rises")
    decay_steps: Positive | None = Field(None, description="wsd: steps of the last fall; default: decay_ratio of the run")
    decay_ratio: Annotated[float, Field(gt=0, le=1)] = Field(0.2, description="wsd: share of the run's steps in which the rate falls")
    min_lr: Annotated[float, Field(ge=0)] = Field(0.0, description="rate one step past the end; constant never falls")


class OptimSection(Section):
    name: Literal["adamw", "muon"] = Field(
        "adamw",
        description="muon: Muon for the matrices inside the layers, its update scaled so that AdamW's lr serves; AdamW for the rest",
    )
    lr: Annotated[float, Field(gt=0)] = Field(6e-4, description="highest learning rate")
    betas: tuple[Fraction, Fraction] = Field((0.9, 0.95), description="AdamW's decay of gradients and of their squares")
    eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="AdamW's, added to the root of the mean square")
    momentum: Fraction = Field(0.95, description="Muon's, in Nesterov's form")
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.0, description="decoupled; matrices only, never norms or biases")
    sched: SchedSection = SchedSection()

    @model_validator(mode="after")
    def _falls(self) -> "OptimSection":
        if self.sched.min_lr > self.lr:
            raise ValueError(f"sched.min_lr {self.sched.min_lr:g} is above lr {self.lr:g}, so the rate would rise to the end; lower it")
        return self


class TrainerSection(Section):
    max_steps: Positive | None = Field(None, description="optimizer steps; or give max_epochs")
    max_epochs: Positive | None = Field(None, description="passes over the training samples; or give max_steps")
    accumulate_grad_batches: Positive = Field(1, description="micro-batches into which a rank divides its share of a step")
    gradient_clip_val: Annotated[float, Field(gt=0)] | None = Field(1.0, description="norm of the gradient of the whole step")
    precision: Literal["fp32", "bf16-mixed"] = Field("fp32", description="compute; weights and optimizer are fp32 either way")
    ema_decay: Fraction | None = Field(
        None, description="keep a running average of the draft, and validate and export that, e.g. 0.999; default: none"
    )
    gradient_checkpointing: bool = Field(False, description="form a layer's activations again for its gradient, in place of keeping them")
    compile: bool = Field(False, description="torch.compile of the draft's layers; needs a C++ compiler, and its first steps are slow")
    val_check_interval: Positive | None = Field(None, description="steps between validations; default: only at the end")
    val_decode_prompts: NonNegative = Field(
        0,
        description="validation samples whose first answer is decoded with the target at each validation, up to "
        "evaluate.max_new_tokens tokens, for val_served_accept_len; needs the target in memory",
    )
    log_every_n_steps: Positive = Field(10, description="steps between lines of metrics")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="of initial weights, sample order and anchors")
    devices: Positive | None = Field(None, description="processes a node; a launch with another number is refused")
    num_nodes: Positive = Field(1, description="machines; counts where devices is given")
    timeout_seconds: Positive = Field(600, description="longest time that a rank waits for another one before the run ends")

    @model_validator(mode="after")
    def _length(self) -> "TrainerSection":
        if self.max_steps is not None and self.max_epochs is not None:
            raise ValueError("max_steps and max_epochs are both set; give one (max_epochs=null leaves that of a file out)")
        return self


class Monitored(Section):
    """A metric of the validation to choose by."""

    monitor: Monitor = Field(
        "auto",
        description="metric of the validation: val_accept_len, val_walk_accept_len, val_loss, val_accuracy, val_served_accept_len; of one "
        "set, val/NAME/loss. auto: val_walk_accept_len where all answers of the validation sets are a model's own (their rows have a "
        "finish_reason), else val_accept_len",
    )
    mode: Literal["max", "min"] | None = Field(None, description="which values are better; default: min for a loss, max for the others")

    @model_validator(mode="after")
    def _better(self) -> "Monitored":
        if self.mode not in (None, self.better):
            raise ValueError(f"mode {self.mode} would take the worst {self.settled(False).monitor} for the best; set mode to {self.better}")
        return self

    def settled(self, own_answers: bool) -> Self:
        """With a metric's name in place of auto. A walk tells what serving will commit where its text is what the target would say."""
        by_answers = "val_walk_accept_len" if own_answers else "val_accept_len"
        return self.model_copy(update={"monitor": by_answers}) if self.monitor == "auto" else self

    @property
    def better(self) -> Literal["max", "min"]:
        """Which values of the metric are better."""
        return "min" if self.monitor.endswith("loss") else "max"


class CheckpointSection(Monitored):
    """Which checkpoints are written and kept."""

    every_n_train_steps: Positive | None = Field(None, description="steps between checkpoints; default: val_check_interval")
    save_top_k: NonNegative = Field(1, description="best checkpoints kept beside the last and the final one")


class EarlyStoppingSection(Monitored):
    """When training ends before its time. Off unless `patience` is given."""

    patience: Positive | None = Field(None, description="validations in a row without a better value that end the training; default: never")
    min_delta: Annotated[float, Field(ge=0)] = Field(0.0, description="what a value must be better by, in the metric's unit")


class ExpManagerSection(Section):
    explicit_log_dir: str | None = Field(None, description="folder of the run; default: runs/NAME")
    resume_if_exists: bool = Field(True, description="go on from the newest checkpoint of the folder; false: refuse a folder with one")
    create_tensorboard_logger: bool = Field(False, description="event files in LOG_DIR/tensorboard")
    create_wandb_logger: bool = Field(False, description="Weights & Biases; with WANDB_MODE=offline into LOG_DIR/wandb alone")
    wandb_logger_kwargs: dict[str, str | int | float | bool | None] = Field(
        default_factory=dict, description="arguments of wandb.init, such as project (default: dflash) and name (default: the run's)"
    )
    create_trackio_logger: bool = Field(False, description="trackio, in the project dflash")
    checkpoint_callback_params: CheckpointSection = CheckpointSection()
    early_stopping: EarlyStoppingSection = EarlyStoppingSection()
