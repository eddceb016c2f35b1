"""SEPARATE_REDUCE: each partial on its own, so that the routed side can overlap the shared experts.

The tier that needs nothing and takes everything: any number of rows, any argument, one rank, a precise result. With
`precise` the partials are gathered and added in rank order instead of all-reduced: W - 1 times the traffic of one
partial instead of 2 (W - 1) / W, for a K0 result.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from k3comm.kernels import dense
from k3comm.tiers.interface import TailCall, TailWeights
from k3comm.tiers.library import LibraryTier
from k3comm.tiers.tier import Numerics, Tier


class Plugin(LibraryTier):
    """Two all-reduces, then norm, projection and adds on every rank."""

    name: ClassVar[Tier] = Tier.SEPARATE_REDUCE
    numerics: ClassVar[Numerics] = Numerics.K2

    def reduce(self, partial: Tensor, weights: TailWeights) -> Tensor:
        """One partial sum [m, n] over all ranks: in its dtype, or in fp32 if `weights.precise`. Out of place."""
        if weights.precise:
            return dense.sum_ranks(self._collectives.all_gather(partial))
        return self._collectives.all_reduced(partial)[0]

    def _tail(self, call: TailCall) -> Tensor:
        latent = self.reduce(call.routed, call.weights) if call.latent is None else call.latent
        return self._finish_sums(latent, self.reduce(call.shared, call.weights), call)
