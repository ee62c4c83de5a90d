"""A server of shards with faults, on the loopback address."""

import functools
import http.server
import threading
import urllib.error
import urllib.request
import zlib
from collections import defaultdict
from pathlib import Path
from typing import ClassVar


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves a folder, or what `upstream` does, and has faults.

    Attributes:
        breaks: by name, the bytes after which each next response breaks off.
        replies: by name, the status, headers and body that are sent instead.
        ranges: whether ranges are known.
        served: by name, what ranges were asked for.
    """

    protocol_version = "HTTP/1.1"
    breaks: ClassVar[dict[str, list[int]]] = {}
    replies: ClassVar[dict[str, tuple]] = {}
    served: ClassVar[dict[str, list[str | None]]] = defaultdict(list)
    headers_seen: ClassVar[list] = []
    ranges = True
    upstream = ""

    def __init__(self, *args, directory):
        self.directory = directory
        super().__init__(*args)

    def do_GET(self):
        name = self.path.partition("?")[0].rpartition("/")[2]
        self.served[name].append(self.headers["Range"])
        self.headers_seen.append(self.headers)
        status, headers, data = 200, {}, b""
        if name in self.replies:
            status, headers, data = self.replies[name]
        elif self.upstream:
            status, headers, data = self.forward()
        elif not (path := Path(self.directory + self.path.partition("?")[0])).is_file():
            status = 404
        else:
            data = path.read_bytes()
            headers["ETag"] = f'"{zlib.crc32(data)}"'
            if self.ranges and self.headers["Range"]:
                start, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
                status, total, data = 206, len(data), data[start : last + 1]
                headers["Content-Range"] = f"bytes {start}-{start + len(data) - 1}/{total}"
        self.send_response(status)
        for key, value in {**headers, "Content-Length": len(data)}.items():
            self.send_header(key, str(value))
        self.end_headers()
        places = self.breaks.get(name)
        self.wfile.write(data[: places[0]] if places else data)
        if places:
            places.pop(0)
            self.wfile.flush()
            self.close_connection = True

    do_PUT = do_GET  # where S3 asks for credentials

    def forward(self):
        request = urllib.request.Request(self.upstream + self.path, headers=dict(self.headers))
        try:
            with urllib.request.urlopen(request) as reply:
                kept = {
                    key: reply.headers[key] for key in ("ETag", "Content-Range", "Last-Modified") if reply.headers[key]
                }
                return reply.status, kept, reply.read()
        except urllib.error.HTTPError as error:
            return error.code, {}, error.read()

    def log_message(self, *args):
        pass


def serve(folder, port=0):
    httpd = http.server.ThreadingHTTPServer(("127.0.0.1", port), functools.partial(Handler, directory=str(folder)))
    httpd.daemon_threads = True
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    return httpd


def upload(folder):
    import boto3

    client = boto3.client("s3")
    client.create_bucket(Bucket="bucket")
    for path in folder.iterdir():
        client.upload_file(str(path), "bucket", f"folder/{path.name}")
