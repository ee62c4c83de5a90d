"""The names of a transformer's layers outside of diffusers."""

from collections.abc import Mapping
from typing import NamedTuple


class NativeNames(NamedTuple):
    """How a model's own code names the layers of its transformer, where that is not as diffusers does.

    In all names `{}` is the number of a block.

    Attributes:
        layers: by native name the layers of diffusers, whose outputs the native one gives one after the other.
        read_only: the same, of names in which files come and none is written.
        swapped: layers of diffusers whose outputs' halves are there the other way round.
    """

    layers: Mapping[str, tuple[str, ...]] = {}
    read_only: Mapping[str, tuple[str, ...]] = {}
    swapped: tuple[str, ...] = ()


NO_NATIVE_NAMES = NativeNames()
