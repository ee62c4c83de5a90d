"""train.py against diffusers' own LoRA script for FLUX.1 Kontext: steps/s, seconds of the whole command, peak memory.

    python benchmarks/peer.py --script train_dreambooth_lora_flux_kontext.py                # Shapes
    python benchmarks/peer.py --script ... --width real --depth 1 --size 288 --steps 12     # FLUX.1's widths

The script is in diffusers' repository, in examples/dreambooth, and needs accelerate and datasets. It runs unchanged:
PyTorch's hook on optimizers notes when a step ends. Both commands read the same pipeline and pairs, encode prompts and
images once, and use the same batch, rank, layers, optimizer, learning rate and gradient checkpointing. A round runs one
after the other; figures are medians over the rounds, ratios are taken within a round. Whole seconds and memory include
the pipeline that the script loads at its end, even to sample nothing. Weights of FLUX.1's widths are random.
"""

import argparse
import itertools
import json
import os
import runpy
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
WARM_UP = 3
FOLDERS = {"training_images": "after", "control_images": "before"}
OURS = {
    "float32": ["model.dtype=float32"],
    "bf16": ["model.dtype=bfloat16"],
    "int8_w8a8": ["model.dtype=bfloat16", "model/quantization=int8_w8a8"],
    "int8_w8a8, not rotated": [
        "model.dtype=bfloat16",
        "model/quantization=int8_w8a8",
        "model.quantization.rotation=false",
    ],
}
THEIRS = {"float32": "no", "bf16": "bf16"}


def write_pipeline(folder: Path, depth: int | None) -> None:
    """Write Shapes with a CLIP that reads 77 tokens, which the script requires.

    Args:
        depth: number of blocks of a transformer with FLUX.1's widths and tiny random encoders; None: Shapes' own.
    """
    from diffusers import AutoencoderKL
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    from benchmarks.made_up_weights import write_transformer
    from foundation.settings import ASSETS

    small = ASSETS / "shapes"
    shutil.copytree(small, folder)
    clip: dict[str, Any] = {"max_position_embeddings": 77}
    if depth is not None:
        shutil.rmtree(folder / "transformer")
        with tempfile.TemporaryDirectory() as real:
            write_transformer(Path(real), depth)
            for name in ("transformer", "scheduler"):
                shutil.copytree(Path(real) / name, folder / name, dirs_exist_ok=True)
        t5 = T5Config.from_pretrained(small / "text_encoder_2", d_model=4096)
        T5EncoderModel(t5).save_pretrained(folder / "text_encoder_2")
        vae = AutoencoderKL.load_config(small / "vae") | {"block_out_channels": [16] * 4, "latent_channels": 16}
        vae |= {f"{way}_block_types": [vae[f"{way}_block_types"][0]] * 4 for way in ("down", "up")}
        AutoencoderKL.from_config(vae).save_pretrained(folder / "vae")
        clip["hidden_size"] = 768
    config = CLIPTextConfig.from_pretrained(small / "text_encoder", **clip)
    CLIPTextModel(config).save_pretrained(folder / "text_encoder")


def list_pairs(data: Path) -> None:
    """Move the captions to a table: the script's library would take files of text, and folders named train, for all."""
    after, before = ((data / old).rename(data / new) for old, new in FOLDERS.items())
    rows = []
    for caption in sorted(after.glob("*.txt")):
        image = f"{caption.stem}.png"
        row = {"file_name": f"{after.name}/{image}", "control_file_name": f"{before.name}/{image}"}
        rows.append(json.dumps(row | {"prompt": caption.read_text()}))
        caption.unlink()
    (data / "metadata.jsonl").write_text("\n".join(rows))


