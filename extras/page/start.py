"""The tab Start: a form made from conf/, its command and dry run next to it, and the queue."""

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from operator import attrgetter
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
from extras.page.jobs import Jobs, run_below
from extras.page.plans import Plans
from extras.page.progress import cards, until
from extras.page.runs import Shelf, settings_of, started
from foundation.catalogue import catalogue
from foundation.errors import UserError, printable, without_credentials
from foundation.files import reading
from foundation.internals import compose_settings
from foundation.settings import CONF, Setting, declared, flat_settings, text_kind
from report.quoting import argument, has_secret, is_parsed, key_of, literal
from report.tables import last_metrics
from runs.run_folder import RunFolder

GROUPS = [
    name for name in declared("train").groups if name.split("/")[0] not in ("callbacks", "hparams_search", "trainer")
]
GROUPS.sort(key=lambda name: (not name.startswith("model"), name != "data"))
# Headings of the form by the first part of a key; all other settings are for experts.
SECTIONS = {
    "Data": ("data",),
    "Adapter": ("adapter",),
    "Training": ("objective", "optimizer", "scheduler", "trainer", "ema", "early_stopping", "seed", "monitor"),
    "Sampling": ("sample_every", "sample_root"),
    "Saving": ("save_every", "keep_checkpoints", "keep_lora_files", "export", "hub"),
}
# Settings of runs that take the same time for a step, and runs that are looked at for one.
DECIDE_TIME: tuple[str, ...] = ("model.", "adapter._target_", "objective.", "data._target_", "data.resolution")
DECIDE_TIME += ("data.batch_size", "trainer.accumulate_grad_batches", "trainer.devices")
LOOKED_AT = 50
# Steps of a run whose speed is known: the first ones are slow.
FEWEST_STEPS = 20
# Formats of the weights in the order of a model's memory, by the option of model/quantization.
FORMATS = {"": "bf16", "fp8": "fp8", "nf4": "4 bits"}
# Bytes of the GB that a card is sold with, by those of the GB that are estimated.
GIB = 2**30 / 1e9


@cache
def fields() -> dict[str, Setting]:
    """Return the settings of the form: those with a rule and a help text, after the ones that --help lists."""
    known = declared("train")
    ordered = {**known.listed(), **{key: one for key, one in known.settings.items() if one.rule and one.help}}
    return {key: one for key, one in ordered.items() if not (key in OF_A_START or "._" in key or has_secret(key))}


def heading_of(key: str) -> str:
    """Return the heading below which the form has a setting or a group."""
    start = re.split("[./]", key)[0]
    return next((heading for heading, starts in SECTIONS.items() if start in starts), "Expert")


@cache
def goals() -> dict[str, str]:
    """Return the experiments that are named by what a person wants."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted((CONF / "experiment").glob("*.yaml"))}
    found = {name: re.search(r"^# Goal: (.+)$", text, re.MULTILINE) for name, text in texts.items()}
    return {name: goal[1] for name, goal in found.items() if goal}


def model_cards(memory: float) -> list[dict[str, Any]]:
    """Return the models, those that fit a card of so many GiB first; 0: the card is not known."""
    found = []
    for model in filter(attrgetter("learns"), catalogue().values()):
        needs = {name: max(one, model.encoding) for name, one in zip(FORMATS, model.training, strict=False)}
        fits = next((name for name, need in needs.items() if need <= memory * GIB), None) if memory and needs else ""
        licence = re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", model.licence)
        found.append({"model": model, "licence": licence, "needs": needs, "fits": fits})
    return sorted(found, key=lambda one: (one["fits"] is None, not one["model"].learns.startswith("pairs")))


@lru_cache(64)
def composed(*choices: str, script: str = "train") -> Any:
    """Compose the settings of a command, with those of Hydra."""
    with hydras_errors(script):
        return compose_settings(CONF, script, list(choices))


def typed(value: Any) -> str:
    """Return a value as it is typed after KEY= on the command line."""
    text = json.dumps(value, ensure_ascii=False, default=list)
    text = re.sub(r'"(\S+)": ', r"\1: ", text) if not isinstance(value, str) else text  # Hydra quotes no keys
    return re.sub(r'^"([A-Za-z_./][\w./-]*)"$', r"\1", text)


def _differing(settings: Any, defaults: Any, start: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings without secrets that differ from the defaults; + precedes a key that these lack."""
    for key, value in settings.items():
        if isinstance(value, dict) and isinstance(defaults.get(key, {}), dict):
            yield from _differing(value, defaults.get(key, {}), f"{start}{key}.")
        elif value != defaults.get(key, ...) and not has_secret(f"{start}{key}", value):
            text = typed(value)
            if text_kind(f"{start}{key}") == "text" and isinstance(value, str):
                text = literal(value) if is_parsed(f"{start}{key}", value) else value
            yield f"{'' if key in defaults else '+'}{start}{key}", text


