"""The server of studio.py as other programs of the machine see it, and how it ends."""

import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import HTTPCookieProcessor, build_opener

import pytest

from extras.page.app import serve
from foundation.errors import UserError
from tests.extras.page.browsing import studio
from tests.support.commands import wait_until


def connect(address, content=b""):
    place = urlsplit(address)
    found = socket.create_connection((place.hostname, place.port), timeout=60)
    found.sendall(content)
    return found


def opened(address):
    """Return a client with the page's cookie."""
    client = build_opener(HTTPCookieProcessor())
    client.open(address, timeout=60).read()
    return client


@pytest.mark.slow
def test_connections_that_say_nothing_lock_nobody_out_and_are_closed(tmp_path):
    with studio(tmp_path) as (_, address):
        silent = [connect(address, b"GET / HT" if number % 2 else b"") for number in range(900)]
        client = opened(address)
        assert client.open(address.partition("?")[0] + "runs", timeout=60).status == 200
        for one in silent:  # the newest of them after ten seconds
            with suppress(ConnectionResetError):
                assert one.recv(1) == b""
        assert client.open(address.partition("?")[0] + "runs", timeout=60).status == 200


REFUSED = b"GET /runs HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
STRANGERS = {
    "refused": REFUSED,
    "no address": b"GET / HTTP/1.1\r\nHost: [::1\r\n\r\n",
    "half a request after an answer": REFUSED + REFUSED[:20],
    "reads no answer": REFUSED * 2000,
    "slow body": b"POST /try HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000\r\n\r\nx",
    "websocket": REFUSED[:-2] + b"Connection: upgrade\r\nUpgrade: websocket\r\n\r\n",
}


@pytest.mark.slow
def test_connections_without_access_lock_nobody_out_whatever_they_were_answered(tmp_path):
    with studio(tmp_path) as (_, address):
        client, strangers = opened(address), []
        for kind, content in STRANGERS.items():
            for _ in range(260):
                strangers.append(connect(address))
                strangers[-1].setblocking(False)
                with suppress(BlockingIOError, BrokenPipeError, ConnectionResetError):
                    strangers[-1].send(content)
            time.sleep(0.5)  # for the answers
            for _ in range(3):
                assert client.open(address.partition("?")[0] + "runs", timeout=60).status == 200, kind


@pytest.mark.slow
def test_headers_have_a_limit(tmp_path):
    with studio(tmp_path) as (_, address):
        with connect(address, b"GET / HTTP/1.1\r\nx: ") as endless:
            try:
                for _ in range(1000):
                    endless.sendall(b"x" * 10_000)
                assert b"HTTP/1.1 4" in endless.recv(100)
            except (BrokenPipeError, ConnectionResetError):
                pass
        assert opened(address)


def left(folder):
    return [path.name for path in folder.iterdir() if path.name.startswith("retouch-try-")]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_stalled_upload_holds_up_no_end_and_nothing_is_left(tmp_path, number):
    with studio(tmp_path) as (process, address):
        client = opened(address)
        [cookie] = next(one for one in client.handlers if isinstance(one, HTTPCookieProcessor)).cookiejar
        head = f"POST /try HTTP/1.1\r\nHost: {urlsplit(address).netloc}\r\nCookie: {cookie.name}={cookie.value}\r\n"
        head += "Content-Type: multipart/form-data; boundary=x\r\nContent-Length: 1000000\r\n\r\n--x\r\n"
        with connect(address, head.encode()):
            time.sleep(1)
            assert left(tmp_path)
            process.send_signal(number)
            process.wait(60)
    assert not left(tmp_path)


@pytest.mark.slow
def test_files_of_a_killed_page_are_removed_by_the_next_and_those_of_a_running_page_kept(tmp_path):
    with studio(tmp_path) as (process, _):
        wait_until(lambda: left(tmp_path), process)
        killed = left(tmp_path)
        process.kill()
        process.wait()
    assert left(tmp_path) == killed
    with studio(tmp_path), studio(tmp_path):
        wait_until(lambda: len({*left(tmp_path)} - {*killed}) == 2)
        assert not {*killed} & {*left(tmp_path)}


@pytest.mark.slow
def test_the_browser_gets_a_file_that_nobody_else_reads(tmp_path):
    """Other users see the arguments of its command."""
    record, browser = tmp_path / "arguments", tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$@" > {record}\n')
    browser.chmod(0o755)
    shown = {"BROWSER": f"{browser} %s", "DISPLAY": ":9"}
    with studio(tmp_path / "here", "token=my épée token", **shown) as (process, address):
        wait_until(lambda: record.is_file() and record.read_text(), process)
        argument = record.read_text().strip()
        file = Path(urlsplit(argument).path)
        assert argument.startswith("file://")
        assert file.stat().st_mode & 0o777 == 0o600
        assert address.replace("&", "&amp;") in file.read_text()
        assert opened(address).open(address.partition("?")[0] + "runs").status == 200
        process.send_signal(signal.SIGINT)
        process.wait(60)
    assert not file.exists()


@pytest.mark.parametrize("token", ["é", "x", "short", "long but\nnot printable"])
def test_a_short_token_is_one_line(token):
    with pytest.raises(UserError, match="token: it needs at least 8 printable letters") as error:
        serve("127.0.0.1", 0, token, opens=False)
    assert token not in str(error.value)
