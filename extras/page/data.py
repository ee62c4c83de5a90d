"""The tab Data: samples as training sees them, those with findings first, and their captions, edited in place."""

import hashlib
import io
import json
import os
import re
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from hydra.utils import instantiate
from omegaconf import OmegaConf
from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from cli.arguments import hydras_errors, read_values
from cli.check_keys import check_keys, check_read
from cli.check_values import check_ranges
from datamodules.images.samples import Sample
from extras.page.answers import entry, page, post
from extras.page.jobs import Jobs, user_of
from extras.page.runs import DECODING, SMALL, Shelf, tail
from extras.page.start import arguments_of, asked_by, composed
from foundation.errors import UserError
from foundation.files import read_text, replacing
from report.tables import read_metrics
from runs.run_folder import RunFolder

# Of typed paths; Windows' are not escaped.
BACKSLASH = "\\" * (1 if os.sep == "/" else 2)
# The accepted captions of models, in the folder of the runs.
ACCEPTED = ".accepted.jsonl"


def images_of(sample: Sample) -> dict[str, Any]:
    """Return the images of a sample by role."""
    found = {f"control {number}": path for number, path in enumerate(sample.controls, 1)} | {"target": sample.target}
    return found | {role: path for role in ("rejected", "mask") if (path := getattr(sample, role))}


def caption_of(sample: Sample) -> tuple[str, bool]:
    """Return a caption as it is on the disk, and whether it can be edited here."""
    if sample.caption_file is None or sample.caption_file.suffix.lower() == ".json":
        return "\n".join(sample.prompts), False
    return read_text(sample.caption_file).strip() if sample.caption_file.exists() else "", True


