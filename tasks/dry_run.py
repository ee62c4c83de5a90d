"""task=dry_run: print the plan of a run: memory, disk and time, estimated without weights by a step on fake tensors."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import disk_usage
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

from callbacks.lora_checkpoint import LoRACheckpoint
from callbacks.progress import learning, panel
from callbacks.validation import Validation
from cli.resuming import find_start
from cli.terminal import log, silence_libraries
from datamodules.cached import CachedDataModule
from datamodules.images.resizing import Size, bucket_notes
from datamodules.pairs import PairsDataModule
from datamodules.sampler import SizeBatchSampler
from foundation.catalogue import catalogue
from foundation.errors import UserError, count_of
from lightning_modules.adapters.adapter import trainable
from lightning_modules.blocks import streamed_blocks
from lightning_modules.edit_module import EditModule
from lightning_modules.estimation.flops import duration, empty_latents, matrix_peak, sample_flops
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
from lightning_modules.quantization.quantization import QUANTIZATIONS, Quantization
from runs.run_folder import RunFolder
from tasks.fit import check_samples, run_settings
from tasks.models import without_network

# FLOP/s of bf16 products: NVIDIA's figure, and the one measured in docs/speed.md.
CARDS = {"RTX 4090": 165e12, "H100": 800e12}


@dataclass
class Footprint:
    """Estimate of a run, in bytes where nothing else is said; parts of memory are by name."""

    transformer: nn.Module  # with its adapter, without content
    flops: float  # FLOPs of a training step with one sample, the mean
    parameters: int  # count, of the transformer
    trainable: int  # count, of the adapter
    batch: Heaviest
    trained: dict[str, int]  # weights on the GPU, the adapter with its gradients, the optimizer's state, EMA
    offloaded: int  # weights in host memory at any time
    activations: dict[str, int]  # peak of a step besides these, by gradient checkpointing policy
    encoders: dict[str, int]  # weights of the other components
    kept: list[str]  # names of those that are needed while the transformer trains
    encode: int  # peak of the autoencoder besides its weights
    decode: int | None  # the same; None without sample images
    cache: int | None  # all encoded samples; None if they are encoded in every step


def dry_run(cfg: DictConfig, output_dir: Path) -> None:
    """Print the memory, disk and time of the run of train.py's config, or its mistakes, without reading weights."""
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        raise UserError("task=dry_run plans one run: leave -m and the lists out")
    silence_libraries()
    find_start(cfg, RunFolder(output_dir), run_settings(cfg))
    data = instantiate(cfg.data, _convert_="all")
    if isinstance(data, CachedDataModule) and data.shards is not None:
        raise UserError("task=dry_run plans for images: set data.root, not data.shards")
    log.info(f"1 of 4: finding the images of {', '.join(map(str, data.roots))}")
    data.sample_set.scan()  # its errors come before requests to the hub
    log.info(f"2 of 4: building {cfg.model.pretrained_model_name_or_path}")
    module = without_network(cfg.model)
    callbacks = [instantiate(callback) for callback in cfg.callbacks.values() if callback is not None]
    check_samples(module, data)
    log.info("3 of 4: reading the sizes of the images")
    data.scan()
    module.objective.check_sizes(data.drawn_sizes)
    module.execution.check_data(data)
    run: Any = SimpleNamespace(datamodule=data, callbacks=callbacks)
    for validation in [callback for callback in callbacks if isinstance(callback, Validation)]:
        validation.setup(run, module, "fit")
    log.info("4 of 4: estimating the memory and time of a step")
    plan = measure(module, data, samples=cfg.callbacks.get("sample_images") is not None)
    limits, split, epoch = plan.batch.limits, data.training, sum(data.training.repeats)
    data.notes += bucket_notes(split.sizes, split.repeats, limits, split.noun)
    batches = SizeBatchSampler(split.sizes, limits, data.seed, repeats=split.repeats).batches_per_epoch()
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
        **_memory(plan, module),
    }
    saves = [one for one in callbacks if isinstance(one, LoRACheckpoint)]
    for name, size in saves[0].disk_bytes(module, plan.trainable, cfg.trainer.max_steps).items() if saves else ():
        shown["disk"] += f"; {name} {decimal(size)}"
    free = disk_usage(next(one for one in output_dir.absolute().parents if one.is_dir())).free
    shown["disk"] += f"{base_on_disk(module.base, plan.encoders)}; {decimal(free)} free"
    if (known := catalogue().get(cfg.model_name)) and known.base == module.base.name:
        shown["licence"] = f"{known.plain_licence}{f'; download about {known.download} GB' if known.download else ''}"
    Console(stderr=True).print(panel("Retouch, dry run", shown, data.notes))


