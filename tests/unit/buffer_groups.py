"""Groups for the tests of the buffers: a thread a rank, one rank after the other, or processes; and what they hold."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch.distributed as dist

from k3comm.buffers.host import HostMemory
from k3comm.buffers.symmetric import SymmetricMemory
from k3comm.negotiate.exchange import GroupExchange
from k3comm.testing import ThreadExchange, thread_exchanges

T = TypeVar("T")


def in_threads(world_size: int, fn: Callable[[ThreadExchange], T], *, deadline: float = 10.0) -> list[T]:
    """What fn returned on each rank; the first error otherwise."""
    with ThreadPoolExecutor(world_size) as threads:
        return list(threads.map(fn, thread_exchanges(world_size, deadline=deadline)))


def mapped(
    world_size: int, nbytes: int, make: Callable[[int, int], SymmetricMemory] = HostMemory
) -> list[SymmetricMemory]:
    """Every rank's memory, mapped, stage by stage in this thread."""
    memories = [make(rank, world_size) for rank in range(world_size)]
    for memory in memories:
        memory.allocate(nbytes)
    handles = [memory.export() for memory in memories]
    for memory in memories:
        memory.import_(handles)
    for memory in memories:
        memory.map()
    return memories


def over_gloo(deadline: float = 30) -> GroupExchange:
    """The exchange of the process group that `run_ranks` made."""
    group = dist.group.WORLD
    assert group is not None
    return GroupExchange(group, deadline)


def descriptors() -> set[str]:
    """What this process has open, less the listing itself."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:
            continue
    return found


def mappings() -> int:
    """How many blocks of host memory this process maps, less those that nobody refers to."""
    gc.collect()
    with open("/proc/self/maps", encoding="utf-8") as lines:
        return sum("/memfd:k3comm" in line for line in lines)
