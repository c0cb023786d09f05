import errno
import logging
from pathlib import Path

import pytest

from pipeline.cache.manifest import read_manifest, read_marker
from pipeline.capture.sizes import free_bytes
from pipeline.capture.space import SpaceLeft, check_space, with_need
from pipeline.errors import CacheError


def test_what_does_not_fit_is_refused_with_need_and_place(tmp_path: Path) -> None:
    place = tmp_path / "not" / "there yet"
    free = free_bytes(place)
    assert free > 0
    check_space(place, free // 2, 0.7)
    with pytest.raises(CacheError, match=rf"{place}: what is to be captured takes about .* GB \(0.70 of .* free there"):
        check_space(place, 100 * free, 0.7)


def test_a_running_capture_warns_once(captured: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = captured / "cache"
    marker, _ = read_marker(cache, 0)
    space = SpaceLeft(cache, read_manifest(cache), 100 * free_bytes(cache))
    with caplog.at_level(logging.WARNING):
        for done in (0.1, 0.2, 1.0):
            space.look(marker, done)
    assert len(caplog.messages) == 1
    assert "the rest of the capture takes about" in caplog.text


def test_only_a_full_disk_is_told_what_it_needs(tmp_path: Path) -> None:
    full, other = CacheError("cannot write x."), CacheError("cannot write y.")
    full.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    other.__cause__ = OSError(errno.EACCES, "Permission denied")
    assert "cannot write x. When this run began, 2.000 GB of states" in str(with_need(full, tmp_path, 2 * 10**9))
    assert with_need(other, tmp_path, 5) is other
