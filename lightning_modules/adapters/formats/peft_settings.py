"""peft's settings of an adapter, which say by what its updates are multiplied."""

import json
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from datamodules.files import reading
from lightning_modules.adapters.formats.find import PEFT_CONFIG_NAME, PEFT_WEIGHTS_NAME


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


def scale_of(settings: Mapping[str, Any], layer: str, rank: int) -> float:
    """alpha / rank of a layer, or as rank-stabilized LoRA has it (arXiv 2312.03732); 1 where settings say nothing.

    Raises:
        ValueError, TypeError: they are none of peft.
    """
    if "lora_alpha" not in settings:
        return 1.0
    pattern = settings.get("alpha_pattern") or {}
    try:
        alphas = (pattern[key] for key in pattern if re.match(rf"(.*\.)?({key})$", layer))  # as peft does
        alpha = next(alphas, settings["lora_alpha"])
    except re.error as error:
        raise ValueError(f"alpha_pattern: {error}") from error
    return float(alpha) / (math.sqrt(rank) if settings.get("use_rslora") else rank)
