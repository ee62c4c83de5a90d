"""Servers on the loopback address: a hub of one repository, a server of shards with faults, and S3."""

import hashlib
import json
import os
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import ClassVar
from urllib.parse import unquote, urlparse

import pytest

from datamodules.shards import transfer
from foundation import stores

NAME = "owner/name"
REVISION = "a" * 40


class _Handler(BaseHTTPRequestHandler):
    """Sends the status, headers and body that `answer` returns for the folder of its server."""

    protocol_version = "HTTP/1.1"

    def __init__(self, request, address, server):
        self.folder = server.folder
        super().__init__(request, address, server)

    def do_GET(self):
        status, headers, body = self.answer(unquote(urlparse(self.path).path))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": len(body)}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.send_body(body)

    def send_body(self, body):
        self.wfile.write(body)

    def log_message(self, *args):
        pass


class _Hub(_Handler):
    def answer(self, path):
        _, name, rest = path.replace("/datasets/", "/", 1).partition(f"/{NAME}")
        kind, _, rest = rest.removeprefix("/").partition("/")
        place = self.folder / rest.partition("/")[2]
        if "gated" in path:
            return 403, {"X-Error-Code": "GatedRepo"}, b""
        if not name or kind not in ("", "revision", "tree", "resolve"):
            return 404, {"X-Error-Code": "RepoNotFound"}, b'{"error": "Repository not found"}'
        if kind in ("", "revision"):
            files = [str(one.relative_to(self.folder)) for one in self.folder.rglob("*") if one.is_file()]
            facts = {"_id": "1", "id": NAME, "sha": REVISION, "private": False, "gated": False, "disabled": False}
            more = {"tags": [], "downloads": 0, "likes": 0, "siblings": [{"rfilename": name} for name in files]}
            return 200, {}, json.dumps({**facts, **more}).encode()
        if kind == "tree" and place.is_dir():
            listed = place.rglob("*") if "recursive=true" in self.path.lower() else place.iterdir()
            return 200, {}, json.dumps([self.entry(one) for one in sorted(listed)]).encode()
        if kind == "resolve" and place.is_file():
            return 200, {"ETag": f'"{_checksum(place)}"', "X-Repo-Commit": REVISION}, place.read_bytes()
        return 404, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": REVISION}, b'{"error": "Entry not found"}'

    def entry(self, path):
        name = str(path.relative_to(self.folder))
        if path.is_dir():
            return {"type": "directory", "path": name, "oid": "0"}
        return {"type": "file", "path": name, "size": path.stat().st_size, "oid": _checksum(path)}

    do_HEAD = _Handler.do_GET


def _checksum(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


class Handler(_Handler):
    """Serves the shards of a folder, also as s3://bucket/folder, with faults.

    Attributes:
        breaks: by name, the bytes after which each next response breaks off.
        replies: by name, the status, headers and body that are sent instead.
        ranges: whether ranges are known.
        served: by name, the ranges that were requested.
    """

    breaks: ClassVar[dict[str, list[int]]] = {}
    replies: ClassVar[dict[str, tuple]] = {}
    served: ClassVar[dict[str, list[str | None]]] = defaultdict(list)
    headers_seen: ClassVar[list] = []
    ranges = True

    def answer(self, path):
        self.name = path.rpartition("/")[2]
        self.served[self.name].append(self.headers["Range"])
        self.headers_seen.append(self.headers)
        if self.name in self.replies:
            return self.replies[self.name]
        if not (file := Path(f"{self.folder}{path.removeprefix('/bucket/folder')}")).is_file():
            return 404, {}, b""
        data = file.read_bytes()
        headers = {"ETag": f'"{zlib.crc32(data)}"'}
        if not (self.ranges and self.headers["Range"]):
            return 200, headers, data
        start, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = data[start : last + 1]
        return 206, {**headers, "Content-Range": f"bytes {start}-{start + len(part) - 1}/{len(data)}"}, part

    def send_body(self, body):
        places = self.breaks.get(self.name)
        self.wfile.write(body[: places[0]] if places else body)
        if places:
            places.pop(0)
            self.wfile.flush()
            self.close_connection = True

    do_PUT = _Handler.do_GET  # where S3 asks for credentials


@contextmanager
def serve(folder: Path, handler: type[_Handler] = Handler) -> Iterator[str]:
    """Temporarily serve a folder; yields the address."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.folder = folder
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def hub(folder: Path):
    """Serve a folder as the repository owner/name, for models and data sets; repositories named gated are gated."""
    return serve(folder, _Hub)


@pytest.fixture(scope="session")
def moto_server():
    moto = pytest.importorskip("moto.server")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield "http://{}:{}".format(*server.get_host_and_port())
    server.stop()


@pytest.fixture
def s3(moto_server, monkeypatch):
    """Start an S3 server, and clear all other AWS settings of the environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    settings = {
        "AWS_ACCESS_KEY_ID": "AKIAEXAMPLEEXAMPLE",
        "AWS_SECRET_ACCESS_KEY": "secretsecretsecret",
        "AWS_ENDPOINT_URL": moto_server,
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    stores._bucket.cache_clear()
    yield moto_server
    stores._bucket.cache_clear()


@pytest.fixture
def bucket(s3, tmp_path, monkeypatch):
    """An empty bucket, s3://own, and a machine that has nothing of it."""
    monkeypatch.setattr(transfer, "PAUSE", 0.01)
    monkeypatch.chdir(tmp_path)
    import boto3

    bucket = boto3.resource("s3").create_bucket(Bucket="own")
    yield bucket
    bucket.objects.delete()
    bucket.delete()
