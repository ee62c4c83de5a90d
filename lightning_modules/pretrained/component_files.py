"""Loading components: text encoders and autoencoders of a repository or of single files, as ComfyUI has them."""

import logging
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from foundation.errors import UserError
from foundation.files import reading
from foundation.hub import repository_file
from lightning_modules.pretrained import checks
from lightning_modules.pretrained.repository import (
    component_class,
    component_origin,
    meta_component,
    read_index,
    with_weights,
)
from lightning_modules.pretrained.single_file import PART, NamedWeights, TensorPlace, open_file, put, single_file
from lightning_modules.pretrained.weights import GET_AGAIN, Weights, assemble
from lightning_modules.quantization.quantization import MARKERS, Quantization

log = logging.getLogger("retouch")

CPU = torch.device("cpu")
# Beginnings of their tensors in whole checkpoints.
TEXT_ENCODER = re.compile(r"text_encoders\.[^.]+\.transformer\.")
AUTOENCODER = re.compile(r"vae\.|first_stage_model\.")
# Layers that the authors of FLUX.2 have in other parts of the autoencoder.
MOVED = re.compile(r"^(en|de)coder\.(?=(post_)?quant_conv\.)")
# Tensors of FLUX.2 [dev]'s text encoder that are not used: its pipeline reads the outputs of layers 10, 20 and 30.
UNUSED = re.compile(r"model\.(vision_tower|multi_modal_projector|language_model\.(norm|layers\.[3-9]\d))\.")
# The layer of a language model that returns logits.
HEAD = "lm_head"


@dataclass(frozen=True)
class ComponentFile:
    """A component on disk: its tensors by their names in the model, whose parameters have no values."""

    path: Path  # of its single file, or of its folder in a repository
    weights: NamedWeights
    empty: Any

    def load(self, device: torch.device, dtype: torch.dtype, quantization: Quantization | None) -> Any:
        """Load the model, frozen; `quantization` is of its linear layers."""
        model = deepcopy(self.empty)
        log.info(f"loading {self.path.name}{f', quantizing to {quantization.format}' if quantization else ''}")
        if quantization is not None:
            quantization.check(model)
        assemble(model, self.weights, dtype=dtype, device=device, quantization=quantization)
        if hasattr(model, "tie_weights"):
            model.tie_weights(recompute_mapping=False)
        return model.requires_grad_(False).eval()


def load_component(
    repository: str,
    name: str,
    revision: str | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    quantization: Quantization | None = None,
) -> Any:
    """Load one component of a repository; models are frozen, and go straight to their dtype and device.

    Raises:
        UserError: the repository cannot be used, or the component's files are missing or damaged.
    """
    cls = component_class(repository, name, revision)
    origin, revision_there, subfolder = component_origin(repository, name, revision)
    if Path(origin).is_dir():
        checks.check_component(Path(origin, subfolder), cls.__name__)
    elif "Tokenizer" in cls.__name__ or "Processor" in cls.__name__:  # else transformers may create an empty tokenizer
        names = [f"{subfolder}/{files[0]}".lstrip("/") for files in checks.VOCABULARIES]
        if not any(repository_file(origin, name, revision_there) for name in names):
            raise UserError(f"{origin} lacks {', '.join(names)}: {GET_AGAIN}")
    model = meta_component(repository, name, revision, parameters_only=True)
    if model is not None:
        return open_component(model, origin, subfolder, revision_there).load(device, dtype, quantization)
    more: dict[str, Any] = {"subfolder": subfolder} if subfolder else {}
    if cls.__module__.startswith("transformers"):
        more["trust_remote_code"] = False  # the default asks at the terminal
    with reading(f"{subfolder or cls.__name__} of {origin}", GET_AGAIN):
        return cls.from_pretrained(origin, revision=revision_there, **more)


def open_component(model: Any, repository: str, subfolder: str = "", revision: str | None = None) -> ComponentFile:
    """Open the weights of a model, whose parameters are on the meta device, in a repository."""
    library = checks.library_of(type(model).__name__)
    weights = checks.open_weights(repository, subfolder, library, revision)
    named = (_autoencoder if library == "diffusers" else _text_encoder)(weights, "", model)
    path = Path(repository, subfolder)
    checks.check_names(named, model, str(path))
    return ComponentFile(path, named, model)


def open_components(
    files: Mapping[str, Sequence[str]], repository: str, revision: str | None
) -> dict[str, ComponentFile]:
    """Open the components of a repository in single files; raise a UserError for a file that cannot be used.

    Args:
        files: the files of `text_encoder` (the text encoders) and `vae`.
    """
    named = [(kind, name) for kind, names in files.items() for name in names]
    found: dict[str, ComponentFile] = {}
    known = with_weights(read_index(repository, revision)) if named else []
    for kind, name in named:
        key = f"model.{kind}_name_or_path"
        path = single_file(name, key)
        if path is None:
            what = f"is not a file{checks.files_in(name)}. Name a repository by model.pretrained_model_name_or_path."
            raise UserError(f"{key}={name} {what}")
        if path.suffix.lower() == ".gguf":
            raise UserError(f"{key}={name} has llama.cpp's names, which are not read. Name a .safetensors file.")
        new = _fitting(path, [one for one in known if one.startswith(kind)], repository, revision)
        if twice := found.keys() & new.keys():
            raise UserError(f"{key}: {found[min(twice)].path} and {path} both contain {min(twice)}. Leave out one.")
        found |= new
    return found


