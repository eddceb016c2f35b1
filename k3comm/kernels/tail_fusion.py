"""The fused decode tail on a GPU, as the host sees it: variants, workspace, arguments, launches.

**Forms.** Split: `tail_exchange` writes partial products and ends, `tail_finish` does the rest; in a chain with
programmatic dependent launch the next call's first loads start under it. Whole: `tail_whole`, one kernel, where nothing
can start under it. Both give the same bits.

**Numerics.** s * g goes in as two BF16 terms, r = rsqrt(mean square) multiplies afterwards (K0, docs/tiers.md). Where
the first term is not finite the second is zero.

**The formal argument** (PTX memory model) that what a call empties is ordered before the peers' next stores there are
credits: `exchange_credits` of mailbox.cuh, a release and an acquire at system scope a pair of ranks and call, by a CTA
of its own beside the exchange. Fences before the publications say the same and cost 0.9 to 1.9 us a call on an H200
(docs/performance.md); what buys their place is one gather mailbox more. `credits=False` leaves them out, for
measuring what they cost.

Not run on hardware: multicast (compiled, and the PTX inspected; all but the two `multimem.st` is the peer form's), and
every architecture but sm_90a.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from enum import Enum, unique
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from torch import Tensor

from k3comm.kernels.compile import KernelVariant, compile_kernel
from k3comm.kernels.expiry import RECORD_WORDS
from k3comm.kernels.finalize import Deferred
from k3comm.kernels.launch import MAP_BYTES, Launch, LaunchShape, load_kernel, tensor_map
from k3comm.kernels.tail_geometry import (
    BOX_RESIDENT,
    CELL_ROWS,
    FINISH_THREADS,
    MAX_CELLS,
    MAX_ROWS,
    MAX_WORLD,
    STRIPE,
    THREADS,
    Geometry,
)
from k3comm.settings import Settings

if TYPE_CHECKING:
    from k3comm.buffers.mailbox import MailboxLayout

COMPLETIONS: Final = 1 << 20
"""What a call that is done whole adds to the completion word, as in mailbox.cuh."""

COUNTER_BYTES: Final = 12 * MAX_CELLS + 128 + 128
"""Of a lane's counters: zeros at the start, like `struct Counters` of mailbox.cuh."""

EMPTY_BYTE: Final = 0xFF
"""Each one of an empty word, as in mailbox.cuh."""

CREDITS: Final = COUNTER_BYTES - 8 * MAX_WORLD
"""Where the credits are in the counters."""

