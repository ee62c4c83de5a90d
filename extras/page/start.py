"""The tab Start: a form made from conf/, its command and dry run next to it, and the queue."""

import json
import os
import re
import secrets
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from omegaconf import OmegaConf
from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from cli.arguments import check_choice, hydras_errors, read_values
from cli.folders import run_folder
from cli.resuming import OF_A_START
from extras.page.answers import page, post
from extras.page.jobs import TRAIN, Jobs, run_below
from extras.page.runs import Shelf, settings_of
from foundation.errors import UserError, without_credentials
from foundation.files import reading
from foundation.internals import compose_settings
from foundation.settings import CONF, Setting, declared, text_kind
from report.quoting import SECRET, is_parsed, literal
from runs.run_folder import RunFolder

GROUPS = [
    name for name in declared("train").groups if name.split("/")[0] not in ("callbacks", "hparams_search", "trainer")
]
GROUPS.sort(key=lambda name: (not name.startswith("model"), name != "data"))


@cache
def fields() -> dict[str, Setting]:
    """Return the settings of the form: those that --help lists, except of a start and secrets."""
    listed = declared("train").listed().items()
    return {key: one for key, one in listed if not (key in OF_A_START or SECRET.search(key))}


@cache
def composed(*choices: str, script: str = "train") -> Any:
    """Compose the settings of a command, with those of Hydra."""
    with hydras_errors(script):
        return compose_settings(CONF, script, list(choices))


def _typed(value: Any) -> str:
    """Return a value as it is typed after KEY= on the command line."""
    text = json.dumps(value, ensure_ascii=False, default=list)
    text = re.sub(r'"(\S+)": ', r"\1: ", text) if not isinstance(value, str) else text  # Hydra quotes no keys
    return re.sub(r'^"([A-Za-z_./][\w./-]*)"$', r"\1", text)


