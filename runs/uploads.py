"""The upload of a run's weights to huggingface.co, which must never cost the run."""

import logging
import shlex
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from datamodules.errors import UserError, without_credentials
from datamodules.files import reason
from runs.run_folder import RunFolder, best_effort
from runs.signals import stop

log = logging.getLogger("retouch")

# Seconds before each further try.
PAUSES = (2.0, 8.0, 30.0)
# Seconds that the hub may be silent for.
SILENCE = 120.0
# Answers of the hub after which a further try may do better; others of these hundreds are final.
PASSING = {408, 409, 412, 423, 425, 429}
# Temporary files that are written next to the weights.
HIDDEN = (".*", "**/.*")


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
        raise UserError(
            f"hub.push={repository} needs the network, and HF_HUB_OFFLINE=1 keeps off it: unset one of them"
        )
    if get_token() is None:
        raise UserError(
            f"hub.push={repository} needs a token that may write: log in with `hf auth login`, or set HF_TOKEN"
        )


def upload(run: RunFolder, kind: str, repository: str, private: bool) -> None:
    """Upload `last` as the repository's root and `best` as its folder best/, and log the result in one line.

    A failed upload is tried again. A signal ends the wait for it.

    Args:
        kind: the adapter's folder.
        private: whether a repository that is created for it is private.
    """
    folders = {"": run.weights(kind, "last"), "best": run.weights(kind, "best")}
    folders = {place: folder for place, folder in folders.items() if folder.is_dir()}
    if not folders:
        return
    with best_effort(f"upload to {repository}"):
        failures: list[str] = []
        thread = threading.Thread(
            target=lambda: failures.append(_try(folders, repository, private)), name="upload", daemon=True
        )
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
            commands = [
                f"hf upload {repository} {shlex.quote(str(folder))} {place or '.'}{end}"
                for place, folder in folders.items()
            ]
            log.warning(f"note: not uploaded to {repository}: {failure}; by hand: {' && '.join(commands)}")
        else:
            from huggingface_hub import constants

            log.info(f"uploaded: {constants.ENDPOINT}/{repository}")


def _try(folders: Mapping[str, Path], repository: str, private: bool) -> str:
    """Upload, several times if need be; return the reason of a failure, else an empty text."""
    for pause in (*PAUSES, None):
        try:
            _send(folders, repository, private)
            return ""
        except Exception as error:  # of the network's libraries, or of files: none of them may end the run
            failure, final = describe(error), is_final(error)
        if pause is None or final:
            break
        time.sleep(pause)
    return failure


def _send(folders: Mapping[str, Path], repository: str, private: bool) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.utils import get_session

    get_session().timeout = SILENCE  # none by default
    api = HfApi(library_name="retouch")
    api.create_repo(repository, private=private, exist_ok=True)
    for place, folder in folders.items():
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            path_in_repo=place,
            ignore_patterns=list(HIDDEN),
            commit_message=f"Upload {place or 'weights'}",
        )


def answer(error: BaseException | None) -> int | None:
    """The status that the hub answered with, if it has; an error may stand for another."""
    while error is not None:
        if (response := getattr(error, "response", None)) is not None:
            return int(response.status_code)
        error = error.__cause__
    return None


def is_final(error: BaseException) -> bool:
    """Whether a further try would get the same answer."""
    status = answer(error)
    return status is not None and 400 <= status < 500 and status not in PASSING


def describe(error: BaseException) -> str:
    """In one line that others may read."""
    cause = error.__cause__
    text = reason(error) if cause is None or not isinstance(error, RuntimeError) else f"{reason(error)} {reason(cause)}"
    return without_credentials(text).rstrip(".:")
