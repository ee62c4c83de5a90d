"""Entries of the Model Metadata Standard in a LoRA's header, which SwarmUI, Forge, Civitai and kohya's tools show.

https://github.com/Stability-AI/ModelSpec. Flow models have no prediction_type, and a file has no date while it is
trained, because equal runs write equal files.
"""

import re
from collections.abc import Mapping

from foundation.catalogue import catalogue

PREFIX, VERSION = "modelspec.", "1.0.1"
# As in kohya's sai_model_spec.py: the code whose names the layers have.
COMFYUI = "https://github.com/comfyanonymous/ComfyUI"


def modelspec(
    model: str, base: str, resolution: int | None, native: bool = False, **facts: str | None
) -> dict[str, str]:
    """Return the entries of a LoRA, without their prefix.

    SwarmUI chooses the model by the architecture (T2IModelClassSorter.cs, in any case), as Forge does for FLUX.1
    (sd_forge_lora/network.py). kohya's tools write the same, except for Qwen-Image-Edit, which SwarmUI does not know.

    Args:
        model: name of the model's YAML.
        base: its public name.
        resolution: side of the square whose area the model's images have.
        native: whether layers have the names of the model's own code.
        facts: further entries; those without a value are left out.
    """
    known = catalogue().get(model)
    # The licence of the YAML is that of its own base.
    licence = known.licence.replace(", gated", "") if known and known.base == base else ""
    entries = {
        "sai_model_spec": VERSION,
        "architecture": f"{known.architecture if known else model}/lora",
        "implementation": COMFYUI if native else "diffusers",
        "resolution": f"{resolution}x{resolution}" if resolution else None,
        "usage_hint": f"Trained on {base}.",
        "license": re.sub(r"\[(.+?)\]\((.+?)\)", r"\1 (\2)", licence),
    }
    return {name: value for name, value in (entries | facts).items() if value}


def modelspec_in(metadata: Mapping[str, str]) -> dict[str, str]:
    """Return a header's entries of the standard, without their prefix."""
    return {key.removeprefix(PREFIX): text for key, text in metadata.items() if key.startswith(PREFIX)}