COMPLETED: Final = 12 * MAX_CELLS // 8
CREDITED: Final = COMPLETED + 1
"""Words of 8 bytes of the counters: COMPLETIONS for each call that is done whole; calls whose credits are in."""


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
    two_shot: bool | None = None,
    cells: bool = False,
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
        two_shot: as `Geometry.two_shot` takes it: each row is summed once, or not, where that can be chosen.
        cells: in the one-kernel form the products of up to CELL_ROWS rows are their own flags, and not counted.
    """
    multiplies = entry in (Entry.tail_exchange, Entry.tail_whole)
    boxed = multiplies and geometry.box_rows > 0
    two_shot = multiplies and geometry.two_shot(tokens, two_shot)
    cells = cells and entry is Entry.tail_whole and tokens <= CELL_ROWS
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
            *(["two-shot"] if two_shot else []),
            *(["cells"] if cells else []),
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
            "K3_RING": geometry.ring(tokens, two_shot) if boxed else 0,
            "K3_TWO_SHOT": two_shot,
            "K3_Z_RING": geometry.z_ring if two_shot else 0,
            "K3_BOX_ROWS": geometry.box_rows if boxed else 0,
            "K3_NO_WEIGHTS": boxed and not weights,
            "K3_SHARED_BYTES": geometry.shared_bytes(tokens, two_shot) if boxed else 0,
            "K3_MAX_ROWS": MAX_ROWS,
            "K3_CELL_ROWS": CELL_ROWS if cells else 0,
            "K3_CELLS_AT": geometry.cells_at if cells else 0,
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
                kernel_variant(k3, Entry.tail_exchange, tokens=64),
                kernel_variant(k3, Entry.tail_whole, tokens=16, cells=True),
                kernel_variant(k3, Entry.tail_exchange, tokens=64, two_shot=False),
                kernel_variant(k3, Entry.tail_whole, tokens=32, two_shot=True, expert_weights=torch.bfloat16),
                kernel_variant(wide, Entry.tail_whole, tokens=64, transport="multicast"),
                *(
                    kernel_variant(cut, entry, tokens=tokens, expert_weights=torch.float32)
                    for cut in (Geometry.choose(7168, 3584, world, arch=arch, capacity=sms) for world in (4, 8))
                    for entry in (Entry.tail_exchange, Entry.tail_whole)
                    for tokens in (4, 16)
                ),
                kernel_variant(wide, Entry.tail_whole, tokens=8, cells=True),
                kernel_variant(general, Entry.tail_exchange, tokens=64, expert_weights=torch.bfloat16),
                kernel_variant(general, Entry.tail_whole, tokens=16, expert_weights=torch.float32),
                kernel_variant(general, Entry.tail_whole, tokens=16, expert_weights=torch.float32, cells=True),
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
        ("poll_window", ctypes.c_uint32),
    )


NORM_FP32, BIAS_FP32, NEXT_NORM_FP32, FRESH_WEIGHTS = 1, 2, 4, 8
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

    @classmethod
    def of_lane(
        cls,
        layout: MailboxLayout,
        lane: int,
        *,
        rank: int,
        blocks: Sequence[int],
        multicast: int = 0,
        loopback: bool = False,
    ) -> LaneAddresses:
        """Of one lane of mailboxes; as `of`, with `blocks` and `multicast` where the layout begins."""
        return cls.of(
            rank=rank,
            blocks=blocks,
            latent=layout.latent(lane, 0),
            shared=layout.shared(lane, 0),
            gather=layout.gather(lane),
            counters=layout.counters(lane),
            region_bytes=layout.latent(lane, 1) - layout.latent(lane, 0),
            gather_bytes=layout.gather_bytes,
            latent_size=layout.latent_size,
            columns=layout.columns,
            multicast=multicast,
            loopback=loopback,
        )


# Launches

MAX_MAPS: Final = 4096
"""Tensor maps that are kept, one a layer; weights that have to be copied for every call would otherwise add up."""


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
        credits, link_cycles, windows, weights, two_shot, cells: for benchmarks; `kernel_variant`, and by how many
            cycles a publication is held back.

    Attributes:
        record: int32 [RECORD_WORDS], pinned: see `expiry.Expired`.
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
        windows: tuple[int, int] | None = None,
        weights: bool = True,
        two_shot: bool | None = None,
        cells: bool = False,
    ) -> None:
        settings = Settings() if settings is None else settings
        self.geometry = geometry
        self.rank = rank
        self.device = device
        self.record = torch.zeros(RECORD_WORDS, dtype=torch.int32, pin_memory=True)
        options: dict[str, Any] = {"transport": transport, "credits": credits, "link": link_cycles > 0}
        options |= {"weights": weights, "two_shot": two_shot, "cells": cells}
        self._windows = {m: windows or geometry.windows(m, two_shot, pdl=settings.pdl) for m in range(1, MAX_ROWS + 1)}

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
                        geometry.blocks + (form is Form.WHOLE),
                        geometry.block(tokens, two_shot),
                        geometry.shared_bytes(tokens, two_shot),
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
        self._cells = cells
        size = geometry.workspace_bytes(two_shot, cells=cells)
        self._workspaces = [torch.empty(size, dtype=torch.uint8, device=device) for _ in lanes]
        self.fill()
        self._arguments = [
            self._lane_arguments(lane, workspace, eps, settings.poll_deadline, link_cycles)
            for lane, workspace in zip(lanes, self._workspaces, strict=True)
        ]

    def fill(self) -> None:
        """Workspaces as before the first call, which begins at number 0. On torch's current stream."""
        flags = self.geometry.partial_bytes + self.geometry.square_bytes
        for workspace in self._workspaces:
            workspace[flags:].zero_()
            if self._cells:
                workspace[-self.geometry.cell_bytes :].fill_(EMPTY_BYTE)

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
        given = up_weight if sharded else up_weight[rank * columns : (rank + 1) * columns]
        weight = aligned_rows(given)
        a.routed, a.routed_stride = source.data_ptr(), source.stride(0)
        a.shared_rows, a.shared_stride = shared.data_ptr(), shared.stride(0)
        a.weight, a.weight_stride = weight.data_ptr(), weight.stride(0)
        if geometry.box_rows:
            ctypes.memmove(ctypes.addressof(a), self._boxes(weight), MAP_BYTES)  # the first field
        a.norm = a.bias = a.residual = a.next_norm = 0
        a.flags = FRESH_WEIGHTS * (weight is not given)
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
        a.window, a.poll_window = self._windows[rows]
        packed = bytes(a)
        self._first[form, tokens, dtype](packed)
        if form is Form.SPLIT:
            self._finish[rows](packed)
        if a.next_norm:
            self._next_norm[rows](packed)
        del keep
        return out
