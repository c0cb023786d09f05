"""A real server of chat completions: `transformers serve`."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from tests.support.launch import free_port, kill_group, start


@contextmanager
def transformers_serve(target: Path, log: Path) -> Iterator[str]:
    """`transformers serve` with `target` on the CPU; its base address."""
    port = free_port()
    code = "from transformers.cli.transformers import main; main()"
    command = [sys.executable, "-c", code, "serve", str(target), "--device", "cpu", "--dtype", "float32", "--port", str(port)]
    process = start(command, log, {"NO_PROXY": "*"})
    try:
        end = time.monotonic() + 120
        while True:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            try:
                if httpx2.get(f"http://localhost:{port}/health", timeout=5).status_code == 200:
                    break
            except httpx2.HTTPError:
                time.sleep(0.1)
        yield f"http://localhost:{port}/v1"
    finally:
        kill_group(process)
