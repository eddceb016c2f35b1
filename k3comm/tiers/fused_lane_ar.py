"""FUSED_LANE_AR: both partials in one lane and one all-reduce, or one grouped call where joining would cost more.

    few rows, and peers within reach    our one-shot all-reduce, latent norm in its epilogue (ONE_SHOT_BYTES)
    lane smaller than GROUPED_BYTES     joined by a copy, and the library's all-reduce
    else                                the library's grouped all-reduce of both partials

**The lane in shared memory.** [m, L + H], rows contiguous: routed is lane[:, :L], shared is lane[:, L:]. Experts that
write there (`MoETail.lane`) cost no copy; what lies elsewhere is copied in by the kernel itself, part by part. It is
over only when every peer has read this rank's lane, so whatever comes next on the stream may write there again. A lane
holds the rows of ONE_SHOT_BYTES and never grows nor moves, so its address is good in captures and after `reserve`.

**Who has it.** The tier itself needs nothing and stays whatever happens. Its place in the staging block is optional: it
is there if the ranks have agreed on, and mapped, that block for a tier over peer pointers or multicast (PEER_AR,
MULTIMEM_AR), which is also what says that all GPUs reach each other. So where those are disabled the library does all.
What a rank finds out alone (no compiler, a GPU that holds fewer blocks, a check that fails) is told to the others in
the self-check, through the library's own collectives: the least number of blocks is everyone's, and 0 anywhere means
that no rank uses the lane. In `resume` it can't be given up any more, since captured graphs use it: then the self-check
fails.

Decided against: two lanes by turns instead of waiting for the readers. A graph replayed alone would not keep the turns.
"""

from __future__ import annotations

import logging
from typing import ClassVar, Final

import attrs
import torch
from torch import Tensor

from k3comm.buffers import alias
from k3comm.buffers.symmetric import Block, BufferRequest, SymmetricMemory
from k3comm.errors import InputError, PeerTimeoutError
from k3comm.facts import Reason, Verdict
from k3comm.kernels.expiry import Watch, layer_word
from k3comm.kernels.lane_one_shot import ALIGNMENT, MAX_BLOCKS, Cut, LaneLayout, OneShot
from k3comm.operations import Proposal, TailArguments
from k3comm.tiers.interface import Plan, TailCall, TierContext
from k3comm.tiers.library import LibraryTier
from k3comm.tiers.self_check import check_sums
from k3comm.tiers.tier import Numerics, Tier

ONE_SHOT_BYTES: Final = 6 << 20
"""Bytes of its peers' lanes that a rank reads at most in a one-shot all-reduce; with more rows the library makes it. A
lane holds no more rows than that."""

GROUPED_BYTES: Final = 4 << 20
"""Lane size in bytes from which the partials are not joined. Over NCCL on two H200s joined and grouped all-reduces of
[m, 10752] BF16 took 49.9 and 49.5 us at m = 64 (1.3 MiB), 129 and 117 us at m = 512 (10.5 MiB), 1456 and 1371 us at
m = 8192: the join and the strided reads that follow it are what differs (docs/performance.md)."""

_log = logging.getLogger(__name__)


