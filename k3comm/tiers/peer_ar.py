"""PEER_AR: both partials staged where every rank can read them, and a two-shot all-reduce over those buffers.

Each rank sums its 1/W of the elements over all ranks' buffers, in rank order in fp32 with one rounding, then reads the
other ranks' parts. On host memory three barriers order it: all have staged, all have summed, all have read.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from k3comm.buffers.staging import Slot, StagingLayout, StagingPool, staging_bytes
from k3comm.buffers.symmetric import Block, BufferRequest
from k3comm.facts import Facts, Reason, Verdict
from k3comm.operations import Proposal, TailArguments
from k3comm.spec import LatentMoESpec
from k3comm.tiers.host import host_verdict
from k3comm.tiers.interface import TailCall, TierContext
from k3comm.tiers.library import LibraryTier
from k3comm.tiers.tier import Numerics, Tier

FIRST_ROWS = 256
"""Rows that the buffers hold at first: what the host's windows ask for. `Communicator.reserve` makes more."""


def _rows(spec: LatentMoESpec) -> int:
    return min(spec.max_tokens, FIRST_ROWS)


def _slots(spec: LatentMoESpec) -> tuple[Slot, ...]:
    return Slot("routed", spec.latent_size, spec.dtype), Slot("shared", spec.hidden_size, spec.dtype)


class Plugin(LibraryTier):
    """Two staged partials, two-shot over peers."""

    name: ClassVar[Tier] = Tier.PEER_AR
    numerics: ClassVar[Numerics] = Numerics.K2
    transports: ClassVar[frozenset[str]] = frozenset({"host"})

    _pool: StagingPool

    @classmethod
    def verdict(cls, facts: Facts, proposal: Proposal) -> tuple[Verdict, Verdict]:
        return host_verdict(facts, proposal.spec, _rows(proposal.spec)), Verdict.no(Reason.ACROSS_HOSTS)

    @classmethod
    def footprint(cls, proposal: Proposal) -> BufferRequest | None:
        spec = proposal.spec
        return BufferRequest(
            block=Block.STAGING,
            nbytes=staging_bytes(_slots(spec), _rows(spec), proposal.world_size, proposal.lanes),
            alignment=128,
        )

    @classmethod
    def refusal(cls, arguments: TailArguments, proposal: Proposal) -> str | None:
        return "its sums are rounded to BF16, so it is not precise" if arguments.precise else None

    def prepare(self, context: TierContext) -> None:
        super().prepare(context)
        if context.memory is None or context.establish is None:
            raise LookupError("PEER_AR was given no memory")
        layout = StagingLayout(
            slots=_slots(context.spec),
            rows=_rows(context.spec),
            world_size=context.world_size,
            lanes=context.lanes,
        )
        self._pool = StagingPool(
            context.memory,
            layout,
            ceiling=context.spec.max_tokens,
            grow=context.establish,
            offset=context.offset,
            poll_deadline=context.settings.poll_deadline,
        )

    def reserve(self, rows: int) -> int:
        """Makes room for `rows` rows. Collective."""
        # Past max_tokens too buffers double, or asking for one row more each time would retire one each time.
        if rows > self._pool.ceiling:
            self._pool.ceiling = 2 * rows
        self._pool.reserve(rows)
        return self._pool.rows

    def rearm(self) -> None:
        self._pool.rearm()

    def close(self) -> None:
        self._pool.close()

    def memory(self) -> dict[str, int]:
        return {"staging": self._pool.nbytes, "staging, retired": self._pool.retired_bytes}

    def _tail(self, call: TailCall) -> Tensor:
        parts = {"routed": call.routed, "shared": call.shared}
        for name, partial in parts.items():
            self._pool.stage(name, partial, lane=call.lane)
        where = f"layer {call.layer}, lane {call.lane}"
        self._pool.barrier(f"staged, {where}", lane=call.lane)
        rows = call.routed.shape[0]
        buffers = {name: [whole.view(-1) for whole in self._pool.peers(name, rows, lane=call.lane)] for name in parts}
        for flat in buffers.values():
            own = self._share(flat[0].numel(), self._rank)
            # Nobody else reads this part of this rank's buffer before the barrier, so it takes the sum.
            total = flat[0][own].to(torch.float32, copy=True)
            for peer in flat[1:]:
                total += peer[own]
            flat[self._rank][own].copy_(total)
        self._pool.barrier(f"summed, {where}", lane=call.lane)
        latent, shared = (
            torch.cat([peer[self._share(peer.numel(), rank)] for rank, peer in enumerate(flat)]).view(rows, -1)
            for flat in buffers.values()
        )
        self._pool.barrier(f"read, {where}", lane=call.lane)
        return self._finish_sums(latent, shared, call)

    def _share(self, elements: int, rank: int) -> slice:
        """A rank's part of so many elements."""
        size = -(-elements // self._world_size)
        return slice(min(rank * size, elements), min((rank + 1) * size, elements))
