"""Who may capture what of a cache at the same time: everything, or parts of it that do not overlap.

    CACHE/.lock              everything holds it alone; the captures of parts share it, which keeps out everything else
    CACHE/.lock-3-of-16      one part, held alone

The locks are the kernel's, or the file server's, and go with the process that holds them (`FolderLock` says what that means
on network file systems). Jobs find one another through these files alone.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from pipeline.errors import CacheLockedError
from pipeline.runtime.files import FolderLock, lock_holder

_PART = re.compile(r"\.lock-(\d+)-of-(\d+)")


@contextmanager
def capture_lock(cache: Path, part: int, of: int) -> Iterator[None]:
    """Hold part `part` of `of` (counted from 1; 1 of 1 is everything). Raises `CacheLockedError`, naming who holds what overlaps it."""
    with ExitStack() as held:
        try:
            held.enter_context(FolderLock(cache, shared=of > 1))
        except CacheLockedError as error:
            if holders := _held_parts(cache):
                raise CacheLockedError(_in_use(cache, holders)) from error
            raise
        if of > 1:
            try:
                held.enter_context(FolderLock(cache, f".lock-{part}-of-{of}"))
            except CacheLockedError:
                holder = lock_holder(cache / f".lock-{part}-of-{of}") or "a process that just ended"
                raise CacheLockedError(_in_use(cache, {(part, of): holder})) from None
            # Parts of another division: both may be refused when two come in one instant, but never do both go on.
            if holders := _held_parts(cache, beside=(part, of)):
                raise CacheLockedError(_in_use(cache, holders))
        yield


def _in_use(cache: Path, holders: dict[tuple[int, int], str]) -> str:
    named = ", ".join(f"part {part}/{of} by {holder}" for (part, of), holder in sorted(holders.items()))
    return f"{cache} is in use: {named}. Wait for it or stop it; the lock goes with that process."


def _held_parts(cache: Path, beside: tuple[int, int] | None = None) -> dict[tuple[int, int], str]:
    """Parts that are being captured now and by whom; `beside` leaves out itself and what does not overlap it."""
    found = {}
    for path in cache.glob(".lock-*-of-*"):
        match = _PART.fullmatch(path.name)
        if match is None:
            continue
        part, of = int(match[1]), int(match[2])
        if beside is not None and (beside == (part, of) or not _overlap(beside, (part, of))):
            continue  # not even asked: asking takes the lock for an instant, in which its owner could come
        if holder := lock_holder(path):
            found[part, of] = holder
    return found


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    """Whether two parts have shards in common, in some cache: their shares of the whole do (`corpus.plan.shards_of_part`)."""
    return (a[0] - 1) * b[1] < b[0] * a[1] and (b[0] - 1) * a[1] < a[0] * b[1]
