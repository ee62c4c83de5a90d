"""Activations that wait in the host's memory from the forward pass to the backward pass."""

import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch.autograd import _get_sequence_nr
from torch.multiprocessing.reductions import StorageWeakRef

from lightning_modules.execution.side_stream import SideStream

# Bytes; what is smaller is not worth a copy.
LEAST = 2**20
# Copies to the host that may be under way: a tensor is there until its copy is, and no longer.
BEHIND = 2
# Nodes of the graph whose tensors come back before their turn.
AHEAD = 2


class Kept:
    """A tensor that autograd keeps: on the host, then back on the device until autograd lets it go."""

    def __init__(self, host: Tensor) -> None:
        self.host: Tensor | None = host
        self.back: Tensor | None = None
        self.copied: Any = None
        self.asked = 0  # how many copies back were until then, with its own


class ActivationOffload(torch.autograd.graph.saved_tensors_hooks):
    """Inside, what autograd keeps goes to the host, and comes back ahead of its turn, beside the computing.

    The backward pass goes through the graph's nodes from the last to the first, whatever the order in which a node
    uses its tensors: while one computes, those of the two before it are on their way. What several nodes keep is copied
    once each way.

    Args:
        weights: stay where they are.
    """

    def __init__(self, device: torch.device, weights: Iterable[Tensor], least: int = LEAST) -> None:
        super().__init__(self._pack, self._unpack)
        self.device = device
        self.least = least
        self._weights = {weight.untyped_storage()._cdata for weight in weights}
        self._side_stream = SideStream(device)
        self._known: dict[Any, Kept] = {}
        self._leaving: deque[tuple[Tensor, Any]] = deque()
        # By their numbers; what nobody keeps any more need not come back.
        self._nodes: list[tuple[int, list[weakref.ref[Kept]]]] = []
        self._arriving: deque[tuple[int, list[Kept]]] = deque()
        self._asked = 0

    def __enter__(self) -> None:
        if self._arriving:  # a backward pass was not finished
            self._use(self._arriving[-1][1][0])
        self._nodes.clear()
        super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._known.clear()
        self._let_go(0)

    def _pack(self, tensor: Tensor) -> Tensor | tuple[int, Kept]:
        """The tensor itself, or what stands for it and the number of the node that keeps it."""
        if tensor.nbytes < self.least or tensor.device != self.device:
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata in self._weights:
            return tensor
        # The reference to the storage keeps its address from another one's; its memory it does not keep.
        layout = tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype
        key = StorageWeakRef(storage), tensor._version, layout
        if key not in self._known:
            self._known[key] = self._send(tensor)
        kept, node = self._known[key], self._node()
        if not self._nodes or self._nodes[-1][0] != node:
            self._nodes.append((node, []))
        self._nodes[-1][1].append(weakref.ref(kept))
        return node, kept

    def _node(self) -> int:
        """The number of the node that keeps a tensor now; they rise."""
        hooks = _top_saved_tensors_default_hooks(True)
        if (hooks is not None and hooks[0] == self._pack) or not self._nodes:
            return _get_sequence_nr()
        # Selective checkpointing keeps it, for a block to be computed again from its inputs, which were the last.
        return self._nodes[-1][0]

    def _send(self, tensor: Tensor) -> Kept:
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._side_stream.pins)
        self._leaving.append((tensor, self._side_stream.copy([tensor], [host])))
        self._let_go(BEHIND)
        return Kept(host)

    def _let_go(self, behind: int) -> None:
        """Of all but so many copies to the host the tensors; computing waits for the copies."""
        while len(self._leaving) > behind:
            self._side_stream.wait(self._leaving[0][1])
            self._leaving.popleft()

    def _fetch(self, node: int, references: Iterable[weakref.ref[Kept]]) -> None:
        """Start to copy back what of a node's tensors is neither back nor forgotten."""
        alive = dict.fromkeys(kept for reference in references if (kept := reference()) is not None)
        waiting = {kept: kept.host for kept in alive if kept.host is not None}
        if not waiting:
            return
        tensors = [torch.empty_like(host, device=self.device) for host in waiting.values()]
        copied = self._side_stream.copy(list(waiting.values()), tensors)
        self._asked += 1
        for kept, tensor in zip(waiting, tensors, strict=True):
            kept.host, kept.back, kept.copied, kept.asked = None, tensor, copied, self._asked
        self._arriving.append((node, list(waiting)))

    def _use(self, kept: Kept) -> None:
        """Let computing come after a copy, and so after all that were asked for before: it may write where they are."""
        self._side_stream.wait(kept.copied)
        while self._arriving and self._arriving[0][1][0].asked <= kept.asked:
            self._arriving.popleft()

    def _unpack(self, packed: Tensor | tuple[int, Kept]) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        node, kept = packed
        own = bisect_left(self._nodes, node, key=itemgetter(0))
        for number, references in self._nodes[own:]:
            self._fetch(number, references)
        del self._nodes[own:]
        self._fetch(node, [weakref.ref(kept)])  # of an earlier forward pass
        while self._nodes and sum(number < node for number, _ in self._arriving) < AHEAD:
            self._fetch(*self._nodes.pop())
        self._use(kept)
        assert kept.back is not None
        return kept.back
