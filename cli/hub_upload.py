"""hub.push=OWNER/NAME: the weights are uploaded to huggingface.co at the end; a failure there never fails the run."""

import glob
import shlex
import threading
from collections.abc import Mapping
from pathlib import Path

from cli.terminal import log
from foundation.errors import listing, without_credentials
from foundation.files import link_below, reason
from runs.run_folder import RunFolder, best_effort
from runs.signals import stop

SILENCE = 120.0  # seconds without an answer of huggingface.co after which a request has failed


def push_to_hub(run: RunFolder, kind: str, repository: str, private: bool) -> None:
    """Upload `last` as the repository's root and `best` as its folder best/; log the result in one line.

    huggingface_hub repeats requests that fail. A signal ends the wait for the upload.

    Args:
        kind: the adapter's folder.
        private: whether a repository that is created for the upload is private.
    """
    folders = {place: run.weights(kind, name) for place, name in (("", "last"), ("best", "best"))}
    for linked in dict.fromkeys(filter(None, (link_below(run.path, folder) for folder in folders.values()))):
        log.warning(f"note: not uploaded to {repository}, since it is a link: {linked}")
    folders = {place: one for place, one in folders.items() if one.is_dir() and link_below(run.path, one) is None}
    if not folders:
        return
    failures: list[str] = []
    work = lambda: failures.append(_send(folders, repository, private))  # noqa: E731
    thread = threading.Thread(target=work, name="upload", daemon=True)
    with best_effort(f"upload to {repository}"):
        if stop.signal is None:
            log.info(f"uploading to {repository}")
            thread.start()
        busy_with, stop.busy_with = stop.busy_with, "leaving the upload"
        while stop.signal is None and thread.is_alive():
            thread.join(0.1)
        stop.busy_with = busy_with
        cause = stop.file or (stop.signal.name if stop.signal else "an error")
        failure = failures[0] if failures else f"stopped by {cause}"
        if failure:
            end = " --private" if private else ""
            commands = [
                f"hf upload {repository} {shlex.quote(str(f))} {place or '.'}{end}" for place, f in folders.items()
            ]
            log.warning(f"note: not uploaded to {repository}: {failure}; by hand: {' && '.join(commands)}")
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
            links = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if link_below(folder, path)]
            if links:
                log.warning(f"note: not uploaded, since they are links: {listing(links)}")
            inside = [f"{glob.escape(one)}{end}" for one in links for end in ("", "/*")]
            hidden = [".*", "**/.*", *inside]  # temporary files next to the weights
            api.upload_folder(repo_id=repository, folder_path=folder, path_in_repo=place, ignore_patterns=hidden)
    except Exception as error:  # of the network's libraries, or of files: none of them may end the run
        cause = error.__cause__ if isinstance(error, RuntimeError) else None
        failure = " ".join(reason(one) for one in (error, cause) if one is not None)
        return without_credentials(failure).rstrip(".:")
    return ""
