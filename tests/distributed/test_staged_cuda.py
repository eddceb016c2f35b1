"""PEER_AR over torch's symmetric memory, on GPUs: `--nccl` (a GPU a rank) or `--shared-gpu`; MULTIMEM_AR's refusal.

With several ranks on a GPU a kernel waits for ranks whose turn on the GPU is yet to come, so each call takes
milliseconds there: the shared mode is for right and wrong, not for speed.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import k3comm
import k3comm.ops
from k3comm import Communicator, LatentMoESpec, Settings, Tier
from k3comm.kernels import reference
from k3comm.negotiate.exchange import GroupExchange
from k3comm.tiers import Numerics

BF16 = torch.bfloat16
HIDDEN, LATENT = 1024, 512
SIZES = (17, 255, 256, 1024, 2047, 2048, 4096, 8192)
layers = itertools.count()
Make = Callable[..., Communicator]


@pytest.fixture
def make(request: pytest.FixtureRequest, gpu: torch.device) -> Iterator[Make]:
    """Negotiates communicators in which PEER_AR is agreed, and closes them."""
    made: list[Communicator] = []

    def negotiate(hidden: int = HIDDEN, latent: int = LATENT, **options: Any) -> Communicator:
        options.setdefault("settings", Settings(allow_shared_device=request.config.getoption("--shared-gpu")))
        spec = LatentMoESpec(hidden_size=hidden, latent_size=latent, top_k=8, max_tokens=8192)
        comm = Communicator.negotiate(spec, dist.group.WORLD, device=gpu, **options)
        made.append(comm)
        assert Tier.PEER_AR in comm.agreement, comm.report.decision.refusal(Tier.PEER_AR)
        return comm

    yield negotiate
    torch.cuda.synchronize()
    GroupExchange(dist.group.WORLD, 30).gather(b"x")  # no peer still reads
    for comm in made:
        comm.close()


@pytest.fixture
def engaged(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The elements of every call of torch's operator by PEER_AR."""
    from k3comm.tiers import peer_ar

    calls: list[int] = []
    operator = peer_ar.two_shot_all_reduce_

    def counted(x: torch.Tensor, group_name: str) -> None:
        calls.append(x.numel())
        operator(x, group_name)

    monkeypatch.setattr(peer_ar, "two_shot_all_reduce_", counted)
    return calls


def integers(comm: Communicator, rows: int, seed: int = 0) -> reference.Case:
    spec = comm.spec
    return reference.integer_case(
        comm.world_size, rows, spec.hidden_size, spec.latent_size, dtype=BF16, seed=seed, norm=False
    ).to(comm.device)


def handle(comm: Communicator, case: reference.Case, **options: Any) -> k3comm.MoETail:
    weights = {"norm_weight": case.norm_weight, "up_weight": case.up_weight, **options}
    return comm.moe_tail(layer_index=next(layers), **weights)


def call(
    tail: k3comm.MoETail, comm: Communicator, case: reference.Case, rows: int, tier: Tier = Tier.PEER_AR
) -> torch.Tensor:
    part = slice(0, rows)
    plan = tail.plan(rows, tier=tier)
    return tail(case.routed[comm.rank][part], case.shared[comm.rank][part], case.residual[part], plan=plan)


def truth(case: reference.Case) -> torch.Tensor:
    return reference.round_once(case.truth(), BF16)


def same_everywhere(*outs: torch.Tensor) -> bool:
    found = hashlib.sha256(b"".join(out.cpu().view(torch.int16).numpy().tobytes() for out in outs)).digest()
    return len(set(GroupExchange(dist.group.WORLD, 30).gather(found))) == 1


def test_it_is_agreed_with_room_for_the_windows(make: Make) -> None:
    comm = make()
    assert comm.agreement.capacities[Tier.PEER_AR] == 8192  # the default windows' MULTIMEM_AR shares the buffer
    assert comm.memory()["multicast objects"] == 0
    nbytes = comm.memory()["PEER_AR: staging"]
    assert 0 <= nbytes - 8192 * (HIDDEN + LATENT) * 2 < 4096
    assert Tier.MULTIMEM_AR not in comm.agreement
    assert comm.report.decision.refusal(Tier.MULTIMEM_AR)
    with pytest.raises(k3comm.NegotiationError, match="MULTIMEM_AR is asked for by name and not agreed"):
        make(settings=Settings(force=Tier.MULTIMEM_AR, allow_shared_device=comm.settings.allow_shared_device))


