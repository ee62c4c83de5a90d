"""A run on one page: report.html, self-contained, to be looked at while it is written and long after."""

import logging
import shlex
from pathlib import Path
from typing import Any

import lightning.pytorch as L
from omegaconf import OmegaConf

from callbacks.image_writer import to_image
from callbacks.page import (
    THUMBNAIL,
    Strip,
    curves,
    data_url,
    headline,
    read_metrics,
    read_strip,
    render,
    sample_files,
    shareable,
    without_secrets,
    write_grid,
)
from callbacks.sample_images import SampleImages
from callbacks.validation import read_rows
from datamodules.errors import UserError
from datamodules.pairs import PairsDataModule
from datamodules.pixels import pictures
from lightning_modules.base import EditModule
from lightning_modules.components import ASIDE

log = logging.getLogger("retouch")


class Report(L.Callback):
    """Writes report.html at the start, after each set of sample pictures, and at the end.

    Args:
        output_dir: the run's folder.
        model_name: the name of the model's YAML, for the commands.
        preview_count: samples of the data that it shows.
    """

    def __init__(self, output_dir: str, model_name: str, preview_count: int) -> None:
        self.run = Path(output_dir)
        self.model_name = model_name
        self.preview_count = preview_count
        self._data: dict[str, Any] = {}
        self._holds_out = False
        self._results: dict[Path, str] = {}  # as they stand in the page
        self._sampled_step = -1

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, EditModule)
        if trainer.is_global_zero:
            data: Any = trainer.datamodule  # type: ignore[attr-defined]
            with pl_module.stopwatch.stage(ASIDE):
                self._data, self._holds_out = describe_data(data, self.preview_count), data.validation is not None
                self._write(trainer, pl_module, unfinished=True)
        sampler = SampleImages.of(trainer)
        self._sampled_step = -1 if sampler is None else sampler.sampled_step

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, EditModule)
        sampler = SampleImages.of(trainer)
        if sampler is None or not trainer.is_global_zero or sampler.sampled_step in (self._sampled_step, -1):
            return
        self._sampled_step = sampler.sampled_step
        with pl_module.stopwatch.stage(ASIDE):
            self._write(trainer, pl_module, unfinished=True)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, EditModule)
        if trainer.is_global_zero and pl_module.transformer is not None:
            self._write(trainer, pl_module, unfinished=False)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """A page that reloads itself must not wait for what will not come."""
        assert isinstance(pl_module, EditModule)
        if trainer.is_global_zero and pl_module.transformer is not None and self._data:
            self._write(trainer, pl_module, unfinished=False)

    def _write(self, trainer: L.Trainer, module: EditModule, unfinished: bool) -> None:
        """A page that cannot be written must not cost the run."""
        try:
            self._write_page(trainer, module, unfinished)
            if not unfinished:
                write_grid(self.run)
        except (UserError, OSError) as error:
            log.warning(f"note: no report: {error}")

    def _result(self, path: Path) -> str:
        if path not in self._results:
            self._results[path] = data_url(read_strip(path).result)
        return self._results[path]

    def _write_page(self, trainer: L.Trainer, module: EditModule, unfinished: bool) -> None:
        metrics, validation = read_metrics(self.run), read_rows(self.run / "validation.csv")
        samples = {step: files for step, files in sample_files(self.run).items() if step <= trainer.global_step}
        last = {name: read_strip(path) for name, path in samples[max(samples)].items()} if samples else {}
        rows = []
        for name, strip in last.items():
            results = [self._result(of_step[name]) if name in of_step else None for of_step in samples.values()]
            rows.append(
                {
                    "prompt": strip.prompt,
                    "controls": [data_url(control) for control in strip.controls],
                    "results": results,
                    "target": data_url(strip.target),
                    "size": "small" if max(strip.target.size) <= THUMBNAIL else "",
                }
            )
        config = self.run / "config.yaml"
        settings: Any = OmegaConf.to_container(OmegaConf.load(config)) if config.is_file() else {}
        step = trainer.global_step
        sampler = SampleImages.of(trainer)
        render(
            self.run / "report.html",
            title=self.run.name,
            subtitle=f"{without_secrets(module.repository_name)}, {module.adapter}, step {step} of {trainer.max_steps}",
            numbers=headline(metrics, validation),
            rows=rows,
            steps=sorted(samples),
            results=[row["results"] for row in rows],
            pictures_title="Held-out pictures" if self._holds_out else "Pictures of the training data",
            row_width=420 if not rows or rows[0]["size"] else 760,
            curves=curves(metrics, validation),
            commands=commands(module, self.run, self.model_name, sampler, next(iter(last.values()), None)),
            config=OmegaConf.to_yaml(shareable(settings)) if settings else "",
            unfinished=unfinished,
            **self._data,
        )


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


def commands(
    module: EditModule, run: Path, model_name: str, sampler: SampleImages | None, sample: Strip | None
) -> list[tuple[str, str]]:
    """How to make the sample pictures of what was trained: here, and in diffusers."""
    assert module.adapter is not None
    prompt = sample.prompt if sample is not None and sample.prompt else "..."
    edits = module.condition_images.most != 0
    run_name = without_secrets(str(run))
    last = f"{run_name}/{module.adapter.folder}/last"
    is_lora = module.adapter.folder == "lora"
    seed, sampling = (0, {}) if sampler is None else (sampler.seed, _sampling(sampler))
    here = [
        f"python predict.py lora={run_name}"
        if is_lora
        else f"python predict.py model={model_name} model.pretrained_model_name_or_path={last}",
        *(["image=PHOTO.png"] if edits else []),
        f"prompt={shlex.quote(prompt)}",
        *(f"{name}={shlex.quote(str(value))}" for name, value in {**sampling, "seed": seed}.items()),
    ]
    controls = 0 if sample is None else len(sample.controls)
    if controls > 1:
        several = ", ".join(f"load_image('PHOTO_{number}.png')" for number in range(1, controls + 1))
    base = without_secrets(module.components.repository_name) if is_lora else last
    base = "assets/shapes" if base == "embedded" else base
    width, height = sample.target.size if sample is not None else (1024, 1024)
    arguments = {"prompt": prompt, **module.call_arguments(width, height), **sampling}
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
        *([f"    image=[{several}],"] if controls > 1 else ["    image=load_image('PHOTO.png'),"] if edits else []),
        *call,
        f"    generator=torch.Generator().manual_seed({seed}),",
        ").images[0]",
        "picture.save('edited.png')",
    ]
    here_line = ("Here", " ".join(here))
    if module.transformer_name != module.repository_name:
        lines.insert(0, f"# Its transformer is that of {without_secrets(module.transformer_name)}.")
    # The stock Kontext pipeline takes one condition image.
    return (
        [here_line]
        if controls > 1 and module.condition_images.most is None
        else [
            here_line,
            ("In diffusers", "\n".join(lines)),
        ]
    )


def _sampling(sampler: SampleImages) -> dict[str, Any]:
    """The sample pictures' settings, as arguments of a pipeline."""
    sampling = sampler.sampling
    arguments: dict[str, Any] = {"num_inference_steps": sampling.num_inference_steps}
    if sampling.guidance_scale is not None:
        arguments["guidance_scale"] = sampling.guidance_scale
    if sampling.negative is not None:
        arguments |= {"true_cfg_scale": sampling.true_cfg_scale, "negative_prompt": sampling.negative}
    return arguments
