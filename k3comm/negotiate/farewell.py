"""The end of a communicator: a short wait for each other, which nothing can turn into a hang or an error."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import Protocol

from k3comm.negotiate.threads import start_thread

LIMIT = 1.0
"""Seconds that a rank waits for the others to close too."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02  # s, between two looks


class Counting(Protocol):
    """What is needed of a torch.distributed.Store."""

    def add(self, key: str, value: int, /) -> int:
        """Adds to the number at `key`, 0 at first; the sum."""


def part(store: Counting, key: str, size: int, seconds: float | None = None) -> bool:
    """Says that this rank leaves, and waits for the others to say it.

    Args:
        store: of all ranks; it may be gone.
        key: the communicator's, the same on every rank and used once.
        size: number of ranks.
        seconds: how long to wait; None: LIMIT.

    Returns:
        Whether all have said it in time; False also where the store does not answer, or raises.
    """
    met = threading.Event()
    seconds = LIMIT if seconds is None else seconds
    end = time.monotonic() + seconds

    def meet() -> None:
        with contextlib.suppress(Exception):  # whatever a store raises whose host is gone
            here, pause = store.add(key, 1), _FIRST_PAUSE
            while here < size and time.monotonic() < end:
                time.sleep(pause)
                here, pause = store.add(key, 0), min(2 * pause, _LONGEST_PAUSE)
            if here >= size:
                met.set()

    # In a thread of its own: a store whose host has stopped keeps a call for minutes, and no call takes a deadline.
    try:
        waiter = start_thread(f"k3comm farewell {key}", meet)
    except RuntimeError:  # the interpreter is ending
        return False
    waiter.join(seconds)
    return met.is_set()
