"""The configuration, field by field: types, units and defaults. Immutable, and no field may be added by accident.

One schema serves every stage, so that one file can drive capture, training and evaluation; `load.py` says which fields
a stage cannot do without. Section names follow the habit of the ecosystem (DESIGN §6). No torch in here.
"""

from os.path import expanduser
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from pipeline.config.draft import DraftSection, LatentSection, ObjectiveSection, refused_pair
from pipeline.config.regenerate import RegenerateSection
from pipeline.config.section import LayerIds, NonNegative, Positive, Regex, Section
from pipeline.config.sweep import SweepSection
from pipeline.config.training import ExpManagerSection, OptimSection, TrainerSection

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
        default_factory=dict,
        description="arguments passed to the chat template, such as enable_thinking; strftime_now: 2025-06-30 is the date for templates "
        "that write today's",
    )


class ModelSection(Section):
    target: TargetSection = TargetSection()
    draft: DraftSection = DraftSection()
    objective: ObjectiveSection = ObjectiveSection()
    optim: OptimSection = OptimSection()
    init_from_checkpoint: str | None = Field(
        None,
        description="weights to start from: a checkpoint or export of ours, a Hugging Face folder, a .safetensors file, or a DCP folder; "
        "optimizer and step are new",
    )
    freeze_params: tuple[Regex, ...] = Field(
        (), description="regular expressions; a parameter whose name one of them matches anywhere is not trained"
    )
    prevent_freeze_params: tuple[Regex, ...] = Field((), description="regular expressions; what they match is trained all the same")

    @model_validator(mode="after")
    def _pair(self) -> "ModelSection":
        if reason := refused_pair(self.draft, self.objective):
            raise ValueError(reason)
        return self


Role = Literal["system", "developer", "user", "assistant", "tool"]
RowKey = Literal[
    "messages", "role", "content", "reasoning_content", "tool_calls", "tools", "id", "finish_reason", "text", "input_ids", "loss_mask"
]


class InputSection(Section):
    """One source of chats, of plain text or of token ids."""

    type: Literal["jsonl", "json", "parquet", "hf", "text", "tokens"] = Field(
        "jsonl",
        description="what the files are; hf: a hub id, a folder or Arrow files of `datasets`; tokens: rows with input_ids, in JSONL, JSON, "
        "Parquet or Arrow by the name's ending; text: see document",
    )
    path: str = Field(description="file; `*` and `?` match several, read in sorted order; .gz .bz2 .xz .zst are read through")
    name: str | None = Field(None, description="hf: which configuration of the dataset")
    split: str = Field("train", description="hf: which split of the dataset")
    weight: Annotated[float, Field(gt=0)] | None = Field(
        None, description="train_ds only, all entries or none: share of an epoch's samples that come from this entry; default: as they are"
    )
    max_rows: Positive | None = Field(None, description="rows that are read of all its files together, from the first on; default: all")
    keys: dict[RowKey, str] = Field(default_factory=dict, description="names that its rows have for messages, role, content, tools, id, …")
    roles: dict[str, Role] = Field(default_factory=dict, description="what its own names of roles mean, such as {gpt4: assistant}")
    system: str | None = Field(None, description="system message of chats that have none")
    document: Literal["file", "line"] = Field("file", description="text: what one document is")

    @model_validator(mode="after")
    def _fields_of_its_type(self) -> "InputSection":
        for kind, names in (("hf", ("name", "split")), ("text", ("document",))):
            for name in names:
                if self.type != kind and getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{name} is for type {kind} and this entry has type {self.type}")
        return self


class TrainSetSection(Section):
    input_cfg: tuple[InputSection, ...] = Field((), description="where the chats are")
    global_batch_size: Positive | None = Field(
        None, description="samples an optimizer step, over all ranks and micro-batches; default: 8, unless global_batch_tokens is given"
    )
    global_batch_tokens: Positive | None = Field(
        None, description="in its place: an optimizer step is as many samples as have these tokens"
    )
    length_buckets: Positive = Field(1, description="groups by length: the samples of a step come from one, which saves padding")
    micro_batch_tokens: Positive | None = Field(
        None, description="tokens of a micro-batch, padding included, in place of trainer.accumulate_grad_batches"
    )
    packing: bool = Field(False, description="several samples one after another in a row; they do not see each other")
    pack_tokens: Positive | None = Field(None, description="tokens of a packed row; default: micro_batch_tokens, or the longest sample")

    @model_validator(mode="after")
    def _one_way_each(self) -> "TrainSetSection":
        if self.global_batch_size is not None and self.global_batch_tokens is not None:
            raise ValueError("global_batch_size and global_batch_tokens are both set; give one")
        if self.pack_tokens is not None and not self.packing:
            raise ValueError("pack_tokens is set, and packing is false")
        if (self.pack_tokens or 0) > (self.micro_batch_tokens or self.pack_tokens or 0):
            raise ValueError(f"a row of pack_tokens ({self.pack_tokens}) does not fit into micro_batch_tokens ({self.micro_batch_tokens})")
        weighed = [entry.weight is not None for entry in self.input_cfg]
        if any(weighed) and not all(weighed):
            raise ValueError(f"input_cfg.{weighed.index(False)} has no weight, and others have; give all entries one, or none")
        return self

    @property
    def samples_a_step(self) -> int | None:
        """None when steps are cut by tokens."""
        return self.global_batch_size or (None if self.global_batch_tokens else 8)


