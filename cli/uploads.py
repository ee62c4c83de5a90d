"""Uploads of a run: output_dir=s3://... keeps its folder in a bucket, hub.push=OWNER/NAME publishes its weights.

The folder is downloaded before the run, and uploaded after each checkpoint and at the end. The weights are uploaded to
huggingface.co at the end; a failure there never fails the run.
"""

import glob
import json
import shlex
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from cli.folders import MIRROR
from cli.terminal import is_first_process, log, started_by_lightning
from datamodules.shards.transfer import Bucket
from foundation.errors import UserError, listing, printable, without_credentials
from foundation.files import DAMAGED, file_sha256, link_below, link_or_copy, reason, replacing
from foundation.locks import one_at_a_time
from runs.run_folder import RunFolder, best_effort
from runs.signals import Stopped, stop

POLL = 5.0  # seconds between two looks for a new checkpoint
TRIES = 30  # of the last upload; while the bucket cannot be reached each takes 15 s
WHEN_STOPPED = 100.0  # seconds for the last upload of a run that was stopped or has failed
LAST = "checkpoints/last.ckpt"
SILENCE = 120.0  # seconds without an answer of huggingface.co after which a request has failed


@contextmanager
def mirrored(url: str, folder: Path, resumes: bool) -> Iterator[None]:
    """Download a run from `url`; upload it during the block, and wait for the last upload."""
    mirror = Mirror(url, RunFolder(folder))
    if not started_by_lightning():  # else the process that started this one has downloaded the run
        with one_at_a_time(folder):
            mirror.download(resumes)
    if not is_first_process():
        yield
        return
    mirror.thread.start()
    try:
        yield
    except BaseException as error:
        if problem := mirror.finish(WHEN_STOPPED):
            error.add_note(problem)
        raise
    if problem := mirror.finish():
        stop.check(f"during the last upload; {problem}")
        raise UserError(problem)
    log.info(f"uploaded to {mirror.bucket}")


class Mirror:
    """A run's folder and its copy in a bucket.

    The checksum of last.ckpt, which is transferred after all files that belong to it, identifies a state of the run.

    Attributes:
        states: checksums of the states that were in the bucket and here.
        files: size and time of each transferred file; None if its transfer may be incomplete.
        failure: the problem of the latest upload; empty if it succeeded.
    """

    def __init__(self, url: str, run: RunFolder) -> None:
        self.run, self.bucket, self.note = run, Bucket(url.rstrip("/"), "output_dir"), run.path / MIRROR
        self.states: list[str] = []
        self.files: dict[str, list[int] | None] = {}
        self.failure, self._ended = "", threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True, name="mirror")

    def download(self, resumes: bool) -> None:
        """Download the bucket's state if it is newer; raise a UserError if both sides have changed."""
        names, last = sorted(self.bucket.sizes(), key=LAST.__eq__), self.run.checkpoint
        there = self.bucket.checksum(LAST) if LAST in names else None
        if there is not None and not resumes:
            raise UserError(f"output_dir={self.bucket} already contains a run. Resume it with resume=auto.")
        with suppress(FileNotFoundError, *DAMAGED):
            note = json.loads(self.note.read_text(encoding="utf-8"))
            self.states, self.files = note["states"], note["files"]
        if there is None:
            self.files = dict.fromkeys(self.files)
            return
        here = file_sha256(last) if last.is_file() else None
        if there == here:
            self.states.append(there)
        if there in self.states:
            return
        if here not in (None, *self.states):
            raise UserError(
                f"output_dir={self.bucket}: it and {self.run} contain different checkpoints. Remove {self.run} to "
                "resume the bucket's run, or choose another output_dir."
            )
        log.warning(f"downloading {self.bucket}")  # in any process
        for name in names:
            if not (self.run.path / name).resolve().is_relative_to(self.run.path.resolve()):
                raise UserError(f"output_dir={self.bucket}: {printable(name)} is not below it, and is not downloaded")
            self.bucket.download(name, self.run.path / name)
        self.states.append(there)
        self.files = {name: facts for name, facts in self.run.files().items() if name in names}
        self._write_note()

    def finish(self, limit: float | None = None) -> str:
        """Wait for the last upload, at most `limit` seconds and until a signal; return the problem, if any."""
        self._ended.set()
        with suppress(Stopped):
            self.thread.join(limit)
        problem = self.failure or ("there was no time" if self.thread.is_alive() else "")
        return problem and f"output_dir={self.bucket}: {self.run} is not completely there: {problem}"

    def _write_note(self) -> None:
        with replacing(self.note) as temporary:
            temporary.write_text(json.dumps({"states": self.states, "files": self.files}), encoding="utf-8")

    def _work(self) -> None:
        tries, tried = 0, None
        while tries < TRIES:
            ended, facts = self._ended.wait(POLL), self.run.files().get(LAST)
            if not ended and facts in (None, tried, self.files.get(LAST)):
                continue
            tried = facts
            try:
                self.upload()
                self.failure = ""
            except Exception as error:  # of the network's libraries, or of files: none of them may end the run
                self.failure = str(error) or type(error).__name__
                log.warning(f"note: not uploaded: {self.failure}. The next upload includes it.")
            if ended and not self.failure:
                return
            tries += ended
            time.sleep(POLL if ended else 0)

    def upload(self) -> None:
        """Upload the files that have changed; raise a UserError if another machine has saved a checkpoint there."""
        last, held = self.run.checkpoint, self.note.with_suffix(".ckpt")
        if LAST not in self.files and not last.is_file():
            return  # nothing is saved
        held.unlink(missing_ok=True)
        link_or_copy(last, held)  # the run may replace it; the files that belong to it have been written before
        here = {**self.run.files(), LAST: [(status := held.stat()).st_size, status.st_mtime_ns]}
        changed = [name for name, facts in here.items() if self.files.get(name) != facts]
        if self.bucket.checksum(LAST) not in (None, *self.states):
            raise UserError("another machine has saved a checkpoint there")
        self.states += [file_sha256(held)] if LAST in changed else []
        self.files.update(dict.fromkeys(changed))
        self._write_note()
        for name in sorted(changed, key=lambda name: (name == self.run.finished.name, name == LAST)):
            path = held if name == LAST else self.run.path / name
            with suppress(FileNotFoundError):  # removed meanwhile
                # A table may be appended to while it is read.
                whole = path.suffix in (".ckpt", ".safetensors")
                self.bucket.write(name, path if whole else path.read_bytes())
                self.files[name] = here[name]
        gone = [name for name in self.files.keys() - here.keys() if not (self.run.path / name).exists()]
        self.bucket.delete(gone)
        self.files = {name: facts for name, facts in self.files.items() if name not in gone}
        self._write_note()
        held.unlink()


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
