"""Hypothesis strategies for what a selection depends on. Windows are drawn as documents, the way files hold them."""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, TypeVar

from hypothesis import strategies as st

from k3comm.tiers import UNLIMITED, Agreement, Axes, Tier

T = TypeVar("T", bound=IntEnum)

Ranges = list[tuple[int, int | None]]
Row = tuple[Ranges, str, str]
"""Token ranges, the graph rule and the decode rule, as plain values."""

EDGES = (0, 1, 2, 15, 16, 17, 255, 256, 257, 8191, 8192, 8193, 10**9, UNLIMITED, UNLIMITED + 1, 2**70)
"""Counts at which packaged windows or integer types change, with their neighbours."""

EVERYTHING: Row = ([(0, None)], "any", "any")
"""The row that the last member of an enum must have."""

counts = st.one_of(st.integers(0, 20), st.sampled_from(EDGES), st.integers(0, 10**9))
phases = st.sampled_from(["any", "only", "never"])


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Up to three ranges, ascending and apart; small numbers, so that ranges of different tiers meet."""
    ends = sorted(draw(st.sets(st.integers(0, 40), max_size=6)))
    ranges: Ranges = list(zip(ends[::2], ends[1::2], strict=False))
    if len(ends) % 2:
        ranges.append((ends[-1], draw(st.sampled_from([None, ends[-1]]))))
    return ranges, draw(phases), draw(phases)


@st.composite
def tables(draw: st.DrawFn, tiers: type[T] = Tier) -> dict[T, Row]:  # type: ignore[assignment]
    """A row for some members; the last member's accepts everything."""
    *others, last = sorted(tiers)
    table = {tier: draw(rows()) for tier in others if draw(st.booleans())}
    return {**table, last: EVERYTHING}


def document(table: Mapping[T, Row], **extra: Any) -> dict[str, Any]:
    """The windows file that holds a table, as `tomllib` would return it."""
    return {
        "schema": 1,
        "tiers": {
            tier.name: {
                "tokens": [f"{first}..{'' if last is None else last}" for first, last in ranges],
                "graph": graph,
                "decode": decode,
            }
            for tier, (ranges, graph, decode) in table.items()
        },
        **extra,
    }


@st.composite
def agreements(draw: st.DrawFn, tiers: type[T] = Tier) -> Agreement[T]:  # type: ignore[assignment]
    """Some members, in any order, some of them limited; the last one always and without limit."""
    *others, last = sorted(tiers)
    chosen = draw(st.lists(st.sampled_from(others), unique=True))
    capacity = st.one_of(st.just(UNLIMITED), st.integers(1, 41), st.integers(1, UNLIMITED))
    return Agreement({last: UNLIMITED} | {tier: draw(capacity) for tier in chosen})


axes = st.builds(Axes, num_tokens=st.one_of(st.integers(0, 42), counts), graph=st.booleans(), decode=st.booleans())
