"""A real page of studio.py and a real browser on it."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.support.commands import ROOT, wait_until

# Without these, Chromium asks hosts of its own.
QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking", "--disable-sync"]
# Milliseconds for something that a run must first do, on a busy machine.
PATIENCE = 180_000


@contextlib.contextmanager
def studio(folder: Path, *settings: str, **environment: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """Temporarily run studio.py in a folder; yield its process and its address."""
    folder.mkdir(exist_ok=True)
    log = folder / f"log-{time.monotonic_ns()}"
    command = [sys.executable, ROOT / "studio.py", "port=0", *(settings or ["open=false"])]
    environment = {**os.environ, "TMPDIR": str(folder), **environment}
    with log.open("w") as file:
        unignored = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)  # these tests may run under nohup
        streams = {"stdout": file, "stderr": file}
        process = subprocess.Popen(command, cwd=folder, env=environment, preexec_fn=unignored, **streams)
    try:
        wait_until(lambda: re.search(r"http://\S+\s", log.read_text()), process, 120)
        yield process, re.search(r"http://\S+", log.read_text())[0]
    finally:
        process.terminate()
        process.wait(30)


@contextlib.contextmanager
def studio_at(folder: Path) -> Iterator[str]:
    """Temporarily serve the runs below a folder; yield the address with its token."""
    with studio(folder) as (_, address):
        yield address


@contextlib.contextmanager
def chromium(args=(), **options):
    """Temporarily open an empty page in Chromium."""
    api = pytest.importorskip("playwright.sync_api")
    program = next((path for path in ("/usr/bin/chromium", "/usr/bin/google-chrome") if os.path.exists(path)), None)
    if program is None:
        pytest.skip("needs Chromium")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=[*QUIET, *args])
        page = browser.new_context(**options).new_page()
        page.set_default_timeout(PATIENCE)
        api.expect.set_options(timeout=PATIENCE)
        yield page
        browser.close()


def enter(page, address: str) -> None:
    """Open the address with the token, from which the page itself goes on."""
    page.goto(address)
    page.wait_for_url("**/runs")


@contextlib.contextmanager
def browser_page(address: str, **options):
    """Temporarily open an address in Chromium; fail at any error in its console and any request elsewhere."""
    with chromium(**options) as page:
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        own = address.split("/?")[0]
        foreign = lambda url: not url.startswith((own, "data:", "blob:"))  # noqa: E731
        page.on("request", lambda request: errors.append(request.url) if foreign(request.url) else None)
        enter(page, address)
        yield page
    assert not errors, errors
