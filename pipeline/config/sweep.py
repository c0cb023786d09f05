"""`sweep` of the configuration: which settings are tried, in what order, and how much is spent on them."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from pipeline.config.section import Positive, Section
from pipeline.config.training import Monitored


class DimensionSection(Section):
    """Values of one field: exactly one of these is given."""

    choice: Annotated[tuple[Any, ...], Field(min_length=1)] | None = Field(None, description="these values, of any kind the field takes")
    uniform: tuple[float, float] | None = Field(None, description="[low, high]: any number between, ends included")
    log_uniform: tuple[float, float] | None = Field(None, description="[low, high]: any number between, all scales alike; low above 0")
    integers: tuple[int, int] | None = Field(None, description="[low, high]: any whole number between, ends included")

    @model_validator(mode="after")
    def _one_of_them(self) -> "DimensionSection":
        given = self.model_fields_set
        if len(given) != 1:
            raise ValueError(f"give exactly one of {', '.join(type(self).model_fields)}; found {', '.join(sorted(given)) or 'none'}")
        if self.choice is not None:
            if any(value in self.choice[:place] for place, value in enumerate(self.choice)):
                raise ValueError("choice holds a value twice")
            return self
        low, high = self.ends
        if low >= high:
            raise ValueError(f"the low end {low} is not below the high end {high}")
        if self.log_uniform is not None and low <= 0:
            raise ValueError(f"log_uniform needs a low end above 0; found {low}")
        return self

    @property
    def ends(self) -> tuple[float, float]:
        ends = self.uniform or self.log_uniform or self.integers
        assert ends is not None
        return ends

    @property
    def samples(self) -> tuple[Any, ...]:
        """All values of a choice; of a range, its ends."""
        return self.choice if self.choice is not None else self.ends


class SweepSection(Monitored):
    """Many trainings from one cache, compared by `monitor` as of their last validation. A trial is one setting of the space, trained with
    one seed, in LOG_DIR/trials/NUMBER."""

    space: dict[str, DimensionSection] = Field(
        default_factory=dict, description="by dotted name, such as model.optim.lr, the values of a field; other fields are as in the file"
    )
    sampler: Literal["grid", "random", "tpe", "qmc", "cmaes", "gp"] = Field(
        "grid", description="grid: every combination of the choices; or Optuna's sampler of that name, from trainer.seed"
    )
    pruner: Literal["none", "median", "successive_halving"] = Field(
        "none", description="ends trials early whose validations fall behind, by Optuna's pruner of that name"
    )
    pruner_min_steps: Positive | None = Field(
        None, description="optimizer steps before a trial can be ended; default: trainer.val_check_interval"
    )
    seeds: Annotated[tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], Field(min_length=1)] | None = Field(
        None, description="every setting is trained with each, so that settings are compared in pairs; default: trainer.seed alone"
    )
    trials: Positive | None = Field(None, description="trials at most, all seeds counted; default: the whole grid. Can be raised later")
    steps: Positive | None = Field(None, description="no trial is begun once the trials have this many optimizer steps together")
    hours: Annotated[float, Field(gt=0)] | None = Field(None, description="no trial is begun later than that after the launch")
    side_by_side: Positive | Literal["auto"] = Field(
        "auto",
        description="trials that one process trains from one reading of the cache; auto: as many as fit into memory, at most 8 where the "
        "sampler learns from those that have ended or hours are given",
    )
    storage: str | None = Field(
        None,
        description="ledger of the trials: an Optuna storage URL, or the path of a journal file; default: SQLite in LOG_DIR/study.db",
    )

    @model_validator(mode="after")
    def _can_end(self) -> "SweepSection":
        if self.seeds is not None and len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds holds a seed twice")
        ranges = [name for name, values in self.space.items() if values.choice is None]
        if self.sampler == "grid" and ranges:
            raise ValueError(f"sampler grid needs a choice for every field; {', '.join(ranges)} is a range. Choose another sampler.")
        if self.sampler != "grid" and self.space and self.trials is None and self.steps is None and self.hours is None:
            raise ValueError(f"sampler {self.sampler} never ends by itself; set trials, steps or hours")
        return self
