"""Shared memory that fails when it is told to, and a group of threads to negotiate it with."""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter
from collections.abc import Sequence

import attrs
import torch
from torch._C._distributed_c10d import Store

from k3comm.buffers.host import HostMemory
from k3comm.buffers.symmetric import STAGES, SymmetricMemory
from k3comm.errors import CommunicationTimeoutError, InputError


def _made_to_fail() -> Exception:
    return OSError(errno.ENOMEM, "made to fail")


def _stage(instance: object, attribute: attrs.Attribute[str], value: object) -> None:
    if value not in STAGES:
        raise InputError(f"Fault.stage: {value!r} given; accepted are {', '.join(STAGES)}")


@attrs.frozen(kw_only=True)
class Fault:
    """What goes wrong, where and when.

    Attributes:
        rank: on which rank; None: on each.
        stage: in which of "allocate", "export", "exchange", "import", "map". A stage fails after its work is done, so
            there is something to clean up. "exchange": the rank's handle reaches its peers garbled.
        nth: in the n-th call of that stage on that rank, from 1; None: in every call.
        error: what is raised; None: nothing.
        delay: seconds that the stage sleeps first.
    """

    rank: int | None = None
    stage: str = attrs.field(validator=_stage)
    nth: int | None = 1
    error: Exception | None = attrs.field(factory=_made_to_fail)
    delay: float = 0.0


class FakeMachine:
    """Where fake memory comes from: it has a plan of faults, and it counts.

    The memory itself is host memory, so ranks may be threads or processes of one host. A machine counts for the process
    that made it.

    Args:
        faults: what goes wrong.
        slots: how many blocks a rank may have mapped at once, as a switch has a limit of multicast objects; None: any.

    Attributes:
        calls: number of calls by (rank, stage); "release" counts too.
        capturing: set it to pretend that a CUDA graph is being captured: then every stage raises AssertionError.
    """

    def __init__(self, *faults: Fault, slots: int | None = None) -> None:
        self.calls: Counter[tuple[int, str]] = Counter()
        self.capturing = False
        self._faults = faults
        self._slots = slots
        self._lock = threading.Lock()
        self._alive: Counter[int] = Counter()
        self._mapped: Counter[int] = Counter()

    def memory(self, rank: int, world_size: int) -> FakeMemory:
        """New memory for one rank, in the way of `HostMemory`."""
        return FakeMemory(self, rank, world_size)

    @property
    def live(self) -> int:
        """Blocks that were allocated, also in vain, and are not released."""
        return self._alive.total()

    @property
    def mapped(self) -> int:
        """Blocks that are mapped: as many slots are in use, over all ranks."""
        return self._mapped.total()

    def _count(self, rank: int, stage: str) -> Fault | None:
        """Counts a call. The fault that is due in it."""
        with self._lock:
            self.calls[rank, stage] += 1
            if self.capturing and stage != "release":
                raise AssertionError(f"rank {rank}: {stage} while a graph is captured")
            number = self.calls[rank, stage]
        for fault in self._faults:
            if fault.stage == stage and fault.rank in (None, rank) and fault.nth in (None, number):
                return fault
        return None

    def _change(self, counter: Counter[int], rank: int, by: int) -> int:
        with self._lock:
            counter[rank] += by
            return counter[rank]


class FakeMemory(SymmetricMemory):
    """`SymmetricMemory` on a `FakeMachine`, which makes it."""

    def __init__(self, machine: FakeMachine, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self._machine = machine
        self._inner = HostMemory(rank, world_size)
        self._alive = self._mapped = False

    @property
    def nbytes(self) -> int:
        """See `SymmetricMemory`."""
        return self._inner.nbytes

    def allocate(self, nbytes: int) -> None:
        """See `SymmetricMemory`."""
        fault = self._enter("allocate")
        self._inner.allocate(nbytes)
        self._alive = True
        self._machine._change(self._machine._alive, self.rank, 1)
        self._leave(fault)

    def export(self) -> bytes:
        """See `SymmetricMemory`."""
        fault = self._enter("export")
        handle = self._inner.export()
        self._leave(fault)
        garbled = self._enter("exchange") is not None
        return bytes(255 - byte for byte in handle) if garbled else handle

    def import_(self, handles: Sequence[bytes]) -> None:
        """See `SymmetricMemory`."""
        fault = self._enter("import")
        self._inner.import_(handles)
        self._leave(fault)

    def map(self) -> None:
        """See `SymmetricMemory`."""
        fault = self._enter("map")
        self._inner.map()
        self._mapped = True
        used = self._machine._change(self._machine._mapped, self.rank, 1)
        if self._machine._slots is not None and used > self._machine._slots:
            raise OSError(errno.ENOSPC, f"all {self._machine._slots} slots are in use")
        self._leave(fault)

    def block(self, rank: int) -> torch.Tensor:
        """See `SymmetricMemory`."""
        return self._inner.block(rank)

    def release(self) -> None:
        """See `SymmetricMemory`."""
        self._machine._count(self.rank, "release")
        self._inner.release()
        if self._alive:
            self._machine._change(self._machine._alive, self.rank, -1)
        if self._mapped:
            self._machine._change(self._machine._mapped, self.rank, -1)
        self._alive = self._mapped = False

    def _enter(self, stage: str) -> Fault | None:
        fault = self._machine._count(self.rank, stage)
        if fault is not None and fault.delay:
            time.sleep(fault.delay)
        return fault

    def _leave(self, fault: Fault | None) -> None:
        if fault is not None and fault.error is not None:
            raise fault.error


class ThreadExchange:
    """`k3comm.Exchange` among threads of one process; made by `thread_exchanges`."""

    def __init__(self, rank: int, payloads: list[bytes], barrier: threading.Barrier) -> None:
        self.rank = rank
        self.size = len(payloads)
        self.store: Store | None = None
        self.collectives = 0
        self._payloads = payloads
        self._barrier = barrier

    def min(self, values: Sequence[int]) -> list[int]:
        """See `Exchange`."""
        rows = [torch.frombuffer(bytearray(row), dtype=torch.int64) for row in self.gather(_int64(values))]
        return [int(value) for value in torch.stack(rows).amin(0)]

    def gather(self, payload: bytes) -> list[bytes]:
        """See `Exchange`.

        Raises:
            CommunicationTimeoutError: a rank did not come in time.
            InputError: the payloads differ in length, which ends a process with some backends.
        """
        self.collectives += 1
        self._payloads[self.rank] = payload
        try:
            self._barrier.wait()
            gathered = list(self._payloads)
            self._barrier.wait()  # nobody writes again before all have read
        except threading.BrokenBarrierError:
            raise CommunicationTimeoutError(f"rank {self.rank} of {self.size}: a peer did not come in time") from None
        if len({len(one) for one in gathered}) > 1:
            raise InputError(f"payloads of {[len(one) for one in gathered]} bytes given; accepted are equal lengths")
        return gathered


def thread_exchanges(world_size: int, *, deadline: float = 10.0) -> list[ThreadExchange]:
    """One exchange a thread, in rank order.

    Args:
        world_size: ranks W.
        deadline: seconds that a collective waits for its last rank.
    """
    barrier = threading.Barrier(world_size, timeout=deadline)
    payloads = [b""] * world_size
    return [ThreadExchange(rank, payloads, barrier) for rank in range(world_size)]


def _int64(values: Sequence[int]) -> bytes:
    return b"".join(value.to_bytes(8, "little", signed=True) for value in values)
