"""SEQUENCE_PARALLEL: each rank finishes ceil(m/W) rows.

All-to-all of rows, fp32 sums in rank order, norm, projection and adds on the own rows, all-gather of finished rows.
In units of m*H elements with L = H/2: 0.5 + 1.0 + 1.0 = 2.5 of traffic where all-reducing moves 3.0, 1.5 with
output="rows", and 1/W of the projection. Needs W_up whole on every rank.

All-to-all and local sums move the bytes of a reduce-scatter, without a library's rounding and order.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from k3comm.kernels import dense
from k3comm.operations import Proposal, TailArguments
from k3comm.tiers.interface import TailCall
from k3comm.tiers.library import LibraryTier
from k3comm.tiers.tier import Numerics, Tier


class Plugin(LibraryTier):
    """Rows are spread over the ranks."""

    name: ClassVar[Tier] = Tier.SEQUENCE_PARALLEL
    numerics: ClassVar[Numerics] = Numerics.K1

    @classmethod
    def refusal(cls, arguments: TailArguments, proposal: Proposal) -> str | None:
        return "it needs W_up whole on every rank, and this one is sharded" if arguments.sharded else None

    def _tail(self, call: TailCall) -> Tensor:
        latent = dense.sum_ranks(self._collectives.all_to_all(self._pad_rows(call.routed)))
        shared = dense.sum_ranks(self._collectives.all_to_all(self._pad_rows(call.shared)))
        rows_only = call.plan.output == "rows"
        residual = call.residual
        if residual is not None and not rows_only:
            residual = self._rows_of(residual)
        y = self._project(self._normed(latent, call.weights), call.weights)
        own = self._add_up(y, call.weights, shared, residual)
        if rows_only:
            return self._clear_past(own, call.routed.shape[0])
        return self._collectives.all_gather(own).flatten(0, 1)[: call.routed.shape[0]]
