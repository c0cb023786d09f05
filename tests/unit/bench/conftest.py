from pathlib import Path

import pytest

from tests.support import caches


@pytest.fixture(scope="session")
def small_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three shards. Read it only."""
    return caches.write_cache(tmp_path_factory.mktemp("cache") / "c", caches.small_shards(), caches.manifest())
