"""The tab Try: images from LoRAs and checkpoints side by side, by the commands of predict.py that it shows."""

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir, mkdtemp
from typing import Any

import psutil
from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Route

from cli.arguments import read_values
from extras.page.answers import entry, page, post
from extras.page.jobs import NEW_GROUP, TRAIN
from extras.page.runs import Shelf
from foundation.errors import UserError
from foundation.locks import LOCK, holder, lock_content
from foundation.settings import text_kind
from report.quoting import override
from runs.signals import INTERRUPT

COMMAND = [sys.executable, str(TRAIN.with_name("predict.py")), "--stdin"]
KEYS = ("model", "prompt", "negative_prompt", "lora_scale", "seed", "num_inference_steps", "guidance_scale")


class TryPage:
    """Routes of the tab, and a process of predict.py that keeps the model in memory from one command to the next."""

    def __init__(self, shelf: Shelf) -> None:
        self.shelf = shelf
        others = {str(pid) for pid in psutil.pids()} - {str(os.getpid())}  # which may not have written their locks yet
        for folder in Path(gettempdir()).glob("retouch-try-*"):
            if holder(folder) is None and folder.name.split("-")[2] not in others:  # of a page that was killed
                shutil.rmtree(folder, ignore_errors=True)
        self._temporary = TemporaryDirectory(prefix=f"retouch-try-{os.getpid()}-", ignore_cleanup_errors=True)
        self._folder = Path(self._temporary.name)
        (self._folder / LOCK).write_bytes(lock_content(os.getpid()))
        self._output = self._folder / "output.txt"
        self._process: subprocess.Popen[str] | None = None
        self.images: list[tuple[Path, str]] = []  # copies of the uploads, and their own names
        self.rows: dict[Path, list[str]] = {}  # settings, quoted for a shell, by the folder of their images

    def routes(self) -> list[Route]:
        gets = [Route("/try", self.show), Route("/try/image", self.image)]
        return [*gets, post("/try", self.create), post("/try/stop", self.stop)]

    def state(self) -> tuple[bool, list[str]]:
        """Return whether the process lives, and the lines of its output: the last is the present work, or "done"."""
        alive = self._process is not None and self._process.poll() is None
        text = self._output.read_text("utf-8", "replace") if self.rows else "done"
        for path, name in self.images:
            text = text.replace(str(path), name)
        return alive, [line for line in text.splitlines() if line]

    def show(self, request: Request) -> Response:
        """Show the form and the images that there are by now."""
        name, (alive, lines) = request.query_params.get("run"), self.state()
        runs = {} if "hx-request" in request.headers else self.shelf.runs()  # else each look for progress lists them
        files = [file for run in runs.values() for file in run.path.glob("lora/*/pytorch_lora_*")]
        names = {str(folder) for file in files for folder in (file.parent, file.parents[2])}
        loras = sorted(filter(str.isprintable, names))
        run = name and self.shelf.get(name)
        return page("try.html", tab="try", tries=self, loras=loras, run=run, alive=alive, lines=lines)

    def records(self, folder: Path) -> list[dict[str, object]]:
        """Return the facts that `ImageWriter` writes about each finished image, with its name on the page."""
        lines = [line for path in folder.glob("*.jsonl") for line in path.read_text("utf-8").splitlines()]
        return [one | {"name": f"{folder.name}/{one['file']}"} for one in map(json.loads, lines)]

    def image(self, request: Request) -> Response:
        """Return an uploaded image or a result."""
        files = {path.relative_to(self._folder).as_posix(): path for path in self._folder.rglob("*.png")}
        found = entry(files, request.query_params.get("name"))
        return FileResponse(found, headers={"cache-control": "private, max-age=3600"})

    def create(self, request: Request, form: FormData) -> Response:
        """Start the commands of the form: one, or one for each LoRA."""
        alive, lines = self.state()
        if alive and lines[-1] != "done":
            raise UserError("other images are being created. Cancel them, or wait.")
        images = [self._store(one) for one in form.getlist("image") if isinstance(one, UploadFile) and one.size]
        texts = [[str(text).strip() for text in form.getlist(key)] for key in ("lora", "weight")]
        named = zip(*texts, strict=True)
        runs = self.shelf.runs()
        loras = [(str(runs.get(name, name)), weight or "1") for name, weight in named if name]
        groups = [[one] for one in loras] if form.get("each") and loras else [loras]
        rows = [self._settings(form, group, [str(path) for path, _ in images]) for group in groups]
        self.images, self.rows = images, {Path(mkdtemp(dir=self._folder)): row for row in rows}
        self._output.write_text("starting\n", encoding="utf-8")
        if self._process is None or not alive:
            with self._output.open("ab") as file:
                streams: Any = {"stdin": subprocess.PIPE, "stdout": file, "stderr": file}
                self._process = subprocess.Popen(COMMAND, text=True, creationflags=NEW_GROUP, **streams)
        commands = [[*shlex.split(" ".join(row)), f"output_dir={folder}"] for folder, row in self.rows.items()]
        print(json.dumps(commands), file=self._process.stdin, flush=True)
        return RedirectResponse("/try", 303)

    def _store(self, file: UploadFile) -> tuple[Path, str]:
        """Store an upload under a name made from its content; predict.py ignores the suffix and refuses other files."""
        path = self._folder / f"{hashlib.sha256(content := file.file.read()).hexdigest()[:16]}.png"
        path.write_bytes(content)
        return path, file.filename or "image"

    def _settings(self, form: FormData, loras: list[tuple[str, str]], images: list[str]) -> list[str]:
        """Return the settings of a command with these LoRAs and their strengths, quoted for a shell."""
        names, weights = [name for name, _ in loras], [weight for _, weight in loras]
        settings = {"lora": names, "lora_weights": [] if weights == ["1"] else weights, "image": images}
        for key in KEYS:
            text = str(form.get(key, ""))
            settings[key] = [" ".join(text.split())] if text_kind(key) == "text" else text.replace(",", " ").split()
        more = [shlex.quote(line) for line in map(str.strip, str(form.get("more", "")).splitlines()) if line]
        row = [*(override(key, values) for key, values in settings.items() if any(values)), *more]
        read_values(shlex.split(" ".join(row)), "predict")
        return row

    def stop(self, request: Request, form: FormData) -> Response:
        """Cancel the present commands, or free the memory."""
        if form.get("memory"):
            self.free()
        elif self._process is not None:
            self._process.send_signal(INTERRUPT)
        return RedirectResponse("/try", 303)

    def free(self) -> None:
        """End the process, which frees the memory of its model for certain."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
