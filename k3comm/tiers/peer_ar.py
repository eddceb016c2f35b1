"""PEER_AR: both partials staged where every rank can reach them, and a two-shot all-reduce over those buffers.

Each rank sums its 1/W of the elements over all ranks' buffers. On GPUs torch's operator does it in place over peer
pointers, and its own barriers order it. On host memory the sums are made here, in rank order in fp32 with one rounding;
then each rank reads the others' parts, and three barriers order it: all have staged, all have summed, all have read.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from k3comm.buffers.cuda import two_shot_all_reduce_
from k3comm.facts import Facts, Reason, Verdict
from k3comm.operations import Proposal
from k3comm.tiers.device import peer_verdict
from k3comm.tiers.host import host_verdict
from k3comm.tiers.interface import TailCall
from k3comm.tiers.staged import PARTIALS, StagedTier, first_rows
from k3comm.tiers.tier import Tier


class Plugin(StagedTier):
    """Two-shot over peers."""

    name: ClassVar[Tier] = Tier.PEER_AR
    transports: ClassVar[frozenset[str]] = frozenset({"host", "peer"})

    @classmethod
    def verdict(cls, facts: Facts, proposal: Proposal) -> tuple[Verdict, Verdict]:
        rows = first_rows(proposal)
        if facts.device != "cpu":
            return peer_verdict(facts, proposal, rows)
        if proposal.settings.transport not in ("auto", "host"):
            return Verdict.no(Reason.TRANSPORT), Verdict.no(Reason.TRANSPORT)
        return host_verdict(facts, proposal.spec, rows), Verdict.no(Reason.ACROSS_HOSTS)

    def _reduced(self, flat: Tensor, call: TailCall) -> Tensor:
        if self._context.device.type == "cpu":
            return self._on_host(flat.numel(), call)
        two_shot_all_reduce_(flat, self._group_name)
        return flat

    def _on_host(self, elements: int, call: TailCall) -> Tensor:
        where = f"layer {call.layer}, lane {call.lane}"
        self._pool.barrier(f"staged, {where}", lane=call.lane)
        peers = self._pool.peers(PARTIALS, call.routed.shape[0], lane=call.lane)
        flat = [whole.view(-1)[:elements] for whole in peers]
        own = self._share(elements, self._rank)
        # Nobody else reads this part of this rank's buffer before the barrier, so it takes the sum.
        total = flat[0][own].to(torch.float32, copy=True)
        for peer in flat[1:]:
            total += peer[own]
        flat[self._rank][own].copy_(total)
        self._pool.barrier(f"summed, {where}", lane=call.lane)
        sums = torch.cat([peer[self._share(elements, rank)] for rank, peer in enumerate(flat)])
        self._pool.barrier(f"read, {where}", lane=call.lane)
        return sums

    def _share(self, elements: int, rank: int) -> slice:
        """A rank's part of so many elements."""
        size = -(-elements // self._world_size)
        return slice(min(rank * size, elements), min((rank + 1) * size, elements))
