"""PEER_AR over torch's symmetric memory, on GPUs: `--nccl` (a GPU a rank) or `--shared-gpu`; MULTIMEM_AR by a stand-in.

MULTIMEM_AR is refused wherever this project runs (NVLink multicast stays off), and that is tested. What it shares with
PEER_AR, all but one operator and one condition on its memory, is tested too: put into a communicator that has voted
without it, on memory that is only said to have a multicast address, with PEER_AR's operator. Nothing asks the driver
for multicast, no multicast object is made, and its own operator is never called here.

With several ranks on a GPU a kernel waits for ranks whose turn on the GPU is yet to come, so each call takes
milliseconds there: the shared mode is for right and wrong, not for speed.
"""

import hashlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from special_values import put_special_values

import k3comm
import k3comm.ops
from k3comm import Communicator, LatentMoESpec, Settings, Tier
from k3comm.buffers.cuda import CudaMemory, two_shot_all_reduce_
from k3comm.buffers.staging import BEYOND_ROWS
from k3comm.buffers.symmetric import SymmetricMemory, establish
from k3comm.kernels import reference
from k3comm.negotiate.exchange import GroupExchange
from k3comm.tiers import Agreement, Numerics, multimem_ar, peer_ar

BF16 = torch.bfloat16
HIDDEN, LATENT = 1024, 512
WINDOWS = Path(k3comm.__file__).parent / "tiers" / "windows" / "default.toml"
"""Whichever GPU: its MULTIMEM_AR wants room for 8192 rows in the buffer that PEER_AR shares."""

SIZES = (17, 255, 256, 1024, 2047, 2048, 4096, 8192)
BEYOND = 8193
"""One more than max_tokens: after a reserve."""
STAGED = pytest.mark.parametrize("tier", [Tier.PEER_AR, Tier.MULTIMEM_AR], ids=["PEER_AR", "MULTIMEM_AR-stand-in"])
layers = itertools.count()
Make = Callable[..., Communicator]


class Claimed(CudaMemory):
    """Memory that is said to have a multicast address, which it has not."""

    def map(self) -> None:
        super().map()
        assert (self.multicast_ptr, self.multicast_objects) == (0, 0)
        self.multicast_objects = 1


def stand_in(comm: Communicator) -> SymmetricMemory:
    """Puts MULTIMEM_AR into a communicator that has voted without it; the memory is the caller's. Collective."""
    context = comm._tiers[Tier.PEER_AR]._context
    exchange = GroupExchange(dist.group.WORLD, 30)

    def new(nbytes: int) -> SymmetricMemory | str:
        memory = Claimed(comm.rank, comm.world_size, group_name=dist.group.WORLD.group_name, device=comm.device)
        return establish(memory, nbytes, exchange) or memory

    request = multimem_ar.Plugin.footprint(context.proposal)
    memory = new(request.nbytes)
    assert not isinstance(memory, str), memory
    plugin = multimem_ar.Plugin()
    plugin.prepare(attrs.evolve(context, memory=memory, offset=0, establish=new))
    assert plugin.self_check(plugin._context)
    comm._tiers[Tier.MULTIMEM_AR] = plugin
    rows = comm.agreement.capacities[Tier.PEER_AR]
    comm.agreement = Agreement({**comm.agreement.capacities, Tier.MULTIMEM_AR: rows})
    return memory


@pytest.fixture(autouse=True)
def engaged(monkeypatch: pytest.MonkeyPatch) -> dict[Tier, list[int]]:
    """The elements of every call of a tier's operator; MULTIMEM_AR's is PEER_AR's in all of these tests."""
    calls: dict[Tier, list[int]] = {Tier.PEER_AR: [], Tier.MULTIMEM_AR: []}

    def counted(tier: Tier) -> Callable[[torch.Tensor, str], None]:
        def operator(x: torch.Tensor, group_name: str) -> None:
            calls[tier].append(x.numel())
            two_shot_all_reduce_(x, group_name)

        return operator

    monkeypatch.setattr(peer_ar, "two_shot_all_reduce_", counted(Tier.PEER_AR))
    monkeypatch.setattr(multimem_ar, "multimem_all_reduce_", counted(Tier.MULTIMEM_AR))
    return calls


