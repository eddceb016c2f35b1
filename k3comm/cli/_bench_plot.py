"""The bench's figure: time against the number of rows, a line an arm, the selected tier's size ranges shaded."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from k3comm.cli import _plots
from k3comm.cli._console import COLOURS
from k3comm.cli._results import Results
from k3comm.tiers import Tier

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RIVAL_DASHES = ("--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)), (0, (7, 3)))


def draw(results: Results, path: str) -> None:
    """Draws `chained` times, log-log. Behind them, in each tier's colour, the sizes for which it is selected.

    Raises:
        InputError: the file can't be written.
    """
    figure = _plots._figure(10, 6)
    axes = figure.add_subplot()
    rivals = [arm for arm in results.arms if arm not in Tier.__members__]
    for arm in results.arms:
        every = [one for one in results.measurements if one.arm == arm]
        sizes, times = [one.rows for one in every], [one.chained for one in every]
        noise = [
            [one.chained - min(one.chained_us) for one in every],
            [max(one.chained_us) - one.chained for one in every],
        ]
        if arm in Tier.__members__:
            colour = COLOURS[Tier[arm]]
            axes.errorbar(sizes, times, noise, color=colour, marker="o", markersize=4, elinewidth=0.7, label=arm)
        else:
            dashes = RIVAL_DASHES[rivals.index(arm) % len(RIVAL_DASHES)]
            axes.plot(sizes, times, color="0.45", linestyle=dashes, linewidth=1.1, label=arm)
    _shade(axes, results)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(results.rows, [str(rows) for rows in results.rows])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("tokens in the forward, m")
    axes.set_ylabel("us a call, chained, slowest rank; bars: range of the repetitions")
    axes.grid(axis="y", which="both", linewidth=0.3, alpha=0.5)
    title = f"The MoE tail on {results.world_size} x {results.device}{' - SHORT RUN' if results.short else ''}"
    _plots._headline(axes, title, f"{results.origin()}. Shaded: the selected tier.")
    _plots._bare(axes)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    _plots._save(figure, path)


def _shade(axes: Axes, results: Results) -> None:
    """Bands between the geometric means of neighbouring sizes, and a ring around the selected tier's own times."""
    sizes = results.rows
    edges = [sizes[0] / 1.19, *((a * b) ** 0.5 for a, b in pairwise(sizes)), sizes[-1] * 1.19]
    for place, rows in enumerate(sizes):
        tier = results.selected.get(rows)
        if tier is None:
            continue
        axes.axvspan(edges[place], edges[place + 1], color=COLOURS[tier], alpha=0.12, linewidth=0)
        one = results.at(tier.name, rows)
        if one is not None:
            axes.plot([rows], [one.chained], "o", markersize=9, markerfacecolor="none", color=COLOURS[tier])
    axes.set_xlim(edges[0], edges[-1])