def asked_by(run: RunFolder, script: str = "train") -> dict[str, str]:
    """Return the content of the form that starts a run again, without secrets; more: other settings, one a line.

    Raises:
        UserError: its config.yaml is damaged, chooses what is not in conf/, or has a key or text that is not one line.
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
    own = {key: value for key, value in settings.items() if key_of(str(key)) not in (*OF_A_START, "model_name")}
    defaults = OmegaConf.to_container(composed(*(f"{group}={one}" for group, one in asked.items()), script=script))
    found = {key: value for key, value in _differing(own, defaults) if without_credentials(value) == value}
    if other := [key for key, one in found.items() if not f"{key}={one}".isprintable()]:
        raise UserError(f"{run.config}: {printable(other[0])} does not fit in the form. Repeat this run by a command.")
    asked |= {key: value for key, value in found.items() if key in fields()}
    more = [f"{key}={value}" for key, value in found.items() if key not in asked]
    return {**asked, "more": "\n".join(more)}


def _memory_of(asked: Mapping[str, str]) -> float:
    """Return the GiB of the card in the form, or of this machine's; 0 if neither is known."""
    text = asked.get("memory", "")
    if re.fullmatch(r"\d{1,4}(\.\d+)?", text):
        return float(text)
    return next((round(total / 2**30) for _, _, total in cards()), 0)


def _deciding(settings: Any) -> dict[str, Any]:
    return {key: one for key, one in flat_settings(settings).items() if key.startswith(DECIDE_TIME) and one is not None}


def arguments_of(asked: FormData) -> list[str]:
    """Return the arguments of train.py for the content of the form, without output_dir; errors as in `read_values`."""
    texts = {name: str(one) if text_kind(name) == "text" else str(one).strip() for name, one in asked.items()}
    named = [f"{name}={texts[name]}" for name in (*GROUPS, *fields()) if texts.get(name)]
    lines = [line.lstrip() for line in str(asked.get("more", "")).splitlines()]  # a prefix may end in a blank
    plain = [line if text_kind(key_of(line)) == "text" else line.rstrip() for line in lines]
    settings = [*named, *filter(None, plain)]
    read_values(settings, "train")
    return settings


