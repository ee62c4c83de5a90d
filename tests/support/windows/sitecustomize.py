"""Windows as far as Linux can play it, in each Python process that has this folder on its path.

For the files of Retouch, names that Python's documentation marks as Unix only are missing, signals and processes are
Windows', and paths are text with backslashes; libraries see Linux, for they would use its other code. For all, data
workers are spawned, text has Windows' line ends, there are no links, and a process neither removes nor replaces a file
that it has open.
"""

import builtins
import enum
import errno
import io
import multiprocessing
import os
import pathlib
import signal
import socket
import subprocess
import sys
import types

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
OURS = ("callbacks", "cli", "datamodules", "extras", "foundation", "lightning_modules", "report", "runs", "tasks")
SCRIPTS = ("train.py", "predict.py", "studio.py")
NO_MODULES = {
    *("fcntl", "resource", "pwd", "grp", "spwd", "crypt", "nis", "termios", "tty", "pty", "posix", "syslog"),
    *("ossaudiodev", "curses", "readline"),
}
# Names "Availability: Unix" of Python 3.12's documentation; those that end in * are beginnings.
UNIX_ONLY = {
    "os": """ctermid getegid geteuid getgid getgrouplist getgroups getpgid getpgrp getpriority getresuid getresgid
        getuid initgroups set[a-z]*id setgroups setns setpriority getsid uname unshare PRIO_* environb getenvb
        copy_file_range fchmod fchown fdatasync fpathconf get_blocking set_blocking fstatvfs lockf F_* login_tty openpty
        pipe2 posix_* POSIX_* pread* RWF_* pwrite* sendfile SF_* SEEK_DATA SEEK_HOLE splice SPLICE_* readv tcgetpgrp
        tcsetpgrp ttyname unlockpt ptsname grantpt writev O_DSYNC O_RSYNC O_SYNC O_NDELAY O_NONBLOCK O_NOCTTY O_CLOEXEC
        O_ASYNC O_DIRECT O_DIRECTORY O_NOFOLLOW O_NOATIME O_PATH O_TMPFILE O_LARGEFILE O_EVTONLY O_FSYNC O_ACCMODE
        chflags chown chroot fchdir lchown lchmod lchflags mkfifo mknod major minor makedev pathconf* statvfs fwalk
        memfd_create MFD_* eventfd* EFD_* timerfd* TFD_* getxattr listxattr removexattr setxattr XATTR_* fork forkpty
        killpg nice pidfd_open PIDFD_* plock register_at_fork spawnlp spawnlpe spawnvp spawnvpe wait wait3 wait4 waitid
        waitid_result WNOHANG WCONTINUED WUNTRACED WEXITED WSTOPPED WNOWAIT P_PID P_PGID P_ALL P_PIDFD CLD_* WIF* WCORE*
        WEXITSTATUS WSTOPSIG WTERMSIG sched_* SCHED_* confstr* getloadavg sysconf* getrandom GRND_* sync EX_[A-NP-Z]*
        ST_* RTLD_* CLONE_* posix_openpt""",
    "signal": """alarm getitimer setitimer pause pthread_* sigpending sigwait* sigtimedwait siginterrupt ITIMER_*
        SIG_BLOCK SIG_UNBLOCK SIG_SETMASK pidfd_send_signal struct_siginfo Sigmasks ItimerError SIGALRM SIGBUS SIGCHLD
        SIGCLD SIGCONT SIGHUP SIGIO SIGIOT SIGKILL SIGPIPE SIGPOLL SIGPROF SIGPWR SIGQUIT SIGRT* SIGSTKFLT SIGSTOP
        SIGSYS SIGTRAP SIGTSTP SIGTT* SIGURG SIGUSR* SIGVTALRM SIGWINCH SIGXCPU SIGXFSZ""",
    "socket": """AF_UNIX AF_CAN* AF_PACKET AF_NETLINK AF_TIPC AF_ALG AF_VSOCK AF_QIPCRTR SO_REUSEPORT SO_PASS*
        SO_PEER* SO_BINDTODEVICE SCM_* CMSG_* MSG_DONTWAIT MSG_NOSIGNAL MSG_CMSG_CLOEXEC SOCK_CLOEXEC SOCK_NONBLOCK
        CAN_* PF_* NETLINK_* TIPC_* ALG_* VM_* VMADDR_* sethostname send_fds recv_fds""",
    "time": "clock_getres clock_gettime* clock_settime* pthread_getcpuclockid tzset CLOCK_*",
    "select": "poll epoll kqueue kevent devpoll POLL* EPOLL*",
    "mmap": "MAP_* PROT_* MADV_*",
    "shutil": "chown",
    "sys": "abiflags setdlopenflags getdlopenflags",
    "subprocess": "",
}


