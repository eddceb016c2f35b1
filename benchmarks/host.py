"""What k3comm itself costs on a CPU: a plan, a negotiation, and the tiers beside SEPARATE_REDUCE in one run.

    python benchmarks/host.py [--json FILE] [--quick]

Figures are medians; a collective's is the slowest rank's. Targets are printed beside them and decide nothing: a busy
machine misses them, so run it on a quiet one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table

import k3comm
from k3comm import Communicator, LatentMoESpec, Tier
from k3comm.testing import run_ranks, start_server

PLAN_TARGET_US = 0.15
NEGOTIATION_TARGET_MS = 150.0
FUSED_TARGET = 5.0
DECODE_ARMS = (Tier.TAIL_FUSION, Tier.PEER_AR, Tier.FUSED_LANE_AR, Tier.SEPARATE_REDUCE)
CALLS = 20
TOKENS = (1, 16, 64, 256, 1024)


def plan_cost() -> dict[str, float]:
    """Microseconds of one `plan` that was made before, by how it is called."""
    comm = Communicator.negotiate(LatentMoESpec(hidden_size=64, latent_size=32, top_k=2))
    tail = comm.moe_tail(layer_index=0, up_weight=torch.zeros(64, 32, dtype=torch.bfloat16))
    calls: dict[str, Callable[[], object] | str] = {
        "plan(m)": "tail.plan(8)",
        "plan(m, graph, decode)": "tail.plan(8, True, True)",
        "plan(m, graph=, decode=)": "tail.plan(8, graph=True, decode=True)",
        'plan(m, output="rows")': 'tail.plan(8, output="rows")',
    }
    number = 200_000
    return {
        name: statistics.median(timeit.repeat(call, globals={"tail": tail}, number=number, repeat=9)) / number * 1e6
        for name, call in calls.items()
    }


def negotiate_once(transport: str) -> tuple[float, float]:
    """Milliseconds of a process' first negotiation and of its second, after init and import."""
    spec, times, settings = LatentMoESpec.kimi_k3(), [], k3comm.Settings(transport=transport)
    for _ in range(2):
        dist.barrier()
        start = time.perf_counter()
        Communicator.negotiate(spec, dist.group.WORLD, settings=settings)
        times.append((time.perf_counter() - start) * 1e3)
    return times[0], times[1]


def tiers_once(rows: tuple[int, ...], repeats: int) -> dict[int, dict[str, float]]:
    """Milliseconds of a tail call by number of tokens and tier, arms in alternating order."""
    spec = LatentMoESpec.kimi_k3()
    comm = Communicator.negotiate(spec, dist.group.WORLD)
    weight = torch.randn(spec.hidden_size, spec.latent_size).mul_(0.02).bfloat16()
    tail = comm.moe_tail(
        layer_index=0, norm_weight=torch.ones(spec.latent_size, dtype=torch.bfloat16), up_weight=weight
    )
    found: dict[int, dict[str, float]] = {}
    for m in rows:
        routed, shared = torch.randn(m, spec.latent_size).bfloat16(), torch.randn(m, spec.hidden_size).bfloat16()
        arms = [tier for tier, most in comm.agreement.capacities.items() if m <= most]
        times: dict[Tier, list[float]] = {tier: [] for tier in arms}
        for repeat in range(repeats + 1):
            for tier in arms if repeat % 2 else reversed(arms):
                plan = tail.plan(m, tier=tier)
                dist.barrier()
                start = time.perf_counter()
                tail(routed, shared, shared, plan=plan)
                times[tier].append((time.perf_counter() - start) * 1e3)
        found[m] = {tier.name: statistics.median(values[1:]) for tier, values in times.items()}
        found[m]["selected"] = float(tail.plan(m).tier)
    return found