def _fitting(path: Path, names: Sequence[str], repository: str, revision: str | None) -> dict[str, ComponentFile]:
    """Return the components that a file fits; raise a UserError if it fits none of these."""
    weights, found, problems = open_file(path), {}, []
    read, beginning = (_autoencoder, AUTOENCODER) if names == ["vae"] else (_text_encoder, TEXT_ENCODER)
    starts = sorted({match[0] for match in map(beginning.match, weights.dtypes) if match}) or [""]
    for name, start in product(names, starts):
        model = meta_component(repository, name, revision, parameters_only=True)
        try:
            named = read(weights, start, model)
            if type(model).__name__ == "Mistral3ForConditionalGeneration":
                named = _without_unused(named, model)
            if hasattr(model, HEAD) and not {*named.dtypes, *model.all_tied_weights_keys} & {f"{HEAD}.weight"}:
                setattr(model, HEAD, nn.Identity())  # no family computes logits
            checks.check_names(named, model, f"as {name} it")
            found[name] = ComponentFile(path, named, model)
        except UserError as error:
            problems.append(str(error))
    if not found:
        raise UserError(f"{path} fits no component: {'; '.join(problems)}. Name another file or choose another model=.")
    return found


def _text_encoder(weights: Weights, start: str, model: Any) -> NamedWeights:
    """Return the tensors by their names in a model of transformers, which may lack whole parts: heads, CLIP's tower."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    table = get_model_conversion_mapping(model)
    renamings, others = ([t for t in table if isinstance(t, WeightRenaming) == kind] for kind in (True, False))
    own, places, kind = model.state_dict(), dict[str, TensorPlace](), type(model).__name__
    for name in weights.dtypes:
        if name.startswith(start):
            key = name.removeprefix(start)
            part = PART.fullmatch(key)  # the tables know a layer's weight, and not its scales
            known = f"{part[1]}.weight" if part else key
            renamed, converted = rename_source_key(known, renamings, others, model.base_model_prefix, own)
            if renamed not in own and (inner := renamed.replace("model.", "model.language_model.", 1)) in own:
                renamed = inner  # the language model's own name, in a file without images
            if converted:
                raise UserError(f"{kind} needs its weights to be converted ({known}), {checks.NOT_READ}")
            put(places, {renamed.removesuffix("weight") + part[2] if part else renamed: TensorPlace(name)}, kind)
    for target, source in model.all_tied_weights_keys.items():
        if target in places:
            places.setdefault(source, places.pop(target))
    model.tie_weights(recompute_mapping=False)
    base, inner = f"{model.base_model_prefix}.", getattr(model, model.base_model_prefix, model)
    parts = {name for module in (model, inner) for name, _ in module.named_children()}
    own_parts = [name for name in places if name.removeprefix(base).partition(".")[0] in parts]
    kept = {*own_parts, *MARKERS} - {name for name, _ in model.named_buffers()}
    return NamedWeights(weights, {name: place for name, place in places.items() if name in kept})


def _without_unused(weights: NamedWeights, model: Any) -> NamedWeights:
    """Remove the parts of FLUX.2 [dev]'s text encoder that are not used and that ComfyUI's file lacks."""
    text = model.model.language_model
    text.layers, text.norm = text.layers[:30], nn.Identity()
    model.model.vision_tower = model.model.multi_modal_projector = nn.Identity()
    return NamedWeights(weights, {name: TensorPlace(name) for name in weights.dtypes if not UNUSED.match(name)})


def _autoencoder(weights: Weights, start: str, model: Any) -> NamedWeights:
    """Return the tensors by their names in a model of diffusers, whose functions rename the authors' names."""
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint, convert_wan_vae_to_diffusers

    kind, ldm, wan = type(model).__name__, convert_ldm_vae_checkpoint, convert_wan_vae_to_diffusers
    convert = {"AutoencoderKL": ldm, "AutoencoderKLFlux2": ldm, "AutoencoderKLQwenImage": wan}.get(kind)
    names = [name for name in weights.dtypes if name.startswith(start) and not name.endswith("num_batches_tracked")]
    plain = {MOVED.sub("", name.removeprefix(start)): TensorPlace(name) for name in names}
    if convert is None or any(".mid_block." in name for name in plain):
        return NamedWeights(weights, plain)
    # Numbers in the tensors' shapes show what becomes of each: the functions leave out some without a word.
    numbers = {key: torch.tensor(i).expand(weights.shapes[one.name]) for i, (key, one) in enumerate(plain.items())}
    results = {key: part for key, part in convert(numbers, config=model.config).items() if part is not None}
    sources = {key: [*plain][int(part[(0,) * part.dim()])] for key, part in results.items()}
    left = plain.keys() - sources.values()
    places = {key: plain[source]._replace(shape=tuple(results[key].shape)) for key, source in sources.items()}
    return NamedWeights(weights, places | {key: plain[key] for key in left})
