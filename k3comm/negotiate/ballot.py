"""What this rank brings to the vote: its word on every tier, and the fields on which all ranks must agree."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import attrs

import k3comm
from k3comm.facts import Fabric, Facts, Reason, Unknown, Verdict
from k3comm.negotiate.blocks import excluded
from k3comm.negotiate.decide import Ballot
from k3comm.operations import Proposal
from k3comm.spec import LatentMoESpec, ParallelLayout
from k3comm.tiers import Tier, Windows, plugins
from k3comm.tiers.interface import TailTier

SOURCE_SUFFIXES = (".py", ".cu", ".cuh")


def ballot(
    facts: Facts, proposal: Proposal, windows: Windows[Tier], unallocated: Mapping[Tier, Verdict] | None = None
) -> Ballot:
    """This rank's ballot. Pure but for the hash of the library's own files.

    `unallocated`: why their memory could not be had, by the tiers that need it.
    """
    present = plugins()
    return Ballot(
        fields={
            "version": {"k3comm": k3comm.__version__},
            "sources": {"sha256": sources()},
            "spec": _table(proposal.spec),
            "layout": {
                **_table(proposal.layout),
                "world_size": str(proposal.world_size),
                "lanes": str(proposal.lanes),
                "device": facts.device,
                "name": proposal.name,
            },
            "settings": proposal.settings.describe(uniform_only=True),
            "operations": {type(operation).__name__: str(operation) for operation in proposal.operations},
            "windows": windows.describe(),
            "environment": facts.environment,
        },
        host=str(facts.host) if facts.host else "",
        host_code=facts.host.code if isinstance(facts.host, Unknown) else 0,
        device_uuid=str(facts.device_uuid) if facts.device_uuid else "",
        domain=f"{facts.fabric.cluster}/{facts.fabric.clique}"
        if isinstance(facts.fabric, Fabric) and facts.fabric.ready and facts.fabric.cluster
        else "",
        ordinal=facts.ordinal,
        verdicts={
            tier: (unallocated[tier], unallocated[tier])
            if unallocated and tier in unallocated
            else word(tier, present.get(tier), facts, proposal)
            for tier in Tier
        },
    )


def word(tier: Tier, plugin: type[TailTier] | None, facts: Facts, proposal: Proposal) -> tuple[Verdict, Verdict]:
    """A rank's verdict on one tier, on one host and across hosts: what goes for every tier first, then its own."""
    fallback = tier is max(Tier)
    reason = Reason.ABSENT if plugin is None else excluded(tier, plugin, proposal.settings)
    if reason is None and not fallback and proposal.world_size == 1:
        reason = Reason.ONE_RANK
    if reason is None and not fallback and not proposal.layout.equal_tokens:
        reason = Reason.UNEQUAL_TOKENS
    if plugin is None or reason is not None:
        no = Verdict.no(reason or Reason.ABSENT)
        return no, no
    return plugin.verdict(facts, proposal)


def not_allocated(nbytes: int, code: int | None) -> Verdict:
    """The word on the tiers of a block of `nbytes` bytes that could not be had, for which the system gave `code`."""
    if code in (None, errno.ENOMEM, errno.ENOSPC, errno.EAGAIN):
        return Verdict.no(Reason.OUT_OF_MEMORY, nbytes >> 20)
    return Verdict.no(Reason.ALLOCATION, code)


@cache
def sources() -> str:
    """SHA-256 of the library's own Python and CUDA sources, names included: two ranks run the same code or say so."""
    total, root = hashlib.sha256(), Path(k3comm.__file__).parent
    for path in sorted(path for path in root.rglob("*") if path.suffix in SOURCE_SUFFIXES):
        total.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return total.hexdigest()


def _table(value: LatentMoESpec | ParallelLayout) -> Mapping[str, str]:
    return {field.name: str(getattr(value, field.name)) for field in attrs.fields(type(value))}
