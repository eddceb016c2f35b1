"""TAIL_FUSION on GPUs, through handles: `--nccl` (a GPU a rank) or `--shared-gpu` (several ranks on one).

Ranks that share a GPU take turns, and an exchange waits for the turn of each: 18 ms at eight of them. So counts are by
mode and world there, and the thousands are for a GPU a rank.
"""

import hashlib
import itertools
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist

import k3comm
import k3comm.ops
from k3comm import Communicator, LatentMoESpec, Settings, Tier
from k3comm.buffers.mailbox import COUNTER_BYTES
from k3comm.kernels import reference
from k3comm.kernels.compile import KernelVariant, arch_of, compile_kernel
from k3comm.kernels.finalize import Deferred, finalize
from k3comm.kernels.launch import Launch, LaunchShape, load_kernel
from k3comm.kernels.tail_fusion import COMPLETED, COMPLETIONS, CREDITED, Form
from k3comm.kernels.tail_geometry import MAX_CELLS
from k3comm.negotiate.exchange import GroupExchange
from k3comm.tiers import Numerics
from k3comm.tiers._tail_device import DeviceTail

BF16 = torch.bfloat16
HIDDEN, LATENT = 1024, 512
ODD_COLUMNS, ODD_LATENT = 104, 136
"""Widths that no architecture has a faster path for: a last tile and a last slice that are not whole."""
ROWS = (*range(1, 18), 33, 64)
FEW = (1, 5, 16, 17, 64)
layers = itertools.count()
Make = Callable[..., Communicator]


@attrs.frozen
class Mode:
    """How the session's ranks have their GPUs."""

    shared: bool
    world_size: int

    def count(self, apart: int, pair: int, four: int, more: int) -> int:
        """How often: with a GPU a rank, or on one GPU with 2, up to 4 or more ranks."""
        if not self.shared:
            return apart
        return pair if self.world_size == 2 else four if self.world_size <= 4 else more

    @property
    def settings(self) -> Settings:
        return Settings(allow_shared_device=self.shared)


@pytest.fixture(scope="module")
def mode(request: pytest.FixtureRequest) -> Mode:
    option = request.config.getoption
    if not option("--nccl") and not option("--shared-gpu"):  # the same on all ranks, so they skip together
        pytest.skip("needs --nccl (a GPU a rank) or --shared-gpu")
    return Mode(option("--shared-gpu"), dist.get_world_size())


def negotiated(mode: Mode, hidden: int = HIDDEN, latent: int = LATENT, **options: Any) -> Communicator:
    options = {"settings": mode.settings, "device": "cuda", **options}
    spec = LatentMoESpec(hidden_size=hidden, latent_size=latent, top_k=8, max_tokens=2048)
    comm = Communicator.negotiate(spec, dist.group.WORLD, **options)
    assert Tier.TAIL_FUSION in comm.agreement, comm.report.decision.refusal(Tier.TAIL_FUSION)
    return comm


@pytest.fixture(scope="module")
def comm(mode: Mode) -> Iterator[Communicator]:
    with negotiated(mode, lanes=2) as made:
        yield made


@pytest.fixture(scope="module")
def odd(mode: Mode) -> Iterator[Communicator]:
    with negotiated(mode, ODD_COLUMNS * mode.world_size, ODD_LATENT) as made:
        yield made


@pytest.fixture
def make(mode: Mode) -> Iterator[Make]:
    """Negotiates communicators that this test alone uses, and closes them."""
    made: list[Communicator] = []

    def one(*shape: int, **options: Any) -> Communicator:
        made.append(negotiated(mode, *shape, **options))
        return made[-1]

    yield one
    for comm in made:
        comm.close()


def meet() -> None:
    """This rank's kernels are done, and everybody is here."""
    torch.cuda.synchronize()
    GroupExchange(dist.group.WORLD, 30).gather(b"x")


def same_everywhere(*outs: torch.Tensor) -> bool:
    found = hashlib.sha256(b"".join(out.cpu().view(torch.int16).numpy().tobytes() for out in outs)).digest()
    return len(set(GroupExchange(dist.group.WORLD, 30).gather(found))) == 1


def device_of(comm: Communicator) -> DeviceTail:
    found = comm._tiers[Tier.TAIL_FUSION]._device
    assert found is not None
    return found


