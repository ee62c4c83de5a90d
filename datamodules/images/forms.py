"""In which form a folder holds its data set, and where below it stands."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from datamodules.errors import UserError, listing
from datamodules.images.data_sets import mark_of_data_set
from datamodules.images.folders import folders_of_pairs, is_clutter
from datamodules.images.suffix_pairs import suffixes_of
from datamodules.images.tables import TABLES
from datamodules.images.tar_names import tars_of

Form = Literal["table", "folders", "tars", "data set", "suffixes"]
# Folders below folders in which a data set is looked for.
DEEPEST = 4


def form_of_pairs(folder: Path, suffixes: tuple[str, str] | None) -> Form | None:
    """How a folder holds pairs; None if it holds none.

    Args:
        suffixes: of pairs in one folder, where they are named: these pairs are meant, whatever is beside them.

    Raises:
        UserError: two forms are as likely.
    """
    form = form_of_table(folder)
    if form == "table":
        return form
    if folders_of_pairs(folder) is not None:
        return "folders"
    ends = suffixes_of(folder, suffixes)
    if form is None or ends is None or suffixes is not None:
        return form if ends is None else "suffixes"
    other = next(iter(tars_of(folder)), None) or mark_of_data_set(folder)
    raise UserError(
        f"data.root={folder}: pairs named X{ends[0]}, X{ends[1]}, and {other}: move one of them elsewhere, or say "
        f"data.pair_suffixes=[{','.join(ends)}] for the pairs, data.root={other} for the other"
    )


def form_of_table(folder: Path) -> Form | None:
    """How a folder holds a table, for pairs or pictures with captions; None if it holds none."""
    if any(os.path.lexists(folder / name) for name in TABLES):
        return "table"
    if tars_of(folder):
        return "tars"
    return None if mark_of_data_set(folder) is None else "data set"


def look_below(root: Path, form_of: Callable[[Path], Form | None]) -> tuple[Path, Form] | None:
    """The only folder below that holds a data set, and its form; None if there is none.

    Raises:
        UserError: there are several.
    """
    found: list[tuple[Path, Form]] = []
    for place, below, _ in os.walk(root):
        folder = Path(place)
        depth = len(folder.relative_to(root).parts)
        below[:] = sorted(name for name in below if not is_clutter(name) and depth < DEEPEST)
        if folder != root and (form := form_of(folder)) is not None:
            below.clear()
            found.append((folder, form))
    if len(found) > 1:
        several = [str(folder) for folder, _ in found]
        raise UserError(
            f"data.root={root}: it holds {len(found)} data sets, {listing(several)}: name one of them, or several as "
            f"data.root=[{several[0]},{several[1]}]"
        )
    return found[0] if found else None
