"""Answers by chat-completions servers: one process, many requests in flight, one journal.

Rows are asked in the order of the input and journaled in the order in which they end; lines that come close together are flushed to the
disk together.
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import httpx2

from pipeline.config.regenerate import RegenerateSection
from pipeline.config.schema import Config
from pipeline.corpus.turns import DATE
from pipeline.errors import LaunchError, PipelineError, RegenerateError, StoppedError
from pipeline.regenerate.assemble import assemble, keep_provenance
from pipeline.regenerate.client import CONNECT_SECONDS, Client, Refused, Unanswered
from pipeline.regenerate.conversation import Chat, failed
from pipeline.regenerate.journal import Ended, Journal, Ledger
from pipeline.regenerate.prompts import Digest, Prompt, read_prompts
from pipeline.regenerate.settings import create_or_compare, open_output, settings_of
from pipeline.runtime.files import FolderLock
from pipeline.runtime.logs import Progress

log = logging.getLogger(__name__)

REFUSED_BY_ALL = 20
"""So many rows refused, and none answered: it is the request that is wrong, not the rows."""


def regenerate_by_servers(config: Config) -> None:
    """Answer the prompts of `config.data.train_ds` into `config.regenerate.output`; goes on where an earlier run ended.

    Raises `RegenerateError` for a folder that was begun with other settings and where no server can be asked, `CacheLockedError` when
    another run writes it, and `StoppedError` after SIGTERM. What is journaled stays.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise LaunchError(
            "regenerate.backend=server is the work of one process: start it without a launcher, and raise regenerate.concurrency."
        )
    section, inputs = config.regenerate, config.data.train_ds.input_cfg
    headers = _headers(section)
    output = open_output(section.output)
    with FolderLock(output):
        prompts = Digest(read_prompts(inputs))
        for _ in prompts:
            pass
        name = section.model or config.model.target.path
        create_or_compare(output, settings_of(config, prompts, {"model": name}))
        keep_provenance(config, output)
        ledger = Ledger(output)
        with Journal(output, ledger.runs + 1, 0) as journal:
            work = _Work(section, _sampling(config, name), _open(read_prompts(inputs), ledger), journal)
            there = sum(not ledger.is_open(index) for index in range(prompts.rows))
            with Progress(prompts.rows, "rows", "answering", enabled=True, done=there) as progress:
                asyncio.run(work.run(headers, progress))
        assemble(output, prompts.rows)


def _headers(section: RegenerateSection) -> dict[str, str]:
    if section.api_key_env is None:
        return {}
    key = os.environ.get(section.api_key_env)
    if not key:
        raise RegenerateError(f"regenerate.api_key_env names {section.api_key_env}, and the environment has no such variable.")
    key = key.strip()  # the line end of the file that it was read from
    if not key.isascii() or not key.isprintable():  # the HTTP client would say so in words that hold the key
        raise RegenerateError(f"the key in {section.api_key_env} (regenerate.api_key_env) has characters that no HTTP header can have.")
    return {"Authorization": f"Bearer {key}"}


def _sampling(config: Config, name: str | None) -> dict[str, Any]:
    """What every request says. What servers may not know is said only where it is asked for."""
    section, arguments = config.regenerate, dict(config.model.target.chat_template_kwargs)
    if arguments.pop(DATE, None) is not None:
        log.warning("model.target.chat_template_kwargs.%s is not sent: servers write today's date", DATE)
    said: dict[str, Any] = {"model": name, "max_tokens": section.max_new_tokens, "temperature": section.temperature}
    if section.temperature > 0:
        said["top_p"] = section.top_p
        said |= {"top_k": section.top_k} if section.top_k is not None else {}
    return said | ({"chat_template_kwargs": arguments} if arguments else {})


def _open(prompts: Iterator[Prompt], ledger: Ledger) -> Iterator[Prompt]:
    return (prompt for prompt in prompts if ledger.is_open(prompt.index))


class _Work:
    """The rows of one run, and what became of them so far."""

    def __init__(self, section: RegenerateSection, sampling: Mapping[str, Any], prompts: Iterator[Prompt], journal: Journal) -> None:
        self._section = section
        self._sampling = sampling
        self._prompts = prompts
        self._journal = journal
        self._waiting: list[Ended] = []  # to be journaled
        self._journaling = asyncio.Lock()
        self._answered = self._refused = self._tokens = 0
        self._sigterm = False

    async def run(self, headers: Mapping[str, str], progress: Progress) -> None:
        """Answer all rows. On the first error that concerns them all, or SIGTERM, requests in flight are given up."""
        task, began = asyncio.current_task(), time.monotonic()
        assert task is not None

        def on_sigterm() -> None:
            self._sigterm = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, on_sigterm)
        most = self._section.concurrency
        limits = httpx2.Limits(max_connections=most, max_keepalive_connections=most)
        timeout = httpx2.Timeout(None, connect=CONNECT_SECONDS)
        try:
            async with httpx2.AsyncClient(headers=dict(headers), limits=limits, timeout=timeout) as http:
                client = Client(self._section, http, self._sampling)
                async with asyncio.TaskGroup() as group:
                    for _ in range(most):
                        group.create_task(self._ask(client, progress, began))
        except ExceptionGroup as errors:
            raise _first(errors) from errors
        except asyncio.CancelledError:
            if not self._sigterm:
                raise
            raise StoppedError("stopped by SIGTERM; what is answered stays, and the same command goes on from there") from None
        finally:
            self._journal.append(self._waiting)

    async def _ask(self, client: Client, progress: Progress, began: float) -> None:
        """Take row after row until there is none."""
        for prompt in self._prompts:
            if prompt.unusable is not None:
                ended = failed(prompt, prompt.unusable.reason, prompt.unusable.detail)
            else:
                ended = await self._answer(client, Chat(prompt, self._section.keep_reasoning))
            self._waiting.append(ended)
            async with self._journaling:  # who comes in takes along what came meanwhile: one flush to the disk for many rows
                lines, self._waiting = self._waiting, []
                if lines:
                    await asyncio.to_thread(self._journal.append, lines)
            self._tokens += ended.num_tokens
            progress.advance(1, f"{self._tokens / (time.monotonic() - began):.0f} tokens/s")

    async def _answer(self, client: Client, chat: Chat) -> Ended:
        while True:
            further: dict[str, Any] = {"tools": chat.prompt.tools} if chat.prompt.tools else {}
            if self._section.temperature > 0:
                further["seed"] = _seed(self._section.seed, chat)
            try:
                answer = await client.answer(chat.messages, further)
            except Refused as error:
                self._refused += 1
                if self._refused >= REFUSED_BY_ALL and not self._answered:
                    raise RegenerateError(f"{self._refused} rows were refused and none was answered. The last: {error}") from error
                return chat.fail("refused by the server", str(error), again=True)
            except Unanswered as error:
                return chat.fail("no answer", str(error), again=True)
            self._answered += 1
            if (ended := chat.take(answer)) is not None:
                return ended


def _seed(seed: int, chat: Chat) -> int:
    """Another number for each turn of each row, below 2^31."""
    digest = blake2b(f"{seed}/{chat.prompt.index}/{chat.turn}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little") >> 1


def _first(errors: ExceptionGroup[Exception]) -> Exception:
    """The error to show of those that came together: the user's, if there is one."""
    leaves = list(_leaves(errors))
    return next((error for error in leaves if isinstance(error, PipelineError)), leaves[0])


def _leaves(errors: ExceptionGroup[Exception]) -> Iterator[Exception]:
    for error in errors.exceptions:
        if isinstance(error, ExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
