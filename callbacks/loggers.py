"""Loggers whose runs continue when training resumes, and alerts."""

import contextlib
import logging
import secrets
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger, wandb
from lightning.pytorch.utilities import rank_zero_only

from foundation.errors import UserError
from foundation.files import replacing
from foundation.settings import flat_settings
from runs.run_folder import RunFolder

log = logging.getLogger("retouch")


def alert(loggers: list[Any], title: str, level: str, **more: Any) -> None:
    """Send an alert of a level (info, warn or error), with `text` and `step`, to every logger that shows alerts."""
    for logger in [logger for logger in loggers if hasattr(logger, "alert")]:
        logger.alert(title, level, **more)


class WandbLogger(wandb.WandbLogger):
    """Weights & Biases' logger, which keeps its run's id in the folder, and continues it from a checkpoint.

    Args:
        settings: further arguments of the logger and of `wandb.init`.
    """

    def __init__(self, save_dir: str, **settings: Any) -> None:
        run = RunFolder(save_dir)
        path = run.path / "wandb" / "run_id.txt"
        is_first = rank_zero_only.rank == 0  # type: ignore[attr-defined]
        if is_first and not (path.is_file() and run.checkpoint.is_file()):
            with replacing(path) as temporary:
                temporary.write_text(secrets.token_hex(4), encoding="utf-8")
        known = path.read_text(encoding="utf-8") if path.is_file() else None  # only the first process logs
        super().__init__(save_dir=save_dir, **{"id": known, **settings})


class TrackioLogger(Logger):
    """Metrics, settings, images and alerts in trackio's database on this machine.

    A run has the name of its folder and of the one around it, which is its group: a sweep is a group. The first entry
    creates it, so that a refused command leaves none. It continues if the folder contains a checkpoint.
    """

    name, version = "", ""

    def __init__(self, save_dir: str, project: str) -> None:
        try:
            import trackio
        except ImportError as error:
            raise UserError("logger=trackio needs trackio. Run pip install 'retouch[trackio]'.") from error
        group, name = Path(save_dir).resolve().parts[-2:]
        self.name, self.version = project, f"{group}/{name}"
        resume = "allow" if RunFolder(save_dir).checkpoint.is_file() else "never"
        self._begin = lambda: trackio.init(project, self.version, group, config=self._settings, resume=resume)
        self._trackio: Any = trackio
        self._settings: dict[str, Any] = {}

    @cached_property
    def run(self) -> Any:
        log.info(f"look at it: trackio show --project {self.name} (stored in {self._trackio.TRACKIO_DIR})")
        with contextlib.redirect_stdout(None):
            return self._begin()

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self._settings = flat_settings(params)

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.run.log(metrics, step)

    def log_image(self, key: str, images: list[Any], step: int) -> None:
        self.run.log({key: self._trackio.Image(images[0])}, step)

    def alert(self, title: str, level: str, **more: Any) -> None:
        if "run" in vars(self):
            with contextlib.redirect_stdout(None):
                self.run.alert(title, level=self._trackio.AlertLevel(level), **more)

    def finalize(self, status: str) -> None:
        with contextlib.redirect_stdout(None), contextlib.suppress(RuntimeError):  # finished before
            self._trackio.finish()
