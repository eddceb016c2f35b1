"""The tail of a prefill: every agreed tier and its rivals over m = 32 .. 8192 in one run, with the memory they take.

    torchrun --standalone --nproc-per-node 2 benchmarks/prefill.py --json prefill.json --plot prefill.png

It is `k3comm bench` with other defaults: what an arm has to be, how it is timed and what "chained" and "isolated" mean
stands there and in docs/performance.md. Arms take turns in alternating order at each size. Each has `--seconds` there,
so a large call gets fewer passes than a small one; how many is in the JSON and, where too few to quote, in the tables.
Passes are replays of CUDA graphs: what launching costs the host, which hides behind kernels of this size, is not in it.

Columns: us a call and, in brackets, that over the fastest rival's time; then the extra memory. Tiers that stage rows
make room for the largest m first, so the memory is that of serving it.

On CPU, over gloo, sizes end at 256 unless --rows says otherwise; give it small widths there:

    torchrun --standalone --nproc-per-node 2 benchmarks/prefill.py --device cpu --hidden 512 --latent 256 --seconds 0.2

Exit codes: 0 every arm was right and ran what it says; 1 one was not or did not; 2 a wrong argument, or one process.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from k3comm.cli import _console, bench
from k3comm.errors import K3CommError

ROWS = tuple(32 << doubled for doubled in range(9))
CPU_ROWS = ROWS[:4]
SECONDS = 1.0
"""For each arm at each size: with some 85 of them about 90 s of timing on GPUs, and half as much again for captures and
checks (an estimate from the times of a call; the whole is meant to stay under three minutes)."""


def parser() -> argparse.ArgumentParser:
    """The command line: bench's, with other defaults."""
    assert __doc__ is not None
    made = argparse.ArgumentParser(
        prog="prefill.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    bench.add_arguments(made, gpu_rows=ROWS, cpu_rows=CPU_ROWS, seconds=SECONDS)
    bench.add_outputs(made)
    made.set_defaults(memory=True, reserve=True, prefill=True)
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Measures, collective over the ranks that torchrun started; rank 0 shows."""
    given = parser().parse_args(arguments)
    try:
        return bench.run(given, script="benchmarks/prefill.py", beside_rivals=True)
    except K3CommError as error:
        _console.complain(f"prefill.py: {error}")
        return 2


if __name__ == "__main__":
    sys.exit(main())
