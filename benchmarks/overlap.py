"""What a shared all-reduce costs a routed GEMM that runs beside it, by how many SMs NCCL may take for it.

    torchrun --standalone --nproc-per-node 2 benchmarks/overlap.py [--json FILE] [--rows 64,256,1024] [--quick]

The shared experts' partial sum [m, H] is there before the routed experts are done. So its all-reduce can run on a side
stream while their GEMMs run, and what it takes of them is the question: NCCL's blocks hold SMs, and a GEMM that would
fill the GPU then needs another wave. Per number of rows, in one run and in alternating order:

    raw       a GEMM [m, L] x [L, N] alone; an all-reduce alone; one after the other; both together, on two streams:
              with NCCL's own choice of blocks (CTAs) and with a communicator of 1, 2, 4, 8 and 16
    product   the GEMM, then a SEPARATE_REDUCE call with a projection [H, L]; the same with `reduce_shared` before the
              GEMM, with K3COMM_OVERLAP_SMS off and at each of those numbers

N is chosen so that the GEMM takes about --gemm-us alone: one GEMM in the place of all that the routed experts do.

How it is timed. A sample is: a sleep on the GPU, so that the host is ahead; a tiny all-reduce, so that the ranks start
together; an event; the work; an event. A sample in which the GPU was done waiting before the host had issued all counts
as late, and the table says how many were. Figures are medians over all samples of a rank, and then the slowest rank's.
On CPU the same code runs over gloo, where nothing overlaps: that is for the tests, and wants --rows 4 --hidden 64
--latent 32 --columns 64 --quick.

    hidden = GEMM alone + all-reduce alone (with as many blocks) - both together
    saved  = one after the other (NCCL's own choice) - both together; for a call: the call after the GEMM - this one
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from k3comm import Communicator, LatentMoESpec, MoETail, Settings, Tier
from k3comm.cli import _console
from k3comm.cli._console import Table, progress, show
from k3comm.cli._timing import Ranks
from k3comm.errors import InputError, K3CommError
from k3comm.negotiate.clerk import store_of
from k3comm.tiers.few_sms import FewSMs

ENVIRONMENT = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
"""NVLink multicast stays off in the project's own runs, because shared hosts can be put out of service by it."""
SLEEP_US = 1000.0
"""What a sample sleeps on the GPU: several times what a rank's Python needs to issue one."""
COLUMN_STEP = 256
MAX_COLUMNS = 1 << 18
"""1.9 GB of weights at L = 3584."""
WARM_UP = 5
_runs = itertools.count()  # a place in the store is used once


@attrs.frozen(kw_only=True)
class Options:
    """What to measure.

    Attributes:
        rows: numbers of rows m. hidden, latent: H and L.
        gemm_us: microseconds that the GEMM is to take alone. columns: its N for every m; None: chosen by `gemm_us`.
        sms: numbers of blocks. repeats, samples: rounds in alternating order, samples of an arm in each.
    """

    rows: tuple[int, ...] = (64, 256, 1024)
    hidden: int = 7168
    latent: int = 3584
    gemm_us: float = 200.0
    columns: int | None = None
    sms: tuple[int, ...] = (1, 2, 4, 8, 16)
    repeats: int = 5
    samples: int = 50


class Clock:
    """The marks of one sample: events on a GPU, the host's time on CPU."""

    def __init__(self, on_gpu: bool) -> None:
        self._on_gpu = on_gpu
        self.marks: dict[str, Any] = {}

    def mark(self, name: str) -> None:
        """On the current stream."""
        if self._on_gpu:
            self.marks[name] = torch.cuda.Event(enable_timing=True)
            self.marks[name].record()
        else:
            self.marks[name] = time.perf_counter()

    def passed(self, name: str) -> bool:
        """Whether the GPU is past a mark already."""
        return self._on_gpu and bool(self.marks[name].query())

    def us(self, first: str, last: str) -> float | None:
        """Microseconds between two marks, once the device is done; None without them."""
        if first not in self.marks:
            return None
        if self._on_gpu:
            return float(self.marks[first].elapsed_time(self.marks[last])) * 1e3
        return float(self.marks[last] - self.marks[first]) * 1e6


Body = Callable[[Clock], None]
SPANS = {"total": ("start", "end"), "gemm": ("gemm0", "gemm1"), "sum": ("sum0", "sum1")}


@attrs.define(kw_only=True, eq=False)
class Arm:
    """One way to do the work at one number of rows.

    Attributes:
        kind: "gemm", "sum", "sequence", "together", "call after" or "call early".
        sms: blocks for the all-reduce; None: NCCL's own choice.
        spans: microseconds of every sample on this rank, by round and by what is timed.
    """

    kind: str
    sms: int | None
    body: Body
    late: int = 0
    spans: list[dict[str, list[float]]] = attrs.field(factory=list)

    def medians(self, what: str) -> list[float]:
        """The median of each round."""
        return [statistics.median(one[what]) for one in self.spans if one[what]]

    def median(self, what: str) -> float | None:
        """The median of all samples; None if there are none."""
        every = [us for one in self.spans for us in one[what]]
        return statistics.median(every) if every else None


