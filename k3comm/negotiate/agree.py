"""The negotiation: what each rank brings is a value, also its failure, so no rank leaves while its peers wait.

Whatever goes wrong on one rank before the vote travels in the vote. Every error after it follows from the matrix, which
all ranks hold, so all of them raise it, with the same text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import torch

from k3comm.errors import InputError, NegotiationError
from k3comm.facts import Facts
from k3comm.negotiate.ballot import ballot
from k3comm.negotiate.decide import Ballot, Decision, decide, disagreement
from k3comm.negotiate.exchange import Exchange
from k3comm.negotiate.probe import probe
from k3comm.negotiate.report import shared_devices_text
from k3comm.operations import SERVED, Operation
from k3comm.settings import Settings
from k3comm.spec import LatentMoESpec, ParallelLayout
from k3comm.tiers import Tier, WindowsChoice, choose_windows, load_windows

LANES = 1
"""Micro-batches in flight that this version serves: more need mailboxes of their own."""


@attrs.frozen(kw_only=True)
class Local:
    """This rank before the vote."""

    facts: Facts
    spec: LatentMoESpec
    layout: ParallelLayout
    settings: Settings
    choice: WindowsChoice
    ballot: Ballot


def prepare_local(
    *,
    spec: LatentMoESpec,
    layout: ParallelLayout | None,
    settings: Settings | None,
    operations: Sequence[Operation],
    lanes: int,
    device: torch.device,
    backends: dict[str, str],
    world_size: int,
) -> Local:
    """Validates, reads the environment and the windows, and looks at this rank. Talks to nobody.

    Raises:
        K3CommError: what is wrong with this rank's arguments, environment or files.
    """
    _instance("spec", spec, LatentMoESpec)
    if layout is not None:
        _instance("layout", layout, ParallelLayout)
    layout = layout or ParallelLayout(tp=world_size)
    if world_size % layout.tp:
        raise InputError(
            f"layout.tp: {layout.tp} given for a group of {world_size} ranks; accepted are divisors of {world_size}, "
            "since the group is the one over which the partial sums are added up"
        )
    if settings is not None:
        _instance("settings", settings, Settings)
    settings = Settings.from_env(settings)
    if not isinstance(operations, tuple | list) or not operations or not all(isinstance(o, SERVED) for o in operations):
        raise InputError(
            f"operations: {operations!r} given; this version serves {', '.join(f'{o.__name__}()' for o in SERVED)}"
        )
    if lanes != LANES:
        raise InputError(f"lanes: {lanes!r} given; this version serves {LANES}")
    if world_size > 1 and device.type not in backends:
        raise InputError(
            f"device: {device} given, or detected; the group's backends serve {', '.join(sorted(backends))}"
        )
    facts = probe(
        device,
        world_size=world_size,
        backend=backends.get(device.type, ""),
        host_identity=settings.host_identity,
    )
    choice = (
        choose_windows(facts.family, world_size)
        if settings.windows is None
        else WindowsChoice(load_windows(settings.windows))
    )
    settings = settings.with_file(choice.windows.settings, choice.windows.source)
    settings.check_served()
    return Local(
        facts=facts,
        spec=spec,
        layout=layout,
        settings=settings,
        choice=choice,
        ballot=ballot(facts, spec, layout, settings, tuple(operations), choice.windows, lanes=lanes),
    )


def agree(
    prepare: Callable[[], Local], exchange_within: Callable[[float], Exchange], world_size: int
) -> tuple[Local, Decision]:
    """Votes on what `prepare` gives.

    Args:
        prepare: this rank's part; may raise.
        exchange_within: the exchange whose collectives take at most so many seconds.
        world_size: ranks W.

    Raises:
        NegotiationError: on every rank alike: a rank can't take part, fields differ, ranks share a GPU, or a tier
            that is asked for by name is not agreed.
    """
    local: Local | None = None
    cause: Exception | None = None
    try:
        local = prepare()
        mine, deadline = local.ballot, local.settings.vote_deadline
    except Exception as error:  # any end of this rank here would leave its peers waiting: it is voted
        if world_size == 1:
            raise
        mine, cause, deadline = Ballot(failure=f"{type(error).__name__}: {error}"), error, Settings().vote_deadline
    exchange = exchange_within(deadline)
    decision = decide(exchange.min(mine.matrix(exchange.rank)), world_size)
    if decision.failed or decision.mismatched or local is None:
        texts = exchange.gather(mine.text(decision.mismatched))
        raise NegotiationError(disagreement(decision, texts)) from cause
    if decision.shared_devices and not local.settings.allow_shared_device:
        raise NegotiationError(shared_devices_text(decision))
    force = local.settings.force
    if isinstance(force, Tier) and force not in decision.capacities:
        raise NegotiationError(
            f"force ({local.settings.sources['force']}): {force.name} is not agreed; {decision.refusal(force)}"
        )
    return local, decision


def _instance(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise InputError(f"{name}: {value!r} given; accepted is a {kind.__name__}")