class DataPage:
    """Routes of the tab. Scans are kept until the page ends, each as values of the template."""

    def __init__(self, shelf: Shelf, jobs: Jobs) -> None:
        self.shelf, self.jobs = shelf, jobs
        self.sets: dict[Any, dict[str, Any]] = {}

    def routes(self) -> list[Route]:
        """Return the routes."""
        posts = [
            post(f"/data/{handler.__name__}", handler) for handler in (self.open, self.found, self.start, self.save)
        ]
        return [Route("/data", self.show), Route("/data/image", self.image), *posts]

    def show(self, request: Request) -> Response:
        """Show samples, those with findings first, or the choice of a data set."""
        asked, runs = request.query_params, [name for name, run in self.shelf.runs().items() if run.config.is_file()]
        if "set" not in asked:
            return page("data.html", tab="data", runs=runs)
        data = entry(self.sets, asked["set"])
        samples, rows = data["samples"], read_metrics(data["jobs"]["inspect"].path / "inspect.csv")
        found = dict.fromkeys(row["sample"] for row in rows if row["sample"] in samples)  # others are incomplete
        bare = [key for key, one in samples.items() if not (one.prompts or caption_of(one)[0])]
        lists = {"all": found | samples, "findings": found, "no caption": bare, "proposed": self._proposed(samples)}
        lists["one"] = {asked.get("sample")} & samples.keys()
        keys, first = list(entry(lists, asked.get("show", "all"))), asked.get("first", "")
        shown = keys[(start := int(first) if first.isdecimal() else 0) : start + 60]
        usable, notes = data["sample_set"].check([samples[key] for key in shown])
        values = data | {"asked": asked, "lists": lists, "shown": shown, "count": len(keys), "first": start}
        values |= {"rows": [row for row in rows if row["sample"] in shown], "notes": [*data["notes"], *notes]}
        values |= {"views": {one.sample.key: data["sample_set"].views(one) for one in usable}}
        values |= {"running": any(user_of(run.path) for run in data["jobs"].values()), "tail": tail}
        return page("data.html", tab="data", runs=runs, images_of=images_of, caption_of=caption_of, **values)

    def _proposed(self, samples: dict[str, Sample]) -> dict[str, Any]:
        """Return the captions of models that nobody has changed or accepted."""
        from extras.caption import RECORDS, read_records

        *written, accepted = (
            {one for path in self.shelf.outputs.glob(place) for one in read_records(path) if one.key in samples}
            for place in (f"*/{RECORDS}", f"studio/*/*/{RECORDS}", ACCEPTED)
        )
        new = sorted(set().union(*written) - accepted, key=lambda one: one.key)
        return {one.key: one for one in new if one.caption == caption_of(samples[one.key])[0]}

    def image(self, request: Request) -> Response:
        """Return an image of a sample."""
        from datamodules.images.decoding import open_image, open_mask

        asked, buffer = request.query_params, io.BytesIO()
        sample = entry(entry(self.sets, asked.get("set"))["samples"], asked.get("sample"))
        with DECODING:
            path = entry(images_of(sample), part := asked.get("part"))
            small = open_mask(path) if part == "mask" else open_image(path, SMALL * SMALL)
        small.thumbnail((SMALL, SMALL))
        small.save(buffer, format="WEBP", quality=85)
        return Response(buffer.getvalue(), 200, {"cache-control": "private, max-age=600"}, "image/webp")

    def open(self, request: Request, form: FormData) -> Response:
        """Scan the data of a run, or of typed settings."""
        with hydras_errors("predict"):
            words = shlex.split(str(form.get("settings", "")).replace("\\", BACKSLASH))
        if run := form.get("run"):
            asked = asked_by(self.shelf.get(str(run)), "predict")
            lines = [*map("=".join, asked.items()), *asked["more"].split("\n")]
            # Without the folders that are written to: a run may come from elsewhere.
            pattern = r"\+?data(?!\.source\.folder|\.cache_dir)[.=]|model(\.pretrained\w*)?="
            words = [line for line in lines if re.match(pattern, line)]
        if others := [word for word in words if not re.match(r"[+~]*(data|model)[.=/]", word)]:
            remedy = "Leave it out." if "=" in others[0] else f"Write data.root={others[0]}."
            raise UserError(f"{others[0]}: this setting belongs to neither data nor model. {remedy}")
        return HTMLResponse("", headers={"hx-redirect": f"/data?set={self._scan(words)}"})

    def found(self, request: Request, form: FormData) -> Response:
        """Show what the folder in the form of the tab Start contains."""
        root = str(form.get("data.root", "")).strip()
        if not Path(root).expanduser().exists():
            return page("found.html", problem=root and "This machine has no such file or folder.")
        try:
            arguments = arguments_of(form)
            data = [one for one in arguments if re.match(r"[+~]*data[.=]", one)]
            choices = composed(*read_values(arguments, "train")).hydra.runtime.choices
            key = self._scan([f"model={choices.model}", *data])
        except UserError as error:  # while images are still being uploaded
            return page("found.html", problem=str(error))
        captions = {name: caption_of(one)[0] for name, one in self.sets[key]["samples"].items()}
        return page("found.html", key=key, captions=captions, images_of=images_of, **self.sets[key])

    def _scan(self, words: list[str]) -> str:
        """Find the samples of settings of predict.py, and return the key of the set."""
        from tasks.models import without_network

        with hydras_errors("predict"):
            given, skip = read_values(words, "predict"), ("data.on_missing=skip", "data.on_bad_image=skip")
            cfg = composed(*given, *skip, script="predict")  # notes name the skipped ones
            cfg = OmegaConf.masked_copy(cfg, [key for key in cfg if key != "hydra"])
            check_keys(cfg, "predict")
            check_ranges(cfg, "predict")
            check_read("inspect", given)
            (data := instantiate(cfg.data, _convert_="all")).configure_for(without_network(cfg.model))
        key, whole = hashlib.sha256((text := shlex.join(words)).encode()).hexdigest()[:12], data.sample_set
        found, known = whole.find_uncaptioned_too(), whole.scan().samples if whole.val_roots else []
        samples = {one.key: one for one in (*found.samples, *filter(whole.is_held_out, known))}
        jobs = {task: RunFolder(self.shelf.outputs / "studio" / key / task) for task in ("inspect", "caption")}
        self.sets[key] = {"settings": text, "jobs": jobs, "sample_set": whole, "samples": samples, "notes": found.notes}
        return key

    def start(self, request: Request, form: FormData) -> Response:
        """Start a task on a data set as a process of its own."""
        data, task = entry(self.sets, form.get("set")), form.get("task")
        with hydras_errors("predict"):
            more = shlex.split(str(form.get("captioner", "")).replace("\\", BACKSLASH))
            run = entry(data["jobs"], task)
            read_values(more, "predict")
        self.jobs.start([f"task={task}", *shlex.split(data["settings"]), *more, f"output_dir={run}"], run, "predict")
        return HTMLResponse("", headers={"hx-redirect": f"/data?set={form['set']}"})

    def save(self, request: Request, form: FormData) -> Response:
        """Save a caption, and accept a proposed one."""
        samples = entry(self.sets, form.get("set"))["samples"]
        sample: Sample = entry(samples, form.get("sample"))
        file, (present, editable) = sample.caption_file, caption_of(sample)
        before, text = (re.sub("\r\n?", "\n", str(form.get(name, ""))).strip() for name in ("before", "text"))
        if text != present:
            if file is None or not editable or before != present:
                raise UserError(f"{file} has changed since it was shown, and stays. Reload the page.")
            with replacing(file) as temporary:
                temporary.write_text(text + "\n", encoding="utf-8")
        if "accept" in form and (found := self._proposed(samples).get(sample.key)):
            with (self.shelf.outputs / ACCEPTED).open("a", encoding="utf-8") as accepted:
                accepted.write(json.dumps(asdict(found)) + "\n")
        return RedirectResponse("/data?" + urlencode({"set": form["set"], "show": "one", "sample": sample.key}), 303)
