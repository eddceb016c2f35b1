"""TAIL_FUSION on a GPU: the kernels of `kernels/tail_fusion.py` over mailboxes in device memory.

Everything is made in the constructor, outside forwards: each variant that a call could ask for is compiled (or found in
the cache) and loaded, the mailboxes are emptied and the counters set to zero. A call then packs its arguments and
launches, and nothing in it is compiled, allocated for good or waited for, so it may be captured. The counters are on
the device: replays of graphs, and eager calls between them, are one sequence.

**Two kernels a call** with programmatic dependent launch: exchange and projection, then the finish. In a chain the next
layer's weights start to load as soon as the first has left (docs/performance.md: 0.3 to 1 us a call over one kernel for
all). **One kernel** without it. Both give the same bits, and ranks may differ in it.

**Multicast or peers** is this rank's own choice: words arrive the same either way, so ranks that chose differently
would still agree. Multicast is taken where torch's memory has the address and the facts leave it be. This project has
not run it on hardware, only compiled and inspected it: NVLink multicast stays off on the machines it is developed on.

**Ranks that share a GPU** (`settings.allow_shared_device`) get a share of the SMs each, since all blocks of all of them
have to be resident where the GPU runs them at once; and no programmatic dependent launch, with which a rank's next call
could take the SMs that another rank's present one waits for.

**A wait that expires** (`settings.poll_deadline`) writes a record to pinned memory and traps, which ends the process's
CUDA context: nothing on this GPU works in it any more, torch included. `failure` reads the record.
"""

from __future__ import annotations

from typing import Final

import attrs
import torch
from torch import Tensor

from k3comm.buffers.cuda import CudaMemory
from k3comm.buffers.mailbox import COUNTER_BYTES, EMPTY, MailboxLayout
from k3comm.errors import PeerTimeoutError
from k3comm.kernels.compile import arch_of
from k3comm.kernels.expiry import Watch, layer_word
from k3comm.kernels.tail_fusion import Form, LaneAddresses, TailKernels
from k3comm.kernels.tail_geometry import Geometry
from k3comm.tiers.device import multicast_verdict
from k3comm.tiers.interface import TailCall, TierContext

WEIGHT_DTYPES: Final = (torch.bfloat16, torch.float32)
"""Of experts' weights in a deferred call; which of them comes is not known before it does."""


class DeviceTail:
    """The prepared tail of one rank. Local: the vote that follows `prepare` is the barrier before the first call.

    Args:
        context: of the tier. memory: its memory, mapped.
        layout: of the mailboxes, which start at `context.offset`.

    Attributes:
        form: of every call.

    Raises:
        InputError: no kernel is made for this GPU, or it can't hold the shape.
        KernelError: a kernel can't be compiled or loaded.
        LookupError: the memory has no multicast address, and `settings.transport` asks for it.
    """

    def __init__(self, context: TierContext, memory: CudaMemory, layout: MailboxLayout) -> None:
        self._context = context
        self._layout = layout
        self._memory = memory
        self.transport = transport_of(context, memory)
        arch, capacity = room_of(context.device, context.device_ranks)
        self.geometry = Geometry.choose(
            layout.hidden_size, layout.latent_size, layout.world_size, arch=arch, capacity=capacity
        )
        settings = context.settings
        if context.device_ranks > 1:
            settings = attrs.evolve(settings, pdl=False)
        self.form = Form.SPLIT if settings.pdl else Form.WHOLE
        self._kernels = TailKernels(
            self.geometry,
            rank=context.rank,
            device=context.device,
            lanes=[self._addresses(lane) for lane in range(layout.lanes)],
            eps=context.spec.rms_eps,
            capacity=capacity,
            transport=self.transport,
            deferred=WEIGHT_DTYPES,
            forms=(self.form,),
            settings=settings,
        )
        self._watch = Watch(self._kernels.record, context.device, context.world_size, settings.poll_deadline)
        self.fill()

    def fill(self) -> None:
        """Empties this rank's mailboxes, and starts at call 0. No rank may be in a call; a barrier must follow.

        Done when it returns: the barrier is the host's.
        """
        start = self._context.offset
        own = self._memory.block(self._context.rank)[start : start + self._layout.nbytes]
        own.fill_(EMPTY & 0xFF)
        for lane in range(self._layout.lanes):
            counters = self._layout.counters(lane)
            own[counters : counters + COUNTER_BYTES].zero_()
        self._kernels.record.zero_()
        self._kernels.fill()
        if own.is_cuda:
            torch.cuda.synchronize(own.device)

    def run(self, call: TailCall) -> Tensor:
        """One call, on torch's current stream; see `TailTier.run`.

        Raises:
            PeerTimeoutError: an earlier call's wait has expired.
        """
        return self._watch.launch(self._launch, call)

    def failure(self) -> PeerTimeoutError | None:
        """What the record says of a wait that has expired; None if none has."""
        return self._watch.failure()

    def memory(self) -> dict[str, int]:
        """See `TailTier.memory`."""
        workspace = self._layout.lanes * self.geometry.workspace_bytes()
        return {"mailboxes": self._layout.nbytes, "workspace": workspace}

    def _launch(self, call: TailCall) -> Tensor:
        weights, deferred = call.weights, call.deferred
        if weights.up_weight is None:
            raise LookupError("TAIL_FUSION was given a layer without up_weight")
        if deferred is not None:
            # Without the padding, a copy of rows that lie badly has its rows at multiples of 16 bytes.
            deferred = attrs.evolve(deferred, rows=deferred.rows[:, : self._layout.latent_size])
        return self._kernels(
            routed=call.routed if deferred is None else deferred,
            shared=call.shared,
            up_weight=weights.up_weight,
            sharded=weights.sharded,
            norm_weight=weights.norm_weight,
            residual=call.residual,
            up_bias=weights.up_bias,
            routed_scale=weights.routed_scale,
            next_norm_weight=call.next_norm_weight,
            normed=call.normed,
            form=self.form,
            lane=call.lane,
            layer=layer_word(call.layer, call.lane),
        )

    def _addresses(self, lane: int) -> LaneAddresses:
        memory, offset = self._memory, self._context.offset
        return LaneAddresses.of_lane(
            self._layout,
            lane,
            rank=self._context.rank,
            blocks=[pointer + offset for pointer in memory.pointers],
            multicast=memory.multicast_ptr + offset if self.transport == "multicast" else 0,
        )


def transport_of(context: TierContext, memory: CudaMemory) -> str:
    """By what this rank publishes: "multicast" or "peer".

    Raises:
        LookupError: multicast is asked for, and torch's memory has no address for it.
    """
    facts, proposal = context.facts, context.proposal
    # torch may have an address where an operator has ruled multicast out for NCCL alone: that counts here too.
    if memory.multicast_ptr and facts is not None and proposal is not None and multicast_verdict(facts, proposal)[0]:
        return "multicast"
    if context.settings.transport == "multicast":
        raise LookupError("torch gave the decode block no multicast address")
    return "peer"


def room_of(device: torch.device, ranks: int) -> tuple[str, int]:
    """The architecture of a GPU, and the blocks of one an SM that each of so many ranks on it may have resident.

    Raises:
        InputError: no kernel is made for it.
    """
    properties = torch.cuda.get_device_properties(device)
    return arch_of((properties.major, properties.minor)), properties.multi_processor_count // ranks
