"""The one-shot all-reduce of a lane with the latent norm in its epilogue, as the host sees it: cut, layout, launches.

A lane is [m, L + H] BF16, rows contiguous, in memory that every rank can read; lane_one_shot.cu says what is computed
and how the ranks meet. Every rank reads all lanes whole, (W - 1) times the bytes of one, in a single hop: the way for
few rows, where hops cost and bytes don't.

**Order.** A CTA's threads store or, where experts wrote into the lane, kernels before this one did; one release at
system scope a peer comes after that, one acquire before anything of the peer's is read, and the same again before the
lane may be written. No fence, no reset: the words count calls.

**Grid.** The same for every m and on every rank, so it is agreed by the caller (`OneShot.start`): each CTA counts the
calls in a cell of its own, as in the fused tail, and meets the peers' CTA of the same number. CTAs without work leave
at once. At most MAX_BLOCKS, one an SM, so that the whole grid is resident.

Run on H200s (two, and four ranks on one); for other architectures compiled, and run on the tests' CPU emulator.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Final

import attrs
import torch
from torch import Tensor

from k3comm.errors import InputError
from k3comm.kernels.compile import KernelVariant, arch_of, compile_kernel
from k3comm.kernels.expiry import RECORD_WORDS
from k3comm.kernels.launch import Launch, LaunchShape, load_kernel
from k3comm.kernels.tail_fusion import COUNTER_BYTES, aligned_rows, aligned_vector
from k3comm.kernels.tail_geometry import MAX_CELLS, MAX_WORLD
from k3comm.settings import Settings

MAX_BLOCKS: Final = 128
"""CTAs at most: what a GPU of 132 SMs holds one an SM, with some to spare. No other number was tried."""

THREADS: Final = (128, 512)
"""Of a block: the fewest, and the most."""

MAX_SPAN: Final = 4
"""Fragments of a latent row a thread at most: they stay in registers until the row's mean square is known."""

FRAGMENT: Final = 8
"""BF16 elements that a thread loads at once: 16 bytes."""

