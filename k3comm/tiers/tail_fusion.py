"""TAIL_FUSION: the whole decode tail over mailboxes, each hop one publication that is its own flag.

    1  publish the latent partial sums to every rank, the shared ones to the rank that owns the columns
    2  clear what the call before used, while the peers' data is on its way
    3  sum what arrives in rank order in fp32; the mean square is that of the sums
    4  project this rank's H/W rows of W_up on s * g; r = rsqrt(mean square) multiplies afterwards
    5  add shared sum, bias and residual in fp32, round once, publish the finished columns to every rank
    6  gather: copy out, and empty the mailbox

Every row is projected by itself, in one order whatever m is: the same row gives the same bits in any batch, on every
rank. Protocol and generations are `buffers/mailbox.py`'s, whose mailboxes are host memory on CPU; on GPUs the same
layout lies in device memory, and all of this is one kernel (`_tail_device.py`, `kernels/tail_fusion.cu`).
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from k3comm.buffers.cuda import CudaMemory
from k3comm.buffers.mailbox import FRAGMENT, MailboxLayout, MailboxPool, mailbox_bytes
from k3comm.buffers.symmetric import Block, BufferRequest
from k3comm.facts import Facts, Reason, Verdict
from k3comm.kernels import dense
from k3comm.kernels.compile import ARCHITECTURES
from k3comm.kernels.tail_geometry import MAX_ROWS
from k3comm.operations import Proposal, TailArguments
from k3comm.tiers._tail_device import WEIGHT_DTYPES, DeviceTail
from k3comm.tiers.device import either, multicast_verdict, peer_verdict
from k3comm.tiers.host import host_verdict
from k3comm.tiers.interface import Plan, TailCall, TailTier, TierContext
from k3comm.tiers.self_check import check_sums
from k3comm.tiers.tier import Numerics, Tier

CHECKED_ROWS = (3, 8, 16, 32, MAX_ROWS)
"""Rows of a self-check on a GPU. Kernels have variants by the rows that they hold, and each of them runs once in it."""


class Plugin(TailTier):
    """The fused tail."""

    name: ClassVar[Tier] = Tier.TAIL_FUSION
    numerics: ClassVar[Numerics] = Numerics.K0
    transports: ClassVar[frozenset[str]] = frozenset({"host", "peer", "multicast"})

    _context: TierContext
    _layout: MailboxLayout
    _pool: MailboxPool
    _device: DeviceTail | None = None

    @classmethod
    def verdict(cls, facts: Facts, proposal: Proposal) -> tuple[Verdict, Verdict]:
        if facts.device != "cpu":
            return _device_verdict(facts, proposal)
        if proposal.settings.transport not in ("auto", "host"):
            return Verdict.no(Reason.TRANSPORT), Verdict.no(Reason.TRANSPORT)
        here = _shape_verdict(proposal)
        if here is None:
            here = host_verdict(facts, proposal.spec, MAX_ROWS)
        return here, Verdict.no(Reason.ACROSS_HOSTS)

    @classmethod
    def footprint(cls, proposal: Proposal) -> BufferRequest | None:
        if proposal.spec.dtype != "bfloat16" or _shape_verdict(proposal) is not None:
            return None
        nbytes = mailbox_bytes(proposal.spec, proposal.world_size, MAX_ROWS, proposal.lanes)
        return BufferRequest(block=Block.DECODE, nbytes=nbytes, alignment=128)

    @classmethod
    def refusal(cls, arguments: TailArguments, proposal: Proposal) -> str | None:
        if arguments.projected:
            return "its projection is part of the fusion, and this layer brings its own (project=)"
        if arguments.output == "rows":
            return 'it finishes columns, not rows (output="rows")'
        return None

    def prepare(self, context: TierContext) -> None:
        if context.memory is None:
            raise LookupError("TAIL_FUSION was given no memory")
        self._context = context
        self._layout = MailboxLayout.of(
            context.spec, world_size=context.world_size, max_rows=MAX_ROWS, lanes=context.lanes
        )
        if isinstance(context.memory, CudaMemory):
            self._device = DeviceTail(context, context.memory, self._layout)
            return
        self._pool = MailboxPool(
            context.memory,
            self._layout,
            offset=context.offset,
            poll_deadline=context.settings.poll_deadline,
        )
        self._pool.fill()

    def rearm(self) -> None:
        if self._device is None:
            self._pool.fill()
        else:
            self._device.fill()

    def memory(self) -> dict[str, int]:
        return {"mailboxes": self._layout.nbytes} if self._device is None else self._device.memory()

    def takes_deferred(self) -> bool:
        return self._device is not None

    def failure(self) -> Exception | None:
        return None if self._device is None else self._device.failure()

    def self_check(self, context: TierContext) -> Verdict:
        if self._device is None:
            # Few rows: each costs a pass over this rank's part of W_up.
            return check_sums(self, context, CHECKED_ROWS[0], ordered=True)
        try:
            # All of them, also after one that is wrong: peers go through the same calls.
            words = [
                check_sums(
                    self,
                    context,
                    rows,
                    ordered=True,
                    deferred=dtype,
                    next_norm=dtype is None,
                    latent_norm=dtype is None,
                )
                for rows in CHECKED_ROWS
                for dtype in (None, *WEIGHT_DTYPES)
            ]
        except RuntimeError as error:
            failure = self.failure()
            if failure is None or failure is error:
                raise
            raise failure from error
        return min(words, key=bool)

    def lane(self, plan: Plan, number: int = 0) -> Tensor | None:
        return None

    def run(self, call: TailCall) -> Tensor:
        return self._on_host(call) if self._device is None else self._device.run(call)

    def _on_host(self, call: TailCall) -> Tensor:
        context, weights, rows = self._context, call.weights, call.routed.shape[0]
        lane = self._pool.lanes[call.lane]
        width = context.spec.hidden_size // context.world_size
        columns = slice(context.rank * width, (context.rank + 1) * width)
        lane.begin(rows, layer=call.layer)
        lane.publish_latent(call.routed)
        lane.publish_shared(call.shared)
        lane.clear_previous()
        latent = dense.sum_ranks(lane.wait_latent().transpose(0, 1))
        z, r = dense.split_norm(latent, weights.norm_weight, context.spec.rms_eps)
        if weights.up_weight is None:
            raise LookupError("TAIL_FUSION was given a layer without up_weight")
        y = dense.project_rows(z, weights.up_weight if weights.sharded else weights.up_weight[columns])
        if r is not None:
            y *= r
        out = dense.add_up(
            y,
            weights.routed_scale,
            None if weights.up_bias is None else weights.up_bias[columns],
            dense.sum_ranks(lane.wait_shared().transpose(0, 1)),
            None if call.residual is None else call.residual[:, columns],
            context.dtype,
        )
        lane.publish_columns(out)
        whole = out.new_empty(rows, context.spec.hidden_size)
        lane.wait_columns(whole)
        lane.end()
        dense.norm_into(call.normed, whole, call.next_norm_weight, context.spec.rms_eps)
        return whole


def _device_verdict(facts: Facts, proposal: Proposal) -> tuple[Verdict, Verdict]:
    """A rank's word on device memory, by whichever transport; what the GPU has too few SMs for is seen in `prepare`."""
    unfit = _shape_verdict(proposal)
    capability = facts.compute_capability
    peer = peer_verdict(facts, proposal, MAX_ROWS)
    multicast = multicast_verdict(facts, proposal, MAX_ROWS)
    words = multicast if proposal.settings.transport == "multicast" else either(multicast, peer)
    if words[0] and unfit is None and isinstance(capability, tuple) and capability not in ARCHITECTURES:
        unfit = Verdict.no(Reason.ARCHITECTURE, capability[0] * 10 + capability[1])
    return words if unfit is None else (unfit, unfit)


def _shape_verdict(proposal: Proposal) -> Verdict | None:
    """The refusal of a shape that doesn't fall into fragments of 16 bytes; None if it does."""
    multiple = FRAGMENT * proposal.world_size
    if proposal.spec.hidden_size % multiple:
        return Verdict.no(Reason.HIDDEN_MULTIPLE, multiple)
    if proposal.spec.latent_size % FRAGMENT:
        return Verdict.no(Reason.LATENT_MULTIPLE, FRAGMENT)
    return None
