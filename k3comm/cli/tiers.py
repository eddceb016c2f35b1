"""Which tier a forward of m tokens gets: the map m -> tier, for decode and prefill, in a CUDA graph and eager.

Without --agreed it is this machine's map: what the tiers of this version say they can do here, for Kimi-K3's shapes,
if all ranks say the same. With --agreed it is any machine's. The vote of a real job may still take tiers away.
"""

from __future__ import annotations

import argparse
from typing import Any

import attrs

from k3comm.cli import _choice, _console, _plots
from k3comm.cli.tier_map import TierMap, in_step, tier_map
from k3comm.errors import NegotiationError
from k3comm.facts import Facts
from k3comm.operations import Proposal
from k3comm.settings import Settings
from k3comm.spec import LatentMoESpec, ParallelLayout
from k3comm.tiers import UNLIMITED, Agreement, Tier, Windows

HELP = "the map from the number of tokens to the tier"
RANKS = 4

EPILOG = """examples:
  k3comm tiers
  k3comm tiers --family default --agreed TAIL_FUSION,MULTIMEM_AR:4096,FUSED_LANE_AR --plot map.png
  k3comm tiers --windows my.toml --json
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `tiers`."""
    parser.epilog = EPILOG
    _choice.add_arguments(
        parser,
        family="this machine's: host without a GPU, else like sm90",
        ranks=RANKS,
        agreed="what this machine's ranks would agree on",
    )
    parser.add_argument(
        "--sharded",
        action="store_true",
        help="leave out the tiers that refuse a W_up of which each rank holds H/W rows",
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw the map (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print the map as JSON instead")


def run(arguments: argparse.Namespace) -> int:
    """Shows the map."""
    if arguments.plot is not None:
        _plots.check(arguments.plot)
    settings = Settings.from_env()
    facts = _facts(arguments.ranks, settings) if arguments.agreed is None else None
    used = _choice.windows_for(arguments, settings, facts.family if facts else "default")
    # As a negotiation here would take them: the file's settings too.
    settings = settings.with_file(used.windows.settings, used.windows.source)
    machine = None if facts is None else _Machine.of(facts, arguments.ranks, settings, used.windows)
    agreed = machine.agreement if machine else arguments.agreed
    why_not = machine.why_not if machine else {}
    notes = [*used.notes]
    if arguments.sharded:
        refusals = _refusals_of_sharded(agreed, arguments.ranks)
        agreed, why_not = agreed.without(refusals), why_not | refusals
    spans = tier_map(agreed, used.windows)
    notes += _notes_on_settings(settings, agreed)
    if machine is None:
        notes.append(f"{_choice.LAST.name} is always agreed, also if --agreed does not name it")
    if arguments.plot:
        subtitle = f"{used.windows.source}; agreed: {_choice.show_agreement(agreed).replace(',', ', ')}"
        _plots.draw_map(spans, arguments.plot, subtitle)
        notes.append(f"drawn in {arguments.plot}")
    if arguments.json:
        _console.show_json(_as_dict(spans, agreed, used.windows, why_not, notes))
    else:
        title = f"{machine.title}, if all say the same" if machine else "The agreement that was given"
        _console.show(
            title,
            f"windows: {used}",
            f"agreed:  {_choice.show_agreement(agreed)}",
            "",
            map_table(spans),
            _tier_table(spans, agreed, used.windows, why_not),
            *(f"note: {note}" for note in notes),
        )
    return 0


def _notes_on_settings(settings: Settings, agreed: Agreement[Tier]) -> list[str]:
    """What the settings change that the map does not show."""
    notes = []
    if isinstance(settings.force, Tier):
        name, capacity = settings.force.name, agreed.capacities.get(settings.force, 0)
        rows = "every m" if capacity == UNLIMITED else f"m <= {capacity}, and raises beyond"
        uses = (
            f"a communicator uses {name} for {rows}" if capacity else f"{name} is not agreed, so a communicator raises"
        )
        notes.append(f"force ({settings.sources['force']}): {uses}")
    disabled = [tier.name for tier in agreed.capacities if tier in settings.disabled]
    if disabled:  # only with --agreed
        notes.append(f"agreed as given, though disabled ({settings.sources['disabled']}): {', '.join(disabled)}")
    return notes


def map_table(spans: TierMap) -> _console.Table:
    """The map as a table: a row for each range in which no kind of forward changes its tier."""
    rows = in_step(spans)
    alike = all(len(set(tiers)) == 1 for _, tiers in rows)
    kinds = ["any forward"] if alike else [str(kind) for kind in spans]
    return _console.Table(
        title="Tier by number of tokens m (prefill: also mixed batches; m = 0 talks to nobody)",
        columns=[">m", *kinds],
        rows=[
            [str(tokens), *(_console.tier_cell(tier) for tier in (tiers[:1] if alike else tiers))]
            for tokens, tiers in rows
        ],
    )


def _tier_table(
    spans: TierMap, agreed: Agreement[Tier], windows: Windows[Tier], why_not: dict[Tier, str]
) -> _console.Table:
    chosen = {span.tier for row in spans.values() for span in row}
    rows: list[list[str | _console.Cell]] = []
    for tier in Tier:
        capacity = agreed.capacities.get(tier, 0)
        can = "any m" if capacity == UNLIMITED else f"m <= {capacity}" if capacity else "no"
        window = windows.rows.get(tier)
        remark = why_not.get(tier, "not agreed") if not capacity else ""
        if capacity and tier not in chosen:
            worth_it = window is not None and window.tokens
            remark = f"never chosen: {'a better tier holds wherever it does' if worth_it else 'only by force'}"
        rows.append([_console.tier_cell(tier), can, "no row" if window is None else str(window), remark])
    return _console.Table(
        title="Tiers, best first: the first one that is agreed and whose window holds is taken",
        columns=["tier", "agreed", "window", "remark"],
        rows=rows,
    )


def _as_dict(
    spans: TierMap, agreed: Agreement[Tier], windows: Windows[Tier], why_not: dict[Tier, str], notes: list[str]
) -> dict[str, Any]:
    return {
        "windows": {
            "source": windows.source,
            "family": windows.family,
            "world_size": windows.world_size,
            "provenance": windows.provenance,
            "rows": windows.describe(),
        },
        "agreed": {tier.name: None if rows == UNLIMITED else rows for tier, rows in agreed.capacities.items()},
        "why_not": {tier.name: why_not.get(tier, "not agreed") for tier in Tier if tier not in agreed},
        "map": [
            {
                "decode": kind.decode,
                "graph": kind.graph,
                "spans": [
                    {"first": span.tokens.first, "last": span.tokens.last, "tier": span.tier.name} for span in row
                ],
            }
            for kind, row in spans.items()
        ],
        "notes": notes,
    }


@attrs.frozen(kw_only=True)
class _Machine:
    """What the ranks of a job on this machine would say of the tiers, before any vote."""

    title: str
    agreement: Agreement[Tier]
    why_not: dict[Tier, str]

    @classmethod
    def of(cls, facts: Facts, ranks: int, settings: Settings, windows: Windows[Tier]) -> _Machine:
        """Raises NegotiationError, as the vote would, if the tier that is asked for by name is not agreed."""
        from k3comm.negotiate.ballot import word
        from k3comm.tiers import plugins

        present, proposal = plugins(), _kimi_k3(ranks, settings, facts.device, windows)
        words = {tier: word(tier, present.get(tier), facts, proposal)[0] for tier in Tier}
        force = settings.force
        if isinstance(force, Tier) and not words[force]:
            raise NegotiationError(
                f"force ({settings.sources['force']}): {force.name} is asked for by name and not agreed; {words[force]}"
            )
        return cls(
            title=f"{ranks} ranks on this machine ({facts.device}, {facts.device_name}), Kimi-K3's shapes",
            agreement=Agreement({tier: verdict.capacity for tier, verdict in words.items() if verdict}),
            why_not={tier: str(verdict) for tier, verdict in words.items() if not verdict},
        )


def _facts(ranks: int, settings: Settings) -> Facts:
    """This machine, as one of so many ranks on it would see it."""
    import torch

    from k3comm.negotiate.probe import probe

    on_gpu = torch.cuda.is_available()
    return probe(
        torch.device("cuda" if on_gpu else "cpu"),
        world_size=ranks,
        backend="nccl" if on_gpu else "gloo",
        host_identity=settings.host_identity,
    )


def _refusals_of_sharded(agreed: Agreement[Tier], ranks: int) -> dict[Tier, str]:
    """The agreed tiers of this version that refuse a sharded W_up, and why. Others can't be asked."""
    from k3comm.operations import TailArguments
    from k3comm.tiers import plugins

    asked = TailArguments(sharded=True)
    answers = {
        tier: plugin.refusal(asked, _kimi_k3(ranks, Settings())) for tier, plugin in plugins().items() if tier in agreed
    }
    return {tier: why for tier, why in answers.items() if why is not None}


def _kimi_k3(ranks: int, settings: Settings, device: str = "cpu", windows: Windows[Tier] | None = None) -> Proposal:
    """What such ranks would vote on for Kimi-K3's shapes."""
    return Proposal(
        spec=LatentMoESpec.kimi_k3(),
        layout=ParallelLayout(tp=ranks),
        settings=settings,
        world_size=ranks,
        device=device,
        windows=windows,
    )
