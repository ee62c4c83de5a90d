"""task=average: the mean of what a run has saved, as an average of any length over its training would have been."""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
from omegaconf import DictConfig
from torch import Tensor

from datamodules.errors import UserError, listing
from datamodules.files import reading, replacing
from lightning_modules.adapters.formats.find import WEIGHTS_NAME, find_or_download
from lightning_modules.adapters.formats.lora_file import HEADER_KEY, LoRAFile
from lightning_modules.adapters.formats.written import require_finite
from runs.run_folder import RunFolder
from tasks.edit import as_list
from tasks.lora_header import shown
from tasks.terminal import log

# Weights that are no longer a run's own.
NOT_OF_A_RUN = {"average": "is an average already", "export": "was written by task=export"}


def average(cfg: DictConfig, output_dir: Path) -> None:
    """Write a LoRA for each of cfg.average.relative_std."""
    deviations = as_list(cfg.average, "relative_std")
    folders = {std: output_dir / f"std-{std:g}" if len(deviations) > 1 else output_dir for std in deviations}
    paths = {std: folder / WEIGHTS_NAME for std, folder in folders.items()}
    for path in paths.values():
        if path.exists() and not cfg.overwrite:
            raise UserError(f"{path} exists: choose another output_dir=FOLDER, or replace it by overwrite=true")
    files = savings(cfg)
    steps = list(files)
    averaged = "ema" in (files[steps[0]].header or {})
    log.info(f"{'EMA' if averaged else 'raw'} weights of {len(steps)} savings, step {steps[0]} to {steps[-1]}")
    if averaged:
        log.warning("note: they are averages already, and become longer ones; lora=RUN takes its raw weights")
    for std, path in paths.items():
        weights = profile(steps, std)
        write(files, std, weights, path)
        log.info(f"done: {path} (relative_std={std:g}; {weights[-1]:.1%} of it is the last saving)")


def savings(cfg: DictConfig) -> dict[int, LoRAFile]:
    """The files of cfg.lora, by their steps, in order.

    Raises:
        UserError: there are fewer than two, or they are not of one run.
    """
    names = [] if cfg.lora is None else [str(lora) for lora in as_list(cfg, "lora")]
    folders = of_run(Path(names[0]).expanduser()) if len(names) == 1 else names
    if len(folders) < 2:
        raise UserError(
            "task=average: give a run with several savings, lora=outputs/RUN, or two or more of its files, "
            "lora=[outputs/RUN/lora/step-000100,outputs/RUN/lora/step-000200]"
        )
    files: dict[int, LoRAFile] = {}
    for file in [LoRAFile(find_or_download(folder)) for folder in folders]:
        step = step_of(file)
        if step in files:
            raise UserError(f"task=average: {files[step].path} and {file.path} are both of step {step}: leave one out")
        files[step] = file
    ordered = [files[step] for step in sorted(files)]
    for other in ordered[1:]:
        check_alike(ordered[0], other)
    return {step: files[step] for step in sorted(files)}


def of_run(run: Path) -> list[Path]:
    """The folders of a run's savings: with an EMA, those of its raw weights."""
    folders = RunFolder(run).saved_steps("lora").values()
    raw = [folder.with_name(f"{folder.name}-raw") for folder in folders]
    return [one if one.is_dir() else folder for one, folder in zip(raw, folders, strict=True)]


def step_of(file: LoRAFile) -> int:
    """After which a run saved it.

    Raises:
        UserError: it does not say so, or is no run's own weights.
    """
    header = file.header or {}
    for key, words in NOT_OF_A_RUN.items():
        if key in header:
            raise UserError(f"task=average: {file.path} {words}: give what a run has saved, lora=outputs/RUN")
    step = header.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 1:
        raise UserError(
            f"task=average: {file.path} does not say after which step it was saved: give what a run of Retouch has "
            "saved, lora=outputs/RUN; task=export merge=[...] adds up any LoRAs"
        )
    return step


def check_alike(one: LoRAFile, other: LoRAFile) -> None:
    """Raise a UserError for two files whose tensors are no savings of one run."""
    both = f"task=average: {one.path} and {other.path} are not of one run"
    facts, others = (_said_of_the_run(file) for file in (one, other))
    for name in facts.keys() | others.keys():
        if facts.get(name) != others.get(name):
            raise UserError(f"{both}: {name} is {shown(facts.get(name))} and {shown(others.get(name))}")
    keys = one.shapes.keys() | other.shapes.keys()
    if different := sorted(key for key in keys if one.shapes.get(key) != other.shapes.get(key)):
        raise UserError(f"{both}: they differ in {listing(different)}")


def _said_of_the_run(file: LoRAFile) -> dict[str, Any]:
    """What is the same in all savings of a run."""
    header = file.header or {}
    parts = [("adapter", file.adapter), ("ema", header.get("ema") or {})]
    said = {f"{part}.{name}": value for part, values in parts for name, value in values.items()}
    return {"base": header.get("base"), "model.name": (header.get("model") or {}).get("name"), **said}


def profile(steps: Sequence[int], relative_std: float) -> list[float]:
    """Each saving's weight in a power function average, t^gamma, of this standard deviation (arXiv 2312.02696, 3.1).

    A saving stands for the steps since the one before: its weight is the integral of t^gamma over them, so that the
    average is the one that would have been kept by an update at each saving.

    Args:
        steps: ascending.
        relative_std: of t, relative to the last step: sqrt(gamma + 1) / ((gamma + 2) sqrt(gamma + 3)).
    """
    ends = (np.array([0, *steps]) / steps[-1]) ** (exponent(relative_std) + 1)
    return [float(weight) for weight in np.diff(ends)]


def exponent(relative_std: float) -> float:
    """gamma: the largest root of (gamma + 2)^2 (gamma + 3) - (gamma + 1) / relative_std^2."""
    square = relative_std**-2
    return float(np.roots([1, 7, 16 - square, 12 - square]).real.max())


def write(files: Mapping[int, LoRAFile], relative_std: float, weights: Sequence[float], path: Path) -> None:
    """Write the weighted mean, each tensor by its name, in float32; the header is the last file's."""
    tensors = weighted_mean(list(files.values()), weights)
    require_finite(tensors, "and train again")
    made = {"relative_std": relative_std, "steps": list(files), "weights": list(weights)}
    header = {**(files[max(files)].header or {}), "average": made}
    blob = safetensors.torch.save(tensors, {HEADER_KEY: json.dumps(header, sort_keys=True)})
    with replacing(path) as temporary:
        temporary.write_bytes(blob)


def weighted_mean(files: Sequence[LoRAFile], weights: Sequence[float]) -> dict[str, Tensor]:
    """Summed in float64, so that equal files give themselves."""
    with ExitStack() as stack:
        stack.enter_context(reading(files[-1].path, "name other files"))
        opened = [stack.enter_context(safetensors.safe_open(file.path, framework="pt")) for file in files]
        return {
            key: sum(
                file.get_tensor(key).double() * weight for file, weight in zip(opened, weights, strict=True)
            ).float()
            for key in files[0].shapes
        }
