"""A whole run at the real size: the commands of a user, on a repository of the real sizes with made-up weights.

    python benchmarks/rehearsal.py --model flux_kontext            # 34 GB on disk, half an hour on 2 cores
    python benchmarks/rehearsal.py --work FOLDER                   # leaves it there, for the next time

Encodes two pairs, trains two steps at 128 pixels on the 4-bit base, saves, resumes for a third, makes a picture. Each
is a command in a process of its own, whose memory is looked at ten times a second: all of it (with the pages of files
that it maps, which the system takes back when it likes), and what is no file's. Beside it: what task=dry_run says.
"""

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra.utils import instantiate
from PIL import Image

from benchmarks.made_up_weights import write_weights
from benchmarks.memory import compose, write_shallow
from lightning_modules.pretrained.repository import SHAPES, component_class, meta_component
from tasks.footprint import Footprint, measure
from tasks.terminal import silence_libraries

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"


class Stage(NamedTuple):
    """A command, and what it took."""

    name: str
    command: str
    seconds: float
    peak: int
    anonymous: int
    estimated: int | None


def write_repository(model: str, folder: Path, depth: int | None) -> int:
    """Write all components in their real sizes, except tokenizers; return the bytes of their weights."""
    write_shallow(model, depth, str(folder))
    index = json.loads((folder / "model_index.json").read_text())
    for name in (name for name in index if name.startswith("tokenizer")):
        shutil.copytree(SHAPES / name, folder / name)
    for name in (name for name in index if not name.startswith(("_", "tokenizer", "scheduler"))):
        part = meta_component(str(folder), name)
        is_diffusers = component_class(str(folder), name).__module__.startswith("diffusers")
        write_weights(part, folder / name, "diffusion_pytorch_model" if is_diffusers else "model")
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def write_pairs(folder: Path, side: int) -> None:
    """Write two pairs of noise."""
    generator = torch.Generator().manual_seed(0)
    for kind in ("training_images", "control_images"):
        (folder / kind).mkdir(parents=True)
        for number in range(2):
            pixels = torch.randint(0, 256, (side, side, 3), generator=generator, dtype=torch.uint8)
            Image.fromarray(pixels.numpy()).save(folder / kind / f"{number}.png")
            (folder / "training_images" / f"{number}.txt").write_text("make it snow")


def memory(pid: int) -> tuple[int, int]:
    """Return the resident and the anonymous memory of a process in bytes."""
    sizes = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(("VmRSS", "RssAnon")):
            sizes[line.split(":")[0]] = int(line.split()[1]) * 1024
    return sizes.get("VmRSS", 0), sizes.get("RssAnon", 0)


def run(name: str, script: str, folder: Path, estimated: int | None, *overrides: str) -> Stage:
    """Run a command, which must succeed."""
    command = [script, *overrides]
    print(f"{name}: python {shlex.join(command)}", flush=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    start, peak, anonymous = time.monotonic(), 0, 0
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, str(ROOT / script), *overrides], cwd=folder, env=environment, stdout=log, stderr=log
        )
        while process.poll() is None:
            now = memory(process.pid)
            peak, anonymous = max(peak, now[0]), max(anonymous, now[1])
            time.sleep(0.1)
    if process.returncode:
        raise RuntimeError(f"{name} failed:\n{(folder / f'{name}.log').read_text()[-3000:]}")
    stage = Stage(name, shlex.join(["python", *command]), time.monotonic() - start, peak, anonymous, estimated)
    print(row(stage), flush=True)
    return stage


def plan(settings: list[str], model: str, repository: Path) -> Footprint:
    """Return the estimate of task=dry_run."""
    cfg = compose(model, str(repository), "bfloat16", *settings)
    module = instantiate(cfg.model, _convert_="all")
    module.check()
    data = instantiate(cfg.data, _convert_="all")
    data.configure_for(module)
    data.scan()
    return measure(module, data)


