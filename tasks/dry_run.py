"""task=dry_run: print the plan of a run: memory, disk and time, estimated without weights by a step on fake tensors."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig
from rich.console import Console
from rich.filesize import decimal
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from callbacks.progress import learning, panel
from callbacks.validation import Validation
from cli.resuming import find_start
from cli.terminal import log, silence_libraries
from datamodules.cached import CachedDataModule
from datamodules.images.resizing import Size, bucket_notes
from datamodules.pairs import PairsDataModule
from datamodules.sampler import SizeBatchSampler
from foundation.errors import UserError, count_of
from lightning_modules.adapters.adapter import trainable
from lightning_modules.blocks import streamed_blocks
from lightning_modules.edit_module import EditModule
from lightning_modules.estimation.flops import CARDS, duration, empty_latents, matrix_peak, sample_flops
from lightning_modules.estimation.memory import (
    FakeStep,
    Heaviest,
    PeakMemory,
    bytes_per_parameter,
    fake_model,
    heaviest_batch,
)
from lightning_modules.execution.checkpointing import POLICIES
from lightning_modules.pretrained.frozen_base import FrozenBase
from lightning_modules.pretrained.repository import component_origin, meta_component, stored_bytes
from lightning_modules.pretrained.transformer import TransformerSource
from lightning_modules.quantization.quantization import FORMATS, Quantization
from runs.run_folder import RunFolder
from tasks.fit import check_samples, run_settings
from tasks.models import without_network


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


def dry_run(cfg: DictConfig, output_dir: Path) -> None:
    """Print the memory, disk and time of the run of train.py's config, or its mistakes, without reading weights."""
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        raise UserError("task=dry_run plans one run: leave -m and the lists out")
    silence_libraries()
    find_start(cfg, RunFolder(output_dir), run_settings(cfg))
    data = instantiate(cfg.data, _convert_="all")
    caches = isinstance(data, CachedDataModule)
    if isinstance(data, CachedDataModule) and data.shards is not None:
        raise UserError("task=dry_run plans for images: set data.root, not data.shards")
    data.sample_set.scan()  # its errors come before requests to the hub
    module = without_network(cfg.model)
    callbacks = [instantiate(callback) for callback in cfg.callbacks.values() if callback is not None]
    check_samples(module, data)
    log.info(f"reading the sizes of {', '.join(map(str, data.roots))}")
    data.scan()
    module.objective.check_sizes(data.drawn_sizes)
    module.execution.check_data(data)
    run: Any = SimpleNamespace(datamodule=data, callbacks=callbacks)
    for validation in [callback for callback in callbacks if isinstance(callback, Validation)]:
        validation.setup(run, module, "fit")
    log.info(f"estimating the memory of {module.base.name}, which may take a minute or two")
    plan = measure(module, data)
    limits, epoch = plan.batch.limits, sum(data.repeats)
    data.notes += bucket_notes(data.sizes, data.repeats, limits, data.noun)
    batches = SizeBatchSampler(data.sizes, limits, data.seed, repeats=data.repeats).batches_per_epoch()
    samples = cfg.callbacks.get("sample_images") is not None
    other = plan.weights - plan.offloaded if cfg.model.sampling.transformer_name_or_path is not None else 0
    images = plan.batch.size[0]
    sizes = " + ".join(f"{width}x{height}" for width, height in images)
    shown = {
        "model": f"{module.base.title} ({module.base.source.expected_precision}), {plan.parameters:,} parameters",
        "trains": f"{module.adapter}: {plan.trainable:,} parameters ({plan.trainable / plan.parameters:.2%})",
        "on": data.describe(),
        "an epoch": f"{batches:,.0f} batches of {count_of(len(limits), 'sizes')}",
        **learning(module, plan.transformer, [images[0]]),
        "time": _time(plan.flops, cfg.trainer.max_steps, cfg.trainer.accumulate_grad_batches * epoch / batches),
        "heaviest batch": f"{plan.batch.samples} of {sizes}, {plan.batch.tokens:,} tokens",
        **_memory(plan, module, caches, samples, other),
    }
    shown["disk"] += base_on_disk(module.base, plan.encoders)
    Console(stderr=True).print(panel("Retouch, dry run", shown, data.notes))


