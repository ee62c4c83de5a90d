"""What a run will need, worked out without any weights: from the configuration, by a training step on fake tensors."""

import json
import logging
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import torch
from rich.filesize import decimal
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_iter

from datamodules.batch import LatentBatch
from datamodules.pairs import PairsDataModule, Size
from datamodules.sampler import samples_per_batch
from lightning_modules import flow
from lightning_modules.adapters.adapter import trainable
from lightning_modules.adapters.lora import LoRA, trial_step
from lightning_modules.edit_module import EditModule
from lightning_modules.estimation.fake_tensors import PeakMemory, as_on_cuda, fake_like, fake_model
from lightning_modules.execution.checkpointing import POSITIONS, set_checkpointing
from lightning_modules.pretrained import repository as loading
from lightning_modules.pretrained.repository import meta_component

log = logging.getLogger("retouch")

CONFIGURATIONS = Path(__file__).parent.parent / "assets" / "configurations"


@dataclass
class Footprint:
    """Bytes, but for the first four.

    Attributes:
        precision: of the transformer's linear layers.
        parameters, trainable: how many the transformer has, and how many the adapter.
        batch: samples, size and tokens of the heaviest batch.
        weights: of the transformer.
        waiting: of these, what is in the host's memory at any time.
        loading: the most that the host has in memory while the transformer is loaded to a GPU, or to the host itself.
        adapter: its weights and gradients.
        optimizer: its state.
        activations: the most that a step has in memory beside these, by what `gradient_checkpointing` may be.
        encoders: the weights of the other components.
        encode, decode: the most that the autoencoder has in memory beside its weights.
        prompts: embeddings that are held in the host's memory while encoding.
        cache: all that is encoded.
        read_ahead: batches that wait in the host's memory.
        process: what this process has in memory now.
    """

    precision: str
    parameters: int
    trainable: int
    batch: tuple[int, Size, int]
    weights: int
    waiting: int
    loading: tuple[int, int]
    adapter: int
    optimizer: int
    activations: dict[str, int]
    encoders: dict[str, int]
    encode: int
    decode: int
    prompts: int
    cache: int
    read_ahead: int
    process: int


@contextmanager
def local_configuration(name: str) -> Iterator[None]:
    """Inside, a model that is known here is read from its configuration, without network."""
    file = CONFIGURATIONS / f"{name.replace('/', '--')}.json"
    if Path(name).is_dir() or not file.is_file():
        yield
        return
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(loading.STAND_INS, {name: folder}):
        write_files(json.loads(file.read_text(encoding="utf-8"))["files"], Path(folder))
        yield


