"""The tables that a root names, or that a folder holds: ours, Hugging Face's, tars."""

import os
from pathlib import Path

from datamodules.errors import UserError, without_credentials
from datamodules.images.data_sets import HUB, SUFFIXES, hub_table, local_table
from datamodules.images.folders import is_clutter
from datamodules.images.forms import Form
from datamodules.images.rows import Table
from datamodules.images.tables import TABLES, file_table
from datamodules.images.tar_names import is_tar, named_tars, tars_of
from datamodules.images.tars import tar_table


def named_table(root: str) -> tuple[Table, int] | None:
    """The table that a root names, and how many files were passed over; None where it names a folder.

    Raises:
        UserError: it is not there, or cannot be read.
    """
    if root.startswith(HUB):
        return hub_table(root), 0
    if "://" in root:
        raise UserError(
            f"data.root={without_credentials(root)}: pictures are read from this machine: copy them here first "
            "(data.shards streams what is already encoded)"
        )
    path = Path(root).expanduser()
    split: str | None = None
    if is_tar(root) and not path.is_dir():
        return tar_table(root, named_tars(root))
    name, _, of_folder = str(path).rpartition("#")
    if name and not path.exists() and Path(name).is_dir():
        path, split = Path(name), of_folder
    if path.is_file() and path.suffix in (".csv", ".jsonl"):
        return file_table(path), 0
    if split is not None or (path.is_file() and path.suffix in SUFFIXES):
        return local_table(path, split), 0
    if not path.exists():
        raise UserError(f"data.root={path}: no such folder (looked for {path.absolute()})")
    if not path.is_dir():
        raise UserError(
            f"data.root={path}: neither a folder nor a .csv or .jsonl table, nor a .parquet, .arrow or .tar file"
        )
    return None


def folder_table(folder: Path, form: Form) -> tuple[Table, int]:
    """The table that a folder holds in a form, and how many files were passed over.

    Raises:
        UserError: it has two of our tables, or cannot be read.
    """
    if form == "tars":
        passed_over = sum(is_clutter(name) for name in os.listdir(folder))
        table, members = tar_table(str(folder), tars_of(folder))
        return table, passed_over + members
    if form == "data set":
        return local_table(folder, None), 0
    tables = [folder / name for name in TABLES if os.path.lexists(folder / name)]
    if len(tables) > 1:
        raise UserError(f"data.root={folder}: two tables, {' and '.join(TABLES)}: name one of them as data.root")
    return file_table(tables[0]), 0
