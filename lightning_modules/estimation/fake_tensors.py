"""Programs on fake tensors: how much memory they would have taken, without taking it."""

import weakref
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

NORMS = (F.layer_norm, F.rms_norm, F.group_norm)


def fake_like(tensor: Tensor | None) -> Tensor:
    """A fake tensor; to be called within a FakeTensorMode."""
    assert tensor is not None
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def fake_model(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same model with fake tensors in place of its meta ones, frozen weights in `dtype`."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                kind = parameter.dtype if parameter.requires_grad else dtype
                fake = torch.empty(parameter.shape, dtype=kind)
                module._parameters[name] = nn.Parameter(fake, parameter.requires_grad)
        attributes: tuple[dict[str, Any], ...] = (module._buffers, vars(module))
        for place in attributes:
            place.update({name: fake_like(value) for name, value in place.items() if isinstance(value, Tensor)})
    return model


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of all tensors that are made inside and still alive.

    Args:
        device_type: count those on such a device alone.

    Attributes:
        now: bytes that are alive.
        peak: the most since `restart`, beyond what there was then.
    """

    def __init__(self, device_type: str | None = None) -> None:
        super().__init__()
        self.device_type = device_type
        self._alive: dict[int, int] = {}
        self.now = self._start = self._most = 0

    @property
    def peak(self) -> int:
        return self._most - self._start

    def restart(self) -> None:
        """Count from here."""
        self._start = self._most = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and self.device_type in (None, tensor.device.type):
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._alive:
                    self._alive[key] = storage.nbytes()
                    self.now += self._alive[key]
                    self._most = max(self._most, self.now)
                    weakref.finalize(storage, self._free, key)
        return out

    def _free(self, key: int) -> None:
        self.now -= self._alive.pop(key)


class OnCuda(TorchFunctionMode):
    """Inside, fake tensors of the CPU take what they would on a GPU: norms in float32, fused attention.

    Args:
        dtype: of the base.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in NORMS:
            args = tuple(arg.float() if isinstance(arg, Tensor) else arg for arg in args)
            kwargs = {name: arg.float() if isinstance(arg, Tensor) else arg for name, arg in kwargs.items()}
        elif function is F.scaled_dot_product_attention:  # the CPU's keeps what FlashAttention does
            names = ("query", "key", "value")
            given = dict(zip(names, args, strict=False)) | {name: kwargs[name] for name in names if name in kwargs}
            args, kwargs = tuple(given[name].to(self.dtype) for name in names), {}
        return function(*args, **kwargs)
