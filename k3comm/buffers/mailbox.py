"""Mailboxes of the fused tail: data is its own flag.

A mailbox is memory of its owner that peers write into and only the owner reads. Empty is the word EMPTY; whoever reads
a word that is not EMPTY has the data, so there is no flag to set, no fence between data and flag, and one hop a
message. A payload word with exactly those bits, two NaNs, is published as REPLACEMENT, again two NaNs; every other bit
pattern passes, -0.0, subnormals and the payloads of other NaNs included. All comparisons are of integers: a float
comparison that flushes subnormals would take some of them for zero.

The block of a rank, per lane (a micro-batch in flight), at the same offsets on every rank; m is the call's rows:

    counters                               COUNTER_BYTES, zeros: for kernels on the device; host ranks keep their own
    3 x latent  [max_rows, W, L]   BF16    [:, r]: the routed partial sum of rank r
    3 x shared  [max_rows, W, H/W] BF16    [:, r]: rank r's shared partial sum in the columns that this rank owns
    2 x gather  [max_rows, H]      BF16    columns of r: the finished columns that rank r owns

On GPUs a rank's own places stay empty, but for its latent of a deferred finalize and where multicast stores write: what
it has itself it reads where it is. Rows come first, so what m rows use is a prefix. Clearing, and why this is right:

- latent and shared, lazy, three regions: call n uses region g(n), stepped 0, 1, 2, and empties region g(n-1), the bytes
  that call n-1 used. A peer writes there next in call n+2, which it reaches only after this rank has published call
  n+1, hence after that clearing. Two regions are too few, and emptying the region that comes next is wrong.
- gather, eager: its one reader empties each word right after it has copied it. On the host there is one mailbox: a peer
  writes there next in call n+1, after that call's all-reduce, in which this rank takes part only after it has emptied
  it. GPUs take two in turn, by the parity of the call.

Emptying has to be seen by a peer before it writes there. On the host, `begin` orders what a rank emptied before what it
publishes next. On GPUs that order costs a fence in every call's way; so there a rank tells each peer, beside call n+1,
that it is done with call n, and the peer begins its call n+2 only when it knows: "credits" (kernels/mailbox.cuh). Hence
the second gather mailbox: what call n empties there is written again in call n+2.

It rests on: every rank fills its block, then a barrier, then the first call; every rank takes part in every call, with
equal m, in the same order. The tests hold an exhaustive model of the interleavings.

On the host a word is written by a copy of 16 bytes or more at 16-byte aligned places (every offset here is), in which
the C library and the CPU never split a word; a fragment may arrive torn into words, which the per-word test makes
harmless.

A wait gives the CPU away after every look in vain (pause.py).
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import Final

import attrs
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from k3comm.buffers.pause import pause
from k3comm.buffers.symmetric import SymmetricMemory
from k3comm.errors import ClosedError, InputError, PeerTimeoutError
from k3comm.spec import LatentMoESpec

Words = npt.NDArray[np.uint32]

EMPTY: Final = 0xFFFFFFFF
"""The word of an empty mailbox. The largest uint32, so the maximum of some words tells whether any of them is empty."""

REPLACEMENT: Final = 0x7FFF7FFF
"""What a payload word equal to EMPTY is published as: two BF16 NaNs too."""

REGIONS: Final = 3
"""Of the all-reduce mailbox: the fewest that lazy clearing is right with."""

GATHERS: Final = 2
"""Gather mailboxes."""

ALIGNMENT: Final = 128
"""Bytes; of every part of a block. A multiple of a fragment (16) that keeps parts of two writers off one cache line."""

COUNTER_BYTES: Final = 4096
"""Per lane: what kernels/mailbox.cuh keeps for a wave of 256 CTAs and for 16 peers, and some room."""

FRAGMENT: Final = 8
"""BF16 elements in 16 bytes, the unit of publication."""

_maximum = np.maximum.reduce


@attrs.frozen(kw_only=True)
class MailboxLayout:
    """Where everything is in the decode block. Python ints only: no size overflows.

    Attributes:
        hidden_size, latent_size: H and L.
        world_size: W. max_rows: the largest m. lanes: micro-batches in flight.

    Raises:
        InputError: not BF16, L no multiple of 8, H no multiple of 8 W, or a number below 1.
    """

    hidden_size: int
    latent_size: int
    world_size: int
    max_rows: int
    lanes: int = 1

    def __attrs_post_init__(self) -> None:
        for name in ("hidden_size", "latent_size", "world_size", "max_rows", "lanes"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InputError(f"{name}: {value!r} given; accepted are whole numbers from 1")
        if self.latent_size % FRAGMENT:
            raise InputError(f"latent_size: {self.latent_size} given; accepted are multiples of {FRAGMENT}")
        if self.hidden_size % (FRAGMENT * self.world_size):
            raise InputError(
                f"hidden_size: {self.hidden_size} given for {self.world_size} ranks; accepted are multiples of "
                f"{FRAGMENT * self.world_size}"
            )

    @classmethod
    def of(cls, spec: LatentMoESpec, *, world_size: int, max_rows: int, lanes: int = 1) -> MailboxLayout:
        """The layout for a layer."""
        if spec.dtype != "bfloat16":
            raise InputError(f"spec.dtype: {spec.dtype} given; mailboxes carry bfloat16")
        return cls(
            hidden_size=spec.hidden_size,
            latent_size=spec.latent_size,
            world_size=world_size,
            max_rows=max_rows,
            lanes=lanes,
        )

    @property
    def columns(self) -> int:
        """H/W, the hidden columns that each rank owns."""
        return self.hidden_size // self.world_size

    @property
    def latent_bytes(self) -> int:
        """Of one region's latent part."""
        return _aligned(2 * self.max_rows * self.world_size * self.latent_size)

    @property
    def shared_bytes(self) -> int:
        """Of one region's shared part: [max_rows, W, H/W], as many as [max_rows, H]."""
        return _aligned(2 * self.max_rows * self.hidden_size)

    @property
    def gather_bytes(self) -> int:
        """Of one gather mailbox."""
        return self.shared_bytes

    @property
    def lane_bytes(self) -> int:
        """Of one lane."""
        return COUNTER_BYTES + REGIONS * (self.latent_bytes + self.shared_bytes) + GATHERS * self.gather_bytes

    @property
    def nbytes(self) -> int:
        """Of the whole."""
        return self.lanes * self.lane_bytes

    def counters(self, lane: int) -> int:
        """Offset of a lane's counters."""
        return lane * self.lane_bytes

    def latent(self, lane: int, region: int) -> int:
        """Offset of a region's latent part."""
        return self.counters(lane) + COUNTER_BYTES + region * (self.latent_bytes + self.shared_bytes)

    def shared(self, lane: int, region: int) -> int:
        """Offset of a region's shared part."""
        return self.latent(lane, region) + self.latent_bytes

    def gather(self, lane: int, number: int = 0) -> int:
        """Offset of a lane's gather mailbox; `number` 1 is that of odd calls on a GPU."""
        return self.latent(lane, REGIONS) + number * self.gather_bytes


