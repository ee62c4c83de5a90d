"""A server before an object store, which is slow, fails, and lies."""

import http.client
import http.server
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from urllib.parse import urlsplit

FAILS = ("500", "503", "reset", "short", "slow")
LIES = ("flipped", "cut", "range")
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
INTERNAL = b"<Error><Code>InternalError</Code><Message>We encountered an internal error.</Message></Error>"
# Fewer in a row, for one object, than a reader makes attempts.
IN_A_ROW = 3


class Weather:
    """Failures of requests.

    Args:
        upstream: the store.
        share: of the requests to which one of `kinds` is done.

    Attributes:
        away: nobody answers.
        done: how often each was done.
    """

    def __init__(self, upstream: str, random: Random, share: float, kinds: tuple[str, ...]) -> None:
        self.upstream = urlsplit(upstream).netloc
        self.random = random
        self.share = share
        self.kinds = kinds
        self.away = False
        self.done: Counter[str] = Counter()
        self._row: Counter[str] = Counter()
        self._lock = threading.Lock()

    def choose(self, method: str, path: str) -> str | None:
        """Choose the failure of this request."""
        with self._lock:
            if self.away:
                self.done["away"] += 1
                return "reset"
            name = f"{method} {path}"
            kind = self.random.choice(self.kinds) if self.random.random() < self.share else None
            # Only answers that hold an object can be lies.
            if (kind in LIES and (method != "GET" or "list-type" in path)) or self._row[name] >= IN_A_ROW:
                kind = None
            self._row[name] = 0 if kind is None else self._row[name] + 1
            if kind is not None:
                self.done[kind] += 1
            return kind


class Handler(http.server.BaseHTTPRequestHandler):
    """Passes on what is asked for, and what the weather makes of it comes back."""

    protocol_version = "HTTP/1.1"
    weather: Weather

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing."""

    def answer(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length) if length else b""
        kind = self.weather.choose(self.command, self.path)
        if kind == "slow":
            time.sleep(self.weather.random.uniform(0.1, 1.0))
        if kind == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        if kind in ("500", "503"):
            self.reply(int(kind), {}, INTERNAL if kind == "500" else SLOW_DOWN)
            return
        headers = {name: value for name, value in self.headers.items() if name.lower() not in ("connection", "range")}
        if self.headers["Range"] and kind != "range":
            headers["Range"] = self.headers["Range"]
        upstream = http.client.HTTPConnection(self.weather.upstream, timeout=60)
        try:
            upstream.request(self.command, self.path, body or None, headers)
            got = upstream.getresponse()
            content = bytearray(got.read())
        finally:
            upstream.close()
        kept = {
            k: v for k, v in got.getheaders() if k.lower() not in ("connection", "transfer-encoding", "server", "date")
        }
        if kind == "flipped" and content:
            content[self.weather.random.randrange(len(content))] ^= 1 << self.weather.random.randrange(8)
        if kind == "cut" and content:
            del content[self.weather.random.randrange(len(content)) :]
        self.reply(got.status, kept, bytes(content), kind == "short")

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = answer

    def reply(self, status: int, headers: dict[str, str], content: bytes, short: bool = False) -> None:
        """Send it, or break off."""
        self.send_response(status)
        length = headers.get("Content-Length") if self.command == "HEAD" else len(content)
        for name, value in headers.items():
            if name.lower() != "content-length":
                self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(length or 0))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(content[: len(content) // 2] if short else content)
        self.wfile.flush()
        if short and content:
            self.close_connection = True


class Server(http.server.ThreadingHTTPServer):
    """Says nothing of commands that are killed while they ask."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@contextmanager
def proxy(weather: Weather) -> Iterator[str]:
    """Temporarily run the proxy and yield its address."""
    handler = type("Handler", (Handler,), {"weather": weather})
    server = Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
