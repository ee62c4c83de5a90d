"""peft's settings of an adapter, which say by what its updates are multiplied."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datamodules.errors import printable
from datamodules.files import reading
from lightning_modules.adapters.formats.find import PEFT_CONFIG_NAME, PEFT_WEIGHTS_NAME
from lightning_modules.adapters.update import Update

# Settings that say by what updates are multiplied, or of how they were trained alone, or which layers they are of.
UNDERSTOOD = frozenset(
    (  # noqa: SIM905 (a list would have a line for each)
        "alpha alpha_pattern auto_mapping base_model_name_or_path decompose_both decompose_factor "
        "ensure_weight_tying eps eva_config exclude_modules inference_mode layers_pattern layers_to_transform "
        "lora_alpha lora_dropout module_dropout megatron_core modules_to_save oft_block_size peft_version "
        "qalora_group_size r rank_dropout rank_dropout_scale rank_pattern revision runtime_config "
        "target_modules task_type use_dora use_effective_conv2d use_rslora "
    ).split()
)
# Of other settings the values with which an update is what `Update` says: peft's own defaults, and starts that leave
# the base as it is. PiSSA, OLoRA, CorDA and LoftQ change the base, of which such a LoRA is only the difference.
STARTS = (True, None, False, "gaussian", "orthogonal", "eva")
AS_USUAL = {
    "peft_type": ("LORA", "LOKR", "LOHA", "OFT"),
    "bias": ("none",),
    "init_lora_weights": STARTS,
    "init_weights": STARTS,
    "use_cayley_neumann": (True,),
    "num_cayley_neumann_terms": (5,),
}


def settings_beside(weights: Path) -> Mapping[str, Any]:
    """Of the file beside peft's weights; none for other weights.

    Raises:
        UserError: it is damaged.
    """
    config = weights.with_name(PEFT_CONFIG_NAME)
    if weights.stem != Path(PEFT_WEIGHTS_NAME).stem or not config.is_file():
        return {}
    with reading(config, "download it again"):
        settings = json.loads(config.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("it is no settings of peft")
        return settings


def not_understood(settings: Mapping[str, Any]) -> str | None:
    """Return a setting, as `name=value`, by which weights mean something else than Retouch takes them for."""
    for name, value in settings.items():
        if name not in UNDERSTOOD and value not in AS_USUAL.get(name, (None, False, "", [], {})):
            return f"{name}={printable(str(value)[:60])}"
    return None


def scale_of(settings: Mapping[str, Any], layer: str, update: Update) -> float:
    """alpha / rank of a layer, or as rank-stabilized LoRA has it (arXiv 2312.03732); 1 where settings say nothing.

    Raises:
        ValueError, TypeError: they are none of peft.
    """
    if settings.get("peft_type") in ("LOKR", "LOHA"):  # by the settings' rank, whether factors are whole or not
        rank = _of_layer(settings, "r", layer)
        if rank <= 0:
            raise ValueError(f"r={rank:g} is no rank")
        return _of_layer(settings, "alpha", layer) / rank
    if "lora_alpha" not in settings or update.divisor is None:
        return 1.0
    rank = update.divisor
    return _of_layer(settings, "lora_alpha", layer) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _of_layer(settings: Mapping[str, Any], name: str, layer: str) -> float:
    """A number of a layer's own, or that of all."""
    kind = "rank_pattern" if name == "r" else "alpha_pattern"
    pattern = settings.get(kind) or {}
    try:
        own = (pattern[key] for key in pattern if re.match(rf"(.*\.)?({key})$", layer))  # as peft does
        return float(next(own, settings[name]))
    except re.error as error:
        raise ValueError(f"{kind}: {error}") from error