def mailbox_bytes(spec: LatentMoESpec, world_size: int, max_rows: int, lanes: int = 1) -> int:
    """Bytes of one rank's mailboxes: what a tier's `footprint` asks for, before anything is allocated.

    Raises:
        InputError: as `MailboxLayout`.
    """
    return MailboxLayout.of(spec, world_size=world_size, max_rows=max_rows, lanes=lanes).nbytes


def publishable(words: Words) -> Words:
    """The words with EMPTY replaced: themselves if there is none, else a copy."""
    if _maximum(words, axis=None, initial=0) != EMPTY:
        return words
    return np.where(words == EMPTY, np.uint32(REPLACEMENT), words)


def wait_full(words: Words, seconds: float, expired: Callable[[], Exception], look: Words | None = None) -> None:
    """Returns when no word is EMPTY. One pass of at least 1.5 us where they are full already.

    Args:
        words: one dimension, contiguous for speed.
        seconds: how long it may take.
        expired: makes the error that is raised then.
        look: a few of the words, those that are written last: while they are empty the rest is not looked at.

    Raises:
        Exception: what `expired` gives.
    """
    start = None
    while (look is not None and _maximum(look) == EMPTY) or _maximum(words) == EMPTY:
        now = time.monotonic()
        if start is None:
            start = now
        # Looks once more: this process may have been stopped between its look and the clock.
        elif now > start + seconds and _maximum(words) == EMPTY:
            raise expired()
        pause(now - start)


