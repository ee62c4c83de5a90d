"""task=average: the weighted mean of a run's LoRA files, like an EMA of any length over its training."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch import Tensor

from cli.terminal import log
from foundation.errors import UserError
from lightning_modules.lora_files.reading import WEIGHTS_NAME, LoRAFile, find_or_download, shown
from lightning_modules.lora_files.writing import modelspec_in, require_finite, save
from runs.run_folder import RunFolder
from tasks.edit import as_list
from tasks.export import require_free


def average(cfg: DictConfig, output_dir: Path) -> None:
    """Write a LoRA for each of cfg.average.relative_std."""
    deviations = as_list(cfg.average, "relative_std")
    folders = {std: output_dir / f"std-{std:g}" if len(deviations) > 1 else output_dir for std in deviations}
    paths = {std: folder / WEIGHTS_NAME for std, folder in folders.items()}
    for path in paths.values():
        require_free(path, cfg.overwrite)
    files = _files_by_step(cfg)
    steps = list(files)
    averaged = "ema" in files[steps[0]].header
    log.info(f"{'EMA' if averaged else 'raw'} weights of {len(steps)} files, step {steps[0]} to {steps[-1]}")
    if averaged:
        log.warning("note: they are averages already, and become longer ones; lora=RUN uses its raw weights")
    for std, path in paths.items():
        weights = ema_weights(steps, std)
        tensors = _weighted_mean(list(files.values()), weights)
        require_finite(tensors, "and train again")
        facts = {"relative_std": std, "steps": steps, "weights": weights}
        last = files[steps[-1]]
        header = {**last.header, "average": facts, "modelspec": modelspec_in(last.metadata)}
        save(path, tensors, header)
        log.info(f"done: {path} (relative_std={std:g}; {weights[-1]:.1%} of it is the last file)")


def _files_by_step(cfg: DictConfig) -> dict[int, LoRAFile]:
    """Return the files of cfg.lora by their steps, in order; raises UserError unless they are of one run."""
    names = [] if cfg.lora is None else [str(lora) for lora in as_list(cfg, "lora")]
    folders = _raw_folders(Path(names[0]).expanduser()) if len(names) == 1 else names
    if len(folders) < 2:
        raise UserError(
            "task=average: give a run with several LoRA files, lora=outputs/RUN, or two or more of its files, "
            "lora=[outputs/RUN/lora/step-000100,outputs/RUN/lora/step-000200]"
        )
    files: dict[int, LoRAFile] = {}
    for file in [LoRAFile(find_or_download(folder)) for folder in folders]:
        step = file.header.get("step")
        if {"average", "export"} & file.header.keys() or not isinstance(step, int) or step < 1:
            raise UserError(
                f"task=average: {file.path} was not saved by a training run at one of its steps. Give "
                "lora=outputs/RUN; task=export merge=[...] adds up any LoRAs"
            )
        if step in files:
            raise UserError(f"task=average: {files[step].path} and {file.path} are both of step {step}: leave one out")
        files[step] = file
    ordered = {step: files[step] for step in sorted(files)}
    first, *others = ordered.values()
    for other in others:
        facts, wanted = _facts(other), _facts(first)
        if different := sorted(name for name in facts.keys() | wanted.keys() if facts.get(name) != wanted.get(name)):
            name = different[0]
            raise UserError(
                f"task=average: {first.path} and {other.path} are not of one run: {name} is {shown(wanted.get(name))} "
                f"and {shown(facts.get(name))}"
            )
    return ordered


def _raw_folders(run: Path) -> list[Path]:
    """Return the folders of a run's LoRA files; with an EMA, of its raw weights."""
    folders = RunFolder(run).saved_steps("lora").values()
    raw = [folder.with_name(f"{folder.name}-raw") for folder in folders]
    return [one if one.is_dir() else folder for one, folder in zip(raw, folders, strict=True)]


def _facts(file: LoRAFile) -> dict[str, Any]:
    """Return the facts that all files of a run have in common, with the shapes of their tensors."""
    return {
        "base": file.header.get("base"),
        "an EMA of the weights": "ema" in file.header,
        **file.adapter,
        **file.shapes,
    }


def ema_weights(steps: Sequence[int], relative_std: float) -> list[float]:
    """Return each file's weight in a power function average, t^gamma, of a standard deviation (arXiv 2312.02696, 3.1).

    A file stands for the steps since the previous one: its weight is the integral of t^gamma over them, so that the
    result equals an average that is updated whenever a file is written. `relative_std` is the standard deviation of t,
    relative to the last step: sqrt(gamma + 1) / ((gamma + 2) sqrt(gamma + 3)).
    """
    ends = (np.array([0, *steps]) / steps[-1]) ** (ema_exponent(relative_std) + 1)
    return [float(weight) for weight in np.diff(ends)]


def ema_exponent(relative_std: float) -> float:
    """Return gamma, the largest root of (gamma + 2)^2 (gamma + 3) - (gamma + 1) / relative_std^2."""
    square = relative_std**-2
    return float(np.roots([1, 7, 16 - square, 12 - square]).real.max())


def _weighted_mean(files: Sequence[LoRAFile], weights: Sequence[float]) -> dict[str, Tensor]:
    """Compute the weighted mean by tensor, in float32, summed in float64 so that equal files yield themselves."""
    zero = torch.zeros((), dtype=torch.float64)
    with ExitStack() as stack:
        readers = [stack.enter_context(file.opened()) for file in files]
        return {
            key: sum((read(key).double() * weight for read, weight in zip(readers, weights, strict=True)), zero).float()
            for key in files[0].shapes
        }