def pdl_of(comm: Communicator) -> set[bool]:
    """Whether the launches that were made of a communicator's kernels ask for PDL."""
    kernels = device_of(comm)._kernels
    every = (*kernels._first.values(), *kernels._next_norm.values())
    return {launch.record.pdl for launch in every if launch.count}


def integers(comm: Communicator, rows: int, seed: int = 0, **kind: Any) -> reference.Case:
    spec = comm.spec
    return reference.integer_case(
        comm.world_size, rows, spec.hidden_size, spec.latent_size, dtype=BF16, seed=seed, **kind
    ).to(comm.device)


def numbers(comm: Communicator, rows: int, seed: int = 0, **kind: Any) -> reference.Case:
    spec = comm.spec
    return reference.random_case(
        comm.world_size, rows, spec.hidden_size, spec.latent_size, dtype=BF16, seed=seed, **kind
    ).to(comm.device)


def handle(comm: Communicator, case: reference.Case, *, sharded: bool = False) -> k3comm.MoETail:
    weight = case.up_weight.chunk(comm.world_size)[comm.rank].clone() if sharded else case.up_weight
    return comm.moe_tail(
        layer_index=next(layers),
        norm_weight=case.norm_weight,
        up_weight=weight,
        up_bias=case.up_bias,
        routed_scale=case.routed_scale,
    )


def call(
    tail: k3comm.MoETail, comm: Communicator, case: reference.Case, rows: slice = slice(None), **options: Any
) -> torch.Tensor:
    routed, shared = case.routed[comm.rank][rows], case.shared[comm.rank][rows]
    residual = None if case.residual is None else case.residual[rows]
    plan = tail.plan(routed.shape[0], tier=options.pop("tier", Tier.TAIL_FUSION), next_norm=bool(options))
    return tail(routed, shared, residual, plan=plan, **options)


def truth(case: reference.Case) -> torch.Tensor:
    return reference.round_once(case.truth(), BF16)


def test_it_is_agreed_and_every_launch_obeys_pdl(comm: Communicator, mode: Mode) -> None:
    assert comm.agreement.capacities[Tier.TAIL_FUSION] == 64
    memory = comm.memory()
    assert memory["multicast objects"] == 0
    assert memory["TAIL_FUSION: mailboxes"] > 0
    assert memory["TAIL_FUSION: workspace"] > 0
    assert device_of(comm).transport == "peer"
    assert pdl_of(comm) == {not mode.shared}
    tail = handle(comm, integers(comm, 1))
    with comm.step(graph=True, decode=True):
        assert tail.plan(16, graph=True, decode=True).tier is Tier.TAIL_FUSION
    with pytest.raises(k3comm.TierUnavailableError, match="65 tokens exceed the 64 that all ranks can take"):
        tail.plan(65, tier=Tier.TAIL_FUSION)
    with pytest.raises(k3comm.TierUnavailableError, match="it finishes columns, not rows"):
        tail.plan(5, tier=Tier.TAIL_FUSION, output="rows")


def test_without_pdl_no_launch_asks_for_it(make: Make, mode: Mode) -> None:
    comm = make(settings=attrs.evolve(mode.settings, pdl=False))
    case = integers(comm, 5)
    assert torch.equal(call(handle(comm, case), comm, case), truth(case))
    assert pdl_of(comm) == {False}


@pytest.mark.parametrize("which", ["comm", "odd"])
def test_integers_are_exact_for_every_m(which: str, request: pytest.FixtureRequest) -> None:
    comm = request.getfixturevalue(which)
    case = integers(comm, 64, bias=True, routed_scale=0.5)
    tails = [handle(comm, case, sharded=sharded) for sharded in (False, True)]
    right = truth(case)
    before = device_of(comm)._kernels.launches
    outs = [(rows, call(tail, comm, case, slice(0, rows))) for tail in tails for rows in ROWS]
    assert device_of(comm)._kernels.launches >= before + len(outs)
    for rows, out in outs:
        assert torch.equal(out, right[:rows]), rows
    assert same_everywhere(*(out for _, out in outs))


