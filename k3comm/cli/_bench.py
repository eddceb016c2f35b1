"""The bench's run on every rank: checks each arm, times all of them in alternating order, and holds them to their name.

Whatever is found wrong on one rank is known to all before the next collective, so no rank leaves the others waiting:
an arm that is wrong anywhere is timed nowhere.
"""

from __future__ import annotations

import math
import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from functools import partial

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from k3comm.cli import _console
from k3comm.cli._arms import Arm, Inputs, Layers, Rivals, digest, tier_arms
from k3comm.cli._results import Measurement, Results
from k3comm.cli._timing import GraphPass, HostPass, Pass, Ranks, cache_filler
from k3comm.communicator import Communicator
from k3comm.errors import InputError
from k3comm.spec import LatentMoESpec
from k3comm.tiers import Tier

DECODE_ROWS = 64
"""Rows up to which the selected tier is that of a decode forward, in a graph on a GPU; beyond, that of a prefill."""
TRIAL_PASSES = 2
"""Passes by which it is found out how many fit into `Options.seconds`."""
LEAST_PASSES = 3
"""Passes in a repetition, however little time there is: a median has to leave out an outlier on either side."""
WORST = 10**9
"""The largest error that ranks tell each other, in billionths; also what one that is not finite counts as."""


@attrs.frozen(kw_only=True)
class Options:
    """What to measure: the bench's arguments.

    Attributes:
        spec: the layer.
        rows: the numbers of rows, ascending.
        tiers: those to measure; None for every agreed one.
        rivals: whether to measure what else can be had.
        layers, repeats, replays: layers in a pass, repetitions, passes in each.
        census: whether to count what runs on the device.
        seconds: what the repetitions of an arm may take at one size together, by fewer passes in each; None: no limit.
            `LEAST_PASSES` are made in any case.
        memory: whether to find out what memory the arms take.
        reserve: whether tiers that stage rows make room for the largest size first (`Communicator.reserve`).
        decode_rows: rows up to which the selected tier is that of a decode forward.
        seed: of the data.
        command: how it was asked for.
    """

    spec: LatentMoESpec
    rows: tuple[int, ...]
    tiers: tuple[Tier, ...] | None = None
    rivals: bool = True
    layers: int
    repeats: int
    replays: int
    census: bool = False
    seconds: float | None = None
    memory: bool = False
    reserve: bool = False
    decode_rows: int = DECODE_ROWS
    seed: int = 1
    command: str = ""


@attrs.define(kw_only=True, eq=False)
class _Timed:
    """One arm at one size while it is measured."""

    arm: Arm
    error: float
    chained: Pass
    isolated: Pass
    replays: int = 0
    extra_bytes: int | None = None
    chained_us: list[float] = attrs.field(factory=list)
    isolated_us: list[float] = attrs.field(factory=list)
    counted: Counter[str] = attrs.field(factory=Counter)
    calls: int = 0
    census: Mapping[str, int] = attrs.field(factory=dict)
    expected: Tensor | None = None


def measure(options: Options, group: dist.ProcessGroup, device: torch.device | str | None = None) -> Results:
    """Runs the bench. Collective over `group`; the same value on every rank, but for what only one has seen.

    Raises:
        InputError: one rank, or a tier that is not agreed.
        K3CommError: what negotiating raises.
    """
    if dist.get_world_size(group) < 2:
        raise InputError("bench: a group of 1 rank given; accepted are 2 or more, since one has nobody to talk to")
    with Communicator.negotiate(options.spec, group, device=device) as comm:
        if options.reserve:
            comm.reserve(options.rows[-1])
        return _Run(options, comm, group).results()


