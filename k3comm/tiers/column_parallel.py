"""COLUMN_PARALLEL: each rank finishes H/W columns of every row; the way for a sharded W_up.

Latent rows all-to-all, fp32 sums in rank order and norm of the own rows, all-gather of normed rows, shared columns
all-to-all, projection and adds of the own columns, all-gather of finished columns. In units of m*H elements with
L = H/2: 0.5 + 0.5 + 1.0 + 1.0 = 3.0 of traffic and 1/W of the projection.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from k3comm.facts import Facts, Reason, Verdict
from k3comm.kernels import dense
from k3comm.operations import Proposal
from k3comm.tiers.interface import TailCall, TailWeights
from k3comm.tiers.library import LibraryTier
from k3comm.tiers.tier import Numerics, Tier


class Plugin(LibraryTier):
    """Columns are spread over the ranks."""

    name: ClassVar[Tier] = Tier.COLUMN_PARALLEL
    numerics: ClassVar[Numerics] = Numerics.K1

    @classmethod
    def verdict(cls, facts: Facts, proposal: Proposal) -> tuple[Verdict, Verdict]:
        if proposal.spec.hidden_size % proposal.world_size:
            no = Verdict.no(Reason.HIDDEN_MULTIPLE, proposal.world_size)
            return no, no
        return Verdict.yes(), Verdict.yes()

    def _tail(self, call: TailCall) -> Tensor:
        z = self._normed_rows(call.routed, call.weights)
        shared = call.shared.reshape(call.shared.shape[0], self._world_size, -1).transpose(0, 1)
        return self._finish_columns(z, dense.sum_ranks(self._collectives.all_to_all(shared)), call)

    def _normed_rows(self, routed: Tensor, weights: TailWeights) -> Tensor:
        """The normed latent rows [m, L] in fp32 on every rank, each normed by one: in the projection's precision."""
        latent = dense.sum_ranks(self._collectives.all_to_all(self._pad_rows(routed)))
        z = self._normed(latent, weights)
        if not weights.precise:
            z = z.to(self._context.dtype)
        return self._collectives.all_gather(z).flatten(0, 1)[: routed.shape[0]].float()
