"""Staging buffers of the large-batch tiers: where a partial sum is copied so that every rank can reach it.

One block holds a buffer [rows, width] for each (lane, name) that is declared, at the same offset on every rank, and a
signal pad. Two names of equal width have two buffers: routed and shared never alias. `stage` copies, so any layout of
the input is legal and none ever enters the choice of a tier: a layout is a matter of one rank.

A buffer only grows in `reserve`, outside forwards, on all ranks at once. What it replaces is retired, never freed:
captured graphs and kernels in flight still use it. Up to the ceiling growth doubles, since it is not known how far it
will go. Who asks for more than the ceiling names a number, and gets that, not its double: the buffers are the largest
there are, and a server asks once. Should it ask again, they double again, so however often it asks, all retired blocks
together are smaller than three of the one in use. In capture a miss raises; nothing here ever chooses another tier.

Decided against: one buffer per width (equal widths alias), freeing the old block when its views are dead (a graph holds
addresses, not tensors), a cap on retired bytes (a cap that raises ends a server for a few bytes).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from k3comm.buffers import alias
from k3comm.buffers.pause import pause
from k3comm.buffers.symmetric import SymmetricMemory
from k3comm.errors import CaptureError, ClosedError, InputError, NegotiationError, PeerTimeoutError

ALIGNMENT = 128
"""Bytes; of every buffer: what 16-byte vectors, TMA and cache lines ask for."""

BEYOND_ROWS = 256
"""What a number of rows above the ceiling is rounded up to a multiple of, so that asking for a row more is often free:
at Kimi-K3's widths 5.5 MB a buffer."""

PAD_BYTES_PER_RANK = 64
"""Of the signal pad: one cache line for the word of each rank."""

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@attrs.frozen
class Slot:
    """One user of the pool.

    Attributes:
        name: distinguishes users of equal width.
        width: elements in a row.
        dtype: "bfloat16" or "float32", as in the spec.

    Raises:
        InputError: a width below 1, or another dtype.
    """

    name: str
    width: int
    dtype: str = "bfloat16"

    def __attrs_post_init__(self) -> None:
        if type(self.width) is not int or self.width < 1:
            raise InputError(f"slot {self.name}: width {self.width!r} given; accepted are whole numbers from 1")
        if self.dtype not in DTYPES:
            raise InputError(f"slot {self.name}: dtype {self.dtype!r} given; accepted are {', '.join(DTYPES)}")


