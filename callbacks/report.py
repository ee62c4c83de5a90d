"""A run on one page: report.html, self-contained, to be looked at while it is written and long after."""

import base64
import csv
import io
import logging
import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import lightning.pytorch as L
from omegaconf import OmegaConf
from PIL import Image, ImageDraw

from callbacks.image_writer import save_png, to_image
from callbacks.sample_images import PARTS, SampleImages
from callbacks.validation import read_rows
from datamodules.errors import UserError
from datamodules.files import replacing
from datamodules.pairs import PairsDataModule
from datamodules.pixels import pictures
from lightning_modules.base import EditModule
from lightning_modules.components import ASIDE

log = logging.getLogger("retouch")

# Pixels of the longer side: of a picture on the page, and of a sample of the data.
LARGEST, THUMBNAIL = 512, 128
POINTS = 400  # of a curve
COLORS = "abcd"
TEMPLATE = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)


class Strip(NamedTuple):
    """A sample picture's parts, and the prompt."""

    controls: list[Image.Image]
    result: Image.Image
    target: Image.Image
    prompt: str


def read_strip(path: Path) -> Strip:
    """Part the strips that `SampleImages` writes."""
    with Image.open(path) as file:
        facts, image = file.info, file.convert("RGB")
    widths = [int(width) for width in facts[PARTS].split()]
    edges = [sum(widths[:n]) for n in range(len(widths) + 1)]
    *controls, result, target = (image.crop((left, 0, right, image.height)) for left, right in pairwise(edges))
    return Strip(controls, result, target, facts.get("prompt", ""))


def sample_files(run: Path) -> dict[int, dict[str, Path]]:
    """A run's sample pictures, by step and name."""
    folders = sorted((run / "samples").glob("step-*"))
    return {
        int(folder.name.removeprefix("step-")): {path.stem: path for path in sorted(folder.glob("*.png"))}
        for folder in folders
    }