def row(stage: Stage) -> str:
    """Return a line of the table, in GB."""
    estimate = "" if stage.estimated is None else f"{stage.estimated / 1e9:.1f}"
    return f"| {stage.name} | {stage.seconds:.0f} | {stage.peak / 1e9:.1f} | {stage.anonymous / 1e9:.1f} | {estimate} |"


def rehearse(model: str, work: Path, side: int, format: str, depth: int | None) -> list[Stage]:
    """Run all stages."""
    repository, pairs = work / "repository", work / "pairs"
    if not repository.is_dir():
        start = time.monotonic()
        size = write_repository(model, repository, depth)
        write_pairs(pairs, side)
        print(f"wrote {size / 1e9:.1f} GB in {time.monotonic() - start:.0f} s", flush=True)
    data = [f"data.root={pairs}", f"data.cache_dir={work / 'cache'}", "data.num_workers=0"]
    quantized = ["model/quantization=fp4", f"model.quantization.format={format}"]
    common = [f"model={model}", f"model.pretrained_model_name_or_path={repository}", *quantized]
    device = ["trainer.accelerator=cpu"]
    footprint = plan([*data, *quantized], model, repository)
    texts = sum(size for name, size in footprint.encoders.items() if name != "vae")
    vae = footprint.encoders["vae"]
    here = footprint.process
    training = footprint.adapter + footprint.optimizer + footprint.activations["full"]
    fit = [*common, *data, *device, "output_dir=run", "callbacks.sample_images=null", "logger=none"]
    picture = f"image={pairs / 'control_images' / '0.png'}"
    trained = here + footprint.weights + training
    request = [f"data.cache_dir={work / 'cache'}", "lora=run", picture, 'prompt="make it snow"']
    images = [*common, *device, *request, "num_inference_steps=2", "output_dir=pictures"]
    stages = [
        ("encode", "predict.py", here + max(texts, vae + footprint.encode), ["task=cache", *common, *data, *device]),
        ("train two steps, save", "train.py", trained, [*fit, "trainer.max_steps=2"]),
        ("resume, a third", "train.py", trained, [*fit, "trainer.max_steps=3", "ckpt_path=last"]),
        ("predict", "predict.py", here + footprint.weights + vae + footprint.decode, images),
    ]
    return [run(name, script, work, estimated, *overrides) for name, script, estimated, overrides in stages]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="flux_kontext", choices=("flux_kontext", "flux_dev"))
    parser.add_argument("--side", type=int, default=128)
    parser.add_argument("--format", choices=("fp4", "nf4"), default="fp4")
    parser.add_argument("--depth", type=int, help="blocks of each kind, to try it; all of them otherwise")
    parser.add_argument("--work", type=Path, help="where it is written, and kept; else in a new folder, and removed")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    silence_libraries()
    work = options.work or Path(tempfile.mkdtemp(dir=".", prefix="rehearsal-"))
    work = work.absolute()
    work.mkdir(parents=True, exist_ok=True)
    try:
        stages = rehearse(options.model, work, options.side, options.format, options.depth)
        left: Any = json.loads(json.dumps([stage._asdict() for stage in stages]).replace(str(work), "WORK"))
    finally:
        if options.work is None:
            shutil.rmtree(work)
    head = ["| stage | seconds | peak, GB | no file's | dry run |", "|---|---|---|---|---|"]
    table = "\n".join([*head, *map(row, stages)])
    print(table)
    options.output.mkdir(parents=True, exist_ok=True)
    how = ["--model", options.model, "--format", options.format, "--side", str(options.side)]
    facts = {"command": shlex.join(["python", "benchmarks/rehearsal.py", *how]), "torch": torch.__version__}
    name = f"rehearsal_{options.model}"
    (options.output / f"{name}.json").write_text(json.dumps({**facts, "stages": left}, indent=1) + "\n")
    (options.output / f"{name}.md").write_text(table + "\n")


if __name__ == "__main__":
    main()
