"""Train five edits of photographs on a card of 24 GB, and write docs/gallery.md with what came out.

    python -m benchmarks.gallery                                   # all, on photographs of NASA that it downloads
    python -m benchmarks.gallery --edits colour jpeg --photos FOLDER
    python -m benchmarks.gallery --edits colour trainer.max_steps=100     # any settings of train.py

Each photograph is the target of a pair, whose control a rule makes from it. The last ones are held out: they are edited
by predict.py, without and with the LoRA. A stopped command resumes when it is started again. Figures are kept in
benchmarks/results/gallery.json.
"""

import argparse
import io
import json
import math
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlencode
from urllib.request import Request, urlopen

import torch
from PIL import Image, ImageDraw, ImageFilter, ImageOps

from report.images import labelled_row, scaled
from report.tables import read_metrics, read_validation
from runs.run_folder import RunFolder

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "results" / "gallery.json"
PAGE = ROOT / "docs" / "gallery.md"
# Photographs, and how many of them are held out; the side of the square whose area they have at most.
COUNT, HELD_OUT, SIDE = 60, 4, 768
SETTINGS = ("data.resolution=null", "trainer.max_steps=1000", "save_every=250", "sample_every=250")
# Pixels: the width of a written grid.
WIDEST = 1400
SEARCHES = ("aircraft in flight", "rocket launch", "earth observation", "nebula", "research building")
SEARCH, ASSETS = "https://images-api.nasa.gov/search", "https://images-assets.nasa.gov/"


def grey(photo: Image.Image, draw: random.Random) -> Image.Image:
    """Remove the colours."""
    return ImageOps.grayscale(photo).convert("RGB")


def damaged(photo: Image.Image, draw: random.Random) -> Image.Image:
    """Compress as JPEG of a low quality."""
    content = io.BytesIO()
    photo.save(content, "JPEG", quality=draw.randint(4, 12))
    return Image.open(content).convert("RGB")


def blurred(photo: Image.Image, draw: random.Random) -> Image.Image:
    """Blur by a radius of up to a hundredth of the longer side."""
    return photo.filter(ImageFilter.GaussianBlur(max(photo.size) * draw.uniform(0.003, 0.01)))


