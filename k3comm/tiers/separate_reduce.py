"""SEPARATE_REDUCE: each partial on its own, so that either one can be summed while the other one's experts run.

The tier that needs nothing and takes everything: any number of rows, any argument, one rank, a precise result. With
`precise` the partials are gathered and added in rank order instead of all-reduced: W - 1 times the traffic of one
partial instead of 2 (W - 1) / W, for a K0 result.

The routed partial may be summed first, and the call then finishes it (`reduce`). The shared one may be begun early,
into a buffer that is read at the very end (`reduce_into`): the routed sum, the norm and the projection don't wait for
it. With `settings.overlap_sms` and NCCL that collective goes over a communicator of its own with so few blocks
(`tiers/few_sms.py`), and the other SMs stay with the routed experts; only that one, since it would be slower where
nothing runs beside it. At two ranks a sum of two has the same bits in any order; at more, NCCL's order may differ with
the number of blocks, within class K2.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from k3comm.errors import InputError
from k3comm.facts import Reason, Verdict
from k3comm.kernels import dense
from k3comm.tiers.few_sms import OVERRIDES, FewSMs
from k3comm.tiers.interface import TailCall, TailWeights, TierContext
from k3comm.tiers.library import Collectives, LibraryTier
from k3comm.tiers.tier import Numerics, Tier

CLOSE_SECONDS = 1.0
"""How long `close` waits for NCCL to end the second communicator: it waits itself for graphs that use it."""


class Plugin(LibraryTier):
    """Two all-reduces, then norm, projection and adds on every rank."""

    name: ClassVar[Tier] = Tier.SEPARATE_REDUCE
    numerics: ClassVar[Numerics] = Numerics.K2

    _few: FewSMs | None = None

    def prepare(self, context: TierContext) -> None:
        super().prepare(context)
        sms = context.settings.overlap_sms
        nccl = context.facts is not None and context.facts.backend == "nccl"
        if sms is None or not nccl or context.world_size == 1 or context.group is None or context.store is None:
            return
        environment = {} if context.facts is None else context.facts.environment
        for variable in OVERRIDES:
            if variable in environment:
                raise InputError(
                    f"overlap_sms: {sms} given with {variable}={environment[variable]}, which NCCL puts before it; "
                    "accepted is one of the two"
                )
        self._few = FewSMs(context.group, context.device, sms, context.store(), f"k3comm/few-sms/{context.serial}")

    def self_check(self, context: TierContext) -> Verdict:
        verdict = super().self_check(context)
        if self._few is None:
            return verdict
        # Connects it too, since nothing may connect in a forward, or in a capture. Both collectives may be asked for.
        mine = torch.full((2, 8), float(context.rank + 1), dtype=context.dtype, device=context.device)
        summed = mine.clone()
        self._few.all_reduce(summed)
        gathered = self._few.all_gather(mine)
        ranks = torch.arange(1, context.world_size + 1, dtype=context.dtype, device=context.device)
        right = bool((summed == ranks.sum()).all()) and torch.equal(gathered[:, 0, 0], ranks)
        return verdict if right else Verdict.no(Reason.SELF_CHECK)

    def reduce(self, partial: Tensor, weights: TailWeights) -> Tensor:
        """One partial sum [m, n] over all ranks: in its dtype, or in fp32 if `weights.precise`. Out of place."""
        if weights.precise:
            return dense.sum_ranks(self._collectives.all_gather(partial))
        return self._collectives.all_reduced(partial)[0]

    def reduce_into(self, out: Tensor, partial: Tensor, weights: TailWeights) -> None:
        """As `reduce`, into a buffer [m, n] without strides, of the dtype that it returns; on few SMs if so set."""
        collectives: Collectives | FewSMs = self._collectives if self._few is None else self._few
        if weights.precise:
            out.copy_(dense.sum_ranks(collectives.all_gather(partial)))
        else:
            out.copy_(partial)
            collectives.all_reduce(out)

    def close(self) -> None:
        few, self._few = self._few, None
        if few is None:
            return
        if self._context.start_thread is None:
            few.close()
        else:
            self._context.start_thread("k3comm few SMs", few.close).join(CLOSE_SECONDS)

    def _tail(self, call: TailCall) -> Tensor:
        latent = self.reduce(call.routed, call.weights) if call.latent is None else call.latent
        shared = self.reduce(call.shared, call.weights) if call.shared_ready is None else call.shared
        return self._finish_sums(latent, shared, call)
