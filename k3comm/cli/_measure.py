"""What `demo` measures on its ranks, and how it is judged.

Every rank calls the tiers with its own partial sums, and is the judge of its share of the rows: it draws the other
ranks' partials of those rows once more, so the float64 truth of each row is computed once, by one rank, and without any
communication. What the ranks hand back are sums of errors (`AccuracyMeter`), which the parent adds up.

Random data are those of `reference.random_case`'s distribution, drawn in float32 and in pieces: `random_case` itself
makes all ranks' partials at once, which 4 processes on 2 cores would have to do 4 times over.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from k3comm.cli import _console
from k3comm.cli.tier_map import TierMap, tier_map
from k3comm.communicator import Communicator
from k3comm.errors import K3CommError, TierUnavailableError
from k3comm.kernels import reference
from k3comm.kernels.reference import Accuracy, AccuracyMeter, Bound, Case
from k3comm.moe_tail import MoETail
from k3comm.spec import LatentMoESpec
from k3comm.tiers import Numerics, Tier, plugins

CALLS = (1, 5, 16, 64, 250, 760, 1000, 1000, 1000)
"""Rows of the calls, 4096 together: what the bounds that are pooled over many rows ask for. Few are a multiple of a
number of ranks, so that tiers meet padding."""
ENOUGH_ELEMENTS = 1_000_000
"""Elements after which a share of misrounded ones near 1e-4 is known to a tenth. The other calls are left out where no
bound is pooled over many rows."""
ONE_CALL_ELEMENTS = 100_000
"""Elements from which one call's bias is judged by itself: below, a single misrounded element decides it."""
METER_ROWS = 8
"""Rows compared at once, so that the float64 temporaries stay in the cache."""


@attrs.frozen
class Variant:
    """A tier as a handle runs it."""

    tier: Tier
    precise: bool
    numerics: Numerics

    def __str__(self) -> str:
        return self.tier.name + (" (precise)" if self.precise else "")


FALLBACK = Variant(max(Tier), False, Numerics.K2)
"""SEPARATE_REDUCE, which the other K2 tiers are compared with, and which is itself compared with the plain model."""


@attrs.frozen
class Call:
    """What one rank saw of one call: a digest of the whole result, and the accuracy of its own share of the rows."""

    digest: str
    meter: AccuracyMeter


@attrs.frozen(kw_only=True)
class Measured:
    """What one rank hands back.

    Attributes:
        error: the library's own error; then there is nothing else.
        report: the communicator's, as this rank prints it.
        spans: the map of this communicator's agreement and windows.
        calls: by variant; as many of CALLS as its bounds need and its capacity allows.
        models: the accuracy of a class's plain model in the first calls, where a bound is relative to it.
    """

    error: str = ""
    report: str = ""
    spans: TierMap = attrs.field(factory=dict)
    calls: dict[Variant, list[Call]] = attrs.field(factory=dict)
    models: dict[Numerics, list[AccuracyMeter]] = attrs.field(factory=dict)


def measure(spec: LatentMoESpec, seed: int) -> Measured:
    """One rank's part; collective over the default group.

    An error of the library comes back as a value: it is the same on every rank, and no traceback is wanted.
    """
    try:
        with Communicator.negotiate(spec, dist.group.WORLD) as comm:
            return _measure(comm, _Data(spec, comm.world_size, seed))
    except K3CommError as error:
        return Measured(error=str(error))


def few_calls(spec: LatentMoESpec) -> int:
    """How many of CALLS make ENOUGH_ELEMENTS."""
    rows = itertools.accumulate(CALLS)
    return 1 + sum(total * spec.hidden_size < ENOUGH_ELEMENTS for total in list(rows)[:-1])


def k3_like(spec: LatentMoESpec) -> bool:
    """Whether K1's absolute figures hold; see `reference.bounds_for`."""
    k3 = LatentMoESpec.kimi_k3()
    return (spec.hidden_size, spec.latent_size, spec.dtype) == (k3.hidden_size, k3.latent_size, k3.dtype)


