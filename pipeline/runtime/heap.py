"""What the C library does with memory that tensors on a CPU give back."""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
TRIM_BYTES = (1 << 31) - 1
MMAP_BYTES = 1 << 25
"""The largest that glibc comes to by itself. A larger block that finds no room in the heap is mapped by itself and goes back when it is
freed: kept, it would leave a hole that the next one of its size does not fit in."""


def keep_freed_memory() -> None:
    """Have glibc keep what tensors free, for the next ones. The heap then stays as large as it ever was.

    By itself it hands the end of the heap back to the kernel when twice its largest block is free there, so that each forward takes its
    memory again, zeroed page by page: 14 % of the processor time of a small target's capture, 3 % of a draft's step. A process that has
    settings of its own for malloc (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`, `GLIBC_TUNABLES`) keeps them; with another C
    library nothing happens.
    """
    tuned = "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "")
    if tuned or "MALLOC_TRIM_THRESHOLD_" in os.environ or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
        mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)
