"""From measured times to a table of windows. Pure: the same measurements and the same incumbent give the same table.

The rules, all of them:

- Sizes between two measured ones are judged by the larger one, as an engine that pads a batch to it would run it.
  Below the smallest and beyond the largest measured size nothing is known, and the incumbent's rows stay.
- The incumbent of a size is the tier that its table gives to the tiers that were measured, whatever the kind of
  forward; between two measured sizes each stretch has its own. A tier replaces it only if all its repetitions were
  faster than all the incumbent's: where they overlap the difference is noise, and the incumbent stays.
- Of several that are faster, the fastest; of those that overlap with the fastest, the most accurate class, then the
  enum's order.
- A tier of a less accurate class (K0 before K1 before K2) than the incumbent's never replaces it, unless
  `allow_less_accurate`. So tuning again and again, with whatever noise, can't lower the class of a size.
- A table prefers the enum's order, so what stands before the chosen tier does not hold at that size. What stands after
  it is chosen among in the same way, for forwards and machines that can't use the first.
- Rules on graph and decode, rows of tiers that were not measured, and suggested settings stay as they were.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

import attrs

from k3comm.cli._results import Results
from k3comm.errors import InputError
from k3comm.tiers import Numerics, Phase, Tier, TokenRange, Window, Windows
from k3comm.tiers.windows import Timings

Samples = Mapping[Tier, Sequence[float]]
"""Microseconds by tier, one figure a repetition, of one number of rows."""
CLASSES = tuple(Numerics)
"""Most accurate first."""
MIN_REPEATS = 3
"""Fewer repetitions say nothing about their noise."""
FIGURES = ("chained", "isolated")
ALIKE = ("layer", "figure", "clock")
"""What `about` says of times that may stand in one table."""


@attrs.frozen(kw_only=True)
class Measured:
    """What `tune` works on.

    Attributes:
        samples: by number of rows.
        numerics: the class of each measured tier.
    """

    samples: Mapping[int, Samples]
    numerics: Mapping[Tier, Numerics]

    def __attrs_post_init__(self) -> None:
        last = max(Tier)
        if not self.samples:
            raise InputError("measurements: none of a tier given; accepted are those of at least one number of rows")
        for rows, samples in self.samples.items():
            if last not in samples:
                raise InputError(f"measurements: {rows} rows: {last.name} is missing, which all others are compared to")
            for tier, times in samples.items():
                if len(times) < MIN_REPEATS:
                    raise InputError(
                        f"measurements: {tier.name} at {rows} rows: {len(times)} repetitions given; accepted are "
                        f"{MIN_REPEATS} or more, since their spread is the noise"
                    )


@attrs.frozen(kw_only=True)
class Rules:
    """How to tune: see the module's docstring."""

    allow_less_accurate: bool = False


@attrs.frozen(kw_only=True)
class Change:
    """What became of one measured size.

    Attributes:
        rows: m. before, after: the tier by the incumbent's table and by the new one.
        before_us, after_us: their medians.
        fastest: of all that were measured. fastest_us: its median.
        why: what kept the fastest away, if it is not `after`.
    """

    rows: int
    before: Tier
    after: Tier
    before_us: float
    after_us: float
    fastest: Tier
    fastest_us: float
    why: str


@attrs.frozen(kw_only=True)
class Tuned:
    """A table, and what changed."""

    windows: Windows[Tier]
    changes: tuple[Change, ...]


def measured_of(results: Results, figure: str) -> Measured:
    """The tiers' times of a bench's results, rivals left out."""
    samples: dict[int, dict[Tier, Sequence[float]]] = {}
    numerics: dict[Tier, Numerics] = {}
    for one in results.measurements:
        if one.tier is not None and one.numerics is not None:
            times = one.isolated_us if figure == "isolated" else one.chained_us
            samples.setdefault(one.rows, {})[one.tier] = times
            numerics[one.tier] = one.numerics
    return Measured(samples=samples, numerics=numerics)


def tune(
    measured: Measured,
    incumbent: Windows[Tier],
    rules: Rules,
    *,
    family: str,
    world_size: int,
    provenance: str = "",
    about: Mapping[str, str] | None = None,
) -> Tuned:
    """The table for what was measured.

    Args:
        measured: the times.
        incumbent: the table in use until now. If it is for the same machine and `about` says the same of its times
            (ALIKE), those of sizes outside of what was measured now stay too.
        rules: what may change.
        family, world_size: what the table is for.
        provenance, about: where the numbers come from, for the file.
    """
    sizes = sorted(measured.samples)
    held: dict[Tier, list[TokenRange]] = {tier: [] for tier in measured.numerics}
    changes = []
    for place, rows in enumerate(sizes):
        chosen: list[Tier] = []
        for stretch in _stretches(sizes[place - 1] + 1 if place else rows, rows, incumbent):
            chosen = _chosen(rows, measured, incumbent, rules, stretch.first)
            for tier in chosen:
                held[tier].append(stretch)
        changes.append(_change(rows, measured, incumbent, chosen[0]))
    table = dict(incumbent.rows)
    for tier, cells in held.items():
        row = incumbent.rows.get(tier, Window())
        outside = _without(row.tokens, sizes[0], sizes[-1])
        table[tier] = attrs.evolve(row, tokens=_joined([*outside, *cells]))
    about = dict(about or {})
    machine = (incumbent.family, incumbent.world_size) == (family, world_size)
    alike = machine and all(incumbent.measured.get(name) == about.get(name) for name in ALIKE)
    earlier = incumbent.timings if alike else {}
    times = {}
    for tier in [tier for tier in Tier if tier in measured.numerics or tier in earlier]:
        before = earlier.get(tier)
        us = {} if before is None else dict(zip(before.tokens, before.us, strict=True))
        us = {rows: one for rows, one in us.items() if not sizes[0] <= rows <= sizes[-1]}
        us |= {rows: round(statistics.median(of[tier]), 3) for rows, of in measured.samples.items() if tier in of}
        if us:
            times[tier] = Timings(tokens=tuple(sorted(us)), us=tuple(us[rows] for rows in sorted(us)))
    if any(set(one.tokens) - set(sizes) for one in times.values()):
        others = incumbent.measured.get("earlier_times")
        here = f"below {sizes[0]} or above {sizes[-1]} rows: {incumbent.provenance}"
        about["earlier_times"] = here if others is None else f"{here}; {others}"
    windows = Windows(
        tiers=Tier,
        rows=table,
        family=family,
        world_size=world_size,
        provenance=provenance,
        settings=incumbent.settings,
        measured=about,
        timings=times,
    )
    return Tuned(windows=windows, changes=tuple(changes))


