"""The tab Data: samples as training sees them, their captions and masks, edited in place, and commands on all."""

import hashlib
import io
import json
import os
import re
import secrets
import shlex
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlencode

from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from cli.arguments import hydras_errors, read_values
from cli.check_keys import check_keys, check_read
from cli.check_values import check_ranges
from datamodules.images.captions import readable
from datamodules.images.recipe_images import recipe_image_of, with_controls, with_exchanges
from datamodules.images.samples import Sample
from extras.page.answers import entry, number, page, post
from extras.page.jobs import Jobs, user_of
from extras.page.runs import DECODING, SMALL, Shelf, tail
from extras.page.start import arguments_of, asked_by, composed, typed
from foundation.errors import UserError
from foundation.files import read_text, reading, replacing
from foundation.settings import declared
from report.tables import read_metrics
from runs.run_folder import RunFolder

if TYPE_CHECKING:  # PyTorch is imported by the first scan
    from datamodules.images.sample_set import SampleSet, Usable

# Samples on a page of thumbnails, and longer side of a large image and of a painted mask in pixels.
SHOWN, LARGE = 24, 1280
# The accepted captions of models, in the folder of the runs.
ACCEPTED = ".accepted.jsonl"
CHANGED = "{} has changed since it was shown, and stays. Reload the page."


@dataclass
class DataSet:
    """A scanned data set: its settings, its samples by key, notes, and the folders of the commands on it by task."""

    words: list[str]
    sample_set: "SampleSet"
    samples: dict[str, Sample]
    notes: tuple[str, ...]
    jobs: dict[str, RunFolder]

    def write_caption(self, sample: Sample, before: str, text: str) -> None:
        """Write a caption, unless its file has changed since it was shown as `before`."""
        file, (present, editable) = sample.caption_file, caption_of(sample)
        if text != present:
            if file is None or not editable or before != present:
                raise UserError(CHANGED.format(file))
            content = readable(text, str(file))
            with replacing(file) as temporary:
                temporary.write_bytes(content)
        self.samples[sample.key] = replace(sample, prompts=(text,))

    def mask_place(self, sample: Sample) -> tuple[Path | None, str]:
        """Return the file of a sample's mask, or where one would be, and when it was written, "" if it was not.

        None and the reason if none can be saved.
        """
        file, root = sample.mask_file, self.sample_set.root(sample)
        if file is None or root.alpha_mask or (root.control and root.control.mask):
            return None, "Masks of this data set are in its table, in the targets' alpha channel, or of data.control."
        if not file.resolve().is_relative_to(Path(root.path).expanduser().resolve()):
            return None, f"{file} is a link, or below one, to another place. Replace the link by a folder."
        return file, str(file.stat().st_mtime_ns) if file.is_file() else ""


def images_of(sample: Sample) -> dict[str, Any]:
    """Return the images of a sample by role."""
    found = {f"control {number}": path for number, path in enumerate(sample.controls, 1)} | {"target": sample.target}
    if (made := recipe_image_of(sample)) and made.chain.models:  # which the page does not run
        found = {role: path for role, path in found.items() if path != made}
    return found | {role: path for role in ("rejected", "mask") if (path := getattr(sample, role))}


def caption_of(sample: Sample) -> tuple[str, bool]:
    """Return a caption as it is on the disk, and whether it can be edited here."""
    if sample.caption_file is None or sample.caption_file.suffix.lower() == ".json":
        return "\n".join(sample.prompts), False
    if recipe_image_of(sample) and not sample.caption_file.exists():
        return "\n".join(sample.prompts), False
    return _text(read_text(sample.caption_file)) if sample.caption_file.exists() else "", True


def _text(typed: Any) -> str:
    return re.sub("\r\n?", "\n", str(typed)).strip()


def faults_of(sample: Sample, checked: "Usable | UserError") -> dict[str, str]:
    """Return why images of a sample cannot be used, by role; by "" if each can be read."""
    from datamodules.images.decoding import verify_image

    found = {}
    for role, path in images_of(sample).items() if isinstance(checked, UserError) else ():
        try:
            verify_image(path)
        except UserError as fault:
            found[role] = str(fault).replace(f"cannot read the image {path}", Path(str(path)).name)
    return found or ({"": str(checked)} if isinstance(checked, UserError) else {})


def _settings(form: FormData, *names: str) -> list[str]:
    """Return the settings of a form: those of some fields, and further ones, one a line."""
    named = [f"{name}={text}" for name in names if (text := str(form.get(name, "")).strip())]
    return [*named, *filter(None, map(str.lstrip, str(form.get("more", "")).splitlines()))]