class Plugin(LibraryTier):
    """[routed, shared] all-reduced together."""

    name: ClassVar[Tier] = Tier.FUSED_LANE_AR
    numerics: ClassVar[Numerics] = Numerics.K2

    _shared: SharedLane | None = None
    _agreed = False
    """Whether all ranks use the lane in shared memory."""

    @classmethod
    def footprint(cls, proposal: Proposal) -> BufferRequest | None:
        layout = lane_layout(proposal)
        if layout is None:
            return None
        return BufferRequest(block=Block.STAGING, nbytes=layout.nbytes, alignment=ALIGNMENT, optional=True)

    @classmethod
    def refusal(cls, arguments: TailArguments, proposal: Proposal) -> str | None:
        return "a library's all-reduce rounds in its own order, so it is not precise" if arguments.precise else None

    def prepare(self, context: TierContext) -> None:
        super().prepare(context)
        self._shared, self._agreed = None, False
        layout = None if context.proposal is None else lane_layout(context.proposal)
        if layout is None or context.memory is None:
            return
        try:
            self._shared = SharedLane(context, context.memory, layout)
        except Exception as error:  # without it the tier works too; the others are told in the self-check
            _log.warning("FUSED_LANE_AR has no lane in shared memory on rank %d: %s", context.rank, error)

    def self_check(self, context: TierContext) -> Verdict:
        before, self._agreed = self._agreed, False
        word = super().self_check(context)
        if context.memory is None:
            return word
        try:
            self._agreed = self._starts(context)
        except RuntimeError as error:
            failure = self.failure()
            if failure is None or failure is error:
                raise
            raise failure from error
        return Verdict.no(Reason.SELF_CHECK) if before and not self._agreed else word

    def lane(self, plan: Plan, number: int = 0) -> Tensor | None:
        lane = self._shared
        if lane is None or not self._agreed or not 0 < plan.num_tokens <= lane.rows:
            return None
        return lane.view(number, plan.num_tokens)

    def failure(self) -> Exception | None:
        return None if self._shared is None else self._shared.failure()

    def rearm(self) -> None:
        if self._shared is not None:
            self._shared.fill()

    def memory(self) -> dict[str, int]:
        return {} if self._shared is None or not self._agreed else {"lane": self._shared.nbytes}

    def close(self) -> None:
        self._shared, self._agreed = None, False

    def _tail(self, call: TailCall) -> Tensor:
        latent_size = call.routed.shape[1]
        rows, width = call.routed.shape[0], latent_size + call.shared.shape[1]
        if self._agreed and self._shared is not None and rows <= self._shared.rows:
            if call.residual is not None and alias.overlaps(call.residual, self._shared.view(call.lane, rows)):
                # What the kernel stages would stand over it before it is added.
                call = attrs.evolve(call, residual=call.residual.clone())
            return self._finish_normed(*self._shared.reduced(call), call)
        if rows * width * call.routed.element_size() < GROUPED_BYTES:
            lane = torch.cat((call.routed, call.shared), dim=1)
            self._collectives.all_reduce(lane)
            latent, shared = lane[:, :latent_size], lane[:, latent_size:]
        else:
            latent, shared = self._collectives.all_reduced(call.routed, call.shared)
        return self._finish_sums(latent, shared, call)

    def _starts(self, context: TierContext) -> bool:
        """Whether every rank has the lane and finds it right. Collective; the same on every rank."""
        lane = self._shared
        blocks = self._least(0 if lane is None else min(lane.capacity, MAX_BLOCKS))
        if not blocks:
            return False
        started = False
        if lane is not None:
            try:
                lane.start(blocks)
                started = True
            except Exception as error:  # the others would wait for this rank in the kernel
                _log.warning("FUSED_LANE_AR's one-shot can't start on rank %d: %s", context.rank, error)
        if lane is None or not self._least(int(started)):
            return False
        self._agreed = True
        # Few rows, and all that there is room for: more units than blocks at real widths.
        words = [check_sums(self, context, rows) for rows in (min(context.world_size + 1, lane.rows), lane.rows)]
        return bool(self._least(int(all(words))))

    def _least(self, value: int) -> int:
        """The least of all ranks' values. Collective, through the library."""
        mine = torch.tensor([value], dtype=torch.int32, device=self._context.device)
        return int(self._collectives.all_gather(mine).min().item())


