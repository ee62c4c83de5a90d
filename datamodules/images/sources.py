"""A data source of pairs: folders of images, or a table of file names."""

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from datamodules.errors import UserError, listing
from datamodules.files import read_text, reason, require_file
from datamodules.images.folders import (
    CONTROL_FOLDERS,
    FORMATS,
    FURTHER_CONTROL,
    TARGET_FOLDERS,
    controls_folder,
    folder_images,
    further_controls,
    none_of_the_formats,
    primary_images,
    targets_folder,
    unread_files,
)
from datamodules.images.sample import Found, Root, Sample, scan_roots
from datamodules.images.tables import read_table

TABLES = ("metadata.jsonl", "metadata.csv")


def find_samples(roots: Iterable[Root]) -> Found:
    """The samples of all roots in order; within a root they are sorted by name, or in the order of the table.

    Raises:
        UserError: a root does not exist, holds no pairs, or has a table that cannot be used.
    """
    return scan_roots(roots, lambda root: _scan(Path(root.path).expanduser(), root.require_prompt))


def _scan(root: Path, require_prompt: bool) -> Found:
    if not root.exists():
        raise UserError(f"data.root={root}: no such folder (looked for {root.absolute()})")
    if not root.is_dir() and root.suffix not in (".csv", ".jsonl"):
        raise UserError(f"data.root={root}: neither a folder nor a .csv or .jsonl table")
    tables = [root / name for name in TABLES if os.path.lexists(root / name)] if root.is_dir() else [root]
    if len(tables) > 1:
        raise UserError(f"data.root={root}: two tables, {' and '.join(TABLES)}: name one of them as data.root")
    if tables:
        return _from_table(tables[0], require_prompt)
    targets = targets_folder(root)
    controls = controls_folder(root)
    if targets is None or controls is None:
        if targets is not None or folder_images(root):
            raise UserError(
                f"data.root={root}: pictures, but no condition images in {'/'.join(CONTROL_FOLDERS)}, which editing "
                "needs. To train on pictures and captions: model=flux_dev data=captions"
            )
        raise UserError(
            f"data.root={root}: no pairs found. Looked for {' or '.join(TABLES)}, or for a folder "
            f"{'/'.join(TARGET_FOLDERS)} (X.png and X.txt) beside a folder {'/'.join(CONTROL_FOLDERS)} (X.png)"
        )
    found = _from_folders(targets, controls, require_prompt)
    if not found.samples and not found.incomplete:
        raise UserError(f"data.root={root}: no images ({FORMATS}) in {targets} and {controls}")
    return found


def _from_folders(target_folder: Path, control_folder: Path, require_prompt: bool) -> Found:
    targets, all_controls, controls = (
        primary_images(target_folder),
        folder_images(control_folder),
        primary_images(control_folder),
    )
    masks = {**folder_images(target_folder), **all_controls}
    numbered: dict[str, dict[str, Path]] = {}
    for name, path in all_controls.items():
        if match := FURTHER_CONTROL.match(name):
            numbered.setdefault(match["stem"], {})[name] = path
    unread, unread_controls = unread_files(target_folder), unread_files(control_folder)
    samples, incomplete = [], []
    for stem, target in targets.items():
        caption = target.with_suffix(".txt")
        if stem not in controls:
            other = f": {none_of_the_formats(unread_controls[stem])}" if stem in unread_controls else ""
            incomplete.append(f"{target} has no control image {control_folder / stem}.*{other}")
        elif require_prompt and not os.path.lexists(caption):
            incomplete.append(f"{target} has no caption {caption}")
        else:
            try:
                prompts = (read_text(caption).strip(),) if os.path.lexists(caption) else ()
            except UserError as error:
                incomplete.append(str(error))
                continue
            more = further_controls(numbered.get(stem, {}), stem)
            mask = masks.get(f"{stem}_mask")
            samples.append(Sample(stem, target, (controls[stem], *more), prompts, mask, caption_file=caption))
    for stem, path in unread.items():  # else a pair in such a format would be left out silently
        if stem not in targets and (stem in controls or path.with_suffix(".txt").is_file()):
            incomplete.append(f"target {none_of_the_formats(path)}")
    incomplete += [f"{controls[stem]} has no target image" for stem in controls if stem not in {*targets, *unread}]
    return Found(samples, incomplete)


def _from_table(table: Path, require_prompt: bool) -> Found:
    """The samples of a table, whose file names are relative to its folder.

    Columns: file_name, control_file_name (one name, or a JSON list), prompt, and optionally mask_file_name.
    """
    rows = read_table(table)
    if not rows:
        raise UserError(f"{table} has no rows")
    samples, incomplete = [], []
    for number, row in enumerate(rows, 1):
        needed = ("file_name", "control_file_name", *(["prompt"] if require_prompt else []))
        missing = [name for name in needed if row.get(name) is None]
        if missing:
            raise UserError(
                f"{table} row {number} has no {listing(missing)}; its columns are {', '.join(map(str, row))}"
            )
        strange = [n for n in ("file_name", "prompt", "mask_file_name") if not isinstance(row.get(n) or "", str)]
        if strange:
            raise UserError(f"{table} row {number}: {listing(strange)} must be text")
        try:
            paths = [table.parent / name for name in (row["file_name"], *_names(row["control_file_name"]))]
            prompt = (row.get("prompt") or "").strip()
            prompt.encode()
        except UnicodeEncodeError as error:
            raise UserError(
                f"{table} row {number}: the prompt holds an incomplete character, {error.object[error.start]!r}"
            ) from error
        except UserError as error:
            raise UserError(f"{table} row {number}: {error}") from error
        mask = table.parent / row["mask_file_name"] if row.get("mask_file_name") else None
        absent = [path for path in (*paths, mask) if path is not None and not os.path.isfile(path)]
        if absent or len(paths) < 2:
            why = _why_absent(absent[0]) if absent else "control_file_name is empty"
            incomplete.append(f"{table} row {number}: {why}")
        else:
            key = str(Path(row["file_name"]).with_suffix(""))
            prompts = (prompt,) if prompt or require_prompt else ()
            samples.append(Sample(key, paths[0], tuple(paths[1:]), prompts, mask))
    repeated = {sample.key for sample in samples}
    if len(repeated) < len(samples):  # one picture with several instructions
        samples = [replace(sample, key=f"{sample.key}#{number}") for number, sample in enumerate(samples, 1)]
    return Found(samples, incomplete)


def _why_absent(path: Path) -> str:
    try:
        require_file(path)
    except FileNotFoundError as error:
        return f"{path} does not exist" if not path.is_symlink() else f"{path}: {error.strerror}"
    except (OSError, ValueError) as error:
        return f"{path}: {reason(error)}"
    return f"{path} does not exist"


def _names(value: Any) -> list[str]:
    """One file name, or several as a list (in CSV: a JSON list)."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.startswith("[") else [value]
        except json.JSONDecodeError as error:
            raise UserError(f'control_file_name={value}: several are written as ["a.png", "b.png"]') from error
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise UserError(f"control_file_name={value}: must be a file name or a list of them")
    return [name for name in value if name]
