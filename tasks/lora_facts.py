"""What can be said of a LoRA file of any program, without a model's weights and without the network."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from omegaconf import DictConfig
from rich.filesize import decimal

from datamodules.errors import UserError
from datamodules.files import reading
from lightning_modules.adapters.formats.keys import naming
from lightning_modules.adapters.formats.lora_file import LoRAFile
from lightning_modules.adapters.formats.names import PREFIXES, LayerNames, Meaning, OwnNames, Sides
from lightning_modules.adapters.rank_mask import read_rank_gate
from lightning_modules.adapters.update import Update
from tasks.lora_header import shown
from tasks.models import fitting_models, known_models, model_for

# What layers of models that Retouch does not know are called.
OTHERS = {
    r"(down|up|mid|input|output|middle)_block": "a UNet, of Stable Diffusion",
    r"joint_blocks": "Stable Diffusion 3",
    r"blocks[._]\d+[._](self|cross)_attn": "Wan",
    r"attn1[._]": "a transformer with cross-attention",
    r"layers[._]\d+[._](self_attn|mlp)": "a language model",
}


@dataclass(frozen=True)
class LoRAFacts:
    """Of one file.

    Attributes:
        file: that they are of.
        model: which one it is for, in words.
        names: of that model's layers, or the file's own.
        known: whether these are a model's.
    """

    file: LoRAFile
    model: str
    names: LayerNames
    known: bool

    @cached_property
    def updates(self) -> dict[str, Update]:
        """By layer; none where there are numbers that are not finite."""
        return {} if self.not_finite else self.file.read(self.names, "the model")

    @cached_property
    def norms(self) -> dict[str, float]:
        """Of each layer's update, Frobenius'."""
        return {layer: max(update.square(), 0.0) ** 0.5 for layer, update in self.updates.items()}

    @cached_property
    def not_finite(self) -> list[str]:
        """The tensors of layers that hold such numbers."""
        path = self.file.path
        with reading(path, "download it again"), self.file.opened() as tensor_of:
            keys = [key for parts in self.file.parts.values() for key in parts.values()]
            return [key for key in keys if not tensor_of(key).float().isfinite().all()]

    def rows(self) -> dict[str, str]:
        """What there is to say, by its name."""
        file, parts = self.file, self.file.parts
        updates = list(file.empty.values())
        used = [key for one in parts.values() for _, key in sorted(one.items(), reverse=True)]
        scales = file.scales(self.names)
        doras = sum("magnitude" in one for one in parts.values())
        texts = file.text_encoder_keys
        numbers = sum(math.prod(file.shapes[key]) for key in used)
        rows = {
            "for": self.model,
            "names": f"{counted([naming(key, PREFIXES) for key in used])}: {shown(used[0], 90)}",
            "layers": f"{len(parts)}",
            "kind": counted([update.kind for update in updates]),
            "rank": counted([update.size for update in updates]),
            "alpha": f"{self._alpha(scales, updates)}; scale {counted([round(scale, 4) for scale in scales.values()])}",
            "dtype": counted([file.dtypes[key] for key in used]),
            "DoRA": f"in {doras} of {len(parts)} layers" if doras else "no",
            "T-LoRA": _schedule(file),
            "text encoders": f"{len(texts)} tensors, left out" if texts else "none",
            **{what: f"{len(keys)} tensors, left out" for what, keys in file.left_out.items() if keys != texts},
            "size": f"{decimal(file.path.stat().st_size)}, {numbers:,} numbers",
        }
        if self.known and len(self.updates) not in (0, len(parts)):
            rows["layers"] += f", {len(self.updates)} by diffusers' names"
        if self.not_finite:
            bad = ", ".join(shown(key, 90) for key in self.not_finite[:3])
            return rows | {"NOT FINITE": f"{len(self.not_finite)} tensors, it diverged: {bad}"}
        rows["norm"] = f"{math.hypot(*self.norms.values()):.4g}, of the whole update" + (
            " without DoRA's magnitudes" if doras else ""
        )
        if zero := [layer for layer, norm in self.norms.items() if not norm]:
            rows["ALL ZERO"] = f"{len(zero)} layers: {', '.join(shown(layer) for layer in zero[:3])}"
        return rows

    def _alpha(self, scales: Mapping[str, float], updates: Sequence[Update]) -> str:
        file = self.file
        tensors = any("alpha" in parts for parts in file.parts.values())
        if not tensors and file.trained is not None:
            layers = [layer for name in file.parts for layer in (self.names.meaning(name) or Meaning((name,))).layers]
            trained_alphas = counted([file.trained.alpha_of(layer) for layer in layers])
            at = counted([float(f"{file.trained.scale_of(layer):.4g}") for layer in layers])
            return f"{trained_alphas}, in the weights (trained at scale {at})"
        if not tensors and set(scales.values()) == {1.0}:
            return "none"
        alphas = [
            round(scale * (update.divisor or 1), 4) for scale, update in zip(scales.values(), updates, strict=True)
        ]
        return f"{counted(alphas)}, in {'tensors' if tensors else 'settings'}"


def facts_of(cfg: DictConfig, file: LoRAFile) -> LoRAFacts:
    """Find out what model a file is for.

    Raises:
        UserError: it is no LoRA, or does not fit model=.
    """
    file.empty, file.header  # noqa: B018 (errors of a file that can not be used at all)
    chosen = any(override.startswith("model=") for override in HydraConfig.get().overrides.task)
    claimed = shown(((file.header or {}).get("model") or {}).get("name") or "", 40)
    if chosen or file.header:
        try:
            model = model_for(cfg, [file])
            file.check(model.names, model.base)
            if not model.guessed:
                said = f"{model.name}, as {'model=' if chosen else 'its header'} says"
                return LoRAFacts(file, said, model.names, True)
        except (UserError, InstantiationException):
            if chosen:
                raise
    return _guess(file, claimed)


def _guess(file: LoRAFile, claimed: str) -> LoRAFacts:
    """By the layers alone.

    Args:
        claimed: the model that the header names, which it is not.
    """
    instead = f"; its header says {claimed}" if claimed else ""
    if fitting := list(fitting_models([file])):
        words = f"{' or '.join(model.name for model in fitting)}, by its layers"
        return LoRAFacts(file, words + instead, fitting[0].names, True)
    sides = {name: update.sides for name, update in file.empty.items()}
    own = OwnNames({name: Sides(out or width, width) for name, (out, width) in sides.items()})
    shared = {model.name: sum(model.names.meaning(name) is not None for name in file.parts) for model in known_models()}
    similar = [name for name, count in shared.items() if count and count == max(shared.values())]
    other = next((words for part, words in OTHERS.items() if any(re.search(part, name) for name in file.parts)), None)
    looks = f"; its layers are called as those of {other}" if other else ""
    if similar and not other:
        count = shared[similar[0]]
        looks = f"; {count} of {len(file.parts)} layers are called as in {' or '.join(similar)}"
    return LoRAFacts(file, f"none of the models that Retouch knows{looks}{instead}", own, False)


def counted(values: Sequence[Any], most: int = 4) -> str:
    """`16`, or `16 (200), 8 (104)`: the most frequent first."""
    counts = Counter(values).most_common()
    if len(counts) == 1:
        return _number(counts[0][0])
    listed = ", ".join(f"{_number(value)} ({count})" for value, count in counts[:most])
    return listed + (f" and {len(counts) - most} other values" if len(counts) > most else "")


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _schedule(file: LoRAFile) -> str:
    try:
        gate = read_rank_gate(file.path)
    except UserError as error:
        return shown(str(error).removeprefix(f"{file.path} "), 150)
    if gate is None:
        return "no"
    one = gate.schedule
    rows = f", of {gate.width} rows each" if gate.width > 1 else ""
    return f"{one.kind}, {one.min_rank} to {one.rank} components{rows}, alpha_rank_scale {one.alpha_rank_scale:g}"