def phases_of(plan: Footprint, module: EditModule) -> dict[str, dict[str, int]]:
    """Return the phases of a run, each with the parts that the GPU holds at its peak."""
    components, offloads = module.base.components, module.base.offloads_encoders
    on_gpu = {part: size for part, size in plan.encoders.items() if components.place(part) != torch.device("cpu")}
    texts = {part: size for part, size in on_gpu.items() if part != "vae"}
    vae = {"vae": on_gpu["vae"]} if "vae" in on_gpu else {}
    kept = {} if offloads else {part: size for part, size in on_gpu.items() if part in plan.kept}
    # The policy auto starts from the one that needs the least memory.
    policy = "full" if module.execution.checkpointing == "auto" else module.execution.checkpointing
    phases = {"training": {**plan.trained, "activations": plan.activations[policy], **kept}}
    encoding = {**vae, "its activations": plan.encode} if vae else {}
    if plan.cache is not None and module.condition_images.text_sees_them:
        phases["encoding"] = texts | encoding
    elif plan.cache is not None or offloads:  # prompts come first; their encoders are then released
        loaded = plan.trained if plan.cache is None else {}
        phases |= {"encoding prompts": loaded | texts, "encoding images": loaded | encoding}
    if plan.decode is not None:
        chosen = module.sampler.sampling is not None and module.sampler.sampling.transformer_name_or_path is not None
        other = {"other transformer": plan.trained["weights"]} if chosen else {}
        phases["sampling"] = plan.trained | kept | other | ({**vae, "its activations": plan.decode} if vae else {})
    return {name: parts for name, parts in phases.items() if parts}


