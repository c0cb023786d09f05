"""One answer from one of several chat-completions servers: whom to ask, when to ask again, and when it is of no use.

Tried again: no connection, a time-out, 408, 409, 425, 429, 5xx, an answer that is none. Refused rows (other 4xx) are not. An address that
failed is left out for a while, as long as it asks for by `Retry-After` or else a pause that doubles while it goes on failing.
What says nothing about a row but that nobody can be asked (no address answers, the key or the name is wrong) ends the run.
"""

import asyncio
import json
import logging
import random
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import count
from typing import Any

import httpx2

from pipeline.config.regenerate import RegenerateSection
from pipeline.corpus.messages import nested_deeper, shown
from pipeline.errors import RegenerateError
from pipeline.regenerate.conversation import Answer
from pipeline.regenerate.journal import MOST_NESTED

log = logging.getLogger(__name__)

LONGEST_PAUSE = 60.0
LONGEST_RETRY_AFTER = 3600.0
CONNECT_SECONDS = 20.0
TRIED_AGAIN = {408, 409, 425, 429}
ENDS_THE_RUN = {401: "regenerate.api_key_env", 403: "regenerate.api_key_env", 404: "regenerate.servers (…/v1) and regenerate.model"}
FINISHED = ("stop", "length", "tool_calls")


class Refused(Exception):
    """A server will not answer this row, however often it is asked."""


class Unanswered(Exception):
    """No server answered this row in any of the tries."""


class _Failed(Exception):
    """One try failed, and another may not. `connected`: whether there was anybody to say so."""

    def __init__(self, text: str, retry_after: float | None = None, connected: bool = True) -> None:
        super().__init__(text)
        self.retry_after = retry_after
        self.connected = connected


class Servers:
    """Addresses in turn; one that failed is left out for a pause, which doubles while it goes on failing. Times in seconds."""

    def __init__(self, section: RegenerateSection) -> None:
        self._backoff = section.backoff_seconds
        self._free_at = {address.rstrip("/"): 0.0 for address in section.servers}
        self._failures = dict.fromkeys(self._free_at, 0)
        self._turn = count()

    async def next(self) -> str:
        """The next address that is not left out; waits while all are."""
        while True:
            now = time.monotonic()
            free = [address for address, at in self._free_at.items() if at <= now]
            if free:
                return free[next(self._turn) % len(free)]
            # Not long, since an answer to somebody else brings an address back; and not all who wait here in the same instant.
            await asyncio.sleep(min(1.0, min(self._free_at.values()) - now) * random.uniform(1.0, 1.25))

    def failed(self, address: str, failure: _Failed) -> None:
        now, retry_after = time.monotonic(), failure.retry_after
        if retry_after is None and not self._failures[address]:
            log.warning("%s; it is asked again after a pause", failure)
        if retry_after is not None:
            self._free_at[address] = max(self._free_at[address], now + retry_after)
        elif self._free_at[address] <= now:  # of requests that fail together one counts
            self._free_at[address] = now + pause(self._backoff, self._failures[address])
            self._failures[address] += 1

    def answered(self, address: str) -> None:
        self._free_at[address], self._failures[address] = 0.0, 0


def pause(backoff: float, failures: int) -> float:
    """Seconds to wait after so many earlier failures: doubling, bounded, and random, so that not all come back together."""
    return min(LONGEST_PAUSE, backoff * 2.0 ** min(failures, 30)) * random.uniform(0.5, 1.5)


