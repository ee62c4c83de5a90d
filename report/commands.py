"""Commands that use a trained model: of predict.py, and the same in diffusers."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lightning_modules.edit_module import EditModule
from lightning_modules.family import Sampling
from lightning_modules.pretrained.repository import index_file, resolve_repository
from report.images import Strip
from report.origin import public_name
from report.quoting import override, portable_path, program
from runs.run_folder import RunFolder


class Names(NamedTuple):
    """Names of the weights and images in commands.

    Attributes:
        arguments: arguments of predict.py.
        weights: for diffusers: a folder of weights, or a repository on the hub.
        model: name of the model's YAML.
        photos: for the images to edit; empty for placeholders.
    """

    arguments: Mapping[str, str]
    weights: str
    model: str
    photos: Sequence[str] = ()

    @classmethod
    def of_run(cls, module: EditModule, run: RunFolder, model_name: str) -> "Names":
        """Name the last weights of a run, for commands in the folder where the run was started."""
        folder = RunFolder(portable_path(str(run)))
        weights = str(folder.weights(module.adapter.folder, "last"))
        photos = [str(folder.samples / path.name) for path in run.controls()]
        return cls(module.adapter.predict_arguments(str(folder), model_name), weights, model_name, photos)


def commands(module: EditModule, names: Names, seed: int | None, sample: Strip | None) -> dict[str, str]:
    """Return the command of predict.py that samples the sample images again, and the code for stock diffusers, by name.

    Args:
        seed: seed of the sample images; None without these.
        sample: the image that is edited.
    """
    used = module.sampler.sampling if seed is not None else None
    sampling, fixed = ({}, {}) if used is None else (_pipeline_arguments(module, used), used.scheduler_config)
    prompt = sample.prompt if sample is not None and sample.prompt else "..."
    width, height = sample.result.size if sample is not None else (1024, 1024)
    files = _photos(module, names.photos, sample)
    other = None if used is None else used.transformer_name_or_path
    transformer = public_name(module.base.transformer_name if other is None else other, names.model)
    chosen = {} if other is None else {"model.sampling.transformer_name_or_path": transformer}
    scales = module.objective.scales
    dial = {"lora_scale": list(scales)} if len(scales) > 1 else {}
    shift = {name: value for name, value in fixed.items() if name.startswith("shift") and value is not None}
    settings = {"prompt": prompt, **dial, **chosen, **sampling, **shift, "seed": seed or 0}
    found = {"Here": predict_command(module, names.arguments, settings, names.photos, sample)}
    if module.stock_images is None or len(files) <= module.stock_images:
        # Another transformer may come with its own pipeline, and so with its own scheduler.
        whole = other is not None and index_file(resolve_repository(other)) is not None
        own = public_name(module.base.name, names.model)
        loading = module.adapter.loading_code(names.weights, module.pipeline_name)
        base = transformer if whole else own if loading else names.weights
        base = "assets/photos" if base == "embedded" else base
        photos = ", ".join(f"load_image({name!r})" for name in files)
        changes = ", ".join(f"{name}={value!r}" for name, value in fixed.items())
        arguments = {"prompt": prompt, **module.call_arguments(width, height), **sampling}
        code = [
            *([f"# Its transformer is that of {transformer}."] if not whole and transformer != own else []),
            "import torch",
            f"from diffusers import {module.pipeline_name}",
            *(["from diffusers.utils import load_image"] if files else []),
            "",
            *module.pipeline_code(base, str(module.base.dtype), arguments),
            *loading,
            *([f"pipe.scheduler = pipe.scheduler.from_config(pipe.scheduler.config, {changes})"] if fixed else []),
            "edited = pipe(",
            *([f"    image={photos if len(files) == 1 else f'[{photos}]'},"] if files else []),
            *(f"    {name}={value!r}," for name, value in arguments.items()),
            f"    generator=torch.Generator().manual_seed({seed or 0}),",
            ").images[0]",
            "edited.save('edited.png')",
        ]
        found["In diffusers"] = "\n".join(code)
    return found


def predict_command(
    module: EditModule,
    weights: Mapping[str, str],
    settings: Mapping[str, Any],
    photos: Sequence[str],
    sample: Strip | None,
) -> str:
    """Return a command line of predict.py.

    Args:
        weights: its arguments that name these.
        photos: as in `Names`.
        sample: the image that the run shows, which was edited or is from text.
    """
    files, size = _photos(module, photos, sample), {} if sample is None else _size_of(module, sample)
    given = {**weights, **({"image": files} if files else {}), **size, **settings}
    return " ".join([program("predict"), *(override(*one) for one in given.items())])


def _photos(module: EditModule, photos: Sequence[str], sample: Strip | None) -> list[str]:
    """Return the files to edit, or placeholders if they are not those of the shown sample."""
    count = len(sample.controls) if sample else int(module.condition_images.most != 0)
    if len(photos) == count:
        return list(photos)
    return ["PHOTO.png"] if count == 1 else [f"PHOTO_{index}.png" for index in range(1, count + 1)]


def _size_of(module: EditModule, sample: Strip) -> dict[str, int]:
    """Return width and height of a sample if predict.py would choose others, as for a target that extends its control.

    A model that is given no image has no size of its own, unless it is text to image only.
    """
    images, size = module.condition_images, sample.result.size
    if sample.sizes:
        window = images.of_count(len(sample.sizes)).window(*sample.sizes[0], module.geometry.resolution**2)
        left, top, right, bottom = window.inside
        usual = [window.size, (right - left, bottom - top)]
    else:
        usual = [(module.geometry.resolution,) * 2] if images.most == 0 else []
    possible = not any(side % module.geometry.result_multiple for side in size)
    return dict(zip(("width", "height"), size, strict=True)) if possible and size not in usual else {}


def _pipeline_arguments(module: EditModule, sampling: Sampling) -> dict[str, Any]:
    arguments = {"num_inference_steps": sampling.num_inference_steps, **module.sampling_rules.scales(sampling)}
    negative = module.sampling_rules.negative_prompt(sampling)
    if negative is None:
        arguments.pop("true_cfg_scale", None)
    takes_one = negative is not None and module.sampling_rules.any_negative
    return {**arguments, "negative_prompt": negative} if takes_one else arguments