def test_integers_are_exact_at_every_size(make: Make, engaged: list[int]) -> None:
    comm = make()
    case = integers(comm, 8192)
    tail, right = handle(comm, case), truth(case)
    before = len(engaged)
    outs = [call(tail, comm, case, rows) for rows in (1, *SIZES)]
    for rows, out in zip((1, *SIZES), outs, strict=True):
        assert torch.equal(out, right[:rows]), rows
    assert engaged[before:] == [rows * (HIDDEN + LATENT) for rows in (1, *SIZES)]


def test_kimi_k3_widths(make: Make, engaged: list[int]) -> None:
    comm = make(7168, 3584)
    case = integers(comm, 256)
    tail, right = handle(comm, case), truth(case)
    before = len(engaged)
    for rows in (1, 64, 256):
        assert torch.equal(call(tail, comm, case, rows), right[:rows])
    assert len(engaged) == before + 3


def test_accuracy_beside_separate_reduce(make: Make) -> None:
    """Pooled over the sizes, the largest by itself, and past max_tokens after a reserve."""
    comm = make()
    case = reference.random_case(comm.world_size, 8193, HIDDEN, LATENT, dtype=BF16, seed=1).to(comm.device)
    tail, right = handle(comm, case), case.truth()
    comm.reserve(8193)
    for sizes in (SIZES[:-2], (4096,), (8192,), (8193,)):
        meters = {tier: reference.AccuracyMeter() for tier in (Tier.PEER_AR, Tier.SEPARATE_REDUCE)}
        for rows in sizes:
            outs = {tier: call(tail, comm, case, rows, tier) for tier in meters}
            for tier, meter in meters.items():
                meter.add(outs[tier], right[:rows], case.residual[:rows])
            assert same_everywhere(outs[Tier.PEER_AR])
        peer, separate = (meter.result() for meter in meters.values())
        assert peer.rows >= reference.POOL_ROWS
        assert reference.accept(Numerics.K2, peer, dtype=BF16, separate_reduce=separate) == [], (sizes, peer, separate)


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("decode", [False, True])
def test_every_phase_gives_the_same_bits(make: Make, graph: bool, decode: bool) -> None:
    comm = make()
    case = integers(comm, 33)
    tail = handle(comm, case)
    plan = tail.plan(33, graph=graph, decode=decode, tier=Tier.PEER_AR)
    out = tail(case.routed[comm.rank], case.shared[comm.rank], case.residual, plan=plan)
    assert torch.equal(out, truth(case))


@pytest.mark.parametrize("rows", [17, 256])
def test_replays_equal_eager_calls_also_after_growth(make: Make, rows: int, engaged: list[int]) -> None:
    """A graph goes on with the buffers that it was captured with, retired or not."""
    comm = make()
    tensors = [torch.zeros(rows, width, dtype=BF16, device=comm.device) for width in (LATENT, HIDDEN, HIDDEN)]
    first = integers(comm, rows)
    tail = handle(comm, first)
    plan = tail.plan(rows, graph=True, decode=True, tier=Tier.PEER_AR)
    for _ in range(2):
        tail(*tensors, plan=plan)
    torch.cuda.synchronize()
    before = len(engaged)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tail(*tensors, plan=plan)
    assert len(engaged) == before + 1
    for seed in range(6):
        if seed == 3:
            torch.cuda.synchronize()
            comm.reserve(8193)
            assert comm.memory()["PEER_AR: staging, retired"] > 0
        case = integers(comm, rows, seed)
        for mine, new in zip(tensors, (case.routed[comm.rank], case.shared[comm.rank], case.residual), strict=True):
            mine.copy_(new)
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, tail(*tensors, plan=plan))
        weights = first.up_weight
        right = (
            case.residual.double() + case.routed.double().sum(0) @ weights.double().t() + case.shared.double().sum(0)
        )
        assert torch.equal(replayed, right.to(BF16))
    assert len(engaged) == before + 1 + 6  # the replays are the graph's own


