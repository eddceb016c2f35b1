"""What the tiers over torch.distributed share: collectives with a deadline, the epilogue, a self-check.

Gloo on CPU and NCCL on CUDA run the same code. Inputs may have any layout and are never written to.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
)
from torch.distributed.distributed_c10d import _coalescing_manager

from k3comm.buffers.symmetric import BufferRequest
from k3comm.errors import CommunicationTimeoutError, InputError, PeerTimeoutError
from k3comm.facts import Facts, Verdict
from k3comm.kernels import dense
from k3comm.operations import Proposal, TailArguments
from k3comm.tiers.interface import Plan, TailCall, TailTier, TailWeights, TierContext
from k3comm.tiers.self_check import check_sums
from k3comm.tiers.waiting import WaitingEndedError, finished, plain

# torch 2.13 renamed it and warns on every call of the old name.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Collectives:
    """The collectives of one group; only `all_reduce` works in place. `settings.poll_deadline` bounds each on CPU.

    There the operation itself gets that limit too, since gloo holds a process at its exit until its operations have
    ended, by the group's time-out otherwise. Inside NCCL the group's own watchdog decides.
    """

    def __init__(self, context: TierContext) -> None:
        self._context = context
        self._deadline = timedelta(seconds=context.settings.poll_deadline)
        self._bounded = context.device.type == "cpu"

    def all_reduce(self, *tensors: Tensor) -> None:
        """Sums each tensor over the ranks, in place, in the library's own order; several in one grouped call."""
        if self._context.world_size == 1:
            return
        group = self._context.group
        if self._bounded:
            if len(tensors) == 1:
                self._finish("all_reduce", lambda g: g.allreduce(list(tensors), self._options(AllreduceOptions())))
            else:
                options = self._options(AllreduceCoalescedOptions())
                self._finish("grouped all_reduce", lambda g: g.allreduce_coalesced(list(tensors), options))
        elif len(tensors) == 1:
            dist.all_reduce(tensors[0], group=group)
        else:
            # The one way that torch offers to several tensors as one NCCL group call without joining them.
            with _coalescing_manager(group):
                for tensor in tensors:
                    dist.all_reduce(tensor, group=group)

    def all_reduced(self, *partials: Tensor) -> list[Tensor]:
        """The sums of the partials, which stay as they are: copies without strides, which libraries may refuse."""
        sums = [partial.clone(memory_format=torch.contiguous_format) for partial in partials]
        self.all_reduce(*sums)
        return sums

    def all_to_all(self, x: Tensor) -> Tensor:
        """x [W, ...]: slice d goes to rank d. Returns [W, ...]: slice s came from rank s."""
        x = x.contiguous()
        out = torch.empty_like(x)
        if self._bounded:
            self._finish("all_to_all", lambda g: g.alltoall_base(out, x, [], [], self._options(AllToAllOptions())))
        else:
            dist.all_to_all_single(out, x, group=self._context.group)
        return out

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's x, [W, *x.shape]."""
        x = x.contiguous()
        if self._context.world_size == 1:
            return x.unsqueeze(0)
        out = x.new_empty(self._context.world_size * x.shape[0], *x.shape[1:])
        if self._bounded:
            self._finish("all_gather", lambda g: g._allgather_base(out, x, self._options(AllgatherOptions())))
        else:
            _all_gather(out, x, group=self._context.group)
        return out.view(self._context.world_size, *x.shape)

    def _options(self, options: Any) -> Any:
        options.timeout = self._deadline
        return options

    def _finish(self, what: str, start: Callable[[Any], Any]) -> None:
        """Starts an operation of the group and waits for it.

        Raises:
            PeerTimeoutError: it failed, and the store tells which ranks don't say so too.
            CommunicationTimeoutError: it failed.
        """
        seconds, start_time = self._deadline.total_seconds(), time.monotonic()
        failure: Exception | None = None
        try:
            if finished(start(self._context.group), seconds, self._context.look):
                return
        except RuntimeError as error:
            failure = error
        except WaitingEndedError as ended:
            failure = ended
        missing = () if self._context.missing is None else self._context.missing()
        who = f"; {_name_ranks(missing)} can't be reached: late, or gone" if missing else ""
        limit = f"{seconds:g} s (settings.poll_deadline)"
        late = time.monotonic() > start_time + 0.9 * seconds  # gloo's own clock starts a little earlier
        end = f"did not finish within {limit}" if late else f"failed before its {limit}: a peer has given up"
        text = (
            f"{what} of rank {self._context.rank} of {self._context.world_size} {end}, or a peer is gone{who}"
            f"{'' if failure is None else f': {plain(failure)}'}"
        )
        raise (PeerTimeoutError(text, missing) if missing else CommunicationTimeoutError(text)) from failure