class DataPage:
    """Routes of the tab. Scans are kept until the page ends, of the previews of replacements the last one."""

    def __init__(self, shelf: Shelf, jobs: Jobs) -> None:
        self.shelf, self.jobs = shelf, jobs
        self.sets: dict[Any, DataSet] = {}
        self.previews: dict[Any, tuple[DataSet, dict[Path, tuple[str, str, str]]]] = {}

    def routes(self) -> list[Route]:
        handlers = (self.open, self.found, self.start, self.save, self.preview, self.apply, self.mask)
        posts = [post(f"/data/{handler.__name__}", handler) for handler in handlers]
        return [Route("/data", self.show), Route("/data/image", self.image), *posts]

    def show(self, request: Request) -> Response:
        """Show the choice of a data set, and a page of its samples or one of them."""
        asked, groups = request.query_params, declared("predict").groups
        runs = [name for name, run in self.shelf.runs().items() if "sample" not in asked and run.config.is_file()]
        values: dict[str, Any] = {"tab": "data", "asked": asked, "groups": groups, "runs": runs}
        if "set" not in asked:
            return page("data.html", **values)
        data = entry(self.sets, asked["set"])
        samples, rows = data.samples, read_metrics(data.jobs["inspect"].path / "inspect.csv")
        found = dict.fromkeys(row["sample"] for row in rows if row["sample"] in samples)  # others are incomplete
        bare = [key for key, one in samples.items() if not (any(one.prompts) or caption_of(one)[0])]
        lists = {"all": found | samples, "findings": found, "no caption": bare, "proposed": self._proposed(samples)}
        keys, start = list(entry(lists, asked.get("show", "all"))), number(asked.get("first"))
        shown = keys[start : start + SHOWN]
        if "sample" in asked:
            shown = [entry(samples, asked["sample"]).key]
            keys = keys if shown[0] in keys else list(lists["all"])
            start = keys.index(shown[0])
        checked = dict(zip(shown, data.sample_set.check_each([samples[key] for key in shown]), strict=True))
        values |= {"data": data, "lists": lists, "keys": keys, "shown": shown, "start": start, "count": SHOWN}
        values |= {"rows": [row for row in rows if row["sample"] in shown], "checked": checked, "tail": tail}
        values |= {"images_of": images_of, "caption_of": caption_of, "faults_of": faults_of, "quoted": shlex.join}
        values["running"] = any(user_of(run.path) for run in data.jobs.values())
        return page("sample.html" if "sample" in asked else "data.html", **values)

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
        sample = entry(entry(self.sets, asked.get("set")).samples, asked.get("sample"))
        side = LARGE if "large" in asked else SMALL
        with DECODING:
            path = entry(images_of(sample), part := asked.get("part"))
            small = open_mask(path) if part == "mask" else open_image(path, side * side)
        small.thumbnail((side, side))
        small.save(buffer, format="WEBP", quality=85)
        return Response(buffer.getvalue(), 200, {"cache-control": "private, max-age=600"}, "image/webp")

    def open(self, request: Request, form: FormData) -> Response:
        """Scan a folder, or the data of a run."""
        words = _settings(form, "data.root", "model")
        if run := form.get("run"):
            asked = asked_by(self.shelf.get(str(run)), "predict")
            lines = [*map("=".join, asked.items()), *asked["more"].split("\n")]
            # Without the folders that are written to: a run may come from elsewhere.
            pattern = r"\+?data(?!\.source\.folder|\.cache_dir)[.=]|model(\.pretrained\w*)?="
            words = [line for line in lines if re.match(pattern, line)]
        if others := [word for word in words if not re.match(r"[+~]*(data|model)[.=/]", word)]:
            raise UserError(f"{others[0]}: this setting belongs to neither data nor model. Leave it out.")
        return HTMLResponse("", headers={"hx-redirect": f"/data?set={self._scan(words)}"})

    def found(self, request: Request, form: FormData) -> Response:
        """Show what the folder in the form of the tab Start contains."""
        root = str(form.get("data.root", "")).strip()
        if not root or not os.path.exists(os.path.expanduser(root)):
            return page("found.html", problem=root and "This machine has no such file or folder.")
        try:
            arguments = arguments_of(form)
            chosen = [one for one in arguments if re.match(r"[+~]*data[.=]", one)]
            cfg = composed(*read_values(arguments, "train"))
            recipe = OmegaConf.select(cfg, "data.control.recipe")  # of the goal
            recipes = [] if recipe is None else [f"data.control={typed(OmegaConf.to_object(recipe))}"]
            key = self._scan([f"model={cfg.hydra.runtime.choices.model}", *recipes, *chosen])
        except UserError as error:  # while images are still being uploaded
            return page("found.html", problem=str(error))
        data = self.sets[key]
        captions = {name: caption_of(one)[0] for name, one in data.samples.items()}
        return page("found.html", key=key, captions=captions, images_of=images_of, data=data)

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
        key, whole = hashlib.sha256(shlex.join(words).encode()).hexdigest()[:12], data.sample_set
        found = whole.find_uncaptioned_too()
        with suppress(UserError):  # [caption] without one, which can be written here
            found = with_exchanges(with_controls(found, whole.roots, whole.seed), whole.roots)
        known = whole.scan().samples if whole.val_roots else []
        samples = {one.key: one for one in (*found.samples, *filter(whole.is_held_out, known))}
        jobs = {task: RunFolder(self.shelf.outputs / "studio" / key / task) for task in ("inspect", "caption")}
        self.sets[key] = DataSet(words, whole, samples, found.notes, jobs)
        return key

    def start(self, request: Request, form: FormData) -> Response:
        """Start a task on a data set as a process of its own."""
        data, task = entry(self.sets, form.get("set")), form.get("task")
        with hydras_errors("predict"):
            run = entry(data.jobs, task)
            read_values(more := _settings(form, "captioner"), "predict")
        self.jobs.start([f"task={task}", *data.words, *more, f"output_dir={run}"], run, "predict")
        return HTMLResponse("", headers={"hx-redirect": f"/data?set={form['set']}"})

    def save(self, request: Request, form: FormData) -> Response:
        """Save a caption, and accept a proposed one."""
        data = entry(self.sets, form.get("set"))
        sample = entry(data.samples, form.get("sample"))
        data.write_caption(sample, _text(form.get("before", "")), _text(form.get("text", "")))
        if "accept" in form and (found := self._proposed(data.samples).get(sample.key)):
            with (self.shelf.outputs / ACCEPTED).open("a", encoding="utf-8") as accepted:
                accepted.write(json.dumps(asdict(found)) + "\n")
        asked = {"set": form["set"], "sample": sample.key, "saved": 1, "show": form.get("show", "all")}
        return RedirectResponse("/data?" + urlencode(asked), 303)

    def preview(self, request: Request, form: FormData) -> Response:
        """Show the captions that a replacement would change."""
        data, find, by = entry(self.sets, form.get("set")), str(form.get("find", "")), str(form.get("by", ""))
        captions = {}
        for key, sample in data.samples.items():
            text, editable = caption_of(sample)
            if find and find in text and editable and sample.caption_file:
                readable(changed := text.replace(find, by).strip(), str(sample.caption_file))
                captions[sample.caption_file] = key, text, changed
        self.previews = {(token := secrets.token_hex(8)): (data, captions)}
        return page("replacement.html", find=find, by=by, token=token, captions=captions)

    def apply(self, request: Request, form: FormData) -> Response:
        """Replace a text as it was previewed; a file that has changed since then is kept and named."""
        data, captions = entry(self.previews, form.get("preview"))
        self.previews, kept = {}, []
        for key, before, after in captions.values():
            try:
                data.write_caption(data.samples[key], before, after)
            except UserError as error:
                kept.append(str(error))
        return page("replacement.html", changed=len(captions) - len(kept), kept=kept)

    def mask(self, request: Request, form: FormData) -> Response:
        """Save a painted mask in the size of its target; it replaces only the one that was shown."""
        from datamodules.images.decoding import BLACK, image_size

        data = entry(self.sets, form.get("set"))
        sample, painted = entry(data.samples, form.get("sample")), cast(UploadFile, form.get("mask"))
        file, before = data.mask_place(sample)
        if file is None or before != form.get("before"):
            raise UserError(before if file is None else CHANGED.format(file))
        with reading("the painted mask", "paint it again"), Image.open(painted.file, formats=["PNG"]) as image:
            if max(image.size) > LARGE:
                raise ValueError(f"it has more than {LARGE} pixels a side")
            mask = image.convert("L").resize(image_size(sample.target))
        if max(mask.tobytes()) < BLACK:
            raise UserError("The mask is empty. Paint the part that counts.")
        with replacing(file) as temporary:
            mask.save(temporary, format=Image.registered_extensions()[file.suffix.lower()])
        data.samples[sample.key] = replace(sample, mask=file)
        return HTMLResponse("", headers={"hx-refresh": "true"})
