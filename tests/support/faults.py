"""A chat-completions server that fails as asked: somebody else's part, so that ours can be seen to bear it."""

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, TypeAlias


@dataclass(frozen=True)
class Reply:
    """What the server does with one request. `status` 0: it closes the connection without a word."""

    status: int = 200
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0


def completion(content: str | None, finish_reason: str = "stop", **message: Any) -> dict[str, Any]:
    """A chat completion of three tokens."""
    choice = {"index": 0, "message": {"role": "assistant", "content": content, **message}, "finish_reason": finish_reason}
    return {"object": "chat.completion", "choices": [choice], "usage": {"completion_tokens": 3}}


Behaviour: TypeAlias = Callable[[dict[str, Any], int], Reply]
"""From the request's body and how often these messages have been sent before, to what happens."""


def echo(body: dict[str, Any], before: int) -> Reply:
    return Reply(body=completion(f"you said: {body['messages'][-1]['content']}"))


class FaultServer:
    """`requests` are the bodies in the order of arrival, `headers` theirs, `most_at_once` the most that were in work together."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.most_at_once = self._at_once = 0
        self._seen: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @contextmanager
    def running(self) -> Iterator["FaultServer"]:
        thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def _reply(self, body: dict[str, Any], headers: dict[str, str]) -> Reply:
        key = json.dumps(body["messages"])
        with self._lock:
            self.requests.append(body)
            self.headers.append(headers)
            before = self._seen[key]
            self._seen[key] += 1
        return self.behaviour(body, before)

    def _count(self, change: int) -> None:
        with self._lock:
            self._at_once += change
            self.most_at_once = max(self.most_at_once, self._at_once)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer._count(1)
                try:
                    reply = outer._reply(body, dict(self.headers))
                    time.sleep(reply.seconds)
                finally:
                    outer._count(-1)
                if reply.status == 0 or not self.path.endswith("/v1/chat/completions"):
                    self.close_connection = True
                    return
                data = reply.body if isinstance(reply.body, bytes) else json.dumps(reply.body).encode()
                self.send_response(reply.status)
                for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **reply.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

            def handle(self) -> None:
                try:
                    super().handle()
                except ConnectionError:  # the client gave up on a slow answer
                    self.close_connection = True

            def log_message(self, format: str, *args: Any) -> None:
                pass

        return Handler