@attrs.frozen
class _Data:
    """The layer's weights and inputs, the same whichever rank draws them."""

    spec: LatentMoESpec
    world_size: int
    seed: int

    def normal(self, name: str, *shape: int, sigma: float, mean: float = 0.0) -> Tensor:
        """Normal values in the layer's dtype, from a generator of their own."""
        digest = hashlib.sha256(f"{self.seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
        values = torch.randn(shape, generator=generator) * sigma + mean
        return values.to(getattr(torch, self.spec.dtype))

    def share(self, call: int, rank: int) -> int:
        """The number of rows of a call that `rank` judges; rank 0's come first."""
        rows = CALLS[call]
        return rows * (rank + 1) // self.world_size - rows * rank // self.world_size

    def residual(self, call: int, judge: int) -> Tensor:
        """The residual of the rows that rank `judge` judges."""
        return self.normal(f"residual {call} {judge}", self.share(call, judge), self.spec.hidden_size, sigma=1.0)

    def partials(self, call: int, judge: int, rank: int) -> tuple[Tensor, Tensor]:
        """Rank `rank`'s (routed, shared) of the rows that rank `judge` judges."""
        rows, name = self.share(call, judge), f"{call} {judge} {rank}"
        return (
            self.normal(f"routed {name}", rows, self.spec.latent_size, sigma=0.1),
            self.normal(f"shared {name}", rows, self.spec.hidden_size, sigma=0.1),
        )


@attrs.frozen(kw_only=True, eq=False)
class _Inputs:
    """One call on one rank: what it gives to the tier, and, of the rows that it judges, all ranks' partials."""

    routed: Tensor
    shared: Tensor
    residual: Tensor
    judged: slice
    case: Case

    @classmethod
    def of(cls, data: _Data, call: int, rank: int, norm_weight: Tensor, up_weight: Tensor) -> _Inputs:
        ranks = range(data.world_size)
        own = [data.partials(call, judge, rank) for judge in ranks]
        peers = [data.partials(call, rank, peer) for peer in ranks]
        residuals = [data.residual(call, judge) for judge in ranks]
        first = sum(data.share(call, before) for before in range(rank))
        return cls(
            routed=torch.cat([routed for routed, _ in own]),
            shared=torch.cat([shared for _, shared in own]),
            residual=torch.cat(residuals),
            judged=slice(first, first + data.share(call, rank)),
            case=Case(
                routed=torch.stack([routed for routed, _ in peers]),
                shared=torch.stack([shared for _, shared in peers]),
                up_weight=up_weight,
                residual=residuals[rank],
                norm_weight=norm_weight,
                up_bias=None,
                routed_scale=1.0,
                eps=data.spec.rms_eps,
            ),
        )


def _measure(comm: Communicator, data: _Data) -> Measured:
    spec = comm.spec
    norm_weight = data.normal("norm_weight", spec.latent_size, sigma=0.1, mean=1.0)
    up_weight = data.normal("up_weight", spec.hidden_size, spec.latent_size, sigma=0.02)
    wide_up_weight = up_weight.double()  # the reference would widen it in every call
    handles = {
        precise: comm.moe_tail(layer_index=int(precise), norm_weight=norm_weight, up_weight=up_weight, precise=precise)
        for precise in (False, True)
    }
    wanted = {variant: _calls_for(variant, comm) for variant in _variants(comm, handles)}
    found = Measured(
        report=str(comm.report),
        spans=tier_map(comm.agreement, comm.windows),
        calls={variant: [] for variant in wanted},
        models={numerics: [] for numerics in _modelled(spec)},
    )
    with _progress(comm, sum(CALLS[call] for calls in wanted.values() for call in calls)) as advance:
        for call in sorted(set().union(*wanted.values())):
            inputs = _Inputs.of(data, call, comm.rank, norm_weight, wide_up_weight)
            truth = inputs.case.truth()
            for variant, calls in wanted.items():
                if call in calls:
                    handle = handles[variant.precise]
                    plan = handle.plan(CALLS[call], tier=variant.tier)
                    out = handle(inputs.routed, inputs.shared, inputs.residual, plan=plan)
                    found.calls[variant].append(Call(_digest(out), _meter(out[inputs.judged], truth, inputs)))
                    advance(CALLS[call])
            if call < few_calls(spec):
                for numerics, meters in found.models.items():
                    meters.append(_meter(inputs.case.model(numerics), truth, inputs))
    return found


def _calls_for(variant: Variant, comm: Communicator) -> list[int]:
    """The calls that a variant makes: within its capacity, and all only where a bound is pooled over many rows."""
    pooled = comm.dtype == torch.bfloat16 and variant.numerics is not Numerics.K0
    few, most = few_calls(comm.spec), comm.agreement.capacities[variant.tier]
    return [call for call, rows in enumerate(CALLS) if rows <= most and (pooled or call < few)]


def _modelled(spec: LatentMoESpec) -> list[Numerics]:
    """The classes of which a bound is relative to the plain model."""
    if spec.dtype != "bfloat16":
        return []
    return [Numerics.K2] if k3_like(spec) else [Numerics.K1, Numerics.K2]


def _variants(comm: Communicator, handles: dict[bool, MoETail]) -> list[Variant]:
    """Every agreed tier, and the precise form of those that are not precise anyway and can be."""
    found = []
    for tier in comm.agreement.capacities:
        numerics = plugins()[tier].numerics
        found.append(Variant(tier, False, numerics))
        if numerics is not Numerics.K0:
            try:
                handles[True].plan(1, tier=tier)
            except TierUnavailableError:
                continue
            found.append(Variant(tier, True, Numerics.K0))
    return found


def _meter(out: Tensor, truth: Tensor, inputs: _Inputs) -> AccuracyMeter:
    """The accuracy of the rows that this rank judges."""
    meter = AccuracyMeter()
    pieces = (x.split(METER_ROWS) for x in (out, truth, inputs.residual[inputs.judged]))
    for out_rows, truth_rows, residual_rows in zip(*pieces, strict=True):
        meter.add(out_rows, truth_rows, residual_rows)
    return meter


def _digest(out: Tensor) -> str:
    return hashlib.sha256(out.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()


@contextmanager
def _progress(comm: Communicator, total: int) -> Iterator[Callable[[int], None]]:
    """Rank 0 speaks for all: the others are at most one call away."""
    if comm.rank:
        yield lambda steps: None
    else:
        with _console.progress(f"measuring on {comm.world_size} ranks", total) as advance:
            yield advance


# ---- in the parent


@attrs.frozen
class Limit:
    """A bound, the figure that it limits, and whether that was enough data to judge (None: it was not)."""

    bound: Bound
    value: float
    holds: bool | None


@attrs.frozen(kw_only=True)
class Finding:
    """What came of one variant.

    Attributes:
        accuracy: of all ranks' rows, of the calls that the bounds judge.
        limits: the bounds; of figures that are judged call by call, the worst one.
        differing: the numbers of rows of the calls whose results were not the same on all ranks.
    """

    variant: Variant
    accuracy: Accuracy
    limits: tuple[Limit, ...]
    differing: tuple[int, ...]

    @property
    def good(self) -> bool:
        """Whether no bound is missed and all ranks are alike."""
        return not self.differing and all(limit.holds is not False for limit in self.limits)

    def complaints(self) -> list[str]:
        """What is not good, in words."""
        missed = [
            f"{limit.bound.quantity} is {limit.value:.4g}, allowed is {limit.bound} ({limit.bound.source})"
            for limit in self.limits
            if limit.holds is False
        ]
        if self.differing:
            missed.append(f"the ranks' results differ, in calls of {', '.join(map(str, self.differing))} rows")
        return missed


def judge(found: Sequence[Measured], spec: LatentMoESpec) -> list[Finding]:
    """Adds up what the ranks measured and compares it with the bounds of each variant's class."""
    return [_finding(variant, found, spec) for variant in found[0].calls]


def _finding(variant: Variant, found: Sequence[Measured], spec: LatentMoESpec) -> Finding:
    numerics, dtype = variant.numerics, getattr(torch, spec.dtype)
    calls = _calls(found, variant)
    differing = [rows for rows, ranks in zip(CALLS, calls, strict=False) if len({call.digest for call in ranks}) > 1]
    model = separate_reduce = None
    if numerics is Numerics.K2 and variant != FALLBACK:
        separate_reduce = _pool(_calls(found, FALLBACK)[: len(calls)])
    elif numerics in found[0].models:
        calls = calls[: few_calls(spec)]
        model = _accuracy([meter for one in found for meter in one.models[numerics][: len(calls)]])
    bounds = reference.bounds_for(
        numerics,
        dtype=dtype,
        # A precise projection of these tiers takes z as two BF16 terms (kernels/dense.py).
        pair=variant.precise and dtype == torch.bfloat16,
        k3_like=k3_like(spec),
        model=model,
        separate_reduce=separate_reduce,
    )
    accuracy = _pool(calls)
    singles = []
    if numerics is Numerics.K0:  # its bias is bounded in each call, and not only on average
        singles = [_pool([ranks]) for ranks in calls]
        singles = [one for one in singles if one.rows * spec.hidden_size >= ONE_CALL_ELEMENTS]
    return Finding(
        variant=variant,
        accuracy=accuracy,
        limits=tuple(
            _limit(bound, [accuracy, *singles] if "bias" in bound.quantity else [accuracy]) for bound in bounds
        ),
        differing=tuple(differing),
    )


def _calls(found: Sequence[Measured], variant: Variant) -> list[tuple[Call, ...]]:
    """A variant's calls, each as all ranks saw it."""
    return list(zip(*(one.calls[variant] for one in found), strict=True))


def _pool(calls: Sequence[Sequence[Call]]) -> Accuracy:
    return _accuracy([call.meter for ranks in calls for call in ranks])


def _accuracy(meters: Sequence[AccuracyMeter]) -> Accuracy:
    total = AccuracyMeter()
    for meter in meters:
        total.merge(meter)
    return total.result()


def _limit(bound: Bound, pools: Sequence[Accuracy]) -> Limit:
    judged = [pool for pool in pools if bound.applies(pool)]
    worst = max(judged or pools, key=bound.value)
    # all() and not the worst one: a NaN is no maximum.
    return Limit(bound, bound.value(worst), all(map(bound.holds, judged)) if judged else None)
