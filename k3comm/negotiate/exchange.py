"""How ranks talk while they negotiate: two collectives, both with fixed sizes.

`Exchange` is all that a negotiation needs, so engines whose groups are not ProcessGroups, and tests, bring their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from k3comm.buffers.symmetric import Exchange
from k3comm.errors import CommunicationTimeoutError, InputError
from k3comm.negotiate.decide import MAX_RANKS

__all__ = ["Exchange", "GroupExchange", "SoloExchange", "check_size"]


class SoloExchange:
    """One rank."""

    rank = 0
    size = 1

    def min(self, values: Sequence[int]) -> list[int]:
        """The values."""
        return list(values)

    def gather(self, payload: bytes) -> list[bytes]:
        """The payload."""
        return [payload]


class GroupExchange:
    """Over a torch.distributed group: its CPU side where there is one, else the device.

    Args:
        group: the group; this process must be a member.
        deadline: seconds for each collective on CPU.
    """

    def __init__(self, group: dist.ProcessGroup, deadline: float) -> None:
        self._group = group
        on_cpu = any(kind.type == "cpu" for kind in group._device_types)
        self._device = torch.device("cpu" if on_cpu else "cuda")
        self._deadline = deadline
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def min(self, values: Sequence[int]) -> list[int]:
        """See `Exchange`."""
        tensor = torch.tensor(values, dtype=torch.int64, device=self._device)
        self._wait(lambda: dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group, async_op=True))
        return [int(value) for value in tensor.tolist()]

    def gather(self, payload: bytes) -> list[bytes]:
        """See `Exchange`."""
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self._device)
        all_ranks = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(lambda: dist.all_gather(all_ranks, mine, group=self._group, async_op=True))
        return [bytes(one.tolist()) for one in all_ranks]

    def _wait(self, start: Callable[[], Any]) -> None:
        try:
            start().wait(timedelta(seconds=self._deadline))
        except RuntimeError as error:
            raise CommunicationTimeoutError(
                f"negotiation of rank {self.rank} of {self.size}: a vote did not finish within {self._deadline:g} s "
                f"(settings.vote_deadline), or a peer is gone: {error}"
            ) from error


def check_size(size: int) -> None:
    """Refuses more than MAX_RANKS ranks with InputError; every rank sees the same size, so all refuse."""
    if not 1 <= size <= MAX_RANKS:
        raise InputError(f"group: {size} ranks; accepted are 1 to {MAX_RANKS}")
