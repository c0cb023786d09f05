import os
from pathlib import Path

import pytest

from pipeline.capture.locks import capture_lock
from pipeline.errors import CacheLockedError
from pipeline.runtime.files import FolderLock

ME = rf"process {os.getpid()} on "


def test_parts_that_do_not_overlap_go_together_in_any_division(tmp_path: Path) -> None:
    with capture_lock(tmp_path, 1, 4), capture_lock(tmp_path, 3, 8), capture_lock(tmp_path, 2, 2):
        pass


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ((1, 1), (1, 1), "in use"),
        ((1, 1), (3, 16), "in use"),
        ((3, 16), (1, 1), "part 3/16"),
        ((3, 16), (3, 16), "part 3/16"),
        ((3, 16), (1, 2), "part 3/16"),
        ((1, 2), (3, 16), "part 1/2"),
    ],
)
def test_what_overlaps_is_refused_and_free_afterwards(tmp_path: Path, first: tuple[int, int], second: tuple[int, int], words: str) -> None:
    with capture_lock(tmp_path, *first), pytest.raises(CacheLockedError, match=f"{words} by {ME}"), capture_lock(tmp_path, *second):
        pass
    with capture_lock(tmp_path, *second):
        pass


def test_a_part_and_what_changes_the_whole_cache_exclude_each_other(tmp_path: Path) -> None:
    with capture_lock(tmp_path, 1, 2), pytest.raises(CacheLockedError), FolderLock(tmp_path):
        pass
    with FolderLock(tmp_path), pytest.raises(CacheLockedError, match=ME), capture_lock(tmp_path, 1, 2):
        pass
