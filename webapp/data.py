"""The tab Data: samples as training sees them, those with findings first, and their captions, edited in place."""

import hashlib
import io
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlencode

import hydra
from hydra.utils import instantiate
from omegaconf import OmegaConf
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from datamodules.errors import UserError
from datamodules.files import read_text, replacing
from datamodules.images.samples import Sample
from datamodules.locks import holder
from report.quoting import program
from report.tables import read_metrics
from runs.run_folder import RunFolder
from tasks.arguments import hydras_errors, read_arguments
from tasks.check_keys import check_keys, check_read
from tasks.check_values import check_ranges
from webapp.answers import page, post
from webapp.jobs import Jobs
from webapp.runs import SMALL, Shelf, settings_of, tail

# Settings of a run that determine its samples and their views.
OF_SAMPLES = "root val_root val_count resolution upscale buckets crop crop_count flip batch_size columns pair_suffixes"


class DataSet(NamedTuple):
    """The samples of settings of predict.py by key, also those without captions."""

    words: list[str]
    sample_set: Any  # SampleSet, whose import takes seconds
    samples: dict[str, Sample]
    notes: Sequence[str]


def words_of_run(settings: Mapping[str, Any]) -> list[str]:
    """Return the data of a run as settings of predict.py, in Python's notation, which Hydra reads with bare keys."""
    data: Any = OmegaConf.to_container(OmegaConf.create(dict(settings)).data, resolve=True)
    source = data["source"]["_target_"].rpartition(".")[2]
    group = {"find_captioned": "captions", "find_shapes": "shapes"}.get(source, "cached")
    chosen = {f"data.{key}": data.get(key) for key in OF_SAMPLES.split()}
    chosen |= {f"data.source.{key}": value for key, value in data["source"].items() if key[0] != "_"}
    chosen["model.pretrained_model_name_or_path"] = settings["model"]["pretrained_model_name_or_path"]
    if "'_target_':" in repr(chosen):  # a run may come from elsewhere
        raise UserError("config.yaml: data has a value with _target_, which is not run here. Write the settings.")
    given = [f"{key}=" + re.sub(r"'(\w+)':", r"\1:", repr(value)) for key, value in chosen.items() if value]
    return [f"model={settings['model_name']}", f"data={group}", *given]


def images_of(sample: Sample) -> dict[str, Any]:
    """Return the images of a sample by role."""
    found = {f"control {number}": path for number, path in enumerate(sample.controls, 1)} | {"target": sample.target}
    return found | {role: path for role in ("rejected", "mask") if (path := getattr(sample, role))}


def caption_of(sample: Sample) -> tuple[str, str]:
    """Return a caption as it is on the disk, and a mark of it and its file; no mark if it cannot be edited here."""
    if sample.caption_file is None or sample.caption_file.suffix.lower() == ".json":
        return "\n".join(sample.prompts), ""
    text = read_text(sample.caption_file).strip() if sample.caption_file.exists() else ""
    return text, hashlib.sha256(f"{sample.caption_file}\0{text}".encode()).hexdigest()


def _look_up(things: Mapping[Any, Any], name: Any) -> Any:
    if name not in things:
        raise HTTPException(404, f"there is no {name} here. Open the data set again.")
    return things[name]


