"""Caches that were written by format version 1 stay readable for ever; tests/support/v1_caches.py made them, once."""

import json
import shutil
from pathlib import Path

import pytest

from pipeline.cache.layout import FORMAT_VERSION
from pipeline.cache.verify import verify
from tests.support.launch import REPOSITORY
from tests.support.v1_caches import CACHES, contents, write

DATA = REPOSITORY / "tests/data/v1"


@pytest.mark.parametrize("codec", CACHES)
def test_reads_as_it_was_written(codec: str) -> None:
    assert contents(DATA / codec) == json.loads((DATA / f"{codec}.json").read_text())
    assert verify(DATA / codec, full=True) == []


@pytest.mark.parametrize("codec", CACHES)
def test_its_index_is_made_again(codec: str, tmp_path: Path) -> None:
    copy = shutil.copytree(DATA / codec, tmp_path / codec)
    (copy / "index.arrow").unlink()
    assert contents(copy) == json.loads((DATA / f"{codec}.json").read_text())


@pytest.mark.parametrize("codec", CACHES)
def test_what_is_written_today_holds_the_same(codec: str, tmp_path: Path) -> None:
    # The bytes may differ with the versions of zstd and Arrow, so digests are not compared; once the version is raised, nothing is.
    if FORMAT_VERSION == 1:
        write(tmp_path, codec)
        then, now = (json.loads((folder / f"{codec}.json").read_text()) | {"digest": None} for folder in (DATA, tmp_path))
        assert now == then