@pytest.mark.parametrize("which", ["comm", "odd"])
def test_what_is_optional(which: str, request: pytest.FixtureRequest) -> None:
    comm = request.getfixturevalue(which)
    kept = []
    for number, (norm, residual, bias) in enumerate(itertools.product((False, True), repeat=3)):
        scale = (0.5, 1.0, 2.0)[number % 3]
        case = integers(comm, 9, number, norm=norm, residual=residual, bias=bias, routed_scale=scale)
        kept.append((case, call(handle(comm, case, sharded=number % 2 == 1), comm, case)))
        # Weights in fp32, which handles take as they are.
        wide = {name: None if x is None else x.float() for name, x in (("g", case.norm_weight), ("b", case.up_bias))}
        tail = comm.moe_tail(
            layer_index=next(layers), norm_weight=wide["g"], up_weight=case.up_weight, up_bias=wide["b"],
            routed_scale=scale,
        )  # fmt: skip
        kept.append((case, call(tail, comm, case)))
    assert all(torch.equal(out, truth(case)) for case, out in kept)


def test_the_next_norm_comes_with_it(comm: Communicator) -> None:
    case = numbers(comm, 17)
    tail = handle(comm, case)
    for gain in (torch.linspace(-1, 2, HIDDEN, device=comm.device), torch.ones(HIDDEN, device=comm.device).to(BF16)):
        out, normed = call(tail, comm, case, next_norm_weight=gain)
        assert torch.equal(out, call(tail, comm, case))
        found = reference.measure(normed, reference.rms_norm(out, gain, comm.spec.rms_eps))
        assert found.error <= 1.005 * found.ideal_error
        assert same_everywhere(out, normed)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["bf16", "fp32"])
def test_deferred_has_the_bits_of_finished_sums(comm: Communicator, odd: Communicator, dtype: torch.dtype) -> None:
    for one, (m, k, count, padding) in itertools.product(
        (comm, odd), ((1, 1, 3, 0), (5, 16, 20, 8), (9, 3, 0, 8), (17, 37, 40, 3), (64, 8, 500, 16))
    ):
        latent = one.spec.latent_size
        draw = torch.Generator().manual_seed(100 * m + one.rank)
        rows = torch.randn(count, latent + padding, generator=draw).to(BF16)
        index = torch.randint(-1, max(count, 1), (m * k,), generator=draw, dtype=torch.int32)
        index[torch.rand(m * k, generator=draw) < 0.3] = -1
        index = index if count else index.fill_(-1)
        factors = torch.rand(m * k, generator=draw).to(dtype)
        finished = finalize(Deferred(rows, factors, index, m), latent).to(one.device)
        unnamed = torch.ones(count, dtype=torch.bool)
        unnamed[index[index >= 0].long()] = False
        rows[unnamed], rows[:, latent:] = float("nan"), float("nan")  # never read
        case = numbers(one, m, m)
        tail = handle(one, case)
        plan = tail.plan(m, tier=Tier.TAIL_FUSION)
        shared, residual = case.shared[one.rank], case.residual
        expected = tail(finished, shared, residual, plan=plan)
        given = [x.to(one.device) for x in (rows, factors, index)]
        assert torch.equal(tail.deferred(*given, shared, residual, num_tokens=m, plan=plan), expected), (m, k)
        assert not expected.isnan().any()


@pytest.mark.parametrize("which", ["comm", "odd"])
def test_a_row_has_its_bits_in_any_batch(which: str, request: pytest.FixtureRequest) -> None:
    comm = request.getfixturevalue(which)
    case = numbers(comm, 64, 3, bias=True, routed_scale=0.7)
    tail = handle(comm, case)
    whole = call(tail, comm, case)
    found = reference.measure(whole, case.truth(), case.residual)
    assert found.error <= reference.K0_ERROR_OVER_IDEAL * found.ideal_error
    for rows in (1, 2, 3, 8, 9, 16, 17, 33):
        for first in (0, 64 - rows):
            part = slice(first, first + rows)
            assert torch.equal(call(tail, comm, case, part), whole[part]), part
    assert same_everywhere(whole)


