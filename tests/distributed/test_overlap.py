"""A shared sum that is begun early, over gloo: the bits of an ordinary call; and its benchmark, at tiny sizes."""

import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import attrs
import pytest
import torch
import torch.distributed as dist

import k3comm
from k3comm import Settings, Tier
from k3comm.kernels import reference

HIDDEN, LATENT = 96, 40
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "overlap.py"


@pytest.fixture(autouse=True)
def _on_cpu(request: pytest.FixtureRequest, skip_all_unless: Callable[[bool, str], None]) -> None:
    option = request.config.getoption
    skip_all_unless(not option("--nccl") and not option("--shared-gpu"), "on CPU; test_overlap_cuda.py is for GPUs")


@pytest.fixture(params=[None, 4], ids=["off", "4"])
def comm(request: pytest.FixtureRequest) -> Iterator[k3comm.Communicator]:
    spec = k3comm.LatentMoESpec(hidden_size=HIDDEN, latent_size=LATENT, top_k=2)
    settings = Settings(overlap_sms=request.param, check_uniform=True)
    with k3comm.Communicator.negotiate(spec, dist.group.WORLD, settings=settings) as made:
        yield made


@pytest.mark.parametrize("output", ["full", "rows"])
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("precise", [False, True], ids=["rounded", "precise"])
def test_the_bits_of_an_ordinary_call(comm: k3comm.Communicator, output: str, sharded: bool, precise: bool) -> None:
    gain = torch.ones(HIDDEN, dtype=comm.dtype)
    # As many columns for each rank, whatever the world size of the run.
    sharded = sharded and HIDDEN % comm.world_size == 0
    for m in (0, 1, 6):
        case = reference.random_case(comm.world_size, max(m, 1), HIDDEN, LATENT, dtype=comm.dtype, seed=m)
        assert case.residual is not None
        weight = case.up_weight.chunk(comm.world_size)[comm.rank] if sharded else case.up_weight
        tail = comm.moe_tail(
            layer_index=len(comm.handles), norm_weight=case.norm_weight, up_weight=weight, precise=precise
        )
        own = -(-m // comm.world_size)
        residual = case.residual[:m] if output == "full" else torch.ones(own, HIDDEN, dtype=comm.dtype)
        routed, shared = case.routed[comm.rank][:m], case.shared[comm.rank][:m]
        arguments = {"output": output, "next_norm_weight": gain}
        plan = tail.plan(m, tier=Tier.SEPARATE_REDUCE, output=output, next_norm=True)
        expected = tail(routed, shared, residual, plan=plan, **arguments)
        found = [tail(routed, tail.reduce_shared(shared), residual, **arguments)]
        early = tail.reduce_shared(shared)
        found.append(tail.finish(tail.reduce_routed(routed), early, residual, **arguments))
        for out, normed in found:
            assert torch.equal(out, expected[0])
            assert torch.equal(normed, expected[1])


def test_an_early_sum_on_one_rank_alone_is_a_difference(comm: k3comm.Communicator) -> None:
    """With `check_uniform`: told by all ranks before any is in a collective that its peers are not in."""
    case = reference.random_case(comm.world_size, 3, HIDDEN, LATENT, dtype=comm.dtype, seed=1)
    tail = comm.moe_tail(layer_index=0, norm_weight=case.norm_weight, up_weight=case.up_weight)
    routed, shared = case.routed[comm.rank], case.shared[comm.rank]
    call = (lambda: tail.reduce_shared(shared)) if comm.rank == 0 else (lambda: tail(routed, shared))
    with pytest.raises(k3comm.DivergenceError, match="reduce_shared"):
        call()
    assert not comm.early
    assert torch.equal(
        tail(routed, tail.reduce_shared(shared)), tail(routed, shared, plan=tail.plan(3, tier=Tier.SEPARATE_REDUCE))
    )


def test_other_tiers_may_come_between(comm: k3comm.Communicator) -> None:
    case = reference.random_case(comm.world_size, 3, HIDDEN, LATENT, dtype=comm.dtype, seed=2)
    tails = [
        comm.moe_tail(layer_index=layer, norm_weight=case.norm_weight, up_weight=case.up_weight) for layer in (0, 1)
    ]
    routed, shared = case.routed[comm.rank], case.shared[comm.rank]
    expected = tails[0](routed, shared, plan=tails[0].plan(3, tier=Tier.SEPARATE_REDUCE))
    early = tails[0].reduce_shared(shared)
    for tier in comm.agreement.capacities:
        tails[1](routed, shared, plan=tails[1].plan(3, tier=tier))
    assert torch.equal(tails[0](routed, early), expected)


@pytest.fixture
def benchmark_module() -> Iterator[ModuleType]:
    found = importlib.util.spec_from_file_location("k3comm_benchmark_overlap", BENCHMARK)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # attrs looks its module up
    found.loader.exec_module(module)
    yield module
    del sys.modules[found.name]


def test_the_benchmark_runs_and_adds_up(benchmark_module: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    options = benchmark_module.Options(
        rows=(2, 5), hidden=HIDDEN, latent=LATENT, columns=16, sms=(1, 4), repeats=2, samples=3
    )
    results = benchmark_module.measure(options, dist.group.WORLD, torch.device("cpu"))
    assert results["equal"]
    assert json.loads(json.dumps(results))["options"]["sms"] == [1, 4]
    for rows in (2, 5):
        arms = {(one["kind"], one["sms"]): one for one in results["arms"] if one["rows"] == rows}
        kinds = {("gemm", None), ("sequence", None), ("call after", None)}
        kinds |= {(kind, sms) for kind in ("sum", "together", "call early") for sms in (None, 1, 4)}
        assert set(arms) == kinds
        for (kind, sms), one in arms.items():
            assert one["total_us"] > 0
            assert len(one["rounds_us"]) == 2
            assert (one["gemm_us"] is None) == (kind == "sum")
            assert (one["sum_us"] is None) == (kind in ("gemm", "call after", "call early"))
            if kind == "together":
                alone = arms["gemm", None]["total_us"] + arms["sum", sms]["total_us"]
                assert one["hidden_us"] == pytest.approx(alone - one["total_us"])
                assert one["saved_us"] == pytest.approx(arms["sequence", None]["total_us"] - one["total_us"])
    everywhere = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, results)
    assert all(one == everywhere[0] for one in everywhere)
    made = benchmark_module.tables(results)
    assert [len(table.rows) for table in made] == [12, 12]
    benchmark_module.show(*made)
    assert "2 rows: GEMM [2, 40] x [.., 16]" in capsys.readouterr().out
    assert attrs.asdict(options)["rows"] == (2, 5)