def write_files(files: Mapping[str, Any], folder: Path) -> None:
    """A configuration's JSON files in a repository's layout."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content), encoding="utf-8")


def measure(module: EditModule, data: PairsDataModule) -> Footprint:
    """The footprint of training `module` on `data`, which has been scanned."""
    assert module.adapter is not None
    assert module.optimizer is not None
    transformer = module.meta_transformer()
    parameters = sum(p.numel() for p in transformer.parameters())
    source = module.source
    weights, waiting = source.nbytes(), source.waiting_bytes()
    while_loading = source.loading_bytes(on_host=False), source.loading_bytes(on_host=True)
    module.adapt(transformer)
    texts: list[Any] = []
    if module.adapter.trains_text_encoders:
        parts = (meta_component(module.components.repository, name, module.revision) for name in module.text_components)
        texts = [part for part in parts if part is not None]
        for part in texts:
            module.adapter.inject(part)
    trained = [transformer, *texts]
    count = sum(p.numel() for part in trained for p in trainable(part).values())
    if not isinstance(module.adapter, LoRA):  # all of it is counted below, in float32
        weights = 0
    heaviest, caption = heaviest_batch(module, data)
    samples, size, _ = heaviest
    positions = [one for one in dict.fromkeys([*POSITIONS, module.gradient_checkpointing]) if one != "auto"]
    one = {size: latents(module, size, 1, caption) for size in set(data.sizes)}
    step = FakeStep(module, transformer, latents(module, size, samples, caption))
    sizes = {size: _latent_bytes(batch, module.vae_encode_mode == "sample") for size, batch in one.items()}
    prompt = {size: sum(tensor.nbytes for tensor in batch.prompt.values()) for size, batch in one.items()}
    alone = module.condition_images.text_sees_them
    shared = len({sample.prompt for sample in data.samples} | {""})
    prompts = sum(2 * prompt[size] for size in data.sizes) if alone else prompt[size] * shared
    vae, encoders = None, {}
    for name in (*module.text_components, "vae"):
        part = meta_component(module.components.repository, name, module.revision)
        if part is not None:
            encoders[name] = module.components.weight_bytes(name, part)
            vae = part if name == "vae" else vae
    assert vae is not None
    encode, decode = autoencoder_peaks(module, vae, data.sizes)
    return Footprint(
        precision=module.source.expected_precision,
        parameters=parameters,
        trainable=count,
        batch=heaviest,
        weights=weights,
        waiting=waiting,
        loading=while_loading,
        adapter=sum(tensor.nbytes for part in trained for tensor in module.adapter.tensors(part).values()) + count * 4,
        optimizer=round(count * bytes_per_parameter(module.optimizer)),
        # Gradients are made in the step too, and counted with the adapter.
        activations={position: step.peak(position) - count * 4 for position in positions},
        encoders=encoders,
        encode=encode,
        decode=decode,
        # Those that no other sample shares are written at once, and few are kept.
        prompts=min(prompts, module.prompts.kept * max(prompt.values())) if alone else prompts,
        cache=sum(sizes[size] for size in data.sizes) + prompts,
        read_ahead=(2 * data.num_workers + 1) * samples * (sizes[size] + 2 * prompt[size]),
        process=psutil.Process().memory_info().rss,
    )


def heaviest_batch(module: EditModule, data: PairsDataModule) -> tuple[tuple[int, Size, int], str]:
    """Samples, size and tokens of the batch with the most tokens; and the longest caption."""
    caption = max((sample.prompt for sample in data.samples), key=len, default="")
    tokens = {size: module.token_count(latents(module, size, 1, caption)) for size in set(data.sizes)}
    limits = {size: samples_per_batch(data.batch_size, data.max_tokens_per_batch, n) for size, n in tokens.items()}
    heaviest = max(tokens, key=lambda size: limits[size] * tokens[size])
    return (limits[heaviest], heaviest, limits[heaviest] * tokens[heaviest]), caption


def latents(module: EditModule, size: Size, samples: int, caption: str) -> LatentBatch:
    """A batch without content, on the meta device."""
    (target, *controls), masked = size
    channels = module.meta_transformer().config.in_channels // 4

    def empty(image: tuple[int, int]) -> Tensor:
        return torch.empty(samples, channels, *module.latent_size(*image), dtype=module.base_dtype, device="meta")

    prompt = {
        name: torch.empty(samples, *shape, dtype=module.base_dtype, device="meta")
        for name, shape in module.prompt_shapes(caption, controls).items()
    }
    mask = torch.empty(samples, 1, target[1], target[0], dtype=torch.uint8, device="meta") if masked else None
    return LatentBatch(
        [""] * samples, [0] * samples, empty(target), empty(target), [empty(one) for one in controls], prompt, {}, mask
    )


def _latent_bytes(batch: LatentBatch, with_std: bool) -> int:
    """What a sample without its prompt takes in a shard."""
    std = batch.target_std if with_std else None
    return sum(tensor.nbytes for tensor in (batch.target_mean, std, batch.mask, *batch.controls) if tensor is not None)


def bytes_per_parameter(optimizer: Callable[..., torch.optim.Optimizer]) -> float:
    """The optimizer's state, by taking a step with it on a small matrix."""
    made, parameter = trial_step(optimizer, 256, 256)
    state = [tensor for tensor in tree_iter(made.state) if isinstance(tensor, Tensor)]
    return sum(tensor.nbytes for tensor in state if tensor.numel() > 1) / parameter.numel()