def run_script(out: str, script: str, *arguments: str) -> None:
    """Run a script and write a line to `out` after each optimizer step, like metrics.csv."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    start, count = time.perf_counter(), itertools.count(1)
    with Path(out).open("w", buffering=1) as file:
        file.write("step,seconds\n")

        def note(*_: Any) -> None:
            file.write(f"{next(count)},{time.perf_counter() - start:.6f}\n")

        register_optimizer_step_post_hook(note)
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")


def their_command(options: argparse.Namespace, kind: str, data: Path, folder: Path) -> list[str]:
    """Return the arguments of the script's process."""
    settings = {
        **{"pretrained_model_name_or_path": options.pipeline, "dataset_name": data, "cache_dir": folder / "data sets"},
        **{"cond_image_column": "control", "caption_column": "prompt", "output_dir": folder / "out"},
        **{"resolution": options.size, "max_sequence_length": options.tokens, "max_train_steps": options.steps},
        **{"train_batch_size": options.batch, "rank": options.rank, "lora_alpha": options.rank, "seed": 42},
        **{"learning_rate": 1e-4, "lr_warmup_steps": 0, "adam_weight_decay": 0.01, "weighting_scheme": "logit_normal"},
        **{"mixed_precision": THEIRS[kind], "vae_encode_mode": "sample", "guidance_scale": 1},
    }
    flags = ["--cache_latents", *(["--gradient_checkpointing"] if options.checkpointing else [])]
    launch = ["-m", "benchmarks.peer", "--launch", str(folder / "steps.csv"), str(options.script.resolve())]
    return [*launch, *(f"--{name}={value}" for name, value in settings.items()), *flags]


def our_command(options: argparse.Namespace, kind: str, data: Path, folder: Path) -> list[str]:
    """Return the arguments of train.py's process."""
    settings = {
        **{"model": "flux_kontext", "model.pretrained_model_name_or_path": options.pipeline, "data.root": data},
        **{"data.cache_dir": folder / "cache", "output_dir": folder / "out", "model.resolution": options.size},
        **{"model.max_sequence_length": options.tokens, "trainer.max_steps": options.steps},
        **{"data.batch_size": options.batch, "adapter.rank": options.rank, "optimizer.lr": 1e-4},
        **{"model.gradient_checkpointing": "full" if options.checkpointing else "none"},
        **{"callbacks.sample_images": "null", "save_every": 0, "data.num_workers": 0},
    }
    return ["train.py", *(f"{name}={value}" for name, value in settings.items()), *OURS[kind], *options.overrides]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--script", type=Path, required=True)
    parser.add_argument("--pipeline", type=Path, help="folder of a FLUX.1 Kontext; by default a new one is written")
    parser.add_argument("--width", choices=["shapes", "real"], default="shapes")
    parser.add_argument("--depth", type=int, default=1, help="blocks of each kind with --width real")
    parser.add_argument("--tokens", type=int, help="T5 tokens; by default 16 for Shapes, else 512")
    parser.add_argument("--kinds", nargs="+", choices=OURS, default=["float32", "bf16"])
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkpointing", action="store_true", help="recompute the activations of all blocks")
    parser.add_argument("overrides", nargs="*", help="more overrides for train.py")
    options = parser.parse_args()
    from benchmarks.training_speed import Measured, make_data, measure

    is_small = options.pipeline is None and options.width == "shapes"
    options.tokens = options.tokens or (16 if is_small else 512)
    names = {f"script {kind}": (their_command, kind, "steps.csv") for kind in options.kinds if kind in THEIRS}
    names |= {f"train.py {kind}": (our_command, kind, "out/metrics.csv") for kind in options.kinds}
    results: dict[str, list[Measured]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        list_pairs(data := make_data(folder / "data", options.size))
        if options.pipeline is None:
            write_pipeline(folder / "pipeline", None if is_small else options.depth)
        options.pipeline = (options.pipeline or folder / "pipeline").resolve()
        for _, (name, (command, kind, out)) in itertools.product(range(options.rounds), names.items()):
            with tempfile.TemporaryDirectory(dir=folder) as run:
                results[name].append(measure(command(options, kind, data, Path(run)), Path(run) / out, WARM_UP))
    print(f"{options.size} pixels, batch {options.batch}, rank {options.rank}, {os.cpu_count()} cores")
    peers = [name for name in names if name.startswith("script")]
    print(f"{'':20} {'steps/s':>8} {'whole':>9} {'memory':>9}", *(f"{f'to {name}':>18}" for name in peers))
    for name, rounds in results.items():
        speed, _, memory, seconds = (statistics.median(values) for values in zip(*rounds, strict=True))
        pairs = [zip(rounds, results[peer], strict=True) for peer in peers]
        ratios = [statistics.median(own.speed / other.speed for own, other in pair) for pair in pairs]
        print(f"{name:20} {speed:8.3f} {seconds:7.1f} s {memory:6.0f} MB", *(f"{ratio:18.2f}" for ratio in ratios))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    if sys.argv[1:2] == ["--launch"]:
        run_script(*sys.argv[2:])
    else:
        main()
