"""A shared sum that is begun early, on GPUs over NCCL: streams, memory, graphs, and how many blocks it takes.

Run with --nccl, a GPU a rank (make test-gpu).
"""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import k3comm
from k3comm import Settings, Tier
from k3comm.kernels import reference
from k3comm.tiers.few_sms import FewSMs

HIDDEN, LATENT = 1024, 512
DELAY = 4_000_000
"""Cycles: about two milliseconds, longer than any call here."""


@pytest.fixture(autouse=True)
def _on_nccl(request: pytest.FixtureRequest, skip_all_unless: Callable[[bool, str], None]) -> None:
    skip_all_unless(request.config.getoption("--nccl"), "needs --nccl and a GPU for every rank")


def negotiated(sms: int | None, **arguments: object) -> k3comm.Communicator:
    spec = k3comm.LatentMoESpec(hidden_size=HIDDEN, latent_size=LATENT, top_k=8)
    return k3comm.Communicator.negotiate(spec, dist.group.WORLD, settings=Settings(overlap_sms=sms), **arguments)


@pytest.fixture(params=[None, 1, 4, 16], ids=["off", "1", "4", "16"])
def comm(request: pytest.FixtureRequest) -> Iterator[k3comm.Communicator]:
    with negotiated(request.param, lanes=2) as made:
        yield made


def parts(comm: k3comm.Communicator, rows: int, seed: int) -> tuple[reference.Case, list[torch.Tensor]]:
    case = reference.random_case(comm.world_size, rows, HIDDEN, LATENT, dtype=comm.dtype, seed=seed).to(comm.device)
    assert case.residual is not None
    return case, [case.routed[comm.rank].clone(), case.shared[comm.rank].clone(), case.residual.clone()]


def handle(comm: k3comm.Communicator, case: reference.Case, **arguments: bool) -> k3comm.MoETail:
    layer = len(comm.handles)
    return comm.moe_tail(layer_index=layer, norm_weight=case.norm_weight, up_weight=case.up_weight, **arguments)


def agree(comm: k3comm.Communicator, out: torch.Tensor, expected: torch.Tensor) -> bool:
    """Two addends have one sum in any order. Of more, NCCL's order may differ with its number of blocks."""
    if comm.world_size == 2:
        return torch.equal(out, expected)
    return torch.allclose(out.float(), expected.float(), rtol=2**-6, atol=2**-4)


def side_stream(comm: k3comm.Communicator) -> torch.cuda.Stream:
    assert comm.side is not None
    stream = comm.side.stream
    assert isinstance(stream, torch.cuda.Stream)
    return stream


@pytest.mark.parametrize("precise", [False, True], ids=["rounded", "precise"])
def test_it_is_an_ordinary_call_whoever_is_late(comm: k3comm.Communicator, precise: bool) -> None:
    """With a GEMM between the halves, and delays before, between and beside them on one rank after the other."""
    a = torch.randn(512, 512, device=comm.device)
    for rows in (1, 17, 300):
        case, (routed, shared, residual) = parts(comm, rows, rows)
        tail = handle(comm, case, precise=precise)
        expected = tail(routed, shared, residual, plan=tail.plan(rows, tier=Tier.SEPARATE_REDUCE))
        for late in range(comm.world_size):
            for where in ("before", "between", "beside"):
                if where == "before" and comm.rank == late:
                    torch.cuda._sleep(DELAY)
                if where == "beside" and comm.rank == late:
                    with torch.cuda.stream(side_stream(comm)):
                        torch.cuda._sleep(DELAY)
                early = tail.reduce_shared(shared)
                if where == "between" and comm.rank == late:
                    torch.cuda._sleep(DELAY)
                a = (a @ a).clamp(-1, 1)
                assert agree(comm, tail(routed, early, residual), expected), (rows, late, where)
    torch.cuda.synchronize()


def test_what_the_caller_lets_go_of_is_not_given_away(comm: k3comm.Communicator) -> None:
    """The side stream is late, the partial sum's last reference goes, and the memory is asked for at once."""
    case, (routed, shared, residual) = parts(comm, 300, 1)
    tail = handle(comm, case)
    expected = tail(routed, shared, residual, plan=tail.plan(300, tier=Tier.SEPARATE_REDUCE))
    for _ in range(5):
        mine = shared.clone()
        with torch.cuda.stream(side_stream(comm)):
            torch.cuda._sleep(DELAY)
        early = tail.reduce_shared(mine)
        del mine
        junk = [torch.full_like(shared, 1e30) for _ in range(4)]
        out = tail(routed, early, residual)
        del early
        junk += [torch.full_like(shared, 1e30) for _ in range(4)]
        assert agree(comm, out, expected)
        # And one that nobody finishes.
        with torch.cuda.stream(side_stream(comm)):
            torch.cuda._sleep(DELAY)
        tail.reduce_shared(shared.clone())
        kept = [torch.zeros_like(shared) for _ in range(4)]
        assert agree(comm, tail(routed, tail.reduce_shared(shared), residual), expected)
        torch.cuda.synchronize()
        assert all(not one.any() for one in kept)
        del junk