def _memory(plan: Footprint, module: EditModule) -> dict[str, str]:
    phases = phases_of(plan, module)
    peak = max(sum(parts.values()) for parts in phases.values())
    place, offloads = module.base.components.place, module.base.offloads_encoders
    on_host = [part for part in plan.encoders if place(part) == torch.device("cpu") or (offloads and part in plan.kept)]
    host = {"this process": psutil.Process().memory_info().rss} | {part: plan.encoders[part] for part in on_host}
    host |= {"blocks": plan.offloaded} if plan.offloaded else {}
    listed = ", ".join(f"{policy} {decimal(size)}" for policy, size in plan.activations.items())
    auto = module.execution.checkpointing == "auto"
    more = "; gradient_checkpointing=auto uses more if available" if auto else ""
    return {
        **{f"GPU, {name}": _sum(parts) for name, parts in phases.items()},
        "activations": f"by gradient checkpointing: {listed}",
        "host": _sum(host),
        "disk": "no cache" if plan.cache is None else f"cache {decimal(plan.cache)}",
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
    """Return the work of steps of so many samples, and on this machine's GPU its estimated time."""
    work = steps * samples * flops
    amount = f"{work / 1e15:,.0f}" if work > 1e16 else f"{work / 1e15:.2g}"
    usual = " or ".join(f"{duration(work, peak)} on an {card}" for card, peak in CARDS.items())
    known = f"about {usual}; {amount} PFLOP, docs/speed.md lists measured times"
    if torch.cuda.is_available():
        known = f"about {duration(work, matrix_peak(torch.device('cuda')))} on this {torch.cuda.get_device_name(0)}"
    return f"{steps:,} steps of {samples:.3g} sample{'' if samples == 1 else 's'}: {known}"


def _sum(parts: dict[str, int]) -> str:
    """Write `a 1 GB + b 2 GB = 3 GB`."""
    listed = " + ".join(f"{name} {decimal(size)}" for name, size in parts.items())
    return f"{listed} = {decimal(sum(parts.values()))}"


def _against_this_machine(peak: int) -> str:
    if not torch.cuda.is_available():
        return ""
    memory = torch.cuda.get_device_properties(0).total_memory
    verdict = "fits" if peak + 1e9 < memory else "does not fit: see docs/training.md, Less memory"
    return f". This machine's {torch.cuda.get_device_name(0)} has {decimal(memory)}: {verdict}"


def measure(module: EditModule, data: PairsDataModule, samples: bool) -> Footprint:
    """Estimate the footprint of training `module` on `data`, which has been scanned; whether it `samples` images."""
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
    encode, decode = autoencoder_peaks(module, models["vae"], data.training.sizes)
    offloaded, assistant = offloaded_bytes(base.source), module.execution.training_adapter
    # Weights that train count with the adapter, and so do gradients.
    weights = 0 if adapter.trains_base else weight_bytes(base.source) - offloaded
    trained_bytes = {
        "weights": weights,
        **({} if assistant is None else {"training adapter": assistant.memory(base)}),
        "adapter": sum(tensor.nbytes for part in trained for tensor in adapter.tensors(part).values()) + count * 4,
        "optimizer": round(count * bytes_per_parameter(optimizer)),
        **({} if module.optimization.ema is None else {"EMA": count * 4}),
    }
    return Footprint(
        transformer=step.transformer,
        flops=sample_flops(module.execution, passes, checkpointing, data.training.sizes),
        parameters=sum(p.numel() for p in base.source.meta.parameters()),
        trainable=count,
        batch=heaviest,
        trained=trained_bytes,
        offloaded=offloaded,
        activations={policy: step.peak(policy) - count * 4 for policy in policies},
        encoders=encoders,
        kept=[name for name in encoders if data.needs_encoders or (samples and name == "vae")],
        encode=encode,
        decode=decode if samples else None,
        cache=None if data.needs_encoders else _cache_bytes(module, data, heaviest.caption),
    )


def expected_quantization(source: TransformerSource) -> Quantization | None:
    """Return the quantization of a transformer; of files in another format than the settings, that of all layers."""
    format, own = source.expected_precision, source.quantization
    if own is not None and own.format == format:
        return own
    return Quantization(format, (), ["transformer"], False) if format in QUANTIZATIONS else None


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
        bits = int(QUANTIZATIONS[quantization.format].bits) if quantization and converted else 8 * source.dtype.itemsize
        return layer.weight.numel() * bits // 8  # the scales of 4-bit blocks are not streamed

    streamed = streamed_blocks(source.meta, source.streamed).items()
    sizes = [sum(nbytes(f"{at}.{name}", part) for name, part in block.named_modules()) for at, block in streamed]
    return sum(sizes) - min(2, len(sizes)) * max(sizes, default=0)


def _cache_bytes(module: EditModule, data: PairsDataModule, caption: str) -> int:
    """Return the bytes of all latents and prompt embeddings; `caption` is the longest."""
    latents, prompt = {}, {}
    for size in set(data.training.sizes):
        batch = empty_latents(module, module.base, size, 1, caption)
        stds = (batch.target_std, batch.rejected_std) if module.flow.vae_encode_mode == "sample" else ()
        stored = (batch.target_mean, batch.rejected_mean, *stds, batch.mask, *batch.controls)
        latents[size] = sum(tensor.nbytes for tensor in stored if tensor is not None)
        prompt[size] = sum(tensor.nbytes for tensor in batch.prompt.values())
    others = {prompt for prompt in data.preserve_prompts if prompt}
    if module.condition_images.text_sees_them:  # no two samples share an embedding
        prompts = sum((1 + len({*view.sample.prompts, *others})) * prompt[view.size] for view in data.training.views)
    else:
        shared = {*data.training.captions, *others, ""}
        prompts = len(shared) * max(prompt.values())
    return sum(latents[size] for size in data.training.sizes) + prompts


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
