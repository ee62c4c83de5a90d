"""peft's settings of an adapter, which say by what its updates are multiplied."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datamodules.files import reading
from lightning_modules.adapters.formats.find import PEFT_CONFIG_NAME, PEFT_WEIGHTS_NAME
from lightning_modules.adapters.update import Update

# How peft's OFT makes rotations, unless it is told otherwise: as `Rotation` does.
TURNS = {"coft": False, "block_share": False, "use_cayley_neumann": True, "num_cayley_neumann_terms": 5}


def settings_beside(weights: Path) -> Mapping[str, Any]:
    """Of the file beside peft's weights; none for other weights.

    Raises:
        UserError: it is damaged.
    """
    config = weights.with_name(PEFT_CONFIG_NAME)
    if weights.name != PEFT_WEIGHTS_NAME or not config.is_file():
        return {}
    with reading(config, "download it again"):
        settings = json.loads(config.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("it is no settings of peft")
        return settings


def scale_of(settings: Mapping[str, Any], layer: str, update: Update) -> float:
    """alpha / rank of a layer, or as rank-stabilized LoRA has it (arXiv 2312.03732); 1 where settings say nothing.

    Raises:
        ValueError, TypeError: they are none of peft, or of an OFT that turns in another way than `Rotation`.
    """
    if settings.get("peft_type") == "OFT":
        other = {name: settings.get(name, usual) for name, usual in TURNS.items()}
        if different := [f"{name}={value}" for name, value in other.items() if value != TURNS[name]]:
            raise ValueError(f"its OFT has {', '.join(different)}, which Retouch does not read")
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