@pytest.fixture
def make(request: pytest.FixtureRequest, gpu: torch.device, engaged: dict[Tier, list[int]]) -> Iterator[Make]:
    """Negotiates communicators in which PEER_AR is agreed, puts MULTIMEM_AR in if it is asked for, and closes them."""
    made: list[Communicator] = []
    claimed: list[SymmetricMemory] = []

    def negotiate(
        hidden: int = HIDDEN, latent: int = LATENT, tier: Tier = Tier.PEER_AR, **options: Any
    ) -> Communicator:
        shared_gpu = request.config.getoption("--shared-gpu")
        # TAIL_FUSION has tests of its own, and its self-check takes long where ranks share a GPU.
        settings = Settings(allow_shared_device=shared_gpu, disabled={Tier.TAIL_FUSION}, windows=str(WINDOWS))
        options.setdefault("settings", settings)
        spec = LatentMoESpec(hidden_size=hidden, latent_size=latent, top_k=8, max_tokens=8192)
        comm = Communicator.negotiate(spec, dist.group.WORLD, device=gpu, **options)
        made.append(comm)
        assert Tier.PEER_AR in comm.agreement, comm.report.decision.refusal(Tier.PEER_AR)
        if tier is Tier.MULTIMEM_AR:
            claimed.append(stand_in(comm))
        return comm

    yield negotiate
    torch.cuda.synchronize()
    GroupExchange(dist.group.WORLD, 30).gather(b"x")  # no peer still reads
    for comm in made:
        comm.close()
    for memory in claimed:
        memory.release()


def integers(comm: Communicator, rows: int, seed: int = 0) -> reference.Case:
    spec = comm.spec
    return reference.integer_case(
        comm.world_size, rows, spec.hidden_size, spec.latent_size, dtype=BF16, seed=seed, norm=False
    ).to(comm.device)


def drawn(comm: Communicator, rows: int) -> reference.Case:
    """Distributed as `reference.random_case`, but drawn on the device: on the host Kimi-K3's widths take over 10 s."""
    generator = torch.Generator(comm.device).manual_seed(1)

    def normal(*shape: int, sigma: float, mean: float = 0.0) -> torch.Tensor:
        values = torch.randn(shape, generator=generator, device=comm.device)
        return values.mul_(sigma).add_(mean).to(BF16)

    world_size, hidden, latent = comm.world_size, comm.spec.hidden_size, comm.spec.latent_size
    case = reference.Case(
        routed=normal(world_size, rows, latent, sigma=0.1),
        shared=normal(world_size, rows, hidden, sigma=0.1),
        residual=normal(rows, hidden, sigma=1.0),
        norm_weight=normal(latent, sigma=0.1, mean=1.0),
        up_weight=normal(hidden, latent, sigma=0.02),
        up_bias=None,
        routed_scale=1.0,
        eps=comm.spec.rms_eps,
    )
    assert same_everywhere(case.routed[0, -1], case.up_weight), "the ranks' GPUs draw different numbers"
    return case


def handle(comm: Communicator, case: reference.Case, **options: Any) -> k3comm.MoETail:
    weights = {"norm_weight": case.norm_weight, "up_weight": case.up_weight, **options}
    return comm.moe_tail(layer_index=next(layers), **weights)


def call(
    tail: k3comm.MoETail,
    comm: Communicator,
    case: reference.Case,
    rows: int,
    tier: Tier = Tier.PEER_AR,
    first: int = 0,
) -> torch.Tensor:
    part = slice(first, first + rows)
    plan = tail.plan(rows, tier=tier)
    return tail(case.routed[comm.rank][part], case.shared[comm.rank][part], case.residual[part], plan=plan)


def truth(case: reference.Case) -> torch.Tensor:
    return reference.round_once(case.truth(), BF16)


def same_everywhere(*outs: torch.Tensor) -> bool:
    found = hashlib.sha256(b"".join(out.cpu().view(torch.int16).numpy().tobytes() for out in outs)).digest()
    return len(set(GroupExchange(dist.group.WORLD, 30).gather(found))) == 1


def test_it_is_agreed_with_room_for_the_windows(make: Make) -> None:
    comm = make()
    assert comm.agreement.capacities[Tier.PEER_AR] == 8192
    assert comm.memory()["multicast objects"] == 0
    nbytes = comm.memory()["PEER_AR: staging"]
    assert 0 <= nbytes - 8192 * (HIDDEN + LATENT) * 2 < 4096
    assert Tier.MULTIMEM_AR not in comm.agreement
    assert "in the environment rules it out" in comm.report.decision.refusal(Tier.MULTIMEM_AR)
    assert "MULTIMEM_AR has not run on hardware" in str(comm.report)
    with pytest.raises(k3comm.NegotiationError, match="MULTIMEM_AR is asked for by name and not agreed"):
        make(settings=Settings(force=Tier.MULTIMEM_AR, allow_shared_device=comm.settings.allow_shared_device))


