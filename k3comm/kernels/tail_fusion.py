"""The fused decode tail on a GPU, as the host sees it: geometry, variants, workspace, arguments, launches.

**Geometry.** The grid of the exchange is groups x slices, the same for every m: a CTA owns one slice of the L latent
columns and one group of this rank's H/W output columns. It needs its own slice of the latent mailbox only, so every CTA
does its share of the exchange and nothing is handed over; the slices' partial products meet in the finish. All CTAs are
resident at once, one an SM, since they wait for other ranks. No order of additions depends on m, so a row's bits don't
either; they do depend on the geometry, which follows from the shape, the architecture and the SMs alone.

A slice is at most MAX_SLICE columns: a tensor core truncates its sums, and a long chain of them has a bias (0.7e-6 of
the product after 32 steps by a model without guard bits, where K0 allows 2e-6); slices are added by rounding additions.

**Forms.** Split: `tail_exchange` writes partial products and ends, `tail_finish` does the rest; in a chain with
programmatic dependent launch the next call's first loads start under it. Whole: `tail_whole`, one kernel, where a call
stands alone. Both give the same bits.

**Paths of the projection.** The general one runs everywhere: weights through registers, mma.sync. On sm_90a, where a
cut into equal slices (multiples of 64 columns) and equal groups (multiples of 16 rows, 64 to 256) fits the shared
memory (K3 at W = 2, 4, 8 and 16: yes), a warp of its own streams the CTA's block of W_up by TMA into shared memory,
from the kernel's start on and so under the call before, and wgmma multiplies from there. Where two CTAs fit an SM (K3
from W = 4 on) call n + 1 loads under all of call n. Where z of 32 or 64 rows leaves no room for all of the weights they
come in a ring. A column of wgmma's result depends on that column of z alone, so all variants give the same bits. Before
this CTA's polls are over only a few boxes are in flight.

**Numerics.** s * g goes in as two BF16 terms, r = rsqrt(mean square) multiplies afterwards (K0, docs/tiers.md). Where
the first term is not finite the second is zero.

**The formal argument** (PTX memory model) that what a call empties is ordered before the peers' next stores there are
credits: `exchange_credits` of mailbox.cuh, a release and an acquire at system scope a pair of ranks and call, by one
CTA of the finish, which starts beside the exchange. Fences before the publications say the same and cost 0.9 to 1.9
us a call on an H200 (docs/performance.md); what buys their place is one gather mailbox more. `credits=False` leaves
them out, for measuring what they cost.

Not run on hardware: multicast (compiled, and the PTX inspected; all but the two `multimem.st` is the peer form's), and
every architecture but sm_90a.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from enum import Enum, unique
from typing import Any, Final

import attrs
import torch
from torch import Tensor

from k3comm.errors import InputError, PeerTimeoutError
from k3comm.kernels.compile import SHARED_LIMITS, KernelVariant, arch_of, compile_kernel
from k3comm.kernels.finalize import Deferred
from k3comm.kernels.launch import MAP_BYTES, Launch, LaunchShape, load_kernel, tensor_map
from k3comm.settings import Settings

MAX_ROWS: Final = 64
"""Rows of a call at most: what the mailboxes and the workspace hold."""

MAX_WORLD: Final = 16
"""Ranks at most: length of the address lists in `Arguments`."""

MAX_CELLS: Final = 256
"""CTAs of the exchange at most: a cell of the counters each."""

COMPLETIONS: Final = 1 << 20
"""What a call that is done whole adds to the completion word, as in mailbox.cuh."""

COUNTER_BYTES: Final = 12 * MAX_CELLS + 128 + 128
"""Of a lane's counters: zeros at the start, like `struct Counters` of mailbox.cuh."""

CREDITS: Final = COUNTER_BYTES - 8 * MAX_WORLD
"""Where the credits are in the counters."""

THREADS: Final = 512
FINISH_THREADS: Final = 128
"""A block of the exchange, and of the finish."""

FINISH_BLOCKS: Final = 4
"""Blocks of the finish an SM at most: with 128 registers a thread they fit beside each other."""

TILE: Final = 16
"""Output columns that a warp multiplies at once."""

STEP: Final = 32
"""Latent columns that a thread's 16-byte loads cover at once; a slice is a multiple."""

MAX_SLICE: Final = 512
"""Latent columns of a slice at most; the module's docstring says why."""

STATIC_SHARED: Final = 1024
"""Bytes of shared memory that are left to the compiler, and to the driver (1 KiB a block)."""

SM_SHARED: Final = 228 << 10
"""Bytes of shared memory of an SM of compute capability 9.0 (CUDA programming guide, technical specifications)."""

