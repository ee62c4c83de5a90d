"""Callbacks that see what waits for a device."""

import torch
from lightning.pytorch import Callback
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Methods that give the host a number or a copy.
READS = [
    "item",
    "tolist",
    "cpu",
    "numpy",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__contains__",
    "__format__",
]
# Operators whose result's shape the host must know, or that read a number.
SYNCHRONIZING = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")


class _Marks:
    """Mark tensors that would be on a GPU: those derived from weights or from a copied batch."""

    def __init__(self):
        self.storages = set()

    def add(self, *tensors):
        self.storages |= {tensor.untyped_storage()._cdata for tensor in tensors}
        self.kept = [*getattr(self, "kept", []), *tensors]  # or their places would be another's

    def __contains__(self, tensor):
        return isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata in self.storages


class _Operators(TorchDispatchMode):
    def __init__(self, marks, found):
        super().__init__()
        self.marks, self.found = marks, found

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        on_device = any(leaf in self.marks for leaf in tree_leaves((args, kwargs)))
        if on_device and any(name in func.name() for name in SYNCHRONIZING):
            self.found.append(func.name())
        result = func(*args, **(kwargs or {}))
        if on_device:
            self.marks.add(*(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)))
        return result


class _Methods(TorchFunctionMode):
    def __init__(self, marks, found):
        super().__init__()
        self.marks, self.found = marks, found

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name, rest = getattr(func, "__name__", ""), [*args[1:], *(kwargs or {}).values()]
        if args and args[0] in self.marks:
            if name in READS or (name == "to" and "cpu" in [one for one in rest if isinstance(one, str)]):
                self.found.append(name)
        elif name == "to" and not kwargs.get("non_blocking") and any(isinstance(one, torch.device) for one in rest):
            self.found.append("to of a tensor of the host")
        result = func(*args, **kwargs)
        if isinstance(kwargs.get("device"), torch.device) and isinstance(result, torch.Tensor):
            if name == "tensor":
                self.found.append("numbers of the host")
            self.marks.add(result)  # made there
        return result


class Watch(Callback):
    """Looks for what would wait for a device, from a step's start to its end; here on a CPU, where nothing does."""

    def __init__(self):
        self.found = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.begin(trainer.global_step + 1, *pl_module.parameters(), *batch.tensors())

    def begin(self, step, *tensors):
        self.step = step
        found = self.found[step] = []
        self.marks = _Marks()
        self.marks.add(*tensors)
        self._modes = [_Operators(self.marks, found), _Methods(self.marks, found)]
        for mode in self._modes:
            mode.__enter__()

    def end(self):
        for mode in reversed(self._modes):
            mode.__exit__(None, None, None)