@STAGED
def test_integers_are_exact_at_every_size(make: Make, tier: Tier, engaged: dict[Tier, list[int]]) -> None:
    comm = make(tier=tier)
    case = integers(comm, BEYOND)
    tail, right = handle(comm, case), truth(case)
    comm.reserve(BEYOND)
    sizes = (1, *SIZES, BEYOND)
    before = {one: len(calls) for one, calls in engaged.items()}
    outs = [call(tail, comm, case, rows, tier) for rows in sizes]
    for rows, out in zip(sizes, outs, strict=True):
        assert torch.equal(out, right[:rows]), rows
    for one, calls in engaged.items():
        assert calls[before[one] :] == ([rows * (HIDDEN + LATENT) for rows in sizes] if one is tier else [])


def test_kimi_k3_widths(make: Make, engaged: dict[Tier, list[int]]) -> None:
    comm = make(7168, 3584)
    case = integers(comm, 256)
    tail, right = handle(comm, case), truth(case)
    before = len(engaged[Tier.PEER_AR])
    for rows in (1, 64, 256):
        assert torch.equal(call(tail, comm, case, rows), right[:rows])
    assert len(engaged[Tier.PEER_AR]) == before + 3


@pytest.mark.parametrize(("hidden", "latent"), [(HIDDEN, LATENT), (7168, 3584)], ids=["narrow", "Kimi-K3"])
def test_accuracy_beside_separate_reduce(
    make: Make, hidden: int, latent: int, skip_all_unless: Callable[[bool, str], None]
) -> None:
    """Each m is judged by itself, over 4096 rows or more: in as many calls of m rows as make them, of other rows each.

    Of one set of rows, so that the float64 truth is computed once. MULTIMEM_AR's stand-in adds as PEER_AR does, so its
    figures would say nothing about the switch.
    """
    comm = make(hidden, latent)
    sharing = max(map(len, comm.report.decision.shared_devices), default=1)
    skip_all_unless(
        hidden == HIDDEN or sharing <= 2,
        f"{sharing} ranks share a GPU, and its memory and time: Kimi-K3's widths in float64 are for up to 2",
    )
    case = drawn(comm, BEYOND)
    tail, right = handle(comm, case), case.truth()
    comm.reserve(BEYOND)
    for rows in (*SIZES, BEYOND):
        meters = {tier: reference.AccuracyMeter() for tier in (Tier.PEER_AR, Tier.SEPARATE_REDUCE)}
        peers = []
        for first in range(0, reference.POOL_ROWS, rows):
            part = slice(first, first + rows)
            for tier, meter in meters.items():
                out = call(tail, comm, case, rows, tier, first)
                meter.add(out, right[part], case.residual[part])
                if tier is Tier.PEER_AR:
                    peers.append(out)
        assert same_everywhere(*peers), rows
        peer, separate = (meter.result() for meter in meters.values())
        assert peer.rows == len(peers) * rows >= reference.POOL_ROWS
        assert reference.accept(Numerics.K2, peer, dtype=BF16, separate_reduce=separate) == [], (rows, peer, separate)


@STAGED
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("decode", [False, True])
def test_every_phase_gives_the_same_bits(make: Make, tier: Tier, graph: bool, decode: bool) -> None:
    comm = make(tier=tier)
    case = integers(comm, 33)
    tail = handle(comm, case)
    plan = tail.plan(33, graph=graph, decode=decode, tier=tier)
    out = tail(case.routed[comm.rank], case.shared[comm.rank], case.residual, plan=plan)
    assert torch.equal(out, truth(case))


def test_multimem_is_what_the_windows_choose_for_prefill(make: Make, engaged: dict[Tier, list[int]]) -> None:
    """By the windows that stand for what was published: 256..8192 rows, and no forward of decode rows alone."""
    shared_gpu = make().settings.allow_shared_device
    comm = make(tier=Tier.MULTIMEM_AR, settings=Settings(windows=str(WINDOWS), allow_shared_device=shared_gpu))
    case = integers(comm, 300)
    tail, right = handle(comm, case), truth(case)
    others = len(engaged[Tier.PEER_AR])
    for rows, decode, taken in ((255, False, False), (256, False, True), (256, True, False), (300, False, True)):
        before = len(engaged[Tier.MULTIMEM_AR])
        with comm.step(decode=decode):
            part = slice(0, rows)
            out = tail(case.routed[comm.rank][part], case.shared[comm.rank][part], case.residual[part])
        assert (len(engaged[Tier.MULTIMEM_AR]) - before, torch.equal(out, right[:rows])) == (taken, True), rows
    assert len(engaged[Tier.PEER_AR]) == others


