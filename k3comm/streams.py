"""One order of streams for a communicator on CUDA, and the one side stream that leaves it.

Its tiers share mailboxes, counters and signal pads among all calls, and torch's operators one signal pad a group.
Kernels of two calls on two streams would wait for peers that wait for them, and nothing would say so. So every call
comes from one stream, and another one takes over through `StreamOrder.use`, which puts it behind the one before.

A shared sum that is begun early (`MoETail.reduce_shared`) is the exception, and the communicator's own doing:

    caller's stream   reduce_shared --+------ routed experts ------ tail(...): norm, projection --+-- adds
                                      | fork                                                      | join
    side stream                       +---------- copy, all-reduce ------------------------------>+

The fork puts the side stream behind all that the caller's holds by then, and the join puts the caller's behind the
event after the all-reduce. Both are events, so a capture takes them in as edges of its graph, and a capture that ends
between the two is refused by CUDA, since its side stream has not come back.

Memory. What the side stream reads and writes (the partial sum, and the sum's own buffer) is allocated on the caller's
stream, and torch's allocator would give it away as soon as the last reference goes, while the side stream is still at
it. So the session holds both until a caller's stream has joined: from then on the order of that stream protects them,
as it does all else. Only where the call that joins comes from another stream than the one that forked, which the
allocator knows nothing of, are they marked with `record_stream`.

Progress. The all-reduce holds its SMs until the peers' come. A kernel that waits for peers itself and fills the GPU
would keep a peer's all-reduce out while it waits for that peer: so calls of any other tier join first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

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
    def of(cls, device: torch.device, capturing: Callable[[], bool]) -> StreamOrder | None:
        """For a device; None where there are no streams."""
        if device.type != "cuda":
            return None
        return cls(lambda: torch.cuda.current_stream(device), capturing)

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


class SideStream:
    """A stream of the communicator's own, which forks from the callers' and joins it again.

    Its priority is high: its few blocks shall start as soon as blocks of a kernel that fills the GPU end.

    Args:
        stream: it.
        current: the stream that work is issued to now.
        inside: makes a stream the current one within a `with`.
        capturing: whether a CUDA graph is being captured from the current stream.
    """

    def __init__(
        self,
        stream: Any,
        current: Callable[[], Any],
        inside: Callable[[Any], AbstractContextManager[Any]],
        capturing: Callable[[], bool],
    ) -> None:
        self.stream = stream
        self.current, self.capturing = current, capturing
        self._inside = inside

    @classmethod
    def of(cls, device: torch.device, capturing: Callable[[], bool]) -> SideStream | None:
        """For a device; None where there are no streams."""
        if device.type != "cuda":
            return None
        return cls(
            torch.cuda.Stream(device, priority=-1),  # -1 is torch's high priority
            lambda: torch.cuda.current_stream(device),
            torch.cuda.stream,
            capturing,
        )

    def run(self, work: Callable[[], None]) -> Any:
        """Issues work to it, behind what the current stream holds by now; the event after the work."""
        self.stream.wait_stream(self.current())
        with self._inside(self.stream):
            work()
            return self.stream.record_event()


class EarlySum:
    """A shared sum that was begun before the call that it is for (`MoETail.reduce_shared`). To be given to one call.

    Attributes:
        owner: the handle that began it. layer: its index. lane: the micro-batch in which it was begun.
        sum: [m, H], the sum over the ranks once `join` has returned; in the spec's dtype, or fp32 for a precise handle.
        state: "open", or why it can't be used: "used", "dropped by ...".
        captured: whether it was begun inside a capture.
    """

    def __init__(self, owner: object, layer: int, lane: int, partial: Tensor, into: Tensor) -> None:
        self.owner, self.layer, self.lane = owner, layer, lane
        self.sum = into
        self.state = "open"
        self.captured = False
        self._partial: Tensor | None = partial  # held: the side stream reads it
        self._side: SideStream | None = None
        self._event: Any = None
        self._begun_on: Any = None

    def __repr__(self) -> str:
        return f"EarlySum(layer={self.layer}, lane={self.lane}, rows={self.sum.shape[0]}, state={self.state!r})"

    def begin(self, work: Callable[[], None], side: SideStream | None) -> None:
        """Reduces: on the side stream, or here and now where there is none."""
        if side is None:
            work()
            return
        self._side, self._begun_on, self.captured = side, side.current(), side.capturing()
        self._event = side.run(work)

    def check_joinable(self) -> None:
        """Before a call that joins.

        Raises:
            CaptureError: begun inside of a capture and the call is outside of one, or the other way round.
        """
        if self._event is None or self._side is None or self._side.capturing() == self.captured:
            return
        begun, now = ("inside", "outside") if self.captured else ("outside", "inside")
        raise CaptureError(
            f"the early sum of layer {self.layer} is {self.state}, begun {begun} of a capture, and this call is {now} "
            "of one; accepted are both in one capture, or both outside"
        )

    def settle(self) -> None:
        """Before a call that does not finish it: puts the current stream behind it all the same.

        Raises:
            CaptureError: it was begun outside of the capture that is going on.
        """
        if self._side is not None and self.captured and not self._side.capturing():
            self.drop("the end of the capture in which it was begun")  # nothing is under way, or ever was
            return
        self.check_joinable()
        self.join()

    def join(self) -> None:
        """Puts the current stream behind the reduction; `sum` may then be read from it. Again: nothing."""
        event, side, partial = self._event, self._side, self._partial
        self._event = self._partial = None
        if event is None or side is None:
            return
        now = side.current()
        now.wait_event(event)
        if now != self._begun_on:
            self.sum.record_stream(now)
            if partial is not None:
                partial.record_stream(side.stream)

    def drop(self, why: str) -> None:
        """It can't be used any more. The caller has joined, or knows that the device is idle."""
        if self.state == "open":
            self.state = f"dropped by {why}"
        self._event = self._partial = None
