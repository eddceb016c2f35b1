"""COLUMN_PARALLEL: each rank finishes H/W columns of every row; the way for a sharded W_up.

Latent rows all-to-all, fp32 sums in rank order and norm of the own rows, all-gather of normed rows, shared columns
all-to-all, projection and adds of the own columns, all-gather of finished columns. In units of m*H elements with
L = H/2: 0.5 + 0.5 + 1.0 + 1.0 = 3.0 of traffic and 1/W of the projection.
"""

from __future__ import annotations

from typing import ClassVar

import torch
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
        weights, num_tokens, columns = call.weights, call.routed.shape[0], self._columns()
        z = self._normed_rows(call.routed, weights)
        shared = call.shared.reshape(num_tokens, self._world_size, -1).transpose(0, 1)
        shared = dense.sum_ranks(self._collectives.all_to_all(shared))
        y = self._project(z, weights, None if weights.sharded else columns)
        bias = None if weights.up_bias is None else weights.up_bias[columns]
        if call.plan.output == "full":
            residual = None if call.residual is None else call.residual[:, columns]
            y = dense.add_up(y, weights.routed_scale, bias, shared, residual, self._context.dtype)
            return self._gather_columns(y)
        # Own rows of all columns: the residual has them only here, so what it is added to stays in fp32 until then.
        dtype = self._context.dtype if call.residual is None else torch.float32
        y = dense.add_up(y, weights.routed_scale, bias, shared, None, dtype)
        own = self._collectives.all_to_all(self._pad_rows(y)).transpose(0, 1).flatten(1)
        if call.residual is not None:
            own = (own + call.residual).to(self._context.dtype)
        return self._clear_past(own, num_tokens)

    def _normed_rows(self, routed: Tensor, weights: TailWeights) -> Tensor:
        """The normed latent rows [m, L] in fp32 on every rank, each normed by one: in the projection's precision."""
        latent = dense.sum_ranks(self._collectives.all_to_all(self._pad_rows(routed)))
        z = self._normed(latent, weights)
        if not weights.precise:
            z = z.to(self._context.dtype)
        return self._collectives.all_gather(z).flatten(0, 1)[: routed.shape[0]].float()
