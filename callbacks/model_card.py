"""Model cards alongside the weights of a run."""

import logging
from collections import Counter
from pathlib import Path
from typing import Any

import lightning.pytorch as L

from callbacks import find_callback
from callbacks.progress import training_facts
from callbacks.sample_images import SampleImages
from callbacks.validation import Validation
from datamodules.images.resizing import has_edits
from datamodules.pairs import PairsDataModule
from foundation.errors import listing
from foundation.files import link_below
from lightning_modules.edit_module import EditModule
from lightning_modules.lora_files.compatibility import Reader, in_comfyui
from lightning_modules.lora_files.kinds import common_kind
from lightning_modules.lora_files.reading import LoRAFile
from lightning_modules.pretrained.repository import EMBEDDED
from lightning_modules.timing import NOT_TRAINING
from report.commands import Names, commands
from report.images import LARGEST, Strip, last_strips, sample_files, save_png, scaled, write_grid
from report.origin import Origin
from report.page import render
from report.quoting import one_line, plain, without_secrets
from report.tables import changes, read_validation
from runs.run_folder import RunFolder, best_effort

log = logging.getLogger("retouch")

README = "README.md"
GRID = "samples.png"
# Samples on a card.
MOST = 4
# Requirements of LoRAs in ComfyUI, by pipeline.
COMFYUI_NOTES = {
    "FluxKontextPipeline": "With two or more condition images add the node FluxKontextMultiReferenceLatentMethod, set "
    'to "index": without it their positions differ from training.',
    "Krea2Pipeline": "With references it needs the nodes of its edit_scheme: ComfyUI-Krea2-Ostris-Edit for after, "
    "comfyui-krea2edit for before.",
    "QwenImageEditPlusPipeline": "For Qwen-Image-Edit-2511, ComfyUI must be newer than 0.3.64.",
}


