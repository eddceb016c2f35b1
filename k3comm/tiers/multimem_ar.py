"""MULTIMEM_AR: both partials staged under one multicast address, reduced in the switch by torch's operator.

As PEER_AR but for that operator: each rank asks the switch for the sum of its 1/W of the elements over all GPUs
(`multimem.ld_reduce`) and gives it to all of them (`multimem.st`), so every byte crosses a GPU's links once each way.

Not run on hardware by this project: NVLink multicast stays off on the machines it is developed on. The tests drive it
with a stand-in for the one operator in which it differs.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from k3comm.buffers.cuda import multimem_all_reduce_
from k3comm.buffers.symmetric import BufferRequest, SymmetricMemory
from k3comm.facts import Facts, Verdict
from k3comm.operations import Proposal
from k3comm.tiers.device import multicast_verdict
from k3comm.tiers.interface import TailCall
from k3comm.tiers.staged import StagedTier, first_rows
from k3comm.tiers.tier import Tier


class Plugin(StagedTier):
    """All-reduce in the switch."""

    name: ClassVar[Tier] = Tier.MULTIMEM_AR
    transports: ClassVar[frozenset[str]] = frozenset({"multicast"})

    @classmethod
    def verdict(cls, facts: Facts, proposal: Proposal) -> tuple[Verdict, Verdict]:
        return multicast_verdict(facts, proposal, first_rows(proposal))

    @classmethod
    def footprint(cls, proposal: Proposal) -> BufferRequest | None:
        return None if proposal.device == "cpu" else super().footprint(proposal)

    def _unfit(self, memory: SymmetricMemory) -> str | None:
        return None if memory.multicast_objects else "torch gave the staging block no multicast address"

    def _reduced(self, flat: Tensor, call: TailCall) -> Tensor:
        multimem_all_reduce_(flat, self._group_name)
        return flat
