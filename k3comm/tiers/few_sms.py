"""A second NCCL communicator of a group's ranks, whose kernels take few SMs: for a sum that runs beside a GEMM.

NCCL runs a collective on as many blocks (CTAs), one an SM, as it takes to be fast alone, and a GEMM beside it loses
those SMs. How many is fixed when a communicator is made (`ncclConfig_t.maxCTAs`, NCCL 2.17), so the few need one of
their own. It is made as torch makes a group's, from the same public class, but belongs to no registered group: then
its name in the store is the one that the ranks voted on, whatever other groups a process has made, and
`destroy_process_group` and bound devices (which make torch split the default group, with all its ranks) don't touch it.

Rejected: NCCL_MAX_CTAS (it holds for every communicator of the process); `dist.new_group` (its name counts the groups
of this process, so one more on one rank is a hang); `split_group` (experimental, needs a device bound at init).
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, PrefixStore, Store

from k3comm.errors import InputError

OVERRIDES = ("NCCL_MAX_CTAS", "NCCL_MIN_CTAS")
"""Variables that NCCL puts before what a communicator is made with (NCCL's documentation of ncclConfig_t)."""


class FewSMs:
    """The collectives of `tiers.library.Collectives` that a single sum needs, on a few SMs. On the current stream.

    Making one is local; NCCL connects in the first collective. Inside NCCL the group's own time-out holds.

    Args:
        group: whose ranks these are; with NCCL on CUDA.
        device: this rank's.
        sms: blocks of a kernel at most, from 1.
        store: of the job; `key` makes the place in it that only these ranks use, once.

    Raises:
        InputError: this torch's NCCL can't limit them.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, sms: int, store: Store, key: str) -> None:
        nccl: Any = getattr(dist, "ProcessGroupNCCL", None)
        options: Any = None if nccl is None else nccl.Options()
        if not hasattr(getattr(options, "config", None), "max_ctas"):
            raise InputError(
                f"overlap_sms: {sms} given; accepted is off, since this torch's NCCL can't limit the SMs of a "
                "communicator (NCCL 2.17 can)"
            )
        options.config.max_ctas = sms
        options.config.min_ctas = 1
        for name, value in (("group_name", key), ("global_ranks_in_group", dist.get_process_group_ranks(group))):
            with contextlib.suppress(AttributeError):  # for torch's own diagnostics, not in every version
                setattr(options, name, value)
        own: Any = group._get_backend(device)
        with contextlib.suppress(AttributeError, RuntimeError):  # a backend that is wrapped may show no options
            options._timeout = own.options._timeout
        self._size = dist.get_world_size(group)
        self._process = os.getpid()
        self._backend: Any = nccl(PrefixStore(key, store), dist.get_rank(group), self._size, options)

    def all_reduce(self, x: Tensor) -> None:
        """Sums x over the ranks, in place."""
        options = AllreduceOptions()
        options.asyncOp = False
        _wait(self._backend.allreduce([x], options))

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x, [W, *x.shape]."""
        x = x.contiguous()
        out = x.new_empty(self._size * x.shape[0], *x.shape[1:])
        options = AllgatherOptions()
        options.asyncOp = False
        _wait(self._backend._allgather_base(out, x, options))
        return out.view(self._size, *x.shape)

    def close(self) -> None:
        """Ends it, once this rank's work is done. Waits as long as a captured graph that uses it is not let go of."""
        if os.getpid() != self._process:  # a forked child has neither the threads nor the context
            return
        with contextlib.suppress(RuntimeError):  # a context that has ended has nothing left to let go of
            self._backend.abort()


def _wait(work: Any) -> None:
    """Since torch 2.7 a backend that was told asyncOp=False has synchronised with the current stream by itself."""
    if work is not None:
        work.wait()
