"""The processes of a run end together: when one fails, the others end within seconds, and one line says why."""

import contextlib
import faulthandler
import os
import secrets
import selectors
import socket
import struct
import threading
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from callbacks.signals import stop
from datamodules.errors import UserError

if TYPE_CHECKING:
    import lightning.pytorch as L

# Seconds in which a process says who it is.
SECONDS_TO_MEET = 60.0
# Seconds to end in, once a process has failed: what waits in a library for a process that is gone does not return.
TIME_TO_END = 10.0
# Seconds in which an error may turn out to be what another process's end has caused.
ECHO = 3.0
# How long processes wait for a slow one, in a picture or on a disk. None waits for one that has failed.
PATIENCE = timedelta(days=1)
# What a process says as its last word, and what the first process passes on: who it was, and the word.
DONE, FAILED, LOST = b"D", b"F", b"L"
NEWS = struct.Struct("!Ic")
RANK = struct.Struct("!I")


class Peers:
    """What this process knows of the others, each of which has a connection to the first one.

    A process that fails says so. The connections of one that is killed are closed by its system, those to a machine
    that is gone by ours. The first process passes on the first such news; then all end.

    Attributes:
        group: a process group on the CPU, for what need not wait for devices, or may take long.
    """

    def __init__(self) -> None:
        self.group: Any = None
        self._runs = 0
        self._reset()
        os.register_at_fork(after_in_child=self._forget)

    def _reset(self) -> None:
        self._rank = 0
        self._mine: socket.socket | None = None  # to the first process
        self._all: list[socket.socket] = []  # in the first process, to each
        self._relay: threading.Thread | None = None
        self._told = threading.Event()
        self._first, self._word = 0, DONE  # who ended first, and how
        self._ends = threading.Event()  # this process is about to, by itself

    def follow(self, trainer: "L.Trainer") -> None:
        """Be connected as soon as this trainer's processes form a group."""
        strategy: Any = trainer.strategy
        set_up = strategy.setup_environment

        def set_up_and_connect() -> None:
            set_up()
            if trainer.world_size > 1 and self._mine is None:
                self._connect()

        strategy.setup_environment = set_up_and_connect

    def _connect(self) -> None:
        from torch import distributed

        self._rank, processes = distributed.get_rank(), distributed.get_world_size()
        store = distributed.distributed_c10d._get_default_store()
        key = f"retouch/{self._runs}"
        self._runs += 1
        if self._rank == 0:
            ours, self._mine = socket.socketpair()
            self._all = [ours, *_accept(processes - 1, lambda address: store.set(key, address))]
            self._relay = threading.Thread(target=_pass_on, args=(self._all,), daemon=True, name="peers")
            self._relay.start()
        else:
            try:
                port, token = store.get(key).decode().split()
            except distributed.DistNetworkError as error:
                raise UserError("the first process of this run has ended: its own line says why") from error
            self._mine = socket.create_connection((os.environ["MASTER_ADDR"], int(port)), SECONDS_TO_MEET)
            self._mine.sendall(bytes.fromhex(token) + RANK.pack(self._rank))
            _keep_alive(self._mine)
        threading.Thread(target=self._listen, args=(self._mine,), daemon=True, name="peers").start()
        for thread in threading.enumerate():
            if thread.name == "child-process-observer":  # Lightning's: kills the first process before it says why
                thread._child_processes = []  # type: ignore[attr-defined]
        if self.group is None:
            self.group = distributed.new_group(backend="gloo", timeout=PATIENCE)

    def _listen(self, connection: socket.socket) -> None:
        """A thread of its own: end this process when one has failed."""
        news = _receive(connection, NEWS.size)
        first, word = NEWS.unpack(news) if len(news) == NEWS.size else (0, LOST)
        if word == DONE or connection is not self._mine:
            return
        self._first, self._word = first, word
        self._told.set()
        # By a thread that needs no Python, which a library may hold up. What has failed may have something to save.
        limit = 2 * TIME_TO_END if self._ends.is_set() else TIME_TO_END
        faulthandler.dump_traceback_later(limit, exit=True, file=os.open(os.devnull, os.O_WRONLY))
        if self._ends.is_set():
            return
        stop.abandon()
        if not self._ends.wait(TIME_TO_END - 1) and (line := self.lost()):
            os.write(2, f"error: {line}\n".encode())

    @property
    def connected(self) -> bool:
        """Whether there are others, and this process has not parted from them."""
        return self._mine is not None

    def fail(self, error: BaseException) -> bool:
        """Tell the others; whether this process was the first to fail, which says why."""
        if self._mine is None:
            return True
        if isinstance(error, RuntimeError):
            self._told.wait(ECHO)
        self._ends.set()
        if not self._told.is_set():
            with contextlib.suppress(OSError):
                self._mine.sendall(FAILED)
            self._told.wait(ECHO)
        return not self._told.is_set() or (self._word == FAILED and self._first == self._rank)

    def lost(self) -> str | None:
        """The line on a process that ended without a word, if it is this one's to say."""
        if self._word != LOST or self._rank != (1 if self._first == 0 else 0):
            return None
        return (
            f"process {self._first} of this run is gone: it was killed, as by a system that is out of memory, or its "
            "machine is gone; start again, with ckpt_path=last from the last saved step"
        )

    def part(self) -> None:
        """This process needs the others no longer; if it is the first one, none needs another."""
        mine, self._mine = self._mine, None  # from now on news are none
        if mine is None:
            return
        with contextlib.suppress(OSError):
            mine.sendall(DONE)
        if self._relay is not None:
            self._relay.join()
        with contextlib.suppress(OSError):
            mine.shutdown(socket.SHUT_RDWR)  # wakes the thread that listens
        _close(mine, *self._all)
        self._reset()

    def _forget(self) -> None:
        """In a forked data worker, which would keep the connections open after its process was killed."""
        _close(*([] if self._mine is None else [self._mine]), *self._all)
        self._reset()


