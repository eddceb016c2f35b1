"""Figures, through matplotlib where it is installed (the `plot` extra)."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from k3comm.cli._console import COLOURS, import_failure
from k3comm.cli.tier_map import TierMap
from k3comm.errors import InputError
from k3comm.tiers import Tier

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

CHARACTER = 0.0088
"""The width of a small character, as a share of the width of the axes."""
FORMATS = (".png", ".svg", ".pdf")


def check(path: str) -> None:
    """Refuses, before any work, a plot that could not be written.

    Raises:
        InputError: matplotlib is missing or can't be imported, or the file's kind or folder is not accepted.
    """
    failure = import_failure("matplotlib.figure", "matplotlib.patches", "matplotlib.backends.backend_agg")
    if failure is not None:
        absent = isinstance(failure, ModuleNotFoundError) and failure.name == "matplotlib"
        why = "is not installed" if absent else f"can't be imported ({type(failure).__name__}: {failure})"
        raise InputError(f"--plot needs matplotlib, which {why}: pip install 'k3comm[plot]'")
    if Path(path).suffix.lower() not in FORMATS:
        raise InputError(f"--plot: {path!r} given; accepted are files that end in {', '.join(FORMATS)}")
    if not Path(path).parent.is_dir():
        raise InputError(f"--plot: {path!r} given; there is no folder {str(Path(path).parent)!r}")


def draw_map(spans: TierMap, path: str, subtitle: str) -> None:
    """The map m -> tier: m on a logarithmic axis, a lane for each kind of forward."""
    figure = _figure(10, 4.2)
    axes = figure.add_subplot()
    starts = sorted({span.tokens.first for row in spans.values() for span in row})
    # One factor of eight beyond the last change, so that its right side is seen too.
    end = 8 * max(starts[-1], 64)
    for lane, row in enumerate(spans.values()):
        for span in row:
            first, last = span.tokens.first, end if span.tokens.last is None else span.tokens.last + 1
            axes.barh(lane, last - first, left=first, height=0.74, color=COLOURS[span.tier], edgecolor="white")
            if math.log(last / first, end) > len(span.tier.name) * CHARACTER:
                axes.text((first * last) ** 0.5, lane, span.tier.name, ha="center", va="center", size=8, color="white")
    for start in starts[1:]:
        axes.axvline(start, color="black", linewidth=0.6, linestyle=":", zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_xlim(1, end)
    _token_ticks(axes, end, starts)
    axes.set_yticks(range(len(spans)), [str(kind) for kind in spans])
    axes.invert_yaxis()
    axes.set_xlabel("tokens in the forward, m")
    _headline(axes, "Tier of the MoE tail by number of tokens", subtitle)
    _bare(axes)
    _legend(figure, {span.tier for row in spans.values() for span in row})
    _save(figure, path)


@attrs.frozen(kw_only=True)
class ReplayFigure:
    """What the replay's figure shows.

    Attributes:
        title, subtitle: text above it.
        shares: for each measure (forwards, tokens, time), the amount by tier.
        histogram: for each tier, forwards by number of tokens.
    """

    title: str
    subtitle: str
    shares: Mapping[str, Mapping[Tier, float]]
    histogram: Mapping[Tier, Mapping[int, int]]


def draw_replay(content: ReplayFigure, path: str) -> None:
    """Shares of each tier on top; below, how many forwards had m tokens, coloured by tier."""
    figure = _figure(10, 6.4)
    above, below = figure.subplots(2, 1, gridspec_kw={"height_ratios": [1, 2.1]})
    for lane, amounts in enumerate(content.shares.values()):
        total, left = sum(amounts.values()) or 1.0, 0.0
        for tier in sorted(amounts):
            share = 100 * amounts[tier] / total
            above.barh(lane, share, left=left, height=0.7, color=COLOURS[tier], edgecolor="white")
            if share >= 4:
                above.text(left + share / 2, lane, f"{share:.0f} %", ha="center", va="center", size=9, color="white")
            left += share
    above.set_yticks(range(len(content.shares)), list(content.shares))
    above.invert_yaxis()
    above.set_xlim(0, 100)
    above.set_xlabel("share, %")
    _headline(above, content.title, content.subtitle)
    edges = _edges(max(m for counts in content.histogram.values() for m in counts))
    floor = [0.0] * (len(edges) - 1)
    for tier in sorted(content.histogram):
        heights = _binned(content.histogram[tier], edges)
        widths = [high - low for low, high in pairwise(edges)]
        below.bar(edges[:-1], heights, widths, bottom=floor, align="edge", color=COLOURS[tier], edgecolor="white")
        floor = [low + height for low, height in zip(floor, heights, strict=True)]
    below.set_xscale("log", base=2)
    below.set_xlim(0.7, edges[-1])
    _token_ticks(below, edges[-1], [])
    below.set_xlabel("tokens in the forward, m (two bars a doubling; the second ends with a power of two)")
    below.set_ylabel("forwards")
    for axes in (above, below):
        _bare(axes)
    _legend(figure, set(content.histogram))
    _save(figure, path)


def _edges(most: int) -> list[float]:
    """Edges between the bins 1, 2, 3, 4, 5..6, 7..8, 9..12, 13..16, ... up to `most`: halves, since m is whole."""
    edges = [0.5, 1.5, 2.5]
    power = 2
    while edges[-1] < most:
        edges += [1.5 * power + 0.5, 2 * power + 0.5]
        power *= 2
    return edges


def _binned(counts: Mapping[int, int], edges: Sequence[float]) -> list[float]:
    return [float(sum(count for m, count in counts.items() if low < m < high)) for low, high in pairwise(edges)]


def _token_ticks(axes: Axes, end: float, marked: Sequence[int]) -> None:
    """Ticks at `marked` and at powers of four, as far as their labels have room: the former first."""
    ticks: list[int] = []
    for tick in dict.fromkeys([1, *marked, *(4**power for power in range(32) if 4**power < end)]):
        room = [(len(f"{tick}{other}") / 2 + 1.5) * CHARACTER for other in ticks]
        if all(abs(math.log(tick / other, end)) > width for other, width in zip(ticks, room, strict=True)):
            ticks.append(tick)
    axes.set_xticks(sorted(ticks), [str(tick) for tick in sorted(ticks)])
    axes.set_xticks([], minor=True)


def _figure(width: float, height: float) -> Figure:
    # Not pyplot: no window system is asked, and nothing global changes.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _headline(axes: Axes, title: str, subtitle: str) -> None:
    lines = textwrap.wrap(subtitle, round(1 / CHARACTER), break_long_words=False)
    axes.annotate(
        "\n".join(lines), (0, 1), (0, 6), "axes fraction", textcoords="offset points", size=8, color="0.35", va="bottom"
    )
    axes.set_title(title, loc="left", pad=12 + 11 * len(lines))


def _bare(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend(figure: Figure, tiers: set[Tier]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=COLOURS[tier], label=tier.name) for tier in sorted(tiers)]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9)


def _save(figure: Figure, path: str) -> None:
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise InputError(f"--plot: {path}: can't be written: {error.strerror or error}") from None