class ModelCard(L.Callback):
    """Write README.md, with images, to the folders `last` and `best` when training ends.

    Args:
        repository: destination of the upload, None without one.
        trigger_word: trigger word of the captions, None without one.
    """

    def __init__(self, output_dir: str, model_name: str, repository: str | None, trigger_word: str | None) -> None:
        self.run = RunFolder(output_dir)
        self.model_name = model_name
        self.repository = repository
        self.trigger_word = one_line(trigger_word or "")

    def on_train_end(self, trainer: L.Trainer, pl_module: EditModule) -> None:
        validation, steps = find_callback(trainer, Validation), {"last": trainer.global_step}
        if validation is not None and (row := validation.best()) is not None:
            steps["best"] = int(row["step"])
        for name, step in steps.items() if trainer.is_global_zero else ():
            folder = self.run.weights(pl_module.adapter.folder, name)
            if folder.is_dir():
                with pl_module.base.timer.stage(NOT_TRAINING), best_effort(f"{README} in {folder}"):
                    self._write_card(trainer, pl_module, folder, step)

    def _write_card(self, trainer: L.Trainer, module: EditModule, folder: Path, step: int) -> None:
        data, origin = PairsDataModule.of(trainer), Origin.of(module.base, self.model_name)
        sampler, validation = find_callback(trainer, SampleImages), find_callback(trainer, Validation)
        is_lora = bool(module.adapter.loading_code("", module.pipeline_name))
        seed = None if sampler is None else sampler.seed
        shown: int = 0
        strips: list[Strip] = []
        with best_effort(f"images in {folder / README}"):
            shown, strips = self._write_images(folder, step)
        edited, plural = any(one.controls for one in strips), "s" * any(len(one.controls) > 1 for one in strips)
        measured = [row for row in read_validation(self.run.validation) if row["step"] <= step]
        settings = {"precision of the base": module.base.source.precision, **training_facts(trainer, module)}
        settings |= {name: str(value) for name, value in module.encoding_settings().items()}
        private = data.sample_set.outside(data.training.samples)
        if private and folder.name == "last":
            log.info(f"note: {README} shows nothing of {listing(sorted(private))}: their files are not below data.root")
        public = (prompt for sample in data.training.samples if sample.key not in private for prompt in sample.prompts)
        edits, captions = has_edits(data.training.sizes), Counter(public).most_common()
        caption = one_line(captions[0][0]) if captions else ""
        render(
            folder / README,
            Path(__file__).with_name("model_card.md"),
            **self._use(module, folder, strips, seed),
            metadata=_metadata(module, origin, self.trigger_word or caption, strips, is_lora, edits),
            title=self.repository.rpartition("/")[2] if self.repository else self.run.path.absolute().name,
            adapter=str(module.adapter),
            edits=edits,
            step=step,
            steps=trainer.max_steps,
            best=folder.name == "best",
            caption=caption,
            captions=len(captions),
            trigger_word=self.trigger_word,
            grid=GRID if strips else "",
            columns=f"{f'Control{plural}, before' if edited else 'Before'}, after and target",
            shown_step=shown,
            held_out=data.validation is not None,
            measured_steps=[int(row["step"]) for row in (*measured[:1], *measured[-1:])],
            changes=changes(measured),
            best_lines=[] if validation is None else validation.best_lines(module.adapter.folder),
            settings={name: plain(without_secrets(value)) for name, value in settings.items()},
            origin=origin,
            comfyui=_in_comfyui(module, folder) if is_lora and module.base.name != EMBEDDED else None,
            comfyui_note=COMFYUI_NOTES.get(module.pipeline_name, ""),
        )

    def _write_images(self, folder: Path, step: int) -> tuple[int, list[Strip]]:
        """Write GRID and the results; return the step of the results and the samples, none without base images."""
        shown = [path for files in sample_files(self.run, step).values() for path in files.values()]
        if any(link_below(self.run.path, one) for one in shown) or not write_grid(
            self.run, folder / GRID, step, MOST, public=True
        ):
            return 0, []
        strips = [one for one in last_strips(self.run, step) if not one.private][:MOST]
        for index, strip in enumerate(strips, start=1):
            result = scaled(strip.result, min(1.0, LARGEST / max(strip.result.size)))
            save_png(result, folder / f"sample-{index}.png")
        return max(sample_files(self.run, step)), [strip._replace(prompt=one_line(strip.prompt)) for strip in strips]

    def _use(self, module: EditModule, folder: Path, strips: list[Strip], seed: int | None) -> dict[str, Any]:
        """Return the commands that use the weights, with names that are valid on any machine."""
        is_best, gated = folder.name == "best", bool(module.rank_gates)
        schedule = module.adapter.metadata()["rank_schedule"] if gated else {"kind": "constant"}
        root = self.repository.rpartition("/")[2] if self.repository else "FOLDER"
        place = f"{root}/best" if self.repository and is_best else root
        # The schedule is read from a local file, and a subfolder of a repository has another form.
        weights = self.repository if self.repository and not gated and not is_best else place
        of_run = f"/{module.adapter.folder}/last"
        arguments = module.adapter.predict_arguments(place, self.model_name)
        arguments = {key: value.removesuffix(of_run) for key, value in arguments.items()}
        names = Names(arguments, weights, self.model_name)
        return {
            "repository": self.repository,
            "root": root,
            "place": place,
            "commands": commands(module, names, seed, strips[0] if strips else None),
            "file": next((path.name for path in folder.glob("*.safetensors")), ""),
            "schedule": None if schedule["kind"] == "constant" else schedule,
            "slider": len(module.objective.scales) > 1,
        }


def _metadata(module: EditModule, origin: Origin, prompt: str, strips: list[Strip], is_lora: bool, edits: bool) -> str:
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
        pipeline_tag="image-to-image" if edits else "text-to-image",
        tags=["diffusers", *lora, *(["t-lora"] if module.rank_gates else [])],
        instance_prompt=prompt or None,
        widget=widget or None,
        license=licence.get("license"),
        license_name=licence.get("license_name"),
        license_link=licence.get("license_link"),
    ).to_yaml()


def _in_comfyui(module: EditModule, folder: Path) -> Reader:
    [path] = folder.glob("*.safetensors")
    file, names = LoRAFile(path), module.base.layer_names
    layers = [layer for one in file.match(names, module.base.name).values() for layer in one.layers]
    return in_comfyui("diffusers", names, layers, common_kind(file.empty.values()))