def in_use(rows: int, tiers: Sequence[Tier], windows: Windows[Tier]) -> Tier:
    """The first of `tiers` that the table holds worth choosing at `rows`, in some kind of forward.

    The rules on graph and decode are not asked: they stay as they are, and what they exclude falls to the next tier.
    """
    for tier in sorted(tiers):
        if any(tokens.holds(rows) for tokens in windows.rows.get(tier, Window()).tokens):
            return tier
    return max(tiers)


def _stretches(first: int, last: int, incumbent: Windows[Tier]) -> list[TokenRange]:
    """first .. last, cut where the incumbent's table changes."""
    starts = {first}
    for row in incumbent.rows.values():
        for tokens in row.tokens:
            starts |= {tokens.first, last + 1 if tokens.last is None else tokens.last + 1}
    inside = sorted(start for start in starts if first <= start <= last)
    return [TokenRange(start, end - 1) for start, end in zip(inside, [*inside[1:], last + 1], strict=True)]


def _chosen(rows: int, measured: Measured, incumbent: Windows[Tier], rules: Rules, at: int) -> list[Tier]:
    """The tiers whose windows hold at `at`, by the times of `rows` rows, best first: the choice, then the choice among
    those after it, ..."""
    left, chosen = sorted(measured.samples[rows]), []
    while left:
        chosen.append(_choice(measured.samples[rows], left, measured, in_use(at, left, incumbent), rules))
        left = [tier for tier in left if tier > chosen[-1]]
    return chosen


def _choice(samples: Samples, tiers: Sequence[Tier], measured: Measured, today: Tier, rules: Rules) -> Tier:
    faster = [
        tier
        for tier in tiers
        if max(samples[tier]) < min(samples[today])
        and (rules.allow_less_accurate or _rank(tier, measured) <= _rank(today, measured))
    ]
    if not faster:
        return today
    fastest = min(faster, key=lambda tier: statistics.median(samples[tier]))
    level = [tier for tier in faster if min(samples[tier]) <= max(samples[fastest])]
    return min(level, key=lambda tier: (_rank(tier, measured), tier))


def _change(rows: int, measured: Measured, incumbent: Windows[Tier], after: Tier) -> Change:
    samples = measured.samples[rows]
    medians = {tier: statistics.median(times) for tier, times in samples.items()}
    before = in_use(rows, list(samples), incumbent)
    fastest = min(sorted(samples), key=lambda tier: medians[tier])
    why = ""
    if fastest is not after:
        less = _rank(fastest, measured) > _rank(before, measured)
        classes = f"{measured.numerics[fastest].name} is less accurate than {measured.numerics[before].name}"
        why = classes if less else "within the noise"
    return Change(
        rows=rows,
        before=before,
        after=after,
        before_us=medians[before],
        after_us=medians[after],
        fastest=fastest,
        fastest_us=medians[fastest],
        why=why,
    )


def _rank(tier: Tier, measured: Measured) -> int:
    return CLASSES.index(measured.numerics[tier])


def _without(ranges: Sequence[TokenRange], first: int, last: int) -> list[TokenRange]:
    """What of the ranges lies below `first` or beyond `last`."""
    outside = []
    for one in ranges:
        if one.first < first:
            outside.append(TokenRange(one.first, first - 1 if one.last is None else min(one.last, first - 1)))
        if one.last is None or one.last > last:
            outside.append(TokenRange(max(one.first, last + 1), one.last))
    return outside


def _joined(ranges: Sequence[TokenRange]) -> tuple[TokenRange, ...]:
    """Ranges that don't overlap, ascending, neighbours made one."""
    joined: list[TokenRange] = []
    for one in sorted(ranges, key=lambda one: one.first):
        if joined and joined[-1].last is not None and joined[-1].last + 1 == one.first:
            joined[-1] = TokenRange(joined[-1].first, one.last)
        else:
            joined.append(one)
    return tuple(joined)


def rules_kept(windows: Windows[Tier], tiers: Sequence[Tier]) -> list[str]:
    """The measured tiers whose row has a rule on the kind of forward, in words: the reader may want to change them."""
    return [
        f"{tier.name}: {name} {rule.value}"
        for tier in tiers
        for name, rule in (("graph", windows.rows[tier].graph), ("decode", windows.rows[tier].decode))
        if rule is not Phase.ANY
    ]