class FakeStep:
    """Forward and backward of a batch on tensors without content.

    Args:
        transformer: the module's on the meta device, with its adapter; its tensors are replaced.
        batch: without content.
    """

    def __init__(self, module: EditModule, transformer: nn.Module, batch: LatentBatch) -> None:
        self.module = module
        self._mode, self._memory = FakeTensorMode(), PeakMemory()
        with self._mode, self._memory:
            self.transformer = fake_model(transformer, module.base_dtype).train()
            self._x_t, self._eps, *self._controls = (
                fake_like(latent).float() for latent in (batch.target_mean, batch.target_mean, *batch.controls)
            )
            self._prompt = {name: fake_like(tensor) for name, tensor in batch.prompt.items()}
            self._mask = None if batch.mask is None else fake_like(batch.mask).float()
            self._t = torch.empty(len(self._x_t))

    def peak(self, position: str) -> int:
        """The most bytes beside weights that it holds with this `gradient_checkpointing`."""
        log.info(f"taking a step on tensors without content, with gradient checkpointing {position}")
        module = self.module
        assert module.adapter is not None
        dtype = module.base_dtype
        # What is compiled keeps by itself what `selective` does.
        kept = "selective" if position == "none" and module.compiles else position
        set_checkpointing(self.transformer, kept, module.adapter.as_now)
        with self._mode, self._memory, module.with_transformer(self.transformer), as_on_cuda(dtype):
            for gate in module.adapter.rank_gates():
                gate.mask = torch.ones(len(self._x_t), gate.rows, dtype=torch.bool)
            self._memory.restart()
            with torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext():
                velocity = module.velocity(self._x_t, self._t, self._controls, self._prompt)
                flow.flow_loss(velocity, self._eps, self._mask).mean().backward()
            del velocity
            self.transformer.zero_grad(set_to_none=True)
        return self._memory.peak


def choose_checkpointing(module: EditModule, data: Any) -> str:
    """The least recomputation that fits in the memory that is free, once all weights are there.

    A tenth stays free: what kernels take for themselves is not known.
    """
    assert module.adapter is not None
    assert module.optimizer is not None
    if not isinstance(data, PairsDataModule):
        log.info("model.gradient_checkpointing=auto is full: the sizes of what is streamed are not known")
        return "full"
    here = torch.tensor(float(free_memory(module.main_device)), device=module.main_device)
    free = int(0.9 * module.trainer.strategy.reduce(here, reduce_op="min"))
    count = sum(parameter.numel() for parameter in module.trained_parameters().values())
    state = round(count * bytes_per_parameter(module.optimizer))
    (samples, size, _), caption = heaviest_batch(module, data)
    step = FakeStep(module, module.meta_as_it_trains(), latents(module, size, samples, caption))
    needed = {}
    for position in POSITIONS:
        needed[position] = state + step.peak(position)
        if needed[position] <= free:
            break
    log.info(f"model.gradient_checkpointing=auto is {position}: {decimal(needed[position])} of {decimal(free)} free")
    return position


def free_memory(device: torch.device) -> int:
    """Bytes that tensors can still take."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def autoencoder_peaks(module: EditModule, vae: nn.Module, sizes: list[Size]) -> tuple[int, int]:
    """Beside its weights, what encoding the largest picture holds at most, and decoding the largest target."""
    log.info("encoding and decoding the largest picture in the same way")

    def largest(pictures: set[tuple[int, int]]) -> tuple[int, int]:
        return max(pictures, key=lambda size: size[0] * size[1])

    width, height = largest({image for images, _ in sizes for image in images})
    pixels = (1, 3, height, width)
    width, height = largest({images[0] for images, _ in sizes})
    latents = (1, module.meta_transformer().config.in_channels // 4, *module.latent_size(width, height))
    with FakeTensorMode(), PeakMemory() as memory, torch.no_grad():
        module.components.hold("vae", fake_model(vae, module.base_dtype))
        peaks = []
        for run, shape in ((module.encode_pixels, pixels), (module.decode, latents)):
            memory.restart()
            run(torch.empty(shape))
            peaks.append(memory.peak)
    module.components.release("vae")
    return peaks[0], peaks[1]
