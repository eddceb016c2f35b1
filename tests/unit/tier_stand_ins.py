"""What the tests of single tiers stand on: a fake of torch's shared memory, and ranks that are threads.

A tier is prepared from a context, called by hand and judged by integers, whose sums are exact in any order. Where its
kernels run on the emulator, all ranks meet at each launch.
"""

from __future__ import annotations

import ctypes
import shutil
import threading
from collections.abc import Callable, Sequence
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from k3comm import LatentMoESpec, ParallelLayout, Settings, Tier
from k3comm.buffers.cuda import CudaMemory, Torch
from k3comm.buffers.symmetric import SymmetricMemory
from k3comm.kernels import reference
from k3comm.operations import Proposal
from k3comm.testing import ThreadExchange
from k3comm.tiers.interface import Plan, TailCall, TailWeights, TierContext

BF16, ON_CPU = torch.bfloat16, torch.device("cpu")
LANES = 2
NEEDS_GXX = pytest.mark.skipif(shutil.which("g++") is None, reason="the emulator is built by g++")


# torch's shared memory


class Machine:
    """W ranks' torch modules. Each allocates alone; a rendezvous waits for all."""

    def __init__(self, world_size: int, *, multicast: bool = False, deadline: float = 10.0) -> None:
        self.world_size = world_size
        self.multicast = multicast
        self.rendezvous = 0
        self.called: list[tuple[str, int]] = []
        self.failure: dict[int, Exception] = {}
        self.none_on: set[int] = set()
        self.offered: dict[int, list[Tensor]] = {rank: [] for rank in range(world_size)}
        self.barrier = threading.Barrier(world_size, timeout=deadline)
        self.torches = [Torch(lambda rank=rank: Module(self, rank), "2.11.0+cu130") for rank in range(world_size)]

    def memory(self, rank: int) -> CudaMemory:
        return CudaMemory(rank, self.world_size, group_name="7", device=ON_CPU, torch_api=self.torches[rank])

    def all_reduce_(self, name: str, x: Tensor) -> None:
        """What torch's operators do, on the block that x is a view of."""
        assert x.is_contiguous()
        assert x.numel() * x.element_size() % 16 == x.storage_offset() * x.element_size() % 16 == 0
        start = x.untyped_storage().data_ptr()
        (rank, number) = next(
            (rank, number)
            for rank, tensors in self.offered.items()
            for number, tensor in enumerate(tensors)
            if tensor.data_ptr() == start
        )
        if rank == 0:
            self.called.append((name, x.numel()))
        first = x.storage_offset() * x.element_size()
        views = [
            self.offered[peer][number][first : first + x.numel() * x.element_size()].view(x.dtype)
            for peer in range(self.world_size)
        ]
        self.barrier.wait()
        total = torch.stack(views).float().sum(0)
        self.barrier.wait()
        x.copy_(total)


