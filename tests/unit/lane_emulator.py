"""The lane's one-shot kernel on a CPU: its own source, built by g++ over `emulator/`, a fiber a CUDA thread.

What this shows: units, offsets, strides, the arguments that the host packs, and the meeting of ranks that run at once
in changing orders. What it can't: timing, and weak memory.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from k3comm.kernels.compile import FOLDER
from k3comm.kernels.expiry import RECORD_WORDS
from k3comm.kernels.lane_one_shot import Arguments, Cut, LaneLayout, OneShot, kernel_variant
from k3comm.kernels.tail_fusion import COMPLETED, COMPLETIONS, aligned_rows
from k3comm.settings import Settings

HERE = Path(__file__).parent / "emulator"
EPS = 1e-5

SHARED = {
    "__shared__ u64 number;": "u64& number = *fixed_shared<u64>(0);",
    "__shared__ float squares[2 * WARPS];": "float* squares = fixed_shared<float>(64);",
}

ENTRIES = re.compile(r"namespace exchange_kernel \{.*\n\}\n(?=\nstruct Kernel)", re.DOTALL)
SWITCH = re.compile(r"switch \(entry\) \{.*?\n  \}\n", re.DOTALL)


class Kernel(ctypes.Structure):
    """`struct Kernel` of emulator.cpp."""

    _fields_ = tuple((name, ctypes.c_int) for name in ("entry", "grid", "block", "shared"))


def build(folder: Path, cut: Cut, changes: Sequence[tuple[str, str]] = ()) -> Any:
    """The kernel for one cut as a library. `changes`: of the source, to see whether a test finds them."""
    source = (FOLDER / "lane_one_shot.cu").read_text(encoding="utf-8")
    for old, new in (*SHARED.items(), *changes):
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    assert "__shared__" not in re.sub(r"//.*", "", source)
    driver = (HERE / "emulator.cpp").read_text(encoding="utf-8")
    # The scheduler is the fused tail's; of its entry points there is one here.
    driver, entries = ENTRIES.subn('namespace lane {\n#include "lane_one_shot.cpp"\n}\n', driver)
    driver, switches = SWITCH.subn("lane::lane_one_shot(*(const lane::Arguments*)a);\n", driver)
    assert (entries, switches) == (1, 1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lane_one_shot.cpp").write_text(source, encoding="utf-8")
    (folder / "emulator.cpp").write_text(driver, encoding="utf-8")
    shutil.copy(FOLDER / "mailbox.cuh", folder)
    for name in ("words.cuh", "hopper.cuh"):
        shutil.copy(HERE / name, folder)
    flags = [f"-D{name}={value}" for name, value in kernel_variant(cut).defines]
    command = ["g++", "-O1", "-std=c++17", "-ffp-contract=off", "-w", "-shared", "-fPIC", *flags]
    subprocess.run([*command, "emulator.cpp", "-o", "emulator.so"], cwd=folder, check=True)
    return ctypes.CDLL(str(folder / "emulator.so"))


class Recorded(OneShot):
    """OneShot whose launches go into a list."""

    def __init__(self, cut: Cut, layout: LaneLayout, **given: Any) -> None:
        super().__init__(cut, layout, **given)
        self.steps: list[tuple[Kernel, bytes]] = []
        self.kept: list[Any] = []

    def _load(self, device: torch.device) -> int:
        return 5

    def start(self, blocks: int) -> None:
        self._blocks = blocks

    def _run(self, packed: bytes) -> None:
        self.steps.append((Kernel(0, self._blocks, self.cut.threads, 0), packed))

    def __call__(self, rows: int, routed: Tensor | None, shared: Tensor | None, *given: Any, **more: Any) -> Any:
        # On a GPU the stream's order keeps memory from being used again, that of copies too.
        routed, shared = (None if part is None else aligned_rows(part) for part in (routed, shared))
        out = super().__call__(rows, routed, shared, *given, **more)
        self.kept += [routed, shared, given, out]
        return out


class Ranks:
    """W ranks in this process, with their blocks."""

    def __init__(
        self, library: Any, cut: Cut, *, rows: int, blocks: int, lanes: int = 1, deadline: float = 1.0
    ) -> None:
        self.library, self.cut = library, cut
        width = cut.hidden_size + cut.latent_size
        self.layout = LaneLayout(width=width, rows=rows, world_size=cut.world_size, lanes=lanes)
        self.blocks = [torch.zeros(self.layout.nbytes, dtype=torch.uint8) for _ in range(cut.world_size)]
        self.kernels = [
            Recorded(
                cut,
                self.layout,
                rank=rank,
                device=torch.device("cpu"),
                blocks=[block.data_ptr() for block in self.blocks],
                eps=EPS,
                settings=Settings(poll_deadline=deadline),
            )
            for rank in range(cut.world_size)
        ]
        for kernel in self.kernels:
            kernel.start(blocks)

    def lane(self, rank: int, number: int = 0) -> Tensor:
        """A rank's lane, [rows, L + H]."""
        layout = self.layout
        data = self.blocks[rank][layout.data(number) :][: 2 * layout.rows * layout.width]
        return data.view(torch.bfloat16).view(layout.rows, layout.width)

    def completed(self, number: int = 0) -> list[float]:
        """Calls that are done whole, by each rank's completion word."""
        at = self.layout.counters(number)
        word = COMPLETED
        return [int(block[at : at + 8 * word + 8].view(torch.int64)[word]) / COMPLETIONS for block in self.blocks]

    def run(self, *, seed: int = 0, skew: int = 0, silent: int = -1) -> int:
        """Runs what the kernels were called with since the last time. 0: it ended; 1: a trap; 2: a deadlock.

        Args:
            skew: one in `skew` times a rank is passed over; 0 is never.
            silent: a rank that never starts its last kernel.
        """
        steps = [kernel.steps for kernel in self.kernels]
        kernels = [kernel for kernel, _ in steps[0]]
        packed = b"".join(arguments for mine in steps for _, arguments in mine)
        array, size = (Kernel * len(kernels))(*kernels), ctypes.sizeof(Arguments)
        ended = int(self.library.emulate(len(steps), len(kernels), array, packed, size, seed, skew, silent))
        for kernel in self.kernels:
            kernel.steps.clear()
            kernel.kept.clear()
        return ended


def words_of(record: Tensor, *words: int) -> None:
    """Writes a record as the kernel does."""
    assert record.numel() == RECORD_WORDS
    record[: len(words)] = torch.tensor(words)