def test_special_values(comm: Communicator) -> None:
    """Empty words, signed zeros, subnormals, infinities, NaN beside clean rows, and sums that tell their order."""
    world, rank = comm.world_size, comm.rank
    case = numbers(comm, 12, 6)
    tail = handle(comm, case)
    clean = call(tail, comm, case)
    routed, shared, residual = case.routed, case.shared, case.residual
    routed[0, 1, 8:10].view(torch.int16).fill_(-1)  # exactly an empty word
    shared[-1, 2].view(torch.int16).fill_(-1)
    shared[0, 3, 5], shared[-1, 3, 40] = float("inf"), float("-inf")
    for x in (routed[:, 4], shared[:, 4], residual[4]):
        x.fill_(-0.0)
    routed[:, 5], shared[:, 5], residual[5] = 1e-40, -1e-40, 0.0
    routed[-1, 6, 3] = float("inf")
    routed[:, 7], shared[:, 7], residual[7] = 0.0, 0.0, 0.0
    for number, value in enumerate((2.0**24, 1.0, -(2.0**24))[:world]):  # 0 in rank order, with three ranks or more
        shared[number, 7] = value
    routed[0, 9, 0] = float("nan")
    outs = [call(tail, comm, case) for _ in range(4)]  # all regions, and one again
    assert all(torch.equal(out.view(torch.int16), outs[0].view(torch.int16)) for out in outs)
    out, model = outs[0], case.model(Numerics.K0, pair=True)
    assert all(torch.equal(out[row], clean[row]) for row in (0, 8, 10, 11))
    assert torch.equal(out.isnan(), model.isnan())
    assert torch.equal(out.isinf(), model.isinf())
    assert torch.equal(out[7], torch.full_like(out[7], 2.0**24 if world == 2 else 0.0))
    torch.testing.assert_close(out, model, rtol=2**-7, atol=1e-2, equal_nan=True)
    assert not (out.view(torch.int32) == -1).any()  # passed on as other NaNs, so none is ever left over
    assert same_everywhere(out)
    # Without a latent part the layer is the shared sum, of values that are zero on all ranks but one.
    values = torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1e-39, -1e-39, 3.5], device=comm.device).to(BF16)
    mine = values[:, None].expand(7, HIDDEN) if rank == world - 1 else torch.zeros(7, HIDDEN, device=comm.device)
    plan = tail.plan(7, tier=Tier.TAIL_FUSION)
    quiet = torch.zeros(7, LATENT, dtype=BF16, device=comm.device)
    passed = tail(quiet, mine.to(BF16), None, plan=plan)
    torch.testing.assert_close(passed, values[:, None].expand(7, HIDDEN), rtol=0, atol=0, equal_nan=True)


def test_any_memory_layout(comm: Communicator) -> None:
    case = integers(comm, 6)
    tail, right = handle(comm, case), truth(case)
    plan = tail.plan(6, tier=Tier.TAIL_FUSION)
    routed, shared = case.routed[comm.rank], case.shared[comm.rank]
    wide = torch.zeros(6, 2 * HIDDEN + 1, dtype=BF16, device=comm.device)
    wide[:, 1::2] = shared
    lane = torch.cat((routed, shared), 1)
    for a, b in (
        (routed.t().contiguous().t(), wide[:, 1::2]),
        (lane[:, :LATENT], lane[:, LATENT:]),
        (torch.cat((routed[:, :1], routed), 1)[:, 1:], shared),
    ):
        assert torch.equal(tail(a, b, case.residual.t().contiguous().t(), plan=plan), right)
    one = routed[:1].expand(6, LATENT)
    assert torch.equal(tail(one, shared, None, plan=plan), tail(one.clone(), shared, None, plan=plan))


class Captured:
    """A graph of one call, whose inputs are changed in place."""

    def __init__(self, comm: Communicator, tail: k3comm.MoETail, rows: int, lane: int = 0) -> None:
        self.inputs = [torch.zeros(rows, width, dtype=BF16, device=comm.device) for width in (LATENT, HIDDEN, HIDDEN)]
        self.tail, self.plan = tail, tail.plan(rows, graph=True, decode=True, tier=Tier.TAIL_FUSION)
        self.comm, self.lane = comm, lane
        self.eager()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.eager()

    def eager(self) -> torch.Tensor:
        with self.comm.step(graph=True, decode=True, lane=self.lane):
            return self.tail(*self.inputs, plan=self.plan)

    def load(self, case: reference.Case) -> None:
        rows, rank = self.inputs[0].shape[0], self.comm.rank
        new = case.routed[rank, :rows], case.shared[rank, :rows], case.residual[:rows]
        for mine, one in zip(self.inputs, new, strict=True):
            mine.copy_(one)

    def replay(self) -> torch.Tensor:
        self.graph.replay()
        return self.out


