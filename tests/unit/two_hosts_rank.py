"""What a rank of `test_two_hosts.py` does; run under torchrun on each of two hosts."""

from __future__ import annotations

import json
import socket
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from k3comm import Communicator, LatentMoESpec, Tier
from k3comm.kernels import reference

SPEC = LatentMoESpec(hidden_size=96, latent_size=40, top_k=4)
OVER_MEMORY = (Tier.TAIL_FUSION, Tier.PEER_AR)


def picture(comm: Communicator, seed: int) -> dict[str, Any]:
    """What was agreed, and which of the agreed tiers give the reference's bits."""
    case = reference.integer_case(comm.world_size, 5, 96, 40, dtype=torch.bfloat16, seed=seed, norm=False)
    tail = comm.moe_tail(layer_index=seed, up_weight=case.up_weight)
    right = {}
    for tier in comm.agreement.capacities:
        out = tail(case.routed[comm.rank], case.shared[comm.rank], case.residual, plan=tail.plan(5, tier=tier))
        right[tier.name] = torch.equal(out, reference.round_once(case.truth(), torch.bfloat16))
    decision = comm.report.decision
    return {
        "hosts": decision.hosts,
        "one_host": decision.one_host,
        "right": right,
        "refusals": {tier.name: decision.refusal(tier) for tier in OVER_MEMORY if tier not in comm.agreement},
        "title": str(comm.report).splitlines()[0],
    }


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, size = dist.get_rank(), dist.get_world_size()
    per_host = size // 2
    found: dict[str, Any] = {"host": socket.gethostname()}
    with Communicator.negotiate(SPEC, dist.group.WORLD) as comm:
        found["whole"] = picture(comm, 0)
        groups = [dist.new_group(list(range(first, first + per_host))) for first in (0, per_host)]
        with Communicator.negotiate(SPEC, groups[rank // per_host]) as local:
            found["local"] = picture(local, 0)
            found["whole again"] = picture(comm, 1)
    Path(sys.argv[1], str(rank)).write_text(json.dumps(found), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