ALIGNMENT: Final = 128
"""Bytes; of every part of the layout: a cache line."""


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@attrs.frozen
class Cut:
    """How a row is cut into units. Made by `of`.

    Attributes:
        hidden_size, latent_size, world_size: H, L, W.
        threads: of a block.
    """

    hidden_size: int
    latent_size: int
    world_size: int
    threads: int

    @classmethod
    def of(cls, hidden_size: int, latent_size: int, world_size: int) -> Cut:
        """The cut with the fewest fragments of a latent row a thread.

        Raises:
            InputError: widths that don't fall into fragments, a latent row wider than a block holds, or W out of range.
        """
        widest = MAX_SPAN * THREADS[1] * FRAGMENT
        if type(world_size) is not int or not 2 <= world_size <= MAX_WORLD:
            raise InputError(f"world_size: {world_size!r} given; accepted are 2 to {MAX_WORLD}")
        if type(hidden_size) is not int or hidden_size < 1 or hidden_size % FRAGMENT:
            raise InputError(f"hidden_size: {hidden_size!r} given; accepted are multiples of {FRAGMENT}")
        if type(latent_size) is not int or not 1 <= latent_size <= widest or latent_size % FRAGMENT:
            raise InputError(f"latent_size: {latent_size!r} given; accepted are multiples of {FRAGMENT} up to {widest}")
        fragments = latent_size // FRAGMENT
        span = -(-fragments // THREADS[1])
        return cls(hidden_size, latent_size, world_size, max(_up(-(-fragments // span), 32), THREADS[0]))

    @property
    def units(self) -> int:
        """Units of a row: the latent part, and pieces of the shared part."""
        return 1 + -(-self.hidden_size // (FRAGMENT * self.threads))


@attrs.frozen(kw_only=True)
class LaneLayout:
    """Where everything is in a rank's block, by micro-batch: words and counters, then the lane. Offsets in bytes.

    Attributes:
        width: L + H, elements of a row, BF16. rows: of a lane. world_size: W. lanes: micro-batches in flight.
    """

    width: int
    rows: int
    world_size: int
    lanes: int = 1

    @property
    def head_bytes(self) -> int:
        """Of what is zero at the start: the counters, and the peers' words [W, MAX_CELLS] of 8 bytes."""
        return _up(COUNTER_BYTES, ALIGNMENT) + self.world_size * MAX_CELLS * 8

    @property
    def lane_bytes(self) -> int:
        """Of one micro-batch."""
        return self.head_bytes + _up(2 * self.rows * self.width, ALIGNMENT)

    @property
    def nbytes(self) -> int:
        """Of the whole."""
        return self.lanes * self.lane_bytes

    def counters(self, lane: int) -> int:
        """Where the counters begin."""
        return lane * self.lane_bytes

    def words(self, lane: int, sender: int) -> int:
        """Where the words of a peer begin."""
        return self.counters(lane) + _up(COUNTER_BYTES, ALIGNMENT) + sender * MAX_CELLS * 8

    def data(self, lane: int) -> int:
        """Where the lane itself begins."""
        return self.counters(lane) + self.head_bytes


def kernel_variant(cut: Cut) -> KernelVariant:
    """The kernel for one cut."""
    return KernelVariant(
        name=f"lane-one-shot-h{cut.hidden_size}l{cut.latent_size}w{cut.world_size}",
        source="lane_one_shot.cu",
        entry="lane_one_shot",
        registers=64 if cut.latent_size <= FRAGMENT * cut.threads else 128,  # 512 threads of 128 fill an SM
        transport="peer",
        defines={
            "K3_HIDDEN": cut.hidden_size,
            "K3_LATENT": cut.latent_size,
            "K3_WORLD": cut.world_size,
            "K3_THREADS": cut.threads,
            "K3_COUNTER_BYTES": COUNTER_BYTES,
            "K3_ARGUMENT_BYTES": ctypes.sizeof(Arguments),
            "K3_MULTICAST": 0,
        },
    )


def variants() -> Iterator[KernelVariant]:
    """What the unit tests compile: K3's shape, an odd one, and the widest latent row."""
    for world in (2, 4, 8, 16):
        yield kernel_variant(Cut.of(7168, 3584, world))
    yield kernel_variant(Cut.of(2904, 1000, 3))
    yield kernel_variant(Cut.of(8192, 16384, 16))


class Arguments(ctypes.Structure):
    """What the kernel takes, by value: `struct Arguments` of lane_one_shot.cu, field by field."""

    _fields_ = (
        *((name, ctypes.c_uint64 * MAX_WORLD) for name in ("lanes", "words")),
        *((name, ctypes.c_uint64) for name in ("own_words", "lane", "counters", "record", "deadline_ns")),
        *((name, ctypes.c_uint64) for name in ("routed", "shared", "norm", "z", "sums")),
        *((name, ctypes.c_int64) for name in ("routed_stride", "shared_stride")),
        *((name, ctypes.c_int32) for name in ("rank", "rows", "layer")),
        ("flags", ctypes.c_uint32),
        ("eps", ctypes.c_float),
        ("spare", ctypes.c_uint32),
    )


NORM_FP32: Final = 1
"""Bit of `Arguments.flags`."""


class OneShot:
    """The kernel on one GPU; one call at a time in each lane. Usable once `start` has said how many CTAs it has.

    Args:
        cut: of the shape. layout: of every rank's block.
        rank: this rank.
        device: the GPU.
        blocks: address of every rank's block, where the layout begins, in rank order. What the layout calls zero is
            zero, and a barrier of all ranks comes before the first call.
        eps: of the norm.
        settings: `pdl` and `poll_deadline` count, and where kernels are cached.

    Attributes:
        record: int32 [RECORD_WORDS], pinned: see `expiry.Expired`.
        capacity: CTAs that the whole device can hold at once, up to one an SM.

    Raises:
        InputError: no kernel is made for this GPU.
        KernelError: the kernel can't be compiled or loaded.
    """

    def __init__(
        self,
        cut: Cut,
        layout: LaneLayout,
        *,
        rank: int,
        device: torch.device,
        blocks: Sequence[int],
        eps: float,
        settings: Settings,
    ) -> None:
        self.cut = cut
        self.record = torch.zeros(RECORD_WORDS, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._settings = settings
        self._arguments = [
            _lane_arguments(layout, lane, rank, blocks, self.record.data_ptr(), eps, settings.poll_deadline)
            for lane in range(layout.lanes)
        ]
        self._launch: Launch | None = None
        self.capacity = self._load(device)

    def _load(self, device: torch.device) -> int:
        arch = arch_of(torch.cuda.get_device_capability(device))
        self._kernel = load_kernel(compile_kernel(kernel_variant(self.cut), arch, self._settings), device)
        fits = self._kernel.resident_blocks(self._shape(1))
        return min(fits, torch.cuda.get_device_properties(device).multi_processor_count)

    def _shape(self, blocks: int) -> LaunchShape:
        return LaunchShape(grid=blocks, block=self.cut.threads, pdl=True)

    def start(self, blocks: int) -> None:
        """Fixes the grid, once, before the first call; the same on every rank.

        Raises:
            InputError: out of range. KernelError: more than the device holds at once.
        """
        if type(blocks) is not int or not 1 <= blocks <= MAX_BLOCKS:
            raise InputError(f"blocks: {blocks!r} given; accepted are 1 to {MAX_BLOCKS}")
        self._launch = Launch(self._kernel, self._shape(blocks), self._settings, resident=True)

    def _run(self, packed: bytes) -> None:
        if self._launch is None:
            raise InputError("blocks: none given; start() comes before the first call")
        self._launch(packed)

    def __call__(
        self,
        rows: int,
        routed: Tensor | None,
        shared: Tensor | None,
        norm_weight: Tensor | None,
        *,
        device: torch.device,
        lane: int = 0,
        layer: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """One call, on torch's current stream: every rank makes it, with equal m.

        Args:
            rows: m, up to what the layout holds.
            routed: [m, L] BF16, or None where it stands in the lane. shared: [m, H], likewise. Neither may lie over the
                lane's rows.
            norm_weight: [L], BF16 or fp32, or None for a layer without norm.
            device: where the results go.
            lane: of the layout's. layer: for time-outs.

        Returns:
            z [m, L] BF16, the normed latent sum, rounded once; and the shared sum [m, H] in fp32.
        """
        cut, a = self.cut, self._arguments[lane]
        z = torch.empty(rows, cut.latent_size, dtype=torch.bfloat16, device=device)
        sums = torch.empty(rows, cut.hidden_size, dtype=torch.float32, device=device)
        a.routed = a.shared = a.norm = a.flags = 0
        if routed is not None:
            routed = aligned_rows(routed)
            a.routed, a.routed_stride = routed.data_ptr(), routed.stride(0)
        if shared is not None:
            shared = aligned_rows(shared)
            a.shared, a.shared_stride = shared.data_ptr(), shared.stride(0)
        if norm_weight is not None:
            norm_weight = aligned_vector(norm_weight)
            a.norm, a.flags = norm_weight.data_ptr(), NORM_FP32 * (norm_weight.dtype == torch.float32)
        a.z, a.sums, a.rows, a.layer = z.data_ptr(), sums.data_ptr(), rows, layer
        self._run(bytes(a))
        return z, sums


def _lane_arguments(
    layout: LaneLayout, lane: int, rank: int, blocks: Sequence[int], record: int, eps: float, deadline: float
) -> Arguments:
    own = blocks[rank]
    return Arguments(
        lanes=(ctypes.c_uint64 * MAX_WORLD)(*(block + layout.data(lane) for block in blocks)),
        words=(ctypes.c_uint64 * MAX_WORLD)(*(block + layout.words(lane, rank) for block in blocks)),
        own_words=own + layout.words(lane, 0),
        lane=own + layout.data(lane),
        counters=own + layout.counters(lane),
        record=record,
        deadline_ns=int(deadline * 1e9),
        rank=rank,
        eps=eps,
    )
