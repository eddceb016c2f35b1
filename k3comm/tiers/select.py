"""The selector: pure, total, and the same on every rank because its inputs are.

The first agreed tier whose window holds wins. Nothing here knows what a tier does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any, Generic, TypeVar

import attrs

from k3comm.errors import InputError
from k3comm.tiers.axes import Axes
from k3comm.tiers.windows import Windows, by_key

UNLIMITED = 2**31 - 1
"""The capacity of a tier that takes any number of rows: the largest count that fits the vote's cell."""

T = TypeVar("T", bound=IntEnum)


@attrs.frozen(repr=False)
class Agreement(Generic[T]):
    """The tiers that every rank voted for, each with the number of rows that all can take.

    Attributes:
        capacities: rows by tier, at least 1, in priority order. The enum's last member is always among them.
    """

    capacities: Mapping[T, int] = attrs.field(converter=by_key)

    @capacities.validator
    def _check(self, attribute: attrs.Attribute[Any], value: Mapping[T, int]) -> None:
        if not value:
            raise InputError("agreement: no tier given; accepted are sets that hold the enum's last member")
        enum = type(next(iter(value)))
        if not issubclass(enum, IntEnum) or any(type(tier) is not enum for tier in value):
            raise InputError(f"agreement: {list(value)} given; accepted are members of one enum of tiers")
        last = max(enum)
        if value.get(last) != UNLIMITED:
            raise InputError(f"agreement: {last.name} is missing or limited; it takes what no other tier does")
        for tier, rows in value.items():
            if type(rows) is not int or not 1 <= rows <= UNLIMITED:
                raise InputError(f"agreement: {tier.name}: {rows!r} rows given; accepted are 1 to {UNLIMITED}")

    @classmethod
    def of(cls, tiers: Iterable[T], limits: Mapping[T, int] | None = None) -> Agreement[T]:
        """An agreement on `tiers`, unlimited but for `limits` (rows by tier)."""
        return cls({tier: (limits or {}).get(tier, UNLIMITED) for tier in tiers})

    def without(self, tiers: Iterable[T]) -> Agreement[T]:
        """The same agreement less some tiers."""
        gone = set(tiers)
        return Agreement({tier: rows for tier, rows in self.capacities.items() if tier not in gone})

    def __repr__(self) -> str:
        rows = (f"{tier.name}: {'any' if most == UNLIMITED else most}" for tier, most in self.capacities.items())
        return f"Agreement({', '.join(rows)})"

    def __contains__(self, tier: object) -> bool:
        return tier in self.capacities


def select_tier(*, axes: Axes, agreement: Agreement[T], windows: Windows[T]) -> T:
    """The tier for a forward: the first agreed one whose window holds within the capacity that was agreed.

    Pure and total: every `num_tokens` from 0 up gets a tier, since the enum's last member is always agreed and its
    window accepts everything.
    """
    return next(tier for tier in agreement.capacities if obstacle(tier, axes, agreement, windows) is None)


def obstacle(tier: T, axes: Axes, agreement: Agreement[T], windows: Windows[T]) -> str | None:
    """The first reason why `tier` is not chosen for `axes`, in words; None if nothing stands in its way."""
    if tier not in agreement.capacities:
        return "not agreed"
    window = windows.rows.get(tier)
    if window is None:
        return f"no row in the windows ({windows.source or windows.family}): only by force"
    unmet = window.obstacle(axes)
    capacity = agreement.capacities[tier]
    if unmet is None and UNLIMITED != capacity < axes.num_tokens:
        return f"{axes.num_tokens} tokens exceed the {capacity} that all ranks can take"
    return unmet
