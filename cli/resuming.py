"""Resuming a run: the checkpoint, the settings that must be those of the run, and the end of a finished run."""

import pickle
import shlex
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from cli.terminal import is_first_process, log
from foundation.errors import UserError, without_credentials
from foundation.files import reading
from foundation.settings import flat_settings
from report.quoting import has_secret, program
from runs.config_file import read_config, resolvable
from runs.run_folder import End, RunFolder

# The checkpoint restores the state of these, which would hide a changed setting.
RESTORED = ("adapter", "optimizer", "ema")
# Settings of the start of a run, not of its training.
OF_A_START = ("defaults", "hydra", "task", "output_dir", "ckpt_path", "resume")


class Start(NamedTuple):
    """The checkpoint that a run starts from, None for a new one; its step; and the end of a finished run."""

    checkpoint: Path | None = None
    step: int = 0
    end: End | None = None


def find_start(cfg: DictConfig, run: RunFolder, settings: dict[str, Any]) -> Start:
    """Return the start of a run with these settings; raises UserError if it cannot be resumed with them."""
    if cfg.resume and (end := run.read_end(cfg.trainer.max_steps, cfg.early_stopping)) is not None:
        start = Start(run.checkpoint, end.step, end)
    else:
        start = find_checkpoint(cfg.ckpt_path, cfg.resume, run)
    if start.checkpoint is not None:
        check_resumable(settings, RunFolder.of_checkpoint(start.checkpoint))
    return start


def find_checkpoint(ckpt_path: str | None, resume: str | None, run: RunFolder) -> Start:
    """Return the checkpoint to resume from.

    Args:
        ckpt_path: a path, or `last` for the last intact checkpoint of the run.
        resume: auto for `last` if the run has saved a checkpoint.

    Raises:
        UserError: the checkpoint is missing or damaged, or the folder contains another run, which would be overwritten.
    """
    if resume == "auto" and run.checkpoints():
        ckpt_path = "last"
    last = run.checkpoint
    path = None if ckpt_path is None else last if ckpt_path == "last" else Path(ckpt_path).expanduser()
    # Other processes of a run may come here after the first has saved.
    if is_first_process() and (path is None or path.resolve() != last.resolve()):
        check_unused(run)
    if path is None:
        return Start()
    weights = RunFolder.of_checkpoint(path).saved_weights()
    candidates = run.checkpoints() if path == last else [path] if path.is_file() else []
    if not candidates:
        nothing = path == last and run.config.is_file()
        hint = "the run has saved nothing: leave ckpt_path out to start it again" if nothing else "name another"
        raise UserError(
            f"ckpt_path={ckpt_path}: there is no checkpoint {path}; {_from_weights(weights) if weights else hint}"
        )
    *newer, oldest = candidates
    for path, before in zip(newer, candidates[1:], strict=True):
        try:
            return Start(path, checkpoint_step(path, f"{before} is tried"))
        except UserError as error:
            log.info(f"note: {error}")
    return Start(oldest, checkpoint_step(oldest, f"name another ckpt_path, or {_from_weights(weights)}"))


def newest_run() -> RunFolder | None:
    """Return the run below outputs/ with the newest checkpoint."""
    checkpoints = Path("outputs").glob(str(RunFolder("**").checkpoint))
    newest = max(checkpoints, key=lambda path: path.stat().st_mtime, default=None)
    return None if newest is None else RunFolder.of_checkpoint(newest)


def check_resume(cfg: DictConfig) -> None:
    """Raise a UserError for an impossible `resume`."""
    if cfg.resume not in (None, "auto"):
        raise UserError(f"resume={cfg.resume}: choose auto, or leave it out; to name a checkpoint there is ckpt_path")
    if cfg.resume and cfg.ckpt_path is not None:
        raise UserError(f"resume={cfg.resume} chooses the checkpoint itself: leave ckpt_path={cfg.ckpt_path} out")
    if cfg.resume and OmegaConf.is_interpolation(cfg, "output_dir"):
        raise UserError(f"resume={cfg.resume} needs output_dir=FOLDER, the same each time")


