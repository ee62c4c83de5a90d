"""Write docs/models.md: licence, memory and defaults of every model, and the programs that load its LoRA.

    python -m benchmarks.models             # with the memory in benchmarks/results/models.json
    python -m benchmarks.models --measure   # run task=dry_run for every model and precision first; takes a while

It comes from conf/, the models' configurations and the tables by which Retouch writes LoRA files.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import hydra
from omegaconf import DictConfig
from PIL import Image
from torch import nn

from cli.resolvers import CONF
from foundation.catalogue import catalogue
from lightning_modules.adapters.targets import resolve_targets
from lightning_modules.family import Family
from lightning_modules.lora_files.compatibility import in_comfyui, loading_call
from lightning_modules.pretrained.frozen_base import FrozenBase
from lightning_modules.pretrained.repository import EMBEDDED, meta_component
from tasks.models import without_network

ROOT = Path(__file__).parent.parent
MEMORY = ROOT / "benchmarks" / "results" / "models.json"
PAGE = ROOT / "docs" / "models.md"
# GB that CUDA itself takes, which task=dry_run names apart.
CUDA = 1
PRECISIONS = {"bf16": "null", "fp8": "fp8", "fp4 or nf4": "nf4"}
MODELS = [one for one in catalogue().values() if one.name != EMBEDDED and not one.name.endswith(("_fp8", "_fp4"))]
TOP = """# Models

<!-- Written by python -m benchmarks.models; change that, not this page. -->

```
python train.py model=NAME data.root=my_pairs task=dry_run    # memory, time, settings; reads no weights
```

[Your first edit](first-edit.md) helps you choose.

Memory is estimated by `task=dry_run` for one pair of a megapixel at batch size 1, in GB of the GPU, including 1 GB for
CUDA, with the transformer in bf16, fp8 (`model/quantization=fp8`) or 4 bits (`fp4` or `nf4`). Encoding comes before
training, which releases the encoders. On an H100, measured peaks of FLUX Kontext were 0.98 to 1.00 of the estimate.

The download is that of all weights in bf16, in GB; `HF_HOME` moves it from `~/.cache/huggingface`.

| `model=` | base | licence | learns from | {precisions} | encoding | download | distilled |
|---|---|---|---|---|---|---|---|---|---|
"""
MIDDLE = """
## Other checkpoints

A model trains and samples any checkpoint of its pipeline: a fine-tuned one, a merge, a folder.

```
python train.py model=qwen_image_edit_plus data.root=my_pairs \\
    model.pretrained_model_name_or_path=FireRedTeam/FireRed-Image-Edit-1.1
python train.py model=flux_kontext data.root=my_pairs model.transformer_name_or_path=FOLDER    # only its transformer
```

