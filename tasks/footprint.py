"""What a run will need, worked out without any weights: from the configuration, by a training step on fake tensors."""

import logging
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
from lightning_modules.estimation.activations import (
    FakeStep,
    Heaviest,
    bytes_per_parameter,
    empty_latents,
    heaviest_batch,
)
from lightning_modules.estimation.duration import sample_flops
from lightning_modules.estimation.fake_tensors import PeakMemory, fake_model
from lightning_modules.estimation.weights import loading_bytes, waiting_bytes, weight_bytes
from lightning_modules.execution.checkpointing import POLICIES
from lightning_modules.pretrained.repository import meta_component

log = logging.getLogger("retouch")


@dataclass
class Footprint:
    """Bytes, but for the first five.

    Attributes:
        flops: of a training step with one sample, the mean.
        precision: of the transformer's linear layers.
        parameters, trainable: how many the transformer has, and how many the adapter.
        batch: the heaviest.
        weights: of the transformer.
        waiting: of these, what is in the host's memory at any time.
        loading: the most that the host has in memory while the transformer is loaded to a GPU, or to the host itself.
        adapter: its weights and gradients.
        optimizer: its state.
        ema: the averages of its weights.
        activations: the most that a step has in memory beside these, by what `gradient_checkpointing` may be.
        encoders: the weights of the other components.
        encode, decode: the most that the autoencoder has in memory beside its weights.
        prompts: embeddings that are held in the host's memory while encoding.
        cache: all that is encoded.
        read_ahead: batches that wait in the host's memory.
        process: what this process has in memory now.
    """

    flops: float
    precision: str
    parameters: int
    trainable: int
    batch: Heaviest
    weights: int
    waiting: int
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
    read_ahead: int
    process: int


def measure(module: EditModule, data: PairsDataModule) -> Footprint:
    """The footprint of training `module` on `data`, which has been scanned."""
    base, adapter, optimizer = module.base, module.adapter, module.optimization.optimizer
    assert adapter is not None
    assert optimizer is not None
    assert module.objective is not None
    passes = module.objective.passes(0)
    # Of a transformer without its adapter yet.
    flops = sample_flops(module, module.base, module.step_flops, passes, module.execution.checkpointing, data.sizes)
    source, transformer = base.source, base.source.meta
    parameters = sum(p.numel() for p in transformer.parameters())
    weights, waiting = weight_bytes(source), waiting_bytes(source)
    while_loading = loading_bytes(source, on_host=False), loading_bytes(source, on_host=True)
    module.execution.adapt(transformer)
    parts = {name: meta_component(base.components.repository, name, base.revision) for name in base.encoder_names}
    models = {name: part for name, part in parts.items() if part is not None}
    encoders = {name: base.components.weight_bytes(name, part) for name, part in models.items()}
    vae = models["vae"]
    trained = [transformer]
    if adapter.trains_text_encoders:
        for name in models.keys() - {"vae"}:
            adapter.inject(models[name])
            trained.append(models[name])
    count = sum(p.numel() for part in trained for p in trainable(part).values())
    if adapter.trains_base:  # it is counted with the adapter, in float32
        weights = 0
    heaviest = heaviest_batch(module, base, data)
    current = module.execution.checkpointing
    policies = [policy for policy in dict.fromkeys([*POLICIES, current]) if policy != "auto"]
    one = {size: empty_latents(module, base, size, 1, heaviest.caption) for size in set(data.sizes)}
    batch = empty_latents(module, base, heaviest.size, heaviest.samples, heaviest.caption)
    step = FakeStep(module, adapter, base.dtype, module.execution.compile_blocks, transformer, batch, passes)
    activations = {}
    for policy in policies:
        log.info(f"simulating a step on fake tensors with gradient checkpointing {policy}")
        # Gradients are made in the step too, and counted with the adapter.
        activations[policy] = step.peak(policy) - count * 4
    with_std = module.flow.vae_encode_mode == "sample"
    sizes = {size: _latent_bytes(latents, with_std) for size, latents in one.items()}
    prompt = {size: sum(tensor.nbytes for tensor in latents.prompt.values()) for size, latents in one.items()}
    alone = module.condition_images.text_sees_them
    others = {prompt for prompt in data.preserve_prompts if prompt}
    shared = len({prompt for sample in data.samples for prompt in sample.prompts} | others | {""})
    each = sum((1 + len({*view.sample.prompts, *others})) * prompt[view.size] for view in data.views)
    prompts = each if alone else prompt[heaviest.size] * shared
    encode, decode = autoencoder_peaks(module, vae, data.sizes)
    return Footprint(
        flops=flops,
        precision=source.expected_precision,
        parameters=parameters,
        trainable=count,
        batch=heaviest,
        weights=weights,
        waiting=waiting,
        loading=while_loading,
        adapter=sum(tensor.nbytes for part in trained for tensor in adapter.tensors(part).values()) + count * 4,
        optimizer=round(count * bytes_per_parameter(optimizer)),
        ema=0 if module.optimization.ema is None else count * 4,
        activations=activations,
        encoders=encoders,
        encode=encode,
        decode=decode,
        # Those that no other sample shares are written at once, and few are kept.
        prompts=min(prompts, module.encoder.prompts.kept * max(prompt.values())) if alone else prompts,
        cache=sum(sizes[size] for size in data.sizes) + prompts,
        read_ahead=(2 * data.num_workers + 1)
        * heaviest.samples
        * (sizes[heaviest.size] + (3 if data.preserve_prompts else 2) * prompt[heaviest.size]),
        process=psutil.Process().memory_info().rss,
    )


def _latent_bytes(batch: LatentBatch, with_std: bool) -> int:
    """What a sample without its prompt takes in a shard."""
    stds = (batch.target_std, batch.rejected_std) if with_std else ()
    tensors = (batch.target_mean, batch.rejected_mean, *stds, batch.mask, *batch.controls)
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def autoencoder_peaks(module: EditModule, vae: nn.Module, sizes: Sequence[Size]) -> tuple[int, int]:
    """Beside its weights, what encoding the largest picture holds at most, and decoding the largest target."""
    log.info("encoding and decoding the largest picture in the same way")

    def largest(pictures: set[tuple[int, int]]) -> tuple[int, int]:
        return max(pictures, key=lambda size: size[0] * size[1])

    width, height = largest({image for images, _ in sizes for image in images})
    pixels = (1, 3, height, width)
    width, height = largest({images[0] for images, _ in sizes})
    channels = module.geometry.channels(module.base.source.config())
    latents = (1, channels, *module.base.latent_size(width, height))
    with FakeTensorMode(), PeakMemory() as memory, torch.no_grad():
        fake, dtype = fake_model(vae, module.base.dtype), module.base.dtype
        memory.restart()
        raw = torch.empty(pixels)
        module.encode_pixels(fake, raw.to(dtype, memory_format=torch.channels_last))
        encode = memory.peak
        memory.restart()
        module.decode(fake, torch.empty(latents)).float()
        return encode, memory.peak