class Module:
    """`torch.distributed._symmetric_memory`, as far as it is used, on one rank."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self._machine, self._rank = machine, rank

    def get_backend(self, device: torch.device) -> str | None:
        return "CUDA"

    def empty(self, *size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.full(size, 0xAA, dtype=dtype, device=device)  # not zeros: torch promises none

    def rendezvous(self, tensor: Tensor, group: str) -> Handle | None:
        machine = self._machine
        assert group == "7"
        if self._rank in machine.failure:
            raise machine.failure[self._rank]
        machine.offered[self._rank].append(tensor)
        machine.barrier.wait()
        machine.rendezvous += self._rank == 0
        if self._rank in machine.none_on:
            return None
        return Handle(machine, self._rank, len(machine.offered[self._rank]) - 1)


@attrs.define
class Handle:
    machine: Machine
    rank: int
    number: int

    @property
    def world_size(self) -> int:
        return self.machine.world_size

    @property
    def multicast_ptr(self) -> int:
        return 0x7000_0000 if self.machine.multicast else 0

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.machine.offered[rank][self.number].view(dtype).view(*sizes)


# A tier by hand


def proposal_of(
    spec: LatentMoESpec, *, world_size: int, device: str = "cuda", settings: dict[str, Any] | None = None, **given: Any
) -> Proposal:
    """What some ranks vote on. `given`: `windows`, and what differs from `spec`."""
    windows = given.pop("windows", None)
    return Proposal(
        spec=attrs.evolve(spec, **given),
        layout=ParallelLayout(tp=world_size),
        settings=Settings(**(settings or {})),
        world_size=world_size,
        lanes=LANES,
        device=device,
        windows=windows,
    )


def context_of(proposal: Proposal, memory: SymmetricMemory, **changes: Any) -> TierContext:
    given: dict[str, Any] = {
        "spec": proposal.spec,
        "settings": proposal.settings,
        "group": None,
        "rank": memory.rank,
        "world_size": proposal.world_size,
        "device": ON_CPU,
        "dtype": BF16,
        "lanes": proposal.lanes,
        "memory": memory,
        "proposal": proposal,
    }
    return TierContext(**(given | changes))


def plan_of(tier: Tier, rows: int) -> Plan:
    return Plan(
        num_tokens=rows, graph=False, decode=False, tier=tier, forced=True, output="full", next_norm=False,
        communicator=("test", 0),
    )  # fmt: skip


def weights_of(case: reference.Case | None = None, **changes: Any) -> TailWeights:
    """Of a case; without one there are none."""
    given: dict[str, Any] = {
        "norm_weight": None if case is None else case.norm_weight,
        "up_weight": None if case is None else case.up_weight,
        "up_bias": None if case is None else case.up_bias,
        "routed_scale": 1.0 if case is None else case.routed_scale,
        "project": None,
        "precise": False,
        "sharded": False,
    }
    return TailWeights(**(given | changes))


def call_of(tier: Tier, rows: int, **given: Any) -> TailCall:
    return TailCall(**({"residual": None, "plan": plan_of(tier, rows)} | given))


def exact_case(
    world_size: int, hidden: int, latent: int, rows: int, seed: int = 0, **kind: Any
) -> tuple[reference.Case, Tensor]:
    """A case in integers, and its one right result."""
    case = reference.integer_case(world_size, rows, hidden, latent, dtype=BF16, seed=seed, **kind)
    return case, reference.round_once(case.truth(), BF16)


@attrs.frozen
class Rank:
    """A prepared tier in a thread."""

    tier: Any
    context: TierContext
    exchange: ThreadExchange

    @property
    def number(self) -> int:
        return self.exchange.rank

    def run(self, case: reference.Case, rows: int, **changes: Any) -> Tensor:
        """A call with the first rows of a case."""
        given = {
            "routed": case.routed[self.number, :rows],
            "shared": case.shared[self.number, :rows],
            "residual": None if case.residual is None else case.residual[:rows],
            "weights": weights_of(case),
        }
        return self.tier.run(call_of(self.tier.name, rows, **(given | changes)))


class Room:
    """The emulator for ranks that are threads: every launch is one of all of them, at once.

    Args:
        library: the kernels, built by an emulator; of the kind that a launch names.
        arguments: the structure that each kernel takes.
    """

    def __init__(
        self, library: Callable[[torch.dtype | None], Any], world_size: int, arguments: type[ctypes.Structure]
    ) -> None:
        self._library, self._size = library, ctypes.sizeof(arguments)
        self._barrier = threading.Barrier(world_size, timeout=60)
        self._steps: list[tuple[ctypes.Structure, bytes] | None] = [None] * world_size
        self._ended = 0
        self.launched = 0

    def launch(self, rank: int, kernel: ctypes.Structure, packed: bytes, kind: torch.dtype | None = None) -> None:
        """Runs the kernel that every rank has come to."""
        self._steps[rank] = kernel, packed
        self._barrier.wait()
        if rank == 0:
            steps = [one for one in self._steps if one is not None]
            assert all(bytes(one) == bytes(kernel) for one, _ in steps)
            self.launched += 1
            library, together = self._library(kind), b"".join(mine for _, mine in steps)
            kernels = (type(kernel) * 1)(kernel)
            self._ended = library.emulate(len(steps), 1, kernels, together, self._size, self.launched, 4, -1)
            library.land()  # the next kernel may be another library's, and memory may be gone by then
        self._barrier.wait()
        assert self._ended == 0, "a trap, or nobody got any further"