def _memory(plan: Footprint, module: EditModule, caches: bool, samples: bool, other: int) -> dict[str, str]:
    """Return the rows about memory and disk. Components that settings place on the CPU count as host memory.

    Args:
        caches: whether the data is encoded once, before training.
        samples: whether sample images are generated, for which the autoencoder stays loaded.
        other: bytes of another transformer that generates them.
    """
    places = {part: module.base.components.place(part) for part in plan.encoders}
    on_host = {part for part, place in places.items() if place is not None and place.type == "cpu"}
    encoders = {part: size for part, size in plan.encoders.items() if part not in on_host}
    texts = {part: size for part, size in encoders.items() if part != "vae"}
    vae = encoders.get("vae", 0)
    assistant = module.execution.training_adapter
    trained = {
        "weights": plan.weights - plan.offloaded + (0 if assistant is None else assistant.memory(module.base)),
        "adapter": plan.adapter,
        "optimizer": plan.optimizer,
        **({"EMA": plan.ema} if plan.ema else {}),
    }
    # auto: the least memory that it can choose.
    chosen = "full" if module.execution.checkpointing == "auto" else module.execution.checkpointing
    more = "; gradient_checkpointing=auto uses more if available" if chosen != module.execution.checkpointing else ""
    present = encoders if not caches else {"vae": vae} if samples and vae else {}  # besides the transformer
    offloads = module.base.offloads_encoders
    training = trained | {"activations": plan.activations[chosen]} | ({} if offloads else present)
    encoding = texts | ({"vae": vae, "its activations": plan.encode} if vae else {})
    # Shared prompts come first; their encoders are released before the autoencoder is loaded.
    apart = max(sum(texts.values()), vae + plan.encode)
    encoding_peak = sum(encoding.values()) if module.condition_images.text_sees_them or not caches else apart
    base = sum(trained.values())
    sampling = base + vae + plan.decode + (other if samples else 0)
    peaks = [sum(training.values()), *([encoding_peak] if caches else []), *([sampling] if samples else [])]
    peak = max([*peaks, *([base + apart] if offloads and not caches else [])])
    host = {"this process": plan.process}
    host |= {part: plan.encoders[part] for part in sorted(on_host)} | (present if offloads else {})
    host |= {"blocks": plan.offloaded} if plan.offloaded else {}
    listed = ", ".join(f"{policy} {decimal(size)}" for policy, size in plan.activations.items())
    return {
        "GPU, training": _sum(training),
        "": f"activations by gradient checkpointing: {listed}",
        "GPU, encoding": _sum(encoding, encoding_peak) if caches else "in every step, as above",
        "GPU, sampling": f"{decimal(sampling)} while an image is decoded" if samples else "no sample images",
        "host": _sum(host),
        "disk": f"cache {decimal(plan.cache)}" if caches else "no cache",
        "GPU in all": f"{decimal(peak)}, and about 1 GB for CUDA itself{more}{_against_this_machine(peak)}",
    }


def base_on_disk(base: FrozenBase, encoders: Iterable[str]) -> str:
    """Write the size of the base's files, and how much of it is to be downloaded; nothing if that is unknown."""
    own, single = base.components.repository, base.components.files
    origins = [component_origin(own, name, base.revision) for name in encoders if name not in single]
    places = [(base.name if place == own else place, revision, folder) for place, revision, folder in origins]
    if base.source.file is None:
        places.append((base.transformer_name, base.revision, base.source.config()["_subfolder"] or ""))
    if None in (sizes := [stored_bytes(*place) for place in places]):
        return ""
    total, missing = (sum(one) for one in zip(*filter(None, sizes), strict=True))
    return f"; base {decimal(total)}" + (f", of which {decimal(missing)} is to be downloaded" if missing else "")


def _time(flops: float, steps: int, samples: float) -> str:
    """Return how long steps of so many samples take by arithmetic, on known cards or on this machine's."""
    cards = dict(CARDS)
    if torch.cuda.is_available():
        cards = {f"this {torch.cuda.get_device_name(0)}": matrix_peak(torch.device("cuda"))}
    took = [f"{duration(steps * samples * flops, peak)} on {card}" for card, peak in cards.items()]
    return (
        f"{steps:,} steps of {samples:.3g} sample{'' if samples == 1 else 's'}: by arithmetic about {', '.join(took)}"
    )


def _sum(parts: dict[str, int], total: int | None = None) -> str:
    """Write `a 1 GB + b 2 GB = 3 GB`; with another total if not all parts are in memory at once."""
    listed = " + ".join(f"{name} {decimal(size)}" for name, size in parts.items())
    all_parts = sum(parts.values())
    if total is None or total == all_parts:
        return f"{listed} = {decimal(all_parts)}"
    return f"{listed}, at most {decimal(total)} at once"


def _against_this_machine(peak: int) -> str:
    if not torch.cuda.is_available():
        return ""
    memory = torch.cuda.get_device_properties(0).total_memory
    verdict = "fits" if peak + 1e9 < memory else "does not fit: see docs/training.md, Less memory"
    return f". This machine's {torch.cuda.get_device_name(0)} has {decimal(memory)}: {verdict}"


def measure(module: EditModule, data: PairsDataModule) -> Footprint:
    """Estimate the footprint of training `module` on `data`, which has been scanned."""
    base, adapter, optimizer = module.base, module.adapter, module.optimization.optimizer
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
        bits = int(FORMATS[quantization.format].bits) if quantization and converted else 8 * source.dtype.itemsize
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
        pixels = torch.empty(1, 4 if module.condition_images.alpha else 3, height, width)
        module.encode_pixels(fake, pixels.to(dtype, memory_format=torch.channels_last))
        encode = memory.peak
        memory.restart()
        module.decode(fake, torch.empty(latents)).float()
        return encode, memory.peak
