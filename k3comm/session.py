"""What the handles of one communicator share: what was agreed, the present step, and the choice that follows."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Protocol, TypeVar

import attrs
import torch.distributed as dist

from k3comm.errors import (
    ClosedError,
    CommunicationTimeoutError,
    InputError,
    NegotiationError,
    PlanError,
    TierUnavailableError,
)
from k3comm.negotiate.agree import Local
from k3comm.negotiate.arm import Armed
from k3comm.negotiate.decide import Decision
from k3comm.negotiate.exchange import Exchange
from k3comm.negotiate.report import Explanation, Obstacle, Report
from k3comm.tiers import UNLIMITED, Agreement, Axes, Tier, Windows, obstacle, plugins, select_tier
from k3comm.tiers.interface import Plan, TailTier, TierContext

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
        name: unique in this process, the same at every start of the same program.
        spec, settings: what was negotiated.
        rank, world_size: place in the group, and its size W.
        device, dtype: of the tensors that the handles take.
        agreement: the agreed tiers, each with the rows that all ranks can take.
        windows: for which token counts each is worth choosing.
        proposal: what was voted on. lanes: micro-batches in flight.
        report: who can do what, and why not.
        handles: by layer index. closed: `close` was called. broken: the error that ended it; "" while it works.
    """

    def __init__(
        self, local: Local, decision: Decision, armed: Armed, exchange: Exchange, context: TierContext, name: str
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
        self.handles: dict[int, Handle] = {}
        self._tiers: dict[Tier, TailTier] = dict(armed.tiers)
        self._memories = armed.memories
        self._exchange = exchange
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
            NegotiationError: on every rank alike, ranks ask for different numbers, or one has no memory; then all is as
                before.
            CommunicationTimeoutError: a rank did not come; the communicator can't go on.
        """
        self._check_open()
        if type(max_tokens) is not int or not 1 <= max_tokens <= UNLIMITED:
            raise InputError(f"max_tokens: {max_tokens!r} given; accepted are whole numbers from 1 to {UNLIMITED}")
        capacities = dict(self.agreement.capacities)
        try:
            least, negated = self._exchange.min([max_tokens, -max_tokens])
            if least != -negated:
                raise NegotiationError(
                    f"reserve: the ranks ask for {least} to {-negated} rows; accepted is one number on every rank"
                )
            for tier, plugin in self._tiers.items():
                capacities[tier] = max(capacities[tier], plugin.reserve(max_tokens))
        except CommunicationTimeoutError as error:
            self.broken = self.broken or f"reserve: {error}"
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

    def close(self) -> None:
        """Ends the communicator; handles raise ClosedError from then on. Local; may be called again."""
        self.closed = True
        for tail in self.handles.values():
            tail.forget_plans()
        for plugin in self._tiers.values():
            plugin.close()
        self._tiers.clear()
        for memory in self._memories:
            memory.release()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else ", ".join(tier.name for tier in self.agreement.capacities)
        return f"<{type(self).__name__} {self.name}, rank {self.rank} of {self.world_size}: {state}>"

    # What the handles use.

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"communicator {self.name} is closed")
        if self.broken:
            raise ClosedError(
                f"communicator {self.name} can't go on: a call failed between its collectives, and what peers did then "
                f"is not known ({self.broken}); close it and negotiate anew, in new processes where a peer is gone"
            )

    def _tier(self, tier: Tier) -> TailTier:
        self._check_open()
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


def _global_ranks(context: TierContext) -> tuple[int, ...]:
    if context.group is None:
        return (0,)
    return tuple(dist.get_process_group_ranks(context.group))