@attrs.frozen(kw_only=True)
class StagingLayout:
    """Where everything is in the staging block for so many rows. Python ints only: no size overflows.

    Attributes:
        slots: the users; names are unique.
        rows: what every buffer holds. world_size: W. lanes: micro-batches in flight.

    Raises:
        InputError: no slots, a name twice, or a number below 1.
    """

    slots: tuple[Slot, ...]
    rows: int
    world_size: int
    lanes: int = 1

    def __attrs_post_init__(self) -> None:
        for name in ("rows", "world_size", "lanes"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InputError(f"{name}: {value!r} given; accepted are whole numbers from 1")
        names = [slot.name for slot in self.slots]
        if not names or len(set(names)) < len(names):
            raise InputError(f"slots: {', '.join(names) or 'none'} given; accepted is one or more, each name once")

    def bytes_of(self, slot: Slot) -> int:
        """Of one buffer, with padding."""
        nbytes = self.rows * slot.width * DTYPES[slot.dtype].itemsize
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    @property
    def pad_bytes(self) -> int:
        """Of one lane's signal pad, with padding."""
        return -(-self.world_size * PAD_BYTES_PER_RANK // ALIGNMENT) * ALIGNMENT

    @property
    def lane_bytes(self) -> int:
        """Of one lane."""
        return self.pad_bytes + sum(map(self.bytes_of, self.slots))

    @property
    def nbytes(self) -> int:
        """Of the whole: what a tier's `footprint` asks for."""
        return self.lanes * self.lane_bytes

    def pad(self, lane: int) -> int:
        """Offset of a lane's signal pad."""
        return lane * self.lane_bytes

    def offset(self, lane: int, place: int) -> int:
        """Offset of the buffer of slot number `place`."""
        return self.pad(lane) + self.pad_bytes + sum(map(self.bytes_of, self.slots[:place]))

    def grown(self, rows: int, ceiling: int) -> StagingLayout:
        """For at least `rows` rows, of which there are fewer now; see `StagingPool.reserve` for the rule."""
        if rows <= ceiling:
            return attrs.evolve(self, rows=min(max(rows, 2 * self.rows), ceiling))
        doubled = 2 * self.rows if self.rows > ceiling else 0
        return attrs.evolve(self, rows=max(-(-rows // BEYOND_ROWS) * BEYOND_ROWS, doubled))


@attrs.define(eq=False)
class _Generation:
    """One block and its views: whole buffers of every rank, by (lane, name)."""

    memory: SymmetricMemory
    layout: StagingLayout
    buffers: dict[tuple[int, str], tuple[Tensor, ...]]

    @classmethod
    def of(cls, memory: SymmetricMemory, layout: StagingLayout, offset: int) -> _Generation:
        if layout.world_size != memory.world_size:
            raise InputError(
                f"layout: for {layout.world_size} ranks, memory of {memory.world_size} given; "
                "accepted are equal numbers"
            )
        if offset % ALIGNMENT or offset < 0 or offset + layout.nbytes > memory.nbytes:
            raise InputError(
                f"offset: {offset} given for {layout.nbytes} bytes in a block of {memory.nbytes}; accepted are "
                f"multiples of {ALIGNMENT} with room behind them"
            )
        buffers = {}
        # Views of the caller's mode would be for that mode alone: later calls write to them outside it.
        with torch.inference_mode(False):
            for lane in range(layout.lanes):
                for place, slot in enumerate(layout.slots):
                    dtype = DTYPES[slot.dtype]
                    start = offset + layout.offset(lane, place)
                    end = start + layout.rows * slot.width * dtype.itemsize
                    buffers[lane, slot.name] = tuple(
                        memory.block(rank)[start:end].view(dtype).view(layout.rows, slot.width)
                        for rank in range(layout.world_size)
                    )
        return cls(memory, layout, buffers)


class StagingPool:
    """The staging buffers of one group.

    Args:
        memory: mapped, of at least `offset + layout.nbytes` bytes. The pool releases it in `close`, unless `borrowed`.
        layout: what lies in it now.
        ceiling: the most rows that `reserve` gives, unless it is asked to go beyond.
        grow: collective; gives mapped memory of so many bytes, or, on every rank, the text that says why not
            (`establish` with a new memory).
        capturing: whether a CUDA graph is being captured now; None: never.
        offset: where in every rank's block the layout starts, a multiple of ALIGNMENT.
        poll_deadline: seconds that `barrier` may take (`settings.poll_deadline`).
        borrowed: `memory` is the caller's, who may have others working on it; what `grow` gives never is.

    Raises:
        InputError: the layout does not fit.
    """

    def __init__(
        self,
        memory: SymmetricMemory,
        layout: StagingLayout,
        *,
        ceiling: int,
        grow: Callable[[int], SymmetricMemory | str],
        capturing: Callable[[], bool] | None = None,
        offset: int = 0,
        poll_deadline: float = 30.0,
        borrowed: bool = False,
    ) -> None:
        if ceiling < layout.rows:
            raise InputError(f"ceiling: {ceiling} given for {layout.rows} rows; accepted are {layout.rows} or more")
        self.rank = memory.rank
        self.ceiling = ceiling
        self._grow = grow
        self._capturing = capturing or (lambda: False)
        self._poll_deadline = poll_deadline
        self._borrowed = memory if borrowed else None
        self._retired: list[_Generation] = []
        self._now: _Generation | None = None
        self._pads: tuple[_SignalPad, ...] = ()
        self._adopt(memory, layout, offset)

    @property
    def rows(self) -> int:
        """What every buffer holds now."""
        return self._open().layout.rows

    @property
    def nbytes(self) -> int:
        """Bytes of this rank's buffers in use, without what other tiers have in the same block."""
        return 0 if self._now is None else self._now.layout.nbytes

    @property
    def retired_bytes(self) -> int:
        """Bytes of the buffers that `reserve` has replaced, all kept."""
        return sum(generation.layout.nbytes for generation in self._retired)

    def stage(self, name: str, x: Tensor, *, lane: int = 0) -> Tensor:
        """Copies x [m, width], in any layout, into this rank's buffer.

        Returns:
            The buffer's first m rows, contiguous, in the slot's dtype; good until the next `stage` of this name and
            lane. Its memory stays mapped until `close`, also after `reserve`.

        Raises:
            CaptureError: more rows than there are, while a graph is captured.
            InputError: more rows than there are, another width, dtype or device, or an unknown name or lane.
        """
        view = self.view(name, x.shape[0] if x.dim() == 2 else 0, lane=lane)
        if x.shape != view.shape or x.dtype != view.dtype or x.device != view.device:
            raise InputError(
                f"stage {name}: {x.dtype} {tuple(x.shape)} on {x.device} given; accepted is {view.dtype} "
                f"(m, {view.shape[1]}) on {view.device}"
            )
        x = x.detach() if x.requires_grad else x
        if alias.overlaps(x, view):
            if x.data_ptr() == view.data_ptr() and x.stride() == view.stride():
                return view  # written in place by whoever holds the lane
            x = x.clone()
        return view.copy_(x)

    def view(self, name: str, rows: int, *, lane: int = 0) -> Tensor:
        """The first `rows` rows of this rank's buffer, as they are. Raises as `stage`."""
        return self._whole(name, rows, lane)[self.rank][:rows]

    def peers(self, name: str, rows: int, *, lane: int = 0) -> tuple[Tensor, ...]:
        """The first `rows` rows of every rank's buffer, in rank order. Raises as `stage`."""
        return tuple(buffer[:rows] for buffer in self._whole(name, rows, lane))

    def barrier(self, phase: str, *, lane: int = 0) -> None:
        """Returns when every rank has come to this barrier of the lane; what a rank wrote before it can be read after.

        For blocks on CPU.

        Raises:
            PeerTimeoutError: names the ranks that did not come.
            ClosedError: an earlier barrier of the lane timed out, so the ranks have parted.
        """
        self._open()
        self._pads[lane].barrier(phase, self._poll_deadline)

    def reserve(self, rows: int, *, beyond: bool = False) -> None:
        """Makes room for `rows` rows in every buffer. Collective, outside forwards, equal arguments on every rank.

        Returns at once where there is room. Else the old buffers are retired, whose views stay what they are, and the
        new ones hold

        - up to the ceiling: at least twice the rows of before, clamped at the ceiling;
        - for more than the ceiling, which needs `beyond`: `rows`, rounded up to a multiple of `BEYOND_ROWS`; and if
          those of before were above the ceiling already, at least twice theirs. So the first time costs what was asked
          for, and whoever asks for one row more again and again retires a buffer only when it has doubled.

        Raises:
            InputError: more rows than the ceiling, without `beyond`.
            CaptureError: a graph is being captured.
            NegotiationError: on every rank alike, some rank has no memory; the buffers are as before.
        """
        current = self._open()
        if type(rows) is not int or rows < 0 or (rows > self.ceiling and not beyond):
            raise InputError(f"reserve: {rows!r} rows given; accepted are 0 to {self.ceiling} (max_tokens)")
        if self._capturing():
            raise CaptureError("reserve: it is collective and allocates; call it before the capture, not in it")
        if rows <= current.layout.rows:
            return
        layout = current.layout.grown(rows, self.ceiling)
        memory = self._grow(layout.nbytes)
        if isinstance(memory, str):
            raise NegotiationError(f"reserve: no staging buffers of {layout.rows} rows: {memory}")
        self._adopt(memory, layout, 0)
        self._retired.append(current)

    def rearm(self) -> None:
        """Starts this rank's barriers anew. No rank may be in one; a barrier of another kind must follow."""
        self._open()
        for pad in self._pads:
            pad.reset()

    def close(self) -> None:
        """Releases the block and the retired ones. Idempotent and local; no graph that uses them may run any more."""
        for generation in (*self._retired, *([] if self._now is None else [self._now])):
            if generation.memory is not self._borrowed:
                generation.memory.release()
        self._retired, self._now, self._pads = [], None, ()

    def _adopt(self, memory: SymmetricMemory, layout: StagingLayout, offset: int) -> None:
        self._now = _Generation.of(memory, layout, offset)
        self._pads = (
            tuple(_SignalPad(memory, offset + layout.pad(lane)) for lane in range(layout.lanes))
            if memory.block(memory.rank).device.type == "cpu"
            else ()
        )

    def _open(self) -> _Generation:
        if self._now is None:
            raise ClosedError("the staging pool is closed")
        return self._now

    def _whole(self, name: str, rows: int, lane: int) -> tuple[Tensor, ...]:
        current = self._open()
        buffers = current.buffers.get((lane, name))
        if buffers is None:
            raise InputError(
                f"{name!r}, lane {lane!r} given; accepted are {', '.join(slot.name for slot in current.layout.slots)} "
                f"and lanes 0 to {current.layout.lanes - 1}"
            )
        if rows > current.layout.rows:
            if self._capturing():
                raise CaptureError(
                    f"{name}: {rows} rows in a capture and {current.layout.rows} in the staging buffers, which can't "
                    f"grow now; call reserve({rows}) on every rank before the capture"
                )
            raise InputError(
                f"{name}: {rows} rows given; accepted are up to {current.layout.rows}, or more after reserve({rows}) "
                "on every rank"
            )
        return buffers


class _SignalPad:
    """A barrier of host processes: a word a rank in every rank's block, into which that rank writes its count."""

    def __init__(self, memory: SymmetricMemory, offset: int) -> None:
        W, stride = memory.world_size, PAD_BYTES_PER_RANK // 8
        pads = [
            memory.block(rank)[offset : offset + W * PAD_BYTES_PER_RANK].numpy().view(np.uint64).reshape(W, stride)
            for rank in range(W)
        ]
        self._rank = memory.rank
        self._arrived = pads[memory.rank][:, 0]
        self._mine = [pad[memory.rank, :1] for pad in pads]
        self._count = 0
        self._parted = False
        self._fence = threading.Lock()

    def barrier(self, phase: str, seconds: float) -> None:
        if self._parted:
            raise ClosedError(f"barrier {phase}: an earlier one timed out on this rank; negotiate anew")
        self._count += 1
        self._order()
        for word in self._mine:
            word[0] = self._count
        start = None
        while np.minimum.reduce(self._arrived) < self._count:
            now = time.monotonic()
            if start is None:
                start = now
            # Looks once more: this process may have been stopped between its look and the clock.
            elif now > start + seconds and np.minimum.reduce(self._arrived) < self._count:
                self._parted = True
                ranks = tuple(int(rank) for rank in np.flatnonzero(self._arrived < self._count))
                raise PeerTimeoutError(
                    f"barrier {self._count} on rank {self._rank} of {len(self._arrived)}, phase {phase}: rank"
                    f"{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} did not come within {seconds:g} s "
                    "(settings.poll_deadline); late, or gone",
                    ranks,
                )
            pause(now - start)
        self._order()

    def reset(self) -> None:
        self._arrived[:] = 0
        self._count = 0
        self._parted = False

    def _order(self) -> None:
        # A lock's release and the next acquisition order what is before and after both; x86 would not need it.
        for _ in range(2):
            with self._fence:
                pass


def staging_bytes(slots: Sequence[Slot], rows: int, world_size: int, lanes: int = 1) -> int:
    """Bytes of one rank's staging block: what a tier's `footprint` asks for, before anything is allocated.

    Raises:
        InputError: as `StagingLayout`.
    """
    return StagingLayout(slots=tuple(slots), rows=rows, world_size=world_size, lanes=lanes).nbytes
