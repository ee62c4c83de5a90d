"""The weights of a run to huggingface.co, which must never cost the run."""

import shutil
from typing import Any

import lightning.pytorch as L

from callbacks.best_effort import best_effort
from callbacks.lookup import find_callback
from callbacks.lora_checkpoint import LoRACheckpoint
from callbacks.run_folder import RunFolder
from callbacks.uploads import HELD, Uploads, held_for_upload
from datamodules.errors import UserError
from lightning_modules.edit_module import EditModule


class HubUpload(L.Callback):
    """Uploads `last` as the repository's root, and `best` as its folder best/, when training has ended.

    With `every=save` the newest weights, too, as soon as they are saved: beside training, one upload at a time, and of
    those that wait the newest alone. The first process uploads. What fails is tried again, and then said in one line.

    Args:
        output_dir: the run's folder.
        repository: owner/name; None to upload nothing.
        private: whether a repository that is made for it is.
        every: `end` or `save`.
    """

    def __init__(self, output_dir: str, repository: str | None, private: bool, every: str) -> None:
        self.run = RunFolder(output_dir)
        self.repository = repository
        self.private = private
        self.every = every
        self._kind = ""  # the adapter's folder
        self._saved_step = -1
        self._uploads: Uploads | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        assert isinstance(pl_module, EditModule)
        assert pl_module.adapter is not None
        self._kind = pl_module.adapter.folder
        if trainer.is_global_zero and self.repository is not None:
            self._uploads = Uploads(self.repository, self.private)
            self._saved_step = trainer.global_step
            shutil.rmtree(self.run.path / HELD, ignore_errors=True)  # of a run that was killed

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        assert isinstance(pl_module, EditModule)
        assert pl_module.adapter is not None
        keeper = find_callback(trainer, LoRACheckpoint)
        if self._uploads is None or self.every != "save" or keeper is None or keeper.saved_step == self._saved_step:
            return
        self._saved_step = keeper.saved_step
        with best_effort(f"upload of step {keeper.saved_step}"):
            name = f"step-{keeper.saved_step:06d}" if pl_module.adapter.keeps_steps else "last"
            folder = held_for_upload(self.run.weights(self._kind, name), self.run.path / HELD)
            self._uploads.begin({"": folder})

    def finish(self) -> None:
        """After the run: upload what there is, and wait for it; a signal ends the wait."""
        folders = {"": self.run.weights(self._kind, "last"), "best": self.run.weights(self._kind, "best")}
        folders = {place: folder for place, folder in folders.items() if folder.is_dir()}
        if self._uploads is None or not folders:
            return
        with best_effort(f"upload to {self.repository}"):
            held = {place: held_for_upload(folder, self.run.path / HELD) for place, folder in folders.items()}
            self._uploads.finish(held, folders)
            shutil.rmtree(self.run.path / HELD, ignore_errors=True)


def check_upload(repository: str | None, every: str) -> None:
    """Raise a UserError for an upload that cannot succeed, before anything is computed."""
    if every not in ("end", "save"):
        raise UserError(f"hub.every={every}: choose end or save")
    if repository is None:
        return
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
        valid = repository.count("/") == 1
    except HFValidationError:
        valid = False
    if not valid:
        raise UserError(f"hub.push={repository}: give owner/name, of letters, digits, -, _ and .")
    if constants.HF_HUB_OFFLINE:
        raise UserError(
            f"hub.push={repository} needs the network, and HF_HUB_OFFLINE=1 keeps off it: unset one of them"
        )
    if get_token() is None:
        raise UserError(
            f"hub.push={repository} needs a token that may write: log in with `hf auth login`, or set HF_TOKEN"
        )
