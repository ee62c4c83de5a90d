"""The memory and work of a run, estimated without weights: from its settings, and by a step on fake tensors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from datamodules.batch import LatentBatch
from datamodules.images.framing import Size
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
    """The estimate; in bytes where nothing else is said.

    Attributes:
        flops: FLOPs of a training step with one sample, the mean.
        parameters, trainable: parameter counts of the transformer and of the adapter.
        batch: the heaviest.
        weights: of the transformer.
        offloaded: part of these that is in host memory at any time.
        adapter: its weights and gradients.
        optimizer: its state.
        ema: the averages of its weights.
        activations: peak of a step besides these, by gradient checkpointing policy.
        encoders: weights of the other components.
        encode, decode: peak of the autoencoder besides its weights.
        cache: everything that is encoded.
        process: this process's memory now.
    """

    flops: float
    parameters: int
    trainable: int
    batch: Heaviest
    weights: int
    offloaded: int
    adapter: int
    optimizer: int
    ema: int
    activations: dict[str, int]
    encoders: dict[str, int]
    encode: int
    decode: int
    cache: int
    process: int


def measure(module: EditModule, data: PairsDataModule) -> Footprint:
    """Estimate the footprint of training `module` on `data`, which has been scanned."""
    base, adapter, optimizer = module.base, module.adapter, module.optimization.optimizer
    assert adapter is not None
    assert optimizer is not None
    assert module.objective is not None
    passes, checkpointing = module.objective.passes(0), module.execution.checkpointing
    source, transformer = base.source, base.source.meta
    # Before the adapter is injected. Weights that train count with the adapter, in float32.
    flops = sample_flops(module, base, module.step_flops, passes, checkpointing, data.sizes)
    parameters = sum(p.numel() for p in transformer.parameters())
    weights, offloaded = 0 if adapter.trains_base else weight_bytes(source), offloaded_bytes(source)
    module.execution.adapt(transformer)
    parts = {name: meta_component(base.components.repository, name, base.revision) for name in base.encoder_names}
    models = {name: part for name, part in parts.items() if part is not None}
    encoders = {name: base.components.weight_bytes(name, part) for name, part in models.items()}
    trained = [transformer]
    if adapter.trains_text_encoders:
        for name in models.keys() - {"vae"}:
            adapter.inject(models[name])
            trained.append(models[name])
    count = sum(p.numel() for part in trained for p in trainable(part).values())
    heaviest = heaviest_batch(module, base, data)
    batch = empty_latents(module, base, heaviest.size, heaviest.samples, heaviest.caption)
    step = FakeStep(module, adapter, base.dtype, module.execution.compile_blocks, transformer, batch, passes)
    policies = dict.fromkeys([*POLICIES, *([checkpointing] if checkpointing != "auto" else [])])
    encode, decode = autoencoder_peaks(module, models["vae"], data.sizes)
    return Footprint(
        flops=flops,
        parameters=parameters,
        trainable=count,
        batch=heaviest,
        weights=weights,
        offloaded=offloaded,
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


def weight_bytes(source: TransformerSource) -> int:
    """Return the bytes of a transformer's weights; an estimate for files that are quantized."""
    quantization = _applied(source)
    if quantization is not None:
        return quantization.nbytes(source.meta, source.dtype)
    return round(sum(parameter.numel() for parameter in source.meta.parameters()) * _bits(source) / 8)


def offloaded_bytes(source: TransformerSource) -> int:
    """Return the bytes of streamed blocks in host memory: all but two, which are in a buffer each."""
    bits, quantization = int(_bits(source)), _applied(source)  # the scales of 4-bit blocks are not streamed

    def nbytes(name: str, module: nn.Module) -> int:
        if not isinstance(module, nn.Linear):
            return 0
        plain = quantization is not None and not quantization.converts(name, module)
        return module.weight.numel() * (8 * source.dtype.itemsize if plain else bits) // 8

    streamed = streamed_blocks(source.meta, source.streamed).items()
    sizes = [sum(nbytes(f"{at}.{name}", part) for name, part in block.named_modules()) for at, block in streamed]
    return sum(sizes) - min(2, len(sizes)) * max(sizes, default=0)


def _applied(source: TransformerSource) -> Quantization | None:
    """Return the quantization of the settings; None without one, or for files that are quantized in another format."""
    quantization = source.quantization
    return quantization if quantization and quantization.format == source.expected_precision else None


def _bits(source: TransformerSource) -> float:
    """Return the bits of a weight of its linear layers."""
    row = FORMATS.get(source.expected_precision)
    return 8 * source.dtype.itemsize if row is None else row.bits


def _cache_bytes(module: EditModule, data: PairsDataModule, caption: str) -> int:
    """Return the bytes of all latents and prompt embeddings.

    Args:
        caption: the longest.
    """
    single = {size: empty_latents(module, module.base, size, 1, caption) for size in set(data.sizes)}
    prompt = {size: sum(tensor.nbytes for tensor in batch.prompt.values()) for size, batch in single.items()}
    latents = {size: _latent_bytes(batch, module.flow.vae_encode_mode == "sample") for size, batch in single.items()}
    others = {prompt for prompt in data.preserve_prompts if prompt}
    if module.condition_images.text_sees_them:  # no two samples share an embedding
        prompts = sum((1 + len({*view.sample.prompts, *others})) * prompt[view.size] for view in data.views)
    else:
        shared = {prompt for sample in data.samples for prompt in sample.prompts} | others | {""}
        prompts = len(shared) * max(prompt.values())
    return sum(latents[size] for size in data.sizes) + prompts


def _latent_bytes(batch: LatentBatch, with_std: bool) -> int:
    """Return the bytes of a sample in a shard, without its prompt."""
    stds = (batch.target_std, batch.rejected_std) if with_std else ()
    tensors = (batch.target_mean, batch.rejected_mean, *stds, batch.mask, *batch.controls)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


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
