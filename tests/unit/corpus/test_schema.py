"""The written-down columns are those of the code."""

import pytest

from pipeline.corpus.schema import schemas
from tests.support.launch import REPOSITORY


@pytest.mark.parametrize("name", schemas())
def test_data_schemas_show_what_the_code_writes(name: str) -> None:
    assert (REPOSITORY / "data_schemas" / name).read_text() == schemas()[name], "run `python -m pipeline.corpus.schema data_schemas`"
