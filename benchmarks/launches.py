"""Count the kernels that a training step launches on a GPU, on a machine without one.

    python benchmarks/launches.py
    python benchmarks/launches.py --depth 2 --size 512 --checkpointing full --precisions fp8 --adapters lora

The step is that of full_size.py, eager, on fake CUDA tensors; operators that only make views or read metadata launch
nothing. It is an estimate: PyTorch chooses some kernels, such as products with split sums, by size and card.
"""

import argparse
import itertools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

sys.path.insert(0, str(Path(__file__).parent.parent))  # the packages next to this folder, installed or not

from benchmarks.full_size import PRECISIONS, RandomWeights
from benchmarks.memory import compose, loss, random_batch, write_shallow
from cli.terminal import silence_libraries
from lightning_modules.adapters.adapter import trainable
from lightning_modules.pretrained.transformer import TransformerSource
from lightning_modules.quantization import eight_bit, linear
from tests.support.fake_cuda import DEVICE, backward, fake_cuda

aten = torch.ops.aten
# Operators that launch nothing, besides views.
NOTHING = {"prim::device", "aten::_unsafe_view", "aten::_reshape_alias", "aten::lift_fresh", "aten::new_empty_strided"}
NOTHING |= {"aten::empty", "aten::empty_like", "aten::new_empty", "aten::empty_strided"}
# Operators that launch more than one kernel.
SEVERAL = {
    "aten::_scaled_dot_product_flash_attention_backward": 3,
    "aten::slice_backward": 2,  # zeros, then a copy
    "aten::select_backward": 2,
    "aten::_fused_rms_norm_backward": 2,  # of the input, and of the weight
}
# Classes by a part of an operator's name, in this order; others are element-wise.
CLASSES = {
    "attention": ("attention",),
    "products": ("mm", "linear", "matmul"),
    "norms": ("norm",),
    "copies and casts": ("copy", "clone", "cat", "stack", "slice_backward", "select_backward"),
    "quantization": ("fused kernel", "Triton", "bitsandbytes", "retouch"),
    "optimizer": ("adam", "foreach"),
}
ELEMENTWISE = "elementwise"


class FakeWeights(RandomWeights):
    """Stands for files: tensors without content."""

    def read(self, name: str) -> Tensor:
        return torch.empty(self.shapes[name], device=self.device, dtype=torch.bfloat16)


class Launches(TorchDispatchMode):
    """A mode that counts kernels by the name of their operator."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self._counting = True
        self._last: Any = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name
        if (ours := OPDEFS.get(name)) is not None:
            with self:
                return ours._init_fn(*args, **kwargs)
        out = func(*args, **kwargs)
        # Gradients that autograd's engine hands over to a parameter are copied where its nodes run in Python.
        handed_over = func is aten.copy_.default and self._last is aten.new_empty_strided.default
        if name != "prim::device":
            self._last = func
        tensors = (one for one in tree_iter((args, kwargs, out)) if isinstance(one, Tensor))
        is_kernel = not func.is_view and name not in NOTHING and any(one.is_cuda for one in tensors)
        if self._counting and is_kernel and not handed_over:
            self.counts[name] += SEVERAL.get(name, 1)
        return out

    def one_kernel(self, run: Callable[..., Any], *args: Any) -> Any:
        """Call a function that is compiled to one kernel on a GPU; stands for `linear.fused`."""
        self.counts["fused kernel"] += self._counting
        before, self._counting = self._counting, False
        try:
            return run(*args)
        finally:
            self._counting = before

    def launch(self, kernel: Any, grid: Any) -> Callable[..., None]:
        """Return a function that launches a Triton kernel; stands for `KernelInterface.__getitem__`."""

        def run(*args: Any, **kwargs: Any) -> None:
            self.counts["Triton"] += self._counting

        return run


def flash_attention(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Attend with the kernel that PyTorch has on a GPU; without one it computes each product."""
    if torch.is_autocast_enabled("cuda"):
        query, key, value = (one.to(torch.get_autocast_dtype("cuda")) for one in (query, key, value))
    return aten._scaled_dot_product_flash_attention(query, key, value)[0]