class StartPage:
    """Routes of the tab."""

    def __init__(self, shelf: Shelf, jobs: Jobs) -> None:
        self.shelf, self.jobs, self.outputs = shelf, jobs, shelf.outputs
        self.plans = Plans(jobs, self.outputs / ".plans")

    def routes(self) -> list[Route]:
        at = {"/start": self.start, "/start/form": self.choose, "/plan": self.estimate, "/queue": self.change_queue}
        return [Route("/start", self.show), Route("/plan", self.plan), *(post(*one) for one in at.items())]

    def show(self, request: Request) -> Response:
        """Show the form, filled with the settings of a run if one is named, and the queue."""
        name = request.query_params.get("run")
        return self._form(asked_by(self.shelf.get(name)) if name else {})

    def choose(self, request: Request, form: FormData) -> Response:
        """Show the form with the defaults of the chosen groups and images.

        Another goal brings its own groups; another model, the first format of its weights that fits the card.
        """
        asked = {key: str(value) for key, value in form.items()}
        if asked.get("experiment") != asked.get("goal_before"):
            asked |= dict.fromkeys((one for one in GROUPS if one != "experiment"), "")
        elif asked.get("model") != asked.get("model_before"):
            fits = {one["model"].name: one["fits"] for one in model_cards(_memory_of(asked))}
            asked["model/quantization"] = fits.get(asked.get("model"), "") or ""
        answer = self._form(asked)
        answer.headers["hx-trigger"] = "chosen"  # the command follows
        return answer

    def _form(self, asked: dict[str, str]) -> Response:
        for group in GROUPS:
            check_choice(group, asked.get(group) or None, declared("train").groups[group])
        chosen = [f"{group}={asked[group]}" for group in GROUPS if asked.get(group)]
        with suppress(UserError):  # a mistake is shown with the command
            chosen += read_values([f"data.root={asked['data.root']}"] if asked.get("data.root") else [], "train")
        cfg, usual = composed(*chosen), composed(*(one for one in chosen if not one.startswith("model=")))
        choices, known = cfg.hydra.runtime.choices, declared("train")
        values = {key: OmegaConf.select(cfg, key, default=..., throw_on_missing=False) for key in fields()}
        shown = [(key, fields()[key], typed(value)) for key, value in values.items() if value is not ...]
        name, memory = Path(run_folder(None)).name, _memory_of(asked)
        return page(
            "start.html",
            tab="start",
            asked={"output_dir": f"{self.outputs}/{name}", "upload": name, "data.root": "", **asked},
            groups={group: (choices[group], known.groups[group]) for group in GROUPS},
            goals=goals(),
            cards=model_cards(memory),
            chosen=choices.model,
            usual=usual.hydra.runtime.choices.model,
            memory=memory,
            card=next((name for name, *_ in cards()), ""),
            formats=FORMATS,
            fields=shown,
            headings=[*SECTIONS, "Expert"],
            heading_of=heading_of,
            queue={run: without_credentials(shlex.join(one)) for run, one in self.jobs.waiting().items()},
            failed=self.jobs.failed,
        )

    def start(self, request: Request, form: FormData) -> Response:
        """Show the command, start the run, or append it to the queue; a name that is taken gets a number."""
        waiting, name = self.jobs.waiting(), str(form.get("output_dir", "")).strip()
        asked = run_below(self.outputs, name if {*name} & {*"/\\"} else f"{self.outputs}/{name}")
        ends = ("", *(f"-{index}" for index in range(2, 10_000)))
        runs = (RunFolder(f"{asked}{end}") for end in ends)
        run = next(one for one in runs if not os.path.lexists(one.path) and str(one) not in waiting)
        settings, cfg = self._complete(form)
        arguments = [*settings, argument("output_dir", str(run))]
        if form.get("when") == "now":
            self.jobs.start(arguments, run)
            name = run.path.relative_to(self.outputs).as_posix()
            return HTMLResponse("", headers={"hx-redirect": f"/run?{urlencode({'run': name})}"})
        if form.get("when") == "next":
            with self.jobs.changing() as waiting:
                waiting[str(run)] = arguments
            return HTMLResponse("", headers={"hx-trigger": "queued"})
        return page("command.html", command=shlex.join(arguments), like=self._like(cfg))

    def _complete(self, form: FormData) -> tuple[list[str], Any]:
        """Return the arguments of the form and their settings; raise a UserError if they name no images."""
        arguments = arguments_of(form)
        cfg = composed(*read_values(arguments, "train"))
        if OmegaConf.select(cfg, "data.root") is None and OmegaConf.select(cfg, "data.shards") is None:
            raise UserError("Choose a folder of images, in step 1.")
        return arguments, cfg

    def _like(self, cfg: Any) -> dict[str, Any] | None:
        """Return the newest run that computed the same steps, with how long those of these settings would take."""
        deciding, steps = _deciding(OmegaConf.to_container(cfg)), OmegaConf.select(cfg, "trainer.max_steps")
        runs = self.shelf.runs()
        for name, run in sorted(runs.items(), key=lambda item: started(item[1]), reverse=True)[:LOOKED_AT]:
            with suppress(UserError, ValueError):
                last = last_metrics(run.metrics)
                if int(last.get("step", 0)) >= FEWEST_STEPS and _deciding(settings_of(run)) == deciding:
                    return {"run": name, **until(float(last["seconds"]) / int(last["step"]) * steps)}
        return None

    def estimate(self, request: Request, form: FormData) -> Response:
        """Start a dry run, and show how far it is."""
        key = self.plans.start(self._complete(form)[0], "again" in form)
        return page("plan.html", **self.plans.state(key))

    def plan(self, request: Request) -> Response:
        """Show a dry run's progress or result."""
        return page("plan.html", **self.plans.state(request.query_params.get("key", "")))

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
