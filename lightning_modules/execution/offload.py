"""Offloading to host memory: the weights of frozen blocks, and activations between forward and backward pass."""

import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd import _get_sequence_nr
from torch.multiprocessing.reductions import StorageWeakRef

from datamodules.errors import UserError
from lightning_modules.execution.blocks import blocks
from lightning_modules.execution.host_memory import HostMemory, SideStream

# Bytes; smaller activations are not worth a copy.
LEAST = 2**20
# Copies to the host that may be in progress; a tensor stays on the device until its copy is done.
BEHIND = 2
# Graph nodes whose tensors are copied back before their turn.
AHEAD = 2


def streamed_blocks(transformer: nn.Module, count: int) -> dict[str, nn.Module]:
    """Return `count` of the blocks, evenly spread: the next one is copied while those in between compute.

    Raises:
        UserError: there are fewer.
    """
    names = list(found := blocks(transformer))
    if not isinstance(count, int) or not 0 <= count <= len(names):
        raise UserError(f"model.offload.blocks={count}: {type(transformer).__name__} has 0 to {len(names)}")
    chosen = [names[index * len(names) // count] for index in range(count)]
    return {name: found[name] for name in chosen}


def streamed_linears(block: nn.Module) -> list[nn.Linear]:
    """Return the layers whose weights are streamed: the frozen ones, without adapters."""
    return [
        module
        for name, module in block.named_modules()
        if isinstance(module, nn.Linear) and "lora_" not in name and not module.weight.requires_grad
    ]


class BlockStream:
    """Copies the weights of blocks to the device, one block ahead of the computing.

    Two buffers on the device take turns, each as large as the largest block. A copy into one starts once all work of
    its previous block is queued, and waits for that work on its own stream. This holds in the backward pass too:
    autograd runs the latest nodes first, so a block is finished when the block before it is computed again. Weights are
    frozen, so nothing is copied back. Training needs gradient checkpointing: otherwise a block's backward pass would
    find another block's weights in its buffer.

    Args:
        blocks: in the order in which they compute, their linear layers on the CPU.
        device: where they compute.
    """

    def __init__(self, blocks: Sequence[nn.Module], device: torch.device) -> None:
        self._layers = [streamed_linears(block) for block in blocks]
        self._host = [self._take(layers) for layers in self._layers]
        for host in self._host:
            host.pin(device)
        size, count = max(len(host.piece) for host in self._host), min(2, len(blocks))
        self._buffers = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(count)]
        self._block_in: list[int | None] = [None] * count
        self._slot_in_use = count - 1
        self._copied: list[Any] = [None] * count
        self._side_stream = SideStream(device)
        for buffer in self._buffers:
            self._side_stream.uses(buffer)
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(self._before(index))
            # always_call: checkpointing leaves a block by an exception as soon as it has recomputed what it needs.
            block.register_forward_hook(self._after(index), always_call=True)

    def _take(self, layers: list[nn.Linear]) -> HostMemory:
        """Move a block's weights into one piece of host memory."""
        host = HostMemory(layer.weight for layer in layers)
        for layer, view in zip(layers, host.views(host.piece), strict=True):
            view.copy_(layer.weight.data)
            layer._parameters["weight"] = None
        return host

    def _fetch(self, index: int) -> int:
        """Start copying a block's weights, unless they are in a buffer; return the buffer's index."""
        if index in self._block_in:
            return self._block_in.index(index)
        slot = (self._slot_in_use + 1) % len(self._buffers)
        piece = self._host[index].piece
        self._block_in[slot] = None
        self._copied[slot] = self._side_stream.copy([piece], [self._buffers[slot][: len(piece)]])
        self._block_in[slot] = index
        return slot

    def _before(self, index: int) -> Callable[..., None]:
        def before(block: nn.Module, args: Any) -> None:
            slot = self._slot_in_use = self._fetch(index)
            self._side_stream.wait(self._copied[slot])
            weights = self._host[index].views(self._buffers[slot])
            for layer, weight in zip(self._layers[index], weights, strict=True):
                layer._parameters["weight"] = nn.Parameter(weight, requires_grad=False)
            if torch._C._current_graph_task_id() != -1:  # in a backward pass
                following = index - 1
            else:
                # Without gradients another forward pass follows; with them the backward pass starts at the last block.
                following = index + 1 if torch.is_grad_enabled() else (index + 1) % len(self._host)
            if 0 <= following < len(self._host) and len(self._buffers) > 1:
                self._fetch(following)

        return before

    def _after(self, index: int) -> Callable[..., None]:
        def after(block: nn.Module, args: Any, output: Any) -> None:
            for layer in self._layers[index]:
                layer._parameters["weight"] = None

        return after


class SavedTensor:
    """A tensor saved by autograd: in host memory, then back on the device until autograd frees it."""

    def __init__(self, host: Tensor) -> None:
        self.host: Tensor | None = host
        self.back: Tensor | None = None
        self.copied: Any = None
        self.requested = 0  # copies back that had been requested by then, including its own


class ActivationOffload(torch.autograd.graph.saved_tensors_hooks):
    """A context in which tensors saved by autograd go to host memory, and come back ahead of their use.

    The backward pass visits the graph's nodes from last to first, in whatever order a node uses its tensors: while one
    node computes, the tensors of the two before it are copied. A tensor saved by several nodes is copied once each way.

    Args:
        weights: tensors that stay on the device.
        least: bytes; smaller tensors stay on the device.
    """

    def __init__(self, device: torch.device, weights: Iterable[Tensor], least: int = LEAST) -> None:
        super().__init__(self._pack, self._unpack)
        self.device = device
        self.least = least
        self._weights = {weight.untyped_storage()._cdata for weight in weights}
        self._side_stream = SideStream(device)
        self._known: dict[Any, SavedTensor] = {}
        self._leaving: deque[tuple[Tensor, Any]] = deque()
        # By sequence number; tensors that are no longer referenced need not come back.
        self._nodes: list[tuple[int, list[weakref.ref[SavedTensor]]]] = []
        self._arriving: deque[tuple[int, list[SavedTensor]]] = deque()
        self._requested = 0

    def __enter__(self) -> None:
        if self._arriving:  # a backward pass was not finished
            self._use(self._arriving[-1][1][0])
        self._nodes.clear()
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._known.clear()
        self._free_sent(0)

    def _pack(self, tensor: Tensor) -> Tensor | tuple[int, SavedTensor]:
        """Return the tensor itself, or the sequence number of the node that saves it and its placeholder."""
        if tensor.nbytes < self.least or tensor.device != self.device:
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata in self._weights:
            return tensor
        # The weak reference keeps the storage's address from being reused, but not its memory.
        layout = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        key = StorageWeakRef(storage), tensor._version, layout
        if key not in self._known:
            self._known[key] = self._send(tensor)
        saved, node = self._known[key], self._node()
        if not self._nodes or self._nodes[-1][0] != node:
            self._nodes.append((node, []))
        self._nodes[-1][1].append(weakref.ref(saved))
        return node, saved

    def _node(self) -> int:
        """Return the sequence number of the node that is saving a tensor; they rise."""
        hooks = _top_saved_tensors_default_hooks(True)
        if (hooks is not None and hooks[0] == self._pack) or not self._nodes:
            return _get_sequence_nr()
        # Selective checkpointing saves it, to compute a block again from its inputs, which were saved last.
        return self._nodes[-1][0]

    def _send(self, tensor: Tensor) -> SavedTensor:
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._side_stream.pins)
        self._leaving.append((tensor, self._side_stream.copy([tensor], [host])))
        self._free_sent(BEHIND)
        return SavedTensor(host)

    def _free_sent(self, behind: int) -> None:
        """Free the device tensors of all but the last `behind` copies; computing waits for these copies."""
        while len(self._leaving) > behind:
            self._side_stream.wait(self._leaving[0][1])
            self._leaving.popleft()

    def _fetch(self, node: int, references: Iterable[weakref.ref[SavedTensor]]) -> None:
        """Start to copy back a node's tensors that are still referenced and not yet back."""
        alive = dict.fromkeys(saved for reference in references if (saved := reference()) is not None)
        waiting = {saved: saved.host for saved in alive if saved.host is not None}
        if not waiting:
            return
        tensors = [torch.empty_like(host, device=self.device) for host in waiting.values()]
        copied = self._side_stream.copy(list(waiting.values()), tensors)
        self._requested += 1
        for saved, tensor in zip(waiting, tensors, strict=True):
            saved.host, saved.back, saved.copied, saved.requested = None, tensor, copied, self._requested
        self._arriving.append((node, list(waiting)))

    def _use(self, saved: SavedTensor) -> None:
        """Make computing wait for a copy and for all requested before it: their memory may then be written."""
        self._side_stream.wait(saved.copied)
        while self._arriving and self._arriving[0][1][0].requested <= saved.requested:
            self._arriving.popleft()

    def _unpack(self, packed: Tensor | tuple[int, SavedTensor]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        node, saved = packed
        own = bisect_left(self._nodes, node, key=itemgetter(0))
        for other, references in self._nodes[own:]:
            self._fetch(other, references)
        del self._nodes[own:]
        self._fetch(node, [weakref.ref(saved)])  # of an earlier forward pass
        while self._nodes and sum(other < node for other, _ in self._arriving) < AHEAD:
            self._fetch(*self._nodes.pop())
        self._use(saved)
        assert saved.back is not None
        return saved.back