- `qwen_image_edit_plus`: [FireRed-Image-Edit](https://huggingface.co/FireRedTeam/FireRed-Image-Edit-1.1) 1.0 and 1.1
  (Apache 2.0, of the architecture of 2509), Qwen-Image-Edit-2509, and models fine-tuned from these
- `flux2_klein_4b`, `flux2_klein_9b`: fine-tuned models. Train on the base and sample with the distilled ones. 9B KV
  works as 9B does: its own pipeline, in which references do not see the target, is not used
- `z_image`: fine-tuned models; `experiment=z_image_turbo` for Z-Image-Turbo
- `qwen_image`, `qwen_image_edit`: Qwen-Image-2512, fine-tuned models. Merges with Lightning LoRAs are
  [distilled bases](training.md#distilled-bases)

A repository of another model's pipeline is refused, and the right `model=` named. One of an unknown pipeline with the
same components and transformer class is used with a note.

## ComfyUI's files

```
python train.py model=flux_kontext model.comfyui=~/ComfyUI data.root=my_pairs
python train.py model=flux_kontext model/quantization=nf4 data.root=my_pairs \\
    model.transformer_name_or_path=flux1-kontext-dev-Q4_K_M.gguf
```

`model.comfyui` finds the files by their tensors and names: the transformer in `models/diffusion_models` or
`models/unet`, the text encoders in `models/text_encoders` or `models/clip`, the autoencoder in `models/vae`. It prints
which files it uses, and downloads nothing: configurations and tokenizers come with Retouch. The tokenizers of FLUX.2
[dev], FLUX.3, Krea 2 and Qwen-Image-2.1 do not; they are small downloads from their repositories. If two files fit,
name one by `model.transformer_name_or_path`, `model.text_encoder_name_or_path` (for FLUX.1 a list of two) or
`model.vae_name_or_path`; these settings also work without `model.comfyui`.

- safetensors: in bf16, fp16, fp32, fp8 (plain or scaled) and int8, rotated (`int8_convrot`) or not; with the names of
  diffusers or of the model's authors. 8-bit layers are kept as they are, or quantized again if 4 bits are configured.
- GGUF of any type, for transformers (`pip install -e '.[gguf]'`): dequantized while it is loaded, to bf16 or to
  `model/quantization=nf4`, `fp4`, `fp8` or `int8_w8a8`.
- FLUX.2 [dev]'s text encoder may lack the parts that are not used, its last ten layers and the vision tower
  (`mistral_3_small_flux2_bf16`).
- Checkpoints of all parts (`models/checkpoints`): name one in each of the three settings. A prefix of the transformer's
  names is found; what it does not precede, such as `model_ema`, is left out with a note.
- Refused: nvfp4, mxfp8, ConvRot in 4 bits, nunchaku (SVDQuant), quanto, torchao, joined layers in bitsandbytes' 4 bits,
  GGUF text encoders, and an index and shards that contradict each other.
- A file must fit the model tensor by tensor, else it is refused and the right `model=` named. For a pruned transformer,
  put its `config.json` next to it.

Prediction, `task=quantize` and `task=export` read the same files; `task=export fuse=true format=comfyui`
[writes one](prediction.md#files-for-other-programs).

## Krea 2 with references

Krea 2 was trained without references. A LoRA teaches it to use them, by one of two schemes of its users; it works in
this scheme only, and `predict.py` reads it from the file. diffusers has no pipeline for either.

- `model.edit_scheme=after`, of `model=krea2_edit`, is ai-toolkit's `model_kwargs.edit`. References are clean, as at
  t = 0, at their own size of up to a megapixel. The text encoder reads "Picture 1:" and sees the image at 384x384. In
  ComfyUI: [Ostris' nodes](https://github.com/ostris/ComfyUI-Krea2-Ostris-Edit). ai-toolkit's preset adds `kv_cache`
  (references see only each other) and `match_target_res` (they get the target's area). Retouch has neither: a LoRA
  trained with them fits this scheme inexactly, and the reverse.
- `model.edit_scheme=before` is that of [Identity Edit](https://huggingface.co/conradlocke/krea2-identity-edit), which
  samples with `model.condition_image_size=589824`. References are modulated at the target's t and fit into it. In
  ComfyUI: [lbouaraba's nodes](https://github.com/lbouaraba/comfyui-krea2edit).

## Defaults

Each default is in `conf/model/NAME.yaml` with its source. Override any of them: `optimizer.lr`, `adapter.rank`,
`adapter.alpha`, `adapter.target_modules`, `model.timesteps.shift`, `trainer.max_steps`,
`trainer.accumulate_grad_batches`, `data.caption_dropout_rate`, `model.vae_encode_mode`. The schedule is constant. If
the base is quantized to fp4, the learning rate is 2e-5 after 100 steps of warm-up.

| `model=` | lr | rank, alpha | layers, share of weights | timestep shift | steps x samples | dropout | latents |
|---|---|---|---|---|---|---|---|
"""
LAST = """
## Where its LoRA loads

These columns describe the file in `lora/last`. `python predict.py task=export lora=RUN format=NAME` converts it for
other programs ([prediction](prediction.md#files-for-other-programs)); Retouch reads all of its formats.

| `model=` | ComfyUI | diffusers |
|---|---|---|
"""


def compose(model: str) -> DictConfig:
    """Compose the settings of train.py for a model."""
    with hydra.initialize_config_dir(str(CONF), version_base=None):
        return hydra.compose("train", overrides=[f"model={model}", "output_dir=unused", "model_name=x"])


def dry_run(model: str, precision: str, folder: Path) -> dict[str, float]:
    """Return the GPU memory of training and encoding in GB, as printed by task=dry_run."""
    command = [
        sys.executable,
        "train.py",
        "task=dry_run",
        f"model={model}",
        f"model/quantization={PRECISIONS[precision]}",
    ]
    done = subprocess.run(
        [*command, f"data.root={folder}", f"output_dir={folder}/out"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "400", "HF_HUB_OFFLINE": "1", "PATH": ""},
    )
    rows = dict(re.findall(r"(GPU, \w+(?: \w+)?) {2,}(.*?) *│", done.stderr))
    amounts = {
        name: float(found[-1]) + CUDA for name, rest in rows.items() if (found := re.findall(r"([\d.]+) GB", rest))
    }
    training = max(amounts["GPU, training"], amounts["GPU, sampling"])
    encoding = max(amount for name, amount in amounts.items() if name.startswith("GPU, encoding"))
    return {"training": round(training, 1), "encoding": round(encoding, 1)}


def download(model: str) -> float:
    """Return the size of all weights of a model in bf16, in GB."""
    base: FrozenBase = without_network(compose(model).model).base
    encoders = [meta_component(base.components.repository, name, base.revision) for name in base.encoder_names]
    parts = [base.source.meta, *(part for part in encoders if part is not None)]
    return round(2 * sum(tensor.numel() for part in parts for tensor in part.parameters()) / 1e9, 1)


def gigabytes(row: dict[str, Any]) -> list[float]:
    """Return a model's memory in training by precision and in encoding, and its download, in GB."""
    return [*(row[precision]["training"] for precision in PRECISIONS), row["bf16"]["encoding"], row["download"]]


def measure() -> dict[str, Any]:
    """Return the memory of every model, by precision, and its download."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        for model in (one.name for one in MODELS):
            data = Path(temporary) / model
            edits = family(compose(model)).condition_images.most != 0
            for name in ("training_images", "control_images") if edits else ("",):
                (data / name).mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (1024, 1024)).save(data / name / "a.png")
            (data / ("training_images" if edits else "") / "a.txt").write_text("make it snow")
            found[model] = {precision: dry_run(model, precision, data) for precision in PRECISIONS}
            found[model]["download"] = download(model)
            print(model, found[model], file=sys.stderr)
    return found


def family(cfg: DictConfig) -> Family:
    """Return the module of a model without weights."""
    return without_network(cfg.model)


def page(memory: dict[str, Any]) -> str:
    """Return docs/models.md."""
    bases, defaults = "", ""
    loads: dict[tuple[str, ...], list[str]] = {}
    configs = [(one, compose(one.name)) for one in MODELS]
    modules = [(one, cfg, without_network(cfg.model)) for one, cfg in configs]
    modules.sort(key=lambda entry: entry[2].condition_images.most == 0)
    for model, cfg, module in modules:
        name = model.name
        base: FrozenBase = module.base
        names, transformer = base.layer_names, base.source.meta
        layers = resolve_targets(transformer, module.layers, None)
        condition_images, repository = module.condition_images, cfg.model.pretrained_model_name_or_path
        learns = "images with captions"
        if condition_images.most != 0:
            several = ("1 to " if condition_images.least else "up to ") if (condition_images.most or 0) > 1 else ""
            limit = condition_images.limit if condition_images.most else "any number of condition images"
            learns = f"pairs, {several}{limit}"
        link = f"[{repository}](https://huggingface.co/{repository})"
        sizes = " | ".join(f"{size:.0f}" for size in gigabytes(memory[name]))
        bases += f"| `{name}` | {link} | {model.licence} | {learns} | {sizes} | {model.distilled} |\n"
        adapter, trainer = cfg.adapter, cfg.trainer
        samples = trainer.accumulate_grad_batches * cfg.data.batch_size
        shift = cfg.model.timesteps.shift
        defaults += (
            f"| `{name}` | {cfg.optimizer.lr:g} | {adapter.rank}, {adapter.alpha} | {_layers(layers, transformer)} | "
            f"{'none' if shift is None else shift} | {trainer.max_steps:,} x {samples} | "
            f"{cfg.data.caption_dropout_rate:.0%} | {cfg.model.vae_encode_mode} |\n"
        )
        verdicts = in_comfyui("diffusers", names, layers).verdict, f"reads it: {loading_call(module.pipeline_name)}"
        loads.setdefault(verdicts, []).append(f"`{name}`")
    readers_table = "".join(f"| {', '.join(names)} | {' | '.join(verdicts)} |\n" for verdicts, names in loads.items())
    return TOP.format(precisions=" | ".join(PRECISIONS)) + bases + MIDDLE + defaults + LAST + readers_table


def _layers(layers: list[str], transformer: nn.Module) -> str:
    """Describe the adapted layers, with their share of the weights of all linear layers."""
    linear = {name: one.weight.numel() for name, one in transformer.named_modules() if isinstance(one, nn.Linear)}
    share = sum(linear[name] for name in layers) / sum(linear.values())
    text = any(".add_q_proj" in name for name in layers)
    mlps = any(re.search(r"\bff\.|mlp|feed_forward", name) for name in layers)
    return f"attention{' of image and text' if text else ''}{', MLPs' if mlps else ''}: {share:.0%}"


def main() -> None:
    """Write the page, after measuring if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true")
    if parser.parse_args().measure:
        MEMORY.write_text(json.dumps(measure(), indent=1) + "\n")
    PAGE.write_text(page(json.loads(MEMORY.read_text())))


if __name__ == "__main__":
    main()
