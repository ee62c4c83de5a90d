"""The kinds of updates that files hold."""

from collections.abc import Collection, Iterable, Mapping

from torch import Tensor

from lightning_modules.adapters.hadamard import PARTS as HADAMARD
from lightning_modules.adapters.hadamard import Hadamard
from lightning_modules.adapters.kronecker import PARTS as KRONECKER
from lightning_modules.adapters.kronecker import Kronecker
from lightning_modules.adapters.low_rank import LowRank
from lightning_modules.adapters.rotation import Rotation
from lightning_modules.adapters.update import Unread, Update

# The tensors that each may be made of.
KINDS: dict[type[Update], tuple[str, ...]] = {
    LowRank: ("down", "up", "magnitude"),
    Kronecker: KRONECKER,
    Hadamard: HADAMARD,
    Rotation: ("oft_R",),
}


def kinds_of(parts: Collection[str]) -> list[type[Update]]:
    """What a layer's tensors are parts of."""
    return [kind for kind, own in KINDS.items() if set(own) & set(parts)]


def made_of(tensors: Mapping[str, Tensor]) -> Update:
    """The update of a layer's tensors; raises ValueError for such as make none, Unread for forms of elsewhere."""
    kind, *others = kinds_of(tensors)
    if others:
        dora = "the magnitude of a DoRA beside " if "magnitude" in tensors else ""
        parts = " and ".join(sorted(tensors.keys() - {"magnitude"}))
        raise Unread(f"{dora}{parts}{'' if dora else ', of two kinds of updates'}")
    if not kind.is_complete(tensors):
        raise ValueError(f"nothing but {' and '.join(sorted(tensors))}, which is half of an update")
    return kind.of(tensors)


def kind_of(updates: Iterable[Update]) -> str:
    """What people call them all together."""
    return next((update.kind for update in updates if not isinstance(update, LowRank)), "LoRA")
