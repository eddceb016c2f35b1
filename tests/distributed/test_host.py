"""The tiers over the host's shared memory: protocol, generations, lanes, growth, and the deferred finalize."""

import itertools
import random
import resource
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import k3comm
from k3comm import Communicator, LatentMoESpec, Settings, Tier
from k3comm.kernels import reference

HIDDEN, LATENT, TOP_K = 96, 40, 4
SPEC = LatentMoESpec(hidden_size=HIDDEN, latent_size=LATENT, top_k=TOP_K, max_tokens=2048)
layers = itertools.count()
BF16 = torch.bfloat16


@pytest.fixture
def comm() -> Iterator[Communicator]:
    with Communicator.negotiate(SPEC, dist.group.WORLD, lanes=2) as made:
        assert {Tier.TAIL_FUSION, Tier.PEER_AR} <= set(made.agreement.capacities)
        yield made


def case_of(comm: Communicator, rows: int, seed: int = 0, **options) -> reference.Case:
    return reference.random_case(comm.world_size, rows, HIDDEN, LATENT, dtype=BF16, seed=seed, **options)


def handle(comm: Communicator, case: reference.Case, **options) -> k3comm.MoETail:
    return comm.moe_tail(layer_index=next(layers), norm_weight=case.norm_weight, up_weight=case.up_weight, **options)


def call(tail: k3comm.MoETail, comm: Communicator, case: reference.Case, tier: Tier, rows: slice = slice(None)):
    routed, shared, residual = case.routed[comm.rank][rows], case.shared[comm.rank][rows], case.residual[rows]
    return tail(routed, shared, residual, plan=tail.plan(routed.shape[0], tier=tier))


def near(out: torch.Tensor, case: reference.Case) -> bool:
    """No wrong data: within what the coarsest class may stray, in units of one rounding."""
    accuracy = reference.measure(out, case.truth(), case.residual)
    return accuracy.error < 2.5 * accuracy.ideal_error


def test_the_same_row_has_the_same_bits_in_any_batch(comm: Communicator) -> None:
    case = case_of(comm, 64)
    tail = handle(comm, case)
    whole = call(tail, comm, case, Tier.TAIL_FUSION)
    for rows in (1, 2, 3, 16, 17, 33):
        for first in (0, 64 - rows):
            part = slice(first, first + rows)
            assert torch.equal(call(tail, comm, case, Tier.TAIL_FUSION, part), whole[part])


def test_the_rows_own_bits_survive_full_width(comm: Communicator) -> None:
    """At Kimi-K3's latent width a BLAS has reasons to change its order with the batch."""
    spec = LatentMoESpec(hidden_size=16 * comm.world_size, latent_size=3584, top_k=16)
    with Communicator.negotiate(spec, dist.group.WORLD) as wide:
        case = reference.random_case(wide.world_size, 17, spec.hidden_size, 3584, dtype=BF16, seed=3)
        tail = wide.moe_tail(layer_index=0, norm_weight=case.norm_weight, up_weight=case.up_weight)
        whole = call(tail, wide, case, Tier.TAIL_FUSION)
        for row in (0, 5, 16):
            assert torch.equal(call(tail, wide, case, Tier.TAIL_FUSION, slice(row, row + 1)), whole[row : row + 1])


@pytest.mark.parametrize("region", [0, 1, 2])
def test_generations_go_on_from_any_region(comm: Communicator, region: int) -> None:
    """Calls of changing m from a preset region: what a call leaves behind never shows in a later one."""
    pool = comm._tiers[Tier.TAIL_FUSION]._pool
    dist.barrier()
    for lane in pool.lanes:
        lane.fill(region_number=region)
    dist.barrier()
    cases = {rows: case_of(comm, rows, rows) for rows in (1, 2, 7, 64)}
    layer = cases[64]
    tails = {rows: handle(comm, case) for rows, case in cases.items()}
    expected = {rows: reference.round_once(case.truth(), BF16) for rows, case in cases.items()}
    assert layer.routed.shape[0] == comm.world_size
    order = random.Random(7)
    for _ in range(40):
        rows = order.choice(list(cases))
        out = call(tails[rows], comm, cases[rows], Tier.TAIL_FUSION)
        assert (out != expected[rows]).float().mean() < 0.01
    assert pool.lanes[0].calls == 40
    assert pool.lanes[0].region_number == (region + 40) % 3


