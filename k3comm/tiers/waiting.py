"""Waiting for a collective on CPU, in slices."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any


class WaitingEndedError(Exception):
    """What a look raises that ends the waiting: a peer has given up."""


POLL = 0.05
"""Seconds of a slice: what a look at something else takes to be noticed, and what a lost wake-up costs at most."""


_PLACE = re.compile(r"\[[^\]]*\.(?:cc|cpp|h):\d+\] ")
_ADVICE = re.compile(r"\s*This is (?:typically|likely) .*", re.DOTALL)


def plain(error: BaseException) -> str:
    """The text of an error of gloo's, without its place in the source and without general advice."""
    return _ADVICE.sub("", _PLACE.sub("", str(error)))


_recent: deque[Any] = deque(maxlen=2)
"""The last operations. A backend's thread lets go of one a little after it is done; were that the last hold on its
tensors, the thread would need the interpreter, which may be ending: the process would abort ("terminate called").
"""


def finished(work: Any, seconds: float, look: Callable[[], None] | None = None) -> bool:
    """Waits for an operation of a CPU backend; whether it was done within so many seconds.

    A wait of torch.distributed that times out leaves the operation as it is, so it may be waited for again.

    Args:
        work: a torch.distributed.Work.
        look: called between slices; what it raises ends the waiting.

    Raises:
        RuntimeError: the operation failed.
    """
    _recent.append(work)
    limit = time.monotonic() + seconds
    while True:
        left = limit - time.monotonic()
        try:
            work.wait(timedelta(seconds=min(POLL, max(left, 0.001))))
            return True
        except RuntimeError:
            if work.is_completed():
                work.wait()  # over between the two: it returns, or raises what ended it
                return True
        if left <= 0:
            return False
        if look is not None:
            look()