def check_unused(run: RunFolder) -> None:
    """Raise a UserError if the folder contains the weights of another run."""
    here = f"output_dir={run} already contains a run"
    if run.checkpoint.is_file():
        raise UserError(f"{here}: resume it with ckpt_path=last, or choose another folder")
    # After an interrupted first save the same weights will be written again.
    if not run.unfinished_checkpoints() and (weights := run.saved_weights()):
        raise UserError(f"{here} without a checkpoint: choose another folder, and {_from_weights(weights)}")


def _from_weights(weights: Path | None) -> str:
    if weights is None:
        return "start again"
    setting = "model.pretrained_model_name_or_path" if weights.parent.name == "model" else "adapter.init_from"
    return f"start from the weights of this one by {setting}={weights}"


def checkpoint_step(path: Path, remedy: str) -> int:
    """Return the step of a checkpoint, after checking its checksums and structure; its tensors are not loaded."""
    import torch

    with reading(path, remedy):
        with zipfile.ZipFile(path) as parts:
            if damaged := parts.testzip():
                raise ValueError(f"checksum of {damaged}")
        try:
            checkpoint = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as error:  # PyTorch's own message explains how to run its code all the same
            raise ValueError("it contains more than tensors and numbers, which is not run") from error
        for part in ("state_dict", "loops", "optimizer_states", "lr_schedulers"):
            checkpoint[part]
        return int(checkpoint["global_step"])


def start_again(run: RunFolder) -> None:
    """Remove the output of an earlier run in this folder that ended before its first save.

    Raises:
        UserError: the folder's config.yaml is not a run's.
    """
    if not run.config.is_file():
        return
    with reading(run.config, "choose another output_dir"):
        if "_target_: lightning_modules." not in run.config.read_text(encoding="utf-8"):
            raise UserError(f"{run.config} is not a run's: choose another output_dir, or remove the file")
    log.info(f"note: the run in {run} ended before its first checkpoint: it is started again")
    run.remove_leftovers()


def check_resumable(settings: dict[str, Any], run: RunFolder) -> None:
    """Compare the settings with those of the resumed run, and note each change.

    Raises:
        UserError: the checkpoint would restore the former value of a setting, and so hide the change.
    """
    if not run.config.is_file():
        return
    remedy = "remove the file, to resume without comparing the settings"
    with reading(run.config, remedy):
        saved, earlier = OmegaConf.create(resolvable(run.config, remedy)), read_config(run.config, remedy)
        if lacking := {"adapter", "optimizer", "scheduler", "model", "data"} - earlier.keys():
            raise ValueError(f"it lacks {', '.join(sorted(lacking))}")
    configs = [(saved, flat_settings(earlier)), (OmegaConf.create(settings), flat_settings(settings))]
    hidden = []
    for key in sorted({key for _, written in configs for key in written}):
        group = key.partition(".")[0]
        before, after = (written.get(key) for _, written in configs)
        if group in OF_A_START or before == after:
            continue
        # A value that is computed from other settings, such as the length of a schedule, may change with them.
        was, now = (OmegaConf.select(cfg, key, default=written.get(key)) for cfg, written in configs)
        if was == now:
            continue
        was, now = without_credentials(str(was)), without_credentials(str(now))
        if has_secret(key):
            was = now = "***"
        line = f"{key} was {was} in {run} and is {now} now"
        if group in RESTORED or key == "objective._target_":
            hidden.append(line)
        else:
            log.info(f"note: {line}")
    if hidden:
        raise UserError(
            f"cannot resume with a changed setting: {'; '.join(hidden)}. Undo it, or choose "
            f"another output_dir and {_from_weights(run.saved_weights())}; or resume with the run's own settings: "
            f"{program('train')} output_dir={shlex.quote(str(run))} ckpt_path=last"
        )