TOKENS: Final = (8, 16, 32, 64)
"""Variants of the general path, by the rows that they hold."""

BOX_TOKENS: Final = (4, 8, 16, 32, 64)
"""Variants of sm_90a's path."""

BOX_RESIDENT: Final = 16
"""Rows up to which all weights of a CTA have to fit in shared memory beside z. With more they may come in a ring."""

STRIPE: Final = 64
"""Latent columns of a box of weights: 128 bytes, the span of the swizzle."""

GROUP_ROWS: Final = (64, 256)
"""Output columns of a group on sm_90a's path: from one tile of wgmma's 64 to one for each of four warpgroups."""

BOX_ROWS: Final = 64
"""Of a box at most. Boxes of 7 KB and more read as fast as larger ones, and a window of a few of them is finer."""

WINDOW: Final = 3
"""Boxes in flight before a CTA's polls are over. On an H200, in loopback at world size 2, two were slower by 0.4 to 0.8
us up to 16 rows, five and more by 0.5 and more from 4 rows on; at world size 4, where the weights of two CTAs fit an
SM, two were faster by 0.1 to 0.3 us (docs/performance.md)."""

WIDER_ROWS: Final = 8
"""Rows up to which one box more is better: by 0.7 us at one row, by nothing at 8; at 12 it is worse by 0.4."""

POLL_ROWS: Final = 8
"""Rows by which the cost of polling counts in the choice of a cut."""

SLICE_COST: Final = 1024
"""What one more slice costs the finish, in bytes of weights that a CTA reads in the same time. A seed for tuning."""

BOX_SLICE_COST: Final = 1536
"""Likewise on sm_90a's path."""


@unique
class Form(Enum):
    """How many kernels a call is."""

    SPLIT = "split"
    WHOLE = "whole"


