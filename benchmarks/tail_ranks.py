"""The fused tail's kernels between GPUs and nothing beside them: what a call takes, with other windows of weights too.

    PYTHONPATH=. torchrun --standalone --nproc-per-node 2 benchmarks/tail_ranks.py --windows 3x3,2x4

A GPU a rank, no communicator, no rivals, no check of results (`k3comm bench` has all of these): a look at one change
of the kernels in 20 seconds. Chains of 192 calls in a graph, each result the next one's residual, the weights of 24
layers in turn; 11 replays, the median of the slowest rank. Every choice takes its turn twice, in opposite order;
printed are the better one and, behind a plus, by how much the other one was worse.

`--windows`: boxes of weights in flight before and after the kernel in front of a call is over, as `Geometry.windows`
says by itself. `--shots`: rows in one shot, and from 17 on in two (tail_two_shot.cuh), whatever ships; kernels of fewer
rows are the same. `--whole`: one kernel a call; `--cells`: its products as their own flags too. `--plain`: no
programmatic launch. `--isolated`: before each call a kernel writes twice the L2 cache, whose own time is taken off.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from typing import Any

import tail_lab as lab
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from k3comm.kernels.tail_fusion import Form
from k3comm.kernels.tail_geometry import MAX_ROWS

TURNS = 2
MAX_WINDOW = 256
"""Boxes; more than any CTA has."""

ISOLATED_CALLS = 48
"""Of a chain whose calls stand alone."""


def windows_of(text: str) -> tuple[int, int]:
    """Raises ArgumentTypeError for anything but two numbers up to MAX_WINDOW."""
    try:
        first, second = map(int, text.split("x"))
    except ValueError:
        first = second = 0
    if min(first, second) < 1 or max(first, second) > MAX_WINDOW:
        raise argparse.ArgumentTypeError(
            f"{text!r} given; accepted are two numbers from 1 to {MAX_WINDOW} with an x between, as 3x3"
        )
    return first, second


def rows_of(text: str) -> list[int]:
    """Raises ArgumentTypeError for anything but numbers of rows."""
    try:
        rows = [int(part) for part in text.split(",")]
    except ValueError:
        rows = [0]
    if not all(1 <= m <= MAX_ROWS for m in rows):
        raise argparse.ArgumentTypeError(f"{text!r} given; accepted are numbers from 1 to {MAX_ROWS}, as 1,4,16")
    return rows


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--windows",
        metavar="AxB,...",
        type=lambda text: [windows_of(part) for part in text.split(",")],
        default=[],
        help=f"each of these windows too: two numbers from 1 to {MAX_WINDOW} with an x between",
    )
    made.add_argument(
        "--rows", metavar="M,...", type=rows_of, default=list(lab.BENCH_ROWS), help="(default: %(default)s)"
    )
    made.add_argument("--shots", action="store_true", help="all rows in one shot too, and all from 17 on in two")
    made.add_argument("--whole", action="store_true", help="one kernel a call (default: two)")
    made.add_argument(
        "--cells", action="store_true", help="with --whole: products that are their own flags too, to 16 rows"
    )
    made.add_argument("--plain", action="store_true", help="no call starts before the one in front of it has ended")
    made.add_argument("--isolated", action="store_true", help="behind a kernel that writes twice the L2 cache")
    return made


def slowest(us: float) -> float:
    every = torch.tensor([us])
    dist.all_reduce(every, op=dist.ReduceOp.MAX)
    return float(every)


def time_of(
    one: lab.Rank | None, layers: list[lab.Data], m: int, form: Form, before: Callable[[int], object] | None
) -> float:
    calls = lab.CALLS if before is None else ISOLATED_CALLS
    return slowest(statistics.median(lab.Chain(one, layers, m, form, calls=calls, before=before).times()))


def measure(options: argparse.Namespace, rank: int, world: int) -> dict[str, list[list[float]]]:
    """Microseconds a call, by choice, turn and number of rows."""
    block = symmetric.empty(
        lab.Rank(rank, world, lab.K3).layout.nbytes, dtype=torch.uint8, device=torch.device("cuda", rank)
    )
    assert dist.group.WORLD is not None
    handle = symmetric.rendezvous(block, dist.group.WORLD.group_name)
    layers = [lab.Data(world, MAX_ROWS, lab.K3, 900 + n) for n in range(lab.LAYERS)]
    before = lab.cold_caches() if options.isolated else None
    alone = 0.0 if before is None else time_of(None, layers, 1, Form.SPLIT, before)
    form = Form.WHOLE if options.whole else Form.SPLIT
    choices: list[tuple[str, dict[str, Any]]] = [("as shipped", {})]
    choices += [("one shot", {"two_shot": False}), ("two shots", {"two_shot": True})] if options.shots else []
    choices += [("cells", {"cells": True})] if options.cells else []
    choices += [(f"windows {a} x {b}", {"windows": (a, b)}) for a, b in options.windows]
    cut = lab.geometry(lab.K3, world, lab.sms())
    found: dict[str, list[list[float]]] = {}
    for turn in range(TURNS):
        for name, more in choices[:: -1 if turn % 2 else 1]:
            one = lab.Rank(rank, world, lab.K3, block=block)
            pointers = [int(p) for p in handle.buffer_ptrs]
            settings = lab.PLAIN if options.plain else None
            one.connect(cut, pointers, lab.sms(), forms=(form,), settings=settings, **more)
            torch.cuda.synchronize()
            row = []
            for m in options.rows:
                dist.barrier()
                row.append(time_of(one, layers, m, form, before) - alone)
            found.setdefault(name, []).append(row)
            torch.cuda.synchronize()
            dist.barrier()
    return found


def main() -> None:
    options = parser().parse_args()
    if options.cells and not options.whole:
        raise SystemExit("--cells given without --whole: only one kernel a call has any")
    for name, value in lab.ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if "RANK" not in os.environ:
        raise SystemExit(
            "started without torchrun: PYTHONPATH=. torchrun --standalone --nproc-per-node 2 benchmarks/tail_ranks.py"
        )
    lab.need_gpu()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world < 2 or world > torch.cuda.device_count():
        raise SystemExit(f"{world} ranks given; accepted are 2 to {torch.cuda.device_count()}, a GPU each")
    torch.cuda.set_device(rank)
    dist.init_process_group("gloo")
    found = measure(options, rank, world)
    if rank == 0:
        print(f"{'us a call':<20}" + "".join(f"{f'm={m}':>14}" for m in options.rows))
        for name, turns in found.items():
            cells = [f"{min(us):.2f} +{max(us) - min(us):.2f}" for us in zip(*turns, strict=True)]
            print(f"{name:<20}" + "".join(f"{cell:>14}" for cell in cells))
            lab.results[name] = turns
        kinds = [kind for kind in ("whole", "plain", "isolated") if getattr(options, kind)]
        lab.write_json("-".join(["tail_ranks", *kinds]), {"world": world, "rows": options.rows, "results": lab.results})
    sys.stdout.flush()
    torch.cuda.synchronize()
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