@attrs.frozen(kw_only=True, eq=False)
class Region:
    """A third of the all-reduce mailbox, on every rank; views of whole parts, by the rank that owns the mailbox.

    Attributes:
        latent: uint32 [max_rows, W, L/2] each. shared: uint32 [max_rows, W, H/W/2] each.
    """

    latent: tuple[Words, ...]
    shared: tuple[Words, ...]


@attrs.frozen(eq=False)
class _Outgoing:
    """A message of m rows: where it is gathered up, and what goes from there to where."""

    source: Tensor
    words: Words
    copies: tuple[tuple[Words, Words], ...]

    def send(self, x: Tensor) -> None:
        self.source.copy_(x.detach() if x.requires_grad else x)
        clean = publishable(self.words)
        if clean is not self.words:
            self.words[...] = clean
        for to, part in self.copies:
            to[...] = part


@attrs.frozen(eq=False)
class _Incoming:
    """A mailbox of m rows: `words` flat for the proof, `look` the words of the last row that its writers write last."""

    data: Tensor
    words: Words
    look: Words

    @classmethod
    def of(cls, mailbox: Words, rows: int, *shape: int) -> _Incoming:
        used = mailbox[:rows]
        words = used.reshape(-1)
        data = torch.from_numpy(words.view(np.int32)).view(torch.bfloat16).view(rows, *shape)
        return cls(data, words, used[rows - 1, :, -1])


@attrs.frozen(eq=False)
class _Views:
    """What a call of m rows in one region touches, sliced once: a slice costs 0.1 us, and a call needs dozens."""

    rows: int
    latent: _Incoming
    shared: _Incoming
    gathered: _Incoming
    send_latent: _Outgoing
    send_shared: _Outgoing
    send_columns: _Outgoing


class MailboxPool:
    """The mailboxes of one group in mapped memory on the host.

    Args:
        memory: mapped.
        layout: what lies in it.
        offset: where in every rank's block it starts, a multiple of ALIGNMENT.
        poll_deadline: seconds that one wait may take (`settings.poll_deadline`).

    Attributes:
        layout: as given.
        lanes: one `MailboxLane` a micro-batch in flight; they share nothing.

    Raises:
        InputError: the layout is for another number of ranks, or does not fit.
    """

    def __init__(
        self, memory: SymmetricMemory, layout: MailboxLayout, *, offset: int = 0, poll_deadline: float = 30.0
    ) -> None:
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
        self.layout = layout
        blocks = [memory.block(owner)[offset : offset + layout.nbytes].numpy() for owner in range(memory.world_size)]
        self.lanes = tuple(
            MailboxLane(blocks, layout, memory.rank, number, poll_deadline) for number in range(layout.lanes)
        )

    def fill(self) -> None:
        """Empties this rank's mailboxes and starts at call 0. No rank may be in a call.

        A barrier of all ranks must follow before any call.
        """
        for lane in self.lanes:
            lane.fill()


