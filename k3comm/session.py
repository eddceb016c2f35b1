"""What the handles of one communicator share: what was agreed, the present step, and the choice that follows."""

from __future__ import annotations

import itertools
import os
import re
import sys
import time
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from types import TracebackType
from typing import Any, Protocol, TypeVar

import attrs
import torch
import torch.distributed as dist

from k3comm.errors import (
    CaptureError,
    ClosedError,
    InputError,
    NegotiationError,
    PlanError,
    TierUnavailableError,
)
from k3comm.negotiate.agree import Local
from k3comm.negotiate.arm import Armed
from k3comm.negotiate.decide import Decision
from k3comm.negotiate.farewell import part
from k3comm.negotiate.rearm import rearm
from k3comm.negotiate.report import Explanation, Obstacle, Report
from k3comm.negotiate.watch import WatchedExchange
from k3comm.streams import EarlySum, SideStream, StreamOrder
from k3comm.tiers import UNLIMITED, Agreement, Axes, Tier, Windows, obstacle, plugins, select_tier
from k3comm.tiers.interface import Plan, TailTier, TierContext
from k3comm.uniform import observer_for

CLOSE_SECONDS = 1.0
"""How long `close` waits for this rank's own kernels, which may write to peers, before it says goodbye to them."""

NUMBER_DIGITS = 18
"""Of the number in a default name, at most: it travels in a cell of the vote, and what is counted on from it too."""

_serials = itertools.count()
_sessions: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()
_Self = TypeVar("_Self", bound="Session")


@attrs.frozen(eq=False)
class _Step:
    """What `Session.step` sets."""

    session: Session | None
    axes: tuple[bool, bool]
    lane: int


_OUTSIDE = _Step(None, (False, False), 0)
_steps: ContextVar[tuple[_Step, ...]] = ContextVar("k3comm steps", default=())


class Handle(Protocol):
    """What a session asks of its handles."""

    def forget_plans(self) -> None:
        """Drops memoised plans: the agreement has changed."""


