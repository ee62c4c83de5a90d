"""The memory and work of a run, estimated without weights: from its settings, and by a step on fake tensors."""

import logging
from collections.abc import Iterable, Sequence
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
from lightning_modules.pretrained.weights import AHEAD
from lightning_modules.quantization.quantization import FORMATS

log = logging.getLogger("retouch")


@dataclass
class Footprint:
    """The estimate; in bytes where nothing else is said.

    Attributes:
        flops: FLOPs of a training step with one sample, the mean.
        parameters, trainable: parameter counts of the transformer and of the adapter.
        batch: the heaviest.
        weights: of the transformer.
        offloaded: part of these that is in host memory at any time.
        loading: peak host memory while the transformer is loaded to a GPU, and to host memory.
        adapter: its weights and gradients.
        optimizer: its state.
        ema: the averages of its weights.
        activations: peak of a step besides these, by gradient checkpointing policy.
        encoders: weights of the other components.
        encode, decode: peak of the autoencoder besides its weights.
        prompts: embeddings held in host memory while encoding.
        cache: everything that is encoded.
        process: this process's memory now.
    """

    flops: float
    parameters: int
    trainable: int
    batch: Heaviest
    weights: int
    offloaded: int
    loading: tuple[int, int]
    adapter: int
    optimizer: int
    ema: int
    activations: dict[str, int]
    encoders: dict[str, int]
    encode: int
    decode: int
    prompts: int
    cache: int
    process: int


def measure(module: EditModule, data: PairsDataModule) -> Footprint:
    """Estimate the footprint of training `module` on `data`, which has been scanned."""
    base, adapter, optimizer = module.base, module.adapter, module.optimization.optimizer
    assert adapter is not None
    assert optimizer is not None
    assert module.objective is not None
    passes, checkpointing = module.objective.passes(0), module.execution.checkpointing
    # All of these before the adapter is injected.
    flops = sample_flops(module, base, module.step_flops, passes, checkpointing, data.sizes)
    source, transformer = base.source, base.source.meta
    parameters = sum(p.numel() for p in transformer.parameters())
    weights = 0 if adapter.trains_base else weight_bytes(source)  # trained ones count with the adapter, in float32
    offloaded = offloaded_bytes(source)
    loading = loading_bytes(source, on_host=False), loading_bytes(source, on_host=True)
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
    activations = {}
    for policy in dict.fromkeys([*POLICIES, *([checkpointing] if checkpointing != "auto" else [])]):
        log.info(f"simulating a step on fake tensors with gradient checkpointing {policy}")
        activations[policy] = step.peak(policy) - count * 4  # gradients count with the adapter
    single = {size: empty_latents(module, base, size, 1, heaviest.caption) for size in set(data.sizes)}
    with_std = module.flow.vae_encode_mode == "sample"
    latents = {size: _latent_bytes(one, with_std) for size, one in single.items()}
    prompt = {size: sum(tensor.nbytes for tensor in one.prompt.values()) for size, one in single.items()}
    cached_prompts, prompts = _prompt_bytes(module, data, prompt)
    encode, decode = autoencoder_peaks(module, models["vae"], data.sizes)
    return Footprint(
        flops=flops,
        parameters=parameters,
        trainable=count,
        batch=heaviest,
        weights=weights,
        offloaded=offloaded,
        loading=loading,
        adapter=sum(tensor.nbytes for part in trained for tensor in adapter.tensors(part).values()) + count * 4,
        optimizer=round(count * bytes_per_parameter(optimizer)),
        ema=0 if module.optimization.ema is None else count * 4,
        activations=activations,
        encoders=encoders,
        encode=encode,
        decode=decode,
        prompts=prompts,
        cache=sum(latents[size] for size in data.sizes) + cached_prompts,
        process=psutil.Process().memory_info().rss,
    )


def weight_bytes(source: TransformerSource) -> int:
    """Return the bytes of a transformer's weights; an estimate for files that are quantized."""
    wanted = source.quantization
    if wanted is not None and wanted.format == source.expected_precision:
        return wanted.nbytes(source.meta, source.dtype)
    row = FORMATS.get(source.expected_precision)
    bits = 8 * source.dtype.itemsize if row is None else row.bits
    return round(sum(parameter.numel() for parameter in source.meta.parameters()) * bits / 8)


