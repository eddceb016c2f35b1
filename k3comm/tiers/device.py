"""What the tiers over device memory share: a rank's word on peer access and on multicast, from its own facts. Pure."""

from __future__ import annotations

from k3comm.facts import Facts, Reason, Verdict
from k3comm.operations import Proposal
from k3comm.tiers.select import UNLIMITED


def peer_verdict(facts: Facts, proposal: Proposal, rows: int = UNLIMITED) -> tuple[Verdict, Verdict]:
    """Whether this rank can do a tier over peer pointers, if all ranks are on one host, and across hosts."""
    across_hosts = Verdict.no(Reason.ACROSS_HOSTS)
    if facts.device != "cuda":
        return Verdict.no(Reason.DEVICE), across_hosts
    if proposal.settings.transport not in ("auto", "peer"):
        return Verdict.no(Reason.TRANSPORT), across_hosts
    if proposal.spec.dtype != "bfloat16":
        return Verdict.no(Reason.BFLOAT16), across_hosts
    return Verdict.yes(rows), across_hosts


def multicast_verdict(facts: Facts, proposal: Proposal, rows: int = UNLIMITED) -> tuple[Verdict, Verdict]:
    """The same for a tier over multicast. No: these facts say nothing of multicast, and an unknown is never a yes."""
    return Verdict.no(Reason.DEVICE), Verdict.no(Reason.ACROSS_HOSTS)
