"""The text and the pictures of one model card."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import lightning.pytorch as L
from omegaconf import OmegaConf

from datamodules.base import TrainingData
from datamodules.files import replacing
from lightning_modules.adapters.formats.lora_file import LoRAFile
from lightning_modules.adapters.formats.names import LayerNames
from lightning_modules.adapters.formats.readers import Reader, readers
from lightning_modules.adapters.formats.written import FORMATS
from lightning_modules.adapters.kinds import kind_of
from lightning_modules.edit_module import EditModule
from lightning_modules.pretrained.repository import EMBEDDED
from report.commands import Names, commands
from report.images import LARGEST, Strip, read_strip, sample_files, save_png, scaled, write_grid
from report.origin import Origin
from report.quoting import block, code, one_line, plain, shareable
from report.tables import metric_names, read_rows
from runs.run_folder import RunFolder, best_effort

TEMPLATES = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
TEMPLATES.filters.update(block=block, code=code, plain=plain)
GRID = "samples.png"
# Samples that a card shows.
MOST = 4
# What LoRAs of these pipelines need in ComfyUI.
COMFYUI_NOTES = {
    "FluxKontextPipeline": "With two or more condition images add the node FluxKontextMultiReferenceLatentMethod, set "
    'to "index": without it their positions differ from training.',
    "QwenImageEditPlusPipeline": "For Qwen-Image-Edit-2511, ComfyUI must be newer than 0.3.64.",
}


class Card(NamedTuple):
    """What a card is about.

    Attributes:
        model_name: the name of the model's YAML.
        repository: where the weights are uploaded to; None for nowhere.
        config: the run's config.yaml.
        origin: of the base.
        folder: of the weights, and
        step: after which they were written.
        seed: of the sample images; None without these.
        best_lines: sentences about the best weights of the run.
    """

    run: RunFolder
    module: EditModule
    model_name: str
    repository: str | None
    config: Any
    origin: Origin
    folder: Path
    step: int
    seed: int | None
    best_lines: list[str]

    def write(self, trainer: L.Trainer, path: Path) -> None:
        """Write the pictures, and then the text: what has a text is whole."""
        shown: int = 0
        strips: list[Strip] = []
        with best_effort(f"pictures in {path}"):
            shown, strips = self._write_pictures()
        template = TEMPLATES.from_string(Path(__file__).with_name("card.md").read_text(encoding="utf-8"))
        data = TrainingData.of(trainer)
        words = {**self._what(trainer), **self._learned_from(data), **self._use(strips)}
        words |= self._pictures(data, shown, strips) | self._figures()
        words |= {"settings": self._settings(trainer.world_size), "origin": self.origin, "best_lines": self.best_lines}
        words["metadata"] = self._metadata(words["trigger_word"] or words["caption"], strips)
        with replacing(path) as temporary:
            temporary.write_text(template.render(words), encoding="utf-8")

    @property
    def _is_lora(self) -> bool:
        assert self.module.adapter is not None
        return bool(self.module.adapter.loading_code("", self.module.pipeline_name))

    @property
    def _edits(self) -> bool:
        return self.module.condition_images.most != 0

    def _write_pictures(self) -> tuple[int, list[Strip]]:
        """GRID and the results alone; the step of these, and the samples. None without pictures of the base as well."""
        if not write_grid(self.run, self.folder / GRID, self.step, MOST):
            return 0, []
        samples = {at: files for at, files in sample_files(self.run).items() if at <= self.step}
        # Images of sample_root are not published.
        strips = [one for path in samples[max(samples)].values() if (one := read_strip(path)).target][:MOST]
        for number, strip in enumerate(strips, start=1):
            result = scaled(strip.result, min(1.0, LARGEST / max(strip.result.size)))
            save_png(result, self.folder / _result_name(number))
        return max(samples), [strip._replace(prompt=one_line(strip.prompt)) for strip in strips]

    def _metadata(self, prompt: str, strips: list[Strip]) -> str:
        """The YAML, without the lines around it."""
        from huggingface_hub import ModelCardData

        bases = self.origin.repositories
        lora = ["lora", "template:diffusion-lora"] if self._is_lora else []
        widget = [
            {"text": strip.prompt or "-", "output": {"url": _result_name(number)}}
            for number, strip in enumerate(strips, start=1)
        ]
        relation = "adapter" if self._is_lora else "finetune"
        return ModelCardData(
            base_model=bases[0] if len(bases) == 1 else bases or None,
            base_model_relation=relation if bases else None,
            library_name="diffusers",
            pipeline_tag="image-to-image" if self._edits else "text-to-image",
            tags=["diffusers", *lora, *(["t-lora"] if self.module.rank_gates else [])],
            instance_prompt=prompt or None,
            widget=widget or None,
            license=self.origin.licence.get("license"),
            license_name=self.origin.licence.get("license_name"),
            license_link=self.origin.licence.get("license_link"),
        ).to_yaml()

    def _what(self, trainer: L.Trainer) -> dict[str, Any]:
        """The first sentences."""
        adapter = str(self.module.adapter)
        return {
            "title": self.repository.rpartition("/")[2] if self.repository else self.run.path.absolute().name,
            "adapter": adapter[0].upper() + adapter[1:],
            "edits": self._edits,
            "step": self.step,
            "steps": trainer.max_steps,
            "best": self.folder.name == "best",
        }

    def _learned_from(self, data: TrainingData) -> dict[str, Any]:
        """What the data says."""
        captions = data.captions().most_common()
        return {
            "caption": one_line(captions[0][0]) if captions else "",
            "captions": len(captions),
            "trigger_word": one_line(str(OmegaConf.select(self.config, "data.trigger_word") or "")),
            "noun": "instruction" if self._edits else "caption",
        }

    def _pictures(self, data: TrainingData, step: int, strips: list[Strip]) -> dict[str, Any]:
        """What the picture shows."""
        control = "Control, before" if strips and strips[0].controls else "Before"
        pictures = "held-out samples" if data.validation is not None else "samples of the training data"
        return {"grid": GRID if strips else "", "columns": f"{control}, after and target", "shown_step": step} | {
            "pictures": pictures
        }

    def _figures(self) -> dict[str, Any]:
        """Of validation: each metric at first, now, and of doing nothing."""
        rows = [row for row in read_rows(self.run.validation) if row["step"] <= self.step]
        if not rows:
            return {"metrics": []}
        first, now = rows[0], rows[-1]
        columns = [f"step {int(first['step'])}", f"step {int(now['step'])}", "doing nothing"]
        figures = [["validation loss", _figure(first, "val_loss"), _figure(now, "val_loss"), ""]]
        for name in metric_names(now):
            figures.append([name, _figure(first, name), _figure(now, name), _figure(now, f"{name}_nothing")])
        if not any(row[-1] for row in figures):  # no picture is edited
            columns, figures = columns[:-1], [row[:-1] for row in figures]
        return {"metrics": figures, "metric_columns": columns}

    def _settings(self, processes: int) -> list[tuple[str, Any]]:
        """How it was trained: the name and the value of each setting that it has."""
        assert self.module.adapter is not None

        def setting(key: str) -> Any:
            return shareable(OmegaConf.select(self.config, key))

        adapter, tokens = self.module.adapter.metadata(), setting("data.max_tokens_per_batch")
        batch = (setting("data.batch_size") or 1) * (setting("trainer.accumulate_grad_batches") or 1) * processes
        ema = self.module.optimization.ema
        dtype, precision = str(self.module.base.dtype).removeprefix("torch."), self.module.base.source.precision
        rows = {
            "optimizer steps": self.step,
            "optimizer": str(setting("optimizer._target_") or "").rpartition(".")[2] or None,
            "learning rate": setting("optimizer.lr"),
            "schedule": self.module.optimization.schedule,
            "objective": (self.module.objective and self.module.objective.chosen) or None,
            "half-life of the EMA in samples": None if ema is None or ema.sample_with == "raw" else ema.half_life,
            "samples a step": None if tokens else batch,
            "rank": adapter.get("rank"),
            "alpha": adapter.get("alpha"),
            "resolution": setting("data.resolution") or self.module.geometry.resolution,
            "precision of the base": dtype if precision == dtype else f"{dtype}, its linear layers {precision}",
            "training adapter": setting("model.training_adapter"),
            "seed": setting("seed"),
        }
        return [(name, value) for name, value in rows.items() if value is not None]

    def _use(self, strips: list[Strip]) -> dict[str, Any]:
        """How to use it, by names that hold on any machine."""
        assert self.module.adapter is not None
        is_best, gated = self.folder.name == "best", bool(self.module.rank_gates)
        schedule = self.module.adapter.metadata()["rank_schedule"] if gated else {"kind": "constant"}
        root = self.repository.rpartition("/")[2] if self.repository else "FOLDER"
        place = f"{root}/best" if self.repository and is_best else root
        # The schedule is read from a file on the machine, and a subfolder would be named otherwise.
        weights = self.repository if self.repository and not gated and not is_best else place
        arguments = self.module.adapter.predict_arguments(place, self.model_name)
        of_run = f"/{self.module.adapter.folder}/last"
        arguments = {key: value.removesuffix(of_run) for key, value in arguments.items()}
        names = Names(arguments, weights, self.origin.shown)
        return {
            "repository": self.repository,
            "root": root,
            "place": place,
            "commands": commands(self.module, names, self.seed, strips[0] if strips else None),
            "comfyui": self._in_comfyui() if self._is_lora and self.module.base.name != EMBEDDED else None,
            "comfyui_note": COMFYUI_NOTES.get(self.module.pipeline_name, ""),
            "file": next((path.name for path in self.folder.glob("*.safetensors")), ""),
            "schedule": None if schedule["kind"] == "constant" else schedule,
            "slider": self.module.objective is not None and len(self.module.objective.scales) > 1,
        }

    def _in_comfyui(self) -> Reader:
        """What ComfyUI makes of the file."""
        [path] = self.folder.glob("*.safetensors")
        file, names = LoRAFile(path), LayerNames.of(self.module.base)
        layers = [layer for one in file.check(names, self.module.base.name).values() for layer in one.layers]
        dora, kind = any("magnitude" in parts for parts in file.parts.values()), kind_of(file.empty.values())
        found = readers(FORMATS["diffusers"], names, layers, self.module.pipeline_name, dora, kind=kind)
        return next(one for one in found if one.program == "ComfyUI")


def _result_name(number: int) -> str:
    """The file of a sample's result."""
    return f"sample-{number}.png"


def _figure(row: Mapping[str, float], name: str) -> str:
    return f"{row[name]:.4g}" if name in row else ""