def _unweighted(inputs: tuple[InputSection, ...]) -> tuple[InputSection, ...]:
    if any(entry.weight is not None for entry in inputs):
        raise ValueError("weight is for entries of train_ds only: here every chat is used once")
    return inputs


class ValidationSetSection(Section):
    input_cfg: tuple[InputSection, ...] = Field(description="where the chats are")

    _no_weights = field_validator("input_cfg")(_unweighted)


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
    mode: Literal["offline", "online", "hybrid"] = Field(
        "offline", description="features from the cache, from the live target, or hybrid: the first epoch captures them into capture.path"
    )
    hybrid_shards: Positive = Field(
        8, description="mode hybrid: shards that are captured at a time; the first epoch takes their samples, shuffled, before the next"
    )
    cache: str | None = Field(None, description="folder of the cache that training reads; default: capture.path")
    prepared_dir: str = Field("prepared", description="folder for tokenised corpora, shared by all runs")
    train_ds: TrainSetSection = TrainSetSection()
    validation_ds: ValidationSection = ValidationSection()
    max_tokens: Positive = Field(4096, description="tokens of a sample; what is longer is cut, and counted")
    too_long: Literal["truncate", "drop"] = Field(
        "truncate", description="chats of more than max_tokens: cut or left out; a plain text goes on in a further sample, or is left out"
    )
    min_supervised_tokens: Annotated[int, Field(ge=2)] = Field(2, description="samples with fewer are left out, and counted")
    drop_duplicates: bool = Field(
        False,
        description="leave out samples whose tokens occurred before, and training samples that a validation set has; else only counted",
    )
    loss_on: Literal["all_turns", "last_turn"] = Field("all_turns", description="which answers of a chat are supervised")
    one_sample_per_turn: bool = Field(
        False, description="every answer becomes a sample of its own, supervised alone; for templates that rewrite earlier turns"
    )
    mask_reasoning: bool = Field(False, description="leave reasoning and its marks unsupervised")
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


class EvaluateSection(Section):
    """Speculative decoding of prompts with target and draft."""

    draft: str | None = Field(None, description="folder of an exported draft; default: the run's own export")
    input_cfg: tuple[InputSection, ...] = Field((), description="chats; the last user turn is answered")
    max_new_tokens: Positive = Field(128, description="tokens of an answer at most")
    max_prompts: Positive | None = Field(None, description="prompts decoded at most; default: all")
    temperature: Annotated[float, Field(ge=0)] = Field(
        0.0, description="answers are also drawn at this temperature, and how much of a block is then kept is reported; 0: greedy alone"
    )
    top_p: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0, description="share of the probability drawn from at a temperature, that of the fewest likeliest tokens that hold it"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(0, description="of the answers that are drawn")

    @model_validator(mode="after")
    def _sampled(self) -> "EvaluateSection":
        if self.top_p < 1 and self.temperature == 0:
            raise ValueError(f"top_p {self.top_p} is without effect at temperature 0; set temperature too, or leave top_p out")
        return self

    _no_weights = field_validator("input_cfg")(_unweighted)


class Config(Section):
    name: str = Field("run", description="of the run; names its folder")
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    capture: CaptureSection = CaptureSection()
    trainer: TrainerSection = TrainerSection()
    exp_manager: ExpManagerSection = ExpManagerSection()
    evaluate: EvaluateSection = EvaluateSection()
    sweep: SweepSection = SweepSection()
    regenerate: RegenerateSection = RegenerateSection()

    @model_validator(mode="after")
    def _one_kind_of_micro_batches(self) -> "Config":
        if self.data.train_ds.micro_batch_tokens is not None and self.trainer.accumulate_grad_batches > 1:
            raise ValueError("data.train_ds.micro_batch_tokens and trainer.accumulate_grad_batches are both set; give one")
        return self

    @model_validator(mode="after")
    def _hybrid_writes_what_it_reads(self) -> "Config":
        if self.data.mode == "hybrid" and self.data.cache not in (None, self.capture.path):
            raise ValueError("data.cache is not capture.path, and data.mode is hybrid: it trains on what it captures; leave data.cache out")
        if self.data.mode == "hybrid" and self.capture.parts is not None:
            raise ValueError("capture.parts is set, and data.mode is hybrid: it captures everything")
        return self

    @model_validator(mode="after")
    def _stops_early_by_validations(self) -> "Config":
        if self.exp_manager.early_stopping.patience is not None and self.trainer.val_check_interval is None:
            raise ValueError(
                "exp_manager.early_stopping.patience is set, and trainer.val_check_interval is not: the only validation would be at the end"
            )
        return self

    @property
    def log_dir(self) -> str:
        return expanduser(self.exp_manager.explicit_log_dir or f"runs/{self.name}")

    @property
    def cache_path(self) -> str | None:
        path = self.data.cache or self.capture.path
        return expanduser(path) if path else None
