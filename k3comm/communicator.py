"""The communicator: agrees once with the other ranks, then hands out handles that choose and run, call by call.

spec = k3comm.LatentMoESpec.kimi_k3()
comm = k3comm.Communicator.negotiate(spec, group)         # collective, once, at model construction
tail = comm.moe_tail(layer_index=3, norm_weight=g, up_weight=w)
with comm.step(graph=False, decode=True):                 # once a forward
    out = tail(routed, shared, residual)
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from k3comm.buffers.cuda import CudaMemory
from k3comm.buffers.host import HostMemory
from k3comm.buffers.symmetric import Limit, SymmetricMemory, establish
from k3comm.checks import checked_weights
from k3comm.errors import InputError
from k3comm.moe_tail import MoETail
from k3comm.negotiate.agree import Local, agree, check_force, prepare_local
from k3comm.negotiate.arm import arm
from k3comm.negotiate.clerk import store_of
from k3comm.negotiate.exchange import Exchange, GroupExchange, SoloExchange, check_size
from k3comm.negotiate.report import announce
from k3comm.negotiate.threads import start_thread
from k3comm.negotiate.watch import WatchedExchange
from k3comm.operations import MoETailOp, Operation
from k3comm.session import Session, check_name, free_number
from k3comm.settings import Settings, vote_deadline
from k3comm.spec import LatentMoESpec, ParallelLayout
from k3comm.tiers.interface import Project, TierContext

_made = Counter(communicators=0)
"""Communicators of this process. Ranks agree on the largest of their counts, since each may have made others before."""
_counting = threading.Lock()


class Communicator(Session):
    """One group of ranks that has agreed on what it can do. Made by `negotiate`; a context manager that closes."""

    @classmethod
    def negotiate(
        cls,
        spec: LatentMoESpec,
        group: dist.ProcessGroup | None = None,
        *,
        cpu_group: dist.ProcessGroup | None = None,
        layout: ParallelLayout | None = None,
        settings: Settings | None = None,
        operations: Sequence[Operation] = (MoETailOp(),),
        lanes: int = 1,
        device: torch.device | str | None = None,
        name: str | None = None,
        exchange: Exchange | None = None,
        store: Store | None = None,
    ) -> Communicator:
        """Agrees with the other ranks of `group`. Collective: every member calls it, once, at model construction.

        Args:
            spec: the layer's shapes.
            group: the process group over which the partial sums are added up, given explicitly, in any rank order;
                None for one rank.
            cpu_group: the same ranks with a CPU backend, for the vote; by default the group's own CPU side if it has
                one.
            layout: how the engine spreads the layer; by default tp = the group's size.
            settings: arguments; what they leave out comes from the environment, the windows file, the defaults.
            operations: what will be asked for.
            lanes: micro-batches in flight.
            device: where tensors live; by default the current CUDA device if the group has NCCL, else the CPU.
            name: of the communicator; by default "k3comm-<n>", with the group's name before the number for subgroups.
                The number is the largest that any rank has come to, told in the vote: all ranks have the same, and no
                rank has a communicator of that name open.
            exchange: how to vote, for engines whose control plane is not torch's; by default the group.
            store: a torch.distributed.Store that all these ranks share, by which they learn who is missing and end
                alike; by default the exchange's, or without an exchange the group's.

        Raises:
            InputError: at once, on this process alone: not a member, no group for several ranks, too many ranks.
            NegotiationError: on every rank, with the same text: the ranks differ, one can't take part, or some are in
                another collective method; the group can be used again.
            CommunicationTimeoutError: on every rank, with the same text: a stage did not finish within
                `settings.vote_deadline`, `rendezvous_deadline` or `poll_deadline`, a rank is gone, or one left with an
                error of its own. It names the rank and the stage. The group can't be used again.
        """
        world_size = _check_group(group, exchange, store)
        check_size(world_size)
        rank = 0 if group is None else dist.get_rank(group)
        backends = _backends(group) if group is not None else {}
        new_memory = partial(_new_memory, rank, world_size, group)
        vote_group, vote_problem = _vote_group(group, cpu_group)

        def prepare() -> Local:
            check_name(name)
            least = 0 if name else free_number(_default_name(group))
            if vote_problem:
                raise InputError(vote_problem)
            local = prepare_local(
                spec=spec,
                layout=layout,
                settings=settings,
                operations=operations,
                lanes=lanes,
                device=_device(device, backends),
                backends=backends,
                world_size=world_size,
                name=name or "",
                new_memory=new_memory,
            )
            return attrs.evolve(local, ballot=attrs.evolve(local.ballot, serial=_count(least=least)))

        limit = Limit(vote_deadline(settings), "settings.vote_deadline")
        inner: Exchange = SoloExchange()
        home = None if group is None or world_size == 1 else store_of(group)
        if exchange is not None:
            inner, store = exchange, store or exchange.store
        elif vote_group is not None and world_size > 1:
            inner, store = GroupExchange(vote_group, limit.seconds), store or home
        groups = [one for one in (group, vote_group) if one is not None]
        own_votes = vote_group is None or vote_group is group
        watched = WatchedExchange(
            inner,
            store,
            groups=groups,
            limit=limit,
            home=home,
            votes="none that votes" if own_votes or vote_group is None else f"group {vote_group.group_name}",
            given="none" if store is None or store is home else "one of the caller's",
            own="" if exchange is None else "one of the caller's",
        )
        local: Local | None = None
        comm: Communicator | None = None
        try:
            with watched.together("negotiation"):
                local, decision, _ = agree(
                    prepare,
                    watched.within,
                    rank=rank,
                    world_size=world_size,
                    fallback_deadline=limit.seconds,
                )
                agreed = local.proposal.settings
                voted = watched.within(agreed.vote_deadline)

                def establish_more(nbytes: int) -> SymmetricMemory | str:
                    memory = new_memory(local.device)
                    rendezvous = Limit(agreed.rendezvous_deadline, "settings.rendezvous_deadline")
                    return establish(memory, nbytes, voted, what="the larger block", limit=rendezvous) or memory

                context = TierContext(
                    spec=local.proposal.spec,
                    settings=agreed,
                    group=group,
                    rank=rank,
                    world_size=world_size,
                    device=local.device,
                    dtype=getattr(torch, local.proposal.spec.dtype),
                    lanes=local.proposal.lanes,
                    establish=establish_more,
                    missing=voted.missing,
                    look=voted.look,
                    proposal=local.proposal,
                    facts=local.facts,
                    device_ranks=max(map(len, decision.shared_devices), default=1),
                    store=None if group is None else partial(store_of, group),
                    serial=decision.serial,
                    start_thread=start_thread,
                )
                if local.device.type == "cuda":
                    connect = partial(_connect, group, local.device, world_size)
                    voted.at("connecting the devices").run(connect, meet=True)
                armed = arm(
                    local, decision, voted, lambda memory, offset: attrs.evolve(context, memory=memory, offset=offset)
                )
                decision = decision.armed(armed.failures)
                check_force(agreed, decision)
                _count(decision.serial)  # the peers' numbers are used here too now
                comm = cls(local, decision, armed, voted, context, name or f"{_default_name(group)}{decision.serial}")
        except BaseException:
            if local is not None:
                local.release()
            if comm is not None:  # made, and then not committed
                comm.closed = True
            raise
        with suppress(Exception):  # an engine's log handler; the others have the communicator
            announce(comm.report)
        return comm

    def moe_tail(
        self,
        *,
        layer_index: int,
        norm_weight: Tensor | None = None,
        up_weight: Tensor | None = None,
        up_bias: Tensor | None = None,
        routed_scale: float = 1.0,
        project: Project | None = None,
        precise: bool = False,
        sharded: bool | None = None,
    ) -> MoETail:
        """The handle of one layer. Local; keeps references to the weights and copies nothing.

        Args:
            layer_index: the layer, from 0; each once.
            norm_weight: g [L], in the spec's dtype or fp32; None for a layer without norm.
            up_weight: W_up [H, L], or this rank's rows [H/W, L], in the spec's dtype; None with `project`.
            up_bias: b [H], in the spec's dtype or fp32; added once.
            routed_scale: factor of the projected routed part.
            project: your own projection: z [m, L] in the spec's dtype -> [m, H] or, with `sharded`, [m, H/W].
            precise: only K0 results; excludes `project`.
            sharded: what `project` returns; with `up_weight` its shape says it.

        Raises:
            InputError: names the argument, what was given and what is accepted.
            ClosedError: the communicator is closed.
        """
        self._check_open()
        if type(layer_index) is not int or layer_index < 0:
            raise InputError(f"layer_index: {layer_index!r} given; accepted are whole numbers from 0")
        if layer_index in self.handles:
            raise InputError(f"layer_index: {layer_index} has a handle already; accepted is each index once")
        weights = checked_weights(
            self,
            norm_weight=norm_weight,
            up_weight=up_weight,
            up_bias=up_bias,
            routed_scale=routed_scale,
            project=project,
            precise=precise,
            sharded=sharded,
        )
        tail = self.handles[layer_index] = MoETail(self, layer_index, weights)
        return tail


def _check_group(group: dist.ProcessGroup | None, exchange: Exchange | None, store: Store | None) -> int:
    """The number of ranks; InputError at once if this process can't take part."""
    if exchange is not None and not isinstance(exchange, Exchange):
        raise InputError(f"exchange: {exchange!r} given; accepted is a k3comm.Exchange")
    stores = {"store": store, "exchange.store": None if exchange is None else exchange.store}
    for argument, given in stores.items():
        if given is not None and not isinstance(given, Store):
            raise InputError(f"{argument}: {given!r} given; accepted is a torch.distributed.Store, or None")
    if group is None:
        if exchange is not None and exchange.size > 1:
            raise InputError(
                f"group: None given with an exchange of {exchange.size} ranks; accepted is the process group that "
                "carries the partial sums"
            )
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise InputError(
                f"group: None given in a job of {dist.get_world_size()} ranks; accepted is the explicit process group "
                "over which the partial sums are added up (there is no default; a group of one rank is fine)"
            )
        return 1
    if not isinstance(group, dist.ProcessGroup):
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise InputError("group: this process is not a member of it; accepted are groups that it belongs to")
        raise InputError(f"group: {group!r} given; accepted is a torch.distributed.ProcessGroup")
    try:
        rank = dist.get_rank(group)
    except (ValueError, RuntimeError) as error:
        raise InputError("group: it is destroyed; accepted are groups that torch.distributed knows") from error
    if rank < 0:
        raise InputError("group: this process is not a member of it; accepted are groups that it belongs to")
    if exchange is not None and (exchange.rank, exchange.size) != (dist.get_rank(group), dist.get_world_size(group)):
        raise InputError(
            f"exchange: rank {exchange.rank} of {exchange.size} given for a group in which this process is rank "
            f"{dist.get_rank(group)} of {dist.get_world_size(group)}; accepted is the same place in both"
        )
    return dist.get_world_size(group)


