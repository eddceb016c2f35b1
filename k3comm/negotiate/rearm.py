"""Waking up: the tiers' memory as it was when they were prepared, and a check that they work, with votes between."""

from __future__ import annotations

from collections.abc import Mapping

from k3comm.buffers.symmetric import Limit, describe
from k3comm.errors import NegotiationError
from k3comm.negotiate.arm import checked
from k3comm.negotiate.exchange import Exchange, who_says
from k3comm.negotiate.watch import WatchedExchange
from k3comm.tiers import Tier
from k3comm.tiers.interface import TailTier, TierContext


def rearm(
    tiers: Mapping[Tier, TailTier],
    contexts: Mapping[Tier, TierContext],
    exchange: WatchedExchange,
    *,
    suspended: bool,
    name: str,
) -> None:
    """Re-arms prepared tiers, in a round of its own. Collective.

    The first vote makes sure that every rank has come, hence that none is in a call; the second is the barrier between
    the refill and the first call; the third confirms the self-checks.

    Args:
        tiers: the same on every rank.
        contexts: what each was prepared with.
        exchange: the group.
        suspended: whether this rank is. name: the communicator's.

    Raises:
        NegotiationError: on every rank alike: who can't do what, and why.
        CommunicationTimeoutError: on every rank alike, a rank is missing.
    """
    with exchange.together("resume", name):
        _agree(
            exchange.at("the vote on who is suspended"),
            "" if suspended else "is not suspended; accepted is resume() after suspend() on every rank",
        )
        problem = ""
        for tier, plugin in tiers.items():
            try:
                plugin.rearm()
            except Exception as error:  # a rank that leaves here would leave its peers at the vote
                problem = problem or f"{tier.name}: refill: {describe(error)}"
        _agree(exchange.at("the vote on the refill"), problem)
        for tier, plugin in tiers.items():
            limit = Limit(contexts[tier].settings.poll_deadline, "settings.poll_deadline")
            if why := checked(plugin, contexts[tier], exchange.at(f"self-check of {tier.name}", limit)):
                problem = problem or f"{tier.name}: self-check: {why}"
        _agree(exchange.at("the confirming vote"), problem)


def _agree(exchange: Exchange, problem: str) -> None:
    """A vote; where a rank has a problem, a gather of all of them, and one error."""
    if exchange.min([int(not problem)])[0]:
        return
    raise NegotiationError(f"resume: {who_says(exchange, problem)}")
