"""Commands that use a trained model: of predict.py, and the same in diffusers."""

from collections.abc import Mapping
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
        photo: for the image to edit.
    """

    arguments: Mapping[str, str]
    weights: str
    model: str
    photo: str = "PHOTO.png"

    @classmethod
    def of_run(cls, module: EditModule, run: RunFolder, model_name: str) -> "Names":
        """Name the last weights of a run, for commands in the folder where the run was started."""
        folder = RunFolder(portable_path(str(run)))
        weights = str(folder.weights(module.adapter.folder, "last"))
        photo = str(folder.control) if run.control.is_file() else "PHOTO.png"
        return cls(module.adapter.predict_arguments(str(folder), model_name), weights, model_name, photo)


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
    images = int(module.condition_images.most != 0) if sample is None else len(sample.controls)
    other = None if used is None else used.transformer_name_or_path
    transformer = public_name(module.base.transformer_name if other is None else other, names.model)
    chosen = {} if other is None else {"model.sampling.transformer_name_or_path": transformer}
    scales = module.objective.scales
    dial = {"lora_scale": list(scales)} if len(scales) > 1 else {}
    shift = {name: value for name, value in fixed.items() if name.startswith("shift") and value is not None}
    settings = {"prompt": prompt, **dial, **chosen, **sampling, **shift, "seed": seed or 0}
    found = {"Here": predict_command(module, names.arguments, settings, names.photo, sample)}
    if module.stock_images is None or images <= module.stock_images:
        # Another transformer may come with its own pipeline, and so with its own scheduler.
        whole = other is not None and index_file(resolve_repository(other)) is not None
        own = public_name(module.base.name, names.model)
        loading = module.adapter.loading_code(names.weights, module.pipeline_name)
        base = transformer if whole else own if loading else names.weights
        base = "assets/shapes" if base == "embedded" else base
        files = [names.photo] if images == 1 else [f"PHOTO_{index}.png" for index in range(1, images + 1)]
        photos = ", ".join(f"load_image({name!r})" for name in files)
        changes = ", ".join(f"{name}={value!r}" for name, value in fixed.items())
        arguments = {"prompt": prompt, **module.call_arguments(width, height), **sampling}
        code = [
            *([f"# Its transformer is that of {transformer}."] if not whole and transformer != own else []),
            "import torch",
            f"from diffusers import {module.pipeline_name}",
            *(["from diffusers.utils import load_image"] if images else []),
            "",
            *module.pipeline_code(base, str(module.base.dtype), arguments),
            *loading,
            *([f"pipe.scheduler = pipe.scheduler.from_config(pipe.scheduler.config, {changes})"] if fixed else []),
            "edited = pipe(",
            *([f"    image={photos if images == 1 else f'[{photos}]'},"] if images else []),
            *(f"    {name}={value!r}," for name, value in arguments.items()),
            f"    generator=torch.Generator().manual_seed({seed or 0}),",
            ").images[0]",
            "edited.save('edited.png')",
        ]
        found["In diffusers"] = "\n".join(code)
    return found


def predict_command(
    module: EditModule, weights: Mapping[str, str], settings: Mapping[str, Any], photo: str, sample: Strip | None
) -> str:
    """Return a command line of predict.py.

    Args:
        weights: its arguments that name these.
        sample: the image that the run shows, which was edited or is from text.
    """
    if module.condition_images.most == 0:
        image: dict[str, Any] = {}
    elif sample is None or sample.controls:
        image = {"image": photo}
    else:
        image = dict(zip(("width", "height"), sample.result.size, strict=True))
    return " ".join([program("predict"), *(override(*one) for one in {**weights, **image, **settings}.items())])


def _pipeline_arguments(module: EditModule, sampling: Sampling) -> dict[str, Any]:
    arguments = {"num_inference_steps": sampling.num_inference_steps, **module.sampling_rules.scales(sampling)}
    negative = module.sampling_rules.negative_prompt(sampling)
    if negative is None:
        arguments.pop("true_cfg_scale", None)
    takes_one = negative is not None and module.sampling_rules.any_negative
    return {**arguments, "negative_prompt": negative} if takes_one else arguments
