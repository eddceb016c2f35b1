"""What a rank on the host does between two looks in vain at memory that a peer writes.

It yields first: the peer may need this very core, and where nobody does a yield takes 0.5 us. Who waits longer sleeps
in short naps. Yielding alone is not enough: with Linux 6.18 three ranks that only yielded kept all threads of a fourth
from both of a machine's cores for 30 s, since who yields stays in the scheduler's queue and who sleeps does not.
"""

from __future__ import annotations

import os
import time
from typing import Final

YIELDING: Final = 1e-3
"""Seconds of yielding; most waits are shorter."""

NAP: Final = 5e-5
"""Seconds of a nap: as long as the kernel's own timer slack, so that a shorter one would not be shorter."""


def pause(waited: float) -> None:
    """Gives the CPU away for a moment, after so many seconds of waiting."""
    if waited < YIELDING:
        os.sched_yield()
    else:
        time.sleep(NAP)
