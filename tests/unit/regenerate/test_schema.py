"""The written-down formats are those of the code, and their examples are read by the corpus."""

import json

import pytest

from pipeline.corpus.rows import read_row
from pipeline.regenerate.schema import schemas
from tests.support.launch import REPOSITORY


@pytest.mark.parametrize("name", schemas())
def test_data_schemas_show_what_the_code_writes(name: str) -> None:
    assert (REPOSITORY / "data_schemas" / name).read_text() == schemas()[name], "run `python -m pipeline.regenerate.schema data_schemas`"


def test_the_examples_are_rows_of_a_corpus() -> None:
    for example in json.loads(schemas()["answers.schema.json"])["examples"]:
        row = read_row("answers.jsonl", 0, json.dumps(example).encode())
        assert row.messages == example["messages"]
        assert row.finish_reason == example["finish_reason"]
