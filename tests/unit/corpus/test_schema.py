"""The written-down columns and rows are those of the code, and say of a row what reading it says."""

import json
from typing import Any

import pyarrow as pa
import pytest

from pipeline.config.schema import InputSection
from pipeline.corpus.rows import read_value
from pipeline.corpus.schema import EXAMPLE, SAMPLES, schemas
from tests.support.launch import REPOSITORY
from tests.unit.corpus.test_hostile import hostile
from tests.unit.corpus.test_rows import BAD, NOT_TOKENS

NOT_SAID_BY_A_SCHEMA = ("a fraction", "mask too short", "messages of broken JSON", "tools of broken JSON", "tools of text")


@pytest.mark.parametrize("name", schemas())
def test_data_schemas_show_what_the_code_writes(name: str) -> None:
    assert (REPOSITORY / "data_schemas" / name).read_text() == schemas()[name], "run `python -m pipeline.corpus.schema data_schemas`"


def test_the_example_is_a_row_of_the_columns() -> None:
    batch = pa.RecordBatch.from_pylist([EXAMPLE], schema=SAMPLES)
    batch.validate(full=True)
    assert batch.to_pylist() == [EXAMPLE]
    assert (EXAMPLE["num_tokens"], EXAMPLE["num_supervised"]) == (len(EXAMPLE["input_ids"]), sum(s["length"] for s in EXAMPLE["loss_mask"]))


def validator(name: str) -> Any:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(schemas()[name])
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize(("name", "kind"), [("corpus_row.schema.json", "jsonl"), ("token_row.schema.json", "tokens")])
def test_examples_are_read(name: str, kind: str) -> None:
    check = validator(name)
    for example in check.schema["examples"]:
        check.validate(example)
        assert read_value("x", 0, example, InputSection.model_validate({"path": "x", "type": kind})).unusable is None


def test_the_schema_and_the_reader_agree_on_bad_rows() -> None:
    rows = {name: value for name, (value, _) in BAD.items() if isinstance(value, dict)}
    for i, line in enumerate(hostile()):
        try:
            rows[f"hostile {i}"] = json.loads(line)
        except (ValueError, RecursionError):
            continue
    check, agreed = validator("corpus_row.schema.json"), {True: 0, False: 0}
    for name, row in rows.items():
        if len(str(row)) > 20_000 or name in NOT_SAID_BY_A_SCHEMA or (isinstance(row, dict) and isinstance(row.get("tools"), str | bool)):
            continue
        usable = read_value("x", 0, row).unusable is None
        assert check.is_valid(row) == usable, (name, row)
        agreed[usable] += 1
    assert min(agreed.values()) > 50
    check = validator("token_row.schema.json")
    for name, (row, _) in NOT_TOKENS.items():
        assert check.is_valid(row) == (name in NOT_SAID_BY_A_SCHEMA), name
