import json
import sys
from datetime import datetime

import torch

from pipeline.runtime.provenance import provenance
from tests.support.launch import REPOSITORY


def test_what_ran_is_recorded_and_goes_into_json() -> None:
    record = provenance("name: x\n")
    assert json.loads(json.dumps(record)) == record
    assert record["config"] == "name: x\n"
    assert record["argv"] == sys.argv
    assert torch.__version__.startswith(record["versions"]["torch"])
    assert datetime.fromisoformat(record["time"]).tzinfo is not None
    if (REPOSITORY / ".git").exists():
        assert len(record["git"]["commit"]) == 40
