"""The one interface that every tier plugs in behind.

A plug-in is a class called `Plugin` in the module named after its enum member. What it says before the vote
(`verdict`, `footprint`) is pure: this rank's own facts only. What it does afterwards gets everything by argument.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import attrs

from k3comm.facts import Facts, Verdict
from k3comm.operations import Proposal, TailArguments
from k3comm.settings import Settings
from k3comm.spec import LatentMoESpec
from k3comm.tiers.tier import Numerics, Tier

if TYPE_CHECKING:
    from threading import Thread

    import torch
    from torch import Tensor
    from torch._C._distributed_c10d import Store
    from torch.distributed import ProcessGroup

    from k3comm.buffers.symmetric import BufferRequest, SymmetricMemory
    from k3comm.kernels.finalize import Deferred
    from k3comm.operations import Proposal

Project = Callable[["Tensor"], "Tensor"]
"""A projection of the engine's own: z [m, L] in the spec's dtype -> [m, H] or, sharded, [m, H/W]."""


@attrs.frozen(kw_only=True, eq=False)
class TierContext:
    """What an agreed tier works with.

    Attributes:
        spec: the layer's shapes.
        settings: the negotiated settings.
        group: the process group of the partial sums; None for one rank.
        rank, world_size: place in the group, and its size W.
        device: where tensors live.
        dtype: torch's name of the spec's dtype.
        proposal: what was voted on, by which `footprint` sized the memory.
        lanes: micro-batches in flight.
        memory, offset: the mapped block that holds what the tier's `footprint` asked for, and where in every rank's
            block it starts; None and 0 for a tier without footprint.
        missing: after a collective of a forward failed on this rank: the ranks that don't report the same soon; empty
            where that can't be told.
        look: called now and then while a collective waits; raises if a peer has given up.
        facts: this rank's own, as its verdict was made from them.
        device_ranks: ranks on one device, where most are: the same on every rank.
        store: gives the group's store; None without a group.
        serial: the communicator's number, on which the ranks have agreed.
        start_thread: (name, work) -> a daemon that the process's exit waits a moment for; None: do the work at once.
    """

    spec: LatentMoESpec
    settings: Settings
    group: ProcessGroup | None
    rank: int
    world_size: int
    device: torch.device
    dtype: torch.dtype
    lanes: int = 1
    memory: SymmetricMemory | None = None
    offset: int = 0
    establish: Callable[[int], SymmetricMemory | str] | None = None
    missing: Callable[[], tuple[int, ...]] | None = None
    look: Callable[[], None] | None = None
    proposal: Proposal | None = None
    facts: Facts | None = None
    device_ranks: int = 1
    store: Callable[[], Store] | None = None
    serial: int = 0
    start_thread: Callable[[str, Callable[[], None]], Thread] | None = None


@attrs.frozen(kw_only=True, eq=False)
class TailWeights:
    """What one layer's handle holds: references, never copies; read when called.

    Attributes:
        norm_weight: g [L], or None for a layer without norm.
        up_weight: W_up [H, L], or this rank's rows [H/W, L] if `sharded`; None with `project`.
        up_bias: b [H], or None.
        routed_scale: factor of the projected routed part.
        project: the engine's own projection, or None.
        precise: only K0 results.
        sharded: whether the projection gives this rank's H/W columns only.
    """

    norm_weight: Tensor | None
    up_weight: Tensor | None
    up_bias: Tensor | None
    routed_scale: float
    project: Project | None
    precise: bool
    sharded: bool


@attrs.frozen(kw_only=True)
class Plan:
    """A choice, made for up to `num_tokens` rows. Made by `MoETail.plan`, never by hand.

    Attributes:
        num_tokens, graph, decode: the axes it was made for.
        tier: what was chosen.
        forced: the tier was asked for by name.
        output, next_norm: the call's arguments that narrowed the choice.
        communicator: whose choice it is: the name and serial number.
    """

    num_tokens: int
    graph: bool
    decode: bool
    tier: Tier
    forced: bool
    output: str
    next_norm: bool
    communicator: tuple[str, int] = attrs.field(repr=False)


@attrs.frozen(kw_only=True, eq=False)
class TailCall:
    """One call of a tail, with m > 0 rows, validated.

    Attributes:
        routed: [m, L], this rank's partial sum. shared: [m, H], likewise.
        residual: [m, H], or [ceil(m/W), H] with output="rows", or None.
        plan: the choice. weights: the layer's.
        next_norm_weight: [H], or None.
        normed: where the next RMSNorm goes, in the result's shape; None without `next_norm_weight`.
        latent: [m, L], the sum of all ranks' routed parts, where it was reduced before; then `routed` is not read.
        shared_ready: puts the current stream behind the reduction of `shared`, where that was begun before: then
            `shared` is the sum of all ranks, without strides, and not to be read before this is called. Else None.
        deferred: what this rank's routed partial sum is still to be made of, for a tier that takes it
            (`TailTier.takes_deferred`); then `routed` is [m, 0].
        lane: the micro-batch, of `TierContext.lanes`. layer: the layer's index, for errors.
    """

    routed: Tensor
    shared: Tensor
    residual: Tensor | None
    plan: Plan
    weights: TailWeights
    next_norm_weight: Tensor | None = None
    normed: Tensor | None = None
    latent: Tensor | None = None
    shared_ready: Callable[[], None] | None = None
    deferred: Deferred | None = None
    lane: int = 0
    layer: int = 0


class TailTier(ABC):
    """A way to finish the layer.

    Class attributes:
        name: the enum member, after which the module is named.
        numerics: the accuracy class.
        transports: what carries the data: of "multicast", "peer", "host", "library".
        opt_in: off unless `settings.enabled` names it.
    """

    name: ClassVar[Tier]
    numerics: ClassVar[Numerics]
    transports: ClassVar[frozenset[str]]
    opt_in: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def verdict(cls, facts: Facts, proposal: Proposal) -> tuple[Verdict, Verdict]:
        """This rank's word before the vote, if the ranks turn out to be on one host, and across hosts. Pure."""

    @classmethod
    @abstractmethod
    def footprint(cls, proposal: Proposal) -> BufferRequest | None:
        """The shared memory it needs; None if none, also where it could not run. Pure, the same on every rank."""

    @classmethod
    @abstractmethod
    def refusal(cls, arguments: TailArguments, proposal: Proposal) -> str | None:
        """Why it can't honour a handle's or a call's arguments, in words; None if it can. Pure, no communication."""

    @abstractmethod
    def prepare(self, context: TierContext) -> None:
        """Compiles, makes views, fills; once, after the vote. Local: a vote of all ranks follows before any call."""

    @abstractmethod
    def self_check(self, context: TierContext) -> Verdict:
        """Runs small data and compares with the reference; collective."""

    @abstractmethod
    def lane(self, plan: Plan, number: int = 0) -> Tensor | None:
        """Where experts may write [routed, shared] without a copy, until the call returns; None if nowhere. Local.

        Args:
            number: the micro-batch, of `TierContext.lanes`.

        Returns:
            [plan.num_tokens, L + H] in the spec's dtype, rows contiguous.
        """

    @abstractmethod
    def run(self, call: TailCall) -> Tensor:
        """The work: [m, H], or [ceil(m/W), H] with output="rows". Fills `call.normed` if it is there."""

    def takes_deferred(self) -> bool:
        """Whether `run` makes the routed partial sum itself where it is not finalised, to the same bits. Once prepared.

        Others are given the finished sum.
        """
        return False

    def failure(self) -> Exception | None:
        """What has ended one of its calls on the device, known only after `run` has returned; None if nothing has.

        Local, and cheap: it may be asked after any error of the device, also one that another tier ran into.
        """
        return None

    def reserve(self, rows: int) -> int:
        """Makes room for `rows` rows; the rows it can take then, 0 if nothing grew. Collective, outside forwards."""
        return 0

    def rearm(self) -> None:  # noqa: B027 - most tiers share no memory
        """Makes what is in its shared memory as `prepare` left it, at the same addresses, outside calls.

        Local: every rank is known to be outside calls, and a vote of all ranks follows before any call.
        """

    def memory(self) -> dict[str, int]:
        """Bytes on this rank by what they are for: its shared memory, and what its kernels have for themselves."""
        return {}

    def close(self) -> None:  # noqa: B027 - most tiers hold nothing
        """Lets go of what it holds. Local."""
