"""What task=export says of the file that it has written."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from hydra.utils import get_class
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from datamodules.errors import UserError
from lightning_modules.adapters.formats.lora_file import LoRAFile
from lightning_modules.adapters.formats.readers import readers
from lightning_modules.adapters.formats.written import format_of
from lightning_modules.adapters.low_rank import relative_change
from lightning_modules.adapters.update import Update
from tasks.loras_read import LoRA
from tasks.models import KnownModel

# By safetensors' names.
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# What no rounding in float32 explains: the file would not be what was read.
TOO_DIFFERENT = 1e-5
# Layers that are named because they change most.
WORST = 3


def say_written(path: Path, lora: LoRA, model: KnownModel, format: str) -> None:
    """A table of what was written, by the file itself, and of who reads it.

    Raises:
        UserError: the file is not what was to be written.
    """
    written = LoRAFile(path)
    read = written.read(model.names, model.base)
    kept = next(written.dtypes[key] for key, shape in written.shapes.items() if shape)  # an alpha is a number alone
    rounded = {name: one.to(DTYPES[kept]) for name, one in lora.updates.items()}
    wrong = relative_change(rounded, read) > TOO_DIFFERENT
    if wrong or any(not _same_magnitude(one, read[name]) for name, one in rounded.items()):
        path.unlink()
        raise UserError(f"{path} was written and was not what it should be, so it is deleted; please report it")
    error = relative_change(lora.updates, read)
    table = Table(title=escape(str(path)), title_justify="left", show_header=False)
    table.add_row("format", format)
    table.add_row("model", f"{model.base}{', or another one of these layers' if model.guessed else ''}")
    table.add_row("layers", f"{len(written.parts)}{', DoRA' if lora.is_dora else ''}")
    if lora.kind == "LoRA":
        most = max(update.divisor or 0 for update in written.empty.values())
        fused = f", {most} where several of diffusers' layers are one here" if most > lora.rank else ""
        table.add_row("rank", f"{lora.rank}{fused}")
    else:
        table.add_row(lora.kind, ", ".join(dict.fromkeys(update.size for update in written.empty.values())))
    table.add_row("numbers", str(DTYPES[kept])[6:] + ("" if error < TOO_DIFFERENT else f", {percent(error)} off"))
    table.add_row("size", decimal(path.stat().st_size))
    table.add_section()
    family: type[Any] = get_class(model.settings._target_)
    how = format_of(format, model.names)
    for reader in readers(how, model.names, lora.updates, family.pipeline_name, lora.is_dora, kind=lora.kind):
        table.add_row(reader.program, escape(reader.verdict))
    Console(stderr=True).print(table)


def _same_magnitude(one: Update, other: Update) -> bool:
    """DoRA's, or neither has any."""
    first, second = (update.tensors().get("magnitude") for update in (one, other))
    if first is None or second is None:
        return first is second
    return torch.equal(first.float(), second.float())


def most_in(errors: Mapping[str, float]) -> str:
    """The layers whose errors are largest."""
    worst = sorted(errors, key=lambda layer: -errors[layer])[:WORST]
    return f"most in {', '.join(f'{layer} ({percent(errors[layer])})' for layer in worst)}"


def percent(share: float) -> str:
    """To three digits."""
    return f"{100 * share:.3g} %"