class SharedLane:
    """One rank's lanes in the staging block, a micro-batch each, and the kernel over them.

    Args:
        context: of the tier. memory: its memory, mapped.
        layout: of every rank's part, which starts at `context.offset`.

    Raises:
        InputError, KernelError: no kernel for this GPU, or for the shape.
    """

    def __init__(self, context: TierContext, memory: SymmetricMemory, layout: LaneLayout) -> None:
        spec, settings = context.spec, context.settings
        self._context = context
        self._layout = layout
        self._latent_size = spec.latent_size
        start = context.offset
        self._own = memory.block(context.rank)[start : start + layout.nbytes]
        # Views of the caller's mode would be for that mode alone: experts write to them outside it.
        with torch.inference_mode(False):
            self._lanes = [
                self._own[layout.data(number) :][: 2 * layout.rows * layout.width]
                .view(torch.bfloat16)
                .view(layout.rows, layout.width)
                for number in range(layout.lanes)
            ]
        self._kernel = OneShot(
            Cut.of(spec.hidden_size, spec.latent_size, context.world_size),
            layout,
            rank=context.rank,
            device=context.device,
            blocks=[memory.block(rank).data_ptr() + start for rank in range(context.world_size)],
            eps=spec.rms_eps,
            # Ranks that share a GPU go without: a call that starts early could take the SMs that another rank's needs.
            settings=settings if context.device_ranks == 1 else attrs.evolve(settings, pdl=False),
        )
        self._watch = Watch(self._kernel.record, context.device, context.world_size, settings.poll_deadline)
        self.fill()

    @property
    def rows(self) -> int:
        """Of a lane."""
        return self._layout.rows

    @property
    def nbytes(self) -> int:
        """Of all lanes, with what the ranks meet by."""
        return self._layout.nbytes

    @property
    def capacity(self) -> int:
        """CTAs that this rank may have resident at once; 0: not even one."""
        return self._kernel.capacity // self._context.device_ranks

    def start(self, blocks: int) -> None:
        """Fixes the kernel's grid, the same on every rank. Raises as `OneShot.start`."""
        self._kernel.start(blocks)

    def fill(self) -> None:
        """Starts at call 0. No rank may be in a call; a barrier of the host must follow."""
        for number in range(self._layout.lanes):
            self._own[self._layout.counters(number) :][: self._layout.head_bytes].zero_()
        self._kernel.record.zero_()
        if self._own.is_cuda:
            torch.cuda.synchronize(self._own.device)

    def view(self, number: int, rows: int) -> Tensor:
        """The first rows of a lane: [rows, L + H] BF16.

        Raises:
            InputError: no such lane.
        """
        if type(number) is not int or not 0 <= number < self._layout.lanes:
            raise InputError(f"lane: {number!r} given; accepted are 0 to {self._layout.lanes - 1}")
        return self._lanes[number][:rows]

    def reduced(self, call: TailCall) -> tuple[Tensor, Tensor]:
        """The normed latent sum [m, L] in BF16 and the shared sum [m, H] in fp32, on torch's current stream.

        Raises:
            PeerTimeoutError: an earlier call's wait has expired.
        """
        return self._watch.launch(self._launch, call)

    def failure(self) -> PeerTimeoutError | None:
        """What the record says of a wait that has expired; None if none has."""
        return self._watch.failure()

    def _launch(self, call: TailCall) -> tuple[Tensor, Tensor]:
        rows = call.routed.shape[0]
        lane = self.view(call.lane, rows)
        return self._kernel(
            rows,
            _to_copy(call.routed, lane[:, : self._latent_size], lane),
            _to_copy(call.shared, lane[:, self._latent_size :], lane),
            call.weights.norm_weight,
            device=lane.device,
            lane=call.lane,
            layer=layer_word(call.layer, call.lane),
        )


def lane_layout(proposal: Proposal) -> LaneLayout | None:
    """Where the lanes are in the tier's part of the staging block, the same on every rank; None: nowhere. Pure.

    On GPUs, in BF16, for widths that the kernel takes, unless `settings.transport` asks for anything but peers.
    """
    spec = proposal.spec
    width = spec.latent_size + spec.hidden_size
    rows = ONE_SHOT_BYTES // max(proposal.world_size - 1, 1) // (2 * width)
    if proposal.device == "cpu" or spec.dtype != "bfloat16" or rows < 1:
        return None
    if proposal.settings.transport not in ("auto", "peer"):
        return None
    try:
        Cut.of(spec.hidden_size, spec.latent_size, proposal.world_size)
    except InputError:
        return None
    return LaneLayout(width=width, rows=rows, world_size=proposal.world_size, lanes=proposal.lanes)


def _to_copy(x: Tensor, place: Tensor, lane: Tensor) -> Tensor | None:
    """None where x stands at its place in the lane; else x, or a copy of it where it lies across the lane."""
    if x.data_ptr() == place.data_ptr() and (x.stride() == place.stride() or (x.shape[0] == 1 and x.stride(1) == 1)):
        return None
    return x.clone(memory_format=torch.contiguous_format) if alias.overlaps(x, lane) else x