@pytest.mark.timeout(240)
def test_replays_equal_eager_calls(comm: Communicator, mode: Mode) -> None:
    """Two graphs of different m and eager calls in turn, inputs changed in place; mismatches are counted on the GPU."""
    cases = [numbers(comm, 17, seed) for seed in range(8)]
    tail = handle(comm, cases[0])
    graphs = [Captured(comm, tail, rows) for rows in (5, 17)]
    wrong = torch.zeros((), dtype=torch.int64, device=comm.device)
    order = random.Random(5)
    replays = mode.count(10_000, 400, 200, 50)
    for number in range(replays):
        one = graphs[order.randrange(2)]
        one.load(cases[number % 8])
        if order.random() < 0.5:
            replayed, eager = one.replay().clone(), one.eager()
        else:
            eager, replayed = one.eager(), one.replay()
        wrong += (replayed != eager).any()
    assert int(wrong) == 0
    for one in graphs:
        for case in cases[:2]:
            one.load(case)
            rows = one.inputs[0].shape[0]
            assert torch.equal(one.replay(), call(tail, comm, case, slice(0, rows)))


def test_lanes_keep_apart(comm: Communicator) -> None:
    cases = [numbers(comm, rows, rows) for rows in (3, 64)]
    tails = [handle(comm, case) for case in cases]
    alone = [call(tail, comm, case) for tail, case in zip(tails, cases, strict=True)]
    outs = []
    for lane in (0, 1, 1, 0, 1, 0, 0, 1, 1, 1, 1, 0):
        with comm.step(lane=lane):
            outs.append((lane, call(tails[lane], comm, cases[lane])))
    assert all(torch.equal(out, alone[lane]) for lane, out in outs)


def test_two_communicators_interleaved(comm: Communicator, make: Make, mode: Mode) -> None:
    other = make()
    case = integers(comm, 16)
    pair = [(one, handle(one, case)) for one in (comm, other)]
    right, outs, order = truth(case), [], random.Random(1)
    for _ in range(mode.count(2000, 200, 200, 50)):
        one, tail = pair[order.randrange(2)]
        rows = order.choice(FEW[:3])
        outs.append((rows, call(tail, one, case, slice(0, rows))))
    assert all(torch.equal(out, right[:rows]) for rows, out in outs)


FOREIGN = """
// Lets the kernel behind it start at once, never waits for the one before it, and takes its time.
extern "C" __global__ void foreign(unsigned cycles)
{
    asm volatile("griddepcontrol.launch_dependents;");
    long long start = clock64();
    while (clock64() - start < cycles) {}
}
"""


def test_beside_kernels_that_are_not_ours(comm: Communicator, mode: Mode, tmp_path: Path) -> None:
    """One that triggers early and never waits breaks "completion of the previous kernel": ours doesn't rest on it."""
    (tmp_path / "foreign.cu").write_text(FOREIGN)
    variant = KernelVariant(name="foreign", source="foreign.cu", entry="foreign", folder=tmp_path)
    compiled = compile_kernel(variant, arch_of(torch.cuda.get_device_capability()), Settings(cache_dir=tmp_path))
    shape = LaunchShape(grid=8, block=32, pdl=True)
    foreign = Launch(load_kernel(compiled, comm.device), shape, Settings(pdl=not mode.shared))
    case = integers(comm, 16)
    tail, right, outs = handle(comm, case), truth(case), []
    square = torch.rand(256, 256, device=comm.device)
    side = torch.cuda.Stream()
    order = random.Random(2)
    for _ in range(mode.count(2000, 200, 200, 50)):
        for _ in range(order.randrange(3)):
            foreign(order.randrange(20_000))
        if order.random() < 0.2:
            square = (square @ square).clamp(0, 1)
            with torch.cuda.stream(side):
                torch.rand(256, 256, device=comm.device).sum()
        rows = order.choice(FEW[:3])
        outs.append((rows, call(tail, comm, case, slice(0, rows))))
    assert all(torch.equal(out, right[:rows]) for rows, out in outs)


