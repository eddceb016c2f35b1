"""Arming: the agreed tiers get their memory, prepare and check themselves, with votes between: everywhere or nowhere.

Blocks are established first, stage by stage. Then every tier prepares, locally; the vote that follows says whose
preparation failed anywhere, and is also the barrier between the first fill of the mailboxes and the first call. Then
each tier that is left runs once, and a last vote confirms.

A self-check is the first collective of a tier, and the one place where a rank may raise while its peers are inside.
A failure of one rank alone is a value as long as all ranks came through the tier's collectives, which
`WatchedExchange.raised` finds out. A peer that is missing is no failure of the tier: the negotiation ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Protocol

import attrs

from k3comm.buffers.symmetric import STAGES, Block, Limit, SymmetricMemory, describe, establish_all
from k3comm.errors import CommunicationTimeoutError, NegotiationError, PeerTimeoutError
from k3comm.negotiate.agree import Local
from k3comm.negotiate.blocks import Place
from k3comm.negotiate.decide import Decision
from k3comm.negotiate.exchange import Exchange, who_says
from k3comm.negotiate.rounds import ANSWER, ClaimedError
from k3comm.negotiate.watch import WatchedExchange
from k3comm.tiers import Tier, plugins
from k3comm.tiers.interface import TailTier, TierContext


@attrs.frozen(kw_only=True)
class Armed:
    """What came of it, the same on every rank but for the objects.

    Attributes:
        tiers: the tiers that work, prepared, in priority order.
        failures: why each agreed tier that does not work doesn't.
        memories: the blocks in use.
        contexts: what each tier was prepared with.
    """

    tiers: Mapping[Tier, TailTier]
    failures: Mapping[Tier, str]
    memories: tuple[SymmetricMemory, ...]
    contexts: Mapping[Tier, TierContext]


class ContextFor(Protocol):
    """Makes a tier's context."""

    def __call__(self, memory: SymmetricMemory | None, offset: int) -> TierContext:
        """The context with that memory."""


def arm(local: Local, decision: Decision, exchange: WatchedExchange, context_for: ContextFor) -> Armed:
    """Establishes the blocks that agreed tiers use, releases the others, prepares and checks the tiers. Collective.

    Raises:
        NegotiationError: on every rank alike, if the tier that takes what no other does can't be armed.
        CommunicationTimeoutError: on every rank alike, a rank is missing.
    """
    settings = local.proposal.settings
    places = {tier: place for tier, place in local.blocks.places.items() if tier in decision.capacities}
    failures: dict[Tier, str] = {}
    memories: dict[Block, SymmetricMemory] = {}
    for block, memory in local.memories.items():
        if any(place.block is block and not place.optional for place in places.values()):
            memories[block] = memory
        else:
            memory.release()
    if memories:
        # Allocated before the vote, which would have refused the tiers otherwise.
        refusals = establish_all(
            list(memories.values()),
            [memory.nbytes for memory in memories.values()],
            exchange,
            STAGES[1:],
            what=_blocks(memories),
            limit=Limit(settings.rendezvous_deadline, "settings.rendezvous_deadline"),
        )
        for block, why in zip(list(memories), refusals, strict=True):
            if why is not None:
                del memories[block]
                failures |= {
                    tier: f"{block.value} block: {why}"
                    for tier, place in places.items()
                    if place.block is block and not place.optional
                }
    tiers: dict[Tier, TailTier] = {}
    contexts: dict[Tier, TierContext] = {}
    try:
        broken: dict[Tier, str] = {}
        present = plugins()
        for tier in decision.capacities:
            if tier in failures:
                continue
            place = places.get(tier)
            tiers[tier] = present[tier]()
            block_memory = None if place is None else memories.get(place.block)  # an optional place may have none
            contexts[tier] = context_for(block_memory, 0 if place is None or block_memory is None else place.offset)
            try:
                tiers[tier].prepare(contexts[tier])
            except Exception as error:  # a rank that leaves here would leave its peers at the vote
                broken[tier] = f"prepare: {describe(error)}"
        _drop(_failed_anywhere(tiers, broken, exchange.at("the vote on prepare")), tiers, failures, places)
        limit = Limit(settings.poll_deadline, "settings.poll_deadline")
        broken = {}
        for tier, plugin in tiers.items():
            stage = exchange.at(f"self-check of {tier.name}", limit)
            if why := checked(plugin, contexts[tier], stage):
                broken[tier] = f"self-check: {why}"
        _drop(_failed_anywhere(tiers, broken, exchange.at("the confirming vote")), tiers, failures, places)
        if max(Tier) in failures:
            raise NegotiationError(f"{max(Tier).name} can't be armed: {failures[max(Tier)]}")
    except BaseException:
        for plugin in tiers.values():
            _close(plugin)
        for memory in memories.values():
            memory.release()
        raise
    used = {places[tier].block for tier in tiers if tier in places}
    for block, memory in memories.items():
        if block not in used:
            memory.release()
    return Armed(
        tiers=tiers,
        failures=failures,
        memories=tuple(memories[block] for block in memories if block in used),
        contexts={tier: contexts[tier] for tier in tiers},
    )


def _blocks(blocks: Iterable[Block]) -> str:
    names = [block.value for block in blocks]
    return f"the {' and '.join(names)} block{'s' if len(names) > 1 else ''}"


def checked(plugin: TailTier, context: TierContext, stage: WatchedExchange) -> str:
    """A tier's self-check; why it failed on this rank, "" if it did not. Collective."""
    own_memory = context.memory is not None

    def check() -> str:
        try:
            verdict = plugin.self_check(context)
        except (CommunicationTimeoutError, PeerTimeoutError) as error:
            # Over its own memory nothing is out of step for the other tiers, if the peer is alive and said why. On a
            # GPU the wait that expired has ended the context, and with it every tier.
            if own_memory and context.device.type == "cpu" and stage.peer_raised():
                return describe(error)
            raise
        except ClaimedError:  # the round's own
            raise
        except Exception as error:
            stage.raised(error, 2 * context.settings.poll_deadline + ANSWER)
            return describe(error)
        return "" if verdict else str(verdict)

    return stage.run(check, meet=context.device.type != "cpu", looks=not own_memory)


def _drop(
    found: Mapping[Tier, str], tiers: dict[Tier, TailTier], failures: dict[Tier, str], places: Mapping[Tier, Place]
) -> None:
    """Takes failed tiers off. Their blocks are released by the caller, once nobody uses them."""
    gone = {tier: tiers.pop(tier) for tier in found}
    failures |= found
    in_use = {places[tier].block for tier in tiers if tier in places}
    for tier, plugin in gone.items():
        if tier not in places or places[tier].block not in in_use:  # closing releases the block
            _close(plugin)


def _close(plugin: TailTier) -> None:
    with contextlib.suppress(Exception):  # its preparation may have failed, so anything may be missing
        plugin.close()


def _failed_anywhere(tiers: Mapping[Tier, TailTier], broken: Mapping[Tier, str], exchange: Exchange) -> dict[Tier, str]:
    """One vote over all tiers, then, for each that failed anywhere, who failed and why."""
    votes = exchange.min([int(tier not in broken) for tier in Tier])
    found: dict[Tier, str] = {}
    for tier, vote in zip(Tier, votes, strict=True):
        if vote or tier not in tiers:
            continue
        found[tier] = who_says(exchange, broken.get(tier, ""))
    return found
