"""The frozen parts of a pipeline beside its transformer: loaded when first used, timed, and let go."""

import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import psutil
import torch
from torch import Tensor, nn

from datamodules.batch import ON_HOST, copy_to, stack_padded
from datamodules.errors import UserError, listing
from datamodules.images.conditions import PromptRequest
from lightning_modules.execution.host_memory import Resting
from lightning_modules.pretrained.repository import WITHOUT_WEIGHTS, load_component, read_index, resolve_repository
from lightning_modules.quantization.quantization import Quantization

log = logging.getLogger("retouch")

SECONDS_BETWEEN_LINES = 10
# The stage of what a run does beside its steps: sample pictures and savings. Speeds leave it out.
ASIDE = "aside"


class Stopwatch:
    """Seconds by stage; a stage within another is not counted twice.

    `synchronize`, where set, is a CUDA device to wait for at the borders of a stage.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.synchronize: torch.device | None = None
        self._inner = 0.0

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside, less those of stages within, to `seconds[name]`."""
        start, outer, self._inner = self._now(), self._inner, 0.0
        yield
        elapsed = self._now() - start
        inner = 0.0 if name == ASIDE else self._inner  # what is aside is so with all that it takes
        self.seconds[name] = self.seconds.get(name, 0.0) + elapsed - inner
        self._inner = outer + elapsed

    def _now(self) -> float:
        if self.synchronize is not None and self.synchronize.type == "cuda":
            torch.cuda.synchronize(self.synchronize)
        return time.perf_counter()


class Components:
    """Components of one repository by name, each loaded on first use.

    Args:
        repository_name: folder or hub id in diffusers' layout, or `embedded`.
        revision: of a hub repository.
        dtype: of the models.
        placement: the device of `vae`, and of `text_encoder` for everything else.
        main_device: says where a component without a place of its own goes.
        quantization: of the components that it names.
    """

    def __init__(
        self,
        repository_name: str,
        revision: str | None,
        dtype: torch.dtype,
        placement: Mapping[str, torch.device | None],
        main_device: Callable[[], torch.device],
        stopwatch: Stopwatch,
        quantization: Quantization | None = None,
    ) -> None:
        self.quantization = quantization
        self.repository_name = repository_name
        self.revision = revision
        self.dtype = dtype
        self.placement = placement
        self.main_device = main_device
        self.stopwatch = stopwatch
        self._loaded: dict[str, Any] = {}
        self._resting: set[str] = set()
        self._copies: WeakKeyDictionary[nn.Module, Resting] = WeakKeyDictionary()  # of those that have rested

    @property
    def repository(self) -> str:
        """The folder or hub id that components come from."""
        return resolve_repository(self.repository_name)

    def place(self, name: str) -> torch.device | None:
        """Where the settings put a component; None for beside the transformer."""
        return self.placement["vae" if name == "vae" else "text_encoder"]

    def device(self, name: str) -> torch.device:
        """Where a component is or will be."""
        return self.place(name) or self.main_device()

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            with self.stopwatch.stage("load"):
                self._loaded[name] = self._load(name, self.device(name))
        elif name in self._resting:
            part, device = self._loaded[name], self.device(name)
            if part in self._copies:
                self._copies[part].wake(device)
            else:
                part.to(device)
            self._resting.remove(name)
        return self._loaded[name]

    def _load(self, name: str, device: torch.device) -> Any:
        if name not in self.quantized:
            return load_component(self.repository, name, revision=self.revision, dtype=self.dtype, device=device)
        # In the files' own dtype, which leaves the weights in the files until each is quantized.
        part = load_component(self.repository, name, revision=self.revision, dtype="auto")
        assert self.quantization is not None
        log.info(f"quantizing {name} to {self.quantization}")
        self.quantization.convert(part, device, self.dtype)
        return part

    def hold(self, name: str, part: Any) -> None:
        """Use this in place of what would be loaded."""
        self._loaded[name] = part

    def models(self) -> dict[str, nn.Module]:
        """The models that are in memory now."""
        return {name: part for name, part in self._loaded.items() if isinstance(part, nn.Module)}

    @property
    def quantized(self) -> list[str]:
        """Those that are quantized."""
        chosen = () if self.quantization is None else self.quantization.components_to_quantize
        return [name for name in chosen if name != "transformer"]

    def check_quantization(self, texts: Sequence[str]) -> None:
        """Raise a UserError for what is to be quantized and is no text encoder; `texts` are the parts that encode."""
        index = read_index(self.repository, self.revision)  # not the classes: most runs need none of them
        known = [name for name in texts if not any(word in index[name][1] for word in WITHOUT_WEIGHTS)]
        if unknown := [name for name in self.quantized if name not in known]:
            choices = ", ".join(["transformer", *known])
            raise UserError(f"model.quantization.components_to_quantize: {listing(unknown)} is none of {choices}")

    def quantization_settings(self) -> dict[str, Any]:
        """What the outputs of quantized components depend on; nothing where there are none."""
        if self.quantization is None or not self.quantized:
            return {}
        return {"quantization": self.quantization.settings() | {"components_to_quantize": sorted(self.quantized)}}

    def weight_bytes(self, name: str, part: nn.Module) -> int:
        """What a model, which may be on the meta device, takes."""
        if self.quantization is not None and name in self.quantized:
            return self.quantization.nbytes(part, self.dtype)
        return sum(parameter.numel() for parameter in part.parameters()) * self.dtype.itemsize

    def rest(self) -> None:
        """Let the models wait in the host's memory until they are used again."""
        moving = [name for name in self.models() if name not in self._resting and self.device(name).type != "cpu"]
        for name in moving:
            part = self._loaded[name]
            if not Resting.suits(part):  # nor does a copy from before it trained
                self._copies.pop(part, None)
                part.to("cpu")
                continue
            if part not in self._copies:
                self._copies[part] = Resting(part, self.device(name))
            self._copies[part].rest()
        self._resting.update(moving)
        if moving and torch.cuda.is_available():
            torch.cuda.empty_cache()

    def release(self, *names: str) -> None:
        """Forget components and give their memory back."""
        for name in names:
            self._loaded.pop(name, None)
            self._resting.discard(name)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