def test_ranks_that_are_late(comm: Communicator, mode: Mode) -> None:
    """Each rank stops now and then before a call, on its own, on the host or on the GPU."""
    case = integers(comm, 17)
    tail, right = handle(comm, case), truth(case)
    wrong = torch.zeros((), dtype=torch.int64, device=comm.device)
    order, own = random.Random(3), random.Random(1000 + comm.rank)
    for _ in range(mode.count(10_000, 400, 200, 50)):
        rows = order.choice(FEW[:4])
        if own.random() < 0.1:
            torch.cuda._sleep(own.randrange(200_000))
        if own.random() < 0.01:
            time.sleep(own.random() * 2e-3)
        wrong += (call(tail, comm, case, slice(0, rows)) != right[:rows]).any()
    assert int(wrong) == 0


@pytest.mark.parametrize("calls", [2**32 - 2, 2**40 + 1])
def test_counters_do_not_wrap(comm: Communicator, calls: int) -> None:
    """Preset to what they are after days of serving: the number of a call has 64 bits."""
    tier, device = comm._tiers[Tier.TAIL_FUSION], device_of(comm)
    meet()
    tier.rearm()
    start = device._context.offset
    for lane in range(2):
        first = start + device._layout.counters(lane)
        words = device._memory.block(comm.rank)[first : first + COUNTER_BYTES].view(torch.int64)
        words[:MAX_CELLS] = calls
        words[COMPLETED], words[CREDITED] = calls * COMPLETIONS, calls
    meet()
    case = integers(comm, 17)
    tail, right = handle(comm, case), truth(case)
    outs = []
    for rows in (17, 1, 5, 16, 2):
        for lane in range(2):
            with comm.step(lane=lane):
                outs.append((rows, call(tail, comm, case, slice(0, rows))))
    assert all(torch.equal(out, right[:rows]) for rows, out in outs)
    meet()
    for lane in range(2):
        first = start + device._layout.counters(lane)
        words = device._memory.block(comm.rank)[first : first + COUNTER_BYTES].view(torch.int64)
        assert int(words[COMPLETED]) == (calls + 5) * COMPLETIONS
        assert int(words[CREDITED]) == calls + 5
    tier.rearm()
    meet()


def test_graphs_outlive_growth_and_sleep(make: Make) -> None:
    """A graph captured before reserve, suspend and resume goes on, on mailboxes at the same addresses."""
    comm = make()
    case = integers(comm, 16)
    tail, right = handle(comm, case), truth(case)
    one = Captured(comm, tail, 16)
    one.load(case)
    for number in range(3):
        assert torch.equal(one.replay(), right)
        assert torch.equal(call(tail, comm, case, slice(0, 5)), right[:5])
        if number == 0:
            comm.reserve(8193)
            assert comm.agreement.capacities[Tier.TAIL_FUSION] == 64
        if number == 1:
            comm.suspend()
            with pytest.raises(k3comm.ClosedError, match="suspended"):
                call(tail, comm, case)
            layout, start = device_of(comm)._layout, device_of(comm)._context.offset
            device_of(comm)._memory.block(comm.rank)[start : start + layout.nbytes] = 0x5A  # it need not survive
            comm.resume()