def data_url(image: Image.Image, largest: int = LARGEST) -> str:
    """A picture as it stands in the page: small ones exact, large ones scaled and compressed."""
    exact = max(image.size) <= THUMBNAIL
    image = image.copy()
    image.thumbnail((largest, largest), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    image.save(buffer, format="PNG" if exact else "WEBP", **({} if exact else {"quality": 85}))
    kind = "png" if exact else "webp"
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


def without_secrets(text: str) -> str:
    """Settings for others to read: no folders of this machine, no tokens, no credentials in addresses."""
    text = re.sub(r"\b(hf_\w{8,}|AKIA\w{12,}|gh[pousr]_\w{20,})", "***", text)
    text = re.sub(r"(\w+://)[^/\s@]+@", r"\1***@", text)
    text = re.sub(r"(\w+://[^\s?'\"]+)\?[^\s'\"]+", r"\1?***", text)
    return re.sub(r"(?<![\w:/.}$])(?:~|[A-Za-z]:)?[/\\](?:[^\s'\",\]/\\]+[/\\])+([^\s'\",\]/\\]+)", r".../\1", text)


def _line(name: str, rows: Sequence[Mapping[str, Any]], column: str, color: str, **style: bool) -> dict[str, Any]:
    """A column of a table over its steps, thinned out."""
    points = [(int(float(row["step"])), float(row[column])) for row in rows if row.get(column) not in (None, "")]
    thin = points[:: max(1, len(points) // POINTS)] + points[-1:]
    finite = [(step, value if abs(value) < float("inf") else None) for step, value in thin]
    return {"name": name, "points": finite, "color": color, **style}


def curves(metrics: Sequence[Mapping[str, Any]], validation: Sequence[Mapping[str, float]]) -> list[dict[str, Any]]:
    """What the page draws: charts, each of some lines."""
    charts = []
    if metrics:
        lines = [_line("", metrics, "loss", "a", faint=True), _line("training loss", metrics, "loss_avg", "a")]
        charts.append({"lines": lines})
    if validation:
        columns = validation[-1].keys() - {"step"}
        bands = sorted(name for name in columns if name.startswith("val_loss_t"))
        names = [f"t {n / len(bands):.2g} to {(n + 1) / len(bands):.2g}" for n in range(len(bands))]
        by_band = zip(names, bands, COLORS, strict=True)
        charts.append({"lines": [_line("validation loss", validation, "val_loss", "b")]})
        charts.append({"lines": [_line(name, validation, band, color) for name, band, color in by_band]})
        for name in sorted(column.removesuffix("_nothing") for column in columns if column.endswith("_nothing")):
            lines = [
                _line(name, validation, name, "c"),
                _line("to the source", validation, f"{name}_source", "b"),
                _line("of doing nothing", validation, f"{name}_nothing", "a", dashed=True),
            ]
            charts.append({"lines": lines})
    return charts


def read_metrics(run: Path) -> list[dict[str, str]]:
    """A run's metrics.csv."""
    path = run / "metrics.csv"
    if not path.is_file():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def render(path: Path, **page: Any) -> None:
    """Write a page whole or not at all."""
    lists = ("numbers", "jobs", "rows", "steps", "results", "curves", "commands", "data_lines", "thumbs")
    nothing: dict[str, Any] = {name: [] for name in lists}
    nothing |= dict.fromkeys(("config", "monitor", "picture_names", "pictures_title", "subtitle"), "")
    nothing |= {"unfinished": False, "row_width": 420}
    template = TEMPLATE.from_string(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    with replacing(path) as temporary:
        temporary.write_text(template.render(nothing | page), encoding="utf-8")


class Report(L.Callback):
    """Writes report.html at the start, after each set of sample pictures, and at the end.

    Args:
        output_dir: the run's folder.
        preview_count: samples of the data that it shows.
    """

    def __init__(self, output_dir: str, preview_count: int) -> None:
        self.run = Path(output_dir)
        self.preview_count = preview_count
        self._data: dict[str, Any] = {}
        self._holds_out = False
        self._results: dict[Path, str] = {}  # as they stand in the page
        self._sampled_step = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, EditModule)
        if trainer.is_global_zero:
            with pl_module.stopwatch.stage(ASIDE):
                data: Any = trainer.datamodule  # type: ignore[attr-defined]
                self._data, self._holds_out = describe_data(data, self.preview_count), data.validation is not None
                self._write(trainer, pl_module, unfinished=True)
        sampler = find_sampler(trainer)
        self._sampled_step = -1 if sampler is None else sampler.sampled_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, EditModule)
        sampler = find_sampler(trainer)
        if sampler is None or not trainer.is_global_zero or sampler.sampled_step in (self._sampled_step, -1):
            return
        self._sampled_step = sampler.sampled_step
        with pl_module.stopwatch.stage(ASIDE):
            self._write(trainer, pl_module, unfinished=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, EditModule)
        if trainer.is_global_zero and pl_module.transformer is not None:
            self._write(trainer, pl_module, unfinished=False)

    def _write(self, trainer: L.Trainer, module: EditModule, unfinished: bool) -> None:
        """A page that cannot be written must not cost the run."""
        try:
            self._write_page(trainer, module, unfinished)
            if not unfinished:
                write_grid(self.run)
        except UserError as error:
            log.warning(f"note: {error}")

    def _result(self, path: Path) -> str:
        if path not in self._results:
            self._results[path] = data_url(read_strip(path).result)
        return self._results[path]

    def _write_page(self, trainer: L.Trainer, module: EditModule, unfinished: bool) -> None:
        metrics, validation = read_metrics(self.run), read_rows(self.run / "validation.csv")
        samples = sample_files(self.run)
        last = {name: read_strip(path) for name, path in samples[max(samples)].items()} if samples else {}
        rows = []
        for name, strip in last.items():
            results = [self._result(of_step[name]) for of_step in samples.values() if name in of_step]
            rows.append(
                {
                    "prompt": strip.prompt or name,
                    "controls": [data_url(control) for control in strip.controls],
                    "results": results,
                    "target": data_url(strip.target),
                    "size": "small" if max(strip.target.size) <= THUMBNAIL else "",
                }
            )
        config = self.run / "config.yaml"
        settings = OmegaConf.to_yaml(OmegaConf.load(config), resolve=False) if config.is_file() else ""
        step = trainer.global_step
        sampler = find_sampler(trainer)
        render(
            self.run / "report.html",
            title=self.run.name,
            subtitle=f"{without_secrets(module.repository_name)}, {module.adapter}, step {step} of {trainer.max_steps}",
            numbers=_numbers(metrics, validation),
            rows=rows,
            steps=sorted(samples),
            results=[row["results"] for row in rows],
            pictures_title="Held-out pictures" if self._holds_out else "Pictures of the training data",
            row_width=420 if not rows or rows[0]["size"] else 760,
            curves=curves(metrics, validation),
            commands=commands(module, self.run, sampler, next(iter(last.values()), None)),
            config=without_secrets(settings),
            unfinished=unfinished,
            **self._data,
        )


def _numbers(metrics: Sequence[Mapping[str, str]], validation: Sequence[Mapping[str, float]]) -> list[tuple[str, str]]:
    """What stands above all else."""
    numbers = []
    if validation:
        first, now = validation[0], validation[-1]
        for name in [column.removesuffix("_nothing") for column in now if column in first and "_nothing" in column]:
            beside = f"before {first[name]:.3g}, doing nothing {now[f'{name}_nothing']:.3g}"
            numbers.append((f"{name} ({beside})", f"{now[name]:.3g}"))
        numbers.append((f"validation loss (before {first['val_loss']:.3g})", f"{now['val_loss']:.3g}"))
    if metrics:
        speed = statistics.median(float(row["samples_per_second"]) for row in metrics)
        numbers.append(("samples a second", f"{speed:.3g}"))
        numbers.append(("GB at most", f"{float(metrics[-1]['peak_memory_gb']):.2f}"))
        numbers.append(("minutes", f"{float(metrics[-1]['seconds']) / 60:.1f}"))
    return numbers


def describe_data(data: Any, count: int) -> dict[str, Any]:
    """The page's part on the data: what there is, and its first samples."""
    sizes = ", ".join(f"{n} of {width}x{height}" for (width, height), n in data.size_counts().most_common(6))
    shown = data.pixels(count) if isinstance(data, PairsDataModule) else []
    thumbs = [
        {"pictures": [data_url(to_image(one), THUMBNAIL) for one in pictures(raw)], "caption": raw.prompts[0]}
        for raw in shown
    ]
    lines = [without_secrets(line) for line in (data.describe(), sizes, *data.notes)]
    return {"data_lines": lines, "thumbs": thumbs}


def find_sampler(trainer: L.Trainer) -> SampleImages | None:
    """The callback that makes pictures."""
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return next((callback for callback in callbacks if isinstance(callback, SampleImages)), None)


def commands(
    module: EditModule, run: Path, sampler: SampleImages | None, sample: Strip | None
) -> list[tuple[str, str]]:
    """How to use what was trained: here, and in diffusers."""
    assert module.adapter is not None
    prompt = sample.prompt if sample is not None and sample.prompt else "..."
    edits = module.condition_images.most != 0
    run_name = without_secrets(str(run))
    last = f"{run_name}/{module.adapter.folder}/last"
    is_lora = module.adapter.folder == "lora"
    weights = f"lora={run_name}" if is_lora else f"model.pretrained_model_name_or_path={last}"
    here = f"python predict.py {weights}{' image=PHOTO.png' if edits else ''} prompt={shlex.quote(prompt)}"
    base = without_secrets(module.components.repository_name) if is_lora else last
    base = "assets/shapes" if base == "embedded" else base
    width, height = sample.target.size if sample is not None else (1024, 1024)
    arguments = {"prompt": prompt, **module.call_arguments(width, height), **_sampling(sampler)}
    call = [f"    {name}={value!r}," for name, value in arguments.items()]
    lines = [
        "import torch",
        f"from diffusers import {module.pipeline_name}",
        *(["from diffusers.utils import load_image"] if edits else []),
        *(["from lightning_modules.rank_schedule import attach_rank_schedule"] if module.rank_gates else []),
        "",
        f"pipe = {module.pipeline_name}.from_pretrained({base!r}, dtype=torch.{str(module.base_dtype)[6:]})",
        *([f"pipe.load_lora_weights({last!r})"] if is_lora else []),
        *([f"attach_rank_schedule(pipe, {last!r})"] if module.rank_gates else []),
        "picture = pipe(",
        *(["    image=load_image('PHOTO.png'),"] if edits else []),
        *call,
        "    generator=torch.Generator().manual_seed(0),",
        ").images[0]",
        "picture.save('edited.png')",
    ]
    return [("Here", here), ("In diffusers", "\n".join(lines))]


def _sampling(sampler: SampleImages | None) -> dict[str, Any]:
    """The sample pictures' settings, as arguments of a pipeline."""
    if sampler is None:
        return {}
    sampling = sampler.sampling
    arguments: dict[str, Any] = {"num_inference_steps": sampling.num_inference_steps}
    if sampling.guidance_scale is not None:
        arguments["guidance_scale"] = sampling.guidance_scale
    if sampling.negative is not None:
        arguments |= {"true_cfg_scale": sampling.true_cfg_scale, "negative_prompt": sampling.negative}
    return arguments


def write_grid(run: Path) -> None:
    """grid.png: control, before, after and target of each sample, two samples a row."""
    samples = sample_files(run)
    if len(samples) < 2:
        return
    before, after = (
        {name: read_strip(path) for name, path in samples[step].items()} for step in (min(samples), max(samples))
    )
    rows = [[*s.controls[:1], before[name].result, s.result, s.target] for name, s in after.items() if name in before]
    side = max(max(part.size) for row in rows for part in row)
    scale = max(1, round(128 / side)) if side < 512 else 512 / side
    cell = round(side * scale) + 6
    columns = len(rows[0])
    names = ["control", "before", "after", "target"][-columns:]
    across = min(2, len(rows))
    grid = Image.new("RGB", (across * columns * cell + (across - 1) * 24, 20 + -(-len(rows) // across) * cell), "white")
    canvas = ImageDraw.Draw(grid)
    for number, row in enumerate(rows):
        left = number % across * (columns * cell + 24)
        for column, (part, name) in enumerate(zip(row, names, strict=True)):
            size = (round(part.width * scale), round(part.height * scale))
            resized = part.resize(size, Image.Resampling.NEAREST if scale > 1 else Image.Resampling.LANCZOS)
            grid.paste(resized, (left + column * cell + 3, 20 + number // across * cell + 3))
            canvas.text((left + column * cell + 3, 4), name, fill="black")
    save_png(grid, run / "grid.png")


def write_sweep(folder: Path, jobs: Sequence[Mapping[str, Any]], monitor: str, higher_is_better: bool) -> None:
    """report.html of a sweep: a row a job, the best first.

    Args:
        jobs: `job` (the name of its folder), `overrides`, and `value` (of `monitor`; None where it failed).
    """

    def order(job: Mapping[str, Any]) -> tuple[bool, float]:
        value = job["value"]
        return value is None, 0.0 if value is None else (-value if higher_is_better else value)

    shown = []
    for job in sorted(jobs, key=order):
        samples = sample_files(folder / job["job"])
        strips = [read_strip(path) for path in list(samples[max(samples)].values())[:4]] if samples else []
        shown.append(
            {
                "name": job["job"],
                "overrides": without_secrets(job["overrides"]),
                "value": "failed" if job["value"] is None else f"{job['value']:.4g}",
                "strips": [[data_url(one, THUMBNAIL) for one in (*s.controls, s.result, s.target)] for s in strips],
            }
        )
    render(
        folder / "report.html",
        title=folder.name,
        subtitle=f"{len(shown)} runs, by {monitor}",
        jobs=shown,
        monitor=monitor,
        picture_names="control, result, target",
    )
