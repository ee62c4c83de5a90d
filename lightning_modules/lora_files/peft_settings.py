"""peft's settings of a LoRA, in diffusers' header or in adapter_config.json: the scale, and what contradicts it."""

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import regex

from lightning_modules.lora_files.delta import Delta, LowRank

SECONDS_OF_A_MATCH = 0.1
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


def unread_setting(settings: Iterable[tuple[str, Any]]) -> tuple[str, Any] | None:
    """Return a setting that changes a delta in a way that is not read, the kind before all others; None if all are."""
    usual: tuple[Any, ...] = (None, False, "", [], {})
    found = [(key, one) for key, one in settings if key not in UNDERSTOOD and one not in AS_USUAL.get(key, usual)]
    return min(found, key=lambda item: item[0] != "peft_type", default=None)


def peft_scale(settings: Mapping[str, Any], layers: tuple[str, ...], delta: Delta) -> float | None:
    """Return alpha / rank of a layer, alpha / sqrt(rank) for rsLoRA (arXiv 2312.03732), or None without an alpha."""
    own = settings.get("peft_type") in ("LOKR", "LOHA")  # the settings' rank counts even if the factors are whole
    alpha = _layer_setting(settings, "alpha" if own else "lora_alpha", layers)
    rank = delta.divisor if not own and delta.divisor is None else _layer_setting(settings, "r", layers, delta.divisor)
    if alpha is None or rank is None:
        return None
    if rank <= 0:
        raise ValueError(f"r={rank:g} is not a rank")
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def contradiction(settings: Mapping[str, Any], layers: tuple[str, ...], delta: Delta) -> tuple[str, str] | None:
    """Return the first setting that contradicts a layer's tensors, and the fact about them; None if all agree.

    Args:
        layers: the file's name of the layer, and diffusers' names of the layers that it stands for.
    """
    low_rank, rank, targets = isinstance(delta, LowRank), delta.divisor, settings.get("target_modules")
    kind, is_dora = "LORA" if low_rank else delta.kind.upper(), delta.kind == "DoRA"
    if (settings.get("peft_type") or kind) != kind:
        return f"peft_type={settings['peft_type']}", f"is a {delta.kind}"
    if low_rank and bool(settings.get("use_dora", is_dora)) != is_dora:
        return f"use_dora={str(not is_dora).lower()}", f"is a {delta.kind}"
    # A layer that joins others may hold the components of each.
    joined = max(len(layers) - 1, 1) if low_rank else 1
    stated = _layer_setting(settings, "r", layers)
    if rank is not None and stated and (rank % stated or rank // stated > joined):
        return f"r={stated:g}", f"has rank {rank}"
    if isinstance(targets, list):
        ends = tuple(f".{one}" for one in targets)
        is_target = any(f".{layer}".endswith(ends) for layer in layers)
    else:
        is_target = targets in (None, "", "all-linear") or _matches(targets, layers, "target_modules")
    return None if is_target else ("target_modules without it", "has tensors")


def _layer_setting(
    settings: Mapping[str, Any], name: str, layers: tuple[str, ...], default: float | None = None
) -> float | None:
    """Return a setting of a layer with these names: its pattern's value, else the common value, else the default."""
    kind = "rank_pattern" if name == "r" else "alpha_pattern"
    pattern = settings.get(kind) or {}
    own = (value for key, value in pattern.items() if _matches(key, layers, kind))
    value = next(own, settings.get(name, default))
    if not isinstance(value, int | float | None):
        raise ValueError(f"{name} is not a number")
    return value


@lru_cache(2**18)
def _matches(pattern: str, layers: tuple[str, ...], kind: str) -> bool:
    """Return whether a pattern of peft matches one of a layer's names; `kind` is its setting."""
    try:  # a file's expression may take for ever
        expression = rf"(.*\.)?({pattern})$"
        return any(regex.match(expression, layer, timeout=SECONDS_OF_A_MATCH) for layer in layers)
    except (regex.error, TimeoutError) as error:
        raise ValueError(f"{kind}: {error}") from error