class _Run:
    """One bench on one rank."""

    def __init__(self, options: Options, comm: Communicator, group: dist.ProcessGroup) -> None:
        self._options, self._comm, self._ranks = options, comm, Ranks(group)
        self._graph = uses_graphs(comm)
        self._engaged: Counter[str] = Counter()
        self._layers = Layers(comm, options.layers, options.seed)
        self._fill = cache_filler(comm.device)
        self._left_out: dict[str, str] = {}
        self._failures: list[str] = []
        self._arms = self._make_arms(group)

    def _make_arms(self, group: dist.ProcessGroup) -> list[Arm]:
        wanted = self._options.tiers
        for tier in wanted or ():
            if tier not in self._comm.agreement:
                raise InputError(
                    f"--tiers: {tier.name} is not agreed: {self._comm.report.decision.refusal(tier)}; accepted are "
                    f"{', '.join(agreed.name for agreed in self._comm.agreement.capacities)}"
                )
        every = tier_arms(self._comm, self._layers, graph=self._graph, engaged=self._engaged)
        arms = [arm for arm in every if wanted is None or arm.tier in wanted]
        if self._options.rivals:
            rivals = Rivals(
                self._comm,
                group,
                self._layers,
                self._engaged,
                lambda mine: self._ranks.first_bad([not mine]) == [-1],
                self._options.rows[-1],
            )
            arms += rivals.arms()
            self._left_out |= rivals.left_out
        return arms

    def results(self) -> Results:
        """Measures every size."""
        options, facts = self._options, self._comm.report.facts
        measurements: list[Measurement] = []
        pairs = sum(rows <= arm.most_rows for rows in options.rows for arm in self._arms)
        with self._progress(pairs * (options.repeats + 1)) as advance:
            for rows in options.rows:
                measurements += self._size(rows, advance)
        versions = dict(facts.versions)
        if self._graph:
            versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        return Results(
            date=self._ranks.from_first(datetime.now(UTC).isoformat(timespec="seconds")),
            command=options.command,
            family=facts.family,
            world_size=self._comm.world_size,
            device=str(facts.device_name) or platform.machine(),
            versions=versions,
            hidden=options.spec.hidden_size,
            latent=options.spec.latent_size,
            dtype=options.spec.dtype,
            graph=self._graph,
            layers=options.layers,
            repeats=options.repeats,
            replays=options.replays,
            measurements=tuple(measurements),
            selected={rows: self._selected(rows) for rows in options.rows},
            left_out=self._left_out,
            failures=tuple(self._failures),
            shared_bytes={arm.name: arm.shared_bytes for arm in self._arms} if options.memory else {},
        )

    def _selected(self, rows: int) -> Tier:
        decode = rows <= self._options.decode_rows
        return self._comm.explain(rows, graph=decode and self._graph, decode=decode).tier

    def _size(self, rows: int, advance: Callable[[int], None]) -> list[Measurement]:
        """Checks, then times, all arms at one number of rows."""
        inputs = self._layers.inputs(rows)
        arms = [arm for arm in self._arms if rows <= arm.most_rows]
        for arm in self._arms:
            if rows > arm.most_rows:
                self._left_out[f"{arm.name} from {arm.most_rows + 1} rows"] = f"it takes {arm.most_rows}"
        timed = [one for arm in arms if (one := self._checked(arm, inputs)) is not None]
        for one in timed:
            one.replays = self._passes_that_fit(one)
        advance(len(arms))
        empty = GraphPass(None, inputs.residual, self._options.layers, self._fill) if self._graph else None
        for repeat in range(self._options.repeats):
            # The empty pass is measured beside what it is taken off from.
            idle = empty.sample(self._options.replays) if empty is not None else 0.0
            for one in timed if repeat % 2 == 0 else reversed(timed):
                with self._counting(one):
                    one.chained_us.append(self._sample(one.chained, one.replays))
                    one.isolated_us.append(self._sample(one.isolated, one.replays) - idle)
                advance(1)
            advance(len(arms) - len(timed))
        measured = [self._measurement(one, rows) for one in timed]
        return [one for one in measured if one is not None]

    def _sample(self, one: Pass, replays: int) -> float:
        self._ranks.meet()
        return one.sample(replays)

    def _passes_that_fit(self, one: _Timed) -> int:
        """How many passes each repetition of an arm has: the same on every rank, by the slowest rank's trial."""
        options = self._options
        if options.seconds is None:
            return options.replays
        started = time.perf_counter()
        with self._counting(one):
            for each in (one.chained, one.isolated):
                self._sample(each, TRIAL_PASSES)
        (us,) = self._ranks.largest([max(1, round((time.perf_counter() - started) * 1e6))])
        fit = options.seconds * 1e6 * TRIAL_PASSES / (us * options.repeats)
        return min(options.replays, max(LEAST_PASSES, int(fit)))

    # ---- what an arm has to be

    def _checked(self, arm: Arm, inputs: Inputs) -> _Timed | None:
        """The arm, ready to be timed; None, and a failure that all ranks know, if it does not do what it says."""
        before, rows = Counter(self._engaged), inputs.rows
        out = arm.run(inputs, inputs.residual, 0)
        counted = self._engaged - before
        truth = self._layers.truth(rows)
        error, right = truth.judge(out)
        (scaled,) = self._ranks.largest([round(min(error, WORST) * 1e9) if math.isfinite(error) else WORST * 10**9])
        # A tier promises the same bits on every rank; a rival may have them or not.
        alike = self._ranks.alike(digest(out)) or arm.tier is None
        wrong, strayed = self._ranks.first_bad([not right, arm.engagement(counted) != (1, {})])
        if wrong >= 0:
            self._fail(arm, rows, f"wrong: its error is {scaled / 1e9:.3g} (rank {wrong})")
        if not alike:
            self._fail(arm, rows, "the ranks' results differ")
        if strayed >= 0:
            self._fail(arm, rows, f"one call engaged {dict(counted)}, not {dict(arm.engages)} (rank {strayed})")
        if wrong >= 0 or strayed >= 0 or not alike:
            return None
        return self._ready(arm, inputs, scaled / 1e9)

    def _ready(self, arm: Arm, inputs: Inputs, error: float) -> _Timed | None:
        step, layers = partial(_step, arm, inputs), self._options.layers
        if not self._graph:
            chained = HostPass(step, inputs.residual, layers)
            isolated = HostPass(step, inputs.residual, layers, self._between)
            one = _Timed(arm=arm, error=error, chained=chained, isolated=isolated)
            with self._counting(one):
                chained.sample(1)  # warm
            one.census = self._census(partial(chained.sample, 1), one)
            return one
        before = Counter(self._engaged)
        eager = inputs.residual
        for layer in range(layers):
            eager = step(eager, layer)
        graphs = [GraphPass(step, inputs.residual, layers, between) for between in (None, self._fill)]
        counted = self._engaged - before
        one = _Timed(arm=arm, error=error, chained=graphs[0], isolated=graphs[1], expected=eager)
        passes = 1 + len(graphs) * GraphPass.calls
        (strayed,) = self._ranks.first_bad([arm.engagement(counted) != (passes * layers, {})])
        # Each on every rank, whatever the first one gave: a replay talks to peers.
        good = [_replays(graph, eager) for graph in graphs]
        (stale,) = self._ranks.first_bad([not all(good)])
        if strayed >= 0:
            self._fail(arm, inputs.rows, f"{passes * layers} calls engaged {dict(counted)} (rank {strayed})")
        if stale >= 0:
            self._fail(arm, inputs.rows, f"a replayed graph does not give what the calls gave (rank {stale})")
        if strayed >= 0 or stale >= 0:
            return None
        one.census = self._census(graphs[0].replay, one)
        (absent,) = self._ranks.first_bad([bool(one.census) and not _has(one.census, arm.kernels)])
        if absent >= 0:
            self._fail(arm, inputs.rows, f"no kernel is called like {' or '.join(arm.kernels)} (rank {absent})")
            return None
        one.extra_bytes = self._extra_bytes(arm, inputs)
        return one

    def _extra_bytes(self, arm: Arm, inputs: Inputs) -> int | None:
        """`Measurement.extra_bytes`, of one more eager call, when what libraries keep for good is there. Collective."""
        if not self._options.memory:
            return None
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = arm.run(inputs, inputs.residual, 0)
        torch.cuda.synchronize()
        mine = torch.cuda.max_memory_allocated() - before - out.numel() * out.element_size()
        (most,) = self._ranks.largest([max(0, mine)])
        return most

    def _between(self) -> None:
        self._fill()
        self._ranks.meet()

    @contextmanager
    def _counting(self, one: _Timed) -> Iterator[None]:
        """Books the calls that are made within, and what they engage, on an arm.

        A replayed graph makes each time the calls that were captured. They were counted then (`_ready`), and what they
        give over a poisoned result is looked at before and after the timing; so a replay counts for its calls.
        """
        before, passes = Counter(self._engaged), one.chained.passes + one.isolated.passes
        yield
        made = one.chained.passes + one.isolated.passes - passes
        one.calls += made * self._options.layers
        if self._graph:
            for what, each in one.arm.engages.items():
                one.counted[what] += each * made * self._options.layers
        one.counted += self._engaged - before

    def _measurement(self, one: _Timed, rows: int) -> Measurement | None:
        calls, beside = one.arm.engagement(one.counted)
        (strayed,) = self._ranks.first_bad([calls != one.calls or bool(beside)])
        chained, isolated = self._ranks.slowest(one.chained_us), self._ranks.slowest(one.isolated_us)
        good = [
            _replays(graph, one.expected)
            for graph in (one.chained, one.isolated)
            if isinstance(graph, GraphPass) and one.expected is not None
        ]
        (stale,) = self._ranks.first_bad([not all(good)])
        if strayed >= 0:
            self._fail(one.arm, rows, f"{one.calls} calls engaged {dict(one.counted)} (rank {strayed})")
        if stale >= 0:
            self._fail(one.arm, rows, f"after the timing a replay gave something else (rank {stale})")
        if strayed >= 0 or stale >= 0:
            return None
        return Measurement(
            arm=one.arm.name,
            tier=one.arm.tier,
            numerics=one.arm.numerics,
            rows=rows,
            chained_us=chained,
            isolated_us=isolated,
            error=one.error,
            engaged=calls,
            calls=one.calls,
            census=one.census,
            replays=one.replays if one.replays < self._options.replays else None,
            extra_bytes=one.extra_bytes,
        )

    def _census(self, run: Callable[[], object], one: _Timed) -> dict[str, int]:
        """What one pass runs: kernels on a GPU, operators on a CPU; nothing unless asked for."""
        if not self._options.census:
            return {}
        from torch._C._autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        kind = ProfilerActivity.CUDA if self._graph else ProfilerActivity.CPU
        with self._counting(one) if not self._graph else nullcontext(), profile(activities=[kind]) as seen:
            run()
        wanted = DeviceType.CUDA if self._graph else DeviceType.CPU
        found = Counter(event.name for event in seen.events() if event.device_type == wanted)
        return dict(sorted(found.items(), key=lambda pair: (-pair[1], pair[0])))

    def _fail(self, arm: Arm, rows: int, why: str) -> None:
        self._failures.append(f"{arm.name} at {rows} rows: {why}")

    @contextmanager
    def _progress(self, total: int) -> Iterator[Callable[[int], None]]:
        """Rank 0 speaks for all."""
        if self._ranks.rank:
            yield lambda steps: None
        else:
            with _console.progress(f"measuring on {self._ranks.size} ranks", total) as advance:
                yield advance


def uses_graphs(comm: Communicator) -> bool:
    """Whether passes are captured and replayed; they are called otherwise."""
    return comm.device.type == "cuda"


def _step(arm: Arm, inputs: Inputs, residual: Tensor, layer: int) -> Tensor:
    return arm.run(inputs, residual, layer)


def _replays(graph: GraphPass, eager: Tensor) -> bool:
    """Whether a replay computes: over a poisoned result it gives what eager calls gave, up to a library's rounding."""
    assert graph.out is not None
    graph.out.fill_(float("nan"))
    out = graph.replay()
    if out is None or not bool(out.isfinite().all()):
        return False
    distance = (out.double() - eager.double()).square().mean().sqrt()
    return bool(distance <= 1e-2 * eager.double().square().mean().sqrt())


def _has(census: Mapping[str, int], kernels: Sequence[str]) -> bool:
    return not kernels or any(part in name.lower() for name in census for part in kernels)
