"""An environment in which few distributions are installed."""

import sys
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def only(*distributions: str) -> None:
    """Let this process, and those that it forks, find these, what they need, and this project; no others."""
    known, queue = {"retouch"}, list(distributions)
    while queue:
        name = canonicalize_name(queue.pop())
        if name in known:
            continue
        known.add(name)
        try:
            needed = [Requirement(one) for one in requires(name) or []]
        except PackageNotFoundError:  # of another platform
            continue
        queue += [one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})]
    hidden = {
        module
        for module, owners in packages_distributions().items()
        if not known.intersection(map(canonicalize_name, owners))
    }

    class Few(PathFinder):
        @classmethod
        def find_spec(cls, fullname, path=None, target=None):
            return None if fullname.partition(".")[0] in hidden else super().find_spec(fullname, path, target)

        @classmethod
        def find_distributions(cls, *context):
            found = super().find_distributions(*context)
            return (one for one in found if canonicalize_name(one.name) in known)

    sys.meta_path[:] = [Few if finder is PathFinder else finder for finder in sys.meta_path]
