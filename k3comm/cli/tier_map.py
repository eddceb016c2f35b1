"""The map m -> tier as a value: for each kind of forward the contiguous ranges of m and the tier that each gets.

Exact, and not found by trying every m: what `obstacle` says about one tier changes only where a range of its window
begins or ends and where its agreed capacity ends, so the selector is asked once for each stretch between two such
places. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from k3comm.tiers import UNLIMITED, Agreement, Axes, Tier, TokenRange, Windows, select_tier


@attrs.frozen
class ForwardKind:
    """What a tensor's shape does not show of a forward; see `Axes`."""

    graph: bool
    decode: bool

    def __str__(self) -> str:
        return f"{'decode' if self.decode else 'prefill'}, {'graph' if self.graph else 'eager'}"


KINDS = (ForwardKind(True, True), ForwardKind(False, True), ForwardKind(False, False), ForwardKind(True, False))
"""All kinds: decode in a graph, decode eager, prefill (or mixed) eager, prefill (or mixed) in a graph."""


@attrs.frozen
class Span:
    """A range of m in which one tier is chosen."""

    tokens: TokenRange
    tier: Tier


TierMap = Mapping[ForwardKind, tuple[Span, ...]]
"""The spans of each kind: from m = 1, ascending, without gaps; the last has no end, and neighbours differ in tier."""


def tier_map(agreement: Agreement[Tier], windows: Windows[Tier]) -> TierMap:
    """The tier of every m from 1, for each kind of forward. (With m = 0 a tail talks to nobody.)"""
    starts = _starts(agreement, windows)
    return {kind: _spans(kind, starts, agreement, windows) for kind in KINDS}


def in_step(spans: TierMap) -> list[tuple[TokenRange, tuple[Tier, ...]]]:
    """The same as rows of one table: ranges in which no kind changes its tier, with the tiers in the map's order."""
    starts = sorted({span.tokens.first for row in spans.values() for span in row})
    ends = [*(start - 1 for start in starts[1:]), None]
    return [
        (
            TokenRange(start, end),
            tuple(next(span.tier for span in row if span.tokens.holds(start)) for row in spans.values()),
        )
        for start, end in zip(starts, ends, strict=True)
    ]


def _starts(agreement: Agreement[Tier], windows: Windows[Tier]) -> list[int]:
    """Every m from 1 at which the choice may differ from that for m - 1."""
    starts = {1}
    for tier, capacity in agreement.capacities.items():
        ends = [capacity]
        if tier in windows.rows:
            for tokens in windows.rows[tier].tokens:
                starts.add(tokens.first)
                if tokens.last is not None:
                    ends.append(tokens.last)
        starts.update(end + 1 for end in ends)
    return sorted(start for start in starts if 1 <= start <= UNLIMITED)


def _spans(
    kind: ForwardKind, starts: list[int], agreement: Agreement[Tier], windows: Windows[Tier]
) -> tuple[Span, ...]:
    chosen: list[tuple[int, Tier]] = []
    for start in starts:
        axes = Axes(num_tokens=start, graph=kind.graph, decode=kind.decode)
        tier = select_tier(axes=axes, agreement=agreement, windows=windows)
        if not chosen or chosen[-1][1] is not tier:
            chosen.append((start, tier))
    ends = [*(start - 1 for start, _ in chosen[1:]), None]
    return tuple(Span(TokenRange(start, end), tier) for (start, tier), end in zip(chosen, ends, strict=True))
