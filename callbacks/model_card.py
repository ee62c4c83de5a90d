"""Model cards alongside the weights of a run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2
import lightning.pytorch as L
from omegaconf import OmegaConf

from callbacks import find_callback
from callbacks.lora_checkpoint import LoRACheckpoint
from callbacks.sample_images import SampleImages
from callbacks.validation import Validation
from datamodules.files import replacing
from datamodules.pairs import PairsDataModule
from lightning_modules.edit_module import EditModule
from lightning_modules.lora_files.compatibility import Reader, readers
from lightning_modules.lora_files.kinds import common_kind
from lightning_modules.lora_files.reading import LoRAFile
from lightning_modules.pretrained.repository import EMBEDDED
from lightning_modules.timing import NOT_TRAINING
from report.commands import Names, commands
from report.images import LARGEST, Strip, read_strip, sample_files, save_png, scaled, write_grid
from report.origin import Origin
from report.quoting import block, code, one_line, plain, shareable
from report.tables import metric_names, read_validation
from runs.run_folder import RunFolder, best_effort

README = "README.md"
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


class ModelCard(L.Callback):
    """Write README.md, with images, to each folder of weights that has none or an older one; at the end to all.

    Args:
        repository: destination of the upload, None without one.
    """

    def __init__(self, output_dir: str, model_name: str, repository: str | None) -> None:
        self.run = RunFolder(output_dir)
        self.model_name = model_name
        self.repository = repository
        self._origin: Origin | None = None
        self._seen: tuple[int, int] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, EditModule)
        if trainer.is_global_zero:
            self._origin = Origin.of(pl_module.base, self.model_name)

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        keeper, sampler = find_callback(trainer, LoRACheckpoint), find_callback(trainer, SampleImages)
        seen = -1 if keeper is None else keeper.saved_step, -1 if sampler is None else sampler.sampled_step
        if seen != self._seen:
            self._seen = seen
            self._write(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._write(trainer, pl_module, again=("last", "best"))

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._write(trainer, pl_module)

    def _write(self, trainer: L.Trainer, module: L.LightningModule, again: tuple[str, ...] = ()) -> None:
        assert isinstance(module, EditModule)
        if self._origin is None or module.transformer is None:  # another process, or a run that did not start
            return
        with module.base.timer.stage(NOT_TRAINING), best_effort(README):
            for folder, step in self._weights(trainer, module).items():
                with best_effort(f"{README} in {folder}"):
                    if is_outdated(folder) or (folder.name in again and (folder / README).is_file()):
                        self._write_card(trainer, module, folder, step)

    def _weights(self, trainer: L.Trainer, module: EditModule) -> dict[Path, int]:
        """Return the folders of weights that images are sampled with, and the step of each."""
        assert module.adapter is not None
        found = {folder: step for step, folder in self.run.saved_steps(module.adapter.folder).items()}
        keeper, validation = find_callback(trainer, LoRACheckpoint), find_callback(trainer, Validation)
        if keeper is not None:
            found[self.run.weights(module.adapter.folder, "last")] = keeper.saved_step
        if validation is not None and (row := validation.best()) is not None:
            found[self.run.weights(module.adapter.folder, "best")] = int(row["step"])
        return found

    def _write_card(self, trainer: L.Trainer, module: EditModule, folder: Path, step: int) -> None:
        """Write the images and then the text, so that a card with a text is complete."""
        data, path = PairsDataModule.of(trainer), folder / README
        sampler, validation = find_callback(trainer, SampleImages), find_callback(trainer, Validation)
        assert module.adapter is not None
        assert self._origin is not None
        is_lora = bool(module.adapter.loading_code("", module.pipeline_name))
        seed = None if sampler is None else sampler.seed
        config = OmegaConf.load(self.run.config) if self.run.config.is_file() else OmegaConf.create()
        shown: int = 0
        strips: list[Strip] = []
        with best_effort(f"images in {path}"):
            shown, strips = self._write_images(folder, step)
        edits, captions = module.condition_images.most != 0, data.captions().most_common()
        caption = one_line(captions[0][0]) if captions else ""
        trigger_word = one_line(str(OmegaConf.select(config, "data.trigger_word") or ""))
        template = TEMPLATES.get_template("model_card.md")
        text = template.render(
            **self._use(module, self._origin, folder, strips, seed),
            metadata=_metadata(module, self._origin, trigger_word or caption, strips, is_lora),
            title=self.repository.rpartition("/")[2] if self.repository else self.run.path.absolute().name,
            adapter=str(module.adapter),
            edits=edits,
            step=step,
            steps=trainer.max_steps,
            best=folder.name == "best",
            caption=caption,
            captions=len(captions),
            trigger_word=trigger_word,
            grid=GRID if strips else "",
            columns=f"{'Control, before' if strips and strips[0].controls else 'Before'}, after and target",
            shown_step=shown,
            held_out=data.validation is not None,
            metrics=self._metrics(step),
            best_lines=[] if validation is None else validation.best_lines(module.adapter.folder),
            settings=_settings(module, config, step, trainer.world_size),
            origin=self._origin,
            comfyui=_in_comfyui(module, folder) if is_lora and module.base.name != EMBEDDED else None,
            comfyui_note=COMFYUI_NOTES.get(module.pipeline_name, ""),
        )
        with replacing(path) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def _write_images(self, folder: Path, step: int) -> tuple[int, list[Strip]]:
        """Write GRID and the results; return the step of the results and the samples, none without base images."""
        if not write_grid(self.run, folder / GRID, step, MOST):
            return 0, []
        samples = {at: files for at, files in sample_files(self.run).items() if at <= step}
        # Images of sample_root are not published.
        strips = [one for path in samples[max(samples)].values() if (one := read_strip(path)).target][:MOST]
        for index, strip in enumerate(strips, start=1):
            result = scaled(strip.result, min(1.0, LARGEST / max(strip.result.size)))
            save_png(result, folder / f"sample-{index}.png")
        return max(samples), [strip._replace(prompt=one_line(strip.prompt)) for strip in strips]

    def _metrics(self, step: int) -> list[list[str]]:
        """Return the table of validation: each metric at the first and at this step, and of doing nothing."""
        rows = [row for row in read_validation(self.run.validation) if row["step"] <= step]
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

    def _use(
        self, module: EditModule, origin: Origin, folder: Path, strips: list[Strip], seed: int | None
    ) -> dict[str, Any]:
        """Return the commands that use the weights, with names that are valid on any machine."""
        assert module.adapter is not None
        is_best, gated = folder.name == "best", bool(module.rank_gates)
        schedule = module.adapter.metadata()["rank_schedule"] if gated else {"kind": "constant"}
        root = self.repository.rpartition("/")[2] if self.repository else "FOLDER"
        place = f"{root}/best" if self.repository and is_best else root
        # The schedule is read from a local file, and a subfolder of a repository has another form.
        weights = self.repository if self.repository and not gated and not is_best else place
        of_run = f"/{module.adapter.folder}/last"
        arguments = module.adapter.predict_arguments(place, self.model_name)
        arguments = {key: value.removesuffix(of_run) for key, value in arguments.items()}
        names = Names(arguments, weights, origin.shown)
        return {
            "repository": self.repository,
            "root": root,
            "place": place,
            "commands": commands(module, names, seed, strips[0] if strips else None),
            "file": next((path.name for path in folder.glob("*.safetensors")), ""),
            "schedule": None if schedule["kind"] == "constant" else schedule,
            "slider": module.objective is not None and len(module.objective.scales) > 1,
        }


def _metadata(module: EditModule, origin: Origin, prompt: str, strips: list[Strip], is_lora: bool) -> str:
    """Return the YAML header, without its delimiters."""
    from huggingface_hub import ModelCardData

    bases, licence = origin.repositories, origin.licence
    lora = ["lora", "template:diffusion-lora"] if is_lora else []
    widget = [
        {"text": strip.prompt or "-", "output": {"url": f"sample-{index}.png"}}
        for index, strip in enumerate(strips, start=1)
    ]
    relation = "adapter" if is_lora else "finetune"
    return ModelCardData(
        base_model=bases[0] if len(bases) == 1 else bases or None,
        base_model_relation=relation if bases else None,
        library_name="diffusers",
        pipeline_tag="image-to-image" if module.condition_images.most != 0 else "text-to-image",
        tags=["diffusers", *lora, *(["t-lora"] if module.rank_gates else [])],
        instance_prompt=prompt or None,
        widget=widget or None,
        license=licence.get("license"),
        license_name=licence.get("license_name"),
        license_link=licence.get("license_link"),
    ).to_yaml()


def _settings(module: EditModule, config: Any, step: int, processes: int) -> list[tuple[str, Any]]:
    """Return names and values of the settings of the training."""
    assert module.adapter is not None

    def setting(key: str) -> Any:
        return shareable(OmegaConf.select(config, key))

    adapter, ema = module.adapter.metadata(), module.optimization.ema
    batch = (setting("data.batch_size") or 1) * (setting("trainer.accumulate_grad_batches") or 1) * processes
    dtype, precision = str(module.base.dtype).removeprefix("torch."), module.base.source.precision
    rows = {
        "optimizer steps": step,
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


def _in_comfyui(module: EditModule, folder: Path) -> Reader:
    """Return whether and how ComfyUI reads the file."""
    [path] = folder.glob("*.safetensors")
    file, names = LoRAFile(path), module.base.layer_names
    layers = [layer for one in file.match(names, module.base.name).values() for layer in one.layers]
    found = readers("diffusers", names, layers, module.pipeline_name, common_kind(file.empty.values()))
    return next(one for one in found if one.program == "ComfyUI")


def is_outdated(folder: Path) -> bool:
    """Return whether a folder with weights has no card, or one that is older than they are."""
    files = [path for path in folder.rglob("[!.]*") if path.is_file()]
    weights = [path.stat().st_mtime_ns for path in files if path.name != README and path.suffix != ".png"]
    card = folder / README
    return bool(weights) and (not card.is_file() or card.stat().st_mtime_ns < max(weights))