def _vote_group(
    group: dist.ProcessGroup | None, cpu_group: dist.ProcessGroup | None
) -> tuple[dist.ProcessGroup | None, str]:
    """The group that carries the vote, and what is wrong with `cpu_group`: then the vote goes over the other one."""
    if cpu_group is None:
        return group, ""
    ranks = dist.get_process_group_ranks
    with suppress(KeyError, ValueError, RuntimeError):  # destroyed
        if group is not None and isinstance(cpu_group, dist.ProcessGroup) and ranks(cpu_group) == ranks(group):
            return cpu_group, ""
    return group, f"cpu_group: {cpu_group!r} given; accepted is a group of the same ranks in the same order"


def _default_name(group: dist.ProcessGroup | None) -> str:
    """The name of a communicator that was given none, but for its number; the same on all its ranks."""
    key = "" if group is None or group is dist.group.WORLD else f"{group.group_name}-"
    return f"k3comm-{key}"


def _count(used: int | None = None, least: int = 0) -> int:
    """Takes a number for a communicator: `used`, or the next one from `least` that none of this process has had."""
    with _counting:
        number = max(_made["communicators"], least) if used is None else used
        _made["communicators"] = max(_made["communicators"], number + 1)
        return number


def _connect(group: dist.ProcessGroup | None, place: torch.device, world_size: int) -> None:
    """Makes a device's communicator now: NCCL would connect in the first forward otherwise, or in a capture."""
    if group is not None and world_size > 1 and place.type == "cuda":
        dist.all_reduce(torch.zeros(1, device=place), group=group)


