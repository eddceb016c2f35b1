"""The handle that one layer of an engine holds: plans, and finishes the layer.

Everything that is wrong with a call is found before a peer is involved, so that a mistake raises instead of hanging.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

from k3comm.checks import check_rows, check_vector, checked_weights
from k3comm.errors import (
    CaptureError,
    CommunicationTimeoutError,
    DivergenceError,
    InputError,
    PeerTimeoutError,
    PlanError,
)
from k3comm.kernels.finalize import Deferred, finalize
from k3comm.negotiate.report import Explanation
from k3comm.operations import OUTPUTS, TailArguments
from k3comm.session import Session
from k3comm.streams import EarlySum
from k3comm.tiers import Axes, Tier, plugins
from k3comm.tiers.interface import Plan, TailCall, TailWeights
from k3comm.tiers.separate_reduce import Plugin as SeparateReduce

MAX_PLANS = 16384
"""Plans that one table remembers: twice the rows of a large prefill, about 3 MB."""

DIVERGED = (
    "whether the ranks made different calls is told by K3COMM_RECORD=folder and `k3comm report folder`, or by "
    "K3COMM_CHECK_UNIFORM=1 (docs/doctor.md)"
)
"""What a time-out's traceback adds: a rank that made another call looks like one that is late."""


PARTS = {
    (False, False): "tail",
    (True, False): "finish",
    (False, True): "finish_shared",
    (True, True): "finish_both",
}
"""What a call is in records, by whether the routed sum was made before and whether the shared one was begun."""


class _Plans(dict[int, Plan]):
    """Plans by number of tokens for one pair of graph and decode, made when first asked for."""

    def __init__(self, tail: MoETail, graph: bool, decode: bool) -> None:
        super().__init__()
        self._tail, self._graph, self._decode = tail, graph, decode

    def __missing__(self, num_tokens: int) -> Plan:
        if len(self) >= MAX_PLANS:
            self.clear()
        plan = self[num_tokens] = self._tail._plan(num_tokens, self._graph, self._decode, None, "full", False)
        return plan