def offloaded_bytes(source: TransformerSource) -> int:
    """Return the bytes of streamed blocks in host memory: all but two, which are in a buffer each."""
    sizes = _streamed_bytes(source)
    return sum(sizes) - min(2, len(sizes)) * max(sizes, default=0)


def loading_bytes(source: TransformerSource, on_host: bool) -> int:
    """Return the peak host memory of loading a transformer.

    Args:
        on_host: whether it stays there; otherwise only its streamed blocks do.
    """
    kept = weight_bytes(source) if on_host else sum(_streamed_bytes(source))
    largest = max(parameter.numel() for parameter in source.meta.parameters()) * source.dtype.itemsize
    return loading_bound(kept, largest) + (0 if source.quantization is None else AHEAD * largest)


def loading_bound(kept: int, largest: int) -> int:
    """Return the most host memory that loading a model may take, by the bytes that stay and its largest tensor's."""
    return kept + kept // 10 + largest + 150_000_000


def _streamed_bytes(source: TransformerSource) -> list[int]:
    """Return the bytes that are streamed of each offloaded block: weights without the scales of blocks."""
    plain, quantization = 8 * source.dtype.itemsize, source.quantization
    row = FORMATS.get(source.expected_precision)
    stored = plain if row is None else int(row.bits)
    if quantization is not None and quantization.format != source.expected_precision:
        quantization = None

    def bits(name: str, linear: nn.Linear) -> int:
        return plain if quantization is not None and not quantization.converts(name, linear) else stored

    return [
        sum(
            part.weight.numel() * bits(f"{block}.{name}", part)
            for name, part in module.named_modules()
            if isinstance(part, nn.Linear)
        )
        // 8
        for block, module in streamed_blocks(source.meta, source.streamed).items()
    ]


def _latent_bytes(batch: LatentBatch, with_std: bool) -> int:
    """Return the bytes of a sample in a shard, without its prompt."""
    stds = (batch.target_std, batch.rejected_std) if with_std else ()
    tensors = (batch.target_mean, batch.rejected_mean, *stds, batch.mask, *batch.controls)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _prompt_bytes(module: EditModule, data: PairsDataModule, prompt: dict[Size, int]) -> tuple[int, int]:
    """Return the bytes of all prompt embeddings in the cache, and of those in host memory while encoding.

    Args:
        prompt: bytes of an embedding, by the size of its sample.
    """
    others = {prompt for prompt in data.preserve_prompts if prompt}
    if module.condition_images.text_sees_them:  # no two samples share an embedding: each is written at once
        cached = sum((1 + len({*view.sample.prompts, *others})) * prompt[view.size] for view in data.views)
        return cached, min(cached, module.encoder.prompts.kept * max(prompt.values()))
    shared = {prompt for sample in data.samples for prompt in sample.prompts} | others | {""}
    cached = len(shared) * max(prompt.values())
    return cached, cached


def autoencoder_peaks(module: EditModule, vae: nn.Module, sizes: Sequence[Size]) -> tuple[int, int]:
    """Return the peak memory, besides weights, of encoding the largest image and of decoding the largest target."""
    log.info("simulating the encoding and decoding of the largest images")

    def largest(images: Iterable[tuple[int, int]]) -> tuple[int, int]:
        return max(set(images), key=lambda size: size[0] * size[1])

    width, height = largest(image for images, _ in sizes for image in images)
    pixels = (1, 3, height, width)
    channels = module.geometry.channels(module.base.source.config())
    latents = (1, channels, *module.base.latent_size(*largest(images[0] for images, _ in sizes)))
    with FakeTensorMode(), PeakMemory() as memory, torch.no_grad():
        fake, dtype = fake_model(vae, module.base.dtype), module.base.dtype
        memory.restart()
        raw = torch.empty(pixels)
        module.encode_pixels(fake, raw.to(dtype, memory_format=torch.channels_last))
        encode = memory.peak
        memory.restart()
        module.decode(fake, torch.empty(latents)).float()
        return encode, memory.peak