class PromptMemory:
    """Prompt embeddings in CPU memory: data sets for an edit repeat their instructions.

    A prompt is known by its text and by the pixels of the images that its encoder sees with it. Each is encoded
    alone, so that its embedding does not depend on its neighbours in a batch.

    Args:
        encode: a prompt and its images -> the text conditioning, each tensor (...).
        kept: how many are kept, the ones used last; 4 MB each for T5-XXL at 512 tokens, 10 MB for Qwen2.5-VL and one
            megapixel.
    """

    def __init__(
        self, encode: Callable[[str, list[Tensor]], dict[str, Tensor]], stopwatch: Stopwatch, kept: int = 64
    ) -> None:
        self.encode = encode
        self.stopwatch = stopwatch
        self.kept = kept
        self._seconds: dict[bytes, float] = {}
        self._encoded: dict[bytes, dict[str, Tensor]] = {}

    def __call__(
        self, prompts: Sequence[str], images: Sequence[list[Tensor]], device: torch.device
    ) -> dict[str, Tensor]:
        """The conditioning of a batch, each tensor (B, ...), on `device`, its masks on the host.

        Args:
            images: of each prompt.
        """
        encoded = []
        for prompt, seen in zip(prompts, images, strict=True):
            key = _digest(prompt, seen)
            encoded.append(self._encoded.pop(key) if key in self._encoded else self._encode(key, prompt, seen))
            self._encoded[key] = encoded[-1]
        while len(self._encoded) > self.kept:
            del self._encoded[next(iter(self._encoded))]
        stacked = stack_padded(encoded)
        return {k: tensor if k.endswith(ON_HOST) else copy_to(tensor, device) for k, tensor in stacked.items()}

    def seconds(self, prompt: str, images: list[Tensor]) -> float:
        """What encoding it has taken."""
        return self._seconds[_digest(prompt, images)]

    def _encode(self, key: bytes, prompt: str, images: list[Tensor]) -> dict[str, Tensor]:
        before = self.stopwatch.seconds.get("encode_prompt", 0.0)
        with self.stopwatch.stage("encode_prompt"):
            encoded = {name: tensor.cpu() for name, tensor in self.encode(prompt, images).items()}
        self._seconds[key] = self.stopwatch.seconds["encode_prompt"] - before
        return encoded

    def keep(
        self, requests: Sequence[PromptRequest], load: Callable[[Sequence[Path]], list[Tensor]], processes: int = 1
    ) -> bool:
        """Encode these now, and keep them all if they fit: their encoders may go then.

        Args:
            load: reads the images of a prompt.
            processes: how many on this machine do so, and share half of the free memory.
        """
        start = last = time.monotonic()
        for number, (prompt, paths) in enumerate(requests, 1):
            first = self([prompt], [load(paths)], torch.device("cpu"))
            if number == 1:
                size = sum(tensor.numel() * tensor.element_size() for tensor in first.values())
                if size * len(requests) * processes > psutil.virtual_memory().available / 2:
                    return False
                self.kept = max(self.kept, len(requests))
            if time.monotonic() - last >= SECONDS_BETWEEN_LINES:
                last = time.monotonic()
                left = timedelta(seconds=round((last - start) / number * (len(requests) - number)))
                log.info(f"{number} of {len(requests)} prompts encoded  left {left}")
        return True


def _digest(prompt: str, images: list[Tensor]) -> bytes:
    """What a prompt and its images are known by."""
    digest = hashlib.sha256(prompt.encode())
    for image in images:
        digest.update(str(tuple(image.shape)).encode())
        digest.update(image.cpu().numpy().tobytes())
    return digest.digest()
