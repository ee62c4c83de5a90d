"""Answers to requests: pages from templates, forms, and a user's mistakes in one line."""

import html
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from omegaconf.errors import OmegaConfBaseException
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from foundation.errors import UserError, printable
from foundation.files import reason
from report.page import templates

HERE = Path(__file__).parent
LARGEST = 50 * 2**20  # bytes of a form with its files
LONGEST_LINE = 1000  # letters of a mistake
FILES = ("file", "image", "mask")  # fields that may be files
# Errors of values that a request has or names: a path that is too long or closed, a number of many digits, settings
# that refer to themselves. All others are mistakes of ours.
REFUSED = (OSError, ValueError, RuntimeError, OmegaConfBaseException)
T = TypeVar("T")


def entry(things: Mapping[str, T], name: Any) -> T:
    """Return the entry of a name from a request; a name without one is not found, whatever path it is."""
    if name not in things:
        raise HTTPException(404, f"{name} was not found. Reload the page.")
    return things[name]


def number(text: Any) -> int:
    """Return a number of a request; 0 for anything else."""
    return int(text) if re.fullmatch("[0-9]{1,9}", str(text)) else 0


def page(template: str, status: int = 200, **values: Any) -> HTMLResponse:
    return HTMLResponse(templates(HERE).get_template(template).render(values), status)


def post(path: str, handler: Callable[[Request, FormData], Response]) -> Route:
    """Return a route for a form; its handler may block."""

    async def endpoint(request: Request) -> Response:
        if int(request.headers.get("content-length", LARGEST)) >= LARGEST:
            raise HTTPException(413, f"the form has more than {LARGEST >> 20} MB. Choose smaller files.")
        try:
            async with request.form() as form:
                for name, value in form.multi_items():
                    if isinstance(value, UploadFile) and name not in FILES:
                        raise UserError(f"{printable(name)}: it must be text, not a file. Reload the page.")
                return await run_in_threadpool(handler, request, form)
        except TimeoutError as error:
            raise HTTPException(408, "the form did not arrive in time. Send it again.") from error

    return Route(path, endpoint, methods=["POST"])


async def mistake(request: Request, error: Exception) -> Response:
    """Answer a mistake in a request, or an error of ours, in one line."""
    status, line = 500, f"{type(error).__name__} at {request.url.path}?{request.url.query}: {reason(error)}"
    if isinstance(error, HTTPException):
        status, line = error.status_code, error.detail
    elif isinstance(error, UserError):
        status, line = 400, str(error)
    elif isinstance(error, REFUSED):
        name = printable(str(getattr(error, "filename", None) or request.url.path))
        status, line = 400, f"{name[:200]}: {reason(error)}. Correct it, and try again."
    line = printable(line)[:LONGEST_LINE]
    if "hx-request" in request.headers:
        return HTMLResponse(f'<p class="mark" role="alert">{html.escape(line)}</p>', status)
    return page("error.html", status, line=line, title="Not found" if status == 404 else "That did not work")
