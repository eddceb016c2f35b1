"""What the tiers over device memory share: a rank's word on peer access and on multicast, from its own facts. Pure.

The word is about what one rank can see of itself. Whether two GPUs reach each other is asked afterwards, of the pairs
(`negotiate/pairs.py`), since nobody knows its peers before the vote.
"""

from __future__ import annotations

from collections.abc import Iterator

from k3comm.facts import (
    ASKED,
    MULTICAST_VETOES,
    OPERATORS,
    PEER_VETOES,
    VETOES,
    Fabric,
    FabricState,
    Facts,
    Imex,
    Reason,
    Unknown,
    Verdict,
)
from k3comm.operations import Proposal
from k3comm.tiers.select import UNLIMITED

HOPPER = (9, 0)
"""The least compute capability that the device kernels are written for."""


def peer_verdict(
    facts: Facts,
    proposal: Proposal,
    rows: int = UNLIMITED,
    *,
    nbytes: int = 0,
    capability: tuple[int, int] = HOPPER,
) -> tuple[Verdict, Verdict]:
    """Whether this rank can do a tier over peer pointers, if all ranks are on one host, and across hosts.

    Args:
        rows: what it can take then.
        nbytes: the block that it needs; more than the free memory is a no. 0 asks nothing.
        capability: the least compute capability of its kernels.
    """
    return _words(facts, rows, _peer(facts, proposal, nbytes, capability, "peer"))


def multicast_verdict(
    facts: Facts,
    proposal: Proposal,
    rows: int = UNLIMITED,
    *,
    nbytes: int = 0,
    capability: tuple[int, int] = HOPPER,
) -> tuple[Verdict, Verdict]:
    """The same for a tier over multicast. It needs peer access too: torch maps every peer's block besides."""
    return _words(facts, rows, _multicast(facts, proposal, nbytes, capability))


def either(*words: tuple[Verdict, Verdict]) -> tuple[Verdict, Verdict]:
    """The word of a tier that several transports serve, preferred first: the first yes, else the last one's no."""
    one_host, across_hosts = zip(*words, strict=True)
    return next(filter(None, one_host), one_host[-1]), next(filter(None, across_hosts), across_hosts[-1])


def _words(facts: Facts, rows: int, obstacles: Iterator[Verdict]) -> tuple[Verdict, Verdict]:
    here = next(obstacles, Verdict.yes(rows))
    if not here:
        return here, here
    return here, next(_across(facts), Verdict.yes(rows))


def _peer(
    facts: Facts, proposal: Proposal, nbytes: int, capability: tuple[int, int], transport: str
) -> Iterator[Verdict]:
    """What stands in the way of peer access on one host, the cause before its effects."""
    if facts.device != "cuda":
        yield Verdict.no(Reason.NO_GPU)
    if proposal.settings.transport not in ("auto", transport):
        yield Verdict.no(Reason.TRANSPORT)
    if proposal.spec.dtype != "bfloat16":
        yield Verdict.no(Reason.BFLOAT16)
    yield from _vetoes(facts, PEER_VETOES)
    yield from _unknown(facts, "device_uuid", "compute_capability", "mig")
    if facts.mig or str(facts.device_uuid).startswith("MIG-"):
        yield Verdict.no(Reason.MIG)
    if isinstance(facts.compute_capability, tuple) and facts.compute_capability < capability:
        yield Verdict.no(Reason.CAPABILITY, capability[0] * 10 + capability[1])
    yield from _unknown(facts, "operators")
    yield from _operator(facts, OPERATORS[0])
    if not proposal.settings.allow_shared_device:  # ranks of one GPU need no link between GPUs
        yield from _unknown(facts, "nvlinks")
        if not facts.nvlinks:
            yield Verdict.no(Reason.NO_NVLINK)
    # Bridges and switches of other kinds have no fabric, which is no obstacle; one that is not up is.
    if isinstance(facts.fabric, Fabric) and facts.fabric.state is not FabricState.NOT_SUPPORTED:
        yield from _fabric(facts)
    if nbytes:
        yield from _unknown(facts, "free_memory")
        if isinstance(facts.free_memory, int) and facts.free_memory < nbytes:
            yield Verdict.no(Reason.OUT_OF_MEMORY, -(-nbytes >> 20))


def _multicast(facts: Facts, proposal: Proposal, nbytes: int, capability: tuple[int, int]) -> Iterator[Verdict]:
    """What stands in the way of multicast on one host. Only a switch's fabric has it."""
    if facts.device == "cuda":
        yield from _vetoes(facts, MULTICAST_VETOES)
        yield from _unknown(facts, "confidential")
        if facts.confidential:
            yield Verdict.no(Reason.CONFIDENTIAL)
        yield from _unknown(facts, "multicast")
        if not facts.multicast:
            yield Verdict.no(Reason.NO_MULTICAST)
    yield from _peer(facts, proposal, nbytes, capability, "multicast")
    yield from _operator(facts, OPERATORS[1])
    yield from _fabric(facts)


def _across(facts: Facts) -> Iterator[Verdict]:
    """What stands in the way of other hosts' memory. The allocation is last: what comes before it says why it fails."""
    yield from _fabric(facts)
    if isinstance(facts.fabric, Fabric) and not facts.fabric.cluster:
        yield Verdict.no(Reason.NO_CLUSTER)
    yield from _unknown(facts, "fabric_handles")
    if not facts.fabric_handles:
        yield Verdict.no(Reason.NO_FABRIC_HANDLES)
    yield from _unknown(facts, "imex")
    if isinstance(facts.imex, Imex) and facts.imex is not Imex.READY:
        yield Verdict.no(Reason.IMEX, int(facts.imex))
    yield from _unknown(facts, "fabric_allocation")
    if isinstance(facts.fabric_allocation, int) and facts.fabric_allocation:
        yield Verdict.no(Reason.FABRIC_ALLOCATION, facts.fabric_allocation)


def _fabric(facts: Facts) -> Iterator[Verdict]:
    yield from _unknown(facts, "fabric")
    if isinstance(facts.fabric, Fabric) and not facts.fabric.ready:
        yield Verdict.no(Reason.FABRIC_STATE, int(facts.fabric.state))


def _operator(facts: Facts, name: str) -> Iterator[Verdict]:
    if isinstance(facts.operators, frozenset) and name not in facts.operators:
        yield Verdict.no(Reason.OPERATORS, OPERATORS.index(name))


def _unknown(facts: Facts, *names: str) -> Iterator[Verdict]:
    """A no for each fact that could not be had, or was never asked for."""
    for name in names:
        value = getattr(facts, name)
        if value is None or value == "" or isinstance(value, Unknown):
            yield Verdict.no(Reason.UNKNOWN_FACT, list(ASKED).index(name))


def _vetoes(facts: Facts, variables: tuple[str, ...]) -> Iterator[Verdict]:
    for variable in variables:
        if _says_no(facts, variable):
            yield Verdict.no(Reason.VETO, VETOES.index(variable))


def _says_no(facts: Facts, variable: str) -> bool:
    value = facts.environment.get(variable, "").strip().upper()
    if variable == "NCCL_NVLS_ENABLE":  # the one that is on by default: 0 is the no; 1 and 2 (automatic) are not
        return variable in facts.environment and not facts.is_set(variable)
    if variable == "NCCL_P2P_LEVEL":  # how far apart two GPUs may be: LOC, or 0, allows none
        return value in ("LOC", "0")
    return facts.is_set(variable)