class DataPage:
    """Routes of the tab. Scans are kept until the page ends."""

    def __init__(self, shelf: Shelf, jobs: Jobs) -> None:
        self.shelf, self.jobs = shelf, jobs
        self.sets: dict[Any, DataSet] = {}

    def routes(self) -> list[Route]:
        """Return the routes."""
        posts = [post(f"/data/{handler.__name__}", handler) for handler in (self.open, self.start, self.save)]
        return [Route("/data", self.show), Route("/data/image", self.image), *posts]

    def _jobs(self, key: str) -> dict[str, RunFolder]:
        """Return the folders of the tasks, deeper than those that the tab Runs shows."""
        return {task: RunFolder(self.shelf.outputs / "studio" / key / task) for task in ("inspect", "caption")}

    def show(self, request: Request) -> Response:
        """Show samples, those with findings first, or the choice of a data set."""
        asked, runs = request.query_params, [name for name, run in self.shelf.runs().items() if run.config.is_file()]
        if "set" not in asked:
            return page("data.html", tab="data", runs=runs)
        data, jobs = _look_up(self.sets, asked["set"]), self._jobs(asked["set"])
        lists: dict[str, Any] = {"all": (), "findings": {}, "one": [asked.get("sample")]}
        for row in read_metrics(jobs["inspect"].path / "inspect.csv"):
            if row["sample"] in data.samples:  # else it is a line about an incomplete one
                lists["findings"].setdefault(row["sample"], []).append(row)
        lists["all"] = dict.fromkeys((*lists["findings"], *data.samples))
        lists["no caption"] = [key for key, one in data.samples.items() if not (one.prompts or caption_of(one)[0])]
        lists["proposed"] = self._proposed(data)
        keys = [key for key in _look_up(lists, asked.get("show", "all")) if key in data.samples]
        first = int(asked["first"]) if asked.get("first", "").isdecimal() else 0
        samples = [data.samples[key] for key in keys[first : first + 60]]
        usable, notes = data.sample_set.check(samples)
        views = {one.sample.key: data.sample_set.views(one) for one in usable}
        values = {"data": data, "samples": samples, "views": views, "lists": lists, "keys": keys, "asked": asked}
        values |= {"settings": shlex.join(data.words), "notes": [*data.notes, *notes], "first": first}
        values |= {"jobs": jobs, "running": any(holder(run.path) for run in jobs.values()), "program": program}
        return page("data.html", tab="data", runs=runs, images_of=images_of, caption_of=caption_of, tail=tail, **values)

    def _proposed(self, data: DataSet) -> dict[str, Any]:
        """Return the captions of models that nobody has changed or accepted, each with its file."""
        from tasks.caption import RECORDS, read_records

        outputs = self.shelf.outputs
        paths = sorted([*outputs.glob(f"*/{RECORDS}"), *outputs.glob(f"studio/*/*/{RECORDS}")], key=os.path.getmtime)
        last = {os.path.abspath(one.file or ""): (one, path) for path in paths for one in read_records(path)}
        files = {os.path.abspath(one.caption_file): one for one in data.samples.values() if one.caption_file}
        new = {file: found for file, found in last.items() if file in files and not found[0].accepted}
        return {files[file].key: one for file, one in new.items() if one[0].caption == caption_of(files[file])[0]}

    def image(self, request: Request) -> Response:
        """Return an image of a sample."""
        from datamodules.images.decoding import open_image

        asked, buffer = request.query_params, io.BytesIO()
        sample: Sample = _look_up(_look_up(self.sets, asked.get("set")).samples, asked.get("sample"))
        small = open_image(_look_up(images_of(sample), asked.get("part")), SMALL * SMALL)
        small.thumbnail((SMALL, SMALL))
        small.save(buffer, format="WEBP", quality=85)
        return Response(buffer.getvalue(), 200, {"cache-control": "private, max-age=600"}, "image/webp")

    def open(self, request: Request, form: FormData) -> Response:
        """Scan the data of a run, or of typed settings."""
        from tasks.models import without_network

        run, typed = str(form.get("run", "")), str(form.get("settings", ""))
        with hydras_errors("predict"):
            words = words_of_run(settings_of(self.shelf.get(run))) if run else shlex.split(typed)
            if others := [word for word in words if not re.match(r"[+~]*(data|model)[.=/]", word)]:
                raise UserError(f"{others[0]}: it is no setting of data or model. Leave it out.")
            given = read_arguments(words, "predict")
            cfg = hydra.compose("predict", overrides=given)
            check_keys(cfg, "predict")
            check_ranges(cfg, "predict")
            check_read("inspect", given)
            cfg.data.on_missing = cfg.data.on_bad_image = "skip"  # notes name them
            data = instantiate(cfg.data, _convert_="all")
            data.configure_for(without_network(cfg.model))
        found = data.sample_set.find_uncaptioned_too()
        key = hashlib.sha256("\n".join(words).encode()).hexdigest()[:12]
        self.sets[key] = DataSet(words, data.sample_set, {one.key: one for one in found.samples}, found.notes)
        return HTMLResponse("", headers={"hx-redirect": f"/data?set={key}"})

    def start(self, request: Request, form: FormData) -> Response:
        """Start a task on a data set as a process of its own."""
        key, task, more = (str(form.get(name, "")) for name in ("set", "task", "captioner"))
        words, run = _look_up(self.sets, key).words, _look_up(self._jobs(key), task)
        self.jobs.start(
            [f"task={task}", *words, *re.findall(r"(?<!\S)\w\S*=\S+", more), f"output_dir={run}"], run, "predict"
        )
        return HTMLResponse("", headers={"hx-redirect": f"/data?set={key}"})

    def save(self, request: Request, form: FormData) -> Response:
        """Save a caption, and accept a proposed one."""
        data: DataSet = _look_up(self.sets, form.get("set"))
        sample: Sample = _look_up(data.samples, form.get("sample"))
        file, (present, mark) = sample.caption_file, caption_of(sample)
        text = re.sub("\r\n?", "\n", str(form.get("text", ""))).strip()
        if text != present:
            if file is None or not mark or form.get("mark") != mark:
                raise UserError(f"{file} has changed since it was shown, and stays. Reload the page.")
            with replacing(file) as temporary:
                temporary.write_text(text + "\n", encoding="utf-8")
        if "accept" in form and (found := self._proposed(data).get(sample.key)):
            found[0].accept(found[1])
        return RedirectResponse("/data?" + urlencode({"set": form["set"], "show": "one", "sample": sample.key}), 303)
