"""Pairs stored in all forms of data sets."""

import io
import json
import tarfile
from pathlib import Path

from tests.support.pictures import photograph

NAMES = ("astronaut", "chelsea", "coffee")


def picture(number: int, name: str = "PNG") -> bytes:
    """Return the bytes of a photograph of 32x32, each different."""
    content = io.BytesIO()
    photograph(NAMES[number % 3], 32 + number, 32).crop((number, 0, 32 + number, 32)).save(content, name)
    return content.getvalue()


def prompt(number: int) -> str:
    return f"make it number {number}"


def data_set(count: int = 4):
    """Build rows with Image features, as in editing data sets on the hub."""
    import datasets

    datasets.disable_progress_bars()
    rows = {
        "source_image": [{"bytes": picture(number), "path": None} for number in range(count)],
        "edited_image": [{"bytes": picture(number + 10), "path": None} for number in range(count)],
        "edit_prompt": [prompt(number) for number in range(count)],
    }
    image, text = datasets.Image(), datasets.Value("string")
    features = datasets.Features({"source_image": image, "edited_image": image, "edit_prompt": text})
    return datasets.Dataset.from_dict(rows, features=features)


def write_tar(path: Path, members: dict[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def tar_members(numbers, source: str = "source", target: str = "target") -> dict[str, bytes]:
    members: dict[str, bytes] = {}
    for number in numbers:
        members[f"{number:04d}.{source}.png"] = picture(number)
        members[f"{number:04d}.{target}.png"] = picture(number + 10)
        members[f"{number:04d}.txt"] = prompt(number).encode()
    return members


def as_parquet(folder: Path) -> Path:
    folder.mkdir(parents=True)
    data_set().to_parquet(folder / "pairs.parquet")
    return folder / "pairs.parquet"


def as_snapshot(folder: Path) -> Path:
    (folder / "data").mkdir(parents=True)
    for split in ("train", "test"):
        data_set(4 if split == "train" else 1).to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")
    (folder / "README.md").write_text("# pairs\n")
    return folder


def as_saved(folder: Path) -> Path:
    data_set().save_to_disk(folder)
    return folder


def as_arrow(folder: Path) -> Path:
    data_set().save_to_disk(folder)
    return next(folder.glob("*.arrow"))


def as_tars(folder: Path) -> Path:
    for shard in range(2):
        write_tar(folder / f"{shard:03d}.tar", tar_members(range(2 * shard, 2 * shard + 2)))
    return folder / "{000..001}.tar"


def as_suffixes(folder: Path) -> Path:
    folder.mkdir(parents=True)
    for number in range(4):
        (folder / f"{number}_start.png").write_bytes(picture(number))
        (folder / f"{number}_end.png").write_bytes(picture(number + 10))
        (folder / f"{number}.txt").write_text(prompt(number))
    return folder


def as_image_folder(folder: Path) -> Path:
    (folder / "train" / "pictures").mkdir(parents=True)
    lines = []
    for number in range(4):
        names = {"source_file_name": f"pictures/{number}_a.png", "edited_file_name": f"pictures/{number}_b.png"}
        for name, content in zip(names.values(), (picture(number), picture(number + 10)), strict=True):
            (folder / "train" / name).write_bytes(content)
        lines.append(json.dumps({**names, "instruction": prompt(number)}))
    (folder / "train" / "metadata.jsonl").write_text("\n".join(lines))
    return folder / "train"


FORMS = {
    "parquet": as_parquet,
    "snapshot": as_snapshot,
    "save_to_disk": as_saved,
    "arrow": as_arrow,
    "tars": as_tars,
    "suffixes": as_suffixes,
    "image folder": as_image_folder,
}