def test_replays_equal_eager_calls(comm: k3comm.Communicator) -> None:
    """Both halves in one graph, with work between them; eager calls between the replays, and delays."""
    case, tensors = parts(comm, 17, 0)
    tail = handle(comm, case)
    plan = tail.plan(17, tier=Tier.SEPARATE_REDUCE)
    a = torch.randn(512, 512, device=comm.device)

    def forward() -> torch.Tensor:
        early = tail.reduce_shared(tensors[1])
        torch.mm(a, a)
        return tail(tensors[0], early, tensors[2])

    with comm.step(graph=True, decode=True):
        for _ in range(3):
            forward()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = forward()
    for seed in range(20):
        _, fresh = parts(comm, 17, seed)
        for mine, new in zip(tensors, fresh, strict=True):
            mine.copy_(new)
        if seed % comm.world_size == comm.rank:
            torch.cuda._sleep(DELAY // 4)
        graph.replay()
        replayed = out.clone()
        assert agree(comm, replayed, tail(*tensors, plan=plan)), seed
        assert agree(comm, replayed, tail(tensors[0], tail.reduce_shared(tensors[1]), tensors[2])), seed
    torch.cuda.synchronize()


def test_an_early_sum_of_outside_can_not_be_finished_in_a_capture(comm: k3comm.Communicator) -> None:
    case, (routed, shared, residual) = parts(comm, 17, 4)
    tail = handle(comm, case)
    early = tail.reduce_shared(shared)
    torch.cuda.synchronize()
    graph, buffer = torch.cuda.CUDAGraph(), torch.zeros(8, device=comm.device)
    with torch.cuda.graph(graph), comm.step(graph=True):
        buffer.add_(1)
        with pytest.raises(k3comm.CaptureError, match="begun outside of a capture, and this call is inside of one"):
            tail(routed, early, residual)
    expected = tail(routed, shared, residual, plan=tail.plan(17, tier=Tier.SEPARATE_REDUCE))
    assert agree(comm, tail(routed, early, residual), expected)


def test_another_stream_may_finish_it(comm: k3comm.Communicator) -> None:
    case, (routed, shared, residual) = parts(comm, 300, 5)
    tail = handle(comm, case)
    expected = tail(routed, shared, residual, plan=tail.plan(300, tier=Tier.SEPARATE_REDUCE))
    main, other = torch.cuda.current_stream(), torch.cuda.Stream()
    for _ in range(5):
        early = tail.reduce_shared(shared.clone())
        comm.use_stream(other)
        with torch.cuda.stream(other):
            out = tail(routed, early, residual)
        del early
        junk = [torch.full_like(shared, 1e30) for _ in range(4)]  # on main, which has not waited
        comm.use_stream(main)
        assert agree(comm, out, expected)
        del junk


def test_two_lanes_and_other_tiers_between(comm: k3comm.Communicator) -> None:
    cases = [parts(comm, 16, seed) for seed in (6, 7)]
    tails = [handle(comm, case) for case, _ in cases]
    plan = tails[0].plan(16, tier=Tier.SEPARATE_REDUCE)
    expected = [tail(*mine, plan=plan) for tail, (_, mine) in zip(tails, cases, strict=True)]
    for tier in comm.agreement.capacities:
        begun = []
        for lane, (tail, (_, mine)) in enumerate(zip(tails, cases, strict=True)):
            with comm.step(lane=lane):
                begun.append(tail.reduce_shared(mine[1]))
        if comm.rank == 0:
            torch.cuda._sleep(DELAY // 4)
        tails[1](*cases[1][1], plan=tails[1].plan(16, tier=tier))
        for lane, (tail, (_, mine)) in enumerate(zip(tails, cases, strict=True)):
            with comm.step(lane=lane):
                assert agree(comm, tail(mine[0], begun[lane], mine[2]), expected[lane]), tier
    torch.cuda.synchronize()


@pytest.mark.parametrize("sms", [1, 4])
def test_it_takes_no_more_blocks_than_it_may(
    sms: int, tmp_path: Path, skip_all_unless: Callable[[bool, str], None]
) -> None:
    """By the grids that a profiler sees: those of the plain call are larger, so the limit is not met by chance."""
    with negotiated(sms) as comm:
        case, (routed, shared, _) = parts(comm, 2048, 8)
        tail = handle(comm, case)
        grids = []
        for work in (lambda: tail.reduce_shared(shared), lambda: tail.reduce_routed(routed)):
            work()
            torch.cuda.synchronize()
            activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
            with torch.profiler.profile(activities=activities) as profile:
                work()
                torch.cuda.synchronize()
            file = tmp_path / f"trace-{comm.rank}-{len(grids)}.json"
            profile.export_chrome_trace(str(file))
            events = json.loads(file.read_text())["traceEvents"]
            kernels = [one for one in events if one.get("cat") == "kernel" and "nccl" in one["name"]]
            grids.append([one["args"]["grid"][0] for one in kernels])
    skip_all_unless(all(grids), "the profiler sees no kernels here")
    assert max(grids[0]) <= sms
    assert max(grids[1]) > sms


def test_it_is_closed_and_made_anew() -> None:
    for _ in range(3):
        with negotiated(2) as comm, negotiated(None) as other:
            case, (routed, shared, residual) = parts(comm, 5, 9)
            tail, plain = handle(comm, case), handle(other, case)
            expected = plain(routed, shared, residual, plan=plain.plan(5, tier=Tier.SEPARATE_REDUCE))
            assert agree(comm, tail(routed, tail.reduce_shared(shared), residual), expected)
            tier = comm._tiers[Tier.SEPARATE_REDUCE]
            assert isinstance(tier._few, FewSMs)
            assert other._tiers[Tier.SEPARATE_REDUCE]._few is None
    word = torch.ones(1, device="cuda")
    dist.all_reduce(word)  # the group's own is untouched
    assert word.item() == dist.get_world_size()


def test_close_is_bounded_while_a_graph_lives() -> None:
    comm = negotiated(2)
    case, (routed, shared, residual) = parts(comm, 5, 10)
    tail = handle(comm, case)
    tail(routed, tail.reduce_shared(shared), residual)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), comm.step(graph=True):
        tail(routed, tail.reduce_shared(shared), residual)
    graph.replay()
    torch.cuda.synchronize()
    start = time.monotonic()
    comm.close()
    assert time.monotonic() - start < 10
    graph.reset()
    torch.cuda.synchronize()