def test_a_miss_in_a_capture_raises_and_names_reserve(make: Make) -> None:
    comm = make()
    pool = comm._tiers[Tier.PEER_AR]._pool
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1, device=comm.device)
        with pytest.raises(k3comm.CaptureError, match=r"call reserve\(8193\) on every rank before the capture"):
            pool.view("partials", 8193)
        with pytest.raises(k3comm.CaptureError, match="it is collective and allocates"):
            pool.reserve(8192)
    case = integers(comm, 5)
    assert torch.equal(call(handle(comm, case), comm, case, 5), truth(case))


def test_lanes_one_after_the_other(make: Make) -> None:
    comm = make(lanes=2)
    cases = [integers(comm, 19, seed) for seed in range(6)]
    tails = [handle(comm, case) for case in cases]
    outs = []
    for number, (tail, case) in enumerate(zip(tails, cases, strict=True)):
        with comm.step(lane=number % 2):
            outs.append(call(tail, comm, case, 19))
    for out, case in zip(outs, cases, strict=True):
        assert torch.equal(out, truth(case))


def test_arguments_equal_widths_and_strange_layouts(make: Make) -> None:
    """Sharded W_up, own rows, the next norm, inputs with strides; L equal to H."""
    comm = make(512, 512)
    rows = 37
    case = integers(comm, rows)
    right, world_size, rank = truth(case), comm.world_size, comm.rank
    assert torch.equal(
        call(handle(comm, case, up_weight=case.up_weight.chunk(world_size)[rank]), comm, case, rows), right
    )
    tail = handle(comm, case)
    own = -(-rows // world_size)
    mine = slice(rank * own, min((rank + 1) * own, rows))
    residual = torch.zeros(own, 512, dtype=BF16, device=comm.device)
    residual[: mine.stop - mine.start if mine.stop > mine.start else 0] = case.residual[mine]
    gain = torch.ones(512, device=comm.device)
    plan = tail.plan(rows, tier=Tier.PEER_AR, output="rows", next_norm=True)
    wide = torch.zeros(rows, 1024, dtype=BF16, device=comm.device)
    wide[:, ::2] = case.shared[rank]
    routed = case.routed[rank].t().contiguous().t()
    out, normed = tail(routed, wide[:, ::2], residual, plan=plan, output="rows", next_norm_weight=gain)
    assert torch.equal(out[: max(mine.stop - mine.start, 0)], right[mine])
    assert not out[max(mine.stop - mine.start, 0) :].any()
    expected = reference.rms_norm(out, gain, comm.spec.rms_eps)
    assert torch.allclose(normed.double(), expected, rtol=1e-2, atol=1e-3)


def test_special_values_stay_in_their_rows(make: Make) -> None:
    comm = make()
    case = integers(comm, 24)
    tail, right = handle(comm, case), truth(case)
    case.routed[comm.rank][5] = float("nan")
    case.shared[comm.rank][7, 3] = float("inf")
    out = call(tail, comm, case, 24)
    rest = [row for row in range(24) if row not in (5, 7)]
    assert torch.equal(out[rest], right[rest])
    assert out[5].isnan().all()
    assert out[7, 3].isinf()
    keep = [column for column in range(HIDDEN) if column != 3]
    assert torch.equal(out[7, keep], right[7, keep])


def test_a_compiled_model_reaches_it_through_our_operator(make: Make, engaged: list[int]) -> None:
    """The choice is made when the operator runs; torch's own operators are never traced."""
    shared_gpu = make().settings.allow_shared_device
    comm = make(settings=Settings(force=Tier.PEER_AR, allow_shared_device=shared_gpu), name=f"compiled-{next(layers)}")
    case = integers(comm, 21)
    tail = handle(comm, case)

    def model(routed: torch.Tensor, shared: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return tail(routed, shared, residual) * 1

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    before = len(engaged)
    with torch.no_grad():
        out = compiled(case.routed[comm.rank], case.shared[comm.rank], case.residual)
    assert len(engaged) == before + 1
    assert torch.equal(out, truth(case))


def test_many_calls_of_changing_size(make: Make) -> None:
    """The signal pad survives grids of every size, call after call, without a synchronisation between."""
    comm = make()
    case = integers(comm, 2048)
    tail, right = handle(comm, case), truth(case)
    sizes = [1, 2048, 3, 700, 17, 1, 1500, 64] * 3
    outs = [call(tail, comm, case, rows) for rows in sizes]
    for rows, out in zip(sizes, outs, strict=True):
        assert torch.equal(out, right[:rows])
