"""peft's settings of an adapter, which determine the scale of its deltas."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datamodules.errors import printable
from datamodules.files import reading
from lightning_modules.lora_files.delta import Delta
from lightning_modules.lora_files.find import PEFT_CONFIG_NAME, PEFT_WEIGHTS_NAME

# Settings of the scale, of training only, or of which layers are adapted.
UNDERSTOOD = frozenset(
    (  # noqa: SIM905 (a list would have a line for each)
        "alpha alpha_pattern auto_mapping base_model_name_or_path decompose_both decompose_factor "
        "ensure_weight_tying eps eva_config exclude_modules inference_mode layers_pattern layers_to_transform "
        "lora_alpha lora_dropout module_dropout megatron_core modules_to_save oft_block_size peft_version "
        "qalora_group_size r rank_dropout rank_dropout_scale rank_pattern revision runtime_config "
        "target_modules task_type use_dora use_effective_conv2d use_rslora "
    ).split()
)
# Values of other settings that leave a delta as it is: peft's defaults, and initializations that keep the base as it
# is. PiSSA, OLoRA, CorDA and LoftQ change the base, and such a LoRA is only the difference from the changed base.
STARTS = (True, None, False, "gaussian", "orthogonal", "eva")
AS_USUAL = {
    "peft_type": ("LORA", "LOKR", "LOHA", "OFT"),
    "bias": ("none",),
    "init_lora_weights": STARTS,
    "init_weights": STARTS,
    "use_cayley_neumann": (True,),
    "num_cayley_neumann_terms": (5,),
}


def peft_settings_next_to(weights: Path) -> Mapping[str, Any]:
    """Read peft's settings file next to peft's weights; empty for other weights.

    Raises:
        UserError: it is damaged.
    """
    config = weights.with_name(PEFT_CONFIG_NAME)
    if weights.stem != Path(PEFT_WEIGHTS_NAME).stem or not config.is_file():
        return {}
    with reading(config, "download it again"):
        settings = json.loads(config.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("these are no settings of peft")
        return settings


def unknown_setting(settings: Mapping[str, Any]) -> str | None:
    """Return a setting, as `name=value`, that gives the weights a meaning Retouch does not know; None without one."""
    for name, value in settings.items():
        if name not in UNDERSTOOD and value not in AS_USUAL.get(name, (None, False, "", [], {})):
            return f"{name}={printable(str(value)[:60])}"
    return None


def peft_scale(settings: Mapping[str, Any], layer: str, delta: Delta) -> float:
    """Return alpha / rank of a layer, alpha / sqrt(rank) for rsLoRA (arXiv 2312.03732), or 1 without settings.

    Raises:
        ValueError, TypeError: the settings are invalid.
    """
    if settings.get("peft_type") in ("LOKR", "LOHA"):  # the settings' rank counts even if the factors are whole
        rank = _layer_setting(settings, "r", layer)
        if rank <= 0:
            raise ValueError(f"r={rank:g} is not a rank")
        return _layer_setting(settings, "alpha", layer) / rank
    if "lora_alpha" not in settings or delta.divisor is None:
        return 1.0
    rank = delta.divisor
    return _layer_setting(settings, "lora_alpha", layer) / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def _layer_setting(settings: Mapping[str, Any], name: str, layer: str) -> float:
    """Return a setting of one layer: its pattern's value, else the common value."""
    kind = "rank_pattern" if name == "r" else "alpha_pattern"
    pattern = settings.get(kind) or {}
    try:
        own = (pattern[key] for key in pattern if re.match(rf"(.*\.)?({key})$", layer))  # as peft does
        return float(next(own, settings[name]))
    except re.error as error:
        raise ValueError(f"{kind}: {error}") from error