@contextmanager
def replaced(launches: Launches) -> Iterator[None]:
    """Temporarily replace functions that need a GPU to choose or launch their kernels."""
    from triton.runtime.jit import KernelInterface

    functions: list[tuple[Any, str, Any]] = [
        (F, "scaled_dot_product_attention", flash_attention),
        (KernelInterface, "__getitem__", lambda kernel, grid: launches.launch(kernel, grid)),
        (torch.cuda, "device_of", lambda tensor: nullcontext()),
    ]
    functions += [(owner, "fused", launches.one_kernel) for owner in (linear, eight_bit) if hasattr(owner, "fused")]
    with ExitStack() as stack:
        for function in functions:
            stack.enter_context(mock.patch.object(*function))
        yield


def counts(
    model: str, folder: str, settings: Iterable[str], kinds: Iterable[tuple[int, str]]
) -> Iterator[Counter[str]]:
    """Yield the kernels of a step, forward pass, backward pass and optimizer, for each side and checkpointing policy.

    Args:
        folder: folder of the model's configuration.
        settings: overrides for train.py.
    """
    module: Any = instantiate(
        compose(model, folder, "bfloat16", "model.compile=false", *settings).model, _convert_="all"
    )
    weights, launches = FakeWeights(module.base.source.meta, DEVICE), Launches()
    with fake_cuda() as cuda, replaced(launches):
        module._device = DEVICE
        with mock.patch.object(TransformerSource, "weights", return_value=weights), cuda.configuring():
            module.configure_model()
        trained = trainable(module.transformer).values()
        optimizer = torch.optim.AdamW(trained, lr=1e-6, fused=True)
        with cuda.step():
            for parameter in trained:
                parameter.grad = torch.zeros_like(parameter)
            optimizer.step()  # makes its state
            optimizer.zero_grad()
        for side, policy in kinds:
            with cuda.step():
                module.execution.set_checkpointing(module.transformer, policy)
                batch = random_batch(module, side, 1, DEVICE)
                with torch.no_grad():
                    loss(module, batch)  # makes constants
                launches.counts.clear()
                with launches:
                    backward(loss(module, batch))
                    optimizer.step()
                optimizer.zero_grad()
            yield launches.counts


def by_class(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the sums by class."""
    found = dict.fromkeys((*CLASSES, ELEMENTWISE), 0)
    for name, number in counts.items():
        kind = next((kind for kind, words in CLASSES.items() if any(word in name for word in words)), ELEMENTWISE)
        found[kind] += number
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="flux_kontext")
    parser.add_argument("--depth", type=int, help="blocks of each kind; all by default")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=["bf16", "fp8", "nf4"])
    parser.add_argument("--adapters", nargs="+", default=["lora", "tlora"])
    parser.add_argument("--size", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--checkpointing", nargs="+", default=["full", "none"])
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    silence_libraries()
    rows: list[dict[str, Any]] = []
    print(f"| {' | '.join(['', 'all', *CLASSES, ELEMENTWISE])} |\n|{(len(CLASSES) + 3) * '---|'}")
    kinds = list(itertools.product(options.size, options.checkpointing))
    with tempfile.TemporaryDirectory() as folder:
        write_shallow(options.model, options.depth, folder)
        for precision, adapter in itertools.product(options.precisions, options.adapters):
            settings = [*PRECISIONS[precision], f"adapter={adapter}"]
            found = counts(options.model, folder, settings, kinds)
            for (side, policy), operators in zip(kinds, found, strict=True):
                name, classes = f"{precision} {side} {policy} {adapter}", by_class(operators)
                row = {"row": name, "launches": operators.total(), **classes}
                print(f"| {' | '.join(map(str, row.values()))} |", flush=True)
                rows.append(row | {"operators": dict(operators.most_common())})
                if options.output is not None:
                    options.output.write_text(json.dumps({"model": options.model, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
