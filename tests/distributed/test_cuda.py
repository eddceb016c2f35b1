"""What only a GPU shows: the library tiers over NCCL in CUDA graphs. Run with --nccl, a GPU a rank (make test-gpu)."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist

import k3comm
from k3comm import Tier
from k3comm.kernels import reference

ROWS, HIDDEN, LATENT = 17, 1024, 512


@pytest.fixture
def comm(request: pytest.FixtureRequest, skip_all_unless: Callable[[bool, str], None]) -> Iterator[k3comm.Communicator]:
    skip_all_unless(request.config.getoption("--nccl"), "needs --nccl and a GPU for every rank")
    spec = k3comm.LatentMoESpec(hidden_size=HIDDEN, latent_size=LATENT, top_k=8)
    with k3comm.Communicator.negotiate(spec, dist.group.WORLD) as made:
        yield made


def inputs(comm: k3comm.Communicator, seed: int) -> tuple[reference.Case, list[torch.Tensor]]:
    case = reference.random_case(comm.world_size, ROWS, HIDDEN, LATENT, dtype=comm.dtype, seed=seed).to(comm.device)
    assert case.residual is not None
    return case, [case.routed[comm.rank].clone(), case.shared[comm.rank].clone(), case.residual.clone()]


def test_the_group_and_the_facts(comm: k3comm.Communicator) -> None:
    facts = comm.report.facts
    assert (facts.device, facts.backend, comm.device.type) == ("cuda", "nccl", "cuda")
    assert facts.family.startswith("sm")
    assert isinstance(facts.device_uuid, str)
    assert len(facts.device_uuid) > 8
    assert isinstance(facts.driver, str)
    assert comm.report.decision.shared_devices == ()


@pytest.mark.parametrize(
    "tier",
    [Tier.SEPARATE_REDUCE, Tier.FUSED_LANE_AR, Tier.SEQUENCE_PARALLEL, Tier.COLUMN_PARALLEL],
    ids=lambda tier: tier.name,
)
def test_replays_equal_eager_calls(comm: k3comm.Communicator, tier: Tier) -> None:
    """A graph captured once gives, for inputs changed in place, the bits of an eager call."""
    case, tensors = inputs(comm, 0)
    tail = comm.moe_tail(layer_index=0, norm_weight=case.norm_weight, up_weight=case.up_weight)
    plan = tail.plan(ROWS, graph=True, decode=True, tier=tier)
    for _ in range(3):
        tail(*tensors, plan=plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tail(*tensors, plan=plan)
    for seed in range(20):
        _, fresh = inputs(comm, seed)
        for mine, new in zip(tensors, fresh, strict=True):
            mine.copy_(new)
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, tail(*tensors, plan=plan))


def test_a_capture_outside_a_step_is_refused(comm: k3comm.Communicator) -> None:
    case, tensors = inputs(comm, 0)
    tail = comm.moe_tail(layer_index=0, norm_weight=case.norm_weight, up_weight=case.up_weight)
    tail(*tensors)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(k3comm.CaptureError, match=r"comm\.step\(graph=True\)"):
            tail(*tensors)
        with comm.step(graph=True):
            out = tail(*tensors)
    graph.replay()
    assert torch.equal(out, tail(*tensors))


def test_a_tensor_on_another_device_is_refused(comm: k3comm.Communicator) -> None:
    case, (routed, shared, _) = inputs(comm, 0)
    tail = comm.moe_tail(layer_index=0, up_weight=case.up_weight)
    with pytest.raises(k3comm.InputError, match="shared: on cpu; accepted is cuda:"):
        tail(routed, shared.cpu())
