import os
import platform
from pathlib import Path

import pytest
import torch

from pipeline.runtime.heap import keep_freed_memory
from tests.support.processes import in_child

BLOCK_MIB = 24

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library is left alone")


def _memory(name: str) -> int:
    """`name` of this process, in MiB."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) // 1024


def kept(keep: bool, environment: dict[str, str]) -> int:
    """MiB that this process keeps of what it took and freed."""
    os.environ.update(environment)
    if keep:
        keep_freed_memory()
    before = _memory("VmRSS")
    torch.ones(BLOCK_MIB << 18)
    return _memory("VmRSS") - before


def test_what_is_freed_stays_with_the_process() -> None:
    assert in_child(kept, True, {}) > 0.9 * BLOCK_MIB
    assert in_child(kept, False, {}) < 0.2 * BLOCK_MIB


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_ones_own_stay(name: str) -> None:
    assert in_child(kept, True, {name: "1"}) < 0.2 * BLOCK_MIB
