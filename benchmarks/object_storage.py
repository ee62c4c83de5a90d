"""Shards that many GPUs stream from object storage, simulated: nothing is sent, and nothing waits.

Time goes in steps of 2 ms. Each thread of each process reads one shard after another, each by one request; its first
byte takes a random time, and then the connections share the storage's bandwidth, none having more than its own. What
arrives fills the thread's shuffle buffer first, then batches, of which two are kept ahead. A step begins when every
process has its batch. What a machine needs to take in what arrives is not counted.
"""

from dataclasses import asdict, dataclass

import numpy as np

TICK = 0.002
# Batches that a thread has ready, and the one that it makes.
AHEAD = 3


@dataclass(frozen=True)
class Storage:
    """The speed of a store.

    Attributes:
        first_byte: seconds, on average; exponentially distributed.
        connection, total: bytes a second, of one connection and of all.
    """

    first_byte: float
    connection: float
    total: float


@dataclass(frozen=True)
class Reading:
    """The access to a store.

    Attributes:
        clients, threads: processes, and connections of each.
        batch: samples of each process in a step.
        sample, shard: bytes.
        shuffle_buffer: samples of each thread.
    """

    clients: int
    threads: int
    batch: int
    sample: float
    shard: float
    shuffle_buffer: int


@dataclass(frozen=True)
class Outcome:
    """The result of a simulation.

    Attributes:
        first: seconds until the first step begins.
        rate: samples a second, of all processes, from there on.
        possible: what the storage would give to whom takes all.
        waiting: share of that time in which a step could not begin.
        requests: a second.
    """

    first: float
    rate: float
    possible: float
    waiting: float
    requests: float

    def asdict(self) -> dict[str, float]:
        """Rounded, for a table."""
        return {name: round(value, 4) for name, value in asdict(self).items()}


def simulate(storage: Storage, reading: Reading, step: float, seconds: float) -> Outcome:
    """Training with steps of `step` seconds, for some seconds after its first batch."""
    chance = np.random.default_rng(0)
    shape = reading.clients, reading.threads
    most = reading.shuffle_buffer + AHEAD * reading.batch
    silent = chance.exponential(storage.first_byte, shape)  # seconds to the first byte
    left = np.full(shape, reading.shard)
    held = np.zeros(shape)  # samples
    now, free, waited, first = 0.0, 0.0, 0.0, None
    steps = requests = 0
    while first is None or now < first + seconds:
        reads = (silent <= 0) & (held < most)
        rate = min(storage.connection, storage.total / max(1, reads.sum()))
        got = np.where(reads, np.minimum(np.minimum(rate * TICK, left), (most - held) * reading.sample), 0)
        silent, left, held, now = silent - TICK, left - got, held + got / reading.sample, now + TICK
        done = left < 1
        requests += int(done.sum())
        left[done] = reading.shard
        silent[done] = chance.exponential(storage.first_byte, done.sum())
        turn = steps % reading.threads  # threads take turns
        if now < free:
            continue
        if (held[:, turn] >= reading.shuffle_buffer + reading.batch - 1e-6).all():
            held[:, turn] -= reading.batch
            first = now if first is None else first
            steps, free = steps + 1, max(free, now - TICK) + step  # it was ready within the last tick
        elif first is not None:
            waited += TICK
    assert first is not None
    connections = reading.clients * reading.threads
    return Outcome(
        first=first,
        rate=(steps - 1) * reading.clients * reading.batch / seconds,
        possible=min(connections * storage.connection, storage.total) / reading.sample,
        waiting=waited / seconds,
        requests=requests / now,
    )