def _differing(settings: Any, defaults: Any, start: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings that differ from the defaults; + precedes the key of one that these lack."""
    for key, value in settings.items():
        if isinstance(value, dict) and isinstance(defaults.get(key, {}), dict):
            yield from _differing(value, defaults.get(key, {}), f"{start}{key}.")
        elif value != defaults.get(key, ...):
            typed = _typed(value)
            if text_kind(f"{start}{key}") == "text" and isinstance(value, str):
                typed = literal(value) if is_parsed(f"{start}{key}", value) else value
            yield f"{'' if key in defaults else '+'}{start}{key}", typed


def asked_by(run: RunFolder, script: str = "train") -> dict[str, str]:
    """Return the content of the form that starts a run again, without secrets; more: other settings, one a line.

    Raises:
        UserError: its config.yaml is damaged, or chooses what is not in conf/.
    """
    settings = {"model_name": "", **settings_of(run)}
    with reading(run.config, "repair it"):
        recorded = settings.get("hydra", {}).get("runtime", {}).get("choices", {"model": settings["model_name"]})
        recorded = {key: one for key, one in recorded.items() if key in GROUPS}
        for key, one in recorded.items():
            check_choice(key, one, declared("train").groups[key])
        usual = composed(f"model={recorded['model']}", script=script).hydra.runtime.choices
    asked = {key: one for key, one in recorded.items() if one != usual.get(key, one)}
    asked["model"] = recorded["model"]
    own = {key: value for key, value in settings.items() if key not in (*OF_A_START, "model_name")}
    defaults = OmegaConf.to_container(composed(*(f"{group}={one}" for group, one in asked.items()), script=script))
    found = {key: value for key, value in _differing(own, defaults) if without_credentials(value) == value}
    asked |= {key: value for key, value in found.items() if key in fields()}
    more = [f"{key}={value}" for key, value in found.items() if key not in asked and not SECRET.search(key)]
    return {**asked, "more": "\n".join(more)}


def arguments_of(asked: FormData) -> list[str]:
    """Return the arguments of train.py for the content of the form, without output_dir; errors as in `read_values`."""
    texts = {name: str(text).strip() for name, text in asked.items()}
    named = [f"{name}={texts[name]}" for name in (*GROUPS, *fields()) if texts.get(name)]
    lines = [line.lstrip() for line in str(asked.get("more", "")).splitlines()]  # a prefix may end in a blank
    plain = [line if text_kind(line.lstrip("+").partition("=")[0]) == "text" else line.rstrip() for line in lines]
    settings = [*named, *filter(None, plain)]
    read_values(settings, "train")
    return settings


class StartPage:
    """Routes of the tab."""

    def __init__(self, shelf: Shelf, jobs: Jobs) -> None:
        self.shelf, self.jobs, self.outputs = shelf, jobs, shelf.outputs
        self._one_thread = threading.Lock()
        self._plans: dict[str, subprocess.Popen[str]] = {}  # dry runs by their window

    def routes(self) -> list[Route]:
        """Return the routes."""
        at = {"/start": self.start, "/start/form": self.choose, "/plan": self.plan, "/queue": self.change_queue}
        return [Route("/start", self.show), *(post(*one) for one in at.items())]

    def show(self, request: Request) -> Response:
        """Show the form, filled with the settings of a run if one is named, and the queue."""
        name = request.query_params.get("run")
        return self._form(asked_by(self.shelf.get(name)) if name else {})

    def choose(self, request: Request, form: FormData) -> Response:
        """Show the form with the defaults of the chosen groups."""
        return self._form({key: str(value) for key, value in form.items()})

    def _form(self, asked: dict[str, str]) -> Response:
        for group in GROUPS:
            check_choice(group, asked.get(group) or None, declared("train").groups[group])
        cfg = composed(*(f"{group}={asked[group]}" for group in GROUPS if asked.get(group)))
        choices, known = cfg.hydra.runtime.choices, declared("train")
        values = {key: OmegaConf.select(cfg, key, default=...) for key in fields()}
        shown = [(key, fields()[key], _typed(value)) for key, value in values.items() if value is not ...]
        return page(
            "start.html",
            tab="start",
            asked={"output_dir": f"{self.outputs}/{Path(run_folder(None)).name}", **asked},
            groups={group: (choices[group], known.groups[group]) for group in GROUPS},
            fields=shown,
            queue={run: without_credentials(shlex.join(one)) for run, one in self.jobs.waiting().items()},
            failed=self.jobs.failed,
            window=secrets.token_hex(4),
        )

    def start(self, request: Request, form: FormData) -> Response:
        """Show the command, start the run, or append it to the queue; a name that is taken gets a number."""
        waiting, asked = self.jobs.waiting(), run_below(self.outputs, str(form.get("output_dir", "")).strip())
        ends = ("", *(f"-{index}" for index in range(2, 10_000)))
        runs = (RunFolder(f"{asked}{end}") for end in ends)
        run = next(one for one in runs if not one.path.exists() and str(one) not in waiting)
        arguments = [*arguments_of(form), f"output_dir={run}"]
        if form.get("when") == "now":
            self.jobs.start(arguments, run)
            name = run.path.relative_to(self.outputs).as_posix()
            return HTMLResponse("", headers={"hx-redirect": f"/run?{urlencode({'run': name})}"})
        if form.get("when") == "next":
            with self.jobs.changing() as waiting:
                waiting[str(run)] = arguments
            return HTMLResponse("", headers={"hx-trigger": "queued"})
        return page("plan.html", command=shlex.join(arguments))

    def plan(self, request: Request, form: FormData) -> Response:
        """Show what the command prints with task=dry_run, and end the one before of the same window."""
        window = str(form.get("window", ""))
        command = [sys.executable, str(TRAIN), *arguments_of(form), f"output_dir={self.outputs}/.plan", "task=dry_run"]
        with self._one_thread:
            if (before := self._plans.get(window)) is not None:
                before.kill()
            environment = {**os.environ, "COLUMNS": "58"}
            self._plans[window] = process = subprocess.Popen(
                command, stderr=subprocess.PIPE, encoding="utf-8", env=environment
            )
        _, printed = process.communicate()
        with self._one_thread:
            if is_latest := self._plans.get(window) is process:
                del self._plans[window]
        if not is_latest:
            return Response(status_code=204)
        if process.returncode:
            raise UserError(printed.rpartition("error: ")[2])
        return page("plan.html", plan=printed[printed.find("╭") :])

    def change_queue(self, request: Request, form: FormData) -> Response:
        """Remove a run from the queue, or start it before the others."""
        with self.jobs.changing() as waiting:
            folder, others = str(form.get("run")), dict(waiting)
            arguments = others.pop(folder, None)
            self.jobs.failed.pop(folder, None)  # tried again, if it is to be the first
            waiting.clear()
            waiting |= {folder: arguments} if arguments and form.get("change") == "first" else {}
            waiting |= others
        return HTMLResponse("", headers={"hx-trigger": "queued"})