def test_payloads_that_look_like_an_empty_mailbox(comm: Communicator) -> None:
    """Words of ones are NaNs and come out as NaNs; -0.0, subnormals and other NaNs pass; nobody waits for ever."""
    case = reference.integer_case(comm.world_size, 4, HIDDEN, LATENT, dtype=BF16, seed=1, norm=False)
    tail = handle(comm, case)
    words = torch.tensor([-1, 0x7FFF7FFF, -0x7FFF8000, 0x00010001], dtype=torch.int32)
    shared = words[:, None].expand(4, HIDDEN // 2).contiguous().view(BF16)
    last = comm.rank == comm.world_size - 1
    quiet = torch.zeros(4, LATENT, dtype=BF16)
    mine = shared if last else torch.zeros_like(shared)
    for tier in (Tier.TAIL_FUSION, Tier.PEER_AR):
        out = tail(quiet, mine, None, plan=tail.plan(4, tier=tier))
        assert out[0].isnan().all()
        assert out[1].isnan().all()
        assert torch.equal(out[3].view(torch.int16), shared[3].view(torch.int16))
        routed = quiet.clone()
        routed[0] = float("nan")
        poisoned = tail(routed, torch.zeros_like(shared), None, plan=tail.plan(4, tier=tier))
        assert poisoned[0].isnan().all()
        assert torch.count_nonzero(poisoned[1:]) == 0


def test_lanes_are_independent(comm: Communicator) -> None:
    """Two micro-batches whose calls interleave differently on no rank, each in its own lane and order."""
    cases = [case_of(comm, rows, rows) for rows in (3, 64)]
    tails = [handle(comm, case) for case in cases]
    for tier in (Tier.TAIL_FUSION, Tier.PEER_AR):
        alone = [call(tail, comm, case, tier) for tail, case in zip(tails, cases, strict=True)]
        for lane in (0, 1, 1, 0, 1, 0, 0, 1):
            with comm.step(lane=lane):
                assert torch.equal(call(tails[lane], comm, cases[lane], tier), alone[lane])
    lanes = comm._tiers[Tier.TAIL_FUSION]._pool.lanes
    assert (lanes[0].calls, lanes[1].calls) == (1 + 2 + 4, 1 + 4)  # the self-check ran once in each
    with pytest.raises(k3comm.InputError, match=r"lane: 2 given; accepted are 0 to 1 \(lanes=2\)"), comm.step(lane=2):
        pass


def test_two_communicators_share_nothing(comm: Communicator) -> None:
    with Communicator.negotiate(SPEC, dist.group.WORLD) as other:
        case = case_of(comm, 5)
        for tier in (Tier.TAIL_FUSION, Tier.PEER_AR):
            pair = [(one, handle(one, case)) for one in (comm, other)]
            for one, tail in (*pair, *reversed(pair), *pair):
                assert near(call(tail, one, case, tier), case)
        assert other.memory()["TAIL_FUSION: mailboxes"] < comm.memory()["TAIL_FUSION: mailboxes"]


def deferred_inputs(seed: int, rows: int, weights_dtype: torch.dtype):
    """Expert rows of which some are referenced by nobody, and hold NaN; some slots are -1."""
    draw = torch.Generator().manual_seed(seed)
    index = torch.randperm(2 * rows * TOP_K, generator=draw)[: rows * TOP_K].to(torch.int32)
    index[torch.rand(rows * TOP_K, generator=draw) < 0.3] = -1
    expert_rows = torch.full((2 * rows * TOP_K, LATENT + 8), float("nan"), dtype=BF16)
    used = index[index >= 0].long()
    expert_rows[used, :LATENT] = torch.randn(len(used), LATENT, generator=draw).to(BF16)
    weights = torch.rand(rows * TOP_K, generator=draw).to(weights_dtype)
    return expert_rows, weights, index


@pytest.mark.parametrize("weights_dtype", [BF16, torch.float32], ids=["bf16", "fp32"])
def test_deferred_is_bit_equal_to_the_materialised_path(comm: Communicator, weights_dtype: torch.dtype) -> None:
    for rows in (1, 5, 17):
        case = case_of(comm, rows)
        tail = handle(comm, case)
        expert_rows, weights, index = deferred_inputs(comm.rank + 10 * rows, rows, weights_dtype)
        routed = torch.zeros(rows, LATENT)
        for token, k in itertools.product(range(rows), range(TOP_K)):
            row = int(index[token * TOP_K + k])
            if row >= 0:  # a fused multiply-add: exact in float64, then one rounding
                exact = (
                    routed[token].double() + weights[token * TOP_K + k].double() * expert_rows[row, :LATENT].double()
                )
                routed[token] = exact.float()
        shared, residual = case.shared[comm.rank], case.residual
        for tier in comm.agreement.capacities:
            plan = tail.plan(rows, tier=tier)
            expected = tail(routed.to(BF16), shared, residual, plan=plan)
            out = tail.deferred(expert_rows, weights, index, shared, residual, num_tokens=rows, plan=plan)
            assert torch.equal(out, expected)
            assert not out.isnan().any()


def test_a_rank_without_rows_takes_part_with_zeros(comm: Communicator) -> None:
    case = case_of(comm, 3)
    tail = handle(comm, case)
    none = (torch.empty(0, LATENT, dtype=BF16), torch.ones(3 * TOP_K), torch.full((3 * TOP_K,), -1, dtype=torch.int32))
    shared, residual = case.shared[comm.rank], case.residual
    for tier in comm.agreement.capacities:
        plan = tail.plan(3, tier=tier)
        out = tail.deferred(*none, shared, residual, num_tokens=3, plan=plan)
        assert torch.equal(out, tail(torch.zeros(3, LATENT, dtype=BF16), shared, residual, plan=plan))
    empty = tail.deferred(none[0], none[1][:0], none[2][:0], shared[:0], num_tokens=0)
    assert empty.shape == (0, HIDDEN)


def test_bad_slots_are_refused_before_any_peer_is_involved(comm: Communicator) -> None:
    tail = handle(comm, case_of(comm, 1))
    expert_rows, weights = torch.zeros(3, LATENT, dtype=BF16), torch.ones(2)
    for bad in (-2, 3, 2**31 - 1):
        index = torch.tensor([0, bad], dtype=torch.int32)
        with pytest.raises(k3comm.InputError, match=rf"permuted_index: {bad} given; accepted are -1 and the 3 rows"):
            tail.deferred(expert_rows, weights, index, torch.zeros(1, HIDDEN, dtype=BF16), num_tokens=1)
    assert not comm.broken


def test_growth_is_by_reserve_alone(comm: Communicator) -> None:
    assert comm.agreement.capacities[Tier.PEER_AR] == 256
    case = case_of(comm, 300)
    tail = handle(comm, case)
    with pytest.raises(k3comm.TierUnavailableError, match="300 tokens exceed the 256 that all ranks can take"):
        tail.plan(300, tier=Tier.PEER_AR)
    early = tail.plan(200, tier=Tier.PEER_AR)
    before = comm.memory()
    others = {tier: rows for tier, rows in comm.agreement.capacities.items() if tier is not Tier.PEER_AR}
    comm.reserve(300)
    assert {tier: comm.agreement.capacities[tier] for tier in others} == others
    with pytest.raises(k3comm.TierUnavailableError, match="100 tokens exceed the 64 that all ranks can take"):
        tail.plan(100, tier=Tier.TAIL_FUSION)
    after = comm.memory()
    assert comm.agreement.capacities[Tier.PEER_AR] == 512
    assert after["PEER_AR: staging"] > before["PEER_AR: staging"]
    assert before["PEER_AR: staging, retired"] == 0 < after["PEER_AR: staging, retired"]
    out = call(tail, comm, case, Tier.PEER_AR)
    assert near(out, case)
    part = slice(0, 200)
    again = tail(case.routed[comm.rank][part], case.shared[comm.rank][part], case.residual[part], plan=early)
    assert torch.equal(again, call(tail, comm, case, Tier.PEER_AR, part))
    comm.reserve(100)
    assert comm.memory() == after
    comm.reserve(2049)  # past max_tokens: as much as is asked for, in steps of 256
    past = comm.memory()
    assert past["PEER_AR: staging"] <= 2304 / 512 * after["PEER_AR: staging"]
    for rows in range(2050, 2060):
        comm.reserve(rows)
    assert comm.memory() == past
    assert comm.agreement.capacities[Tier.PEER_AR] == 2304
    comm.reserve(2305)
    assert comm.agreement.capacities[Tier.PEER_AR] == 2 * 2304
    assert comm.memory()["PEER_AR: staging, retired"] < 2 * comm.memory()["PEER_AR: staging"]


def test_ranks_that_reserve_differently_all_hear_of_it(comm: Communicator, rank: int) -> None:
    text = "reserve: the ranks ask for 300 to 301 rows; accepted is one number on every rank"
    with pytest.raises(k3comm.NegotiationError, match=text):
        comm.reserve(301 if rank == 1 else 300)
    case = case_of(comm, 300)
    comm.reserve(300)
    assert near(call(handle(comm, case), comm, case, Tier.PEER_AR), case)


def test_negotiated_in_inference_mode_and_called_outside(rank: int) -> None:
    with torch.inference_mode():
        made = Communicator.negotiate(SPEC, dist.group.WORLD)
    with made as comm:
        case = case_of(comm, 300)
        tail = handle(comm, case)
        for tier in (Tier.TAIL_FUSION, Tier.PEER_AR):
            call(tail, comm, case, tier, slice(0, 20))
        with torch.inference_mode():
            comm.reserve(300)
            call(tail, comm, case, Tier.PEER_AR)
        assert near(call(tail, comm, case, Tier.PEER_AR), case)


def test_a_transport_can_be_chosen() -> None:
    with Communicator.negotiate(SPEC, dist.group.WORLD, settings=Settings(transport="peer")) as comm:
        assert not {Tier.TAIL_FUSION, Tier.PEER_AR} & set(comm.agreement.capacities)
        assert "leave it no transport" in comm.report.decision.refusal(Tier.TAIL_FUSION)
        assert comm.memory() == {"multicast objects": 0}


def test_hosts_that_differ_share_no_memory(rank: int) -> None:
    with Communicator.negotiate(SPEC, dist.group.WORLD, settings=Settings(host_identity=f"h{rank}")) as comm:
        assert "it can't cross hosts" in comm.report.decision.refusal(Tier.TAIL_FUSION)
        assert Tier.PEER_AR not in comm.agreement


@pytest.mark.parametrize("stage", ["allocate", "export", "import_", "map"])
def test_memory_that_fails_on_one_rank_costs_its_tiers_only(
    world_size: int, rank: int, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from k3comm.buffers.host import HostMemory

    if rank == world_size - 1:

        def fail(*args: object) -> None:
            raise OSError(12, f"no {stage}")

        monkeypatch.setattr(HostMemory, stage, fail)
    with Communicator.negotiate(SPEC, dist.group.WORLD) as comm:
        assert set(comm.agreement.capacities) & {Tier.TAIL_FUSION, Tier.PEER_AR} == set()
        why = comm.report.decision.refusal(Tier.TAIL_FUSION)
        every: list[str] = [""] * world_size
        dist.all_gather_object(every, why)
        assert set(every) == {why}
        assert f"rank {world_size - 1}: " in why
        assert ("no memory for its block" if stage == "allocate" else f"no {stage}") in why
        case = case_of(comm, 2)
        assert near(call(handle(comm, case), comm, case, Tier.FUSED_LANE_AR), case)


def test_a_peer_that_does_not_come_is_named(world_size: int, rank: int) -> None:
    settings = Settings(poll_deadline=0.5)
    for tier, late in itertools.product((Tier.TAIL_FUSION, Tier.PEER_AR), (0, world_size - 1)):
        with Communicator.negotiate(SPEC, dist.group.WORLD, settings=settings) as comm:
            case = case_of(comm, 2)
            tail = handle(comm, case)
            call(tail, comm, case, tier)
            dist.barrier()
            if rank != late:
                start = time.monotonic()
                with pytest.raises(k3comm.PeerTimeoutError, match=rf"rank {late}\b.* within 0\.5 s") as raised:
                    call(tail, comm, case, tier)
                assert raised.value.ranks == (late,)
                assert time.monotonic() - start < 20
            dist.barrier()


def soak(comm: Communicator, calls: int, seed: int) -> None:
    """Random m, tier, phase and lane, the same on all ranks, with random delays of each rank; all results compared."""
    shared_choice, own = random.Random(seed), random.Random(1000 * seed + comm.rank)
    cases = {rows: case_of(comm, rows, rows) for rows in (1, 2, 5, 16, 17, 64, 100)}
    tails = {rows: handle(comm, case) for rows, case in cases.items()}
    expected: dict[tuple[int, Tier], torch.Tensor] = {}
    engaged: dict[Tier, int] = dict.fromkeys(comm.agreement.capacities, 0)
    for number in range(calls):
        rows = shared_choice.choice(list(cases))
        forced = shared_choice.choice([*comm.agreement.capacities, None, Tier.TAIL_FUSION, Tier.PEER_AR])
        if forced is not None and rows > comm.agreement.capacities[forced]:
            forced = None
        graph, decode, lane = shared_choice.random() < 0.5, shared_choice.random() < 0.5, shared_choice.randrange(2)
        if own.random() < 0.05:
            time.sleep(own.random() * 2e-3)
        case, tail = cases[rows], tails[rows]
        plan = tail.plan(rows, graph, decode, forced)
        with comm.step(graph=graph, decode=decode, lane=lane):
            out = tail(case.routed[comm.rank], case.shared[comm.rank], case.residual, plan=plan)
        first = expected.setdefault((rows, plan.tier), out)
        assert torch.equal(out, first), (number, rows, plan.tier, lane)
        engaged[plan.tier] += 1
    for (rows, tier), out in expected.items():
        assert near(out, cases[rows]), (rows, tier)
    assert min(engaged.values()) > calls / 100, engaged


def test_soak(comm: Communicator) -> None:
    soak(comm, 1000, 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_long_soak_with_flat_memory(comm: Communicator) -> None:
    soak(comm, 2000, 2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    soak(comm, 18000, 3)
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 32 * 1024, f"{grown} KiB more"
