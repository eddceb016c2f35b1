"""FUSED_LANE_AR's lane in device memory, on GPUs: `--nccl` (a GPU a rank) or `--shared-gpu`.

With several ranks on a GPU a kernel waits for ranks whose turn on the GPU is yet to come, so each call takes
milliseconds there: the shared mode is for right and wrong, not for speed.
"""

import hashlib
import itertools
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from special_values import put_special_values

import k3comm
from k3comm import Communicator, LatentMoESpec, Settings, Tier
from k3comm.kernels import reference
from k3comm.kernels.lane_one_shot import OneShot
from k3comm.negotiate.exchange import GroupExchange
from k3comm.tiers import Numerics, fused_lane_ar

BF16 = torch.bfloat16
HIDDEN, LATENT = 1024, 512
WINDOWS = Path(k3comm.__file__).parent / "tiers" / "windows" / "default.toml"
"""Whichever GPU: its MULTIMEM_AR wants room for 8192 rows in the buffer that PEER_AR shares, 25 MB at these widths."""

MOST = (1 << 20) // (2 * (HIDDEN + LATENT))
"""Rows of a lane at these widths, by `make`, so that few are many."""
layers = itertools.count()
Make = Callable[..., Communicator]


@pytest.fixture
def make(request: pytest.FixtureRequest, gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Negotiates communicators, and closes them."""
    made: list[Communicator] = []
    monkeypatch.setattr(fused_lane_ar, "ONE_SHOT_BYTES", (dist.get_world_size() - 1) << 20)

    def negotiate(hidden: int = HIDDEN, latent: int = LATENT, **options: Any) -> Communicator:
        shared = request.config.getoption("--shared-gpu")
        options["settings"] = Settings(allow_shared_device=shared, **options.pop("settings", {}))
        spec = LatentMoESpec(hidden_size=hidden, latent_size=latent, top_k=8, max_tokens=8192)
        comm = Communicator.negotiate(spec, dist.group.WORLD, device=gpu, **options)
        made.append(comm)
        assert Tier.FUSED_LANE_AR in comm.agreement
        return comm

    yield negotiate
    torch.cuda.synchronize()
    GroupExchange(dist.group.WORLD, 30).gather(b"x")  # no peer still reads
    for comm in made:
        comm.close()


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool, bool]]:
    """Of every call of the kernel: its rows, and whether routed and shared were to be copied."""
    calls: list[tuple[int, bool, bool]] = []
    run = OneShot.__call__

    def counted(kernel: OneShot, rows: int, routed: Any, shared: Any, *given: Any, **more: Any) -> Any:
        calls.append((rows, routed is not None, shared is not None))
        return run(kernel, rows, routed, shared, *given, **more)

    monkeypatch.setattr(OneShot, "__call__", counted)
    return calls


def integers(comm: Communicator, rows: int, seed: int = 0) -> reference.Case:
    spec = comm.spec
    return reference.integer_case(comm.world_size, rows, spec.hidden_size, spec.latent_size, dtype=BF16, seed=seed).to(
        comm.device
    )


def handle(comm: Communicator, case: reference.Case, **options: Any) -> k3comm.MoETail:
    weights = {"norm_weight": case.norm_weight, "up_weight": case.up_weight, **options}
    return comm.moe_tail(layer_index=next(layers), **weights)


def call(
    tail: k3comm.MoETail, comm: Communicator, case: reference.Case, rows: int, tier: Tier = Tier.FUSED_LANE_AR
) -> torch.Tensor:
    part = slice(0, rows)
    plan = tail.plan(rows, tier=tier)
    return tail(case.routed[comm.rank][part], case.shared[comm.rank][part], case.residual[part], plan=plan)


def truth(case: reference.Case) -> torch.Tensor:
    return reference.round_once(case.truth(), BF16)


def written(
    tail: k3comm.MoETail, comm: Communicator, case: reference.Case, rows: int, **options: Any
) -> tuple[torch.Tensor, k3comm.Plan]:
    """The lane for so many rows, with this rank's partial sums in it, and its plan."""
    plan = tail.plan(rows, tier=Tier.FUSED_LANE_AR, **options)
    lane = tail.lane(plan)
    assert lane is not None
    lane[:, :LATENT] = case.routed[comm.rank][:rows]
    lane[:, LATENT:] = case.shared[comm.rank][:rows]
    return lane, plan


def same_everywhere(*outs: torch.Tensor) -> bool:
    found = hashlib.sha256(b"".join(out.cpu().view(torch.int16).numpy().tobytes() for out in outs)).digest()
    return len(set(GroupExchange(dist.group.WORLD, 30).gather(found))) == 1


def test_integers_are_exact_at_every_size(make: Make, copied: list[tuple[int, bool, bool]]) -> None:
    comm = make()
    case = integers(comm, 1000)
    tail, right = handle(comm, case), truth(case)
    copied.clear()
    sizes = (1, 2, 3, 7, 16, 63, MOST, MOST + 1, 1000)
    outs = [call(tail, comm, case, rows) for rows in sizes]
    for rows, out in zip(sizes, outs, strict=True):
        assert torch.equal(out, right[:rows]), rows
    assert copied == [(rows, True, True) for rows in sizes if rows <= MOST]
    assert comm.memory()["FUSED_LANE_AR: lane"] > MOST * 2 * (HIDDEN + LATENT)


def test_kimi_k3_widths(make: Make, copied: list[tuple[int, bool, bool]]) -> None:
    comm = make(7168, 3584)
    case = integers(comm, 64)
    tail, right = handle(comm, case), truth(case)
    copied.clear()
    for rows in (1, 16, 48, 49, 64):
        assert torch.equal(call(tail, comm, case, rows), right[:rows]), rows
    assert [rows for rows, _, _ in copied] == [1, 16, 48]  # 48 rows of 21504 bytes are the last below 1 MiB


@pytest.mark.parametrize("rows", [1, 33, MOST])
def test_a_lane_written_in_place_costs_no_copy(make: Make, rows: int, copied: list[tuple[int, bool, bool]]) -> None:
    comm = make()
    case = integers(comm, rows)
    tail, right = handle(comm, case), truth(case)
    copied.clear()
    lane, plan = written(tail, comm, case, rows)
    assert lane.shape == (rows, LATENT + HIDDEN)
    before = lane.clone()
    out = tail(lane[:, :LATENT], lane[:, LATENT:], case.residual, plan=plan)
    assert torch.equal(out, right)
    assert torch.equal(lane, before)
    # One part in place; and one in place for fewer rows than the plan's.
    lane, plan = written(tail, comm, case, rows)
    half = -(-rows // 2)
    out = tail(case.routed[comm.rank][:half], lane[:half, LATENT:], case.residual[:half], plan=plan)
    assert torch.equal(out, right[:half])
    again = tail.lane(plan)
    assert again is not None
    assert again.data_ptr() == lane.data_ptr()
    assert copied == [(rows, False, False), (half, True, False)]


def test_where_there_is_no_lane(make: Make) -> None:
    comm = make()
    tail = handle(comm, integers(comm, 4))
    for rows in (0, MOST + 1):
        assert tail.lane(tail.plan(rows, tier=Tier.FUSED_LANE_AR)) is None
    assert tail.lane(tail.plan(4, tier=Tier.SEPARATE_REDUCE)) is None
    assert tail.lane(tail.plan(4, tier=Tier.PEER_AR)) is None


@pytest.mark.parametrize("rows", [5, MOST])
@pytest.mark.parametrize("place", ["lane", "elsewhere"])
def test_replays_equal_eager_calls_also_after_reserve(
    make: Make, rows: int, place: str, copied: list[tuple[int, bool, bool]]
) -> None:
    comm = make()
    first = integers(comm, rows)
    tail = handle(comm, first)
    residual = torch.zeros(rows, HIDDEN, dtype=BF16, device=comm.device)
    plan = tail.plan(rows, graph=True, decode=True, tier=Tier.FUSED_LANE_AR)
    lane = tail.lane(plan)
    assert lane is not None
    both = lane if place == "lane" else torch.empty_like(lane)
    both.zero_()

    def run() -> torch.Tensor:
        out: torch.Tensor = tail(both[:, :LATENT], both[:, LATENT:], residual, plan=plan)
        return out

    for _ in range(2):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    copied.clear()
    for seed in range(6):
        if seed == 3:
            torch.cuda.synchronize()
            comm.reserve(8193)
            moved = tail.lane(plan)
            assert moved is not None
            assert moved.data_ptr() == lane.data_ptr()
        case = integers(comm, rows, seed)
        both[:, :LATENT] = case.routed[comm.rank]
        both[:, LATENT:] = case.shared[comm.rank]
        residual.copy_(case.residual)
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, run())
        right = reference.rms_norm(case.routed.double().sum(0), first.norm_weight, comm.spec.rms_eps)
        right = residual.double() + right @ first.up_weight.double().t() + case.shared.double().sum(0)
        assert torch.allclose(replayed.double(), right, rtol=2**-8, atol=1e-3)
        graph.replay()  # twice in a row, as a graph has no turns
        assert torch.equal(out, replayed)
    assert copied == [(rows, place != "lane", place != "lane")] * 6


def test_graphs_of_different_size_and_eager_calls_alternate(make: Make) -> None:
    comm = make()
    case = integers(comm, 64)
    tail, right = handle(comm, case), truth(case)
    graphs = {}
    for rows in (1, 17, 64):
        plan = tail.plan(rows, graph=True, tier=Tier.FUSED_LANE_AR)
        inputs = case.routed[comm.rank][:rows].clone(), case.shared[comm.rank][:rows].clone(), case.residual[:rows]
        tail(*inputs, plan=plan)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = tail(*inputs, plan=plan)
        graphs[rows] = graph, out, inputs
    for rows in (64, 1, 1, 17, 64, 17, 1) * 3:
        graph, out, _ = graphs[rows]
        out.zero_()
        graph.replay()
        eager = call(tail, comm, case, 3)
        assert torch.equal(out, right[:rows])
        assert torch.equal(eager, right[:3])


def test_many_calls_with_ranks_that_are_late(make: Make) -> None:
    """The host is late, or the GPU is; nothing is waited for between the calls."""
    comm = make()
    case = integers(comm, MOST)
    tail, right = handle(comm, case), truth(case)
    draw = random.Random(comm.rank)
    sizes = [1, MOST, 3, 200, 17, 1, 150, 64] * 3
    outs = []
    for number, rows in enumerate(sizes):
        if draw.random() < 0.3:
            time.sleep(0.02 * draw.random())
        if draw.random() < 0.3:
            torch.cuda._sleep(draw.randrange(2_000_000))
        if number % 2:
            lane, plan = written(tail, comm, case, rows)
            outs.append(tail(lane[:, :LATENT], lane[:, LATENT:], case.residual[:rows], plan=plan))
            lane.fill_(float("nan"))  # the peers have read it when the call is over
        else:
            outs.append(call(tail, comm, case, rows))
    for rows, out in zip(sizes, outs, strict=True):
        assert torch.equal(out, right[:rows])


def test_two_lanes(make: Make, copied: list[tuple[int, bool, bool]]) -> None:
    comm = make(lanes=2)
    cases = [integers(comm, 19, seed) for seed in range(6)]
    tails = [handle(comm, case) for case in cases]
    lanes, outs = [], []
    for number in (0, 1):
        with comm.step(lane=number):
            lanes.append(written(tails[number], comm, cases[number], 19))
    assert lanes[0][0].data_ptr() != lanes[1][0].data_ptr()
    copied.clear()
    for number in (1, 0):  # both were written before either is used
        with comm.step(lane=number):
            lane, plan = lanes[number]
            out = tails[number](lane[:, :LATENT], lane[:, LATENT:], cases[number].residual, plan=plan)
            assert torch.equal(out, truth(cases[number]))
    assert copied == [(19, False, False)] * 2
    for number, (tail, case) in enumerate(zip(tails, cases, strict=True)):
        with comm.step(lane=number % 2):
            outs.append(call(tail, comm, case, 19))
    for out, case in zip(outs, cases, strict=True):
        assert torch.equal(out, truth(case))


def test_special_values_stay_in_their_rows(make: Make) -> None:
    comm = make()
    case = integers(comm, 24)
    tail = handle(comm, case)
    right = put_special_values(case, comm.rank, truth(case))
    torch.testing.assert_close(call(tail, comm, case, 24), right, rtol=0, atol=0, equal_nan=True)


def test_arguments_and_strange_layouts(make: Make, copied: list[tuple[int, bool, bool]]) -> None:
    """Sharded W_up, own rows, the next norm, no norm, a norm in fp32, inputs with strides."""
    comm = make()
    rows, world_size, rank = 37, comm.world_size, comm.rank
    case = integers(comm, rows)
    right = truth(case)
    copied.clear()
    shard = case.up_weight.chunk(world_size)[rank]
    assert torch.equal(call(handle(comm, case, up_weight=shard), comm, case, rows), right)
    gain = case.norm_weight.float()
    assert torch.equal(call(handle(comm, case, norm_weight=gain), comm, case, rows), right)
    plain = reference.integer_case(world_size, rows, HIDDEN, LATENT, dtype=BF16, seed=1, norm=False).to(comm.device)
    assert torch.equal(call(handle(comm, plain), comm, plain, rows), truth(plain))
    tail = handle(comm, case)
    own = -(-rows // world_size)
    mine = slice(rank * own, min((rank + 1) * own, rows))
    count = max(mine.stop - mine.start, 0)
    residual = torch.zeros(own, HIDDEN, dtype=BF16, device=comm.device)
    residual[:count] = case.residual[mine]
    plan = tail.plan(rows, tier=Tier.FUSED_LANE_AR, output="rows", next_norm=True)
    wide = torch.zeros(rows, 2 * HIDDEN, dtype=BF16, device=comm.device)
    wide[:, ::2] = case.shared[rank]
    routed = case.routed[rank].t().contiguous().t()
    next_gain = torch.ones(HIDDEN, device=comm.device)
    out, normed = tail(routed, wide[:, ::2], residual, plan=plan, output="rows", next_norm_weight=next_gain)
    assert torch.equal(out[:count], right[mine])
    assert not out[count:].any()
    assert torch.allclose(normed.double(), reference.rms_norm(out, next_gain, 1e-5), rtol=1e-2, atol=1e-3)
    assert copied == [(rows, True, True)] * 4


def test_accuracy_beside_separate_reduce(make: Make) -> None:
    """Pooled over seeds: calls that go through the lane are short."""
    comm = make()
    meters = {tier: reference.AccuracyMeter() for tier in (Tier.FUSED_LANE_AR, Tier.SEPARATE_REDUCE)}
    for seed in range(-(-reference.POOL_ROWS // 256)):
        case = reference.random_case(comm.world_size, 256, HIDDEN, LATENT, dtype=BF16, seed=seed).to(comm.device)
        tail, right = handle(comm, case), case.truth()
        outs = {tier: call(tail, comm, case, 256, tier) for tier in meters}
        for tier, meter in meters.items():
            meter.add(outs[tier], right, case.residual)
        assert same_everywhere(outs[Tier.FUSED_LANE_AR])
    lane, separate = (meter.result() for meter in meters.values())
    assert lane.rows >= reference.POOL_ROWS
    assert reference.accept(Numerics.K2, lane, dtype=BF16, separate_reduce=separate) == [], (lane, separate)


def test_sleeping_and_waking_up(make: Make) -> None:
    comm = make()
    case = integers(comm, 9)
    tail, right = handle(comm, case), truth(case)
    lane, _ = written(tail, comm, case, 9)
    assert torch.equal(call(tail, comm, case, 9), right)
    comm.suspend()
    comm.resume()
    again, plan = written(tail, comm, case, 9)
    assert again.data_ptr() == lane.data_ptr()
    assert torch.equal(tail(again[:, :LATENT], again[:, LATENT:], case.residual, plan=plan), right)


def test_one_rank_without_the_kernel_falls_back_everywhere(
    make: Make, monkeypatch: pytest.MonkeyPatch, copied: list[tuple[int, bool, bool]]
) -> None:
    def refuse(kernel: OneShot, device: torch.device) -> int:
        raise RuntimeError("no compiler here")

    if dist.get_rank() == 1:
        monkeypatch.setattr(OneShot, "_load", refuse)
    comm = make()
    copied.clear()
    case = integers(comm, 16)
    tail = handle(comm, case)
    assert tail.lane(tail.plan(16, tier=Tier.FUSED_LANE_AR)) is None
    assert torch.equal(call(tail, comm, case, 16), truth(case))
    assert copied == []
    assert Tier.PEER_AR in comm.agreement
    assert "FUSED_LANE_AR: lane" not in comm.memory()


@pytest.mark.parametrize("why", ["nobody needs the block", "no memory on one rank"])
def test_without_the_block_the_library_does_it(make: Make, monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    options: dict[str, Any] = {}
    if why == "nobody needs the block":
        options["settings"] = {"disabled": {Tier.PEER_AR, Tier.MULTIMEM_AR}}
    else:
        options["settings"] = {"windows": WINDOWS}
        if dist.get_rank() == 1:
            from k3comm.buffers.cuda import CudaMemory

            allocate = CudaMemory.allocate

            def refuse(memory: CudaMemory, nbytes: int) -> None:
                if nbytes > 16 << 20:  # the staging block; the decode block is smaller
                    raise OSError(12, "made to fail")
                allocate(memory, nbytes)

            monkeypatch.setattr(CudaMemory, "allocate", refuse)
    comm = make(**options)
    assert Tier.PEER_AR not in comm.agreement
    case = integers(comm, 16)
    tail = handle(comm, case)
    assert tail.lane(tail.plan(16, tier=Tier.FUSED_LANE_AR)) is None
    assert torch.equal(call(tail, comm, case, 16), truth(case))
