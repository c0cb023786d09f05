import os
import platform
import subprocess
import sys

import pytest

from tests.support.launch import REPOSITORY

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library is left alone")

FAULTS = """
import ctypes, resource, sys
from pipeline.runtime.heap import keep_freed_memory

SIZE = ctypes.c_size_t(8 << 20)
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
if sys.argv[1] == "keep":
    keep_freed_memory()
for turn in range(6):
    if turn == 1:
        begin = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [ctypes.c_void_p(libc.malloc(SIZE)) for _ in range(8)]
    for block in blocks:
        libc.memset(block, 1, SIZE)
    for block in reversed(blocks):
        libc.free(block)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - begin)
"""
"""Page faults of taking, filling and freeing 8 x 8 MiB five times, after once. Without tensors: a small block that happens to lie behind
one keeps the end of the heap from going back."""


def faults(keep: bool, **settings: str) -> int:
    mine = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_") and name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", FAULTS, "keep" if keep else "default"]
    done = subprocess.run(command, env=mine | settings, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_what_is_freed_is_taken_again_without_faults() -> None:
    assert faults(keep=True) < faults(keep=False) / 20


@pytest.mark.parametrize(
    "settings",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"MALLOC_MMAP_THRESHOLD_": "131072"},
        {"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"},
    ],
    ids=str,
)
def test_settings_of_ones_own_stay(settings: dict[str, str]) -> None:
    assert faults(keep=True, **settings) > faults(keep=False) / 2


def test_settings_of_something_else_change_nothing() -> None:
    assert faults(keep=True, GLIBC_TUNABLES="glibc.pthread.rseq=0") < faults(keep=False) / 20
