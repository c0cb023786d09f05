"""Functions of the tests run in a process of their own, which can be killed.

Processes are forked from one server that has the heavy imports already, so that each starts in milliseconds.
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "pipeline.cache.reader", "pipeline.cache.writer", "tests.support.caches"])


def _answer(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    pipe.send(function(*args))


def in_child(function: Callable[..., Any], *args: Any, timeout: float = 60) -> Any:
    """What `function(*args)` returns in another process. `function` must be at the top of a module."""
    ours, theirs = _context.Pipe(duplex=False)
    process = _context.Process(target=_answer, args=(theirs, function, args), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(timeout):
            raise AssertionError(f"{function.__name__} did not answer in {timeout} s")
        return ours.recv()
    finally:
        process.kill()
        process.join()


def killed_after(seconds: float, function: Callable[..., Any], *args: Any) -> bool:
    """Start `function(*args)` in a process, kill it with SIGKILL after `seconds` if it still runs then; whether it had to be killed."""
    process = _context.Process(target=function, args=args, daemon=True)
    process.start()
    process.join(seconds)
    killed = process.is_alive()
    process.kill()
    process.join()
    return killed
