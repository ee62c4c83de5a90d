"""Text encoders and autoencoders from single files, as ComfyUI has them."""

import logging
import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from datamodules.errors import UserError
from lightning_modules.pretrained.checks import check_names
from lightning_modules.pretrained.repository import meta_component, read_index, with_weights, without_other_parts
from lightning_modules.pretrained.single_file import PART, NamedWeights, TensorPlace, misfits, open_file, single_file
from lightning_modules.pretrained.weights import FileWeights, assemble
from lightning_modules.quantization.quantization import MARKERS, Quantization

log = logging.getLogger("retouch")

# Beginnings of their tensors in whole checkpoints.
TEXT_ENCODER = re.compile(r"text_encoders\.[^.]+\.transformer\.")
AUTOENCODER = re.compile(r"vae\.|first_stage_model\.")
# Layers that the authors of FLUX.2 have in other parts of the autoencoder.
MOVED = re.compile(r"^(en|de)coder\.(?=(post_)?quant_conv\.)")
# The layer of a language model that returns logits.
HEAD = "lm_head"


@dataclass(frozen=True)
class ComponentFile:
    """The single file of a component: its tensors by their names in the model, whose parameters have no values."""

    path: Path
    weights: NamedWeights
    empty: Any

    def load(self, device: torch.device, dtype: torch.dtype, quantization: Quantization | None) -> Any:
        """Load the model, frozen; `quantization` is of its linear layers."""
        model = deepcopy(self.empty)
        log.info(f"loading {type(model).__name__} from {self.path.name}")
        assemble(model, self.weights, dtype=dtype, device=device, quantization=quantization)
        if hasattr(model, "tie_weights"):
            model.tie_weights(recompute_mapping=False)
        return model.requires_grad_(False).eval()


def open_components(
    texts: str | Sequence[str] | None, vae: str | None, repository: str, revision: str | None
) -> dict[str, ComponentFile]:
    """Open the single files of a repository's components; raise a UserError for one that cannot be used."""
    texts = [texts] if isinstance(texts, str) else texts or []
    named = [("text_encoder", text) for text in texts] + ([("vae", vae)] if vae else [])
    found: dict[str, ComponentFile] = {}
    known = with_weights(read_index(repository, revision)) if named else []
    for kind, name in named:
        key = f"model.{kind}_name_or_path"
        path = single_file(name, key)
        if path is None:
            raise UserError(f"{key}={name} is not a file. Name a repository by model.pretrained_model_name_or_path.")
        if path.suffix == ".gguf":
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
        named = read(weights, start, model)
        if problem := next(misfits(named, model), None):
            problems.append(f"for {name} ({type(model).__name__}) it {problem}")
        else:
            check_names(named, model, str(path))
            found[name] = ComponentFile(path, named, model)
    if not found:
        raise UserError(f"{path} fits no component: {'; '.join(problems)}. Name another file or choose another model=.")
    return found


def _text_encoder(weights: FileWeights, start: str, model: Any) -> NamedWeights:
    """Return the tensors by their names in a model of transformers; remove its head if the file needs none."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, rename_source_key

    renamings = [one for one in get_model_conversion_mapping(model) if isinstance(one, WeightRenaming)]
    own, places = model.state_dict(), {}
    for name in weights.dtypes:
        if name.startswith(start):
            key = name.removeprefix(start)
            part = PART.fullmatch(key)  # the tables know a layer's weight, and not its scales
            known = f"{part[1]}.weight" if part else key
            renamed, _ = rename_source_key(known, renamings, [], model.base_model_prefix, own)
            places[renamed.removesuffix("weight") + part[2] if part else renamed] = TensorPlace(name)
    for target, source in model.all_tied_weights_keys.items():
        if target in places:
            places.setdefault(source, places.pop(target))
    if hasattr(model, HEAD) and f"{HEAD}.weight" not in places:  # no family computes logits
        setattr(model, HEAD, nn.Identity())
        model.all_tied_weights_keys.pop(f"{HEAD}.weight", None)
    model.tie_weights(recompute_mapping=False)
    kept = {*without_other_parts(model, places), *MARKERS} - {name for name, _ in model.named_buffers()}
    return NamedWeights(weights, {name: place for name, place in places.items() if name in kept}, {})


def _autoencoder(weights: FileWeights, start: str, model: Any) -> NamedWeights:
    """Return the tensors by their names in a model of diffusers, whose functions rename those of its authors."""
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint, convert_wan_vae_to_diffusers

    kind, ldm, wan = type(model).__name__, convert_ldm_vae_checkpoint, convert_wan_vae_to_diffusers
    convert = {"AutoencoderKL": ldm, "AutoencoderKLFlux2": ldm, "AutoencoderKLQwenImage": wan}.get(kind)
    names = [name for name in weights.dtypes if name.startswith(start) and not name.endswith("num_batches_tracked")]
    plain = {MOVED.sub("", name.removeprefix(start)): TensorPlace(name) for name in names}
    if convert is None or any(".mid_block." in name for name in plain):
        return NamedWeights(weights, plain, {})
    # Numbers in the tensors' shapes show what becomes of each: the functions leave out some without a word.
    numbers = {key: torch.tensor(i).expand(weights.shapes[one.name]) for i, (key, one) in enumerate(plain.items())}
    results = {key: part for key, part in convert(numbers, config=model.config).items() if part is not None}
    sources = {key: [*plain][int(part[(0,) * part.dim()])] for key, part in results.items()}
    left = plain.keys() - sources.values()
    places = {key: plain[source] for key, source in sources.items()} | {key: plain[key] for key in left}
    return NamedWeights(weights, places, {key: part.shape for key, part in results.items()})