class Bench:
    """One run on one rank. Collective over the group; a context manager that ends its communicators."""

    def __init__(self, options: Options, group: dist.ProcessGroup, device: torch.device) -> None:
        self.options, self.group, self.device = options, group, device
        self.ranks = Ranks(group)
        self.on_gpu = device.type == "cuda"
        self.equal = True
        self._side: Any = torch.cuda.Stream(device, priority=-1) if self.on_gpu else None
        self._word = torch.zeros(1, device=device)
        self._cycles = self._cycles_of_a_sleep() if self.on_gpu else 0
        self._ends = ExitStack()
        # The few blocks' communicators are those of the library, so what is measured raw is what it uses.
        self._few: dict[int | None, FewSMs | None] = {None: None}
        for sms in options.sms:
            key = f"k3comm/bench/{next(_runs)}"
            few = FewSMs(group, device, sms, store_of(group), key) if self.on_gpu else None
            self._few[sms] = few
            if few is not None:
                self._ends.callback(few.close)
        self._comms = {sms: self._ends.enter_context(self._negotiated(sms)) for sms in (None, *options.sms)}
        weight = torch.randn(options.hidden, options.latent, device=device).mul_(0.02).bfloat16()
        gain = torch.ones(options.latent, dtype=torch.bfloat16, device=device)
        self._tails = {
            sms: comm.moe_tail(layer_index=0, norm_weight=gain, up_weight=weight) for sms, comm in self._comms.items()
        }

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *error: object) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
        self._ends.close()

    def _negotiated(self, sms: int | None) -> Communicator:
        spec = LatentMoESpec(hidden_size=self.options.hidden, latent_size=self.options.latent, top_k=1)
        others = {tier for tier in Tier if tier is not Tier.SEPARATE_REDUCE}
        settings = Settings(disabled=others, overlap_sms=sms)
        return Communicator.negotiate(spec, self.group, settings=settings, device=self.device)

    # ---- arms

    def arms(self, rows: int, columns: int) -> list[Arm]:
        """All arms at one number of rows; each has run a few times, and calls that must agree have been compared."""
        options, seed = self.options, torch.Generator(self.device).manual_seed(self.ranks.rank)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=seed, device=self.device).bfloat16()

        x, w = random(rows, options.latent), random(options.latent, columns)
        y = torch.empty(rows, columns, dtype=torch.bfloat16, device=self.device)
        zeros = torch.zeros(rows, options.hidden, dtype=torch.bfloat16, device=self.device)  # the sum stays finite
        routed, shared = random(rows, options.latent), random(rows, options.hidden)
        residual = torch.ones(rows, options.hidden, dtype=torch.bfloat16, device=self.device)

        def gemm(clock: Clock) -> None:
            clock.mark("gemm0")
            torch.mm(x, w, out=y)
            clock.mark("gemm1")

        def total(clock: Clock, few: FewSMs | None) -> None:
            clock.mark("sum0")
            if few is None:
                dist.all_reduce(zeros, group=self.group)
            else:
                few.all_reduce(zeros)
            clock.mark("sum1")

        def alone(few: FewSMs | None) -> Body:
            return lambda clock: total(clock, few)

        def sequence(clock: Clock) -> None:
            gemm(clock)
            total(clock, None)

        def together(few: FewSMs | None) -> Body:
            def body(clock: Clock) -> None:
                if self.on_gpu:
                    self._side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(self._side) if self.on_gpu else nullcontext():
                    total(clock, few)
                gemm(clock)
                if self.on_gpu:
                    torch.cuda.current_stream().wait_stream(self._side)

            return body

        results: dict[str, Tensor] = {}

        def after(tail: MoETail) -> Body:
            def body(clock: Clock) -> None:
                gemm(clock)
                results["after"] = tail(routed, shared, residual)

            return body

        def early(tail: MoETail, name: str) -> Body:
            def body(clock: Clock) -> None:
                begun = tail.reduce_shared(shared)
                gemm(clock)
                results[name] = tail(routed, begun, residual)

            return body

        every = [None, *options.sms]
        found = [Arm(kind="gemm", sms=None, body=gemm)]
        found += [Arm(kind="sum", sms=sms, body=alone(self._few[sms])) for sms in every]
        found += [Arm(kind="sequence", sms=None, body=sequence)]
        found += [Arm(kind="together", sms=sms, body=together(self._few[sms])) for sms in every]
        found += [Arm(kind="call after", sms=None, body=after(self._tails[None]))]
        found += [Arm(kind="call early", sms=sms, body=early(self._tails[sms], f"early {sms}")) for sms in every]
        for arm in found:
            for _ in range(WARM_UP):
                arm.body(Clock(self.on_gpu))
        self._synchronize()
        # Two addends have one sum in any order; of more, NCCL's order may differ with the number of blocks.
        close = torch.equal if self.ranks.size == 2 else _within_class
        self.equal = self.equal and all(close(results["after"], one) for one in results.values())
        return found

    def columns(self, rows: int) -> int:
        """N of the GEMM, the same on every rank."""
        if self.options.columns is not None:
            return self.options.columns
        if not self.on_gpu:
            return COLUMN_STEP
        columns = 64 * COLUMN_STEP
        for _ in range(2):  # a GEMM's time is not quite proportional to N, so twice
            x = torch.randn(rows, self.options.latent, device=self.device).bfloat16()
            w = torch.randn(self.options.latent, columns, device=self.device).bfloat16()
            y = torch.empty(rows, columns, dtype=torch.bfloat16, device=self.device)
            spent = self._spent(lambda x=x, w=w, y=y: torch.mm(x, w, out=y))  # type: ignore[misc]
            steps = round(columns / COLUMN_STEP * self.options.gemm_us / spent)
            columns = min(max(1, steps) * COLUMN_STEP, MAX_COLUMNS)
            (columns,) = self.ranks.largest([columns])
        return columns

    # ---- samples

    def measure(self, arm: Arm) -> None:
        """A round of an arm. All samples are queued before any is waited for."""
        self.ranks.meet()
        clocks = []
        for _ in range(self.options.samples):
            clock = Clock(self.on_gpu)
            if self.on_gpu:
                torch.cuda._sleep(self._cycles)
                dist.all_reduce(self._word, group=self.group)
            clock.mark("start")
            arm.body(clock)
            clock.mark("end")
            arm.late += clock.passed("start")
            clocks.append(clock)
        self._synchronize()
        found = {what: [clock.us(*marks) for clock in clocks] for what, marks in SPANS.items()}
        arm.spans.append({what: [us for us in spent if us is not None] for what, spent in found.items()})

    def _synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def _spent(self, work: Callable[[], object], times: int = 10) -> float:
        """The median microseconds of some work on the GPU."""
        clocks = []
        for _ in range(times + WARM_UP):
            clock = Clock(True)
            clock.mark("start")
            work()
            clock.mark("end")
            clocks.append(clock)
        self._synchronize()
        return statistics.median(clock.us("start", "end") or 0.0 for clock in clocks[WARM_UP:])

    def _cycles_of_a_sleep(self) -> int:
        """Of the GPU's clock, for SLEEP_US."""
        cycles = 1_000_000
        return round(cycles * SLEEP_US / self._spent(lambda: torch.cuda._sleep(cycles)))