class Session:
    """An agreement at work. `Communicator` is the one that engines make; its handles see this much of it.

    Attributes:
        name: unique in this process, the same on all ranks, and at every start of the same program.
        spec, settings: what was negotiated.
        rank, world_size: place in the group, and its size W.
        device, dtype: of the tensors that the handles take.
        agreement: the agreed tiers, each with the rows that all ranks can take.
        windows: for which token counts each is worth choosing.
        proposal: what was voted on. lanes: micro-batches in flight.
        report: who can do what, and why not.
        handles: by layer index. closed: `close` was called. broken: the error that ended it; "" while it works.
        suspended: between `suspend` and `resume`.
        streams: which stream calls come from; None where there are none.
        early: shared sums that were begun and not finished, by lane. side: where they are reduced.
    """

    def __init__(
        self, local: Local, decision: Decision, armed: Armed, exchange: WatchedExchange, context: TierContext, name: str
    ) -> None:
        self.name = name
        self.spec = local.proposal.spec
        self.settings = local.proposal.settings
        self.rank = context.rank
        self.world_size = context.world_size
        self.device = context.device
        self.dtype = context.dtype
        self.agreement: Agreement[Tier] = decision.agreement()
        self.windows: Windows[Tier] = local.choice.windows
        present = plugins()
        self.report = Report(
            name=name,
            rank=context.rank,
            global_ranks=_global_ranks(context),
            facts=local.facts,
            spec=local.proposal.spec,
            layout=local.proposal.layout,
            settings=local.proposal.settings,
            windows=local.choice.windows,
            windows_warning=local.choice.warning,
            decision=decision,
            numerics={tier: plugin.numerics for tier, plugin in present.items()},
        )
        self.proposal = local.proposal
        self.lanes = local.proposal.lanes
        self._identity = (name, next(_serials))
        self.closed = False
        self.broken = ""
        self.suspended = False
        self.streams = StreamOrder.of(context.device, self._capturing)
        self.side = SideStream.of(context.device, self._capturing)
        self.early: dict[int, EarlySum] = {}
        self.handles: dict[int, Handle] = {}
        self._tiers: dict[Tier, TailTier] = dict(armed.tiers)
        self._memories = armed.memories
        self._exchange = exchange
        self._contexts = armed.contexts
        self._group = context.group
        self._process = os.getpid()
        group = "" if context.group is None else context.group.group_name
        self._farewell = f"k3comm/close/{group}/{decision.serial}"
        self._observer = observer_for(self.report, exchange)
        _sessions[name] = self

    @contextmanager
    def step(self, *, graph: bool = False, decode: bool = False, lane: int = 0) -> Iterator[None]:
        """Sets, once a forward, the axes that a tensor's shape does not show; the same on every rank.

        Args:
            graph: the forward is captured into, or replayed from, a CUDA graph.
            decode: every row is a decode or draft-verify row.
            lane: the micro-batch, from 0; two that are in flight at once need a lane each in the tiers over shared
                memory. Tiers over a library share the group's one order of collectives whatever the lane.
        """
        self._check_open()
        Axes(num_tokens=0, graph=graph, decode=decode)  # validates
        if type(lane) is not int or not 0 <= lane < self.lanes:
            raise InputError(f"lane: {lane!r} given; accepted are 0 to {self.lanes - 1} (lanes={self.lanes})")
        mine = _Step(self, (graph, decode), lane)
        _steps.set((*_steps.get(), mine))
        try:
            yield
        finally:
            # By identity, not by position: steps that are left out of order (generators) leave nothing behind.
            _steps.set(tuple(step for step in _steps.get() if step is not mine))

    @property
    def axes(self) -> tuple[bool, bool]:
        """The present step's (graph, decode) in this thread or task; both False outside a step."""
        return self._step.axes

    @property
    def lane(self) -> int:
        """The present step's micro-batch; 0 outside a step."""
        return self._step.lane

    @property
    def _step(self) -> _Step:
        for step in reversed(_steps.get()):
            if step.session is self:
                return step
        return _OUTSIDE

    def explain(self, num_tokens: int, *, graph: bool = False, decode: bool = False) -> Explanation:
        """The tier for a forward, and the failed condition of every better one, for a tail without extras.

        `MoETail.explain` also counts what its own arguments exclude.
        """
        return self._explain(Axes(num_tokens=num_tokens, graph=graph, decode=decode), {})

    def reserve(self, max_tokens: int) -> None:
        """Makes room for `max_tokens` rows in every tier that stages them. Collective, outside forwards.

        The only way in which anything grows. What is replaced stays mapped, since captured graphs and plans in flight
        still use it. Equal `max_tokens` on every rank; it votes as `negotiate` did, within `settings.vote_deadline`.

        Raises:
            InputError: not a whole number from 1. CaptureError: a graph is being captured.
            NegotiationError: on every rank alike, ranks ask for different numbers, one has no memory, or some are in
                another collective method; then all is as before.
            CommunicationTimeoutError: a rank did not come; the communicator can't go on.
        """
        self._check_open()
        if type(max_tokens) is not int or not 1 <= max_tokens <= UNLIMITED:
            raise InputError(f"max_tokens: {max_tokens!r} given; accepted are whole numbers from 1 to {UNLIMITED}")
        capacities = dict(self.agreement.capacities)
        try:
            with self._exchange.together("reserve", self.name):
                least, negated = self._exchange.at("the number of rows").min([max_tokens, -max_tokens])
                if least != -negated:
                    raise NegotiationError(
                        f"reserve: the ranks ask for {least} to {-negated} rows; accepted is one number on every rank"
                    )
                for tier, plugin in self._tiers.items():
                    capacities[tier] = max(capacities[tier], plugin.reserve(max_tokens))
        except NegotiationError:
            raise
        except BaseException as error:  # half-way: what peers did then is not known
            self.broken = self.broken or f"reserve: {type(error).__name__}: {error}"
            raise
        self.agreement = Agreement(capacities)
        for tail in self.handles.values():
            tail.forget_plans()

    def memory(self) -> dict[str, int]:
        """Bytes of this rank's shared memory by owner, and the multicast objects in use (a count)."""
        self._check_open()
        found = {
            f"{tier.name}: {what}": nbytes
            for tier, plugin in self._tiers.items()
            for what, nbytes in plugin.memory().items()
        }
        return {**found, "multicast objects": sum(memory.multicast_objects for memory in self._memories)}

    def use_stream(self, stream: Any) -> None:
        """Moves the communicator's calls to another CUDA stream, which waits for what the one before holds by now.

        All calls come from one stream: at first that of the first call, whichever it is. A call from another one raises
        InputError before any peer is involved. Captures have streams of their own, where nothing is checked:
        `streams.captured` counts them.

        Args:
            stream: a torch.cuda.Stream.

        Raises:
            InputError: not a stream, or the communicator is on CPU. CaptureError: a graph is being captured.
        """
        self._check_open()
        if self.streams is None:
            raise InputError(f"stream: {stream!r} given; accepted is none, since {self.device} has no streams")
        self.streams.use(stream)

    def suspend(self) -> None:
        """Puts the communicator to sleep: until `resume` every use raises ClosedError. Local; may be called again.

        For engines that put their memory aside. Call it on every rank, outside forwards; no graph may run until
        `resume`. Shared memory stays mapped where it is, since captured graphs hold its addresses; what is in it need
        not survive.

        Raises:
            ClosedError: closed, or broken. CaptureError: a graph is being captured.
            PeerTimeoutError: on a GPU, a wait of an earlier call has expired; names the rank.
        """
        if self.suspended and not self.closed:
            return
        self._check_open()
        self._check_no_capture("suspend")
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except RuntimeError as error:
                failure = self._failure_behind(error)
                ended = failure or error
                self.broken = f"suspend: {type(ended).__name__}: {ended}"
                if failure is not None:
                    raise failure from error
                raise
        self.suspended = True
        self._drop_early("suspend()")
        for tail in self.handles.values():
            tail.forget_plans()

    def resume(self) -> None:
        """Ends `suspend`. Collective, outside forwards.

        Mailboxes, counters and signal pads start anew at the same addresses, and every tier checks itself again, with
        votes between. The agreement stays as it is, so captured graphs do too.

        Raises:
            NegotiationError: on every rank alike: a rank is not suspended, or can't do its part. Who was suspended
                still is, and `resume` may be called again.
            CommunicationTimeoutError: on every rank alike, a rank did not come; the communicator can't go on.
            ClosedError: closed, or broken. CaptureError: a graph is being captured.
        """
        self._check_alive()
        self._check_no_capture("resume")
        try:
            rearm(self._tiers, self._contexts, self._exchange, suspended=self.suspended, name=self.name)
        except NegotiationError:
            raise
        except BaseException as error:  # half-way: what peers did then is not known
            self.broken = self.broken or f"resume: {error}"
            raise
        self.suspended = False

    def close(self) -> None:
        """Ends the communicator; handles raise ClosedError from then on. May be called again.

        Collective in so far as it waits for the other ranks to close too, a second at most, so that nobody still uses
        this rank's memory; then lets go of everything whatever they do. Without waiting where the group is destroyed,
        a call has failed, or the exchange has no store. No group's collective is involved, and a peer that is gone is
        no error. No graph that uses the communicator may run any more. In a forked child it is local.
        """
        if self.closed:
            return
        self.closed = True
        for tail in self.handles.values():
            tail.forget_plans()
        if self.device.type == "cuda" and not self.broken:
            mine = None if self.streams is None else self.streams.stream
            side = None if self.side is None else self.side.stream
            _wait_idle([torch.cuda.current_stream(self.device), *filter(None, [mine, side])], CLOSE_SECONDS)
        self._drop_early("close()")
        store = self._exchange.store
        is_rank = os.getpid() == self._process  # a forked child must not speak for its parent
        if is_rank and store is not None and self.world_size > 1 and not self.broken and _is_registered(self._group):
            part(store, self._farewell, self.world_size)
        with ExitStack() as stack:  # all of it, also after an error; last in, first out
            if self._observer is not None:
                stack.callback(self._observer.close)
            for memory in self._memories:
                stack.callback(memory.release)
            for plugin in self._tiers.values():
                stack.callback(plugin.close)
        self._tiers.clear()

    def __del__(self) -> None:
        # No more than a word: peers may be anywhere. Memory goes with the last tensor that refers to it.
        if not getattr(self, "closed", True) and self._memories and not sys.is_finalizing():
            warnings.warn(f"{self!r} was never closed", ResourceWarning, stacklevel=2, source=self)

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", ".join(tier.name for tier in self.agreement.capacities)
        state = "closed" if self.closed else f"suspended, {state}" if self.suspended else state
        return f"<{type(self).__name__} {self.name}, rank {self.rank} of {self.world_size}: {state}>"

    # What the handles use.

    def _check_open(self) -> None:
        self._check_alive()
        if self.suspended:
            raise ClosedError(f"communicator {self.name} is suspended; resume() on every rank makes it usable again")

    def _check_alive(self) -> None:
        if self.closed:
            raise ClosedError(f"communicator {self.name} is closed")
        if self.broken:
            raise ClosedError(
                f"communicator {self.name} can't go on: a call failed between its collectives, and what peers did then "
                f"is not known ({self.broken}); close it and negotiate anew, in new processes where a peer is gone"
            )

    def _failure_behind(self, error: BaseException) -> Exception | None:
        """What a tier's earlier call on the device left behind, if that may be why `error` was raised; else None."""
        if self.device.type == "cpu" or not isinstance(error, RuntimeError):
            return None
        failure = next(filter(None, (plugin.failure() for plugin in self._tiers.values())), None)
        return None if type(failure) is type(error) else failure

    def _capturing(self) -> bool:
        """Whether the current stream is captured: what a call asks the device first, so what first tells of its end.

        The streams ask here too: whoever is first names the rank that is missing.
        """
        if self.device.type == "cpu":
            return False
        try:
            return torch.cuda.is_current_stream_capturing()
        except RuntimeError as error:
            failure = self._failure_behind(error)
            if failure is None:
                raise
            self.broken = self.broken or f"{type(failure).__name__}: {failure}"
            raise failure from error

    def _check_no_capture(self, what: str) -> None:
        if self._capturing():
            raise CaptureError(f"{what}: a CUDA graph is being captured; accepted is outside of captures")

    def _drop_early(self, why: str) -> None:
        """Lets go of shared sums that were begun and not finished. The device is idle."""
        for early in self.early.values():
            early.drop(why)
        self.early.clear()

    def _tier(self, tier: Tier) -> TailTier:
        """The tier for a call that is about to be made."""
        self._check_open()
        if self.streams is not None:
            self.streams.check()
        return self._tiers[tier]

    def _choose(self, axes: Axes, refused: dict[Tier, str], force: Tier | None) -> Tier:
        """The tier for `axes`, given why some can't serve the call; a tier by name is used or raises."""
        if force is None:
            return select_tier(axes=axes, agreement=self.agreement.without(refused), windows=self.windows)
        why = refused.get(force)
        if force not in self.agreement:
            why = f"not agreed: {self.report.decision.refusal(force)}"
        elif why is None and axes.num_tokens > self.agreement.capacities[force]:
            why = f"{axes.num_tokens} tokens exceed the {self.agreement.capacities[force]} that all ranks can take"
        if why is not None:
            raise TierUnavailableError(f"{force.name}: {why}")
        return force

    def _explain(self, axes: Axes, refused: dict[Tier, str]) -> Explanation:
        self._check_open()
        force = self.settings.force if isinstance(self.settings.force, Tier) else None
        chosen = self._choose(axes, refused, force)
        obstacles = []
        for tier in Tier:
            if tier >= chosen:
                break
            why = refused.get(tier) or obstacle(tier, axes, self.agreement, self.windows)
            if tier not in self.agreement:
                why = f"not agreed: {self.report.decision.refusal(tier)}"
            obstacles.append(Obstacle(tier, why or f"{chosen.name} is forced"))
        return Explanation(
            tier=chosen,
            forced=force is not None,
            axes=f"{axes.num_tokens} tokens, graph={axes.graph}, decode={axes.decode}",
            obstacles=tuple(obstacles),
        )

    def _check_plan(self, plan: Plan) -> None:
        if not isinstance(plan, Plan):
            raise PlanError(f"plan: {plan!r} given; accepted is what MoETail.plan returns")
        if plan.communicator != self._identity:
            raise PlanError(
                f"plan: made by communicator {plan.communicator[0]}, given to {self.name}; "
                "accepted are plans of the same communicator"
            )


