"""The application: access by a token, requests of the page itself only, and the server."""

import hmac
import logging
import os
import signal
import socket
import sys
import webbrowser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from datamodules.errors import UserError
from datamodules.files import reason
from report.page import REPORT
from webapp.answers import entry, mistake
from webapp.data import DataPage
from webapp.jobs import Jobs
from webapp.runs import RunsPage, Shelf
from webapp.start import StartPage
from webapp.tryout import TryPage

log = logging.getLogger("retouch")

HERE = Path(__file__).parent
STATIC = {
    path.name: path for path in (REPORT.with_name("page.css"), REPORT.with_name("page.js"), *HERE.glob("*.[cj]s*"))
}
LOCAL = ("127.0.0.1", "localhost", "::1")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
)
# A problem is shown below the page, whose parts keep asking; forms have places of their own.
PROBLEM = {"hx-retarget": "#message", "hx-reswap": "innerHTML", "hx-reselect": "p"}


class Guard:
    """Access to an application: a token, this machine's names, and changes asked for by the page itself only.

    The token is passed once, as ?token=, and then kept in a cookie. On 127.0.0.1 other host names are refused, which a
    foreign site could point here (DNS rebinding).
    """

    def __init__(self, app: Any, token: str, local: bool) -> None:
        self.app, self.token, self.local = app, token, local

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            answer = self._refusal(Request(scope)) or self.app
        except ValueError:  # Host: [::1
            answer = HTMLResponse("<p>Refused: this is no address.", 400)

        async def send_guarded(message: Any) -> None:
            if message["type"] == "http.response.start":
                headers = {name for name, _ in message["headers"]}
                more = {"x-content-type-options": "nosniff", "referrer-policy": "no-referrer"}
                more |= {} if b"content-security-policy" in headers else {"content-security-policy": POLICY}
                more |= PROBLEM if message["status"] >= 400 and scope["method"] == "GET" else {}
                message["headers"] = [*message["headers"], *((k.encode(), v.encode()) for k, v in more.items())]
            await send(message)

        await answer(scope, receive, send_guarded)

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request without access, or to the first one with a token; else None."""
        host = request.headers.get("host", "")
        cookie = f"retouch-{request.url.port or 80}"
        if self.local and urlsplit(f"//{host}").hostname not in LOCAL:
            return HTMLResponse("<p>Refused: this page is only for this machine.", 403)
        if self._is_known(request.query_params.get("token", "")) and request.method == "GET":
            answer = RedirectResponse(request.url.path, 303)
            answer.set_cookie(cookie, self.token, httponly=True, samesite="lax")
            return answer
        if not self._is_known(request.cookies.get(cookie, "")):
            return HTMLResponse("<p>Refused: open the address that studio.py printed, with its token.", 403)
        origin = request.headers.get("origin")
        own = origin is None or urlsplit(origin).netloc == host
        site = request.headers.get("sec-fetch-site", "same-origin")
        if request.method not in ("GET", "HEAD") and not (own and site in ("same-origin", "none")):
            return HTMLResponse("<p>Refused: only the page itself may ask for changes.", 403)
        return None

    def _is_known(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.token.encode())


def create_app(token: str, local: bool = True, outputs: Path = Path("outputs")) -> Guard:
    """Return the application for the runs below a folder."""
    tries = TryPage(shelf := Shelf(outputs))
    jobs = Jobs(outputs, tries.free)
    routes = [
        Route("/", lambda request: RedirectResponse("/runs")),
        Route("/static", lambda request: FileResponse(entry(STATIC, request.query_params.get("file")))),
        *RunsPage(shelf, jobs).routes(),
        *tries.routes(),
        *DataPage(shelf, jobs).routes(),
        *StartPage(shelf, jobs).routes(),
    ]
    mistakes: Any = dict.fromkeys((UserError, HTTPException, Exception), mistake)
    return Guard(Starlette(routes=routes, exception_handlers=mistakes), token, local)


def serve(host: str, port: int, token: str, opens: bool) -> None:
    """Serve the page until Ctrl-C, and log its address.

    Raises:
        UserError: the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError, TypeError) as error:
        listener.close()
        raise UserError(f"host={host} port={port}: {reason(error)}. Choose others, such as port=7861.") from error
    name = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    address = f"http://{name}:{listener.getsockname()[1]}/?token={token}"
    log.info(f"the page: {address}\nCtrl-C ends it; runs go on without it")
    screen = sys.platform != "linux" or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    if opens and screen:  # else a text browser would take the terminal
        webbrowser.open(address)
    config = uvicorn.Config(create_app(token, host in LOCAL), log_level="error", lifespan="off")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # after uvicorn's own: files of the page are removed
    uvicorn.Server(config).run([listener])
