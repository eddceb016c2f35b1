"""Arming: the agreed tiers get their memory and prepare, with votes between: a tier works everywhere or nowhere.

Blocks are established first, stage by stage. Then every tier prepares, locally; the vote that follows says whose
preparation failed anywhere, and is also the barrier between the first fill of the mailboxes and the first call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import attrs

from k3comm.buffers.symmetric import STAGES, Block, SymmetricMemory, describe, establish_all
from k3comm.errors import NegotiationError
from k3comm.negotiate.agree import Local
from k3comm.negotiate.decide import Decision, name_ranks
from k3comm.negotiate.exchange import Exchange
from k3comm.tiers import Tier, plugins
from k3comm.tiers.interface import TailTier, TierContext

TEXT_BYTES = 512
"""Bytes with which a rank says why a preparation failed."""


@attrs.frozen(kw_only=True)
class Armed:
    """What came of it, the same on every rank but for the objects.

    Attributes:
        tiers: the tiers that work, prepared, in priority order.
        failures: why each agreed tier that does not work doesn't.
        memories: the blocks in use.
    """

    tiers: Mapping[Tier, TailTier]
    failures: Mapping[Tier, str]
    memories: tuple[SymmetricMemory, ...]


class ContextFor(Protocol):
    """Makes a tier's context."""

    def __call__(self, memory: SymmetricMemory | None, offset: int) -> TierContext:
        """The context with that memory."""


def arm(local: Local, decision: Decision, exchange: Exchange, context_for: ContextFor) -> Armed:
    """Establishes the blocks that agreed tiers use, releases the others, and prepares the tiers. Collective.

    Raises:
        NegotiationError: on every rank alike, if the tier that takes what no other does can't be prepared.
    """
    places = {tier: place for tier, place in local.blocks.places.items() if tier in decision.capacities}
    failures: dict[Tier, str] = {}
    memories: dict[Block, SymmetricMemory] = {}
    for block, memory in local.memories.items():
        if any(place.block is block for place in places.values()):
            memories[block] = memory
        else:
            memory.release()
    if memories:
        # Allocated before the vote, which would have refused the tiers otherwise.
        sizes = [memory.nbytes for memory in memories.values()]
        refusals = establish_all(list(memories.values()), sizes, exchange, STAGES[1:])
        for block, why in zip(list(memories), refusals, strict=True):
            if why is not None:
                del memories[block]
                failures |= {
                    tier: f"{block.value} block: {why}" for tier, place in places.items() if place.block is block
                }
    tiers: dict[Tier, TailTier] = {}
    broken: dict[Tier, str] = {}
    present = plugins()
    for tier in decision.capacities:
        if tier in failures:
            continue
        place = places.get(tier)
        tiers[tier] = present[tier]()
        try:
            tiers[tier].prepare(
                context_for(None, 0) if place is None else context_for(memories[place.block], place.offset)
            )
        except Exception as error:  # a rank that leaves here would leave its peers at the vote
            broken[tier] = describe(error)
    if places:  # else nothing is shared: no fill to wait for, and preparing took nothing that could fail
        for tier, why in _failed_anywhere(tiers, broken, exchange).items():
            failures[tier] = why
            del tiers[tier]
    elif broken:
        raise NegotiationError(f"tiers that share nothing can't be prepared: {broken}")
    if max(Tier) in failures:
        for memory in memories.values():
            memory.release()
        raise NegotiationError(f"{max(Tier).name} can't be prepared: {failures[max(Tier)]}")
    used = {places[tier].block for tier in tiers if tier in places}
    for block, memory in memories.items():
        if block not in used:
            memory.release()
    return Armed(tiers=tiers, failures=failures, memories=tuple(memories[block] for block in memories if block in used))


def _failed_anywhere(tiers: Mapping[Tier, TailTier], broken: Mapping[Tier, str], exchange: Exchange) -> dict[Tier, str]:
    """One vote over all tiers, then, for each that failed anywhere, who failed and why."""
    votes = exchange.min([int(tier not in broken) for tier in Tier])
    found: dict[Tier, str] = {}
    for tier, vote in zip(Tier, votes, strict=True):
        if vote or tier not in tiers:
            continue
        texts = exchange.gather(broken.get(tier, "").encode(errors="replace")[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0"))
        ranks: dict[str, list[int]] = {}
        for rank, text in enumerate(texts):
            if why := text.rstrip(b"\0").decode(errors="ignore"):
                ranks.setdefault(why, []).append(rank)
        found[tier] = "; ".join(f"{name_ranks(who)}: prepare: {why}" for why, who in ranks.items())
    return found
