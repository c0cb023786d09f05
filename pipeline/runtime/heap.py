"""What the C library does with memory that tensors on a CPU give back."""

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h
TRIM_BYTES = (1 << 31) - 1
MMAP_BYTES = 1 << 25
"""The largest that glibc comes to by itself. Larger blocks still go back at once: kept, they would leave holes that the next one does not
fit in."""


def keep_freed_memory() -> None:
    """Have glibc keep what tensors of up to 32 MiB free, for the next ones.

    By itself it hands the end of its heap back to the kernel at every occasion, so that each forward takes its memory again, zeroed page
    by page: a tenth of the time of a small target's capture, 3 % of a draft's step. A process that has settings of its own for
    malloc (`MALLOC_TRIM_THRESHOLD_`, `MALLOC_MMAP_THRESHOLD_`, `GLIBC_TUNABLES`) keeps them; with another C library nothing happens.
    """
    if any(name in os.environ for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, MMAP_BYTES)
        mallopt(M_TRIM_THRESHOLD, TRIM_BYTES)
