"""Every tier against the float64 truth, in every way that a layer can ask for it: on CPU, --nccl or --shared-gpu.

Gloo with tensors on GPUs (--shared-gpu) may lack collectives: the library tiers that need them are not agreed then.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import k3comm
import k3comm.tiers
from k3comm import Numerics, Tier
from k3comm.kernels import reference
from k3comm.tiers import plugins
from k3comm.tiers.interface import TierContext

HIDDEN, LATENT = 96, 40
ROWS = (1, 2, 3, 5, 17, 64)
LIBRARY = (Tier.SEQUENCE_PARALLEL, Tier.COLUMN_PARALLEL, Tier.FUSED_LANE_AR, Tier.SEPARATE_REDUCE)
SHARED = (Tier.TAIL_FUSION, Tier.PEER_AR)
"""Over memory that the ranks share, the host's or the GPUs': BF16."""
EVERY = SHARED + LIBRARY
DTYPES = (torch.bfloat16, torch.float32)
layers = itertools.count()


@pytest.fixture(scope="module", params=DTYPES, ids=["bfloat16", "float32"])
def comm(request: pytest.FixtureRequest) -> Iterator[k3comm.Communicator]:
    dtype = str(request.param).removeprefix("torch.")
    spec = k3comm.LatentMoESpec(hidden_size=HIDDEN, latent_size=LATENT, top_k=2, dtype=dtype)
    # The same windows whatever the device, so that what is selected is known.
    windows = Path(k3comm.tiers.__file__).with_name("windows") / "host.toml"
    shared_gpu = request.config.getoption("--shared-gpu")
    settings = k3comm.Settings(windows=windows, allow_shared_device=shared_gpu)
    device = "cuda" if shared_gpu else None
    with k3comm.Communicator.negotiate(spec, dist.group.WORLD, settings=settings, device=device) as made:
        expected = {Tier.SEPARATE_REDUCE} if shared_gpu else set(LIBRARY)
        if request.param == torch.bfloat16:
            expected |= {tier for tier in SHARED if tier is not Tier.TAIL_FUSION or HIDDEN % (8 * made.world_size) == 0}
        agreed = set(made.agreement.capacities)
        assert expected <= agreed <= expected | set(LIBRARY), made.report
        yield made


@pytest.fixture(autouse=True)
def _tier_is_agreed(request: pytest.FixtureRequest) -> None:
    """Skips, on all ranks alike, what this device and dtype have no tier for: the fixture above pins which."""
    names = request.fixturenames
    if "tier" in names and "comm" in names:
        tier = request.getfixturevalue("tier")
        needs(request.getfixturevalue("comm"), tier)


def same_everywhere(x: torch.Tensor) -> bool:
    """Whether all ranks hold the same bits."""
    mine = x.cpu().contiguous().view(torch.uint8)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(every, mine)
    return all(torch.equal(one, mine) for one in every)


def needs(comm: k3comm.Communicator, *tiers: Tier) -> None:
    """Skips, on all ranks alike, where one of them is not agreed."""
    missing = [tier.name for tier in tiers if tier not in comm.agreement]
    if missing:
        pytest.skip(f"{', '.join(missing)} not agreed for this dtype and device")


def own_rows(x: torch.Tensor, world_size: int, rank: int) -> torch.Tensor:
    """This rank's ceil(m/W) rows of x, zeros past m."""
    rows = -(-x.shape[0] // world_size)
    padded = x.new_zeros(rows * world_size, x.shape[1])
    padded[: x.shape[0]] = x
    return padded[rank * rows : (rank + 1) * rows]


def handle(comm: k3comm.Communicator, case: reference.Case, *, sharded: bool = False, **arguments) -> k3comm.MoETail:
    weight = case.up_weight
    if sharded:
        weight = weight.chunk(comm.world_size)[comm.rank].clone()
    return comm.moe_tail(
        layer_index=next(layers),
        norm_weight=case.norm_weight,
        up_weight=weight,
        up_bias=case.up_bias,
        routed_scale=case.routed_scale,
        **arguments,
    )


def random_case(comm: k3comm.Communicator, num_tokens: int, **options) -> reference.Case:
    case = reference.random_case(
        comm.world_size, num_tokens, HIDDEN, LATENT, dtype=comm.dtype, seed=num_tokens, **options
    )
    return case.to(comm.device)


def integer_case(comm: k3comm.Communicator, num_tokens: int, **options) -> reference.Case:
    case = reference.integer_case(
        comm.world_size, num_tokens, HIDDEN, LATENT, dtype=comm.dtype, seed=num_tokens, **options
    )
    return case.to(comm.device)


def refuses_rows(tail: k3comm.MoETail, tier: Tier, rows: int) -> bool:
    """Whether the tier finishes no rows; then it says so."""
    if tier is not Tier.TAIL_FUSION:
        return False
    with pytest.raises(k3comm.TierUnavailableError, match="it finishes columns, not rows"):
        tail.plan(rows, tier=tier, output="rows")
    return True


def accepted(
    comm: k3comm.Communicator, tier: Tier, out: torch.Tensor, case: reference.Case, precise: bool
) -> list[str]:
    numerics = Numerics.K0 if precise else plugins()[tier].numerics
    precise = precise or tier is Tier.TAIL_FUSION
    truth = case.truth()
    model = reference.measure(case.model(numerics), truth, case.residual)
    pair = precise and comm.dtype == torch.bfloat16
    accuracy = reference.measure(out, truth, case.residual)
    if pair:  # few elements: the share of misrounded ones is judged at K3's widths (test_accuracy.py)
        assert accuracy.error <= reference.K0_ERROR_OVER_IDEAL * model.error
        return []
    return [
        line
        for line in reference.accept(numerics, accuracy, dtype=comm.dtype, model=model)
        # The plain model's share of misrounded elements is a coin's throw on a few hundred of them.
        if not (line.startswith("misrounded") and out.numel() < 2000)
    ]


@pytest.mark.parametrize("precise", [False, True], ids=["rounded", "precise"])
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("tier", EVERY, ids=lambda tier: tier.name)
def test_every_tier_keeps_its_class(comm: k3comm.Communicator, tier: Tier, sharded: bool, precise: bool) -> None:
    refused = (tier is Tier.SEQUENCE_PARALLEL and sharded) or (tier in (Tier.FUSED_LANE_AR, Tier.PEER_AR) and precise)
    served = 0
    for rows in ROWS:
        case = random_case(comm, rows, bias=True, routed_scale=2.5)
        tail = handle(comm, case, sharded=sharded, precise=precise)
        if refused:
            with pytest.raises(
                k3comm.TierUnavailableError, match="sharded" if tier is Tier.SEQUENCE_PARALLEL else "precise"
            ):
                tail.plan(rows, tier=tier)
            continue
        before = case.routed.clone(), case.shared.clone(), case.residual.clone()
        plan = tail.plan(rows, tier=tier)
        assert (plan.tier, plan.forced) == (tier, True)
        out = tail(case.routed[comm.rank], case.shared[comm.rank], case.residual, plan=plan)
        assert accepted(comm, tier, out, case, precise) == []
        assert same_everywhere(out)
        assert torch.equal(before[0], case.routed)
        assert torch.equal(before[1], case.shared)
        assert torch.equal(before[2], case.residual)
        served += 1
    assert served == (0 if refused else len(ROWS))


@pytest.mark.parametrize("tier", EVERY, ids=lambda tier: tier.name)
@pytest.mark.parametrize("norm", [True, False], ids=["norm", "no-norm"])
@pytest.mark.parametrize("residual", [True, False], ids=["residual", "no-residual"])
def test_integers_come_out_exact(comm: k3comm.Communicator, tier: Tier, norm: bool, residual: bool) -> None:
    """Sums that are exact in any order leave no room for a tolerance; sharded and whole, full and rows."""
    for rows, sharded in itertools.product((1, 3, 17), (False, True)):
        if sharded and tier is Tier.SEQUENCE_PARALLEL:
            continue
        case = integer_case(comm, rows, norm=norm, residual=residual, bias=True)
        expected = reference.round_once(case.truth(), comm.dtype)
        tail = handle(comm, case, sharded=sharded)
        routed, shared = case.routed[comm.rank], case.shared[comm.rank]
        out = tail(routed, shared, case.residual, plan=tail.plan(rows, tier=tier))
        mine = None if case.residual is None else own_rows(case.residual, comm.world_size, comm.rank)
        if norm and comm.dtype == torch.float32:  # eps does not vanish in float32
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(out, expected)
        if refuses_rows(tail, tier, rows):
            continue
        plan = tail.plan(rows, tier=tier, output="rows")
        got = tail(routed, shared, mine, plan=plan, output="rows")
        torch.testing.assert_close(got, own_rows(out, comm.world_size, comm.rank), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tier", EVERY, ids=lambda tier: tier.name)
def test_rows_are_this_ranks_and_zero_past_the_end(comm: k3comm.Communicator, tier: Tier) -> None:
    for rows in ROWS:
        case = random_case(comm, rows, bias=True)
        tail = handle(comm, case)
        mine = own_rows(case.residual, comm.world_size, comm.rank)
        mine[max(rows - comm.rank * mine.shape[0], 0) :] = float("nan")  # padding may hold anything
        if refuses_rows(tail, tier, rows):
            continue
        gain = torch.linspace(0.5, 2, HIDDEN, device=comm.device).to(comm.dtype)
        plan = tail.plan(rows, tier=tier, output="rows", next_norm=True)
        routed, shared = case.routed[comm.rank], case.shared[comm.rank]
        got, normed = tail(routed, shared, mine, plan=plan, output="rows", next_norm_weight=gain)
        whole = own_rows(
            tail(routed, shared, case.residual, plan=tail.plan(rows, tier=tier)), comm.world_size, comm.rank
        )
        assert got.shape == whole.shape == normed.shape == (-(-rows // comm.world_size), HIDDEN)
        # A GEMM of fewer rows may add in another order.
        torch.testing.assert_close(got, whole, rtol=8e-3 if comm.dtype == torch.bfloat16 else 1e-5, atol=1e-5)
        past = max(rows - comm.rank * got.shape[0], 0)
        assert torch.count_nonzero(got[past:]) == 0
        assert torch.count_nonzero(normed[past:]) == 0
        expected = reference.round_once(reference.rms_norm(got, gain, comm.spec.rms_eps), comm.dtype)
        torch.testing.assert_close(normed, expected, rtol=8e-3 if comm.dtype == torch.bfloat16 else 1e-5, atol=1e-6)


@pytest.mark.parametrize("tier", EVERY, ids=lambda tier: tier.name)
def test_the_next_norm_is_that_of_the_result(comm: k3comm.Communicator, tier: Tier) -> None:
    case = random_case(comm, 7)
    tail = handle(comm, case)
    gain = torch.linspace(-1, 2, HIDDEN, device=comm.device)  # a weight in fp32 is fine too
    plan = tail.plan(7, tier=tier, next_norm=True)
    out, normed = tail(case.routed[comm.rank], case.shared[comm.rank], case.residual, plan=plan, next_norm_weight=gain)
    truth = reference.rms_norm(out, gain, comm.spec.rms_eps)
    assert reference.measure(normed, truth).misrounded < (0.01 if comm.dtype == torch.bfloat16 else 1)
    torch.testing.assert_close(normed.double(), truth, rtol=8e-3 if comm.dtype == torch.bfloat16 else 1e-6, atol=1e-6)
    assert same_everywhere(normed)


@pytest.mark.parametrize("tier", EVERY, ids=lambda tier: tier.name)
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_a_projection_of_the_engines_own(comm: k3comm.Communicator, tier: Tier, sharded: bool) -> None:
    case = integer_case(comm, 5, norm=False)
    weight = case.up_weight.chunk(comm.world_size)[comm.rank] if sharded else case.up_weight
    calls = []

    def project(z: torch.Tensor) -> torch.Tensor:
        assert z.dtype == comm.dtype
        calls.append(z.shape[0])
        return z @ weight.t()

    tail = comm.moe_tail(layer_index=next(layers), project=project, sharded=sharded)
    if tier is Tier.TAIL_FUSION:
        with pytest.raises(k3comm.TierUnavailableError, match="its projection is part of the fusion"):
            tail.plan(5, tier=tier)
        return
    if sharded and tier is Tier.SEQUENCE_PARALLEL:
        with pytest.raises(k3comm.TierUnavailableError, match="sharded"):
            tail.plan(5, tier=tier)
        return
    out = tail(case.routed[comm.rank], case.shared[comm.rank], case.residual, plan=tail.plan(5, tier=tier))
    assert len(calls) == 1
    assert torch.equal(out, reference.round_once(case.truth(), comm.dtype))


@pytest.mark.parametrize("tier", EVERY, ids=lambda tier: tier.name)
def test_a_bad_row_stays_alone(comm: k3comm.Communicator, tier: Tier) -> None:
    """A padded row may hold garbage: the others keep their bits, wherever the NaN comes from."""
    rows, bad = 9, 4
    case = random_case(comm, rows)
    tail = handle(comm, case)
    plan = tail.plan(rows, tier=tier)
    routed, shared = case.routed[comm.rank].clone(), case.shared[comm.rank].clone()
    clean = tail(routed, shared, case.residual, plan=plan)
    routed[bad], shared[bad] = float("nan"), float("inf")
    dirty = tail(routed, shared, case.residual, plan=plan)
    keep = [row for row in range(rows) if row != bad]
    assert torch.equal(dirty[keep], clean[keep])
    assert dirty[bad].isnan().all()


@pytest.mark.parametrize("tier", EVERY, ids=lambda tier: tier.name)
def test_special_values_pass_unharmed(comm: k3comm.Communicator, tier: Tier) -> None:
    """Without a latent part the layer is the shared sum, of values that are zero on all ranks but one."""
    specials = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), torch.finfo(comm.dtype).tiny / 8, 3.5, -1e-39]
    rows = len(specials)
    case = integer_case(comm, rows, norm=False)
    tail = handle(comm, case)
    value = torch.tensor(specials, device=comm.device).to(comm.dtype)[:, None].expand(rows, HIDDEN)
    quiet = torch.zeros(rows, LATENT, dtype=comm.dtype, device=comm.device)
    shared = (
        value if comm.rank == comm.world_size - 1 else torch.zeros(rows, HIDDEN, dtype=comm.dtype, device=comm.device)
    )
    out = tail(quiet, shared, None, plan=tail.plan(rows, tier=tier))
    torch.testing.assert_close(out, value, rtol=0, atol=0, equal_nan=True)
    assert torch.count_nonzero(out[5]) == HIDDEN  # a subnormal is not flushed
    every = tail(
        quiet,
        torch.full((rows, HIDDEN), -0.0, dtype=comm.dtype, device=comm.device),
        None,
        plan=tail.plan(rows, tier=tier),
    )
    assert torch.count_nonzero(every) == 0


@pytest.mark.parametrize(
    "tier", [Tier.TAIL_FUSION, Tier.SEQUENCE_PARALLEL, Tier.COLUMN_PARALLEL], ids=lambda tier: tier.name
)
def test_sums_run_in_rank_order(comm: k3comm.Communicator, tier: Tier) -> None:
    """2^24 + 1 - 2^24 in fp32 is 0 in rank order, and 1 in others. With two ranks any order is the same."""
    order = [2.0**24, 1.0, -(2.0**24)] + [0.0] * comm.world_size
    rows = comm.world_size * 2 + 1
    shared = torch.full((rows, HIDDEN), order[comm.rank], dtype=comm.dtype, device=comm.device)
    case = integer_case(comm, rows, norm=False)
    tail = handle(comm, case)
    quiet = torch.zeros(rows, LATENT, dtype=comm.dtype, device=comm.device)
    out = tail(quiet, shared, None, plan=tail.plan(rows, tier=tier))
    expected = 2.0**24 if comm.world_size == 2 else 0.0
    assert torch.equal(out, torch.full_like(out, expected))


@pytest.mark.parametrize("grouped", [False, True], ids=["joined", "grouped"])
@pytest.mark.parametrize("tier", EVERY, ids=lambda tier: tier.name)
def test_any_memory_layout(
    comm: k3comm.Communicator, tier: Tier, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clone keeps strides, and a library may refuse them: every tier makes its own layout."""
    monkeypatch.setattr("k3comm.tiers.fused_lane_ar.GROUPED_BYTES", 0 if grouped else 1 << 30)
    case = integer_case(comm, 6, norm=False)
    tail = handle(comm, case)
    plan = tail.plan(6, tier=tier)
    routed, shared = case.routed[comm.rank], case.shared[comm.rank]
    expected = tail(routed, shared, case.residual, plan=plan)
    wide = torch.zeros(6, 2 * HIDDEN + 1, dtype=comm.dtype, device=comm.device)
    wide[:, 1::2] = shared
    for strange in (routed.t().contiguous().t(), torch.cat((routed, routed))[::2][:6] * 0 + routed):
        assert torch.equal(tail(strange, wide[:, 1::2], case.residual.t().contiguous().t(), plan=plan), expected)
    one_row = routed[:1].expand(6, LATENT)
    assert torch.equal(
        tail(one_row, shared, case.residual, plan=plan), tail(one_row.clone(), shared, case.residual, plan=plan)
    )


@pytest.mark.parametrize("precise", [False, True], ids=["rounded", "precise"])
def test_two_halves_make_one_separate_reduce(comm: k3comm.Communicator, precise: bool) -> None:
    gain = torch.ones(HIDDEN, dtype=comm.dtype, device=comm.device)
    for rows in (0, 1, 6):
        case = random_case(comm, rows) if rows else random_case(comm, 1)
        tail = handle(comm, case, precise=precise)
        routed, shared, residual = case.routed[comm.rank][:rows], case.shared[comm.rank][:rows], case.residual[:rows]
        latent = tail.reduce_routed(routed)
        assert latent.dtype == (torch.float32 if precise else comm.dtype)
        out = tail.finish(latent, shared, residual, next_norm_weight=gain)
        plan = tail.plan(rows, tier=Tier.SEPARATE_REDUCE, next_norm=True)
        expected = tail(routed, shared, residual, plan=plan, next_norm_weight=gain)
        assert torch.equal(out[0], expected[0])
        assert torch.equal(out[1], expected[1])


def test_no_rows_talk_to_nobody(comm: k3comm.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a collective for no rows")

    for name in ("all_reduce", "all_to_all_single"):
        monkeypatch.setattr(dist, name, refuse)
    monkeypatch.setattr("k3comm.tiers.library._all_gather", refuse)
    monkeypatch.setattr("k3comm.tiers.library.Collectives._finish", refuse)
    monkeypatch.setattr("k3comm.buffers.mailbox.MailboxLane.begin", refuse)
    monkeypatch.setattr("k3comm.kernels.tail_fusion.TailKernels.__call__", refuse)
    monkeypatch.setattr("k3comm.buffers.staging.StagingPool.view", refuse)
    case = random_case(comm, 1)
    tail = handle(comm, case)
    for tier in comm.agreement.capacities:
        for output in ("full", "rows"):
            if output == "rows" and refuses_rows(tail, tier, 0):
                continue
            plan = tail.plan(0, tier=tier, output=output, next_norm=True)
            out, normed = tail(
                case.routed[comm.rank][:0],
                case.shared[comm.rank][:0],
                case.residual[:0],
                plan=plan,
                output=output,
                next_norm_weight=torch.ones(HIDDEN, device=comm.device),
            )
            assert out.shape == normed.shape == (0, HIDDEN)
            assert out.dtype == comm.dtype


def test_grouped_and_joined_lanes_agree(comm: k3comm.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways of FUSED_LANE_AR, on sums that are exact in any order, and each really taken."""
    from k3comm.tiers import fused_lane_ar

    needs(comm, Tier.FUSED_LANE_AR)
    case = integer_case(comm, 33, norm=False)
    tail = handle(comm, case)
    plan = tail.plan(33, tier=Tier.FUSED_LANE_AR)
    counts = []
    reduce = comm._tiers[Tier.FUSED_LANE_AR]._collectives.all_reduce
    monkeypatch.setattr(
        comm._tiers[Tier.FUSED_LANE_AR]._collectives,
        "all_reduce",
        lambda *tensors: (counts.append(len(tensors)), reduce(*tensors)),
    )
    outs = []
    for limit in (1 << 30, 0):
        monkeypatch.setattr(fused_lane_ar, "GROUPED_BYTES", limit)
        outs.append(tail(case.routed[comm.rank], case.shared[comm.rank], case.residual, plan=plan))
    assert counts == [1, 2]
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], reference.round_once(case.truth(), comm.dtype))


def test_every_tier_checks_itself(comm: k3comm.Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    context = TierContext(
        spec=comm.spec,
        settings=comm.settings,
        group=dist.group.WORLD,
        rank=comm.rank,
        world_size=comm.world_size,
        device=comm.device,
        dtype=comm.dtype,
    )
    for tier in comm.agreement.capacities:
        assert comm._tiers[tier].self_check(context)
    needs(comm, Tier.SEQUENCE_PARALLEL)
    # A check that can't fail is none: a sum that leaves rank 0 out is found.
    monkeypatch.setattr("k3comm.kernels.dense.sum_ranks", lambda parts: parts[1:].float().sum(0))
    assert not comm._tiers[Tier.SEQUENCE_PARALLEL].self_check(context)


def test_selection_inside_a_step(comm: k3comm.Communicator) -> None:
    """What `plan` says is what runs: host windows, whole W_up, and each rank alike."""
    needs(comm, *LIBRARY)
    case = random_case(comm, 256)
    tail = handle(comm, case)
    ran = []
    for tier, plugin in comm._tiers.items():
        run = type(plugin).run
        plugin.run = lambda call, tier=tier, plugin=plugin, run=run: (ran.append(tier), run(plugin, call))[1]
    try:
        for rows in (255, 256):
            with comm.step(graph=False, decode=rows == 255):
                tail(case.routed[comm.rank][:rows], case.shared[comm.rank][:rows], case.residual[:rows])
    finally:
        for plugin in comm._tiers.values():
            del plugin.run
    assert ran == [Tier.PEER_AR if Tier.PEER_AR in comm.agreement else Tier.FUSED_LANE_AR, Tier.SEQUENCE_PARALLEL]
    sharded = handle(comm, case, sharded=True)
    assert sharded.plan(256).tier is Tier.COLUMN_PARALLEL
    assert "sharded" in str(sharded.explain(256))
    precise = handle(comm, case, precise=True)
    first = Tier.TAIL_FUSION if Tier.TAIL_FUSION in comm.agreement else Tier.SEPARATE_REDUCE
    assert (precise.plan(1).tier, precise.plan(256).tier) == (first, Tier.SEQUENCE_PARALLEL)