def decode_once(repeats: int) -> dict[str, float]:
    """Microseconds of one decode row of a small layer by tier, arms in alternating order."""
    spec = LatentMoESpec(hidden_size=512, latent_size=256, top_k=8)
    comm = Communicator.negotiate(spec, dist.group.WORLD)
    weight = torch.randn(spec.hidden_size, spec.latent_size).mul_(0.02).bfloat16()
    tail = comm.moe_tail(
        layer_index=0, norm_weight=torch.ones(spec.latent_size, dtype=torch.bfloat16), up_weight=weight
    )
    routed, shared = torch.randn(1, spec.latent_size).bfloat16(), torch.randn(1, spec.hidden_size).bfloat16()
    arms = [tier for tier in DECODE_ARMS if tier in comm.agreement]
    times: dict[Tier, list[float]] = {tier: [] for tier in arms}
    for repeat in range(repeats):
        for tier in arms if repeat % 2 else reversed(arms):
            plan = tail.plan(1, tier=tier)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(CALLS):
                tail(routed, shared, shared, plan=plan)
            times[tier].append((time.perf_counter() - start) / CALLS * 1e6)
    return {tier.name: statistics.median(values) for tier, values in times.items()}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--quick", action="store_true", help="fewer repeats and token counts")
    options = parser.parse_args(arguments)
    console = Console(width=max(120, Console().width))
    figures: dict[str, object] = {"torch": str(torch.__version__), "k3comm": k3comm.__version__}

    plans = plan_cost()
    table = Table("plan(), memoised", "us", "target")
    for name, cost in plans.items():
        table.add_row(name, f"{cost:.3f}", "" if "rows" in name else f"{PLAN_TARGET_US}")
    console.print(table)

    start_server()
    table = Table("negotiation, 8 gloo ranks, Kimi-K3", "first in a process, ms", "second, ms", "target")
    negotiation: dict[str, tuple[float, float]] = {}
    for what, transport in (("one vote, nothing shared", "peer"), ("and 20 MB a rank established", "auto")):
        runs = [run_ranks(negotiate_once, 8, transport) for _ in track(range(3 if options.quick else 9), what)]
        first, again = (statistics.median(max(rank[i] for rank in ranks) for ranks in runs) for i in (0, 1))
        negotiation[what] = (first, again)
        table.add_row(
            what, f"{first:.0f}", f"{again:.0f}", f"{NEGOTIATION_TARGET_MS:.0f}" if transport == "peer" else ""
        )
    console.print(table)

    decode: dict[int, dict[str, float]] = {}
    table = Table("one row, H 512, L 256", *(tier.name for tier in DECODE_ARMS), "target of TAIL_FUSION")
    for ranks in (2, 4, 8):
        every_run = run_ranks(decode_once, ranks, 5 if options.quick else 21, deadline=300.0)
        decode[ranks] = {name: max(one[name] for one in every_run) for name in every_run[0]}
        base = decode[ranks]["SEPARATE_REDUCE"]
        cells = [f"{us:.0f} us, {base / us:.1f}x" for us in decode[ranks].values()]
        table.add_row(f"{ranks} ranks", *cells, f"{FUSED_TARGET:.0f}x" if ranks > 2 else "")
    console.print(table)

    rows, repeats = (TOKENS[:3], 3) if options.quick else (TOKENS, 9)
    ranks = 4
    every = run_ranks(tiers_once, ranks, rows, repeats, deadline=600.0)
    names = [tier for tier in every[0][rows[0]] if tier != "selected"]
    table = Table(f"m ({ranks} gloo ranks)", *names, "selected")
    slowest: dict[int, dict[str, float]] = {}
    for m in rows:
        slowest[m] = {name: max(one[m][name] for one in every) for name in every[0][m]}
        base = slowest[m]["SEPARATE_REDUCE"]
        chosen = Tier(int(slowest[m].pop("selected")))
        cells = [f"{slowest[m][n]:.1f} ms, {base / slowest[m][n]:.2f}x" if n in slowest[m] else "-" for n in names]
        table.add_row(str(m), *cells, chosen.name)
    console.print(table)
    console.print("Kimi-K3 shapes, BF16; the factor is SEPARATE_REDUCE's time over the tier's, in this run.")

    figures |= {
        "plan_us": plans,
        "negotiation_ms": negotiation,
        "decode_us": decode,
        "tiers_ms": slowest,
    }
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
