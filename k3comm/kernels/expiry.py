"""What a wait on the device leaves behind when its deadline passes: `struct Record` of mailbox.cuh.

The thread whose wait expired writes it to pinned memory and traps, which ends the CUDA context of the process. So each
later call looks there before it launches anything (`Watch`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Final, TypeVar

import attrs
import torch
from torch import Tensor

from k3comm.errors import PeerTimeoutError

PHASES: Final = {
    1: "completion",
    2: "latent",
    3: "shared",
    4: "partials",
    5: "gather",
    6: "credit",
    16: "staged",
    17: "read",
}
"""`enum Phase` of mailbox.cuh, and `enum LanePhase` of lane_one_shot.cu."""

OWN_PHASES: Final = {
    "completion": "a kernel of this rank did not end",
    "partials": "its other blocks did not come",
}
"""In which a rank waits for its own kernels, or for other blocks of one; and what to say of it."""

OPERATIONS: Final = {1: "moe_tail"}
"""`enum Operation` of mailbox.cuh."""

RECORD_WORDS: Final = 16
"""Of a record in pinned memory; nine are used."""

LANE_SHIFT: Final = 28
"""A record has no word for the micro-batch, so it goes in front of the layer's number: 3 bits of 31."""

_Call = TypeVar("_Call")
_Result = TypeVar("_Result")


def layer_word(layer: int, lane: int) -> int:
    """The word for a call's layer and micro-batch. A layer's number past 2^28 loses its upper bits."""
    return layer % (1 << LANE_SHIFT) | lane << LANE_SHIFT


@attrs.frozen
class Expired:
    """A wait that expired.

    Attributes:
        operation: "moe_tail". phase: of PHASES. layer, lane, call, token: which.
        peer: whose data did not come; this rank itself in OWN_PHASES.
        rank: who waited.
    """

    operation: str
    layer: int
    lane: int
    call: int
    phase: str
    token: int
    peer: int
    rank: int

    @classmethod
    def read(cls, record: Tensor) -> Expired | None:
        """From a record, int32 [RECORD_WORDS] in host memory; None if nothing expired."""
        words = [word & 0xFFFFFFFF for word in record.tolist()]
        if words[0] != 1:
            return None
        operation, layer, low, high, phase, token, peer, rank = words[1:9]
        return cls(
            OPERATIONS.get(operation, str(operation)),
            layer % (1 << LANE_SHIFT),
            layer >> LANE_SHIFT,
            high << 32 | low,
            PHASES.get(phase, str(phase)),
            token,
            peer,
            rank,
        )

    def error(self, world_size: int, seconds: float) -> PeerTimeoutError:
        """What to raise for it."""
        what = (
            f"{self.operation} on rank {self.rank} of {world_size}: layer {self.layer}, call {self.call} of lane "
            f"{self.lane}, phase {self.phase}, token {self.token}: "
        )
        if self.peer == self.rank and self.phase in OWN_PHASES:
            return PeerTimeoutError(f"{what}{OWN_PHASES[self.phase]} within {seconds:g} s", (self.peer,))
        return PeerTimeoutError(
            f"{what}nothing from rank {self.peer} within {seconds:g} s (settings.poll_deadline); it is late, or gone",
            (self.peer,),
        )


class Watch:
    """Looks at the record of one rank's kernels before each call of them.

    Args:
        record: what the kernels write to, int32 [RECORD_WORDS] in host memory.
        device: theirs. world_size: ranks that meet in them. seconds: how long they wait.
    """

    def __init__(self, record: Tensor, device: torch.device, world_size: int, seconds: float) -> None:
        self._record, self._device = record, device
        self._world_size, self._seconds = world_size, seconds
        # Looked at in every call: a view of the record's first word, for which no tensor has to be indexed.
        self._written = ctypes.c_uint32.from_address(record.data_ptr())

    def failure(self) -> PeerTimeoutError | None:
        """What the record says of a wait that has expired; None if none has."""
        expired = Expired.read(self._record)
        return None if expired is None else expired.error(self._world_size, self._seconds)

    def launch(self, kernels: Callable[[_Call], _Result], call: _Call) -> _Result:
        """`kernels(call)`, with the device current, as a launch needs it.

        Raises:
            PeerTimeoutError: an earlier call's wait has expired.
        """
        if self._written.value and (failure := self.failure()) is not None:
            raise failure
        device = self._device
        if device.type == "cuda" and device.index is not None and torch.cuda.current_device() != device.index:
            with torch.cuda.device(device):
                return kernels(call)
        return kernels(call)