def _within_class(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a.float(), b.float(), rtol=2**-6, atol=2**-4)


def measure(options: Options, group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """Runs everything. Collective; the same figures on every rank.

    Returns:
        What `--json` writes: how it was run, and a list "arms" with, for each arm and number of rows, microseconds
        (`total_us`, `gemm_us` and `sum_us` within it, None where there is none; `rounds_us`, the total by round), and
        what follows from them (`hidden_us`, `saved_us`, `gemm_slowdown`).
    """
    with Bench(options, group, device) as bench:
        ranks = bench.ranks
        found: list[dict[str, Any]] = []
        columns: dict[str, int] = {}
        arms_each = 4 + 3 * len(options.sms) + 2
        steps = len(options.rows) * options.repeats * arms_each
        with progress("overlap", steps) if ranks.rank == 0 else nullcontext(lambda steps: None) as advance:
            for rows in options.rows:
                columns[str(rows)] = bench.columns(rows)
                arms = bench.arms(rows, columns[str(rows)])
                for repeat in range(options.repeats):
                    for arm in arms if repeat % 2 == 0 else reversed(arms):
                        bench.measure(arm)
                        advance(1)
                found += _figures(rows, arms, ranks)
        (unequal,) = ranks.largest([not bench.equal])
        return {
            "date": ranks.from_first(datetime.now(UTC).isoformat(timespec="seconds")),
            "device": torch.cuda.get_device_name(device) if bench.on_gpu else "cpu",
            "sms_of_device": torch.cuda.get_device_properties(device).multi_processor_count if bench.on_gpu else None,
            "world_size": ranks.size,
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if bench.on_gpu else None,
            "options": attrs.asdict(options),
            "columns": columns,
            "equal": not unequal,
            "arms": found,
        }


def _figures(rows: int, arms: Sequence[Arm], ranks: Ranks) -> list[dict[str, Any]]:
    """Each arm's slowest rank, and what follows from them."""
    found: list[dict[str, Any]] = []
    for arm in arms:
        spans = {what: arm.median(what) for what in SPANS}
        present = [what for what, us in spans.items() if us is not None]
        slowest = dict(zip(present, ranks.slowest([spans[what] or 0.0 for what in present]), strict=True))
        (late,) = ranks.largest([arm.late])
        one: dict[str, Any] = {"rows": rows, "kind": arm.kind, "sms": arm.sms, "late": late}
        one |= {f"{what}_us": slowest.get(what) for what in SPANS}
        one["rounds_us"] = ranks.slowest(arm.medians("total"))
        found.append(one)
    by_kind = {(one["kind"], one["sms"]): one["total_us"] for one in found}
    gemm = by_kind["gemm", None]
    gemm_itself = found[0]["gemm_us"]  # without what a sample's own events cost
    for one in found:
        kind, sms, total = one["kind"], one["sms"], one["total_us"]
        before = by_kind["call after", None] if kind.startswith("call") else by_kind["sequence", None]
        one["hidden_us"] = gemm + by_kind["sum", sms] - total if kind == "together" else None
        one["saved_us"] = before - total if kind in ("together", "call early") else None
        one["gemm_slowdown"] = None if one["gemm_us"] is None else one["gemm_us"] / gemm_itself
    return found


NAMES = {
    "gemm": "GEMM alone",
    "sum": "all-reduce alone",
    "sequence": "GEMM, then all-reduce",
    "together": "together",
    "call after": "GEMM, then the call",
    "call early": "reduce_shared, GEMM, call",
}


def tables(results: dict[str, Any]) -> list[Table]:
    """One table for each number of rows."""
    made = []
    for rows in results["options"]["rows"]:
        columns = results["columns"][str(rows)]
        lines = []
        for one in results["arms"]:
            if one["rows"] != rows:
                continue
            blocks = "" if one["kind"] in ("gemm", "call after") else str(one["sms"] or "NCCL's")
            slower = "" if one["gemm_slowdown"] is None else f"{one['gemm_slowdown']:.2f}x"
            spans = [one[name] for name in ("total_us", "gemm_us")]
            after = [one[name] for name in ("sum_us", "hidden_us", "saved_us")]
            lines.append(
                [NAMES[one["kind"]], blocks, *map(_us, spans), slower, *map(_us, after), str(one["late"] or "")]
            )
        title = (
            f"{rows} rows: GEMM [{rows}, {results['options']['latent']}] x [.., {columns}], all-reduce "
            f"[{rows}, {results['options']['hidden']}] BF16, {results['world_size']} ranks, {results['device']}; us"
        )
        names = ("arm", ">CTAs", ">total", ">GEMM in it", ">GEMM", ">all-reduce in it", ">hidden", ">saved", ">late")
        made.append(Table(title=title, columns=names, rows=lines))
    return made


def _us(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}"


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(one) for one in text.split(","))


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="write all figures to this file (rank 0)")
    parser.add_argument("--rows", type=_numbers, default=Options().rows, help="numbers of rows, with commas")
    parser.add_argument("--sms", type=_numbers, default=Options().sms, help="numbers of CTAs, with commas, 1 to 32")
    parser.add_argument("--hidden", type=int, default=Options().hidden, help="H")
    parser.add_argument("--latent", type=int, default=Options().latent, help="L")
    parser.add_argument("--gemm-us", type=float, default=Options().gemm_us, help="what the GEMM is to take alone")
    parser.add_argument("--columns", type=int, help="the GEMM's N, in place of --gemm-us")
    parser.add_argument("--repeats", type=int, default=Options().repeats, help="rounds in alternating order")
    parser.add_argument("--samples", type=int, default=Options().samples, help="samples of an arm in each round")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 10 samples")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        how = "torchrun --standalone --nproc-per-node 2 benchmarks/overlap.py"
        _console.complain(f"overlap.py: no ranks; start it by torchrun, as {how}")
        return 2
    os.environ.update(ENVIRONMENT)
    try:
        return _run(args)
    except K3CommError as error:
        _console.complain(f"overlap.py: {error}")
        return 2


def _run(args: argparse.Namespace) -> int:
    options = Options(
        rows=args.rows,
        hidden=args.hidden,
        latent=args.latent,
        gemm_us=args.gemm_us,
        columns=args.columns,
        sms=args.sms,
        repeats=2 if args.quick else args.repeats,
        samples=10 if args.quick else args.samples,
    )
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        group = dist.group.WORLD
        if group is None or dist.get_world_size() < 2:
            raise InputError("a group of 1 rank given; accepted are 2 or more")
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        results = measure(options, group, device)
        if dist.get_rank() == 0:
            show(*tables(results))
            if not results["equal"]:
                print("FAILED: calls with and without reduce_shared differ", file=sys.stderr)
            if args.json is not None:
                args.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        return 0 if results["equal"] else 1
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
