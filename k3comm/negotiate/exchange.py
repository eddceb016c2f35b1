"""How ranks talk while they negotiate: two collectives, both with fixed sizes.

`Exchange` is all that a negotiation needs, so engines whose groups are not ProcessGroups, and tests, bring their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, Store

from k3comm.buffers.symmetric import Exchange
from k3comm.errors import InputError
from k3comm.negotiate.decide import MAX_RANKS, name_ranks
from k3comm.tiers.waiting import POLL, finished, plain

__all__ = ["Exchange", "GroupExchange", "SoloExchange", "check_size", "who_says"]

TEXT_BYTES = 512
"""Bytes with which a rank says what went wrong there; the rest is cut off."""

SLACK = 2.0
"""Seconds by which an operation outlasts its deadline. A gloo operation that times out closes the connections of its
group, so peers would meet that rather than find out who is missing; and no process hangs longer at its exit."""


class SoloExchange:
    """One rank."""

    rank = 0
    size = 1
    store: Store | None = None

    def min(self, values: Sequence[int]) -> list[int]:
        """The values."""
        return list(values)

    def gather(self, payload: bytes) -> list[bytes]:
        """The payload."""
        return [payload]


class WaitEnded(RuntimeError):
    """A collective of a group failed: a connection is lost."""


class Late(WaitEnded):
    """A collective of a group did not finish within its deadline."""


class GroupExchange:
    """Over a torch.distributed group: its CPU side where there is one, else the device.

    On CPU an operation's own time-out is the deadline too, plus SLACK: gloo holds a process at its exit until its
    operations have ended, which the group's time-out would put off by half an hour.

    Args:
        group: the group; this process must be a member.
        deadline: seconds for each collective. On a device alone, collectives also end by the group's watchdog.
        setting: what the deadline is called, for errors.
        look: called every POLL seconds while a collective waits; what it raises ends the waiting.

    Raises:
        Late, WaitEnded: by the collectives; the first is a time-out.
    """

    store: Store | None = None

    def __init__(
        self,
        group: dist.ProcessGroup,
        deadline: float,
        setting: str = "settings.vote_deadline",
        look: Callable[[], None] | None = None,
    ) -> None:
        self._group = group
        on_cpu = any(kind.type == "cpu" for kind in group._device_types)
        self._device = torch.device("cpu" if on_cpu else "cuda")
        self._deadline, self._setting, self._look = deadline, setting, look
        self.on_device = not on_cpu
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)

    def within(self, deadline: float, setting: str, look: Callable[[], None]) -> GroupExchange:
        """The same exchange with another deadline, and something to look at meanwhile."""
        return GroupExchange(self._group, deadline, setting, look)

    def min(self, values: Sequence[int]) -> list[int]:
        """See `Exchange`."""
        tensor = torch.tensor(values, dtype=torch.int64, device=self._device)
        options = self._bounded(AllreduceOptions())
        options.reduceOp = dist.ReduceOp.MIN
        self._wait(lambda: self._group.allreduce([tensor], options))
        return [int(value) for value in tensor.tolist()]

    def gather(self, payload: bytes) -> list[bytes]:
        """See `Exchange`."""
        mine = torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(self._device)
        all_ranks = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(lambda: self._group.allgather([all_ranks], [mine], self._bounded(AllgatherOptions())))
        return [bytes(one.tolist()) for one in all_ranks]

    def _bounded(self, options: Any) -> Any:
        if self._device.type == "cpu":
            options.timeout = timedelta(seconds=self._deadline + SLACK)
        return options

    def _wait(self, start: Callable[[], Any]) -> None:
        wait = finished if self._device.type == "cpu" else _finished_on_device
        try:
            if wait(start(), self._deadline, self._look):
                return
        except RuntimeError as error:
            raise WaitEnded(f"a peer is gone, or its connection is: {plain(error)}") from error
        raise Late(f"it did not finish within {self._deadline:g} s ({self._setting})")


def _finished_on_device(work: Any, seconds: float, look: Callable[[], None] | None) -> bool:
    """As `finished`; NCCL's own bounded wait would end its communicator when the time is over."""
    limit, looked, pause = time.monotonic() + seconds, time.monotonic(), 0.0001
    while not work.is_completed():
        now = time.monotonic()
        if now > limit:
            return False
        if look is not None and now > looked + POLL:
            looked = now
            look()
        time.sleep(pause)
        pause = min(2 * pause, 0.005)
    work.wait()
    return True


def who_says(exchange: Exchange, mine: str) -> str:
    """What ranks have to say, those of the same text together; "" says nothing. Collective; the same on every rank."""
    texts = exchange.gather(mine.encode(errors="replace")[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0"))
    ranks: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        if said := text.rstrip(b"\0").decode(errors="ignore"):
            ranks.setdefault(said, []).append(rank)
    return "; ".join(f"{name_ranks(who)}: {said}" for said, who in ranks.items())


def check_size(size: int) -> None:
    """Refuses more than MAX_RANKS ranks with InputError; every rank sees the same size, so all refuse."""
    if not 1 <= size <= MAX_RANKS:
        raise InputError(f"group: {size} ranks; accepted are 1 to {MAX_RANKS}")
