"""How passes through a few layers are timed: by the host's clock on CPU, by events around CUDA graph replays on a GPU.

A pass is one call for each of the layers, whose weights differ, so that no cache holds the next one's. In a chained
pass the calls follow each other, each result the next call's residual. In an isolated pass an ordinary kernel that
writes more than the last-level cache holds comes before each call; on a GPU its own time, of a graph without the calls,
is taken off again. Times are microseconds a call.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Protocol

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

Step = Callable[[Tensor, int], Tensor]
"""(residual [m, H], layer) -> [m, H]."""
HOST_CACHE_BYTES = 64 << 20
"""What an isolated call on CPU is preceded by a write of: the last-level cache of one socket of today's servers."""
WARM_UP = 3
"""Passes before a capture: libraries choose and allocate in the first ones."""
LEAST_US = 0.001
"""The shortest time that is reported: an isolated call is a difference, which noise can make negative."""


class Pass(Protocol):
    """One pass through the layers."""

    passes: int
    """How often it was run or replayed since it was made."""

    def sample(self, replays: int) -> float:
        """The median microseconds of a call over `replays` passes, on this rank."""


@attrs.define(eq=False)
class HostPass:
    """Eager calls by the host's clock."""

    step: Step
    residual: Tensor
    layers: int
    between: Callable[[], None] | None = None
    passes: int = 0

    def sample(self, replays: int) -> float:
        """See `Pass`. What comes between calls is not timed."""
        return statistics.median(self._once() for _ in range(replays)) / self.layers * 1e6

    def _once(self) -> float:
        self.passes += 1
        x, spent = self.residual, 0.0
        for layer in range(self.layers):
            if self.between is not None:
                self.between()
            started = time.perf_counter()
            x = self.step(x, layer)
            spent += time.perf_counter() - started
        return spent


class GraphPass:
    """A CUDA graph of the calls. Making one is collective: it runs the calls a few times first.

    Attributes:
        out: [m, H], what the last layer of the last replay gave; None for a pass without calls.
        calls: how many passes through the calls' Python code it took to make one: warm-up and capture.
    """

    calls = WARM_UP + 1

    def __init__(
        self, step: Step | None, residual: Tensor, layers: int, between: Callable[[], None] | None = None
    ) -> None:
        self.passes = 0
        self._layers = layers
        # On the current stream: a communicator's calls have one stream order, and nothing here needs another.
        for _ in range(WARM_UP):
            _run(step, residual, layers, between)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.out = _run(step, residual, layers, between)

    def replay(self) -> Tensor | None:
        """Replays once and waits."""
        self.passes += 1
        self._graph.replay()
        torch.cuda.synchronize()
        return self.out

    def sample(self, replays: int) -> float:
        """See `Pass`. All replays are queued before any is waited for, so the host's launches cost nothing."""
        self.passes += replays
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
        marks[0].record()
        for mark in marks[1:]:
            self._graph.replay()
            mark.record()
        torch.cuda.synchronize()
        spent: list[float] = [before.elapsed_time(after) for before, after in pairwise(marks)]
        return statistics.median(spent) / self._layers * 1e3


def _run(step: Step | None, residual: Tensor, layers: int, between: Callable[[], None] | None) -> Tensor | None:
    x, out = residual, None
    for layer in range(layers):
        if between is not None:
            between()
        if step is not None:
            x = out = step(x, layer)
    return out


def cache_filler(device: torch.device) -> Callable[[], None]:
    """An ordinary kernel, not a memset, that leaves nothing of ours in the last-level cache."""
    nbytes = HOST_CACHE_BYTES
    if device.type == "cuda":
        nbytes = 2 * int(torch.cuda.get_device_properties(device).L2_cache_size)
    scratch = torch.zeros(nbytes // 4, dtype=torch.float32, device=device)

    def fill() -> None:
        scratch.add_(1.0)

    return fill


@attrs.frozen
class Ranks:
    """What the ranks of a run tell each other, over the CPU side of the group where it has one."""

    group: dist.ProcessGroup

    @property
    def rank(self) -> int:
        """This rank."""
        return dist.get_rank(self.group)

    @property
    def size(self) -> int:
        """W."""
        return dist.get_world_size(self.group)

    def largest(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over the ranks."""
        tensor = torch.tensor(values, dtype=torch.int64, device=self._device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return [int(value) for value in tensor.tolist()]

    def slowest(self, us: Sequence[float]) -> tuple[float, ...]:
        """The slowest rank's microseconds, to a picosecond: the same numbers on every rank."""
        return tuple(max(LEAST_US, ps / 1e6) for ps in self.largest([round(one * 1e6) for one in us]))

    def first_bad(self, bad: Sequence[bool]) -> list[int]:
        """For each finding the first rank that has it; -1 if none has."""
        found = self.largest([self.size - self.rank if one else 0 for one in bad])
        return [self.size - one if one else -1 for one in found]

    def alike(self, digest: int) -> bool:
        """Whether all ranks hold the same number."""
        most, negated = self.largest([digest, -digest])
        return most == -negated

    def from_first(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        payload = text.encode()
        (nbytes,) = self.largest([len(payload) if self.rank == 0 else 0])
        tensor = torch.zeros(max(1, nbytes), dtype=torch.uint8)
        if self.rank == 0 and payload:
            tensor[:nbytes] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        tensor = tensor.to(self._device)
        dist.broadcast(tensor, group=self.group, group_src=0)
        return bytes(tensor[:nbytes].tolist()).decode()

    def meet(self) -> None:
        """Nobody goes on before all are here."""
        self.largest([0])

    @property
    def _device(self) -> torch.device:
        on_cpu = any(kind.type == "cpu" for kind in self.group._device_types)
        return torch.device("cpu" if on_cpu else "cuda")
