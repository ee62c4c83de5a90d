"""Going on with a run: from which checkpoint, and whether its settings fit."""

import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from datamodules.errors import UserError
from datamodules.files import reading
from tasks.terminal import is_first_process, log

# What goes on from its saved state, which would hide a new setting.
SAVED = ("adapter", "optimizer", "scheduler")
WEIGHTS = ("lora", "model")
# What a run writes beside its weights and checkpoints; config.yaml goes last: it marks a run's folder.
TRACES = (
    "samples",
    "tensorboard",
    "metrics.csv",
    "validation.csv",
    "active_ranks.png",
    "grid.png",
    "report.html",
    "config.yaml",
)


def find_checkpoint(ckpt_path: str | None, output_dir: Path) -> tuple[Path, int] | None:
    """The checkpoint to go on from, and its step.

    Raises:
        UserError: it is not there or damaged, or output_dir holds a run that this one would overwrite.
    """
    last = output_dir / "checkpoints" / "last.ckpt"
    path = None if ckpt_path is None else last if ckpt_path == "last" else Path(ckpt_path).expanduser()
    # Other processes of a run may come here after the first has saved.
    if is_first_process() and (path is None or path.resolve() != last.resolve()):
        check_unused(output_dir)
    if path is None:
        return None
    weights = saved_weights(path.parent.parent)
    if not path.is_file():
        nothing = path == last and (output_dir / "config.yaml").is_file()
        hint = "the run has saved nothing: leave ckpt_path out to start it anew" if nothing else "name another"
        raise UserError(
            f"ckpt_path={ckpt_path}: there is no checkpoint {path}; {_from_weights(weights) if weights else hint}"
        )
    return path, _step(path, f"name another ckpt_path, or {_from_weights(weights)}")


def check_unused(output_dir: Path) -> None:
    """Raise a UserError for a folder with what another run has learned."""
    here = f"output_dir={output_dir} already contains a run"
    if (output_dir / "checkpoints" / "last.ckpt").is_file():
        raise UserError(f"{here}: resume it with ckpt_path=last, or choose another folder")
    if weights := saved_weights(output_dir):
        raise UserError(f"{here} without a checkpoint: choose another folder, and {_from_weights(weights)}")


def saved_weights(run: Path) -> Path | None:
    """The newest weights in a run's folder."""
    folders = [folder for kind in WEIGHTS for folder in (run / kind).glob("*") if any(folder.glob("[!.]*"))]
    return max(folders, key=lambda folder: (folder.name == "last", folder.stat().st_mtime), default=None)


def _from_weights(weights: Path | None) -> str:
    """What to do instead of going on."""
    if weights is None:
        return "start anew"
    setting = "model.pretrained_model_name_or_path" if weights.parent.name == "model" else "adapter.init_from"
    return f"start from the weights of this one by {setting}={weights}"


def _step(path: Path, remedy: str) -> int:
    """The step of a checkpoint; all of its structure is read, and none of its tensors."""
    import torch

    with reading(path, remedy):
        if not zipfile.is_zipfile(path):
            raise ValueError("its end is missing, or it is no checkpoint")
        try:
            checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:  # which PyTorch explains by how to run it all the same
            raise ValueError("it holds more than tensors and numbers, which is not run") from error
        if not isinstance(checkpoint, dict):
            raise ValueError("it is no checkpoint")
        for part in ("state_dict", "loops", "optimizer_states", "lr_schedulers"):
            checkpoint[part]
        return int(checkpoint["global_step"])


def start_anew(output_dir: Path) -> None:
    """Take away what a run left that ended before it saved anything; nothing where there is no run's config.yaml.

    Raises:
        UserError: the config.yaml is none of a run's.
    """
    config = output_dir / "config.yaml"
    if not config.is_file():
        return
    with reading(config, "choose another output_dir"):
        if "_target_: lightning_modules." not in config.read_text(encoding="utf-8"):
            raise UserError(f"{config} is not a run's: choose another output_dir")
    log.info(f"note: the run in {output_dir} ended before it saved anything: it is started anew")
    for path in (output_dir / name for name in TRACES):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def check_resumable(settings: dict[str, Any], checkpoint: Path) -> None:
    """Compare with the run that wrote the checkpoint.

    Raises:
        UserError: adapter, optimizer or schedule differ. These go on from their saved state, which would hide a
            new setting.
    """
    from datamodules.shards.failures import shown

    config = checkpoint.parent.parent / "config.yaml"
    if not config.is_file():
        return
    with reading(config, "remove the file, to go on without comparing the settings"):
        saved: Any = OmegaConf.load(config)
        earlier: Any = OmegaConf.to_container(saved)
        keys = [
            (group, key) for group in (*SAVED, "model", "data") for key in sorted({**earlier[group], **settings[group]})
        ]
        # What follows from other settings, as the length of a schedule, may change with them.
        values = [OmegaConf.select(saved, f"{group}.{key}") for group, key in keys]
    present = OmegaConf.create(settings)
    for (group, key), value in zip(keys, values, strict=True):
        now = OmegaConf.select(present, f"{group}.{key}")
        if earlier[group].get(key) != settings[group].get(key) and value != now:
            what = f"{group}.{key} was {shown(str(value))} in {config.parent} and is {shown(str(now))} now"
            if group in SAVED:
                raise UserError(
                    f"{what}: a run goes on with its own settings. To start a new one from its weights, pass "
                    f"adapter.init_from={config.parent} instead of ckpt_path"
                )
            log.warning(f"note: {what}")
