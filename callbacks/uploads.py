"""Uploads to huggingface.co beside the work of a run: one at a time, tried again, never an error."""

import logging
import shlex
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from callbacks.signals import stop
from datamodules.errors import without_credentials
from datamodules.files import link_or_copy, reason

log = logging.getLogger("retouch")

# Folders to upload, by their places in the repository.
Folders = Mapping[str, Path]
# Seconds before each further try.
PAUSES = (2.0, 8.0, 30.0)
# Seconds that the hub may be silent for.
SILENCE = 120.0
# Answers of the hub after which a further try may do better; others of these hundreds are final.
PASSING = {408, 409, 412, 423, 425, 429}
# Temporary files that are written beside the weights.
HIDDEN = (".*", "**/.*")
# In the run's folder: weights that are uploaded while the next ones take their place.
HELD = ".upload"


class Uploads:
    """Uploads to one repository, one after the other, in a thread of its own."""

    def __init__(self, repository: str, private: bool) -> None:
        self.repository = repository
        self.private = private
        self._changed = threading.Condition()
        self._waiting: Folders | None = None
        self._thread: threading.Thread | None = None
        self._failure = ""  # of the last one; empty if it did not fail
        self._is_last = False

    def begin(self, folders: Folders) -> None:
        """Upload these when nothing else is being uploaded, in place of any that wait."""
        with self._changed:
            replaced, self._waiting = self._waiting, folders
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
                self._thread.start()
        remove_links(replaced)

    def finish(self, folders: Folders, originals: Folders) -> None:
        """Upload these, wait for it, and say what came of it; a signal ends the wait.

        Args:
            originals: of which they are copies, to be uploaded by hand where it failed.
        """
        if stop.signal is None:
            log.info(f"uploading to {self.repository}")
            self._is_last = True
            self.begin(folders)
            self._wait()
        unfinished = not self._is_last or self._thread is not None
        failure = f"stopped by {stop.signal.name}" if stop.signal is not None and unfinished else self._failure
        if failure:
            by_hand = " && ".join(self._command(place, folder) for place, folder in originals.items())
            log.warning(f"note: not uploaded to {self.repository}: {failure}; by hand: {by_hand}")
        else:
            from huggingface_hub import constants

            log.info(f"uploaded: {constants.ENDPOINT}/{self.repository}")

    def _wait(self) -> None:
        """Until all is uploaded, or a signal comes."""
        busy_with, stop.busy_with = stop.busy_with, "leaving the upload"
        while stop.signal is None and (thread := self._thread) is not None:
            thread.join(0.1)
        stop.busy_with = busy_with

    def _command(self, place: str, folder: Path) -> str:
        private = " --private" if self.private else ""
        return f"hf upload {self.repository} {shlex.quote(str(folder))} {place or '.'}{private}"

    def _work(self) -> None:
        """The thread: upload until none waits."""
        while (folders := self._next()) is not None:
            is_last = self._is_last
            self._failure = self._try(folders)
            if self._failure and not is_last and not self._is_last:
                log.warning(f"note: no upload of these weights: {self._failure}; the next ones are tried again")
            remove_links(folders)

    def _next(self) -> Folders | None:
        with self._changed:
            folders, self._waiting = self._waiting, None
            if folders is None:
                self._thread = None
            return folders

    def _try(self, folders: Folders) -> str:
        """Upload, some times over if need be; the reason for which it failed. Newer ones end the tries."""
        for pause in (*PAUSES, None):
            try:
                self._send(folders)
                return ""
            except Exception as error:  # of the network's libraries, or of files: none of them may end the run
                failure, final = describe(error), is_final(error)
            if pause is None or final:
                break
            with self._changed:
                if self._changed.wait_for(lambda: self._waiting is not None, pause):
                    break
        return failure

    def _send(self, folders: Folders) -> None:
        from huggingface_hub import HfApi
        from huggingface_hub.utils import get_session

        get_session().timeout = SILENCE  # none by default
        api = HfApi(library_name="retouch")
        api.create_repo(self.repository, private=self.private, exist_ok=True)
        for place, folder in folders.items():
            api.upload_folder(
                repo_id=self.repository,
                folder_path=folder,
                path_in_repo=place,
                ignore_patterns=list(HIDDEN),
                commit_message=f"Upload {place or 'weights'}",
            )


def held_for_upload(folder: Path, held: Path) -> Path:
    """Create a folder of links to these files, which stay when others take the folder's place."""
    return Path(shutil.copytree(folder, held / str(time.time_ns()), copy_function=link_or_copy))


def remove_links(folders: Folders | None) -> None:
    """Once they are uploaded."""
    for folder in (folders or {}).values():
        if folder.parent.name == HELD:
            shutil.rmtree(folder, ignore_errors=True)


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
