"""Starts a few processes on this machine's CPU, lets them agree, and measures every tier against float64.

Shown are the negotiation's report, the map from the number of tokens to the tier, and for each agreed tier, also with
precise=True where it can: the error relative to the layer's own contribution, the share of elements that are not the
correctly rounded result, the bias with and without that of the format itself, each beside its bound, and whether all
ranks hold the same bits. The exit code is 1 if a bound is missed or ranks differ.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from k3comm.cli import _choice, _console
from k3comm.cli.tiers import map_table
from k3comm.errors import K3CommError
from k3comm.negotiate.decide import MAX_RANKS
from k3comm.spec import DTYPES, LatentMoESpec

if TYPE_CHECKING:
    from k3comm.cli._measure import Finding

HELP = "several processes on the CPU: the report, the map, and every tier's accuracy beside its bounds"

K3 = LatentMoESpec.kimi_k3()
RANKS = 4
SEED = 1
DEADLINE = 600.0
"""Seconds after which the ranks are given up."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `demo`."""
    parser.add_argument(
        "--ranks",
        type=_choice.whole(1, MAX_RANKS),
        default=RANKS,
        metavar="N",
        help="processes (default: %(default)s)",
    )
    for name, letter, size in (("--hidden", "H", K3.hidden_size), ("--latent", "L", K3.latent_size)):
        parser.add_argument(
            name,
            type=_choice.whole(1),
            default=size,
            metavar=letter,
            help=f"{name[2:]} width (default: %(default)s, Kimi-K3's)",
        )
    parser.add_argument("--dtype", choices=DTYPES, default=K3.dtype, help="of the layer (default: %(default)s)")
    parser.add_argument(
        "--seed", type=_choice.whole(0), default=SEED, metavar="N", help="of the random data (default: %(default)s)"
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the ranks, judges what they measured, and shows both."""
    from k3comm.cli import _measure
    from k3comm.testing import RanksFailed, run_ranks

    started = time.monotonic()
    spec = LatentMoESpec(
        hidden_size=arguments.hidden, latent_size=arguments.latent, top_k=K3.top_k, dtype=arguments.dtype
    )
    try:
        found = run_ranks(_measure.measure, arguments.ranks, spec, arguments.seed, deadline=DEADLINE)
    except RanksFailed as failed:
        _console.complain(f"k3comm: {failed}")
        return 1
    for one in found:
        if one.error:
            raise K3CommError(one.error)
    findings = _measure.judge(found, spec)
    missed = [f"{finding.variant}: {why}" for finding in findings for why in finding.complaints()]
    verdict = f"MISSED: {len(missed)}" if missed else "all bounds kept, and all ranks hold the same bits"
    _console.show(
        found[0].report,
        "",
        map_table(found[0].spans),
        _table(findings, arguments.ranks),
        "x: the result in float64. error: rms(out - x) / rms(x - residual). misrounded: share of elements that are not",
        "x rounded once. bias: <out - x, x> / <x, x>; paired: the same less that of x rounded once.",
        *_sources(findings),
        "",
        *(f"MISSED {line}" for line in missed),
        f"{verdict}; {_count(arguments.ranks, 'process', 'es')}, {time.monotonic() - started:.0f} s",
    )
    return 1 if missed else 0


def _table(findings: Sequence[Finding], ranks: int) -> _console.Table:
    """Two lines a variant: the figures, and below each its bound."""
    rows: list[list[str | _console.Cell]] = []
    for finding in findings:
        accuracy, variant = finding.accuracy, finding.variant
        # A bias is judged call by call where it is judged: then the worst call's is shown, without its sign.
        figures = {
            "error": f"{accuracy.error:.3g}",
            "misrounded": f"{accuracy.misrounded:.3g}",
            "bias": f"{accuracy.bias:+.1e}",
            "paired_bias": f"{accuracy.paired_bias:+.1e}",
        }
        bounds = dict.fromkeys(figures, "")
        for limit in finding.limits:
            name, allowed = limit.bound.quantity, limit.bound.limit
            if name == "error_over_ideal":
                name, allowed = "error", allowed * accuracy.ideal_error
            elif "bias" in name:
                figures[name] = f"{limit.value:.1e}"
            bounds[name] = f"{'<=' if limit.bound.inclusive else '<'} {allowed:.3g}"
        alike = "differ" if finding.differing else "alike"
        verdict = _console.verdict_cell(finding.good)
        rows.append(
            [
                _console.tier_cell(variant.tier),
                variant.numerics.value,
                str(accuracy.rows),
                *figures.values(),
                alike,
                verdict,
            ]
        )
        rows.append(["  precise" if variant.precise else "", "", "", *bounds.values(), "", ""])
    return _console.Table(
        title=f"Accuracy against float64, each figure above its bound; bits compared over {_count(ranks, 'rank')}",
        columns=["tier", "class", ">rows", ">error", ">misrounded", ">bias", ">paired bias", "ranks", "verdict"],
        rows=rows,
    )


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number > 1 else ''}"


def _sources(findings: Sequence[Finding]) -> list[str]:
    """Where the bounds come from, a line for each kind; and those that too few rows were pooled for."""
    lines = dict.fromkeys(
        f"{finding.variant.numerics.value}: {limit.bound} ({limit.bound.source})"
        for finding in findings
        for limit in finding.limits
    )
    unjudged = [
        f"not judged: {finding.variant}: {limit.bound} needs {limit.bound.min_rows} rows, not {finding.accuracy.rows}"
        for finding in findings
        for limit in finding.limits
        if limit.holds is None
    ]
    return [*lines, *unjudged]