@STAGED
@pytest.mark.parametrize("rows", [17, 256])
def test_replays_equal_eager_calls_also_after_growth(
    make: Make, tier: Tier, rows: int, engaged: dict[Tier, list[int]]
) -> None:
    """A graph goes on with the buffers that it was captured with, retired or not."""
    comm = make(tier=tier)
    tensors = [torch.zeros(rows, width, dtype=BF16, device=comm.device) for width in (LATENT, HIDDEN, HIDDEN)]
    first = integers(comm, rows)
    tail = handle(comm, first)
    plan = tail.plan(rows, graph=True, decode=True, tier=tier)
    for _ in range(2):
        tail(*tensors, plan=plan)
    torch.cuda.synchronize()
    before = len(engaged[tier])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tail(*tensors, plan=plan)
    assert len(engaged[tier]) == before + 1
    for seed in range(6):
        if seed == 3:
            torch.cuda.synchronize()
            comm.reserve(BEYOND)
            # What was asked for and no more; the old buffer is kept.
            held = -(-BEYOND // BEYOND_ROWS) * BEYOND_ROWS
            assert comm.agreement.capacities[tier] == held
            assert 0 <= comm.memory()[f"{tier.name}: staging"] - held * (HIDDEN + LATENT) * 2 < 4096
            assert 0 <= comm.memory()[f"{tier.name}: staging, retired"] - 8192 * (HIDDEN + LATENT) * 2 < 4096
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
    assert len(engaged[tier]) == before + 1 + 6  # the replays are the graph's own


@STAGED
def test_a_miss_in_a_capture_raises_and_names_reserve(make: Make, tier: Tier) -> None:
    comm = make(tier=tier)
    pool = comm._tiers[tier]._pool
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        torch.zeros(1, device=comm.device)
        with pytest.raises(k3comm.CaptureError, match=r"call reserve\(8193\) on every rank before the capture"):
            pool.view("partials", 8193)
        with pytest.raises(k3comm.CaptureError, match="it is collective and allocates"):
            pool.reserve(8192)
    case = integers(comm, 5)
    assert torch.equal(call(handle(comm, case), comm, case, 5, tier), truth(case))


@STAGED
def test_lanes_one_after_the_other(make: Make, tier: Tier) -> None:
    comm = make(tier=tier, lanes=2)
    cases = [integers(comm, 19, seed) for seed in range(6)]
    tails = [handle(comm, case) for case in cases]
    outs = []
    for number, (tail, case) in enumerate(zip(tails, cases, strict=True)):
        with comm.step(lane=number % 2):
            outs.append(call(tail, comm, case, 19, tier))
    for out, case in zip(outs, cases, strict=True):
        assert torch.equal(out, truth(case))


@STAGED
def test_arguments_equal_widths_and_strange_layouts(make: Make, tier: Tier) -> None:
    """Sharded W_up, own rows, the next norm, inputs with strides; L equal to H."""
    comm = make(512, 512, tier)
    rows = 37
    case = integers(comm, rows)
    right, world_size, rank = truth(case), comm.world_size, comm.rank
    sharded = handle(comm, case, up_weight=case.up_weight.chunk(world_size)[rank])
    assert torch.equal(call(sharded, comm, case, rows, tier), right)
    tail = handle(comm, case)
    own = -(-rows // world_size)
    mine = slice(rank * own, min((rank + 1) * own, rows))
    residual = torch.zeros(own, 512, dtype=BF16, device=comm.device)
    residual[: mine.stop - mine.start if mine.stop > mine.start else 0] = case.residual[mine]
    gain = torch.ones(512, device=comm.device)
    plan = tail.plan(rows, tier=tier, output="rows", next_norm=True)
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
    tail = handle(comm, case)
    right = put_special_values(case, comm.rank, truth(case))
    torch.testing.assert_close(call(tail, comm, case, 24), right, rtol=0, atol=0, equal_nan=True)


def test_a_compiled_model_reaches_it_through_our_operator(make: Make, engaged: dict[Tier, list[int]]) -> None:
    """The choice is made when the operator runs; torch's own operators are never traced."""
    shared_gpu = make().settings.allow_shared_device
    comm = make(settings=Settings(force=Tier.PEER_AR, allow_shared_device=shared_gpu), name=f"compiled-{next(layers)}")
    case = integers(comm, 21)
    tail = handle(comm, case)

    def model(routed: torch.Tensor, shared: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return tail(routed, shared, residual) * 1

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    before = len(engaged[Tier.PEER_AR])
    with torch.no_grad():
        out = compiled(case.routed[comm.rank], case.shared[comm.rank], case.residual)
    assert len(engaged[Tier.PEER_AR]) == before + 1
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
