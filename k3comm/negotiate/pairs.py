"""The pair vote: whether GPUs that were each found fit also reach one another.

A rank knows its peers only from the first vote's matrix, so this is a second MIN, which is a gather again: each rank
writes its word on every tier in a row of its own. It is taken only where a tier over device memory is left, which all
ranks see in the same matrix; a job on CPUs never pays for it. Nothing touches a peer: the answers were gathered by the
probe, of every GPU that NVML sees.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from k3comm.facts import OVERLAP, PAIR_SHIFT, Facts, PeerAccess, Reason, Verdict
from k3comm.negotiate.decide import (
    EMPTY,
    MAX_RANKS,
    Decision,
    Place,
    Refusal,
    digest,
    pack_reason,
    places,
    unpack_reason,
)
from k3comm.negotiate.exchange import Exchange
from k3comm.tiers import Tier
from k3comm.tiers.interface import TailTier

PAIR_COLUMNS = 16
"""Cells of a rank's row: one a tier and some to spare, whatever the number of tiers. 0 is a yes, else the reason."""


def peer_tiers(decision: Decision, device: str, present: Mapping[Tier, type[TailTier]]) -> list[Tier]:
    """The agreed tiers whose ranks reach into one another's device memory. The same on every rank."""
    if device != "cuda" or decision.world_size == 1:
        return []
    return [
        tier for tier in decision.capacities if tier in present and present[tier].transports & {"peer", "multicast"}
    ]


def pair_verdict(facts: Facts, rank: int, everyone: Sequence[Place]) -> Verdict:
    """This rank's word on its pairs: a yes, or why the first peer is out of its reach. Pure.

    Args:
        facts: this rank's.
        rank: its place in the group.
        everyone: the places of all ranks.
    """
    access = {digest(uuid): found for uuid, found in facts.peers.items()}
    own = everyone[rank]
    for peer, other in enumerate(everyone):
        if peer == rank:
            continue
        if not own.host or own.host != other.host:
            if not own.domain or own.domain != other.domain:
                return Verdict.no(Reason.PAIR_DOMAIN, peer)
            continue
        if own.device_uuid and own.device_uuid == other.device_uuid:
            if not facts.is_set(OVERLAP):
                return Verdict.no(Reason.PAIR_SHARED, peer)
            continue
        found = access.get(other.device_uuid, PeerAccess.UNKNOWN)
        if found is not PeerAccess.OK:
            return Verdict.no(Reason.PAIR_ACCESS, peer * PAIR_SHIFT + found)
        if own.ordinal and own.ordinal == other.ordinal and not facts.is_set(OVERLAP):
            return Verdict.no(Reason.PAIR_ORDINAL, peer)
    return Verdict.yes()


def pair_vote(
    exchange: Exchange, matrix: Sequence[int], decision: Decision, facts: Facts, tiers: Collection[Tier]
) -> Decision:
    """The decision less those of `tiers` that some pair of ranks can't do. Collective, if there are any.

    Args:
        exchange: the group.
        matrix: the first vote's, reduced.
        decision: what followed from it.
        facts: this rank's.
        tiers: of `peer_tiers`; the same on every rank.
    """
    if not tiers:
        return decision
    verdict = pair_verdict(facts, exchange.rank, places(matrix, decision.world_size))
    cells = [EMPTY] * (MAX_RANKS * PAIR_COLUMNS)
    row = [pack_reason(verdict) if tier in tiers else 0 for tier in Tier]
    at = exchange.rank * PAIR_COLUMNS
    cells[at : at + PAIR_COLUMNS] = row + [0] * (PAIR_COLUMNS - len(row))
    reduced = exchange.min(cells)
    refusals = []
    for index, tier in enumerate(Tier):
        for rank in range(decision.world_size):
            cell = reduced[rank * PAIR_COLUMNS + index]
            if cell:
                refusals.append(Refusal(tier, rank, unpack_reason(cell)))
    return decision.refused(refusals)
