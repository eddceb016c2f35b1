"""What the handles of one communicator share: what was agreed, the present step, and the choice that follows."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TypeVar

import torch.distributed as dist

from k3comm.errors import ClosedError, PlanError, TierUnavailableError
from k3comm.negotiate.agree import Local
from k3comm.negotiate.decide import Decision
from k3comm.negotiate.report import Explanation, Obstacle, Report
from k3comm.tiers import Agreement, Axes, Tier, Windows, obstacle, plugins, select_tier
from k3comm.tiers.interface import Plan, TailTier, TierContext

_serials = itertools.count()
_Self = TypeVar("_Self", bound="Session")


class Session:
    """An agreement at work. `Communicator` is the one that engines make; its handles see this much of it.

    Attributes:
        name: unique in this process, the same at every start of the same program.
        spec, settings: what was negotiated.
        rank, world_size: place in the group, and its size W.
        device, dtype: of the tensors that the handles take.
        agreement: the agreed tiers, each with the rows that all ranks can take.
        windows: for which token counts each is worth choosing.
        axes: the present step's (graph, decode); both False outside a step.
        report: who can do what, and why not.
    """

    def __init__(self, local: Local, decision: Decision, context: TierContext, name: str) -> None:
        self.name = name
        self.spec = local.spec
        self.settings = local.settings
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
            spec=local.spec,
            layout=local.layout,
            settings=local.settings,
            windows=local.choice.windows,
            windows_warning=local.choice.warning,
            decision=decision,
            numerics={tier: plugin.numerics for tier, plugin in present.items()},
        )
        self.axes = (False, False)
        self._identity = (name, next(_serials))
        self._closed = False
        self._layers: set[int] = set()
        self._tiers: dict[Tier, TailTier] = {}
        for tier in self.agreement.capacities:
            self._tiers[tier] = present[tier]()
            self._tiers[tier].prepare(context)

    @contextmanager
    def step(self, *, graph: bool = False, decode: bool = False) -> Iterator[None]:
        """Sets, once a forward, the axes that a tensor's shape does not show; the same on every rank.

        Args:
            graph: the forward is captured into, or replayed from, a CUDA graph.
            decode: every row is a decode or draft-verify row.
        """
        self._check_open()
        Axes(num_tokens=0, graph=graph, decode=decode)  # validates
        before, self.axes = self.axes, (graph, decode)
        try:
            yield
        finally:
            self.axes = before

    def explain(self, num_tokens: int, *, graph: bool = False, decode: bool = False) -> Explanation:
        """The tier for a forward, and the failed condition of every better one, for a tail without extras.

        `MoETail.explain` also counts what its own arguments exclude.
        """
        return self._explain(Axes(num_tokens=num_tokens, graph=graph, decode=decode), {})

    def close(self) -> None:
        """Ends the communicator; handles raise ClosedError from then on. May be called again."""
        self._closed = True
        self._tiers.clear()

    def __enter__(self: _Self) -> _Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else ", ".join(tier.name for tier in self.agreement.capacities)
        return f"<{type(self).__name__} {self.name}, rank {self.rank} of {self.world_size}: {state}>"

    # What the handles use.

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"communicator {self.name} is closed")

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


def _global_ranks(context: TierContext) -> tuple[int, ...]:
    if context.group is None:
        return (0,)
    return tuple(dist.get_process_group_ranks(context.group))
