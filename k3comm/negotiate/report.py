"""What came out of a negotiation, for people and for machines."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Final

import attrs

from k3comm.facts import Facts
from k3comm.negotiate.decide import Decision, name_ranks, printable
from k3comm.settings import Settings
from k3comm.spec import LatentMoESpec, ParallelLayout
from k3comm.tiers import UNLIMITED, Numerics, Tier, Windows, plugins

_log = logging.getLogger("k3comm")

NOT_RUN: Final = "multicast"
"""The transport that this project has never run on hardware: NVLink multicast stays off on the machines that it is
developed on. A tier over it checks itself wherever it is armed, as every tier does."""


@attrs.frozen(kw_only=True)
class Report:
    """Who can do what, and why not. `str(report)` is for people, `to_dict()` for machines.

    For people what comes from outside is escaped where it can't be shown in a line; for machines it stands as it is.

    Attributes:
        name: the communicator's.
        rank: this rank's place in the group.
        global_ranks: the group's ranks in the job, in group order.
        facts: this rank's.
        spec, layout, settings, windows: what was agreed on.
        windows_warning: why the windows are not an exact match; "" if they are.
        decision: what the vote gave.
        numerics: the accuracy class of every tier that is there.
    """

    name: str
    rank: int
    global_ranks: tuple[int, ...]
    facts: Facts
    spec: LatentMoESpec
    layout: ParallelLayout
    settings: Settings
    windows: Windows[Tier]
    windows_warning: str
    decision: Decision
    numerics: dict[Tier, Numerics]

    def __str__(self) -> str:
        spec, decision = self.spec, self.decision
        hosts = f"{len(set(decision.hosts))} host{'s' if not decision.one_host else ''}"
        job = "" if self.global_ranks == tuple(range(decision.world_size)) else f" (of the job: {self.global_ranks})"
        where = f"{self.facts.device} ({self.facts.device_name})"
        lines = [
            f"k3comm {self.name}: {decision.world_size} rank{'s' if decision.world_size > 1 else ''}{job} on {hosts}",
            f"  rank {self.rank} here: {where}, {self.facts.backend or 'no group'}, "
            f"torch {self.facts.versions.get('torch', 'unknown')}, driver {self.facts.driver}",
            f"  layer: hidden {spec.hidden_size}, latent {spec.latent_size}, top-{spec.top_k}, {spec.dtype}, "
            f"up to {spec.max_tokens} tokens",
            f"  windows: {self.windows.source} ({self.windows.family}"
            f"{f', {self.windows.world_size} ranks' if self.windows.world_size else ''})",
        ]
        if self.windows_warning:
            lines.append(f"  warning: {self.windows_warning}")
        given = [
            f"{name}={value} ({self.settings.sources[name]})"
            for name, value in self.settings.describe().items()
            if self.settings.sources[name] != "default"
        ]
        lines.append(f"  settings: {', '.join(given) or 'all default'}")
        rows = [("tier", "agreed", "numerics", "window", "why not")]
        for tier in Tier:
            rows.append(
                (
                    tier.name,
                    rows_text(decision.capacities.get(tier, 0)),
                    self.numerics[tier].value if tier in self.numerics else "-",
                    str(self.windows.rows.get(tier, "no row")),
                    decision.refusal(tier),
                )
            )
        return "\n".join(
            [*map(printable, lines), *("  " + line for line in (*table(rows), *not_run(self.facts.device)))]
        )

    def to_dict(self) -> dict[str, Any]:
        """The same as plain values that `json.dumps` takes."""
        return {
            "name": self.name,
            "rank": self.rank,
            "world_size": self.decision.world_size,
            "global_ranks": list(self.global_ranks),
            "hosts": list(self.decision.hosts),
            "facts": {
                "host": str(self.facts.host),
                "device": self.facts.device,
                "device_name": str(self.facts.device_name),
                "device_uuid": str(self.facts.device_uuid),
                "family": self.facts.family,
                "free_memory": self.facts.free_memory if isinstance(self.facts.free_memory, int) else None,
                "driver": str(self.facts.driver),
                "backend": self.facts.backend,
                "versions": dict(self.facts.versions),
            },
            "spec": attrs.asdict(self.spec),
            "layout": attrs.asdict(self.layout),
            "settings": {
                name: {"value": value, "source": self.settings.sources[name]}
                for name, value in self.settings.describe().items()
            },
            "windows": {
                "source": self.windows.source,
                "family": self.windows.family,
                "world_size": self.windows.world_size,
                "provenance": self.windows.provenance,
                "warning": self.windows_warning,
                "rows": self.windows.describe(),
            },
            "tiers": {
                tier.name: {
                    "capacity": self.decision.capacities.get(tier, 0),
                    "numerics": self.numerics[tier].value if tier in self.numerics else None,
                    "not_run_on_hardware": not_run_of(tier),
                    "refusals": [
                        {"rank": one.rank, "reason": one.verdict.reason.name, "text": str(one.verdict)}
                        for one in self.decision.refusals
                        if one.tier is tier
                    ],
                }
                for tier in Tier
            },
        }


@attrs.frozen
class Obstacle:
    """Why a better tier was not chosen."""

    tier: Tier
    why: str


@attrs.frozen(kw_only=True)
class Explanation:
    """The tier for some axes, and the failed condition of every better one."""

    tier: Tier
    forced: bool
    axes: str
    obstacles: tuple[Obstacle, ...]

    def __str__(self) -> str:
        chosen = f"{self.axes}: {self.tier.name}{' (forced)' if self.forced else ''}"
        return "\n".join([chosen, *(f"  not {one.tier.name}: {printable(one.why)}" for one in self.obstacles)])


def announce(report: Report) -> None:
    """Logs what was agreed, on the group's rank 0 alone, to the logger "k3comm".

    INFO: one line. WARNING: a tier that `enabled` names and that is not agreed, and windows that were measured for
    other ranks. DEBUG: why each other tier is not agreed.
    """
    if report.rank != 0:
        return
    decision, settings, windows = report.decision, report.settings, report.windows
    agreed = [tier.name for tier in Tier if tier in decision.capacities]
    ranks = f"rank{'s' if decision.world_size > 1 else ''} {', '.join(map(str, report.global_ranks))} of the job"
    name = printable(report.name)
    _log.info(
        "%s: %s agreed, best first, of %s; for %s; windows %s (%s%s)",
        name,
        ", ".join(agreed),
        ", ".join(tier.name for tier in Tier),
        ranks,
        printable(windows.source),
        printable(windows.family),
        f", {windows.world_size} ranks" if windows.world_size else "",
    )
    if report.windows_warning:
        _log.warning("%s: %s", name, printable(report.windows_warning))
    for tier in Tier:
        if tier in decision.capacities:
            continue
        why = printable(decision.refusal(tier))
        if tier in settings.enabled:
            source = printable(settings.sources["enabled"])
            _log.warning("%s: %s is asked for by name (enabled, %s) and not agreed: %s", name, tier.name, source, why)
        else:
            _log.debug("%s: not %s: %s", name, tier.name, why)


def not_run(device: str) -> list[str]:
    """What has to be known of tiers that never ran on hardware, a line each; none for ranks on CPU, who lack it all.

    Args:
        device: the facts', "cpu" or "cuda".
    """
    found = {} if device == "cpu" else {tier: not_run_of(tier) for tier in Tier}
    return [f"{tier.name} has not run on hardware{what}" for tier, what in found.items() if what]


def not_run_of(tier: Tier) -> str:
    """What of a tier that is part of this version never ran on hardware, to stand behind those words; "" if all did."""
    plugin = plugins().get(tier)
    if plugin is None or NOT_RUN not in plugin.transports:
        return ""
    others = " and ".join(sorted(plugin.transports - {NOT_RUN}))
    return f" over {NOT_RUN}; over {others} it has" if others else f": it needs {NOT_RUN}, which none here has tried"


def rows_text(capacity: int) -> str:
    """A capacity for people."""
    return "any rows" if capacity == UNLIMITED else f"{capacity} rows" if capacity else "no"


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as aligned lines, the first one a heading."""
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return [lines[0], "  ".join("-" * width for width in widths), *lines[1:]]


def shared_devices_text(decision: Decision) -> str:
    """The error for several ranks on one GPU."""
    places = "; ".join(name_ranks(ranks) for ranks in decision.shared_devices)
    return (
        f"{places} are on the same GPU (equal host and device UUID); give each rank its own, or set "
        "allow_shared_device (K3COMM_ALLOW_SHARED_DEVICE=1) if that is meant"
    )
