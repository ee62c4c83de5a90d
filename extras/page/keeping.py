"""Changes to a run's folder by a person: note, star, name, removal; and the files of its LoRA to take away."""

import re
import shutil
from urllib.parse import urlencode

from rich.filesize import decimal
from starlette.datastructures import FormData
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.routing import Route

from extras.page.answers import entry, page, post
from extras.page.jobs import Jobs, require_no_link, run_below
from extras.page.runs import Shelf, mean_rank, state_of, tail
from foundation.errors import UserError, count_of, printable
from foundation.files import replacing
from foundation.locks import LOCK
from report.quoting import argument
from runs.run_folder import RunFolder

# Letters of a note, and ends of the names under which files of a LoRA are saved.
LONGEST_NOTE = 5000
ENDS_OF_NAMES = {"last": "", "best": "_best", "export": "_comfyui"}


class KeepPage:
    """Routes of a run's page that change its folder or send a file of it."""

    def __init__(self, shelf: Shelf, jobs: Jobs) -> None:
        self.shelf, self.jobs = shelf, jobs

    def routes(self) -> list[Route]:
        posts = [post(f"/{one.__name__}", one) for one in (self.note, self.rename, self.delete, self.export)]
        return [Route("/lora", self.lora), *posts]

    def lora(self, request: Request) -> Response:
        name = request.query_params.get("run", "")
        path = entry(self.shelf.get(name).lora_files(), which := request.query_params.get("which", ""))
        return FileResponse(path, filename=f"{name.replace('/', '_')}{ENDS_OF_NAMES[which]}.safetensors")

    def note(self, request: Request, form: FormData) -> Response:
        """Save the note of a run, or begin it with a star or without."""
        run = self.shelf.get(str(form.get("run")))
        require_no_link(self.shelf.outputs, run.note)
        text = str(form.get("note", tail(run.note)))[:LONGEST_NOTE]
        if "star" in form:
            text = str(form["star"]) + text.lstrip("★ ")
        with replacing(run.note) as temporary:
            temporary.write_text(text, encoding="utf-8")
        return HTMLResponse("", headers={"hx-trigger": "changed"})

    def rename(self, request: Request, form: FormData) -> Response:
        """Rename a run's folder."""
        run, name = self._unused(form), str(form.get("name", "")).strip()
        if not name or name.startswith(".") or {*name} & {*"/\\"}:
            raise UserError(f"{printable(name)!r} cannot name a folder. Leave out /, and a dot at its start.")
        if (new := run_below(self.shelf.outputs, str(run.path.with_name(name)))).path.exists():
            raise UserError(f"{new} exists. Choose another name.")
        run.path.rename(new.path)
        shown = urlencode({"run": new.path.relative_to(self.shelf.outputs).as_posix()})
        return HTMLResponse("", headers={"hx-redirect": f"/run?{shown}"})

    def delete(self, request: Request, form: FormData) -> Response:
        """Ask whether to delete a run, or delete it; links are removed, not followed."""
        run = self._unused(form)
        if not form.get("sure"):
            sizes = [] if run.path.is_symlink() else [size for size, _ in run.files().values()]
            frees = f"{decimal(sum(sizes))}, {count_of(len(sizes), 'files')}" if sizes else ""
            return page("delete.html", run=form["run"], folder=run, frees=frees)
        if run.path.is_symlink():
            run.path.unlink()
        else:
            shutil.rmtree(run.path)
        return HTMLResponse("", headers={"hx-redirect": "/runs"})

    def _unused(self, form: FormData) -> RunFolder:
        """Return the run of a form; raise a UserError if a command uses a folder of it, or if it is below a link."""
        run = self.shelf.get(str(form.get("run")))
        require_no_link(self.shelf.outputs, run.path.parent)
        for folder in (lock.parent for lock in run.path.rglob(LOCK)):
            if state_of(RunFolder(folder)) == "running":
                raise UserError(f"{folder} is in use by a command. Wait until it ends.")
        return run

    def export(self, request: Request, form: FormData) -> Response:
        """Write the last LoRA for ComfyUI, of a T-LoRA with the rank in the form."""
        run, rank = self.shelf.get(str(form.get("run"))), str(form.get("rank", "")).strip()
        if "last" not in run.lora_files():
            raise UserError(f"{run} has no LoRA yet")
        if (mean := mean_rank(run)) is not None and not re.fullmatch("[1-9][0-9]{0,4}", rank):
            what = f"rank={printable(rank)[:99]}: other programs need one rank of this T-LoRA"
            raise UserError(f"{what}. Write a whole number, such as {mean}, the mean of its schedule.")
        job = RunFolder(run.path / "export")
        more = [
            argument("lora", str(run)),
            "format=comfyui",
            "overwrite=true",
            *([f"rank={rank}"] if mean else []),
            argument("output_dir", str(job)),
        ]
        self.jobs.start(["task=export", *more], job, "predict")
        return HTMLResponse("", headers={"hx-trigger": "changed"})