def without_border(photo: Image.Image, draw: random.Random) -> Image.Image:
    """Paint a grey border of a sixth of each side."""
    width, height = photo.size
    box = (width // 6, height // 6, width - width // 6, height - height // 6)
    image = Image.new("RGB", photo.size, "grey")
    image.paste(photo.crop(box), box)
    return image


def with_hole(photo: Image.Image, draw: random.Random) -> Image.Image:
    """Paint a grey rectangle of a third of each side somewhere."""
    left, top = (draw.randrange(side - side // 3) for side in photo.size)
    image = photo.copy()
    box = (left, top, left + photo.size[0] // 3, top + photo.size[1] // 3)
    ImageDraw.Draw(image).rectangle(box, "grey")
    return image


class Edit(NamedTuple):
    """An edit to learn.

    Attributes:
        rule: makes the control of a photograph.
        prompt: the instruction of all pairs.
        model: settings of train.py that choose the model and fit it into 24 GB.
        placement: settings that predict.py needs again, because a LoRA does not store them.
    """

    rule: Callable[[Image.Image, random.Random], Image.Image]
    prompt: str
    model: tuple[str, ...]
    placement: tuple[str, ...] = ()


EDITS = {
    "colour": Edit(grey, "colorize this photograph", ("model=flux2_klein_4b",)),
    "jpeg": Edit(damaged, "remove the compression artifacts", ("model=flux_kontext", "model/quantization=nf4")),
    "blur": Edit(
        blurred,
        "make this photograph sharp",
        ("model=longcat_image_edit", "model/quantization=fp8"),
        ("model.offload.encoders=true",),
    ),
    "border": Edit(
        without_border,
        "fill in the grey border",
        ("model=qwen_image_edit_plus", "model/quantization=nf4"),
        ("model.offload.encoders=true", "model.offload.blocks=30"),
    ),
    "hole": Edit(with_hole, "fill in the grey rectangle", ("model=flux2_klein_4b",)),
}


def download(folder: Path) -> None:
    """Download photographs of NASA, whose own images are not copyrighted, with their titles in credits.txt.

    The terms are those of nasa.gov/nasa-brand-center/images-and-media. Images that name another creator are left out.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for search in SEARCHES:
        fields = {"q": search, "media_type": "image", "page_size": 3 * COUNT // len(SEARCHES)}
        items = json.loads(_read(f"{SEARCH}?{urlencode(fields)}"))["collection"]["items"]
        wanted = [item["data"][0] for item in items if not item["data"][0].get("secondary_creator")]
        for facts in wanted[: COUNT // len(SEARCHES)]:
            name = facts["nasa_id"]
            path = folder / f"{''.join(one if one.isalnum() else '_' for one in name)}.jpg"
            if not path.is_file():
                content = _read(ASSETS + quote(f"image/{name}/{name}~medium.jpg"))
                Image.open(io.BytesIO(content)).verify()
                path.write_bytes(content)
                with (folder / "credits.txt").open("a", encoding="utf-8") as file:
                    file.write(f"{path.name}: {facts['title']}, NASA {facts.get('center', '')} ({name})\n")


def _read(address: str) -> bytes:
    with urlopen(Request(address, headers={"User-Agent": "retouch-gallery"}), timeout=60) as answer:
        return answer.read()


def write_pairs(edit: Edit, photos: Path, root: Path) -> None:
    """Write the pairs of an edit to root/train and root/held_out, sides in multiples of 16 for any model."""
    files = sorted(path for path in photos.iterdir() if path.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp"))
    if len(files) <= HELD_OUT:
        raise SystemExit(f"{photos} contains {len(files)} photographs: {HELD_OUT} are held out, so it needs more")
    for number, path in enumerate(files):
        with Image.open(path) as file:
            photo = ImageOps.exif_transpose(file).convert("RGB")
        photo = scaled(photo, min(1.0, SIDE / math.sqrt(photo.width * photo.height)))
        photo = ImageOps.fit(photo, (max(photo.width // 16, 1) * 16, max(photo.height // 16, 1) * 16))
        part = root / ("held_out" if number >= len(files) - HELD_OUT else "train")
        for name, image in (("target", photo), ("control", edit.rule(photo, random.Random(path.name)))):
            (part / name).mkdir(parents=True, exist_ok=True)
            image.save(part / name / f"{path.stem}.png")
        (part / "target" / f"{path.stem}.txt").write_text(edit.prompt, encoding="utf-8")


def command(script: str, *settings: str) -> None:
    """Run train.py or predict.py, and end with it if it fails."""
    print(f"\n> python {script}.py {' '.join(settings)}", flush=True)
    if status := subprocess.run([sys.executable, str(ROOT / f"{script}.py"), *settings]).returncode:
        raise SystemExit(status)


def make(edit: Edit, photos: Path, folder: Path, settings: list[str]) -> dict[str, Any]:
    """Make pairs, train, and edit what is held out, unless this is done; return the figures of the run."""
    pairs, run, edited = folder / "pairs", RunFolder(folder / "run"), folder / "edited"
    if not (pairs / "done").is_file():
        write_pairs(edit, photos, pairs)
        (pairs / "done").touch()
    data = [f"data.root={pairs / 'train'}", f"data.val_root={pairs / 'held_out'}"]
    command("train", *edit.model, *edit.placement, *SETTINGS, *data, f"output_dir={run}", "resume=auto", *settings)
    controls = pairs / "held_out" / "control"
    if not (folder / "edited.done").is_file():
        shutil.rmtree(edited, ignore_errors=True)
        request = [f"lora={run}", f"image={controls}", f"prompt={edit.prompt}", "lora_scale=[0,1]"]
        command("predict", *request, *edit.placement, f"output_dir={edited}")
        (folder / "edited.done").touch()
    steps, scores = read_metrics(run.metrics), read_validation(run.validation)
    return {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none (CPU)",
        "steps": int(steps[-1]["step"]),
        "minutes": round(float(steps[-1]["seconds"]) / 60, 1),
        "memory": max(float(row["peak_memory_gb"]) for row in steps),
        "psnr": scores[-1]["psnr"],
        "psnr_nothing": scores[-1]["psnr_nothing"],
    }


def write_grid(folder: Path, path: Path) -> None:
    """Draw a row for each held-out photograph: the control, edits without and with the LoRA, and the target."""
    results: dict[str, list[Path]] = {}
    for line in (folder / "edited" / "predictions.jsonl").read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        results.setdefault(Path(record["image"]).name, []).append(folder / "edited" / record["file"])
    rows = []
    for name, (before, after) in results.items():
        parts = {"before": "control", "photograph": "target"}
        given = {label: folder / "pairs" / "held_out" / part / name for label, part in parts.items()}
        files = {
            "before": given["before"],
            "without LoRA": before,
            "with LoRA": after,
            "photograph": given["photograph"],
        }
        rows.append(labelled_row({label: Image.open(file).convert("RGB") for label, file in files.items()}))
    grid = Image.new("RGB", (max(row.width for row in rows), sum(row.height for row in rows)), "white")
    for index, row in enumerate(rows):
        grid.paste(row, (0, sum(above.height for above in rows[:index])))
    scaled(grid, min(1.0, WIDEST / grid.width)).save(path, quality=85)


def written(page: str, records: dict[str, dict[str, Any]]) -> str:
    """Return the page with the table of the edits and the images of those that were run."""
    lines = ["| edit | prompt | settings | result |", "|---|---|---|---|"]
    for name, edit in EDITS.items():
        settings, result = " ".join((*edit.model, *edit.placement)), "not yet run"
        if one := records.get(name):
            result = f"{one['card']}, {one['minutes']:g} minutes, {one['memory']:.1f} GB, "
            result += f"PSNR {one['psnr']:.1f} dB (doing nothing: {one['psnr_nothing']:.1f})"
        lines.append(f"| `{name}` | {edit.prompt} | `{settings}` | {result} |")
    shown = [f"![{EDITS[name].prompt}](gallery_{name}.jpg)" for name in EDITS if name in records]
    before, start, rest = page.partition("<!-- edits -->\n")
    return (
        before
        + start
        + "\n".join([*lines, *(part for one in shown for part in ("", one))])
        + "\n"
        + rest[rest.index("<!-- end -->") :]
    )


def main(arguments: list[str] | None = None, records: Path = RECORDS, page: Path = PAGE) -> None:
    """Run the chosen edits one after the other, and write the page after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", nargs="+", choices=EDITS, default=list(EDITS))
    parser.add_argument("--photos", type=Path, help="a folder of photographs; without it they are downloaded")
    parser.add_argument("--output", type=Path, default=Path("outputs/gallery"))
    chosen, settings = parser.parse_known_args(arguments)
    if wrong := [one for one in settings if one.startswith("-") or "=" not in one]:
        parser.error(f"{wrong[0]}: settings of train.py are KEY=VALUE")
    photos = chosen.photos or chosen.output / "photos"
    if chosen.photos is None:
        download(photos)
    for name in chosen.edits:
        figures = make(EDITS[name], photos, chosen.output / name, settings)
        write_grid(chosen.output / name, page.with_name(f"gallery_{name}.jpg"))
        known = json.loads(records.read_text()) if records.is_file() else {}
        records.write_text(json.dumps(known | {name: figures}, indent=1, sort_keys=True) + "\n")
        page.write_text(written(page.read_text(encoding="utf-8"), known | {name: figures}), encoding="utf-8")
        print(f"{name}: {figures}; {page}")


if __name__ == "__main__":
    main()
