"""The fused tail's kernels on a CPU: their own source, built by g++ over `emulator/words.cuh`, a fiber a CUDA thread.

What this shows: indices, strides, layouts, the arguments that the host packs, the protocol between ranks that run at
once in changing orders, with fragments that arrive torn, and that between kernels of a rank that overlap. What it
can't: timing, weak memory, and what the tensor cores round (here each product is added in fp32).
"""

from __future__ import annotations

import ctypes
import enum
import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from k3comm.buffers.mailbox import COUNTER_BYTES, EMPTY, MailboxLayout
from k3comm.kernels.compile import FOLDER
from k3comm.kernels.expiry import RECORD_WORDS
from k3comm.kernels.tail_fusion import (
    COMPLETED,
    COMPLETIONS,
    CREDITED,
    Arguments,
    Entry,
    Form,
    LaneAddresses,
    TailKernels,
    kernel_variant,
)
from k3comm.kernels.tail_geometry import FINISH_THREADS, MAX_CELLS, MAX_ROWS, STRIPE, Geometry

THREADS = 64
"""Of a block of the exchange on the general path, where the GPU has 512: fewer fibers. No sum depends on it."""

HERE = Path(__file__).parent / "emulator"

SOURCES = {
    "tail_fusion.cu": "tail_fusion.cpp",
    "tail_general.cuh": "tail_general.cuh",
    "tail_hopper.cuh": "tail_hopper.cuh",
    "tail_finish.cuh": "tail_finish.cuh",
    "tail_two_shot.cuh": "tail_two_shot.cuh",
}
"""The kernels, in whose copies shared memory is declared otherwise, and the copies' names."""

SHARED = {
    r"extern __shared__ __align__\(\d+\) char memory\[\];": "char* memory = dynamic_shared();",
    r"__shared__ u64 number;": "u64& number = *fixed_shared<u64>(0);",
    r"__shared__ u64 said\[2\];": "u64* said = fixed_shared<u64>(0);",
    r"__shared__ float sums\[WARPS\];": "float* sums = fixed_shared<float>(64);",
}


class Overlap(enum.Enum):
    """How the kernels of a rank follow each other: `enum Overlap` of emulator.cpp."""

    NONE = 0  # one after another
    PDL = 1  # the next starts once all CTAs have let it, and waits when it says so
    FOREIGN = 2  # likewise, and between calls stands a kernel that is not ours, lets the next start and never waits


class Kernel(ctypes.Structure):
    """`struct Kernel` of emulator.cpp."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("entry", "grid", "block", "shared"))


def threads(geometry: Geometry) -> int:
    """Of a block of the exchange that take part in all of it. On sm_90a's path it counts which of them multiply."""
    return geometry.threads if geometry.box_rows else THREADS


