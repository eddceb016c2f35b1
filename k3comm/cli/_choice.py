"""What `tiers` and `replay` share: which windows, and which tiers count as agreed.

--windows FILE | --family NAME    the table; otherwise K3COMM_WINDOWS, otherwise the command's default
--ranks N                         the world size that the packaged tables are chosen by
--agreed TIER[:ROWS],...          what all ranks of some machine voted for
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import attrs

from k3comm.negotiate.decide import MAX_RANKS
from k3comm.settings import Settings
from k3comm.tiers import UNLIMITED, Agreement, Tier, Windows, choose_windows, load_windows, packaged_windows

LAST = max(Tier)


def whole(least: int, most: int = UNLIMITED) -> Callable[[str], int]:
    """An argparse type: a whole number from `least` to `most`."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit() and len(text) <= 20 and least <= int(text) <= most):
            raise argparse.ArgumentTypeError(f"{text!r} given; accepted are whole numbers from {least} to {most}")
        return int(text)

    return parse


def family_name(text: str) -> str:
    """An argparse type: a device family, known or not."""
    if not text.strip():
        families = ", ".join(dict.fromkeys(table.family for table in packaged_windows()))
        raise argparse.ArgumentTypeError(f"{text!r} given; accepted are names of device families, such as {families}")
    return text


def agreement(text: str) -> Agreement[Tier]:
    """An argparse type: "TAIL_FUSION,MULTIMEM_AR:4096" -> an agreement, to which SEPARATE_REDUCE is added."""
    capacities: dict[Tier, int] = {}
    for entry in text.split(","):
        name, colon, rows = (part.strip() for part in entry.partition(":"))
        if name.upper() not in Tier.__members__:
            raise argparse.ArgumentTypeError(
                f"no tier is called {name!r}; accepted are {', '.join(Tier.__members__)}, each alone or as TIER:ROWS"
            )
        tier = Tier[name.upper()]
        if tier in capacities:
            raise argparse.ArgumentTypeError(f"{tier.name} is given twice")
        if colon and tier is LAST:
            raise argparse.ArgumentTypeError(f"{tier.name} takes any number of rows, since it takes what no other does")
        capacities[tier] = whole(1)(rows) if colon else UNLIMITED
    return Agreement(capacities | {LAST: UNLIMITED})


def show_agreement(agreed: Agreement[Tier]) -> str:
    """An agreement as `--agreed` takes it."""
    return ",".join(
        tier.name if rows == UNLIMITED else f"{tier.name}:{rows}" for tier, rows in agreed.capacities.items()
    )


def add_arguments(parser: argparse.ArgumentParser, *, family: str, ranks: int, agreed: str) -> None:
    """Adds the shared arguments; `family`, `ranks` and `agreed` state the command's defaults in the help."""
    table = parser.add_mutually_exclusive_group()
    table.add_argument("--windows", metavar="FILE", help="a windows file of your own (default: K3COMM_WINDOWS, if set)")
    families = ", ".join(dict.fromkeys(table.family for table in packaged_windows()))
    table.add_argument(
        "--family",
        type=family_name,
        metavar="NAME",
        help=f"the device family whose packaged windows are used; there are {families} (default: {family})",
    )
    parser.add_argument(
        "--ranks",
        type=whole(1, MAX_RANKS),
        default=ranks,
        metavar="N",
        help="the number of ranks, by which packaged windows are chosen (default: %(default)s)",
    )
    parser.add_argument(
        "--agreed",
        type=agreement,
        metavar="TIER[:ROWS],...",
        help=f"the tiers that all ranks agreed on, each with the rows that all can take if those are limited; "
        f"{LAST.name} is always among them (default: {agreed})",
    )


@attrs.frozen
class WindowsUsed:
    """A table and what has to be said about how it was come by."""

    windows: Windows[Tier]
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.windows.source} (family {self.windows.family}, {_ranks(self.windows.world_size)})"


def windows_for(arguments: argparse.Namespace, settings: Settings, family: str) -> WindowsUsed:
    """The table: the arguments', else the settings', else the packaged one of `family`."""
    if arguments.windows is None and arguments.family is None and settings.windows is not None:
        return WindowsUsed(
            load_windows(Path(settings.windows), Tier), (f"windows file from {settings.sources['windows']}",)
        )
    if arguments.windows is not None:
        return WindowsUsed(load_windows(arguments.windows, Tier))
    family = arguments.family or family
    choice = choose_windows(family, arguments.ranks)
    notes = [choice.warning] if choice.warning else []
    if choice.windows.family != family:
        notes.append(f"no windows were measured for family {family!r}; using {choice.windows.family!r}")
    return WindowsUsed(choice.windows, tuple(notes))


def _ranks(world_size: int) -> str:
    return f"{world_size} ranks" if world_size else "any number of ranks"
