"""One order of streams for a communicator on CUDA.

Its tiers share mailboxes, counters and signal pads among all calls, and torch's operators one signal pad a group.
Kernels of two calls on two streams would wait for peers that wait for them, and nothing would say so. So every call
comes from one stream, and another one takes over through `StreamOrder.use`, which puts it behind the one before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from k3comm.errors import CaptureError, InputError


class StreamOrder:
    """Which stream a communicator's calls come from. The first call's, until `use` names another.

    Args:
        current: the stream that work is issued to now; streams are compared by ==.
        capturing: whether a CUDA graph is being captured from it.

    Attributes:
        stream: the one in use; None before the first call.
        captured: calls that were captured from another stream, by stream: a capture has a stream of its own, so there
            is no check, and the order of replays is the caller's.
    """

    def __init__(self, current: Callable[[], Any], capturing: Callable[[], bool]) -> None:
        self.stream: Any = None
        self.captured: Counter[str] = Counter()
        self._current = current
        self._capturing = capturing

    @classmethod
    def of(cls, device: torch.device) -> StreamOrder | None:
        """For a device; None where there are no streams."""
        if device.type != "cuda":
            return None
        return cls(lambda: torch.cuda.current_stream(device), torch.cuda.is_current_stream_capturing)

    def check(self) -> None:
        """Before a call.

        Raises:
            InputError: it comes from another stream than the calls before; names both.
        """
        stream = self._current()
        if self.stream is not None and stream == self.stream:
            return
        if self._capturing():
            self.captured[str(stream)] += 1
        elif self.stream is None:
            self.stream = stream
        else:
            raise InputError(
                f"stream: a call from {stream}, after calls from {self.stream}; accepted is one stream, or another one "
                "after comm.use_stream(...), which puts it behind the one before"
            )

    def use(self, stream: Any) -> None:
        """From now on calls come from `stream`, which waits for what the one before holds by now.

        Raises:
            InputError: not a stream. CaptureError: a graph is being captured.
        """
        if not callable(getattr(stream, "wait_stream", None)):
            raise InputError(f"stream: {stream!r} given; accepted is a torch.cuda.Stream")
        if self._capturing():
            raise CaptureError("use_stream: a CUDA graph is being captured; streams are not compared in it")
        if self.stream is not None and stream != self.stream:
            stream.wait_stream(self.stream)
        self.stream = stream
