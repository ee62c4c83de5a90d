"""Train five edits of photographs on a card of 24 GB, and write docs/gallery.md with what came out.

    python benchmarks/gallery.py                                   # all, on photographs of NASA that it downloads
    python benchmarks/gallery.py --edits grey jpeg --photos FOLDER
    python benchmarks/gallery.py --edits grey trainer.max_steps=100     # any settings of train.py

An edit is a recipe of data.control, which makes the condition image of each photograph. The last photographs are held
out: predict.py edits their condition images, without and with the LoRA. A stopped command resumes when it is started
again. Figures are kept in benchmarks/results/gallery.json.
"""

import argparse
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode
from urllib.request import Request, urlopen

import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image, ImageOps

sys.path.insert(0, str(Path(__file__).parent.parent))  # the packages next to this folder, installed or not

import cli.resolvers  # noqa: F401 (of the interpolations in a run's settings)
from benchmarks.labels import stacked
from callbacks.image_writer import PREDICTIONS, STRIPS
from cli.placement import frozen_model
from datamodules.batch import RawBatch
from datamodules.images.recipes import RECIPES
from report.images import labelled_row, save_png, scaled, to_image
from report.tables import read_metrics, read_validation
from runs.run_folder import RunFolder

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "results" / "gallery.json"
PAGE = ROOT / "docs" / "gallery.md"
# Number of photographs, and of those that are held out.
COUNT, HELD_OUT = 60, 4
SETTINGS = (
    "data.resolution=768",
    "data.control.variants=4",
    "trainer.max_steps=1000",
    "save_every=250",
    "sample_every=250",
)
# Settings of train.py by recipe: a model that fits into 24 GB, and that keeps the scale of its condition image.
EDITS = {
    "grey": "model=flux2_klein_4b",
    "jpeg": "model=flux_kontext model/quantization=nf4",
    "blur": "model=flux2_klein_4b",
    "border": "model=flux_kontext model/quantization=nf4",
    "hole": "model=flux2_klein_4b",
}
# Pixels: the width of a written grid.
WIDEST = 1400
SEARCHES = ("aircraft in flight", "rocket launch", "earth observation", "nebula", "research building")
SEARCH, ASSETS = "https://images-api.nasa.gov/search", "https://images-assets.nasa.gov/"


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


def split(photos: Path, output: Path) -> list[str]:
    """Copy photographs to output/train and, the last ones, to output/held_out; return the settings that name both."""
    files = sorted(path for path in photos.iterdir() if path.suffix.lower() in (".jpg", ".jpeg", ".png", ".webp"))
    if len(files) <= HELD_OUT:
        raise SystemExit(f"{photos} contains {len(files)} photographs: {HELD_OUT} are held out, so it needs more")
    for name, some in (("train", files[:-HELD_OUT]), ("held_out", files[-HELD_OUT:])):
        shutil.rmtree(output / name, ignore_errors=True)
        (output / name).mkdir(parents=True)
        for path in some:
            shutil.copy(path, output / name)
    return [f"data.root={output / 'train'}", f"data.val_root={output / 'held_out'}"]


def command(script: str, *settings: str) -> None:
    """Run train.py or predict.py, and end with it if it fails."""
    print(f"\n> python {script}.py {' '.join(settings)}", flush=True)
    if status := subprocess.run([sys.executable, str(ROOT / f"{script}.py"), *settings]).returncode:
        raise SystemExit(status)


def held_out(run: RunFolder) -> Iterator[RawBatch]:
    """Return the held-out pairs of a run: the pixels that its data module makes of them for training."""
    cfg: Any = OmegaConf.load(run.config)
    data = instantiate(cfg.data, _convert_="all")
    data.configure_for(frozen_model(cfg))
    data.scan()
    return data.pixels(data.validation, slice(None))


def edit(run: RunFolder, pair: RawBatch, folder: Path) -> Image.Image:
    """Edit a condition image without and with the LoRA, unless this is done; return a row with both and the target."""
    control, target = map(to_image, pair.images)
    if not (folder / STRIPS).is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        save_png(control, file := folder.with_suffix(".png"))
        request = [f"lora={run}", f"image={file}", f"prompt={pair.prompts[0]}", "lora_scale=[0,1]"]
        command("predict", *request, f"width={target.width}", f"height={target.height}", f"output_dir={folder}")
    lines = (folder / PREDICTIONS).read_text(encoding="utf-8").splitlines()
    without, after = (Image.open(folder / json.loads(line)["file"]) for line in lines)
    across, down = (target.width - control.width) // 2, (target.height - control.height) // 2
    before = ImageOps.expand(control, (across, down), "white")  # the recipe border removes what is around it
    return labelled_row({"before": before, "without LoRA": without, "with LoRA": after, "photograph": target})


def make(name: str, folder: Path, settings: list[str]) -> tuple[dict[str, Any], Image.Image]:
    """Train an edit, and edit what is held out, unless this is done; return the figures of the run, and a grid."""
    run = RunFolder(folder / "run")
    chosen = [f"data.control={name}", *EDITS[name].split(), *SETTINGS, f"output_dir={run}", "resume=auto"]
    command("train", *chosen, *settings)
    rows = [edit(run, pair, folder / f"held_out-{number}") for number, pair in enumerate(held_out(run))]
    grid = stacked(rows)
    steps, scores = read_metrics(run.metrics), read_validation(run.validation)
    figures = {
        "card": torch.cuda.get_device_name() if torch.cuda.is_available() else "none (CPU)",
        "steps": int(steps[-1]["step"]),
        "minutes": round(float(steps[-1]["seconds"]) / 60, 1),
        "memory": max(float(row["peak_memory_gb"]) for row in steps),
        "psnr": scores[-1]["psnr"],
        "psnr_nothing": scores[-1]["psnr_nothing"],
    }
    return figures, scaled(grid, min(1.0, WIDEST / grid.width))


def written(page: str, records: dict[str, dict[str, Any]]) -> str:
    """Return the page with the table of the edits and the images of those that were run."""
    lines, images = ["| edit | prompt | settings | result |", "|---|---|---|---|"], []
    for name, settings in EDITS.items():
        prompt, result = RECIPES[name].prompts.split(" | ")[0], "not yet run"
        if one := records.get(name):
            result = f"{one['card']}, {one['minutes']:g} minutes, {one['memory']:.1f} GB, "
            result += f"PSNR {one['psnr']:.1f} dB (doing nothing: {one['psnr_nothing']:.1f})"
            images += ["", f"![{prompt}](gallery_{name}.jpg)"]
        lines.append(f"| `{name}` | {prompt} | `{settings}` | {result} |")
    before, start, rest = page.partition("<!-- edits -->\n")
    return before + start + "\n".join([*lines, *images, rest[rest.index("<!-- end -->") :]])


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
    data = split(photos, chosen.output)
    for name in chosen.edits:
        figures, grid = make(name, chosen.output / name, [*data, *settings])
        grid.save(page.with_name(f"gallery_{name}.jpg"), quality=85)
        known = json.loads(records.read_text()) if records.is_file() else {}
        records.write_text(json.dumps(known | {name: figures}, indent=1, sort_keys=True) + "\n")
        page.write_text(written(page.read_text(encoding="utf-8"), known | {name: figures}), encoding="utf-8")
        print(f"{name}: {figures}; {page}")


if __name__ == "__main__":
    main()
