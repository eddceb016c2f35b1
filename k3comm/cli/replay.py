"""How often each tier would be chosen for a trace of requests, batched continuously, forward by forward.

TRACE is a CSV file with the columns TIMESTAMP, ContextTokens, GeneratedTokens (the Azure LLM inference traces' format).
Without one, the first 2,000 requests of the Azure code trace of 2023 are used, which ship with k3comm (CC-BY 4.0).

Requests are admitted as they arrive; a forward takes one row for each request that is past its prompt, and prompt
tokens of the others, oldest first. A forward of decode rows alone counts as decode in a CUDA graph, any other as an
eager prefill. A forward of m rows takes A + B*m microseconds; idle time is skipped.

Where the windows carry measured times (`k3comm tune`), what the tails would take is estimated from them: for each
forward the chosen tier's time at its m, times the layers. Nothing is guessed beyond the measured sizes: where a forward
lies outside, there is no sum ("-"), and such forwards are counted.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import attrs

from k3comm.cli import _choice, _console, _plots
from k3comm.cli.schedule import StepCost, rows_of, schedule
from k3comm.cli.trace import CITATION, Trace, load_trace, packaged_trace
from k3comm.settings import Settings
from k3comm.tiers import Agreement, Axes, Tier, Windows, is_here, select_tier

HELP = "which tiers a trace of requests would use, and how often"

RANKS = 8
FAMILY = "default"
AGREED = "TAIL_FUSION,MULTIMEM_AR,FUSED_LANE_AR,SEPARATE_REDUCE"
MAX_BATCH = 256
PREFILL_CHUNK = 2048
STEP_US = StepCost(12000, 50)
LAYERS = 92
MAX_STEP_US = 10**9
"""The longest A and B: a quarter of an hour. Far beyond it sums of microseconds would leave the range of floats."""
MIN_RATE, MAX_RATE = 1e-6, 1e6

EPILOG = """examples:
  k3comm replay
  k3comm replay trace.csv --max-batch 64 --prefill-chunk 8192 --step-us 9000,40 --plot replay.png
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `replay`."""
    parser.epilog = EPILOG
    parser.add_argument(
        "trace", nargs="?", metavar="TRACE.csv", help="the requests (default: the excerpt that ships with k3comm)"
    )
    parser.add_argument(
        "--max-batch",
        type=_choice.whole(1),
        default=MAX_BATCH,
        metavar="N",
        help="requests in the batch at most, prompts being read included (default: %(default)s, "
        "more than this trace ever fills at these step times, so that arrivals decide)",
    )
    parser.add_argument(
        "--prefill-chunk",
        type=_choice.whole(1),
        default=PREFILL_CHUNK,
        metavar="N",
        help="prompt tokens in a forward at most (default: %(default)s, "
        "which keeps a forward with prompts, and so the wait of the requests that decode, near a tenth of a second)",
    )
    parser.add_argument(
        "--step-us",
        type=_step_cost,
        default=STEP_US,
        metavar="A,B",
        help=f"a forward of m rows takes A + B*m microseconds (default: {STEP_US.fixed:g},{STEP_US.per_row:g}, an "
        "assumption and no measurement: 80 small forwards and 20,000 prompt tokens a second, the order of a Kimi-K3 on "
        "one host of 8 GPUs; give your engine's own)",
    )
    parser.add_argument(
        "--rate",
        type=_rate,
        default=1.0,
        metavar="X",
        help="let the requests arrive X times as fast (default: %(default)g, as recorded)",
    )
    parser.add_argument(
        "--layers",
        type=_choice.whole(1),
        default=LAYERS,
        metavar="N",
        help="layers with a tail in each forward (default: %(default)s, the MoE layers of Kimi-K3)",
    )
    _choice.add_arguments(parser, family=FAMILY, ranks=RANKS, agreed=f"{AGREED}: a host with NVLink multicast")
    parser.add_argument("--plot", metavar="FILE.png", help="draw shares and sizes (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print the result as JSON instead")


def run(arguments: argparse.Namespace) -> int:
    """Replays the trace and shows what each tier got."""
    if arguments.plot is not None:
        _plots.check(arguments.plot)
    used = _choice.windows_for(arguments, Settings.from_env(), FAMILY)
    agreed = _choice.agreement(AGREED) if arguments.agreed is None else arguments.agreed
    trace = packaged_trace() if arguments.trace is None else load_trace(arguments.trace)
    tally = replay(
        trace,
        agreed,
        used.windows,
        max_batch=arguments.max_batch,
        prefill_chunk=arguments.prefill_chunk,
        cost=arguments.step_us,
        rate=arguments.rate,
    )
    notes = [*used.notes]
    if trace.moved:
        notes.append(f"{trace.moved} lines of the trace stood before an earlier request; sorted by time")
    idle = [tier.name for tier in agreed.capacities if not tally.forwards(tier)]
    if idle:
        notes.append(f"agreed but never chosen here: {', '.join(idle)}")
    absent = [tier.name for tier in agreed.capacities if tally.forwards(tier) and not is_here(tier)]
    if absent:
        notes.append(f"not part of this version, so this is a machine to come: {', '.join(absent)}")
    notes += _misfits(arguments, agreed, used.windows)
    if used.windows.timings:
        beyond = tally.beyond(used.windows)
        if beyond:
            notes.append(f"{beyond} forwards have more or fewer tokens than were measured; sums with them are left out")
        untimed = [tier.name for tier in tally.tiers() if tier not in used.windows.timings]
        if untimed:
            notes.append(f"the windows have no times of {', '.join(untimed)}")
    if arguments.plot:
        _plots.draw_replay(_figure(tally, trace, arguments, used.windows), arguments.plot)
        notes.append(f"drawn in {arguments.plot}")
    if arguments.json:
        _console.show_json(_as_dict(tally, trace, arguments, agreed, used.windows, notes))
    else:
        _show(tally, trace, arguments, agreed, used, notes)
    return 0


def _misfits(arguments: argparse.Namespace, agreed: Agreement[Tier], windows: Windows[Tier]) -> list[str]:
    """Where a windows file is one of other ranks, or of another machine, than is asked about."""
    notes = []
    if windows.world_size not in (0, arguments.ranks):
        notes.append(f"the windows were measured with {windows.world_size} ranks, and --ranks is {arguments.ranks}")
    if windows.family == "host" and arguments.agreed is None:
        notes.append(
            "the windows are of the family host, and the tiers those of GPUs; give --agreed to say which are there"
        )
    unknown = [tier.name for tier in agreed.capacities if tier not in windows.rows]
    if unknown:
        notes.append(f"the windows have no row of {', '.join(unknown)}, so never choose it")
    return notes


@attrs.define
class Tally:
    """What was run: forwards by (tier, all rows decode, m)."""

    cost: StepCost
    counts: Counter[tuple[Tier, bool, int]] = attrs.field(factory=Counter)
    most_decode_rows: int = 0
    end: float = 0.0

    def forwards(
        self, tier: Tier | None = None, decode: bool | None = None, first: int = 0, last: float = math.inf
    ) -> int:
        """The number of forwards: of a tier, of a kind, of `first` to `last` rows."""
        return sum(self._select(tier, decode, first, last).values())

    def tokens(self, tier: Tier | None = None) -> int:
        """The rows of those forwards."""
        return sum(m * n for (_, _, m), n in self._select(tier).items())

    def time(self, tier: Tier | None = None) -> float:
        """The microseconds of those forwards."""
        return sum(self.cost.of(m) * n for (_, _, m), n in self._select(tier).items())

    def sizes(self, tier: Tier | None = None) -> dict[int, int]:
        """Forwards by number of rows, ascending."""
        by_rows: Counter[int] = Counter()
        for (_, _, m), n in self._select(tier).items():
            by_rows[m] += n
        return dict(sorted(by_rows.items()))

    def tiers(self) -> list[Tier]:
        """The tiers that were chosen, best first."""
        return sorted({tier for tier, _, _ in self.counts})

    def tail_time(self, windows: Windows[Tier], layers: int, tier: Tier | None = None) -> float | None:
        """The estimated microseconds of all tails of those forwards; None if one of them is not measured."""
        total = 0.0
        for (chosen, _, m), n in self._select(tier).items():
            if chosen not in windows.timings or not windows.timings[chosen].covers(m):
                return None
            total += windows.timings[chosen].estimate(m) * n * layers
        return total

    def beyond(self, windows: Windows[Tier], tier: Tier | None = None) -> int:
        """The number of those forwards whose m lies outside what the chosen tier was measured with."""
        return sum(
            n
            for (chosen, _, m), n in self._select(tier).items()
            if chosen in windows.timings and not windows.timings[chosen].covers(m)
        )

    def _select(
        self, tier: Tier | None = None, decode: bool | None = None, first: int = 0, last: float = math.inf
    ) -> dict[tuple[Tier, bool, int], int]:
        return {
            key: n
            for key, n in self.counts.items()
            if tier in (None, key[0]) and decode in (None, key[1]) and first <= key[2] <= last
        }


def replay(
    trace: Trace,
    agreed: Agreement[Tier],
    windows: Windows[Tier],
    *,
    max_batch: int = MAX_BATCH,
    prefill_chunk: int = PREFILL_CHUNK,
    cost: StepCost = STEP_US,
    rate: float = 1.0,
) -> Tally:
    """Runs the schedule, requests arriving `rate` times as fast, and asks the selector for each forward."""

    @cache
    def chosen(num_tokens: int, decode: bool) -> Tier:
        axes = Axes(num_tokens=num_tokens, graph=decode, decode=decode)
        return select_tier(axes=axes, agreement=agreed, windows=windows)

    requests = [attrs.evolve(request, arrival=round(request.arrival / rate)) for request in trace.requests]
    tally = Tally(cost)
    forwards = schedule(requests, max_batch=max_batch, prefill_chunk=prefill_chunk, cost=cost)
    with _console.progress("replaying", rows_of(requests)) as advance:
        for forward in forwards:
            tally.counts[chosen(forward.num_tokens, forward.decode), forward.decode, forward.num_tokens] += 1
            tally.most_decode_rows = max(tally.most_decode_rows, forward.decode_rows)
            tally.end = forward.start + cost.of(forward.num_tokens)
            advance(forward.num_tokens)
    return tally


def _show(
    tally: Tally,
    trace: Trace,
    arguments: argparse.Namespace,
    agreed: Agreement[Tier],
    used: _choice.WindowsUsed,
    notes: list[str],
) -> None:
    lines = [
        f"trace:    {trace.source}, {len(trace.requests)} requests in {_duration(trace.span)}"
        + (f", arriving {arguments.rate:g} times as fast" if arguments.rate != 1 else "")
    ]
    if arguments.trace is None:
        lines.append(f"          {CITATION}")
    cost = arguments.step_us
    lines += [
        f"schedule: at most {arguments.max_batch} requests and {arguments.prefill_chunk} prompt tokens a forward, "
        f"{cost.fixed:g} + {cost.per_row:g} * m us a forward",
        f"windows:  {used}",
        f"agreed:   {_choice.show_agreement(agreed)}",
        f"replayed: {_duration(tally.end)}, busy {_percent(tally.time(), tally.end)}, "
        f"at most {tally.most_decode_rows} decode rows in a forward",
        "",
    ]
    tables = (_tier_table(tally, arguments.layers, used.windows), _size_table(tally))
    _console.show(*lines, *tables, *(f"note: {note}" for note in notes))


def _tier_table(tally: Tally, layers: int, windows: Windows[Tier]) -> _console.Table:
    totals = (tally.forwards(), tally.tokens(), tally.time())
    rows: list[list[str | _console.Cell]] = []
    for tier in tally.tiers():
        sizes = tally.sizes(tier)
        forwards, tokens = tally.forwards(tier), tally.tokens(tier)
        rows.append(
            [
                _console.tier_cell(tier),
                f"{forwards:,}",
                _percent(forwards, totals[0]),
                f"{tokens:,}",
                _percent(tokens, totals[1]),
                f"{forwards * layers:,}",
                _percent(tally.time(tier), totals[2]),
                f"{min(sizes)} / {_median(sizes)} / {max(sizes)}",
                _tail_time(tally.tail_time(windows, layers, tier)),
                f"{tally.beyond(windows, tier):,}",
            ]
        )
    sizes = tally.sizes()
    rows.append(
        [
            "total",
            f"{totals[0]:,}",
            "",
            f"{totals[1]:,}",
            "",
            f"{totals[0] * layers:,}",
            "",
            f"{min(sizes)} / {_median(sizes)} / {max(sizes)}",
            _tail_time(tally.tail_time(windows, layers)),
            f"{tally.beyond(windows):,}",
        ]
    )
    columns = ["tier", ">forwards", ">share", ">tokens", ">share", ">layers", ">of time", ">m least / median / most"]
    if windows.timings:
        columns += [">tails, est.", ">unmeasured"]
    return _console.Table(
        title=f"By tier (layers: {layers} tails in each forward)",
        columns=columns,
        rows=[row[: len(columns)] for row in rows],
    )


def _size_table(tally: Tally) -> _console.Table:
    """Forwards by size, in ranges that double: 1, 2, 3..4, 5..8, ..."""
    rows: list[list[str | _console.Cell]] = []
    ranges = [(1, 1)]
    while ranges[-1][1] < max(tally.sizes()):
        ranges.append((ranges[-1][1] + 1, 2 * ranges[-1][1]))
    most = max(tally.forwards(first=first, last=last) for first, last in ranges)
    for first, last in ranges:
        decode = tally.forwards(decode=True, first=first, last=last)
        prefill = tally.forwards(decode=False, first=first, last=last)
        bar = "#" * math.ceil(40 * (decode + prefill) / most)
        rows.append([str(first) if first == last else f"{first}..{last}", f"{decode:,}", f"{prefill:,}", bar])
    return _console.Table(
        title="By size",
        columns=[">m", ">decode, graph", ">prefill or mixed, eager", "forwards"],
        rows=rows,
    )


def _as_dict(
    tally: Tally,
    trace: Trace,
    arguments: argparse.Namespace,
    agreed: Agreement[Tier],
    windows: Windows[Tier],
    notes: list[str],
) -> dict[str, Any]:
    cost: StepCost = arguments.step_us
    return {
        "trace": {
            "source": trace.source,
            "citation": CITATION if arguments.trace is None else None,
            "requests": len(trace.requests),
            "seconds": trace.span / 1e6,
        },
        "schedule": {
            "max_batch": arguments.max_batch,
            "prefill_chunk": arguments.prefill_chunk,
            "step_us": [cost.fixed, cost.per_row],
            "rate": arguments.rate,
        },
        "layers": arguments.layers,
        "windows": {"source": windows.source, "family": windows.family, "world_size": windows.world_size},
        "agreed": _choice.show_agreement(agreed),
        "total": {
            "forwards": tally.forwards(),
            "tokens": tally.tokens(),
            "layers": tally.forwards() * arguments.layers,
            "busy_seconds": tally.time() / 1e6,
            "seconds": tally.end / 1e6,
            "most_decode_rows": tally.most_decode_rows,
            **_tail_seconds(tally, arguments.layers, windows),
        },
        "tiers": {
            tier.name: {
                "forwards": tally.forwards(tier),
                "decode_forwards": tally.forwards(tier, True),
                "tokens": tally.tokens(tier),
                "layers": tally.forwards(tier) * arguments.layers,
                "busy_seconds": tally.time(tier) / 1e6,
                "forwards_by_tokens": {str(m): n for m, n in tally.sizes(tier).items()},
                **_tail_seconds(tally, arguments.layers, windows, tier),
            }
            for tier in tally.tiers()
        },
        "notes": notes,
    }


def _tail_seconds(
    tally: Tally, layers: int, windows: Windows[Tier], tier: Tier | None = None
) -> dict[str, float | None]:
    """The estimated time of the tails, where the windows carry any times; null where one that is needed is missing.

    `unmeasured` counts the forwards outside the measured sizes.
    """
    if not windows.timings:
        return {}
    estimate = tally.tail_time(windows, layers, tier)
    return {
        "tail_seconds": None if estimate is None else estimate / 1e6,
        "unmeasured": tally.beyond(windows, tier),
    }


def _figure(tally: Tally, trace: Trace, arguments: argparse.Namespace, windows: Windows[Tier]) -> _plots.ReplayFigure:
    cost = arguments.step_us
    return _plots.ReplayFigure(
        title=f"Tiers for {len(trace.requests):,} requests ({Path(trace.source).name})",
        subtitle=f"{windows.source}; at most {arguments.max_batch} requests, {arguments.prefill_chunk} prompt tokens; "
        f"{cost.fixed:g} + {cost.per_row:g} m us a forward",
        shares={
            "forwards\n(layers)": {tier: tally.forwards(tier) for tier in tally.tiers()},
            "tokens": {tier: tally.tokens(tier) for tier in tally.tiers()},
            "time": {tier: tally.time(tier) for tier in tally.tiers()},
        },
        histogram={tier: tally.sizes(tier) for tier in tally.tiers()},
    )


def _tail_time(microseconds: float | None) -> str:
    return "-" if microseconds is None else _duration(microseconds)


def _step_cost(text: str) -> StepCost:
    parts = text.split(",")
    try:
        fixed, per_row = (float(part) for part in parts)
    except ValueError:
        fixed = per_row = math.nan
    if not (0 <= fixed <= MAX_STEP_US and 0 <= per_row <= MAX_STEP_US):
        raise argparse.ArgumentTypeError(
            f"{text!r} given; accepted are two numbers from 0 to {MAX_STEP_US}, as A,B microseconds"
        )
    return StepCost(fixed, per_row)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = math.nan
    if not MIN_RATE <= rate <= MAX_RATE:
        raise argparse.ArgumentTypeError(f"{text!r} given; accepted are numbers from {MIN_RATE:f} to {MAX_RATE:.0f}")
    return rate


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "-"


def _median(sizes: dict[int, int]) -> int:
    """The lower median of the sizes (ascending) of an even number of forwards."""
    left = (sum(sizes.values()) + 1) // 2
    for m, n in sizes.items():
        left -= n
        if left <= 0:
            return m
    return 0


def _duration(microseconds: float) -> str:
    seconds = microseconds / 1e6
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds:02} s"
