"""Repositories of the real widths with made-up weights."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.memory import write_shallow

# Bytes at which a new file begins.
SHARD = 10**9
# Numbers that are drawn, and repeated; a prime, that no side divides.
POOL = 1_000_003


def write_weights(model: nn.Module, folder: Path, start: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """Small made-up numbers for a model on the meta device, in files of about a gigabyte, and their index."""
    pool = (0.02 * torch.randn(POOL)).to(torch.bfloat16)
    shards: list[dict[str, Tensor]] = [{}]
    sizes, places = [0], {}
    for name, parameter in model.named_parameters():
        size = parameter.numel() * dtype.itemsize
        if sizes[-1] + size > SHARD and sizes[-1]:
            save_file(shards[-1], folder / f"{start}-{len(sizes):05d}.safetensors")
            shards[-1] = {}
            sizes.append(0)
            shards.append({})
        sizes[-1] += size
        numbers = pool.repeat(-(-parameter.numel() // len(pool)))[: parameter.numel()]
        shards[-1][name] = numbers.view(parameter.shape).to(dtype)
        places[name] = f"{start}-{len(sizes):05d}.safetensors"
    save_file(shards[-1], folder / f"{start}-{len(sizes):05d}.safetensors", {"format": "pt"})
    index = {"metadata": {"total_size": sum(sizes)}, "weight_map": places}
    (folder / f"{start}.safetensors.index.json").write_text(json.dumps(index))


def write_transformer(folder: Path, depth: int | None, dtype: torch.dtype = torch.bfloat16) -> None:
    """FLUX.1 Kontext of the real widths; without a depth of all its blocks."""
    from diffusers import FluxTransformer2DModel

    write_shallow("flux_kontext", depth, str(folder))
    config = json.loads((folder / "transformer" / "config.json").read_text())
    with torch.device("meta"):
        model: Any = FluxTransformer2DModel.from_config(config)
    write_weights(model, folder / "transformer", "diffusion_pytorch_model", dtype)


def write_encoder(folder: Path, dtype: torch.dtype, layers: int = 2) -> None:
    """T5-XXL with few of its layers, beside an index that names it."""
    from transformers import T5Config, T5EncoderModel

    sizes = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_heads": 64, "vocab_size": 32128}
    config = T5Config(**sizes, num_layers=layers, feed_forward_proj="gated-gelu", dtype=dtype)
    (folder / "text_encoder_2").mkdir(parents=True)
    config.save_pretrained(folder / "text_encoder_2")
    (folder / "model_index.json").write_text(json.dumps({"text_encoder_2": ["transformers", "T5EncoderModel"]}))
    with torch.device("meta"):
        model = T5EncoderModel(config)
    write_weights(model, folder / "text_encoder_2", "model", dtype)
