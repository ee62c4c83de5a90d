"""Folders for the tab Start: those of this machine, to choose one, and new ones that are made of uploads."""

import os
import re
from contextlib import suppress
from itertools import islice
from pathlib import Path, PurePosixPath

from starlette.datastructures import FormData, UploadFile
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from datamodules.images.captions import readable
from datamodules.images.folders import CONTROL_FOLDERS, IMAGE_SUFFIXES, TARGET_FOLDERS, is_clutter, is_image
from datamodules.images.samples import CAPTION_SUFFIXES
from extras.page.answers import page, post
from extras.page.runs import subfolders
from foundation.errors import UserError, printable
from foundation.files import replacing

# Folders in a list, and entries of each that are counted.
MOST_FOLDERS, MOST_ENTRIES = 500, 10_000
# Folders of an upload, by the field that it was dropped on.
ROLES = {"control": "control_images", "target": "training_images"}


def content_of(folder: Path) -> str:
    """Describe a folder by its images: "pairs", "24 images", or nothing."""
    if all(any(os.path.isdir(folder / one) for one in names) for names in (CONTROL_FOLDERS, TARGET_FOLDERS)):
        return "pairs"
    with suppress(OSError), os.scandir(folder) as found:
        count = sum(is_image(one.name) for one in islice(found, MOST_ENTRIES))
        return f"{count} image{'s'[: count != 1]}" if count else ""
    return ""


class FoldersPage:
    """Routes of the chooser, and of uploads to a folder."""

    def __init__(self, uploads: Path) -> None:
        self.uploads = uploads

    def routes(self) -> list[Route]:
        return [post("/folders", self.browse), post("/upload", self.upload)]

    def browse(self, request: Request, form: FormData) -> Response:
        """Show the folders in a folder; of one that does not exist, in the nearest that contains it."""
        asked = str(form.get("path", form.get("data.root", ""))).strip()
        folder = Path(os.path.abspath(os.path.expanduser(asked if asked.isprintable() else "")))
        folder = next(one for one in (folder, *folder.parents) if os.path.isdir(one))
        inside = (
            one for one in subfolders(folder, MOST_ENTRIES) if one.name.isprintable() and not is_clutter(one.name)
        )
        found = {one: content_of(one) for one in sorted(inside)[:MOST_FOLDERS]}
        return page(
            "folders.html", folder=folder, parents=[*reversed(folder.parents)], found=found, here=content_of(folder)
        )

    def upload(self, request: Request, form: FormData) -> Response:
        """Store an image, or the caption of one, in a new folder; a prompt becomes the caption of a target without."""
        file, role, name = form.get("file"), str(form.get("role")), str(form.get("folder"))
        if not isinstance(file, UploadFile) or role not in ROLES or not re.fullmatch(r"[\w-]+", name):
            raise UserError("upload: it needs a file, its role and a folder. Reload the page.")
        own = PurePosixPath((file.filename or "").replace("\\", "/")).name
        suffix = os.path.splitext(own)[1].lower()
        if suffix not in (*IMAGE_SUFFIXES, *CAPTION_SUFFIXES) or own.startswith(".") or not own.isprintable():
            raise UserError(f"{printable(own)} is neither an image nor a caption, and was left out.")
        folder = self.uploads / name / ROLES["target" if suffix in CAPTION_SUFFIXES else role]
        if any(one.is_symlink() for one in (self.uploads, self.uploads / name, folder)):
            raise UserError(f"{folder} is a link. Reload the page for a new folder.")
        prompt, caption = str(form.get("prompt", "")).strip(), (folder / own).with_suffix(".txt")
        written = readable(prompt, str(caption))
        content = file.file.read()
        with replacing(folder / own) as temporary:
            temporary.write_bytes(readable(content, own) if suffix in CAPTION_SUFFIXES else content)
        if prompt and role == "target" and suffix in IMAGE_SUFFIXES and not caption.exists():
            with replacing(caption) as temporary:
                temporary.write_bytes(written)
        return Response(status_code=204)
