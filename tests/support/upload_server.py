"""A hub on this machine that takes uploads, notes what arrives, and fails where it is told to."""

import base64
import json
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NAME = "owner/name"
TOKEN = "hf_averysecrettoken"
# What stands in the paths of the requests that an upload makes, in their order.
CREATE, PREUPLOAD, BATCH, PUT, COMMIT = "/repos/create", "/preupload/", "/lfs/objects/batch", "/stored/", "/commit/"


class Hub:
    """What has arrived.

    Attributes:
        address: of the server.
        files: of the repository NAME, by path.
        commits: how many have been made.
        asked: the path of each request.
        created: what was asked for when the repository was to be made.
        answer: called with each request's path and how often it has come; a status, "reset", "hang" or None for the
            right answer.
    """

    def __init__(self) -> None:
        self.address = ""
        self.files: dict[str, bytes] = {}
        self.commits = 0
        self.asked: list[str] = []
        self.created: list[dict[str, Any]] = []
        self.answer: Callable[[str, int], int | str | None] = lambda path, count: None
        self.ended = threading.Event()
        self._stored: dict[str, bytes] = {}

    def respond(self, path: str, body: bytes) -> Any:
        """Answer a request."""
        if CREATE in path:
            self.created.append(json.loads(body))
            return {"url": f"{self.address}/{NAME}", "name": NAME}
        if PREUPLOAD in path:
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            return {
                "files": [{"path": name, "uploadMode": mode, "shouldIgnore": False} for name, mode in modes.items()]
            }
        if BATCH in path:
            asked = json.loads(body)["objects"]
            places = [{"upload": {"href": f"{self.address}{PUT}{one['oid']}"}} for one in asked]
            return {"objects": [{**one, "actions": place} for one, place in zip(asked, places, strict=True)]}
        if PUT in path:
            self._stored[path.rpartition("/")[2]] = body
            return {}
        if COMMIT in path:
            return self._commit([json.loads(line) for line in body.splitlines()])
        return {"errors": [], "warnings": [{"message": "a warning of the hub"}]}  # on README.md

    def _commit(self, lines: list[dict[str, Any]]) -> Any:
        files = {}
        for value in (line["value"] for line in lines if line["key"] in ("file", "lfsFile")):
            stored = "oid" in value
            files[value["path"]] = self._stored[value["oid"]] if stored else base64.b64decode(value["content"])
        self.files |= files
        self.commits += 1
        return {"commitUrl": f"{self.address}/{NAME}/commit/1", "commitOid": "a" * 40}


@contextmanager
def upload_hub() -> Iterator[Hub]:
    """Temporarily run a hub."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def body(self):
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def do_POST(self):
            path = self.path.partition("?")[0]
            body = self.body()
            hub.asked.append(path)
            told = hub.answer(path, hub.asked.count(path))
            if PUT not in path and self.headers.get("Authorization") != f"Bearer {TOKEN}":
                told = 401
            if self.command == "GET" and not hub.commits:
                told = 404
            if told == "hang":
                hub.ended.wait(60)
            if told in ("hang", "reset"):
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                return
            content = json.dumps({"error": "as told"} if told else hub.respond(path, body)).encode()
            self.send_response(int(told or 200))
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_POST

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        hub.ended.set()
        server.shutdown()
        server.server_close()


def use_hub(address: str) -> None:
    """Let this process upload there, without long pauses; what a process reads of its environment it has read."""
    from huggingface_hub import constants

    from runs import uploads

    constants.HF_HUB_OFFLINE, constants.HF_HUB_DISABLE_XET, constants.ENDPOINT = False, True, address
    uploads.PAUSES, uploads.SILENCE = (0.02, 0.05), 30.0
    os.environ["HF_TOKEN"] = TOKEN
