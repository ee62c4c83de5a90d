"""A hub of one repository on this machine, which answers what `datasets` asks of a data set, and others of a model."""

import hashlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlparse

NAME = "owner/name"
REVISION = "a" * 40
MISSING = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": REVISION}


def entry(folder: Path, path: Path) -> dict:
    """Return a file or folder as listed by the hub."""
    name = str(path.relative_to(folder))
    if path.is_dir():
        return {"type": "directory", "path": name, "oid": "0"}
    return {"type": "file", "path": name, "size": path.stat().st_size, "oid": checksum(path)}


def checksum(path: Path) -> str:
    return hashlib.sha1(path.read_bytes()).hexdigest()


@contextmanager
def hub(folder: Path) -> Iterator[str]:
    """Serve a folder as owner/name; yields the address."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def answer(self, content, status=200, headers=None):
            content = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, value in {**(headers or {}), "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def do_GET(self):
            path = unquote(urlparse(self.path).path).replace("/datasets/", "/", 1)
            about, _, rest = path.partition(f"/{NAME}")
            what, _, rest = rest.removeprefix("/").partition("/")
            place = folder / rest.partition("/")[2]
            if path == about or what not in ("", "revision", "tree", "resolve"):
                self.answer({"error": "Repository not found"}, 404, {"X-Error-Code": "RepoNotFound"})
            elif what in ("", "revision"):
                files = [str(one.relative_to(folder)) for one in folder.rglob("*") if one.is_file()]
                about = {"_id": "1", "id": NAME, "sha": REVISION, "private": False, "gated": False, "disabled": False}
                more = {"tags": [], "downloads": 0, "likes": 0, "siblings": [{"rfilename": name} for name in files]}
                self.answer({**about, **more})
            elif what == "tree" and place.is_dir():
                self.answer([entry(folder, one) for one in sorted(place.iterdir())])
            elif what == "resolve" and place.is_file():
                self.answer(place.read_bytes(), 200, {"ETag": f'"{checksum(place)}"', "X-Repo-Commit": REVISION})
            else:
                self.answer({"error": "Entry not found"}, 404, MISSING)

        do_HEAD = do_GET

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def main() -> None:
    """Print for each root how many samples it has, and the size of the first target, or what is wrong."""
    from datamodules.errors import UserError
    from datamodules.images.samples import Root
    from datamodules.images.sources import find_samples

    for root in sys.argv[1:]:
        try:
            samples = find_samples([Root(root)]).samples
            print(len(samples), samples[0].prompts[0], len(samples[0].target.open("rb").read()))
        except UserError as error:
            print(error)


if __name__ == "__main__":
    main()