def is_ours(file):
    """Return whether a file is one of Retouch's, not a test or a library."""
    file = os.path.abspath(file) if file else ""
    name = file[len(ROOT) + 1 :] if file.startswith(ROOT + "/") else ""
    return name in SCRIPTS or name.partition("/")[0] in OURS


def called_by_us():
    """Return whether a file of Retouch called the function that calls this one."""
    return is_ours(sys._getframe(2).f_code.co_filename)


# Names


class OnWindows(types.ModuleType):
    """A module as Retouch's files see it, without the names of Unix and with some of Windows' own."""

    def __init__(self, real, **own):
        super().__init__(real.__name__)
        self.__dict__.update(own, _real=real, _lacks=[*map(self._matches, UNIX_ONLY.get(real.__name__, "").split())])

    @staticmethod
    def _matches(pattern):
        from fnmatch import fnmatchcase

        return lambda name: fnmatchcase(name, pattern)

    def __getattr__(self, name):
        if any(matches(name) for matches in self._lacks):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self)
        return getattr(self._real, name)

    def __setattr__(self, name, value):
        setattr(self._real, name, value)

    def __dir__(self):
        return [name for name in dir(self._real) if hasattr(self, name)] + [*self.__dict__]


class Signals(enum.IntEnum):
    """Signals of Windows; the first two are for processes of one's own console."""

    CTRL_C_EVENT = 0
    CTRL_BREAK_EVENT = 1
    SIGINT = signal.SIGINT
    SIGILL = signal.SIGILL
    SIGABRT = signal.SIGABRT
    SIGFPE = signal.SIGFPE
    SIGSEGV = signal.SIGSEGV
    SIGTERM = signal.SIGTERM
    SIGBREAK = 21


def handle(number, handler):
    if number not in [*Signals][2:]:
        raise ValueError("invalid signal value")
    return signal.signal(number, handler)


kill_on_linux = os.kill


def kill(pid, number):
    """End a process at once, or send Ctrl-C or Ctrl-Break to the group that it leads on this console."""
    if number not in (Signals.CTRL_C_EVENT, Signals.CTRL_BREAK_EVENT):
        kill_on_linux(pid, signal.SIGKILL)
    elif os.getpgid(pid) != pid:
        raise OSError(errno.EINVAL, "The parameter is incorrect")
    elif os.getsid(pid) != os.getsid(0):
        raise OSError(errno.EBADF, "The handle is invalid")
    else:
        os.killpg(pid, Signals.SIGBREAK if number else Signals.SIGINT)


class Popen(subprocess.Popen):
    """A process whose flags and signals are Windows'."""

    def __init__(self, command, creationflags=0, start_new_session=False, preexec_fn=None, pass_fds=(), **more):
        if preexec_fn or pass_fds:
            raise ValueError("preexec_fn and pass_fds are not supported on Windows platforms")
        group = {"process_group": 0} if creationflags & 0x200 else {}
        group = {"start_new_session": True} if creationflags & 0x08000000 else group
        super().__init__([slashes(one) if os.path.exists(one) else one for one in command], **group, **more)

    def send_signal(self, number):
        if self.poll() is None:
            if number == signal.SIGTERM:
                self.terminate()
            elif number in (Signals.CTRL_C_EVENT, Signals.CTRL_BREAK_EVENT):
                kill(self.pid, number)
            else:
                raise ValueError(f"Unsupported signal: {number}")

    def terminate(self):
        super().send_signal(signal.SIGKILL)

    kill = terminate

    def _handle_exitstatus(self, *args, **more):
        super()._handle_exitstatus(*args, **more)
        self.returncode = 1 if self.returncode == -signal.SIGKILL else self.returncode


class Socket(socket.socket):
    """A socket whose SO_REUSEADDR lets a second one listen as well."""

    def setsockopt(self, level, name, *value):
        if name == socket.SO_REUSEADDR:
            super().setsockopt(level, socket.SO_REUSEPORT, *value)
        elif name != ~socket.SO_REUSEADDR:
            super().setsockopt(level, name, *value)


# Paths as text


def slashes(value):
    """Return a path as Linux reads it, from text that Retouch has made."""
    return value.replace("\\", "/") if isinstance(value, str) else value