def check_name(name: str | None) -> None:
    """Refuses, with InputError, a name that is no text or that an open communicator of this process has."""
    if name is None:
        return
    if not isinstance(name, str) or not name.strip():
        raise InputError(f"name: {name!r} given; accepted is a text that is not empty")
    other = _sessions.get(name)
    if other is not None and not other.closed:
        raise InputError(f"name: {name!r} given; accepted are names that no open communicator of this process has")


def free_number(prefix: str) -> int:
    """The number from which on no open communicator of this process is called `prefix` and a number.

    Not the first free one: the ranks take the largest of what they say, and it has to be free on each of them.

    Raises:
        InputError: a name with a number so large is open that none can follow.
    """
    least = 0
    for reference in _sessions.valuerefs():
        session = reference()
        if session is None or session.closed or not session.name.startswith(prefix):
            continue
        digits = session.name.removeprefix(prefix)
        if re.fullmatch("0|[1-9][0-9]*", digits) is None:
            continue
        if len(digits) > NUMBER_DIGITS or (number := int(digits) + 1) == 10**NUMBER_DIGITS:
            raise InputError(
                f"name: none given while {session.name[:80]!r} is open, after which there is no number; accepted is a "
                "name of the caller's, or to close that one first"
            )
        least = max(least, number)
    return least


def open_session(name: str) -> Session:
    """The open communicator of a name.

    Raises:
        ClosedError: there is none, or it is closed.
    """
    session = _sessions.get(name)
    if session is None or session.closed:
        state = "does not exist, or was collected" if session is None else "is closed"
        raise ClosedError(f"communicator {name!r} {state}; a compiled model needs the one it was built with, open")
    return session


def _wait_idle(streams: Iterable[Any], seconds: float) -> None:
    """Waits until the work of some CUDA streams is done, or has failed, or for so many seconds: a peer may be gone."""
    limit = time.monotonic() + seconds
    with suppress(RuntimeError):  # a context that has ended has no work left
        for stream in streams:
            while not stream.query() and time.monotonic() < limit:
                time.sleep(0.0005)


def _global_ranks(context: TierContext) -> tuple[int, ...]:
    if context.group is None:
        return (0,)
    return tuple(dist.get_process_group_ranks(context.group))


def _is_registered(group: dist.ProcessGroup | None) -> bool:
    """Whether a group is there, and not destroyed."""
    try:
        return group is not None and dist.get_rank(group) >= 0
    except (RuntimeError, ValueError):  # no default group; a group that torch does not know any more
        return False