@unique
class Entry(Enum):
    """The entry points; the value is K3_ENTRY."""

    tail_exchange = 1
    tail_finish = 2
    tail_whole = 3
    tail_next_norm = 4


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _pitch(slice_width: int) -> int:
    """Bytes of a row of z in shared memory, as in the kernel: an odd multiple of 64."""
    return (slice_width // STEP | 1) * 64


def _shared_bytes(slice_width: int, tokens: int) -> int:
    """Dynamic shared memory of the exchange: two terms of z, and the squares of each fragment."""
    return tokens * (2 * _pitch(slice_width) + 4 * (slice_width // 8))


def _box_rows(group_rows: int) -> int:
    """Rows of a box: the largest multiple of 8 up to BOX_ROWS that divides a group."""
    return next(rows for rows in range(BOX_ROWS, 0, -8) if group_rows % rows == 0)


def _box_shared_bytes(group_rows: int, slice_width: int, tokens: int, ring: int) -> int:
    """Dynamic shared memory of the exchange on sm_90a's path: `ring` stripes of weights, z, squares, a barrier a box
    and a stripe of the ring, two words of 8."""
    stripes = slice_width // STRIPE
    barriers = ring * (group_rows // _box_rows(group_rows)) + ring
    return 2 * group_rows * ring * STRIPE + 4 * tokens * slice_width + 4 * tokens * stripes + 8 * barriers + 16


@attrs.frozen(kw_only=True)
class Geometry:
    """How a tail is cut into CTAs. Made by `choose`, for one architecture.

    Attributes:
        hidden_size, latent_size, world_size: H, L, W.
        arch: the architecture.
        slice_width, slices: latent columns of a slice, a multiple of STEP; their number.
        group_tiles, groups: tiles of TILE output columns of a group; their number.
        box_rows: rows of a box of weights on sm_90a's path; 0 is the general path.
    """

    hidden_size: int
    latent_size: int
    world_size: int
    arch: str
    slice_width: int
    slices: int
    group_tiles: int
    groups: int
    box_rows: int = 0

    @property
    def columns(self) -> int:
        """H/W, the output columns that each rank owns."""
        return self.hidden_size // self.world_size

    @property
    def blocks(self) -> int:
        """CTAs of the exchange, and of the one-kernel form."""
        return self.slices * self.groups

    @property
    def partial_bytes(self) -> int:
        """Of the partial products: fp32 [MAX_ROWS, slices, H/W]. In memory of this rank's own, one a lane."""
        return 4 * MAX_ROWS * self.slices * self.columns

    @property
    def square_bytes(self) -> int:
        """Of the slices' squares: fp32 [groups, MAX_ROWS, slices]. Likewise."""
        return 4 * self.groups * MAX_ROWS * self.slices

    @property
    def threads(self) -> int:
        """Of a block of the exchange that take part in all of it: a warpgroup a tile of 64 rows, no fewer than 256."""
        return 256 if self.box_rows and self.group_tiles * TILE <= 128 else THREADS

    @property
    def block(self) -> int:
        """Threads of a block of the exchange, with the warp that loads."""
        return self.threads + (32 if self.box_rows else 0)

    @property
    def tokens(self) -> tuple[int, ...]:
        """Variants of the exchange, by the rows that they hold at once."""
        return BOX_TOKENS if self.box_rows else TOKENS

    def tokens_for(self, rows: int) -> int:
        """The variant for so many rows.

        Raises:
            InputError: more rows than MAX_ROWS, or none.
        """
        if type(rows) is not int or not 1 <= rows <= MAX_ROWS:
            raise InputError(f"rows: {rows!r} given; accepted are 1 to {MAX_ROWS}")
        return next((tokens for tokens in self.tokens if rows <= tokens), self.tokens[-1])

    def shared_bytes(self, tokens: int) -> int:
        """Dynamic shared memory a CTA of the exchange, for so many rows at once."""
        if self.box_rows:
            return _box_shared_bytes(self.group_tiles * TILE, self.slice_width, tokens, self.ring(tokens))
        return _shared_bytes(self.slice_width, tokens)

    def ring(self, tokens: int) -> int:
        """Stripes of weights that are in shared memory at once on sm_90a's path, of those of a slice."""
        stripes, rows = self.slice_width // STRIPE, self.group_tiles * TILE
        fits = [
            n
            for n in range(1, stripes + 1)
            if _box_shared_bytes(rows, self.slice_width, tokens, n) <= SHARED_LIMITS[self.arch]
        ]
        return fits[-1]

    def window(self, rows: int) -> int:
        """Boxes of weights in flight before a CTA's polls are over."""
        if 2 * 2 * self.group_tiles * TILE * self.slice_width <= SM_SHARED:  # the weights of two CTAs
            return WINDOW - 1
        return WINDOW + 1 if rows <= WIDER_ROWS else WINDOW

    def finish_blocks(self, rows: int, capacity: int) -> int:
        """CTAs of the finish: one for the credits, and a thread for four columns of a row, as far as the grid is
        resident at once."""
        return 1 + min(-(-rows * self.columns // (4 * FINISH_THREADS)), FINISH_BLOCKS * capacity - 1)

    @classmethod
    def choose(
        cls, hidden_size: int, latent_size: int, world_size: int, *, arch: str, capacity: int, general: bool = False
    ) -> Geometry:
        """The cut with the fewest bytes of weights a CTA, counting a slice as SLICE_COST bytes more.

        On sm_90a one for its own path if there is any (the module's docstring); there the mailbox that a CTA polls
        counts too, and a slice as BOX_SLICE_COST.

        Args:
            hidden_size, latent_size, world_size: H, L, W.
            arch: of `compile.ARCHITECTURES`.
            capacity: CTAs that are resident at once for this rank: SMs, or a share of them where ranks share a GPU.
            general: the general path in any case.

        Raises:
            InputError: a shape that does not fall into fragments of 16 bytes, or that the capacity can't hold.
        """
        if arch not in SHARED_LIMITS:
            raise InputError(f"arch: {arch!r} given; accepted are {', '.join(SHARED_LIMITS)}")
        if type(world_size) is not int or not 2 <= world_size <= MAX_WORLD:
            raise InputError(f"world_size: {world_size!r} given; accepted are 2 to {MAX_WORLD}")
        for name, size, multiple in (("hidden_size", hidden_size, 8 * world_size), ("latent_size", latent_size, 8)):
            if type(size) is not int or size < 1 or size % multiple:
                raise InputError(f"{name}: {size!r} given; accepted are multiples of {multiple}")
        if type(capacity) is not int or capacity < 1:
            raise InputError(f"capacity: {capacity!r} given; accepted are whole numbers from 1")
        cells = min(capacity, MAX_CELLS)
        if arch == "sm_90a" and not general:
            boxed = _box_cut(hidden_size // world_size, latent_size, world_size, arch, cells)
            if boxed is not None:
                group_rows, slices = boxed
                return cls(
                    hidden_size=hidden_size,
                    latent_size=latent_size,
                    world_size=world_size,
                    arch=arch,
                    slice_width=latent_size // slices,
                    slices=slices,
                    group_tiles=group_rows // TILE,
                    groups=hidden_size // world_size // group_rows,
                    box_rows=_box_rows(group_rows),
                )
        widest = _widest_slice(arch)
        tiles = -(-hidden_size // world_size // TILE)
        best: tuple[int, int, int, int] | None = None
        for slices in range(-(-latent_size // widest), min(cells, -(-latent_size // STEP)) + 1):
            width = _up(-(-latent_size // slices), STEP)
            if -(-latent_size // width) != slices:
                continue
            group_tiles = -(-tiles // (cells // slices))
            cost = 2 * TILE * group_tiles * width + SLICE_COST * slices
            if best is None or cost < best[0]:
                best = cost, slices, width, group_tiles
        if best is None:
            raise InputError(
                f"latent_size: {latent_size} given; accepted are up to {widest * cells} with {cells} resident blocks"
            )
        _, slices, width, group_tiles = best
        return cls(
            hidden_size=hidden_size,
            latent_size=latent_size,
            world_size=world_size,
            arch=arch,
            slice_width=width,
            slices=slices,
            group_tiles=group_tiles,
            groups=-(-tiles // group_tiles),
        )


def _box_cut(columns: int, latent_size: int, world_size: int, arch: str, cells: int) -> tuple[int, int] | None:
    """Rows of a group and number of slices on sm_90a's path; None if no cut into equal ones fits."""
    cuts = []
    for group_rows in range(GROUP_ROWS[0], GROUP_ROWS[1] + 1, TILE):
        for slices in range(1, cells + 1):
            width = latent_size // slices
            if columns % group_rows or latent_size % (slices * STRIPE) or width > MAX_SLICE:
                continue
            fits = _box_shared_bytes(group_rows, width, BOX_RESIDENT, width // STRIPE) <= SHARED_LIMITS[arch]
            if fits and slices * (columns // group_rows) <= cells:
                polled = 2 * POLL_ROWS * world_size * width
                cuts.append((2 * group_rows * width + polled + BOX_SLICE_COST * slices, group_rows, slices))
    return min(cuts)[1:] if cuts else None


def _widest_slice(arch: str) -> int:
    """The widest slice whose MAX_ROWS rows of z fit in shared memory."""
    room = SHARED_LIMITS[arch] - STATIC_SHARED
    return max(width for width in range(STEP, MAX_SLICE + 1, STEP) if _shared_bytes(width, TOKENS[-1]) <= room)


# Variants


def kernel_variant(
    geometry: Geometry,
    entry: Entry,
    *,
    transport: str = "peer",
    tokens: int = 8,
    expert_weights: torch.dtype | None = None,
    credits: bool = True,
    link: bool = False,
    weights: bool = True,
) -> KernelVariant:
    """One kernel of a tail, for the geometry's architecture.

    Args:
        entry: which.
        transport: "peer" or "multicast".
        tokens: of `geometry.tokens`; only the exchange and the one-kernel form have more than one variant.
        expert_weights: their dtype in the deferred finalize, BF16 or fp32; None where the partial sums are there.
        credits: ranks tell each other what they have emptied; without, a benchmark sees what that costs.
        link: publications can be held back, for benchmarks on one GPU.
        weights: they are read; without, results are garbage, and a benchmark sees what reading them costs.
    """
    multiplies = entry in (Entry.tail_exchange, Entry.tail_whole)
    boxed = multiplies and geometry.box_rows > 0
    deferred = {None: 0, torch.bfloat16: 1, torch.float32: 2}[expert_weights]
    talks = entry is not Entry.tail_next_norm
    archs: Any = (geometry.arch,)
    name = "-".join(
        [
            entry.name.replace("_", "-"),
            f"h{geometry.hidden_size}l{geometry.latent_size}w{geometry.world_size}",
            f"g{geometry.groups}x{geometry.group_tiles}s{geometry.slices}x{geometry.slice_width}",
            *([f"t{tokens}"] if multiplies else []),
            *([f"b{geometry.box_rows}"] if boxed else []),
            *(["unread"] if boxed and not weights else []),
            *(["", "bf16", "fp32"][deferred : deferred + 1] if deferred else []),
            *([transport] if talks else []),
            *([] if credits else ["uncredited"]),
            *(["link"] if link else []),
        ]
    )
    return KernelVariant(
        name=name,
        source="tail_fusion.cu",
        entry=entry.name,
        archs=archs,
        registers=168 if boxed and (geometry.world_size > 8 or tokens > BOX_RESIDENT) else 128,
        transport=transport if talks else None,
        defines={
            "K3_ENTRY": entry.value,
            "K3_HIDDEN": geometry.hidden_size,
            "K3_LATENT": geometry.latent_size,
            "K3_WORLD": geometry.world_size,
            "K3_THREADS": geometry.threads if multiplies else THREADS,
            "K3_FINISH_THREADS": FINISH_THREADS,
            "K3_SLICE": geometry.slice_width,
            "K3_SLICES": geometry.slices,
            "K3_GROUPS": geometry.groups,
            "K3_GROUP_TILES": geometry.group_tiles,
            "K3_TOKENS": tokens,
            "K3_RING": geometry.ring(tokens) if boxed else 0,
            "K3_BOX_ROWS": geometry.box_rows if boxed else 0,
            "K3_NO_WEIGHTS": boxed and not weights,
            "K3_SHARED_BYTES": geometry.shared_bytes(tokens) if boxed else 0,
            "K3_MAX_ROWS": MAX_ROWS,
            "K3_COUNTER_BYTES": COUNTER_BYTES,
            "K3_ARGUMENT_BYTES": ctypes.sizeof(Arguments),
            "K3_MULTICAST": transport == "multicast",
            "K3_DEFERRED": deferred,
            "K3_WHOLE": entry is Entry.tail_whole,
            "K3_CREDITS": credits,
            "K3_LINK": link,
        },
    )


def variants() -> Iterator[KernelVariant]:
    """What the unit tests compile: K3's shape and an odd one, every entry, transport and kind of finalize."""
    for arch, sms in (("sm_90a", 132), ("sm_100a", 148), ("sm_103a", 148), ("sm_120a", 188)):
        k3 = Geometry.choose(7168, 3584, 2, arch=arch, capacity=sms)
        wide = Geometry.choose(7168, 3584, 16, arch=arch, capacity=sms)
        odd = Geometry.choose(2904, 1000, 3, arch=arch, capacity=sms)
        found = [
            kernel_variant(k3, Entry.tail_exchange),
            kernel_variant(k3, Entry.tail_exchange, tokens=k3.tokens[-1], expert_weights=torch.bfloat16),
            kernel_variant(k3, Entry.tail_whole, tokens=16, expert_weights=torch.float32),
            kernel_variant(k3, Entry.tail_finish),
            kernel_variant(k3, Entry.tail_next_norm),
            kernel_variant(k3, Entry.tail_exchange, tokens=16, transport="multicast"),
            kernel_variant(k3, Entry.tail_whole, transport="multicast"),
            kernel_variant(wide, Entry.tail_exchange, tokens=wide.tokens[-1]),
            kernel_variant(wide, Entry.tail_finish, transport="multicast"),
            kernel_variant(odd, Entry.tail_exchange, tokens=64),
        ]
        if k3.box_rows:
            general = Geometry.choose(7168, 3584, 2, arch=arch, capacity=sms, general=True)
            found += [
                kernel_variant(k3, Entry.tail_exchange, tokens=4),
                *(
                    kernel_variant(cut, entry, tokens=tokens, expert_weights=torch.float32)
                    for cut in (Geometry.choose(7168, 3584, world, arch=arch, capacity=sms) for world in (4, 8))
                    for entry in (Entry.tail_exchange, Entry.tail_whole)
                    for tokens in (4, 16)
                ),
                kernel_variant(general, Entry.tail_exchange, tokens=64, expert_weights=torch.bfloat16),
                kernel_variant(general, Entry.tail_whole, tokens=16, expert_weights=torch.float32),
            ]
        # The name says the geometry, and two architectures may have the same one.
        yield from (attrs.evolve(variant, name=f"{variant.name}-{arch}") for variant in found)


# Arguments


class Arguments(ctypes.Structure):
    """What every entry takes, by value: `struct Arguments` of tail_fusion.cu, field by field."""

    _fields_ = (
        ("boxes", ctypes.c_uint64 * 16),
        *((name, ctypes.c_uint64 * MAX_WORLD) for name in ("latent", "shared", "gather", "credits")),
        *((name, ctypes.c_uint64) for name in ("latent_all", "gather_all", "own_latent", "own_shared", "own_gather")),
        *((name, ctypes.c_uint64) for name in ("counters", "record", "partials", "squares")),
        *((name, ctypes.c_uint64) for name in ("region_bytes", "gather_bytes", "deadline_ns")),
        *((name, ctypes.c_uint64) for name in ("routed", "index", "expert_weights", "shared_rows", "norm", "weight")),
        *((name, ctypes.c_uint64) for name in ("residual", "bias", "out", "next_norm", "normed")),
        *((f"{name}_stride", ctypes.c_int64) for name in ("routed", "shared", "weight", "residual")),
        *((name, ctypes.c_int32) for name in ("rank", "rows", "top_k", "layer")),
        ("flags", ctypes.c_uint32),
        ("scale", ctypes.c_float),
        ("eps", ctypes.c_float),
        ("link_cycles", ctypes.c_uint32),
        ("window", ctypes.c_uint32),
        ("spare", ctypes.c_uint32),
    )


NORM_FP32, BIAS_FP32, NEXT_NORM_FP32 = 1, 2, 4
"""Bits of `Arguments.flags`."""


@attrs.frozen(kw_only=True)
class LaneAddresses:
    """Where the mailboxes of a lane are, on every rank, as this rank sees it.

    Attributes:
        latent, shared, gather: in the memory of rank p, this rank's own slot of row 0 (and region 0).
        credits: in the memory of rank p, this rank's word.
        latent_all, gather_all: the same on the multicast address; 0 without.
        own_latent, own_shared, own_gather: in this rank's memory, row 0 of region 0.
        counters: this rank's, COUNTER_BYTES zeros.
        region_bytes: from a region to the next one. gather_bytes: from the first gather mailbox to the second.
    """

    latent: tuple[int, ...]
    shared: tuple[int, ...]
    gather: tuple[int, ...]
    credits: tuple[int, ...]
    latent_all: int
    gather_all: int
    own_latent: int
    own_shared: int
    own_gather: int
    counters: int
    region_bytes: int
    gather_bytes: int

    @classmethod
    def of(
        cls,
        *,
        rank: int,
        blocks: Sequence[int],
        latent: int,
        shared: int,
        gather: int,
        counters: int,
        region_bytes: int,
        gather_bytes: int,
        latent_size: int,
        columns: int,
        multicast: int = 0,
        loopback: bool = False,
    ) -> LaneAddresses:
        """From the addresses of all ranks' blocks, and where in a block each part begins.

        Args:
            rank: this rank.
            blocks: address of each rank's block. multicast: of all of them; 0 without.
            latent, shared, gather, counters: bytes from there; of region 0 (`MailboxLayout`).
            region_bytes, gather_bytes: from a region to the next one, and from the first gather mailbox to the second.
            latent_size, columns: L and H/W.
            loopback: this rank stands for all of them: what it sends to rank p goes into its own memory, as rank p's.
                For tests and benchmarks on one GPU.
        """
        own = blocks[rank]

        def slots(part: int, nbytes: int) -> tuple[int, ...]:
            if loopback:
                return tuple(own + part + nbytes * p for p in range(len(blocks)))
            return tuple(block + part + nbytes * rank for block in blocks)

        return cls(
            latent=slots(latent, 2 * latent_size),
            shared=slots(shared, 2 * columns),
            gather=slots(gather, 2 * columns),
            credits=slots(counters + CREDITS, 8),
            latent_all=multicast and multicast + latent + 2 * latent_size * rank,
            gather_all=multicast and multicast + gather + 2 * columns * rank,
            own_latent=own + latent,
            own_shared=own + shared,
            own_gather=own + gather,
            counters=own + counters,
            region_bytes=region_bytes,
            gather_bytes=gather_bytes,
        )


# Time-outs


PHASES: Final = {1: "completion", 2: "latent", 3: "shared", 4: "partials", 5: "gather", 6: "credit"}
"""`enum Phase` of mailbox.cuh."""

OPERATIONS: Final = {1: "moe_tail"}
"""`enum Operation` of mailbox.cuh."""

MAX_MAPS: Final = 4096
"""Tensor maps that are kept, one a layer; weights that have to be copied for every call would otherwise add up."""

RECORD_WORDS: Final = 16
"""Of a record in pinned memory; nine are used."""


@attrs.frozen
class Expired:
    """What a wait on the device left behind when its deadline passed.

    Attributes:
        operation: "moe_tail". phase: of PHASES. layer, call, token: which.
        peer: whose data did not come; this rank itself in the phases "completion" and "partials".
        rank: who waited.
    """

    operation: str
    layer: int
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
            layer,
            high << 32 | low,
            PHASES.get(phase, str(phase)),
            token,
            peer,
            rank,
        )

    def error(self, world_size: int, lane: int, seconds: float) -> PeerTimeoutError:
        """What to raise for it."""
        what = (
            f"{self.operation} on rank {self.rank} of {world_size}: layer {self.layer}, call {self.call} of lane "
            f"{lane}, phase {self.phase}, token {self.token}: "
        )
        if self.peer == self.rank and self.phase in ("completion", "partials"):
            return PeerTimeoutError(f"{what}a kernel of this rank did not end within {seconds:g} s", (self.peer,))
        return PeerTimeoutError(
            f"{what}nothing from rank {self.peer} within {seconds:g} s (settings.poll_deadline); it is late, or gone",
            (self.peer,),
        )


# Launches


def aligned_rows(x: Tensor) -> Tensor:
    """x [m, n] BF16 as the kernels read it: elements side by side, rows at multiples of 16 bytes. Copied if need be."""
    rows_fit = x.shape[0] <= 1 or x.stride(0) % 8 == 0
    if x.stride(1) == 1 and rows_fit and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def aligned_vector(x: Tensor) -> Tensor:
    """x [n] likewise."""
    if x.stride(0) == 1 and x.data_ptr() % 16 == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


class TailKernels:
    """The kernels of a tail on one GPU, compiled, loaded and ready; one call at a time in each lane.

    Args:
        geometry: how it is cut.
        rank: this rank.
        device: the GPU.
        lanes: the mailboxes of each lane, filled, and a barrier behind that.
        eps: of the RMSNorms.
        transport: "peer" or "multicast".
        capacity: CTAs that are resident at once for this rank, as for the geometry.
        deferred: dtypes of expert weights that `__call__` will be given.
        forms: what `__call__` will be asked for.
        settings: `pdl` and `poll_deadline` count, and where kernels are cached.
        credits, link_cycles, window, weights: for benchmarks; `kernel_variant`, and by how many cycles a publication
            is held back.

    Attributes:
        record: int32 [RECORD_WORDS], pinned: see `Expired`.
        launches: how often a kernel was launched, or captured.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        rank: int,
        device: torch.device,
        lanes: Sequence[LaneAddresses],
        eps: float,
        capacity: int,
        transport: str = "peer",
        deferred: Sequence[torch.dtype] = (torch.bfloat16, torch.float32),
        forms: Sequence[Form] = (Form.SPLIT, Form.WHOLE),
        settings: Settings | None = None,
        credits: bool = True,
        link_cycles: int = 0,
        window: int | None = None,
        weights: bool = True,
    ) -> None:
        settings = Settings() if settings is None else settings
        self.geometry = geometry
        self.rank = rank
        self.device = device
        self.record = torch.zeros(RECORD_WORDS, dtype=torch.int32, pin_memory=True)
        options: dict[str, Any] = {"transport": transport, "credits": credits, "link": link_cycles > 0}
        options["weights"] = weights
        self._window = window

        def launch(entry: Entry, grid: int, block: int, shared: int = 0, **kind: Any) -> Launch:
            compiled = compile_kernel(kernel_variant(geometry, entry, **options, **kind), geometry.arch, settings)
            shape = LaunchShape(grid=grid, block=block, shared=shared, pdl=True)
            kernel = load_kernel(compiled, device)
            kernel.prefer_shared()  # kernels of a chain share an SM only if they split its memory alike
            return Launch(kernel, shape, settings, resident=entry is not Entry.tail_next_norm)

        self._first: dict[tuple[Form, int, torch.dtype | None], Launch] = {}
        for form in forms:
            entry = Entry.tail_whole if form is Form.WHOLE else Entry.tail_exchange
            for tokens in geometry.tokens:
                for dtype in (None, *deferred):
                    self._first[form, tokens, dtype] = launch(
                        entry,
                        geometry.blocks,
                        geometry.block,
                        geometry.shared_bytes(tokens),
                        tokens=tokens,
                        expert_weights=dtype,
                    )
        self._maps: dict[tuple[int, int], bytes] = {}
        rows = range(1, MAX_ROWS + 1)
        self._finish: dict[int, Launch] = {}
        if Form.SPLIT in forms:
            self._finish = {
                m: launch(Entry.tail_finish, geometry.finish_blocks(m, capacity), FINISH_THREADS) for m in rows
            }
        self._next_norm = {m: launch(Entry.tail_next_norm, m, THREADS) for m in rows}
        self._workspaces = [
            torch.empty((geometry.partial_bytes + geometry.square_bytes) // 4, dtype=torch.float32, device=device)
            for _ in lanes
        ]
        self._arguments = [
            self._lane_arguments(lane, workspace, eps, settings.poll_deadline, link_cycles)
            for lane, workspace in zip(lanes, self._workspaces, strict=True)
        ]

    def _lane_arguments(
        self, lane: LaneAddresses, workspace: Tensor, eps: float, deadline: float, link_cycles: int
    ) -> Arguments:
        given = attrs.asdict(lane)
        lists = {
            name: (ctypes.c_uint64 * MAX_WORLD)(*given.pop(name)) for name in ("latent", "shared", "gather", "credits")
        }
        return Arguments(
            **lists,
            **given,
            record=self.record.data_ptr(),
            partials=workspace.data_ptr(),
            squares=workspace.data_ptr() + self.geometry.partial_bytes,
            deadline_ns=int(deadline * 1e9),
            rank=self.rank,
            eps=eps,
            link_cycles=link_cycles,
        )

    def _boxes(self, weight: Tensor) -> bytes:
        """The tensor map of this rank's [H/W, L]; it depends on nothing but the key here and the geometry."""
        place = weight.data_ptr(), weight.stride(0)
        found = self._maps.get(place)
        if found is None:
            if len(self._maps) >= MAX_MAPS:
                self._maps.clear()
            found = self._maps[place] = self._make_boxes(weight)
        return found

    def _make_boxes(self, weight: Tensor) -> bytes:
        return tensor_map(weight, (self.geometry.box_rows, STRIPE))

    @property
    def launches(self) -> int:
        """How many kernels were launched, or captured."""
        every = (*self._first.values(), *self._finish.values(), *self._next_norm.values())
        return sum(launch.count for launch in every)

    def __call__(
        self,
        *,
        routed: Tensor | Deferred,
        shared: Tensor,
        up_weight: Tensor,
        sharded: bool,
        norm_weight: Tensor | None = None,
        residual: Tensor | None = None,
        up_bias: Tensor | None = None,
        routed_scale: float = 1.0,
        next_norm_weight: Tensor | None = None,
        normed: Tensor | None = None,
        out: Tensor | None = None,
        form: Form = Form.SPLIT,
        lane: int = 0,
        layer: int = 0,
    ) -> Tensor:
        """One call, on torch's current stream: every rank makes it, with equal m.

        Args:
            routed: [m, L] BF16, or what it is still to be made of.
            shared: [m, H]. residual: [m, H]. up_weight: [H, L], or this rank's [H/W, L] if `sharded`. All BF16.
            norm_weight [L], up_bias [H], next_norm_weight [H]: BF16 or fp32.
            normed: [m, H], contiguous, for the next RMSNorm; with `next_norm_weight`.
            out: [m, H], contiguous; made if None.
            form: split or whole. lane: of those given. layer: for time-outs.

        Returns:
            [m, H], finished.

        Raises:
            InputError: m out of range.
        """
        geometry, columns, rank = self.geometry, self.geometry.columns, self.rank
        rows = shared.shape[0]
        tokens = geometry.tokens_for(rows)
        if out is None:
            out = shared.new_empty(rows, geometry.hidden_size)
        a = self._arguments[lane]
        dtype = None
        keep = []  # copies have to live until their kernels are queued; then the stream orders their reuse
        if isinstance(routed, Deferred):
            source = aligned_rows(routed.rows)
            index = routed.permuted_index.contiguous()
            weights = routed.weights.contiguous()
            dtype = weights.dtype
            keep += [index, weights]
            a.index, a.expert_weights, a.top_k = index.data_ptr(), weights.data_ptr(), index.numel() // rows
        else:
            source = aligned_rows(routed)
        shared = aligned_rows(shared)
        weight = aligned_rows(up_weight if sharded else up_weight[rank * columns : (rank + 1) * columns])
        a.routed, a.routed_stride = source.data_ptr(), source.stride(0)
        a.shared_rows, a.shared_stride = shared.data_ptr(), shared.stride(0)
        a.weight, a.weight_stride = weight.data_ptr(), weight.stride(0)
        if geometry.box_rows:
            ctypes.memmove(ctypes.addressof(a), self._boxes(weight), MAP_BYTES)  # the first field
        a.norm = a.bias = a.residual = a.next_norm = a.flags = 0
        if norm_weight is not None:
            norm_weight = aligned_vector(norm_weight)
            a.norm = norm_weight.data_ptr()
            a.flags |= NORM_FP32 * (norm_weight.dtype == torch.float32)
        if residual is not None:
            residual = aligned_rows(residual)
            a.residual, a.residual_stride = residual.data_ptr(), residual.stride(0)
        if up_bias is not None:
            up_bias = aligned_vector(up_bias)
            a.bias = up_bias.data_ptr() + rank * columns * up_bias.element_size()
            a.flags |= BIAS_FP32 * (up_bias.dtype == torch.float32)
        if next_norm_weight is not None and normed is not None:
            next_norm_weight = aligned_vector(next_norm_weight)
            a.next_norm, a.normed = next_norm_weight.data_ptr(), normed.data_ptr()
            a.flags |= NEXT_NORM_FP32 * (next_norm_weight.dtype == torch.float32)
        a.out, a.rows, a.layer, a.scale = out.data_ptr(), rows, layer, routed_scale
        a.window = self._window or geometry.window(rows)
        packed = bytes(a)
        self._first[form, tokens, dtype](packed)
        if form is Form.SPLIT:
            self._finish[rows](packed)
        if a.next_norm:
            self._next_norm[rows](packed)
        del keep
        return out


def geometry_for(
    hidden_size: int, latent_size: int, world_size: int, device: torch.device, ranks_here: int = 1
) -> Geometry:
    """The geometry on a device; `ranks_here` ranks share it and run at once.

    Raises:
        InputError: as `Geometry.choose`, or a compute capability that no kernel is made for.
    """
    return Geometry.choose(
        hidden_size,
        latent_size,
        world_size,
        arch=arch_of(torch.cuda.get_device_capability(device)),
        capacity=torch.cuda.get_device_properties(device).multi_processor_count // ranks_here,
    )