class MoETail:
    """Finishes one layer: out = residual + routed_scale * (W_up @ rmsnorm(sum routed)) + b + sum shared.

    Made by `Communicator.moe_tail`. Tensors are on the communicator's device, in the spec's dtype, in any memory
    layout; none is written to, and results never alias them. Not differentiable.
    """

    __slots__ = (
        "_eager",
        "_eager_decode",
        "_graph",
        "_graph_decode",
        "_other",
        "_refusals",
        "_session",
        "_weights",
        "layer_index",
    )

    def __init__(self, session: Session, layer_index: int, weights: TailWeights) -> None:
        self._session = session
        self.layer_index = layer_index
        self._weights = weights
        self._eager, self._eager_decode = _Plans(self, False, False), _Plans(self, False, True)
        self._graph, self._graph_decode = _Plans(self, True, False), _Plans(self, True, True)
        self._other: dict[tuple[object, ...], Plan] = {}
        self._refusals: dict[tuple[str, bool], dict[Tier, str]] = {}

    def __repr__(self) -> str:
        weights = self._weights
        kind = "project" if weights.project is not None else "sharded" if weights.sharded else "whole"
        return f"MoETail(layer_index={self.layer_index}, up={kind!r}, precise={weights.precise})"

    def forget_plans(self) -> None:
        """Drops memoised plans: the agreement has changed. Plans that were handed out stay good."""
        for plans in (self._eager, self._eager_decode, self._graph, self._graph_decode, self._other):
            plans.clear()

    def plan(
        self,
        num_tokens: int,
        graph: bool = False,
        decode: bool = False,
        tier: Tier | None = None,
        output: str = "full",
        next_norm: bool = False,
    ) -> Plan:
        """Chooses a tier for up to `num_tokens` rows. Local, pure, memoised.

        Args:
            num_tokens: rows m, from 0.
            graph, decode: as in `Communicator.step`, whose values a call without plan uses.
            tier: use this one or raise.
            output, next_norm: what the call will ask for.

        Raises:
            TierUnavailableError: `tier`, or `settings.force`, is not agreed or can't honour the arguments.
            InputError: an argument out of range.
        """
        # The common case by nested tables: hashing a tuple of six would double the cost of a call.
        if tier is None and not next_norm and output == "full":
            if graph:
                return self._graph_decode[num_tokens] if decode else self._graph[num_tokens]
            return self._eager_decode[num_tokens] if decode else self._eager[num_tokens]
        key = (num_tokens, graph, decode, tier, output, next_norm)
        plan = self._other.get(key)
        if plan is None:
            plan = self._other[key] = self._plan(num_tokens, graph, decode, tier, output, next_norm)
        return plan

    def lane(self, plan: Plan) -> Tensor | None:
        """Where the experts may write their partial sums, so that the call with this plan copies nothing. Local.

        Give the call the lane's own parts, `tail(lane[:m, :L], lane[:m, L:], ..., plan=plan)` for m rows, both or one
        of them. It is the same memory for all layers, one for each micro-batch (the present step's), and keeps its
        address until `close`, in captured graphs too. So write to it on the stream of the calls, behind the
        communicator's last call; what you write is there until this call returns. A kernel under programmatic dependent
        launch has to wait for its predecessor before it writes.

        Args:
            plan: from `plan`.

        Returns:
            [plan.num_tokens, L + H] in the spec's dtype, rows contiguous, of any content; or None: the plan's tier has
            no such place for so many rows, so give the call tensors of your own. None on every rank or on none.

        Raises:
            PlanError: a plan of another communicator. ClosedError: closed, suspended or broken.
        """
        session = self._session
        session._check_open()
        session._check_plan(plan)
        return session._tiers[plan.tier].lane(plan, session.lane)

    def explain(
        self,
        num_tokens: int,
        *,
        graph: bool = False,
        decode: bool = False,
        output: str = "full",
        next_norm: bool = False,
    ) -> Explanation:
        """The tier for a call of this layer, and the failed condition of every better one."""
        axes = Axes(num_tokens=num_tokens, graph=graph, decode=decode)
        return self._session._explain(axes, self._refused(output, next_norm))

    @torch.no_grad()
    def __call__(
        self,
        routed: Tensor,
        shared: Tensor | EarlySum,
        residual: Tensor | None = None,
        *,
        plan: Plan | None = None,
        output: str = "full",
        next_norm_weight: Tensor | None = None,
    ) -> Any:
        """Finishes the layer. Collective: every rank calls it with equal m and the same arguments.

        Args:
            routed: [m, L], this rank's partial sum of the routed experts.
            shared: [m, H], this rank's partial sum of the shared experts; or what `reduce_shared` returned, and then
                SEPARATE_REDUCE finishes the layer.
            residual: [m, H], the same on every rank, or None; with output="rows" this rank's [ceil(m/W), H].
            plan: from `plan`; by default chosen from m and `Communicator.step`.
            output: "full", or "rows" for this rank's ceil(m/W) finished rows, not gathered, zero at and past m.
            next_norm_weight: [H], in the spec's dtype or fp32: also return the RMSNorm of the result.

        Returns:
            [m, H] on every rank, or [ceil(m/W), H]; with `next_norm_weight` a pair (result, its RMSNorm). m = 0 gives
            empty tensors and talks to nobody.

        Raises:
            InputError, PlanError: before any peer is involved.
            CaptureError: a CUDA graph is being captured and the plan is not for a graph.
            CommunicationTimeoutError, PeerTimeoutError: on CPU, a peer did not come within `settings.poll_deadline`;
                the latter names it. On a GPU our own kernels end such a wait with the process's CUDA context, and the
                next call raises PeerTimeoutError. The communicator can't go on then (ClosedError).
        """
        if torch.compiler.is_compiling():
            return self._traced((routed,), shared, residual, plan, output, next_norm_weight)
        self._session._check_open()
        check_rows("routed", routed, self._session, self._session.spec.latent_size)
        return self._run(self._weights, routed, shared, residual, plan, output, next_norm_weight)

    @torch.no_grad()
    def deferred(
        self,
        rows: Tensor,
        expert_weights: Tensor,
        permuted_index: Tensor,
        shared: Tensor | EarlySum,
        residual: Tensor | None = None,
        *,
        num_tokens: int,
        plan: Plan | None = None,
        output: str = "full",
        next_norm_weight: Tensor | None = None,
    ) -> Any:
        """A call whose routed part is not finalised: the experts' rows are weighted and summed here.

        Args:
            rows: [R, >= L], the experts' outputs; columns past L are padding, R may be 0.
            expert_weights: [m*K] or [m, K], in the spec's dtype or fp32; never cast.
            permuted_index: [m*K] or [m, K], int32: slot t*K+k -> row, or -1 (contributes nothing, reads nothing).
            shared, residual, plan, output, next_norm_weight: as in a call.
            num_tokens: m.

        Returns, raises:
            As a call; with BF16 weights the bits of a call with the finalised sums.
        """
        if torch.compiler.is_compiling():
            if isinstance(shared, Tensor) and num_tokens != shared.shape[0]:
                raise InputError(f"num_tokens: {num_tokens} given; accepted are the {shared.shape[0]} rows of shared")
            given = (rows, expert_weights, permuted_index)
            return self._traced(given, shared, residual, plan, output, next_norm_weight)
        self._session._check_open()
        deferred = self._deferred(rows, expert_weights, permuted_index, num_tokens)
        return self._run(self._weights, deferred, shared, residual, plan, output, next_norm_weight)

    @torch.no_grad()
    def reduce_routed(self, routed: Tensor) -> Tensor:
        """The first half of SEPARATE_REDUCE, to overlap the shared experts: sums the routed partials. Collective.

        Args:
            routed: [m, L], this rank's partial sum.

        Returns:
            [m, L], the sum over the ranks; in the spec's dtype, or fp32 for a precise handle. For `finish`.
        """
        check_rows("routed", routed, self._session, self._session.spec.latent_size)
        plan, tier = self._half(routed.shape[0])
        if self._session._observer is not None:
            self._observe("reduce", self._weights, plan, routed.shape[0], given=False, residual=False)
        if routed.shape[0] == 0:
            return routed.to(self._sum_dtype, copy=True)
        with self._between_collectives():
            return tier.reduce(routed, self._weights)

    @torch.no_grad()
    def reduce_shared(self, shared: Tensor) -> EarlySum:
        """Begins to sum the shared partials, to overlap the routed experts. Collective.

        On CUDA the sum is made on a stream of the communicator's own, behind what the caller's stream holds by now,
        and the call that finishes it puts the caller's stream behind it just before the sum is read. The caller needs
        no stream of its own, and may let go of `shared` at once, or write to it after the finishing call. With
        `settings.overlap_sms` NCCL takes only so many SMs for it. On CPU it is done when this returns.

        Args:
            shared: [m, H], this rank's partial sum.

        Returns:
            What one call of this handle, in this lane, takes in place of `shared`. Beginning another one in the lane,
            `suspend` and `close` drop it.

        Raises:
            InputError: before any peer is involved.
            CaptureError: a CUDA graph is being captured outside of a step for graphs, or an early sum of the lane was
                begun outside of this capture and not finished.
            CommunicationTimeoutError, PeerTimeoutError: as a call.
        """
        if torch.compiler.is_compiling():
            raise InputError("reduce_shared: called in a compiled model; accepted is outside of one")
        session = self._session
        check_rows("shared", shared, session, session.spec.hidden_size)
        rows = shared.shape[0]
        plan, tier = self._half(rows)
        before = session.early.get(session.lane)
        if before is not None:  # nobody has finished it: its memory is let go of once this stream is behind it
            before.settle()
        if session._observer is not None:
            self._observe("reduce_shared", self._weights, plan, rows, given=False, residual=False)
        if before is not None:
            before.drop(f"reduce_shared of layer {self.layer_index}")
        into = torch.empty(rows, session.spec.hidden_size, dtype=self._sum_dtype, device=session.device)
        early = session.early[session.lane] = EarlySum(self, self.layer_index, session.lane, shared, into)
        if rows:
            with self._between_collectives():
                early.begin(lambda: tier.reduce_into(into, shared, self._weights), session.side)
        return early

    def _half(self, rows: int) -> tuple[Plan, SeparateReduce]:
        """The plan and the tier of a half that is reduced by itself."""
        graph, decode = self._session.axes
        plan = self.plan(rows, graph, decode, Tier.SEPARATE_REDUCE)
        self._check_capture(plan)
        tier = self._session._tier(plan.tier)
        if not isinstance(tier, SeparateReduce):
            raise TypeError(f"SEPARATE_REDUCE is served by {type(tier).__name__}")
        return plan, tier

    @torch.no_grad()
    def finish(
        self,
        latent: Tensor,
        shared: Tensor | EarlySum,
        residual: Tensor | None = None,
        *,
        output: str = "full",
        next_norm_weight: Tensor | None = None,
    ) -> Any:
        """The second half: reduces `shared`, norms, projects and adds. Collective; bits as one SEPARATE_REDUCE call.

        Args:
            latent: [m, L], what `reduce_routed` returned.
            shared, residual, output, next_norm_weight: as in a call.

        Returns:
            As a call.
        """
        self._session._check_open()
        check_rows("latent", latent, self._session, self._session.spec.latent_size, self._sum_dtype)
        graph, decode = self._session.axes
        next_norm = next_norm_weight is not None
        plan = self.plan(latent.shape[0], graph, decode, Tier.SEPARATE_REDUCE, output, next_norm)
        return self._run(self._weights, latent, shared, residual, plan, output, next_norm_weight, latent)

    @torch.no_grad()
    def run_operator(
        self,
        *,
        shared: Tensor,
        residual: Tensor | None,
        norm_weight: Tensor | None,
        up_weight: Tensor,
        up_bias: Tensor | None,
        output: str,
        routed: Tensor | None = None,
        rows: Tensor | None = None,
        expert_weights: Tensor | None = None,
        permuted_index: Tensor | None = None,
        next_norm_weight: Tensor | None = None,
    ) -> Any:
        """A call by a torch operator, with the weights that it brings: same shapes as the handle's own."""
        session = self._session
        weights = checked_weights(
            session,
            norm_weight=norm_weight,
            up_weight=up_weight,
            up_bias=up_bias,
            routed_scale=self._weights.routed_scale,
            project=None,
            precise=self._weights.precise,
            sharded=self._weights.sharded,
        )
        if rows is not None and expert_weights is not None and permuted_index is not None:
            deferred = self._deferred(rows, expert_weights, permuted_index, shared.shape[0])
            return self._run(weights, deferred, shared, residual, None, output, next_norm_weight)
        if routed is None:
            raise InputError("routed: None given; accepted is a tensor, or rows that are not finalised")
        check_rows("routed", routed, session, session.spec.latent_size)
        return self._run(weights, routed, shared, residual, None, output, next_norm_weight)

    def _deferred(self, rows: Tensor, expert_weights: Tensor, permuted_index: Tensor, num_tokens: int) -> Deferred:
        session = self._session
        given = Deferred(rows, expert_weights, permuted_index, num_tokens)
        given.check(session.spec.latent_size, session.dtype, session.device)
        return given

    def _traced(
        self,
        given: tuple[Tensor, ...],
        shared: Tensor | EarlySum,
        residual: Tensor | None,
        plan: Plan | None,
        output: str,
        next_norm_weight: Tensor | None,
    ) -> Any:
        """What a compiled model calls: the operator that does all this when it runs."""
        weights = self._weights
        if isinstance(shared, EarlySum):
            raise InputError("shared: an early sum given in a compiled model; accepted is a tensor")
        if plan is not None or weights.up_weight is None:
            what = "plan" if plan is not None else "project"
            raise InputError(f"{what}: given in a compiled model; accepted is None, since the operator chooses inside")
        if next_norm_weight is not None and len(given) > 1:
            raise InputError("next_norm_weight: given to a compiled deferred call; accepted is None")
        name = "moe_tail_deferred" if len(given) > 1 else "moe_tail" if next_norm_weight is None else "moe_tail_norm"
        fixed = (weights.norm_weight, weights.up_weight, weights.up_bias)
        extra = () if next_norm_weight is None else (next_norm_weight,)
        who = (output, self.layer_index, self._session.name)
        return getattr(torch.ops.k3comm, name)(*given, shared, residual, *fixed, *extra, *who)

    def _run(
        self,
        weights: TailWeights,
        routed: Tensor | Deferred,
        shared: Tensor | EarlySum,
        residual: Tensor | None,
        plan: Plan | None,
        output: str,
        next_norm_weight: Tensor | None,
        latent: Tensor | None = None,
    ) -> Any:
        session = self._session
        hidden = session.spec.hidden_size
        rows = routed.num_tokens if isinstance(routed, Deferred) else routed.shape[0]
        early = None
        if isinstance(shared, EarlySum):
            self._check_early(shared)
            early, shared = shared, shared.sum
        else:
            check_rows("shared", shared, session, hidden)
        if shared.shape[0] != rows:
            raise InputError(f"shared: {shared.shape[0]} rows given; accepted are the {rows} of the routed part")
        if output not in OUTPUTS:
            raise InputError(f"output: {output!r} given; accepted are {', '.join(map(repr, OUTPUTS))}")
        out_rows = rows if output == "full" else -(-rows // session.world_size)
        if residual is not None:
            check_rows("residual", residual, session, hidden)
            if residual.shape[0] != out_rows:
                raise InputError(
                    f"residual: {residual.shape[0]} rows given; accepted are {out_rows} "
                    f"({rows} tokens, {session.world_size} ranks, output={output!r})"
                )
        if next_norm_weight is not None:
            check_vector("next_norm_weight", next_norm_weight, hidden, session)
        given = plan is not None and latent is None
        plan = self._check_or_make_plan(plan, rows, output, next_norm_weight is not None, early)
        deferred = None
        if isinstance(routed, Deferred):
            if rows and session._tiers[plan.tier].takes_deferred():
                deferred, routed = routed, shared.new_empty(rows, 0)
            else:
                routed = finalize(routed, session.spec.latent_size)
        if session._observer is not None:
            part = PARTS[latent is not None, early is not None]
            self._observe(part, weights, plan, rows, given=given, residual=residual is not None)
        if rows == 0:
            if early is not None:
                self._use(early)
            empty = shared.new_empty(0, hidden, dtype=session.dtype)
            return empty if next_norm_weight is None else (empty, empty.clone())
        normed = None if next_norm_weight is None else shared.new_empty(out_rows, hidden, dtype=session.dtype)
        call = TailCall(
            routed=routed,
            shared=shared,
            residual=residual,
            plan=plan,
            weights=weights,
            next_norm_weight=next_norm_weight,
            normed=normed,
            latent=latent,
            shared_ready=None if early is None else early.join,
            deferred=deferred,
            lane=session.lane,
            layer=self.layer_index,
        )
        tier = session._tier(plan.tier)
        if early is not None:
            self._use(early)
        elif session.early and plan.tier is not Tier.SEPARATE_REDUCE:
            # Its kernels may fill the GPU and wait for peers whose part of an early sum is kept out by that.
            for other in session.early.values():
                other.settle()
        try:
            with self._between_collectives():
                out = tier.run(call)
        except BaseException:
            if early is not None:  # the side stream may be at its memory still
                with suppress(RuntimeError):
                    early.join()
            raise
        return out if normed is None else (out, normed)

    @contextmanager
    def _between_collectives(self) -> Iterator[None]:
        """Once a call has begun to talk, an error ends the communicator: peers may be at another collective by now.

        An error of the device may be the end of an earlier call, which its tier can tell (`TailTier.failure`). Autocast
        would round what a tier keeps in fp32.
        """
        kind = self._session.device.type
        try:
            if torch.is_autocast_enabled(kind):
                with torch.autocast(kind, enabled=False):
                    yield
            else:
                yield
        except BaseException as error:
            failure = self._session._failure_behind(error)
            ended = failure or error
            if isinstance(ended, PeerTimeoutError | CommunicationTimeoutError):
                ended.add_note(DIVERGED)
            self._session.broken = self._session.broken or f"{type(ended).__name__}: {ended}"
            if failure is not None:
                raise failure from error
            raise

    def _observe(self, part: str, weights: TailWeights, plan: Plan, rows: int, *, given: bool, residual: bool) -> None:
        """Tells the observer of a call before it talks. A comparison that fails half-way ends the communicator."""
        session = self._session
        if session._observer is None:
            return
        project = "project" if weights.project is not None else ""
        try:
            session._observer(
                part=part,
                layer=self.layer_index,
                num_tokens=rows,
                graph=plan.graph,
                decode=plan.decode,
                output=plan.output,
                next_norm=plan.next_norm,
                residual=residual,
                lane=session.lane,
                norm=weights.norm_weight is not None,
                bias=weights.up_bias is not None,
                up=(f"{project}-sharded" if project else "sharded") if weights.sharded else project or "whole",
                precise=weights.precise,
                scale=weights.routed_scale,
                capture=self._capturing,
                tier=plan.tier.name,
                by=f"{'plan-' if given else ''}{'forced' if plan.forced else 'selected'}",
            )
        except DivergenceError:  # raised alike everywhere, before any peer was involved
            raise
        except BaseException as error:
            session.broken = session.broken or f"{type(error).__name__}: {error}"
            raise

    @property
    def _capturing(self) -> bool:
        return self._session._capturing()

    def _check_capture(self, plan: Plan) -> None:
        if not plan.graph and self._capturing:
            raise CaptureError(
                "a CUDA graph is being captured, and the plan is not for a graph; capture inside "
                "comm.step(graph=True), so that every rank chooses as it will at replay"
            )

    def _check_early(self, early: EarlySum) -> None:
        """Raises InputError or CaptureError if this call can't finish an early sum; names its state."""
        what = f"shared: the early sum of layer {early.layer}"
        if early.owner is not self:
            raise InputError(f"{what} given to layer {self.layer_index}; accepted is one of the same handle")
        if early.state != "open":
            raise InputError(f"{what} was {early.state}; accepted is one that is open, once")
        if early.lane != self._session.lane:
            raise InputError(f"{what} was begun in lane {early.lane}; accepted is lane {self._session.lane}'s own")
        early.check_joinable()

    def _use(self, early: EarlySum) -> None:
        """An early sum is given to one call, which is about to talk."""
        early.state = "used"
        self._session.early.pop(early.lane, None)

    def _check_or_make_plan(
        self, plan: Plan | None, rows: int, output: str, next_norm: bool, early: EarlySum | None
    ) -> Plan:
        session = self._session
        if plan is None:
            plan = self.plan(rows, *session.axes, None if early is None else Tier.SEPARATE_REDUCE, output, next_norm)
        else:
            session._check_plan(plan)
            if early is not None and plan.tier is not Tier.SEPARATE_REDUCE:
                raise PlanError(f"plan: {plan.tier.name} given with an early sum; accepted is SEPARATE_REDUCE or none")
            if rows > plan.num_tokens:
                raise PlanError(f"plan: made for up to {plan.num_tokens} rows, called with {rows}")
            if (plan.output, plan.next_norm) != (output, next_norm):
                raise PlanError(
                    f"plan: made for output={plan.output!r}, next_norm={plan.next_norm}; "
                    f"called with output={output!r}, next_norm={next_norm}"
                )
            why = self._refused(output, next_norm).get(plan.tier)
            if why is not None:
                raise PlanError(f"plan: {plan.tier.name} can't serve layer {self.layer_index}: {why}")
        self._check_capture(plan)
        return plan

    def _plan(
        self, num_tokens: int, graph: bool, decode: bool, tier: Tier | None, output: str, next_norm: bool
    ) -> Plan:
        session = self._session
        session._check_open()
        if tier is not None and not isinstance(tier, Tier):
            raise InputError(f"tier: {tier!r} given; accepted are None and members of k3comm.Tier")
        axes = Axes(num_tokens=num_tokens, graph=graph, decode=decode)
        force = tier if tier is not None else session.settings.force
        force = force if isinstance(force, Tier) else None
        return Plan(
            num_tokens=num_tokens,
            graph=graph,
            decode=decode,
            tier=session._choose(axes, self._refused(output, next_norm), force),
            forced=force is not None,
            output=output,
            next_norm=next_norm,
            communicator=session._identity,
        )

    def _refused(self, output: str, next_norm: bool) -> dict[Tier, str]:
        """The agreed tiers that can't honour this layer's and the call's arguments, and why."""
        key = (output, next_norm)
        if key not in self._refusals:
            arguments = TailArguments(
                sharded=self._weights.sharded,
                projected=self._weights.project is not None,
                precise=self._weights.precise,
                output=output,
                next_norm=next_norm,
            )
            session, found = self._session, {}
            for tier in session.agreement.capacities:
                why = plugins()[tier].refusal(arguments, session.proposal)
                if why is not None:
                    found[tier] = why
            self._refusals[key] = found
        return self._refusals[key]

    @property
    def _sum_dtype(self) -> torch.dtype:
        """Of what `reduce_routed` and `reduce_shared` return."""
        return torch.float32 if self._weights.precise else self._session.dtype
