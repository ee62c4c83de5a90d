"""Content that was made to harm."""

import json
import re
import resource
import shlex
from contextlib import contextmanager

# 457 bytes that would be 10 ** 9 nodes.
BILLION_LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 9)
)


def payload(marker):
    """Return a mapping that runs a command of the shell where it is instantiated."""
    return {"_target_": "torch.utils.collect_env.run", "command": f"touch {shlex.quote(str(marker))}"}


def typed(marker):
    """Return it as it is typed on the command line."""
    return re.sub(r'"(\S+)":', r"\1:", json.dumps(payload(marker)))


@contextmanager
def disk_with(room):
    """Temporarily fail writes beyond so many bytes of a file, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
