"""The memory and work of a run, estimated without weights: from its settings, and by a step on fake tensors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from datamodules.images.resizing import Size
from datamodules.pairs import PairsDataModule
from lightning_modules.adapters.adapter import trainable
from lightning_modules.edit_module import EditModule
from lightning_modules.estimation.flops import empty_latents, sample_flops
from lightning_modules.estimation.memory import (
    FakeStep,
    Heaviest,
    PeakMemory,
    bytes_per_parameter,
    fake_model,
    heaviest_batch,
)
from lightning_modules.execution.checkpointing import POLICIES
from lightning_modules.execution.offload import streamed_blocks
from lightning_modules.pretrained.repository import meta_component
from lightning_modules.pretrained.transformer import TransformerSource
from lightning_modules.quantization.quantization import FORMATS, Quantization


@dataclass
class Footprint:
    """The estimate; in bytes where nothing else is said."""

    transformer: nn.Module  # with its adapter, without content
    flops: float  # FLOPs of a training step with one sample, the mean
    parameters: int  # count, of the transformer
    trainable: int  # count, of the adapter
    batch: Heaviest
    weights: int  # of the transformer
    offloaded: int  # part of these that is in host memory at any time
    adapter: int  # its weights and gradients
    optimizer: int  # its state
    ema: int  # the averages of its weights
    activations: dict[str, int]  # peak of a step besides these, by gradient checkpointing policy
    encoders: dict[str, int]  # weights of the other components
    encode: int  # peak of the autoencoder besides its weights
    decode: int
    cache: int  # everything that is encoded
    process: int  # this process's memory now


def measure(module: EditModule, data: PairsDataModule) -> Footprint:
    """Estimate the footprint of training `module` on `data`, which has been scanned."""
    base, adapter, optimizer = module.base, module.adapter, module.optimization.optimizer
    assert adapter is not None
    assert optimizer is not None
    assert module.objective is not None
    passes, checkpointing = module.objective.passes(0), module.execution.checkpointing
    parts = {name: meta_component(base.components.repository, name, base.revision) for name in base.encoder_names}
    models = {name: part for name, part in parts.items() if part is not None}
    encoders = {name: base.components.weight_bytes(name, part) for name, part in models.items()}
    heaviest = heaviest_batch(module, base, data)
    batch = empty_latents(module, base, heaviest.size, heaviest.samples, heaviest.caption)
    step = FakeStep(module.execution, batch, passes)
    trained = [step.transformer]
    if adapter.trains_text_encoders:
        for name in models.keys() - {"vae"}:
            adapter.inject(models[name])
            trained.append(models[name])
    count = sum(p.numel() for part in trained for p in trainable(part).values())
    policies = dict.fromkeys([*POLICIES, *([checkpointing] if checkpointing != "auto" else [])])
    encode, decode = autoencoder_peaks(module, models["vae"], data.sizes)
    return Footprint(
        transformer=step.transformer,
        flops=sample_flops(module.execution, passes, checkpointing, data.sizes),
        parameters=sum(p.numel() for p in base.source.meta.parameters()),
        trainable=count,
        batch=heaviest,
        weights=0 if adapter.trains_base else weight_bytes(base.source),  # weights that train count with the adapter
        offloaded=offloaded_bytes(base.source),
        adapter=sum(tensor.nbytes for part in trained for tensor in adapter.tensors(part).values()) + count * 4,
        optimizer=round(count * bytes_per_parameter(optimizer)),
        ema=0 if module.optimization.ema is None else count * 4,
        activations={policy: step.peak(policy) - count * 4 for policy in policies},  # gradients count with the adapter
        encoders=encoders,
        encode=encode,
        decode=decode,
        cache=_cache_bytes(module, data, heaviest.caption),
        process=psutil.Process().memory_info().rss,
    )


def expected_quantization(source: TransformerSource) -> Quantization | None:
    """Return the quantization of a transformer; of files in another format than the settings, that of all layers."""
    format, own = source.expected_precision, source.quantization
    if own is not None and own.format == format:
        return own
    return Quantization(format, (), ["transformer"], False) if format in FORMATS else None


def weight_bytes(source: TransformerSource) -> int:
    """Return the bytes of a transformer's weights; an estimate for files that are quantized."""
    if (quantization := expected_quantization(source)) is not None:
        return quantization.nbytes(source.meta, source.dtype)
    return sum(parameter.numel() for parameter in source.meta.parameters()) * source.dtype.itemsize


def offloaded_bytes(source: TransformerSource) -> int:
    """Return the bytes of streamed blocks in host memory: all but two, which are in a buffer each."""
    quantization = expected_quantization(source)

    def nbytes(name: str, layer: nn.Module) -> int:
        if not isinstance(layer, nn.Linear):
            return 0
        converted = quantization is not None and quantization.converts(name, layer)
        bits = int(quantization.bits) if quantization and converted else 8 * source.dtype.itemsize
        return layer.weight.numel() * bits // 8  # the scales of 4-bit blocks are not streamed

    streamed = streamed_blocks(source.meta, source.streamed).items()
    sizes = [sum(nbytes(f"{at}.{name}", part) for name, part in block.named_modules()) for at, block in streamed]
    return sum(sizes) - min(2, len(sizes)) * max(sizes, default=0)


def _cache_bytes(module: EditModule, data: PairsDataModule, caption: str) -> int:
    """Return the bytes of all latents and prompt embeddings; `caption` is the longest."""
    latents, prompt = {}, {}
    for size in set(data.sizes):
        batch = empty_latents(module, module.base, size, 1, caption)
        stds = (batch.target_std, batch.rejected_std) if module.flow.vae_encode_mode == "sample" else ()
        stored = (batch.target_mean, batch.rejected_mean, *stds, batch.mask, *batch.controls)
        latents[size] = sum(tensor.nbytes for tensor in stored if tensor is not None)
        prompt[size] = sum(tensor.nbytes for tensor in batch.prompt.values())
    others = {prompt for prompt in data.preserve_prompts if prompt}
    if module.condition_images.text_sees_them:  # no two samples share an embedding
        prompts = sum((1 + len({*view.sample.prompts, *others})) * prompt[view.size] for view in data.views)
    else:
        shared = {prompt for sample in data.samples for prompt in sample.prompts} | others | {""}
        prompts = len(shared) * max(prompt.values())
    return sum(latents[size] for size in data.sizes) + prompts


def autoencoder_peaks(module: EditModule, vae: nn.Module, sizes: Sequence[Size]) -> tuple[int, int]:
    """Return the peak memory, besides weights, of encoding the largest image and of decoding the largest target."""
    width, height = max((image for images, _ in sizes for image in images), key=math.prod)
    target = max((images[0] for images, _ in sizes), key=math.prod)
    latents = (1, module.geometry.channels(module.base.source.config()), *module.base.latent_size(*target))
    with FakeTensorMode(), PeakMemory() as memory, torch.no_grad():
        fake, dtype = fake_model(vae, module.base.dtype), module.base.dtype
        memory.restart()
        module.encode_pixels(fake, torch.empty(1, 3, height, width).to(dtype, memory_format=torch.channels_last))
        encode = memory.peak
        memory.restart()
        module.decode(fake, torch.empty(latents)).float()
        return encode, memory.peak
