"""How a tail can be done, and which way is chosen.

To add a tier: one file in `tiers/` named after its enum member, one line in the enum, one row in the windows and the
docs. Nothing else changes; a test walks the enum and checks that module, window and documentation row exist.

The names below are pure: importing them loads no torch. Tier plug-ins (`plugin`, `plugins`) load on demand.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING

from k3comm.tiers.axes import Axes
from k3comm.tiers.select import UNLIMITED, Agreement, obstacle, select_tier
from k3comm.tiers.tier import Numerics, Tier
from k3comm.tiers.windows import (
    Phase,
    TokenRange,
    Window,
    Windows,
    WindowsChoice,
    choose_windows,
    load_windows,
    packaged_windows,
    parse_windows,
)

if TYPE_CHECKING:
    from k3comm.tiers.interface import TailTier

__all__ = [
    "UNLIMITED",
    "Agreement",
    "Axes",
    "Numerics",
    "Phase",
    "Tier",
    "TokenRange",
    "Window",
    "Windows",
    "WindowsChoice",
    "choose_windows",
    "is_here",
    "load_windows",
    "obstacle",
    "packaged_windows",
    "parse_windows",
    "plugin",
    "plugins",
    "select_tier",
]


def is_here(tier: Tier) -> bool:
    """Whether a module serves the tier, on some device. Loads no torch."""
    return find_spec(f"{__name__}.{tier.name.lower()}") is not None


@cache
def plugin(tier: Tier) -> type[TailTier] | None:
    """The class behind an enum member: `Plugin` of the module named after it. None if that tier is not there."""
    if not is_here(tier):
        return None
    found: type[TailTier] = import_module(f"{__name__}.{tier.name.lower()}").Plugin
    return found


def plugins() -> dict[Tier, type[TailTier]]:
    """Every tier that is there, in priority order. Loads torch."""
    return {tier: cls for tier in Tier if (cls := plugin(tier)) is not None}
