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
        ((1, 1), (1, 1), f"in use by {ME}"),
        ((1, 1), (3, 16), f"in use by {ME}"),
        ((3, 16), (1, 1), f"part 3/16 by {ME}"),
        ((3, 16), (3, 16), f"part 3/16 by {ME}"),
        ((3, 16), (1, 2), f"part 3/16 by {ME}"),
        ((1, 2), (3, 16), f"part 1/2 by {ME}"),
    ],
)
def test_what_overlaps_is_refused_and_free_afterwards(tmp_path: Path, first: tuple[int, int], second: tuple[int, int], words: str) -> None:
    with capture_lock(tmp_path, *first), pytest.raises(CacheLockedError, match=words), capture_lock(tmp_path, *second):
        pass
    with capture_lock(tmp_path, *second):
        pass


def test_a_part_and_what_changes_the_whole_cache_exclude_each_other(tmp_path: Path) -> None:
    with capture_lock(tmp_path, 1, 2), pytest.raises(CacheLockedError), FolderLock(tmp_path):
        pass
    with FolderLock(tmp_path), pytest.raises(CacheLockedError, match=ME), capture_lock(tmp_path, 1, 2):
        pass