class MailboxLane:
    """One rank's side of one lane: what it publishes and what it waits for, call after call.

    A call of m rows, from begin to end, in this order (the two publications of partial sums in either):

        begin(m); publish_latent(x); publish_shared(y); wait_latent(); wait_shared()
        publish_columns(z); wait_columns(out); end()

    A call that raises leaves the mailboxes undefined; the lane then refuses every further call until `fill`.

    Attributes:
        rank: this rank. layout: what lies where.
        region_number: the region that the next call uses.
        previous_rows: rows of the call before, which the next call clears.
        calls: calls that have begun since `fill`.
    """

    def __init__(
        self, blocks: list[npt.NDArray[np.uint8]], layout: MailboxLayout, rank: int, number: int, poll_deadline: float
    ) -> None:
        self.rank = rank
        self.layout = layout
        self._number = number
        self._deadline = poll_deadline
        W, rows, L, C = layout.world_size, layout.max_rows, layout.latent_size, layout.columns
        start = layout.counters(number)
        self._own_bytes = blocks[rank][start : start + layout.lane_bytes]
        self.counters: Words = self._own_bytes[:COUNTER_BYTES].view(np.uint32)
        self.regions = tuple(
            Region(
                latent=tuple(_words(block, layout.latent(number, g), rows, W, L // 2) for block in blocks),
                shared=tuple(_words(block, layout.shared(number, g), rows, W, C // 2) for block in blocks),
            )
            for g in range(REGIONS)
        )
        self.gathers = tuple(_words(block, layout.gather(number), rows, W, C // 2) for block in blocks)
        # Peers after this rank first, so that ranks do not all write to the same one at once.
        self._peers = [(rank + step) % W for step in range(1, W + 1)]
        # Payload passes through private memory: any layout becomes words, and the caller's data is left as it is.
        with torch.inference_mode(False):  # tensors made inside it could not be written to outside
            self._latent = torch.empty(rows, L, dtype=torch.bfloat16, device="cpu")
            self._shared = torch.empty(rows, W * C, dtype=torch.bfloat16, device="cpu")
            self._columns = torch.empty(rows, C, dtype=torch.bfloat16, device="cpu")
        self._views: dict[tuple[int, int], _Views] = {}
        self._fence = threading.Lock()
        self.region_number = self.previous_rows = self.calls = 0
        self._filled = False
        self._cleared = True
        self._operation = ""
        self._layer: int | None = None
        self._now: _Views | None = None  # the call in progress

    def fill(self, *, region_number: int = 0) -> None:
        """Empties this rank's mailboxes; the next call uses `region_number`. No rank may be in a call of this lane.

        As with `MailboxPool.fill`, a barrier of all ranks must follow before any call.

        Args:
            region_number: for tests that start elsewhere; the same on every rank.
        """
        if region_number not in range(REGIONS):
            raise InputError(f"region_number: {region_number!r} given; accepted are 0 to {REGIONS - 1}")
        self._own_bytes.view(np.uint32).fill(EMPTY)
        self.counters.fill(0)
        self.region_number = region_number
        self.previous_rows = self.calls = 0
        self._filled, self._now = True, None

    def begin(self, rows: int, *, layer: int | None = None, operation: str = "moe_tail") -> None:
        """Starts a call.

        Args:
            rows: m, the same on every rank.
            layer, operation: for error messages.

        Raises:
            InputError: m out of range.
            ClosedError: not filled yet, or the call before did not end.
        """
        if not 1 <= rows <= self.layout.max_rows:
            raise InputError(f"rows: {rows!r} given; accepted are 1 to {self.layout.max_rows}")
        if not self._filled or self._now is not None:
            what = f"call {self.calls} did not end" if self._now is not None else "it was never filled"
            raise ClosedError(
                f"mailbox lane {self._number} of rank {self.rank}: {what}; fill() on every rank starts anew"
            )
        key = (self.region_number, rows)
        views = self._views.get(key)
        if views is None:
            with torch.inference_mode(False):
                views = self._views[key] = self._slice(*key)
        self._now, self._cleared = views, False
        self._operation, self._layer = operation, layer
        self.calls += 1
        # What earlier calls cleared must be seen before what this one publishes. On x86 stores keep their order;
        # elsewhere a lock's release and the next acquisition order what is before and after both.
        with self._fence:
            pass
        with self._fence:
            pass

    def publish_latent(self, x: Tensor) -> None:
        """Sends this rank's routed partial sum, x [m, L] BF16 in any layout, to every rank."""
        views = self._call()
        self._check(x, views.rows, self.layout.latent_size)
        views.send_latent.send(x)

    def publish_shared(self, x: Tensor) -> None:
        """Sends each rank its columns of this rank's shared partial sum, x [m, H] BF16 in any layout."""
        views = self._call()
        self._check(x, views.rows, self.layout.hidden_size)
        views.send_shared.send(x)

    def clear_previous(self) -> None:
        """Empties what the call before used. Any time in a call; `end` does it if nobody has.

        Between publishing and waiting it costs least: the peers' data is on its way.
        """
        self._call()
        if not self._cleared:
            self._cleared = True
            if self.previous_rows:
                previous = self._views[(self.region_number - 1) % REGIONS, self.previous_rows]
                previous.latent.words.fill(EMPTY)
                previous.shared.words.fill(EMPTY)

    def wait_latent(self) -> Tensor:
        """All ranks' routed partial sums, BF16 [m, W, L]: this rank's memory itself, good until the next call.

        Raises:
            PeerTimeoutError: a rank's part did not come; names it.
        """
        incoming = self._call().latent
        self._wait("latent", incoming)
        return incoming.data

    def wait_shared(self) -> Tensor:
        """All ranks' shared partial sums in this rank's columns, BF16 [m, W, H/W]; otherwise as `wait_latent`."""
        incoming = self._call().shared
        self._wait("shared", incoming)
        return incoming.data

    def publish_columns(self, x: Tensor) -> None:
        """Sends the finished columns that this rank owns, x [m, H/W] BF16 in any layout, to every rank."""
        views = self._call()
        self._check(x, views.rows, self.layout.columns)
        views.send_columns.send(x)

    def wait_columns(self, out: Tensor) -> None:
        """Copies all ranks' finished columns into out [m, H] BF16 and empties the gather mailbox.

        Raises:
            PeerTimeoutError: as `wait_latent`.
        """
        views = self._call()
        self._check(out, views.rows, self.layout.hidden_size)
        self._wait("gather", views.gathered)
        out.copy_(views.gathered.data)
        views.gathered.words.fill(EMPTY)

    def end(self) -> None:
        """Ends the call: steps the region."""
        self.clear_previous()
        self.previous_rows = self._call().rows
        self.region_number = (self.region_number + 1) % REGIONS
        self._now = None

    def _call(self) -> _Views:
        if self._now is None:
            raise ClosedError(
                f"mailbox lane {self._number} of rank {self.rank}: no call has begun; begin() comes first"
            )
        return self._now

    def _check(self, x: Tensor, rows: int, width: int) -> None:
        if x.dtype is not torch.bfloat16 or x.shape != (rows, width) or x.device.type != "cpu":
            raise InputError(
                f"x: {x.dtype} {tuple(x.shape)} on {x.device} given; accepted is torch.bfloat16 {(rows, width)} on cpu"
            )

    def _wait(self, phase: str, incoming: _Incoming) -> None:
        wait_full(incoming.words, self._deadline, lambda: self._expired(phase, incoming), incoming.look)

    def _expired(self, phase: str, incoming: _Incoming) -> PeerTimeoutError:
        W = self.layout.world_size
        empty = (incoming.words.reshape(-1, W, incoming.words.size // (W * self._call().rows)) == EMPTY).any(axis=2)
        ranks = tuple(int(rank) for rank in np.flatnonzero(empty.any(axis=0)))
        tokens = np.flatnonzero(empty.any(axis=1))
        layer = "" if self._layer is None else f"layer {self._layer}, "
        return PeerTimeoutError(
            f"{self._operation} on rank {self.rank} of {W}: {layer}call {self.calls} of lane {self._number}, "
            f"phase {phase}, token {int(tokens[0]) if tokens.size else 0}: nothing from rank"
            f"{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))} within {self._deadline:g} s "
            "(settings.poll_deadline); it is late, or gone",
            ranks,
        )

    def _slice(self, region: int, rows: int) -> _Views:
        W, L, C = self.layout.world_size, self.layout.latent_size, self.layout.columns
        ours, mailboxes = self.rank, self.regions[region]
        latent, shared, columns = self._latent[:rows], self._shared[:rows], self._columns[:rows]
        shared_words = _as_words(shared).reshape(rows, W, C // 2)
        return _Views(
            rows,
            latent=_Incoming.of(mailboxes.latent[ours], rows, W, L),
            shared=_Incoming.of(mailboxes.shared[ours], rows, W, C),
            gathered=_Incoming.of(self.gathers[ours], rows, W * C),
            send_latent=_Outgoing(
                latent,
                _as_words(latent).reshape(-1),
                tuple((mailboxes.latent[peer][:rows, ours], _as_words(latent)) for peer in self._peers),
            ),
            send_shared=_Outgoing(
                shared,
                shared_words.reshape(-1),
                tuple((mailboxes.shared[peer][:rows, ours], shared_words[:, peer]) for peer in self._peers),
            ),
            send_columns=_Outgoing(
                columns,
                _as_words(columns).reshape(-1),
                tuple((self.gathers[peer][:rows, ours], _as_words(columns)) for peer in self._peers),
            ),
        )


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _words(block: npt.NDArray[np.uint8], offset: int, *shape: int) -> Words:
    return block[offset : offset + 4 * math.prod(shape)].view(np.uint32).reshape(shape)


def _as_words(x: Tensor) -> Words:
    """The same memory: BF16 [m, n], contiguous, as uint32 [m, n/2]."""
    words: Words = x.view(torch.int32).numpy().view(np.uint32)
    return words