def _name_ranks(ranks: Sequence[int]) -> str:
    """As `negotiate.decide.name_ranks`, which tiers don't import."""
    first = ", ".join(map(str, ranks[:-1]))
    return f"ranks {first} and {ranks[-1]}" if first else f"rank {ranks[0]}"


class LibraryTier(TailTier):
    """The common part: says yes, needs no shared memory, and runs `_rows` with collectives at hand."""

    transports: ClassVar[frozenset[str]] = frozenset({"library"})

    _context: TierContext
    _collectives: Collectives

    @classmethod
    def verdict(cls, facts: Facts, proposal: Proposal) -> tuple[Verdict, Verdict]:
        return Verdict.yes(), Verdict.yes()

    @classmethod
    def footprint(cls, proposal: Proposal) -> BufferRequest | None:
        return None

    @classmethod
    def refusal(cls, arguments: TailArguments, proposal: Proposal) -> str | None:
        return None

    def prepare(self, context: TierContext) -> None:
        self._context = context
        self._collectives = Collectives(context)

    def self_check(self, context: TierContext) -> Verdict:
        return check_sums(self, context, min(context.world_size + 1, context.spec.max_tokens))

    def lane(self, plan: Plan, number: int = 0) -> Tensor | None:
        return None

    def run(self, call: TailCall) -> Tensor:
        out = self._tail(call)
        dense.norm_into(call.normed, out, call.next_norm_weight, self._context.spec.rms_eps)
        return out

    @abstractmethod
    def _tail(self, call: TailCall) -> Tensor:
        """The result without the next norm."""

    @property
    def _group_name(self) -> str:
        """torch's name of the group; "" without one."""
        return "" if self._context.group is None else str(self._context.group.group_name)

    @property
    def _rank(self) -> int:
        return self._context.rank

    @property
    def _world_size(self) -> int:
        return self._context.world_size

    def _own_rows(self, num_tokens: int) -> int:
        return -(-num_tokens // self._world_size)

    def _pad_rows(self, x: Tensor) -> Tensor:
        """x [m, n] -> [W, ceil(m/W), n], zeros at the end."""
        rows = self._own_rows(x.shape[0])
        missing = rows * self._world_size - x.shape[0]
        x = torch.nn.functional.pad(x, (0, 0, 0, missing)) if missing else x
        return x.reshape(self._world_size, rows, x.shape[1])

    def _rows_of(self, x: Tensor) -> Tensor:
        """This rank's ceil(m/W) rows of x [m, n], zeros past m. A copy only where rows are missing."""
        rows = self._own_rows(x.shape[0])
        own = x[self._rank * rows : (self._rank + 1) * rows]
        missing = rows - own.shape[0]
        return torch.nn.functional.pad(own, (0, 0, 0, missing)) if missing else own

    def _columns(self) -> slice:
        """This rank's H/W columns of the hidden width."""
        width = self._context.spec.hidden_size // self._world_size
        return slice(self._rank * width, (self._rank + 1) * width)

    def _clear_past(self, rows: Tensor, num_tokens: int) -> Tensor:
        """Zeroes those of this rank's rows that lie at or past m: a residual's padding does not show."""
        first = num_tokens - self._rank * rows.shape[0]
        if first < rows.shape[0]:
            rows[max(first, 0) :] = 0
        return rows

    def _normed(self, sums: Tensor, weights: TailWeights) -> Tensor:
        """The latent sums [m, L] in fp32, normed."""
        return dense.rms_norm(sums, weights.norm_weight, self._context.spec.rms_eps)

    def _project(self, z: Tensor, weights: TailWeights, columns: slice | None = None) -> Tensor:
        """z [m, L] in fp32 -> [m, N] in fp32: all columns that the weights give, or `columns` of a whole W_up."""
        width = self._context.spec.hidden_size // (self._world_size if weights.sharded else 1)
        if weights.project is not None:
            out = weights.project(z.to(self._context.dtype))
            if not isinstance(out, Tensor) or not out.is_floating_point() or out.device != z.device:
                given = f"{out.dtype} on {out.device}" if isinstance(out, Tensor) else type(out).__name__
                raise InputError(f"project: returned {given}; accepted is a floating-point tensor on {z.device}")
            if tuple(out.shape) != (z.shape[0], width):
                raise InputError(
                    f"project: returned {tuple(out.shape)}; accepted is {(z.shape[0], width)} "
                    f"(sharded={weights.sharded})"
                )
            # A copy, since the epilogue adds into what it gets and the callable may keep its result.
            out = (out if columns is None else out[:, columns]).to(torch.float32, copy=True)
            return out
        if weights.up_weight is None:
            raise InputError("up_weight: None given without project; accepted is one of the two")
        weight = weights.up_weight if columns is None else weights.up_weight[columns]
        return dense.project(z, weight, precise=weights.precise)

    def _add_up(self, projected: Tensor, weights: TailWeights, shared: Tensor, residual: Tensor | None) -> Tensor:
        return dense.add_up(projected, weights.routed_scale, weights.up_bias, shared, residual, self._context.dtype)

    @staticmethod
    def _await_shared(call: TailCall) -> None:
        """Before the shared sum is read first: as late as can be, since its reduction may be under way elsewhere."""
        if call.shared_ready is not None:
            call.shared_ready()

    def _finish_sums(self, latent: Tensor, shared: Tensor, call: TailCall) -> Tensor:
        """The end of the all-reduce tiers: complete sums [m, L] and [m, H] on every rank, in any dtype."""
        return self._finish_normed(self._normed(latent.float(), call.weights), shared, call)

    def _finish_normed(self, z: Tensor, shared: Tensor, call: TailCall) -> Tensor:
        """The same from the normed latent sums [m, L], in fp32 or rounded to the spec's dtype."""
        if call.weights.sharded:
            return self._finish_columns(z, shared[:, self._columns()], call)
        if call.plan.output == "full":
            y = self._project(z, call.weights)
            self._await_shared(call)
            return self._add_up(y, call.weights, shared, call.residual)
        y = self._project(self._rows_of(z), call.weights)
        self._await_shared(call)
        out = self._add_up(y, call.weights, self._rows_of(shared), call.residual)
        return self._clear_past(out, call.routed.shape[0])

    def _finish_columns(self, z: Tensor, shared: Tensor, call: TailCall) -> Tensor:
        """Projects and finishes this rank's H/W columns of every row, then gathers columns, or exchanges rows of them.

        Args:
            z: [m, L], fp32, normed, on every rank.
            shared: [m, H/W], the complete shared sum in this rank's columns, in any dtype.
        """
        weights, columns = call.weights, self._columns()
        y = self._project(z, weights, None if weights.sharded else columns)
        self._await_shared(call)
        bias = None if weights.up_bias is None else weights.up_bias[columns]
        if call.plan.output == "full":
            residual = None if call.residual is None else call.residual[:, columns]
            y = dense.add_up(y, weights.routed_scale, bias, shared, residual, self._context.dtype)
            return self._collectives.all_gather(y).transpose(0, 1).reshape(y.shape[0], -1)
        # Own rows of all columns: the residual has them only here, so what it is added to stays in fp32 until then.
        dtype = self._context.dtype if call.residual is None else torch.float32
        y = dense.add_up(y, weights.routed_scale, bias, shared, None, dtype)
        own = self._collectives.all_to_all(self._pad_rows(y)).transpose(0, 1).flatten(1)
        if call.residual is not None:
            own = (own + call.residual).to(self._context.dtype)
        return self._clear_past(own, call.routed.shape[0])
