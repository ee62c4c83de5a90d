"""Text and images of a model card."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import lightning.pytorch as L
from omegaconf import OmegaConf

from datamodules.base import TrainingData
from datamodules.files import replacing
from lightning_modules.edit_module import EditModule
from lightning_modules.lora_files.kinds import common_kind
from lightning_modules.lora_files.programs import Reader, readers
from lightning_modules.lora_files.reading import LoRAFile
from lightning_modules.pretrained.repository import EMBEDDED
from report.commands import Names, commands
from report.images import LARGEST, Strip, read_strip, sample_files, save_png, scaled, write_grid
from report.origin import Origin
from report.quoting import block, code, one_line, plain, shareable
from report.tables import metric_names, read_validation
from runs.run_folder import RunFolder, best_effort

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters.update(block=block, code=code, plain=plain)
GRID = "samples.png"
# Samples on a card.
MOST = 4
# Requirements of LoRAs in ComfyUI, by pipeline.
COMFYUI_NOTES = {
    "FluxKontextPipeline": "With two or more condition images add the node FluxKontextMultiReferenceLatentMethod, set "
    'to "index": without it their positions differ from training.',
    "QwenImageEditPlusPipeline": "For Qwen-Image-Edit-2511, ComfyUI must be newer than 0.3.64.",
}


class Card(NamedTuple):
    """A model card of weights.

    Attributes:
        model_name: name of the model's YAML.
        repository: destination of the upload, None without one.
        config: the run's config.yaml.
        origin: of the base.
        folder: of the weights.
        step: after which the weights were written.
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
        """Write the images and then the text, so that a card with a text is complete."""
        module, data = self.module, TrainingData.of(trainer)
        assert module.adapter is not None
        shown: int = 0
        strips: list[Strip] = []
        with best_effort(f"images in {path}"):
            shown, strips = self._write_images()
        edits, captions = module.condition_images.most != 0, data.captions().most_common()
        caption = one_line(captions[0][0]) if captions else ""
        trigger_word = one_line(str(OmegaConf.select(self.config, "data.trigger_word") or ""))
        template = TEMPLATES.get_template("card.md")
        text = template.render(
            **self._use(strips),
            metadata=self._metadata(trigger_word or caption, strips, edits),
            title=self.repository.rpartition("/")[2] if self.repository else self.run.path.absolute().name,
            adapter=str(module.adapter),
            edits=edits,
            step=self.step,
            steps=trainer.max_steps,
            best=self.folder.name == "best",
            caption=caption,
            captions=len(captions),
            trigger_word=trigger_word,
            grid=GRID if strips else "",
            columns=f"{'Control, before' if strips and strips[0].controls else 'Before'}, after and target",
            shown_step=shown,
            held_out=data.validation is not None,
            metrics=self._metrics(),
            best_lines=self.best_lines,
            settings=self._settings(trainer.world_size),
            origin=self.origin,
        )
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")

    @property
    def _is_lora(self) -> bool:
        assert self.module.adapter is not None
        return bool(self.module.adapter.loading_code("", self.module.pipeline_name))

    def _write_images(self) -> tuple[int, list[Strip]]:
        """Write GRID and the results; return the step of the results and the samples, none without base images."""
        if not write_grid(self.run, self.folder / GRID, self.step, MOST):
            return 0, []
        samples = {at: files for at, files in sample_files(self.run).items() if at <= self.step}
        # Images of sample_root are not published.
        strips = [one for path in samples[max(samples)].values() if (one := read_strip(path)).target][:MOST]
        for index, strip in enumerate(strips, start=1):
            result = scaled(strip.result, min(1.0, LARGEST / max(strip.result.size)))
            save_png(result, self.folder / f"sample-{index}.png")
        return max(samples), [strip._replace(prompt=one_line(strip.prompt)) for strip in strips]

    def _metadata(self, prompt: str, strips: list[Strip], edits: bool) -> str:
        """Return the YAML header, without its delimiters."""
        from huggingface_hub import ModelCardData

        bases, licence = self.origin.repositories, self.origin.licence
        lora = ["lora", "template:diffusion-lora"] if self._is_lora else []
        widget = [
            {"text": strip.prompt or "-", "output": {"url": f"sample-{index}.png"}}
            for index, strip in enumerate(strips, start=1)
        ]
        relation = "adapter" if self._is_lora else "finetune"
        return ModelCardData(
            base_model=bases[0] if len(bases) == 1 else bases or None,
            base_model_relation=relation if bases else None,
            library_name="diffusers",
            pipeline_tag="image-to-image" if edits else "text-to-image",
            tags=["diffusers", *lora, *(["t-lora"] if self.module.rank_gates else [])],
            instance_prompt=prompt or None,
            widget=widget or None,
            license=licence.get("license"),
            license_name=licence.get("license_name"),
            license_link=licence.get("license_link"),
        ).to_yaml()

    def _metrics(self) -> list[list[str]]:
        """Return the table of validation: each metric at the first and at this step, and of doing nothing."""
        rows = [row for row in read_validation(self.run.validation) if row["step"] <= self.step]
        if not rows:
            return []
        first, now = rows[0], rows[-1]

        def shown(row: Mapping[str, float], name: str) -> str:
            return f"{row[name]:.4g}" if name in row else ""

        table = [["", f"step {int(first['step'])}", f"step {int(now['step'])}", "doing nothing"]]
        table.append(["validation loss", shown(first, "val_loss"), shown(now, "val_loss"), ""])
        for name in metric_names(now):
            table.append([name, shown(first, name), shown(now, name), shown(now, f"{name}_nothing")])
        return table if any(row[-1] for row in table[1:]) else [row[:-1] for row in table]

    def _settings(self, processes: int) -> list[tuple[str, Any]]:
        """Return names and values of the settings of the training."""
        module = self.module
        assert module.adapter is not None

        def setting(key: str) -> Any:
            return shareable(OmegaConf.select(self.config, key))

        adapter, ema = module.adapter.metadata(), module.optimization.ema
        batch = (setting("data.batch_size") or 1) * (setting("trainer.accumulate_grad_batches") or 1) * processes
        dtype, precision = str(module.base.dtype).removeprefix("torch."), module.base.source.precision
        rows = {
            "optimizer steps": self.step,
            "optimizer": str(setting("optimizer._target_") or "").rpartition(".")[2] or None,
            "learning rate": setting("optimizer.lr"),
            "schedule": module.optimization.schedule,
            "objective": (module.objective and module.objective.chosen) or None,
            "half-life of the EMA in samples": None if ema is None or ema.sample_with == "raw" else ema.half_life,
            "samples a step": None if setting("data.max_tokens_per_batch") else batch,
            "rank": adapter.get("rank"),
            "alpha": adapter.get("alpha"),
            "resolution": setting("data.resolution") or module.geometry.resolution,
            "precision of the base": dtype if precision == dtype else f"{dtype}, its linear layers {precision}",
            "training adapter": setting("model.training_adapter"),
            "seed": setting("seed"),
        }
        return [(name, value) for name, value in rows.items() if value is not None]

    def _use(self, strips: list[Strip]) -> dict[str, Any]:
        """Return the commands that use the weights, with names that are valid on any machine."""
        module = self.module
        assert module.adapter is not None
        is_best, gated = self.folder.name == "best", bool(module.rank_gates)
        schedule = module.adapter.metadata()["rank_schedule"] if gated else {"kind": "constant"}
        root = self.repository.rpartition("/")[2] if self.repository else "FOLDER"
        place = f"{root}/best" if self.repository and is_best else root
        # The schedule is read from a local file, and a subfolder of a repository has another form.
        weights = self.repository if self.repository and not gated and not is_best else place
        of_run = f"/{module.adapter.folder}/last"
        arguments = module.adapter.predict_arguments(place, self.model_name)
        arguments = {key: value.removesuffix(of_run) for key, value in arguments.items()}
        names = Names(arguments, weights, self.origin.shown)
        return {
            "repository": self.repository,
            "root": root,
            "place": place,
            "commands": commands(module, names, self.seed, strips[0] if strips else None),
            "comfyui": self._in_comfyui() if self._is_lora and module.base.name != EMBEDDED else None,
            "comfyui_note": COMFYUI_NOTES.get(module.pipeline_name, ""),
            "file": next((path.name for path in self.folder.glob("*.safetensors")), ""),
            "schedule": None if schedule["kind"] == "constant" else schedule,
            "slider": module.objective is not None and len(module.objective.scales) > 1,
        }

    def _in_comfyui(self) -> Reader:
        """Return whether and how ComfyUI reads the file."""
        [path] = self.folder.glob("*.safetensors")
        file, names = LoRAFile(path), self.module.base.layer_names
        layers = [layer for one in file.match(names, self.module.base.name).values() for layer in one.layers]
        dora, kind = any("magnitude" in parts for parts in file.parts.values()), common_kind(file.empty.values())
        found = readers("diffusers", names, layers, self.module.pipeline_name, kind, dora)
        return next(one for one in found if one.program == "ComfyUI")
