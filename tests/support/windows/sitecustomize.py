"""Windows as far as Linux can play it, in each Python process that has this folder on its path.

What Windows lacks is missing, data workers are spawned, and open files are neither removed nor replaced.
"""

import errno
import multiprocessing
import os
import signal
import sys

sys.modules["fcntl"] = None
for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGALRM"):
    delattr(signal, name)
for name in ("fork", "killpg", "setsid"):
    delattr(os, name)
multiprocessing.set_start_method("spawn")


def no_links(*_, **__):
    raise OSError(errno.ENOTSUP, "no links on this file system")


os.link = os.symlink = no_links


def is_open(path):
    """Return whether this process has opened or mapped a file, or one in a folder."""
    path = os.path.realpath(path)
    names = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    with open("/proc/self/maps", encoding="utf-8") as maps:
        names += ["/" + line.rstrip("\n").partition("/")[2] for line in maps]
    return any(name == path or name.startswith(path + os.sep) for name in names)


def unless_open(function):
    def guarded(*paths, **more):
        for path in paths:
            if isinstance(path, (str, os.PathLike)) and more.get("dir_fd") is None and is_open(path):
                raise PermissionError(errno.EACCES, "it is open", os.fspath(path))
        return function(*paths, **more)

    return guarded


for name in ("unlink", "remove", "rename", "replace", "rmdir"):
    setattr(os, name, unless_open(getattr(os, name)))


def lightning_too():
    """Return a callback; from now on Lightning, which looks at the platform, handles no SIGUSR1 either."""
    from lightning.pytorch import Callback
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

    _SignalConnector.register_signal_handlers = lambda connector: None
    return Callback()