def test_a_compiled_model_reaches_it_through_our_operator(make: Make, mode: Mode) -> None:
    settings = attrs.evolve(mode.settings, force=Tier.TAIL_FUSION)
    comm = make(settings=settings, name=f"compiled-tail-{next(layers)}")
    case = integers(comm, 16)
    tail, right = handle(comm, case), truth(case)

    def model(routed: torch.Tensor, shared: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return tail(routed, shared, residual) * 1

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    device = device_of(comm)
    before = device._kernels.launches
    with torch.no_grad():
        out = compiled(case.routed[comm.rank], case.shared[comm.rank], case.residual)
    assert device._kernels.launches == before + (2 if device.form is Form.SPLIT else 1)
    assert torch.equal(out, right)


def test_accuracy_at_kimi_k3_s_widths(make: Make) -> None:
    """Everything that class K0 promises, over 64 rows of 7168: 459,000 elements."""
    comm = make(7168, 3584)
    case = numbers(comm, 64, 1)
    tail = handle(comm, case)
    right, meter = case.truth(), reference.AccuracyMeter()
    for rows in (64, 16):
        out = call(tail, comm, case, slice(0, rows))
        one = reference.measure(out, right[:rows], case.residual[:rows])
        assert reference.accept(Numerics.K0, one, dtype=BF16, pair=True) == [], rows
        meter.add(out, right[:rows], case.residual[:rows])
        assert same_everywhere(out)
    exact = integers(comm, 17)
    again = handle(comm, exact)
    assert torch.equal(call(again, comm, exact), truth(exact))
    assert meter.result().rows == 80


@pytest.mark.timeout(240)
def test_soak_with_flat_memory(comm: Communicator, mode: Mode) -> None:
    """m, tier, lane, phase and kind of call change, the same on all ranks; results are counted on the GPU."""
    case = integers(comm, 64)
    tail, right = handle(comm, case), truth(case)
    gain = torch.ones(HIDDEN, dtype=BF16, device=comm.device)
    graphs = [Captured(comm, tail, rows, lane) for rows, lane in ((16, 0), (33, 1))]
    for one in graphs:
        one.load(case)
    wrong = torch.zeros((), dtype=torch.int64, device=comm.device)
    order, own, engaged = random.Random(4), random.Random(2000 + comm.rank), dict.fromkeys(("tail", "graph", "peer"), 0)
    meet()
    before = torch.cuda.memory_allocated()
    for _ in range(mode.count(20_000, 800, 200, 50)):
        if own.random() < 0.01:
            torch.cuda._sleep(own.randrange(100_000))
        rows, kind = order.choice(ROWS), order.random()
        with comm.step(graph=order.random() < 0.5, decode=order.random() < 0.5, lane=order.randrange(2)):
            if kind < 0.1 and Tier.PEER_AR in comm.agreement:
                engaged["peer"] += 1
                out = call(tail, comm, case, slice(0, rows), tier=Tier.PEER_AR)
            elif kind < 0.3:
                engaged["graph"] += 1
                one = graphs[order.randrange(2)]
                out, rows = one.replay(), one.inputs[0].shape[0]
            elif kind < 0.5:
                engaged["tail"] += 1
                out, _ = call(tail, comm, case, slice(0, rows), next_norm_weight=gain)
            else:
                engaged["tail"] += 1
                out = call(tail, comm, case, slice(0, rows))
        wrong += (out != right[:rows]).any()
        del out
    assert int(wrong) == 0
    assert torch.cuda.memory_allocated() - before < 1 << 20
    assert engaged["tail"] > engaged["graph"] > 0
    assert same_everywhere(call(tail, comm, case))


@pytest.mark.timeout(240)
def test_a_rank_that_stops_is_named(mode: Mode, rank: int, tmp_path: Path) -> None:
    """In processes of its own, two of them: the wait that expires ends the CUDA context."""
    meet()  # nobody else is on the GPU
    texts, codes = [], []
    if rank == 0:
        script = Path(__file__).with_name("stopped_rank.py")
        devices = (0, 0) if mode.shared else (0, 1)
        arguments = [str(tmp_path / "store"), str(int(mode.shared))]
        children = [
            subprocess.Popen(
                [sys.executable, str(script), str(number), arguments[0], str(device), arguments[1]],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for number, device in enumerate(devices)
        ]
        for child in children:
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=50)
            child.kill()  # one that is stuck
            texts.append(child.communicate())
            codes.append(child.returncode)
    GroupExchange(dist.group.WORLD, 110).gather(b"x")  # the others stay off the GPU until then
    assert codes == [0] * len(codes), texts
    for number, (text, _) in enumerate(texts):
        said = json.loads(text.strip().splitlines()[-1])
        peer, phase = 1 - number, "latent" if number == 0 else "gather"
        assert said["right"]
        assert said["torch"] in ("AcceleratorError", "RuntimeError")
        assert 1.5 < said["seconds"] < 40
        assert said["ranks"] == [peer]
        assert said["error"].startswith(f"PeerTimeoutError: moe_tail on rank {number} of 2: layer 7, call ")
        assert f" of lane 0, phase {phase}, token " in said["error"]
        assert f"nothing from rank {peer} within 2 s (settings.poll_deadline)" in said["error"]
        assert said["closed"].startswith("ClosedError: ")
        assert "PeerTimeoutError" in said["closed"]
        assert said["left"]
