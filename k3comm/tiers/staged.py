"""What the tiers share that stage both partial sums where every rank can reach them and reduce them there.

A rank lays its [m, L] and [m, H] partials end to end in one buffer, so that one all-reduce takes both and both results
are contiguous. Then follow norm, projection and adds, as in the library tiers.

The buffer is the pool's, sized for the largest m that a window gives to one of these tiers. They have one place in the
staging block together: calls of a communicator come one after the other, and a call leaves nothing behind that the next
one needs. After `reserve` each has a buffer of its own.

Decided against: a buffer and an all-reduce for each partial. The second launch, with its barriers, costs more than
either copy for small m.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from k3comm.buffers.cuda import ELEMENTS
from k3comm.buffers.staging import ALIGNMENT, Slot, StagingLayout, StagingPool, staging_bytes
from k3comm.buffers.symmetric import Block, BufferRequest, SymmetricMemory
from k3comm.operations import Proposal, TailArguments
from k3comm.spec import LatentMoESpec
from k3comm.tiers import plugins
from k3comm.tiers.interface import TailCall, TierContext
from k3comm.tiers.library import LibraryTier
from k3comm.tiers.tier import Numerics

FIRST_ROWS = 256
"""Rows that the buffers hold at first on CPU, and the least on GPUs. `Communicator.reserve` makes more."""

PARTIALS = "partials"
"""The pool's one slot."""


class StagedTier(LibraryTier):
    """Stages both partials; `_reduced` sums them."""

    numerics: ClassVar[Numerics] = Numerics.K2

    _pool: StagingPool

    @classmethod
    def footprint(cls, proposal: Proposal) -> BufferRequest | None:
        nbytes = staging_bytes(_slots(proposal.spec), first_rows(proposal), proposal.world_size, proposal.lanes)
        return BufferRequest(block=Block.STAGING, nbytes=nbytes, alignment=ALIGNMENT, shared=PARTIALS)

    @classmethod
    def refusal(cls, arguments: TailArguments, proposal: Proposal) -> str | None:
        return "its sums are rounded to BF16, so it is not precise" if arguments.precise else None

    def prepare(self, context: TierContext) -> None:
        super().prepare(context)
        if context.memory is None or context.establish is None or context.proposal is None:
            raise LookupError(f"{self.name.name} was given no memory")
        layout = StagingLayout(
            slots=_slots(context.spec),
            rows=first_rows(context.proposal),
            world_size=context.world_size,
            lanes=context.lanes,
        )
        why = self._unfit(context.memory)
        if why is not None:
            raise LookupError(why)
        self._pool = StagingPool(
            context.memory,
            layout,
            ceiling=context.spec.max_tokens,
            grow=self._grow,
            capturing=torch.cuda.is_current_stream_capturing if context.device.type == "cuda" else None,
            offset=context.offset,
            poll_deadline=context.settings.poll_deadline,
            borrowed=True,
        )

    def reserve(self, rows: int) -> int:
        """Makes room for `rows` rows, more than `max_tokens` too; the rows there are then. Collective.

        The rule is `StagingPool.reserve`'s, with `max_tokens` for the ceiling: up to it the buffers at least double;
        the first growth past it takes what is asked for (rounded up by less than `BEYOND_ROWS`), and further ones at
        least double again.
        """
        self._pool.reserve(rows, beyond=True)
        return self._pool.rows

    def rearm(self) -> None:
        self._pool.rearm()

    def close(self) -> None:
        self._pool.close()

    def memory(self) -> dict[str, int]:
        return {"staging": self._pool.nbytes, "staging, retired": self._pool.retired_bytes}

    @abstractmethod
    def _reduced(self, flat: Tensor, call: TailCall) -> Tensor:
        """The sums over the ranks of this rank's staged elements `flat`, in the same order; `flat` may be overwritten.

        The elements are a multiple of ELEMENTS, which may go past the data: what stands there means nothing.
        """

    def _unfit(self, memory: SymmetricMemory) -> str | None:
        """Why the tier can't work on that memory; None if it can. The same on every rank."""
        return None

    def _tail(self, call: TailCall) -> Tensor:
        rows, latent_size = call.routed.shape
        routed, whole = rows * latent_size, rows * (latent_size + call.shared.shape[1])
        staged = self._pool.view(PARTIALS, rows, lane=call.lane).view(-1)[: -(-whole // ELEMENTS) * ELEMENTS]
        staged[:routed].view(rows, -1).copy_(call.routed)
        staged[routed:whole].view(rows, -1).copy_(call.shared)
        sums = self._reduced(staged, call)
        return self._finish_sums(sums[:routed].view(rows, -1), sums[routed:whole].view(rows, -1), call)

    def _grow(self, nbytes: int) -> SymmetricMemory | str:
        establish = self._context.establish
        if establish is None:
            return f"{self.name.name} was given no way to grow"
        memory = establish(nbytes)
        if not isinstance(memory, str) and (why := self._unfit(memory)) is not None:
            memory.release()
            return why
        return memory


def first_rows(proposal: Proposal) -> int:
    """Rows of the buffers before any `reserve`; the same on every rank. Pure.

    On GPUs as many as the windows ever give to one of these tiers, so that nothing measured is cut off.
    """
    rows, most = FIRST_ROWS, proposal.spec.max_tokens
    if proposal.device != "cpu" and proposal.windows is not None:
        for tier, window in proposal.windows.rows.items():
            kind = plugins().get(tier)
            if kind is not None and issubclass(kind, StagedTier) and tier not in proposal.settings.disabled:
                rows = max([rows, *(most if tokens.last is None else tokens.last for tokens in window.tokens)])
    return min(rows, most)


def _slots(spec: LatentMoESpec) -> tuple[Slot, ...]:
    # Wide enough that a whole number of vectors covers the elements of any m.
    width = -(-(spec.latent_size + spec.hidden_size) // ELEMENTS) * ELEMENTS
    return (Slot(PARTIALS, width, spec.dtype),)
