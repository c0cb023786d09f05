"""A small complete cache, written once for all tests that only read it."""

from pathlib import Path

import pytest

from tests.support import caches


@pytest.fixture(scope="session")
def small_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read it; copy it before damaging it."""
    return caches.write_cache(tmp_path_factory.mktemp("cache") / "small", caches.small_shards(), caches.manifest())