def _accept(count: int, publish: Any) -> list[socket.socket]:
    """The connections of so many processes, in the order of their ranks, by an address that `publish` tells them."""
    dual = socket.has_dualstack_ipv6()
    family, token = socket.AF_INET6 if dual else socket.AF_INET, secrets.token_bytes(16)
    accepted: dict[int, socket.socket] = {}
    with socket.create_server(("", 0), family=family, dualstack_ipv6=dual) as server:
        publish(f"{server.getsockname()[1]} {token.hex()}")
        server.settimeout(SECONDS_TO_MEET)
        while len(accepted) < count:
            try:
                connection, _ = server.accept()
            except TimeoutError:
                lacking = ", ".join(str(rank) for rank in range(1, count + 1) if rank not in accepted)
                raise UserError(f"process {lacking} of this run did not come in {SECONDS_TO_MEET:.0f} s") from None
            connection.settimeout(SECONDS_TO_MEET)
            said = _receive(connection, len(token) + RANK.size)
            if said.startswith(token):  # else it is a stranger's
                _keep_alive(connection)
                accepted[RANK.unpack(said[len(token) :])[0]] = connection
    return [accepted[rank] for rank in sorted(accepted)]


def _pass_on(connections: list[socket.socket]) -> None:
    """A thread of the first process: tell all which process failed or was lost first, or that the first one is done."""
    with selectors.DefaultSelector() as selector:
        for rank, connection in enumerate(connections):
            selector.register(connection, selectors.EVENT_READ, (rank, connection))
        while True:
            for key, _ in selector.select():
                rank, connection = key.data
                word = _receive(connection, 1) or LOST
                selector.unregister(connection)
                if word == DONE and rank > 0:
                    continue
                for other in connections:
                    with contextlib.suppress(OSError):
                        other.sendall(NEWS.pack(rank, word))
                return


def _close(*connections: socket.socket) -> None:
    for connection in connections:
        connection.close()


def _receive(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer where the other end is gone."""
    try:
        return connection.recv(size, socket.MSG_WAITALL)
    except OSError:
        return b""


def _keep_alive(connection: socket.socket) -> None:
    """Let the system notice within 15 seconds that the other machine is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in {"TCP_KEEPIDLE": 6, "TCP_KEEPINTVL": 3, "TCP_KEEPCNT": 3}.items():
        if hasattr(socket, option):  # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


# A process has its peers as it has its signals.
peers = Peers()
