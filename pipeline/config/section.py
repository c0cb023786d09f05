"""What all sections of the configuration have in common: they are immutable, and no field may be added by accident."""

import re
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


def _compiles(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression: {error}") from None
    return pattern


Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
LayerIds = Annotated[tuple[int, ...], Field(min_length=1)]
Regex = Annotated[str, AfterValidator(_compiles)]
Monitor = Annotated[str, Field(pattern=r"^auto$|^val(_|/[\w-]+/)(loss|accept_len|accuracy|walk_accept_len)$|^val_served_accept_len$")]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