def _new_memory(rank: int, world_size: int, group: dist.ProcessGroup | None, device: torch.device) -> SymmetricMemory:
    """Memory that the ranks can share, of the kind for their device."""
    if device.type == "cpu" or group is None:
        return HostMemory(rank, world_size)
    return CudaMemory(rank, world_size, group_name=group.group_name, device=device)


def _backends(group: dist.ProcessGroup) -> dict[str, str]:
    """Backend by device type, such as {"cpu": "gloo", "cuda": "nccl"}."""
    pairs = (one.split(":", 1) for one in dist.get_backend_config(group).split(","))
    return {pair[0]: pair[-1] for pair in pairs}


def _device(device: torch.device | str | None, backends: dict[str, str]) -> torch.device:
    if device is None:
        on_gpu = backends.get("cuda") == "nccl" and torch.cuda.is_available()
        device = "cuda" if on_gpu else "cpu"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device: {device!r} given; accepted is a torch.device or its name ({error})") from None
    if place.type == "cpu":
        return torch.device("cpu")  # without an index, as tensors have it
    if place.type != "cuda":
        raise InputError(f"device: {device!r} given; accepted are cpu and cuda")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0 or (place.index is not None and not 0 <= place.index < count):
        raise InputError(f"device: {device!r} given; {count} CUDA devices are to be had here")
    return torch.device("cuda", torch.cuda.current_device() if place.index is None else place.index)