class Client:
    """Asks for answers. `http` is shared by all requests; `sampling` is what every request says besides its messages."""

    def __init__(self, section: RegenerateSection, http: httpx2.AsyncClient, sampling: Mapping[str, Any]) -> None:
        self._section = section
        self._http = http
        self._sampling = sampling
        self._servers = Servers(section)
        self._heard = 0.0  # when any server last said anything

    async def answer(self, messages: Sequence[Mapping[str, Any]], further: Mapping[str, Any]) -> Answer:
        """The target's answer to `messages`; `further` are fields of this request alone.

        Raises `Refused` and `Unanswered` for the row, `RegenerateError` where no row can be answered.
        """
        body = json.dumps({**self._sampling, **further, "messages": messages}, ensure_ascii=False).encode()
        alone_since = time.monotonic()
        for attempt in range(self._section.max_retries + 1):
            address = await self._servers.next()
            try:
                answer = await self._ask(address, body)
            except _Failed as failure:
                last = failure
                self._servers.failed(address, failure)
                if failure.connected:
                    alone_since = time.monotonic()
                    # A row that servers fail on waits; one whose server is not there can go to another at once.
                    if attempt < self._section.max_retries and failure.retry_after is None:
                        await asyncio.sleep(pause(self._section.backoff_seconds, attempt))
            else:
                self._servers.answered(address)
                return answer
        tries = f"{self._section.max_retries + 1} tries; the last: {last}"
        if not last.connected and self._heard < alone_since:
            raise RegenerateError(
                f"no server can be reached ({tries}). Start the servers or mend regenerate.servers, then run the same command again: it "
                "goes on from here."
            )
        raise Unanswered(tries)

    async def _ask(self, address: str, body: bytes) -> Answer:
        url, headers = f"{address}/chat/completions", {"Content-Type": "application/json"}
        try:
            async with asyncio.timeout(self._section.timeout_seconds):
                response = await self._http.post(url, content=body, headers=headers)
        except TimeoutError:
            raise _Failed(f"{address} did not answer in {self._section.timeout_seconds:g} s (regenerate.timeout_seconds)") from None
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise _Failed(f"{address}: no connection: {shown(str(error))}", connected=False) from error
        except httpx2.HTTPError as error:
            raise _Failed(f"{address}: {type(error).__name__}: {shown(str(error))}") from error
        except httpx2.InvalidURL as error:
            raise RegenerateError(f"regenerate.servers: {address} is no address: {error}") from error
        self._heard = time.monotonic()
        status = response.status_code
        if status == 200:
            return _read(address, response)
        told = f"{address} answered {status}: {shown(response.text)}"
        if status in ENDS_THE_RUN:
            raise RegenerateError(f"{told}. It will say so for every row: check {ENDS_THE_RUN[status]}, then run again.")
        if 300 <= status < 400:
            elsewhere = shown(response.headers.get("Location", "nowhere"))
            raise RegenerateError(
                f"{url} answered {status}: it redirects to {elsewhere}. Name the address that answers in regenerate.servers."
            )
        if status in TRIED_AGAIN or status >= 500:
            raise _Failed(told, _retry_after(response.headers.get("Retry-After")))
        raise Refused(told)


def _read(address: str, response: httpx2.Response) -> Answer:
    """The first choice of a chat completion."""
    try:
        value = response.json()
        choice = value["choices"][0]
        said, reason = choice["message"], choice["finish_reason"]
        content, calls = said.get("content") or "", said.get("tool_calls")
        # vLLM calls it `reasoning` of late, everybody else `reasoning_content`.
        thinking = said.get("reasoning_content") or said.get("reasoning")
        if not isinstance(content, str) or not isinstance(thinking, str | None) or not isinstance(calls, list | None):
            raise TypeError("content, reasoning or tool_calls of another type than OpenAI's")
        if calls and (not all(isinstance(call, dict) for call in calls) or nested_deeper(calls, MOST_NESTED)):
            raise TypeError("tool_calls that are no objects, or are nested too deeply")
        f"{content}{thinking or ''}{json.dumps(calls, ensure_ascii=False)}".encode()  # half characters are an error here, not later
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as error:
        raise _Failed(f"{address} answered 200 and no chat completion ({error!r}): {shown(response.text)}") from error
    if reason == "content_filter":
        raise Refused(f"{address} withheld the answer (finish_reason content_filter)")
    if reason not in FINISHED:
        raise _Failed(f"{address} ended an answer with finish_reason {reason!r}, expected one of {', '.join(FINISHED)}")
    if reason == "length":
        content = content.rstrip("\ufffd")  # a character of which the last bytes were cut off
    message: dict[str, Any] = {"role": "assistant", "content": content}
    message |= {"reasoning_content": thinking} if thinking else {}
    message |= {"tool_calls": [_without_nulls(call) for call in calls]} if calls else {}
    return Answer(message, "tool_calls" if calls and reason == "stop" else reason, _num_tokens(value.get("usage")))


def _num_tokens(usage: object) -> int:
    """Tokens that the server says it wrote; 0 where it says nothing that can be believed."""
    found = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return found if type(found) is int and found >= 0 else 0


def _without_nulls(value: Any) -> Any:
    """`value` without keys that are null: an absent key and a null one render differently."""
    return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None} if isinstance(value, dict) else value


def _retry_after(value: str | None) -> float | None:
    """Seconds to wait, given as such or as a date; None where there is no such header, or nothing that can be read."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            at = parsedate_to_datetime(value)
        except ValueError:
            return None
        seconds = (at.replace(tzinfo=at.tzinfo or UTC) - datetime.now(UTC)).total_seconds()
    return min(max(seconds, 0.0), LONGEST_RETRY_AFTER)
