"""What the tiers over host memory share."""

from __future__ import annotations

from k3comm.facts import Facts, Reason, Unknown, Verdict
from k3comm.spec import LatentMoESpec


def host_verdict(facts: Facts, spec: LatentMoESpec, rows: int) -> Verdict:
    """Whether this rank can do a tier over host memory for up to `rows` rows."""
    if facts.device != "cpu":
        return Verdict.no(Reason.DEVICE)
    if not facts.host_memory:
        return Verdict.no(Reason.HOST_MEMORY, facts.host_memory.code if isinstance(facts.host_memory, Unknown) else 0)
    if spec.dtype != "bfloat16":
        return Verdict.no(Reason.BFLOAT16)
    return Verdict.yes(rows)
