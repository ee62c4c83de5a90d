"""Repositories of the real widths with made-up weights."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.memory import write_shallow
from lightning_modules.families.flux.native_names import NATIVE_NAMES
from lightning_modules.lora_files.names import LayerNames, in_blocks

# Bytes at which a new file begins.
SHARD = 10**9
# Numbers that are drawn, and repeated; a prime, that no side divides.
POOL = 1_000_003
# safetensors' names.
DTYPES = {torch.float8_e4m3fn: "F8_E4M3", torch.bfloat16: "BF16", torch.float32: "F32"}


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


def native_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of FLUX.1's tensors by Black Forest Labs' names: weights, biases and norms."""
    own, names = dict(model.named_parameters()), LayerNames(model, NATIVE_NAMES)
    shapes: dict[str, tuple[int, ...]] = {}
    for native, layers in names.native.items():
        rows = sum(names.shapes[layer].out_features for layer in layers)
        shapes |= {f"{native}.weight": (rows, names.shapes[layers[0]].in_features), f"{native}.bias": (rows,)}
    norms = in_blocks({name: (one,) for name, one in NATIVE_NAMES.tensors.items() if name.endswith("scale")}, own)
    return shapes | {name: tuple(own[one].shape) for name, [one] in norms.items()}


def write_scaled_file(path: Path, model: nn.Module) -> None:
    """FLUX.1 as ComfyUI's scaled fp8: float8 weights with a scale each, the rest in bf16."""
    entries, offset, plan = {}, 0, []
    for name, shape in native_shapes(model).items():
        is_weight = len(shape) == 2
        scale = [(name.replace("weight", "scale_weight"), (), torch.float32)] if is_weight else []
        for one, size, dtype in [(name, shape, torch.float8_e4m3fn if is_weight else torch.bfloat16), *scale]:
            end = offset + math.prod(size) * dtype.itemsize
            entries[one] = {"dtype": DTYPES[dtype], "shape": size, "data_offsets": [offset, end]}
            plan.append((math.prod(size), dtype))
            offset = end
    header = json.dumps(entries).encode()
    pool = 100 * torch.randn(POOL)
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for count, dtype in plan:
            numbers = torch.tensor([2e-4]) if dtype == torch.float32 else pool.repeat(-(-count // POOL))[:count]
            file.write(numbers.to(dtype).view(torch.uint8).numpy().tobytes())


def write_gguf_file(path: Path, model: nn.Module) -> None:
    """FLUX.1 as Q4_K GGUF: blocks of made-up codes with scales of the usual size, the rest in float32."""
    import gguf

    generator = np.random.default_rng(0)
    q4_k = gguf.GGMLQuantizationType.Q4_K
    _, block = gguf.GGML_QUANT_SIZES[q4_k]
    codes = generator.integers(0, 256, (POOL, block), dtype=np.uint8)
    codes[:, :4] = np.array([1e-4, 5e-4], np.float16).view(np.uint8)  # the scales of scales and of minima
    writer, shapes = gguf.GGUFWriter(path, "flux"), native_shapes(model)
    for name, shape in shapes.items():
        if len(shape) == 2 and shape[1] % 256 == 0:
            size = gguf.quant_shape_to_byte_shape(shape, q4_k)
            writer.add_tensor_info(name, size, np.dtype(np.uint8), math.prod(size), q4_k)
        else:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), 4 * math.prod(shape))
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_ti_data_to_file):
        write()
    for shape in shapes.values():
        if len(shape) == 2 and shape[1] % 256 == 0:
            count = math.prod(shape) // 256
            writer.write_tensor_data(np.resize(codes, (count, block)).reshape(shape[0], -1))
        else:
            writer.write_tensor_data(np.full(shape, 0.01, np.float32))
    writer.close()


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
