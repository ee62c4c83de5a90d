"""The application: access by a token, requests of the page itself only, and a server with bounds."""

import asyncio
import hmac
import html
import logging
import os
import secrets
import signal
import socket
import sys
import webbrowser
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from extras.page.answers import HERE, REFUSED, entry, mistake
from extras.page.data import DataPage
from extras.page.folders import FoldersPage
from extras.page.jobs import Jobs
from extras.page.keeping import KeepPage
from extras.page.runs import RunsPage, Shelf
from extras.page.start import StartPage
from extras.page.tryout import TryPage
from foundation.errors import UserError
from foundation.files import reason, replacing
from report.page import REPORT

log = logging.getLogger("retouch")

OUTPUTS = Path("outputs")
STATIC = {
    path.name: path for folder in (HERE, REPORT.parent, REPORT.with_name("vendor")) for path in folder.glob("*.[cj]s*")
}
# Windows' SO_REUSEADDR would let two pages share a port.
ONE_LISTENER = getattr(socket, "SO_EXCLUSIVEADDRUSE", socket.SO_REUSEADDR)
LOCAL = ("127.0.0.1", "localhost", "::1")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
# A page that opens another one, which then counts as asked for by the page itself: its cookie is strict.
FORWARD = '<link rel="icon" href="data:,"><meta http-equiv="refresh" content="0; url={}">'
# Headers of every answer: another site neither embeds it nor keeps a window on it.
HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
# What Sec-Fetch-Site says of requests by the page itself, by a person, and by programs other than browsers.
OWN = ("same-origin", "none", None)
# Connections at once, beyond which the oldest without access are closed; seconds for showing access, and for the next
# part of a form; letters of a token.
MOST_CONNECTIONS, SECONDS_OF_A_REQUEST, SECONDS_OF_A_PART, SHORTEST_TOKEN = 200, 10, 30, 8
# The name of a connection's state that tells whether a request on it had access.
ACCESS = "access"
# A problem is shown below the page, whose parts keep asking; forms have places of their own.
PROBLEM = {"hx-retarget": "#message", "hx-reswap": "innerHTML", "hx-reselect": "p"}


class Guard:
    """Access to an application: a token, this machine's names, and requests by the page itself only.

    The token is passed once, as ?token=; then a cookie shows that it was. On 127.0.0.1 other host names are refused,
    which a foreign site could point here (DNS rebinding), but NAME.localhost are nobody's. A link from elsewhere opens
    the list of runs at most.
    """

    def __init__(self, app: Any, token: str, local: bool) -> None:
        self.app, self.token, self.local = app, token, local
        self.session = secrets.token_urlsafe()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            if (answer := self._refusal(Request(scope)) or self.app) is self.app:
                scope.get("state", {}).get(ACCESS, set()).add(True)
        except ValueError:  # Host: [::1
            answer = HTMLResponse("<p>Refused: this is not an address.", 400)

        async def send_guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = {name for name, _ in message["headers"]}
                more = HEADERS | ({} if b"content-security-policy" in headers else {"content-security-policy": POLICY})
                more |= PROBLEM if message["status"] >= 400 and scope["method"] == "GET" else {}
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in more.items())]
            await send(message)

        async def receive_in_time() -> Any:
            async with asyncio.timeout(SECONDS_OF_A_PART if scope["method"] == "POST" else None):
                return await receive()

        await answer(scope, receive_in_time, send_guarded)

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request without access, or to the first one with a token; else None."""
        host = request.headers.get("host", "")
        cookie = f"retouch-{request.url.port or 80}"
        name = urlsplit(f"//{host}").hostname or ""
        if self.local and name not in LOCAL and not name.endswith(".localhost"):
            return HTMLResponse("<p>Refused: this page is only for this machine.", 403)
        if _equal(request.query_params.get("token", ""), self.token) and request.method == "GET":
            place = html.escape(quote("/" + request.url.path.lstrip("/")))
            answer = HTMLResponse(FORWARD.format(place))
            answer.set_cookie(cookie, self.session, httponly=True, samesite="strict")
            return answer
        if not _equal(request.cookies.get(cookie, ""), self.session):
            return HTMLResponse("<p>Refused: open the address that studio.py printed, with its token.", 403)
        origin = request.headers.get("origin")
        own = origin is None or urlsplit(origin).netloc == host
        if own and request.headers.get("sec-fetch-site") in OWN:
            return None
        if request.method == "GET" and request.headers.get("sec-fetch-dest") == "document":
            return RedirectResponse("/runs", 303) if request.url.query or request.url.path != "/runs" else None
        return HTMLResponse("<p>Refused: only the page itself may ask for this.", 403)


def _equal(given: str, known: str) -> bool:
    return hmac.compare_digest(given.encode(), known.encode())


class Connection(H11Protocol):
    """A connection that must show access within some seconds; of too many without it, the oldest is closed."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._access: set[bool] = set()
        self.app_state = {ACCESS: self._access}  # reaches the guard with each request
        self._limit = self.loop.call_later(SECONDS_OF_A_REQUEST, self._close_stranger)
        here = [one for one in self.connections if isinstance(one, Connection) and not one.transport.is_closing()]
        if len(here) > MOST_CONNECTIONS:
            min(here, key=lambda one: (len(one._access), one._limit.when()))._close_stranger()

    def _close_stranger(self) -> None:
        if not self._access:
            self.transport.abort()  # closing would wait for one who reads no answer