def build(
    folder: Path,
    geometry: Geometry,
    tokens: int,
    expert_weights: torch.dtype | None = None,
    ring: int = 0,
    two_shot: bool | None = None,
    cells: bool = False,
) -> Any:
    """The kernels for one geometry as a library; with `ring` stripes of weights in shared memory, where not all, and in
    two shots one more of z."""
    folder.mkdir(parents=True, exist_ok=True)
    unused = set(SHARED)
    for name, copy in SOURCES.items():
        source = (FOLDER / name).read_text(encoding="utf-8")
        for pattern, replacement in SHARED.items():
            source, count = re.subn(pattern, replacement, source)
            unused -= {pattern} if count else set()
        assert "__shared__" not in re.sub(r"//.*", "", source)
        (folder / copy).write_text(source, encoding="utf-8")
    assert not unused
    shutil.copy(FOLDER / "mailbox.cuh", folder)
    for name in ("words.cuh", "hopper.cuh", "emulator.cpp"):
        shutil.copy(HERE / name, folder)
    kind: dict[str, Any] = {"expert_weights": expert_weights, "two_shot": two_shot}
    variant = kernel_variant(geometry, Entry.tail_exchange, tokens=tokens, **kind)
    defines = dict(variant.defines) | {"K3_THREADS": str(threads(geometry))}
    if cells:
        whole = dict(kernel_variant(geometry, Entry.tail_whole, tokens=tokens, cells=True, **kind).defines)
        defines |= {name: whole[name] for name in ("K3_CELL_ROWS", "K3_CELLS_AT")}
    if ring:
        z_ring = min(ring + 1, geometry.stripes)
        shared = geometry._box_bytes(tokens, ring, two_shot, z_ring)
        defines |= {"K3_RING": str(ring), "K3_SHARED_BYTES": str(shared)}
        defines |= {"K3_Z_RING": str(z_ring)} if geometry.two_shot(tokens, two_shot) else {}
    flags = [f"-D{name}={value}" for name, value in defines.items() if name not in ("K3_ENTRY", "K3_WHOLE")]
    command = ["g++", "-O1", "-std=c++17", "-ffp-contract=off", "-w", "-shared", "-fPIC", *flags]
    subprocess.run([*command, "emulator.cpp", "-o", "emulator.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "emulator.so"))


def mutate(change: tuple[str, str], folder: Path) -> None:
    """The kernels' source with a change, in another folder."""
    old, new = change
    found = False
    for path in FOLDER.glob("*.cu*"):
        text = path.read_text(encoding="utf-8")
        if path.name in (*SOURCES, "mailbox.cuh"):
            found |= old in text
            text = text.replace(old, new)
        (folder / path.name).write_text(text, encoding="utf-8")
    assert found


@attrs.frozen
class Step:
    """A kernel as it was launched."""

    kernel: Kernel
    arguments: bytes


class Recorded(TailKernels):
    """TailKernels whose launches go into a list."""

    def __init__(
        self,
        geometry: Geometry,
        rank: int,
        lanes: Sequence[LaneAddresses],
        deadline: float,
        tokens: int,
        two_shot: bool | None = None,
        cells: bool = False,
    ) -> None:
        self.geometry, self.rank, self._maps, self._cells = geometry, rank, {}, cells
        rows = range(1, MAX_ROWS + 1)
        self._windows = dict.fromkeys(rows, (2, 3))
        self.record = torch.zeros(RECORD_WORDS, dtype=torch.int32)
        self.steps: list[Step] = []

        def launch(entry: Entry, grid: int, block: int, shared: int = 0) -> Any:
            kernel = Kernel(entry.value, grid, block, shared)
            return lambda packed: self.steps.append(Step(kernel, packed))

        kinds = (None, torch.bfloat16, torch.float32)
        self._first = {
            (form, fewer, kind): launch(
                Entry.tail_whole if form is Form.WHOLE else Entry.tail_exchange,
                geometry.blocks + (form is Form.WHOLE),
                threads(geometry) + geometry.block(tokens, two_shot) - geometry.threads,
                geometry.shared_bytes(tokens, two_shot),  # one library serves calls of fewer rows too
            )
            for form in Form
            for fewer in geometry.tokens
            for kind in kinds
        }
        self._finish = {m: launch(Entry.tail_finish, geometry.finish_blocks(m, 1), FINISH_THREADS) for m in rows}
        self._next_norm = {m: launch(Entry.tail_next_norm, m, THREADS) for m in rows}
        size = geometry.workspace_bytes(two_shot, cells=cells)
        self._workspaces = [torch.full((size,), 0xFF, dtype=torch.uint8) for _ in lanes]  # NaN
        self.fill()
        self._arguments = [
            self._lane_arguments(lane, workspace, 1e-5, deadline, 0)
            for lane, workspace in zip(lanes, self._workspaces, strict=True)
        ]
        self.kept: list[Any] = []

    def _make_boxes(self, weight: Tensor) -> bytes:
        """`TensorMap` of the emulator's hopper.cuh."""
        rows, columns = weight.shape
        return struct.pack(
            "<16Q", weight.data_ptr(), rows, columns, 2 * weight.stride(0), self.geometry.box_rows, STRIPE, *[0] * 10
        )

    def __call__(self, **given: Any) -> Tensor:
        """As the call on a GPU, where a stream keeps memory from being used again too early."""
        out = super().__call__(**given)
        self.kept += [given, out]
        return out


class Ranks:
    """W ranks in this process, with their mailboxes."""

    def __init__(
        self,
        library: Any,
        geometry: Geometry,
        tokens: int,
        *,
        deadline: float = 1.0,
        two_shot: bool | None = None,
        cells: bool = False,
    ) -> None:
        self.library, self.geometry = library, geometry
        self.layout = layout = MailboxLayout(
            hidden_size=geometry.hidden_size,
            latent_size=geometry.latent_size,
            world_size=geometry.world_size,
            max_rows=MAX_ROWS,
        )
        self.blocks = [torch.empty(layout.nbytes + 128, dtype=torch.uint8) for _ in range(geometry.world_size)]
        self.blocks = [b[-b.data_ptr() % 128 :][: layout.nbytes] for b in self.blocks]
        self.tails = [
            Recorded(
                geometry,
                rank,
                [LaneAddresses.of_lane(layout, 0, rank=rank, blocks=[block.data_ptr() for block in self.blocks])],
                deadline,
                tokens,
                two_shot,
                cells,
            )
            for rank in range(geometry.world_size)
        ]
        self.fill()

    def fill(self, calls: int = 0) -> None:
        """Empties everything, as after `calls` calls."""
        self.library.forget()
        for block in self.blocks:
            block.fill_(EMPTY & 0xFF)
            words = block[:COUNTER_BYTES].zero_().view(torch.int64)
            words[:MAX_CELLS] = calls
            words[COMPLETED], words[CREDITED] = calls * COMPLETIONS, calls
        for tail in self.tails:
            tail.fill()

    def completed(self) -> list[int]:
        """Calls that are done whole, by each rank's completion word."""
        words = [int(block[:COUNTER_BYTES].view(torch.int64)[COMPLETED]) for block in self.blocks]
        assert all(word % COMPLETIONS == 0 for word in words)
        return [word // COMPLETIONS for word in words]

    def run(self, *, seed: int = 0, skew: int = 0, silent: int = -1, overlap: Overlap = Overlap.NONE) -> int:
        """Runs what the tails were asked for since the last time. 0: it ended; 1: a trap; 2: a deadlock.

        Args:
            skew: one in `skew` times a rank is passed over; 0 is never.
            silent: a rank that never starts its last kernel.
            overlap: of the kernels of a rank, of which at most four are there at once.
        """
        steps = [tail.steps for tail in self.tails]
        kernels = [step.kernel for step in steps[0]]
        assert all([bytes(s.kernel) for s in mine] == [bytes(k) for k in kernels] for mine in steps)
        packed = b"".join(step.arguments for mine in steps for step in mine)
        for mine in steps:
            mine.clear()
        array = (Kernel * len(kernels))(*kernels)
        size = ctypes.sizeof(Arguments)
        emulate = self.library.emulate_overlapping
        ended = int(emulate(len(steps), len(kernels), array, packed, size, seed, skew, silent, overlap.value))
        for tail in self.tails:
            tail.kept.clear()
        return ended


def outputs(geometry: Geometry, m: int) -> list[Tensor]:
    """Poisoned results, one a rank."""
    shape = (m, geometry.hidden_size)
    return [torch.full(shape, float("nan"), dtype=torch.bfloat16) for _ in range(geometry.world_size)]
