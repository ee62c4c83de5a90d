"""Changes to a run's folder by a person: note, star, name, removal; and the files of its LoRA to take away."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlencode

from omegaconf.errors import OmegaConfBaseException
from rich.filesize import decimal
from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route

from extras.page.answers import entry, page, post
from extras.page.jobs import Jobs, run_below
from extras.page.runs import Shelf, resolved, state_of
from foundation.errors import UserError, printable
from foundation.files import reason
from runs.run_folder import RunFolder

# Ends of the names under which files of a LoRA are saved.
ENDS_OF_NAMES = {"last": "", "best": "_best", "export": "_comfyui"}


class KeepPage:
    """Routes of a run's page that change its folder or send a file of it."""

    def __init__(self, shelf: Shelf, jobs: Jobs) -> None:
        self.shelf, self.jobs = shelf, jobs

    def routes(self) -> list[Route]:
        """Return the routes."""
        posts = [post(f"/{one.__name__}", one) for one in (self.note, self.rename, self.delete, self.export)]
        return [Route("/lora", self.lora), *posts]

    def lora(self, request: Request) -> Response:
        """Send a file of the LoRA."""
        name = request.query_params.get("run", "")
        path = entry(self.shelf.get(name).lora_files(), which := request.query_params.get("which", ""))
        return FileResponse(path, filename=f"{name.replace('/', '_')}{ENDS_OF_NAMES[which]}.safetensors")

    def note(self, request: Request, form: FormData) -> Response:
        """Save the note or the star of a run."""
        run = self.shelf.get(str(form.get("run")))
        text, star = run.read_note()
        run.write_note(str(form.get("note", text)), form.get("star", str(star)) == "True")
        return HTMLResponse("", headers={"hx-trigger": "changed"})

    def rename(self, request: Request, form: FormData) -> Response:
        """Rename a run's folder."""
        run, name = self.shelf.get(str(form.get("run"))), str(form.get("name", "")).strip()
        if not name or name.startswith(".") or {*name} & {*"/\\"}:
            raise UserError(
                f"name={printable(name)}: this is no name of a folder. Leave out /, and a dot at its start."
            )
        with self._changing(run):
            new = run_below(self.shelf.outputs, str(run.path.with_name(name)))
            if new.path.exists():
                raise UserError(f"{new} exists. Choose another name.")
            run.path.rename(new.path)
        return self._show(f"/run?{urlencode({'run': new.path.relative_to(self.shelf.outputs).as_posix()})}")

    def delete(self, request: Request, form: FormData) -> Response:
        """Ask whether to delete a run, or delete it; links are removed, not followed."""
        run = self.shelf.get(name := str(form.get("run")))
        sizes = [] if run.path.is_symlink() else [size for size, _ in run.files().values()]
        if not form.get("sure"):
            return page("delete.html", run=name, folder=run, count=len(sizes), size=decimal(sum(sizes)))
        with self._changing(run):
            if run.path.is_symlink():
                run.path.unlink()
            else:
                shutil.rmtree(run.path)
        return self._show("/runs")

    @contextmanager
    def _changing(self, run: RunFolder) -> Iterator[None]:
        """Temporarily keep commands out of a run that is below the folder of runs itself, not below a link in it."""
        if run.path.parent.resolve() not in (top := self.shelf.outputs.resolve(), top / run.path.parent.name):
            raise UserError(f"{run} is not below {self.shelf.outputs}/ but behind a link. Change it where it is.")
        if state_of(run) == "running":
            raise UserError(f"{run} is running. Wait until it ends.")
        try:
            with self.jobs.unused(run.path, run.path / "export"):
                yield
        except OSError as error:
            raise UserError(f"cannot change {run}: {reason(error)}") from error

    @staticmethod
    def _show(address: str) -> Response:
        return HTMLResponse("", headers={"hx-redirect": address})

    def export(self, request: Request, form: FormData) -> Response:
        """Write the last LoRA for ComfyUI, of a T-LoRA with its full rank."""
        run, rank = self.shelf.get(str(form.get("run"))), []
        if "last" not in run.lora_files():
            raise UserError(f"{run} has no LoRA yet")
        with suppress(OSError, OmegaConfBaseException):  # without settings it is a plain LoRA
            kind, most = (
                resolved(run.config, run.config.stat().st_mtime_ns, f"adapter.{key}")
                for key in ("rank_schedule", "rank")
            )
            rank = [f"rank={most:d}"] if kind not in (None, "constant") else []
        job = RunFolder(run.path / "export")
        more = [f"lora={run}", "format=comfyui", "overwrite=true", *rank, f"output_dir={job}"]
        self.jobs.start(["task=export", *more], job, "predict")
        return HTMLResponse("", headers={"hx-trigger": "changed"})
