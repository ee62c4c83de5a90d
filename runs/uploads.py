"""The upload of a run's weights to huggingface.co, which never fails the run."""

import logging
import shlex
import threading
from collections.abc import Mapping
from pathlib import Path

from datamodules.errors import UserError, without_credentials
from datamodules.files import reason
from runs.run_folder import RunFolder, best_effort
from runs.signals import stop

log = logging.getLogger("retouch")

SILENCE = 120.0  # seconds without an answer after which a request has failed
# Temporary files next to the weights.
HIDDEN = [".*", "**/.*"]


def check_upload(repository: str | None) -> None:
    """Raise a UserError for an upload that cannot succeed, before anything is computed."""
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
        raise UserError(f"hub.push={repository}: it needs the network, but HF_HUB_OFFLINE=1 is set. Unset one of them.")
    if get_token() is None:
        raise UserError(
            f"hub.push={repository}: it needs a token that may write. Log in with `hf auth login`, or set HF_TOKEN."
        )


def upload(run: RunFolder, kind: str, repository: str, private: bool) -> None:
    """Upload `last` as the repository's root and `best` as its folder best/; log the result in one line.

    huggingface_hub repeats requests that fail. A signal ends the wait for the upload.

    Args:
        kind: the adapter's folder.
        private: whether a repository that is created for the upload is private.
    """
    folders = {"": run.weights(kind, "last"), "best": run.weights(kind, "best")}
    folders = {place: folder for place, folder in folders.items() if folder.is_dir()}
    if not folders:
        return
    with best_effort(f"upload to {repository}"):
        failures: list[str] = []
        work = lambda: failures.append(_send(folders, repository, private))  # noqa: E731
        thread = threading.Thread(target=work, name="upload", daemon=True)
        if stop.signal is None:
            log.info(f"uploading to {repository}")
            thread.start()
        busy_with, stop.busy_with = stop.busy_with, "leaving the upload"
        while stop.signal is None and thread.is_alive():
            thread.join(0.1)
        stop.busy_with = busy_with
        failure = failures[0] if failures else f"stopped by {stop.signal.name if stop.signal else 'an error'}"
        if failure:
            end = " --private" if private else ""
            by_hand = [
                f"hf upload {repository} {shlex.quote(str(f))} {place or '.'}{end}" for place, f in folders.items()
            ]
            log.warning(f"note: not uploaded to {repository}: {failure}; by hand: {' && '.join(by_hand)}")
        else:
            from huggingface_hub import constants

            log.info(f"uploaded: {constants.ENDPOINT}/{repository}")


def _send(folders: Mapping[str, Path], repository: str, private: bool) -> str:
    """Upload; return the reason of a failure, or an empty text."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import get_session

    get_session().timeout = SILENCE  # none by default
    api = HfApi(library_name="retouch")
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        for place, folder in folders.items():
            message = f"Upload {place or 'weights'}"
            api.upload_folder(
                repo_id=repository,
                folder_path=folder,
                path_in_repo=place,
                ignore_patterns=HIDDEN,
                commit_message=message,
            )
    except Exception as error:  # of the network's libraries, or of files: none of them may end the run
        cause = error.__cause__ if isinstance(error, RuntimeError) else None
        failure = " ".join(reason(one) for one in (error, cause) if one is not None)
        return without_credentials(failure).rstrip(".:")
    return ""