def backslashes(value):
    return value.replace("/", "\\") if isinstance(value, str) else value


class OsPath(types.ModuleType):
    """os.path, whose results have backslashes."""

    sep = "\\"

    def __getattr__(self, name):
        found = getattr(os.path, name)
        if not isinstance(found, types.FunctionType):
            return found

        def on_windows(*args, **more):
            plain = [[*map(slashes, one)] if isinstance(one, list) else slashes(one) for one in args]
            result = found(*plain, **more)
            return tuple(map(backslashes, result)) if isinstance(result, tuple) else backslashes(result)

        return on_windows


text_on_linux = pathlib.PurePath.__str__


def as_text(path):
    text = text_on_linux(path)
    return backslashes(text) if called_by_us() else text


pathlib.PurePath.__str__ = as_text
if hasattr(pathlib.PurePath, "_parse_args"):  # Python 3.11
    parse_on_linux = pathlib.PurePath._parse_args.__func__
    parts = classmethod(lambda cls, args: parse_on_linux(cls, [*map(slashes, args)]))
    pathlib.PurePath._parse_args = parts
else:
    parse_on_linux = pathlib.PurePath._parse_path.__func__
    pathlib.PurePath._parse_path = classmethod(lambda cls, path: parse_on_linux(cls, slashes(path)))


def taking_backslashes(function):
    return lambda *args, **more: function(*map(slashes, args), **more)


# Files


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


def no_links(*_, **__):
    raise OSError(errno.ENOTSUP, "no links on this file system")


open_on_linux = io.open


def open_on_windows(file, mode="r", buffering=-1, encoding=None, errors=None, newline=None, *more, **others):
    if newline is None and "b" not in mode and mode not in ("r", "rt"):
        newline = "\r\n"
    return open_on_linux(slashes(file), mode, buffering, encoding, errors, newline, *more, **others)


os.link = os.symlink = no_links
for name in ("unlink", "remove", "rename", "replace", "rmdir"):
    setattr(os, name, unless_open(getattr(os, name)))
for name in ("unlink", "remove", "rename", "replace", "rmdir", "stat", "lstat", "open", "mkdir", "scandir", "listdir"):
    setattr(os, name, taking_backslashes(getattr(os, name)))
for name in ("access", "chmod", "utime", "chdir", "truncate", "readlink"):
    setattr(os, name, taking_backslashes(getattr(os, name)))
for name in (
    "abspath",
    "basename",
    "dirname",
    "expanduser",
    "isabs",
    "join",
    "normpath",
    "realpath",
    "relpath",
    "split",
):
    setattr(os.path, name, taking_backslashes(getattr(os.path, name)))
builtins.open = io.open = open_on_windows

# What Retouch's files import

NAMES = dict(Signals.__members__)
path = OsPath("ntpath")
MODULES = {
    "os": OnWindows(os, kill=kill, name="nt", sep="\\", altsep="/", linesep="\r\n", path=path),
    "signal": OnWindows(signal, Signals=Signals, signal=handle, **NAMES),
    "socket": OnWindows(socket, socket=Socket, SO_EXCLUSIVEADDRUSE=~socket.SO_REUSEADDR),
    "subprocess": OnWindows(subprocess, Popen=Popen, CREATE_NEW_PROCESS_GROUP=0x200, CREATE_NO_WINDOW=0x08000000),
    "sys": OnWindows(sys, platform="win32"),
}
import_on_linux = builtins.__import__


def import_on_windows(name, globals=None, locals=None, fromlist=(), level=0):
    top, _, below = name.partition(".")
    if level or not is_ours((globals or {}).get("__file__")):
        return import_on_linux(name, globals, locals, fromlist, level)
    if top in NO_MODULES:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)
    found = import_on_linux(name, globals, locals, fromlist, level)
    if name == "os.path" and fromlist:
        return path
    if top in UNIX_ONLY and not (below and fromlist):
        return MODULES.setdefault(top, OnWindows(import_on_linux(top)))
    return found


builtins.__import__ = import_on_windows
signal.signal(Signals.SIGBREAK, lambda *_: os._exit(1))  # until a command handles it
multiprocessing.set_start_method("spawn")


def lightning_too():
    """Return a callback; from now on Lightning, which looks at the platform, handles no SIGUSR1 either."""
    from lightning.pytorch import Callback
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

    _SignalConnector.register_signal_handlers = lambda connector: None
    return Callback()
