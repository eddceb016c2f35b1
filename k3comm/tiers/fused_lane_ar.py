"""FUSED_LANE_AR: both partials in one lane and one all-reduce, or one grouped call where joining would cost more."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from k3comm.operations import Proposal, TailArguments
from k3comm.tiers.interface import TailCall
from k3comm.tiers.library import LibraryTier
from k3comm.tiers.tier import Numerics, Tier

GROUPED_BYTES = 4 << 20
"""Lane size in bytes from which the partials are not joined. Over NCCL on two H200s joined and grouped all-reduces of
[m, 10752] BF16 took 49.9 and 49.5 us at m = 64 (1.3 MiB), 129 and 117 us at m = 512 (10.5 MiB), 1456 and 1371 us at
m = 8192: the join and the strided reads that follow it are what differs (docs/performance.md)."""


class Plugin(LibraryTier):
    """[routed, shared] all-reduced together."""

    name: ClassVar[Tier] = Tier.FUSED_LANE_AR
    numerics: ClassVar[Numerics] = Numerics.K2

    @classmethod
    def refusal(cls, arguments: TailArguments, proposal: Proposal) -> str | None:
        return "a library's all-reduce rounds in its own order, so it is not precise" if arguments.precise else None

    def _tail(self, call: TailCall) -> Tensor:
        latent_size = call.routed.shape[1]
        rows, width = call.routed.shape[0], latent_size + call.shared.shape[1]
        if rows * width * call.routed.element_size() < GROUPED_BYTES:
            lane = torch.cat((call.routed, call.shared), dim=1)
            self._collectives.all_reduce(lane)
            latent, shared = lane[:, :latent_size], lane[:, latent_size:]
        else:
            latent, shared = self._collectives.all_reduced(call.routed, call.shared)
        return self._finish_sums(latent, shared, call)
