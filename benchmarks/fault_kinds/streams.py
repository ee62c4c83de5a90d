"""A server of shards that is slow, fails, lies, or is away for a while."""

import http.server
import re
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

from benchmarks.fault_kinds.judging import BadError
from benchmarks.fault_kinds.rounds import OR_A_LINE, Round

KINDS = ("500", "503", "reset", "short", "slow", "flipped", "cut", "whole")
# Failures in a row for one file, fewer than a reader's attempts.
IN_A_ROW = 3


class Weather:
    """Failures of requests.

    Args:
        share: share of the requests that fail in one of `kinds`.

    Attributes:
        away: whether nobody answers.
        done: number of failures of each kind.
    """

    def __init__(self, folder: Path, random: Random, share: float, kinds: tuple[str, ...]) -> None:
        self.folder = folder
        self.random = random
        self.share = share
        self.kinds = kinds
        self.away = False
        self.done: Counter[str] = Counter()
        self._row: Counter[str] = Counter()
        self._lock = threading.Lock()

    def choose(self, path: str) -> str:
        """Choose the failure of this request; an empty text for none."""
        with self._lock:
            kind = self.random.choice(self.kinds) if self.random.random() < self.share else ""
            if self._row[path] >= IN_A_ROW:
                kind = ""
            self._row[path] = self._row[path] + 1 if kind else 0
            kind = "reset" if self.away else kind
            self.done.update([kind] if kind else [])
            return kind


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers with a file of the folder, or a part of it, and fails as the weather chooses."""

    protocol_version = "HTTP/1.1"
    weather: Weather

    def log_message(self, format: str, *arguments: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        weather, kind = self.weather, self.weather.choose(self.path)
        path = weather.folder / Path(self.path).name
        status, content = (200, bytearray(path.read_bytes())) if path.is_file() else (404, bytearray())
        if kind == "slow":
            time.sleep(weather.random.uniform(0.1, 1.0))
        elif kind == "reset":
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True
            self.connection.close()
            return
        elif kind in ("500", "503"):
            status, content = int(kind), bytearray()
        total, wanted = len(content), re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or "")
        if wanted and status == 200 and kind != "whole":
            status, content = 206, content[int(wanted[1]) : int(wanted[2]) + 1]
        if kind == "flipped" and content:
            content[weather.random.randrange(len(content))] ^= 1 << weather.random.randrange(8)
        if kind == "cut" and content:
            del content[weather.random.randrange(len(content)) :]
        self.send_response(status)
        if status == 206 and wanted:
            self.send_header("Content-Range", f"bytes {wanted[1]}-{wanted[2]}/{total}")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.close_connection = kind == "short"
        self.wfile.write(content[: len(content) // 2] if kind == "short" else content)


class Server(http.server.ThreadingHTTPServer):
    """A server that ignores clients that have gone."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


@contextmanager
def served(weather: Weather) -> Iterator[str]:
    """Temporarily run the server and yield its address."""
    server = Server(("127.0.0.1", 0), type("Handler", (Handler,), {"weather": weather}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def streamed(round: Round) -> None:
    """shards read from a store that fails"""
    kinds = tuple(round.random.sample(KINDS, round.random.randint(1, 2)))
    share = round.random.uniform(0.1, 0.5)
    round.words.append(f"{' and '.join(kinds)} in {share:.2f} of requests")
    _stream(round, Weather(round.take_cache(), round.random, share, kinds), 0.0, 0.0)


def store_away(round: Round) -> None:
    """shards read from a store that is away"""
    begins, seconds = round.random.uniform(0, 2.5), round.random.uniform(0.3, 4)
    round.words.append(f"away after {begins:.1f} s for {seconds:.1f} s")
    _stream(round, Weather(round.take_cache(), round.random, 0.0, KINDS), begins, seconds)


def _stream(round: Round, weather: Weather, begins: float, seconds: float) -> None:
    """Run on shards from a server; after an error line, run again in good weather."""

    def leave() -> None:
        time.sleep(begins)
        weather.away = seconds > 0
        time.sleep(seconds)
        weather.away = False

    with served(weather) as address:
        command = round.shop.on_shards(address)
        threading.Thread(target=leave, daemon=True).start()
        round.run("train", *command, allowed=OR_A_LINE)
        if round.lines:
            if address not in round.lines[-1]:
                raise BadError(f"the store is not named: {round.lines[-1]}")
            time.sleep(seconds)
            weather.share = 0.0
            round.run("train", *command)
    round.hit = bool(weather.done)
    round.words.append(str(dict(weather.done)))
    round.same_run("copy")