def create_app(token: str, local: bool = True, outputs: Path = OUTPUTS) -> Guard:
    """Return the application for the runs below a folder."""
    tries = TryPage(shelf := Shelf(outputs))
    jobs = Jobs(outputs, tries.free)
    routes = [
        Route("/", lambda request: RedirectResponse("/runs")),
        Route("/static", lambda request: FileResponse(entry(STATIC, request.query_params.get("file")))),
        *RunsPage(shelf, jobs).routes(),
        *KeepPage(shelf, jobs).routes(),
        *tries.routes(),
        *DataPage(shelf, jobs).routes(),
        *StartPage(shelf, jobs).routes(),
        *FoldersPage(outputs.parent / "uploads").routes(),
    ]
    mistakes: Any = dict.fromkeys((UserError, HTTPException, *REFUSED, Exception), mistake)
    return Guard(Starlette(routes=routes, exception_handlers=mistakes), token, local)


def serve(host: str, port: int, token: str, opens: bool) -> None:
    """Serve the page until Ctrl-C, and log its address.

    Raises:
        UserError: the port is taken, or the token is short.
    """
    if len(token) < SHORTEST_TOKEN or not token.isprintable():
        raise UserError(f"token: it needs at least {SHORTEST_TOKEN} printable letters. Leave it out for a random one.")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, ONE_LISTENER, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # before the address is known
    except (OSError, OverflowError, TypeError) as error:
        listener.close()
        raise UserError(f"host={host} port={port}: {reason(error)}. Choose others, such as port=7861.") from error
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    port = listener.getsockname()[1]
    address = f"http://{name}:{port}/?token={quote(token, safe='')}"
    log.info(f"the page: {address}\nCtrl-C ends it; runs go on without it")
    os.environ["PYTHONUTF8"] = "1"  # of the commands it starts, whose output it reads
    screen = sys.platform != "linux" or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    config = uvicorn.Config(
        create_app(token, host in LOCAL),
        log_level="error",
        lifespan="off",
        http=Connection,
        ws="none",
        timeout_graceful_shutdown=3,
    )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # after uvicorn's own: files of the page are removed
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # the terminal was closed
        signal.signal(signal.SIGHUP, lambda *_: signal.raise_signal(signal.SIGTERM))
    opener = OUTPUTS / "studio" / f"open-{port}.html"
    try:
        if opens and screen:  # else a text browser would take the terminal
            with suppress(UserError):  # where nothing can be written the address is in the log
                with replacing(opener, private=True) as temporary:  # others see the browser's arguments
                    temporary.write_text(FORWARD.format(html.escape(address)), encoding="utf-8")
                webbrowser.open(opener.absolute().as_uri())
        uvicorn.Server(config).run([listener])
    finally:
        opener.unlink(missing_ok=True)
