"""FUSED_LANE_AR's lane in shared memory: its kernel on a CPU emulator, the tier over it, and who has it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import attrs
import hypothesis.strategies as st
import pytest
import torch
import torch.distributed as dist
from buffer_groups import in_threads, mapped
from hypothesis import given
from lane_emulator import EPS, Kernel, Ranks, Recorded, build, words_of
from tier_stand_ins import LANES, NEEDS_GXX, Rank, Room, context_of, exact_case, plan_of, proposal_of
from torch import Tensor

from k3comm import Communicator, InputError, LatentMoESpec, PeerTimeoutError, PlanError, Settings, Tier
from k3comm.buffers.symmetric import Block
from k3comm.facts import Verdict
from k3comm.kernels import dense, reference
from k3comm.kernels.expiry import LANE_SHIFT, RECORD_WORDS, Expired
from k3comm.kernels.lane_one_shot import (
    ALIGNMENT,
    FRAGMENT,
    MAX_BLOCKS,
    MAX_SPAN,
    THREADS,
    Arguments,
    Cut,
    LaneLayout,
    OneShot,
    variants,
)
from k3comm.kernels.tail_fusion import COUNTER_BYTES
from k3comm.kernels.tail_geometry import MAX_CELLS, MAX_WORLD
from k3comm.negotiate.blocks import plan_blocks
from k3comm.testing import FakeMachine, Fault, ThreadExchange, assert_identical, run_ranks
from k3comm.tiers import fused_lane_ar
from k3comm.tiers.fused_lane_ar import ONE_SHOT_BYTES, Plugin, SharedLane, lane_layout

BF16, FP32, CPU = torch.bfloat16, torch.float32, torch.device("cpu")
WORLD, HIDDEN, LATENT = 3, 1200, 520  # three units a row of 128 threads, the last one of each part not full
CUT = Cut.of(HIDDEN, LATENT, WORLD)


# Cut and layout


@given(world=st.integers(2, MAX_WORLD), hidden=st.integers(1, 4000), latent=st.integers(1, MAX_SPAN * THREADS[1]))
def test_a_cut_covers_a_row(world: int, hidden: int, latent: int) -> None:
    cut = Cut.of(FRAGMENT * hidden, FRAGMENT * latent, world)
    assert THREADS[0] <= cut.threads <= THREADS[1]
    assert cut.threads % 32 == 0
    assert cut.threads * MAX_SPAN >= latent
    assert (cut.units - 2) * cut.threads < hidden <= (cut.units - 1) * cut.threads
    # No thread has more fragments than in a block of the largest size.
    assert -(-latent // cut.threads) == -(-latent // THREADS[1])


def test_the_cut_of_kimi_k3() -> None:
    assert (Cut.of(7168, 3584, 2).threads, Cut.of(7168, 3584, 2).units) == (448, 3)


@pytest.mark.parametrize(
    ("hidden", "latent", "world", "text"),
    [
        (100, 64, 2, "hidden_size: 100 given; accepted are multiples of 8"),
        (64, 4, 2, "latent_size: 4 given; accepted are multiples of 8 up to 16384"),
        (64, 16392, 2, "latent_size: 16392 given"),
        (64, 64, 1, "world_size: 1 given; accepted are 2 to 16"),
        (64, 64, 17, "world_size: 17 given"),
    ],
)
def test_what_can_not_be_cut(hidden: int, latent: int, world: int, text: str) -> None:
    with pytest.raises(InputError, match=text):
        Cut.of(hidden, latent, world)


@given(width=st.integers(2, 2000), rows=st.integers(1, 300), world=st.integers(2, MAX_WORLD), lanes=st.integers(1, 8))
def test_nothing_in_a_layout_overlaps(width: int, rows: int, world: int, lanes: int) -> None:
    layout = LaneLayout(width=FRAGMENT * width, rows=rows, world_size=world, lanes=lanes)
    end = 0
    for lane in range(lanes):
        assert layout.counters(lane) == end
        places = [layout.counters(lane), *(layout.words(lane, sender) for sender in range(world)), layout.data(lane)]
        sizes = [COUNTER_BYTES, *[8 * MAX_CELLS] * world, 2 * rows * layout.width]
        for place, size, after in zip(places, sizes, [*places[1:], layout.counters(lane + 1)], strict=True):
            assert place % ALIGNMENT == 0
            assert place + size <= after
        end = layout.counters(lane + 1)
    assert end == layout.nbytes


def test_variants_and_limits() -> None:
    names = [variant.name for variant in variants()]
    assert len(set(names)) == len(names)
    assert MAX_BLOCKS <= MAX_CELLS
    assert ctypes.sizeof(Arguments) % 8 == 0
    kernel = Recorded(CUT, LaneLayout(width=8, rows=1, world_size=WORLD), rank=0, device=CPU, blocks=[0] * WORLD,
                      eps=EPS, settings=Settings())  # fmt: skip
    for blocks in (0, MAX_BLOCKS + 1, 2.0):
        with pytest.raises(InputError, match=rf"blocks: {blocks} given; accepted are 1 to 128"):
            OneShot.start(kernel, blocks)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"start\(\) comes before the first call"):
        OneShot._run(kernel, b"")


# The kernel on the emulator


@cache
def library(folder: Any, cut: Cut, *changes: tuple[str, str]) -> Any:
    return build(folder / f"{cut.threads}-{len(changes)}-{abs(hash((cut, changes)))}", cut, changes)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    folder = tmp_path_factory.mktemp("lane")
    return lambda cut, *changes: library(folder, cut, *changes)


def randoms(world: int, rows: int, width: int, seed: int) -> Tensor:
    return torch.randn(world, rows, width, generator=torch.Generator().manual_seed(seed)).to(BF16)


Outs = list[tuple[Tensor, Tensor]]


def call_all(ranks: Ranks, routed: Tensor, shared: Tensor, norm: Tensor | None = None, lane: int = 0) -> Outs:
    """One call of every rank, queued."""
    rows = routed.shape[1]
    return [
        kernel(rows, routed[rank], shared[rank], norm, device=CPU, lane=lane, layer=5)
        for rank, kernel in enumerate(ranks.kernels)
    ]


def right(outs: Outs, routed: Tensor, shared: Tensor) -> bool:
    """Whether every rank has the sums in rank order, of a layer without norm."""
    z, sums = dense.sum_ranks(routed).to(BF16), dense.sum_ranks(shared)
    return all(torch.equal(a, z) and torch.equal(b, sums) for a, b in outs)


@NEEDS_GXX
@pytest.mark.parametrize(
    ("cut", "norm"),
    [
        (CUT, BF16),
        (CUT, FP32),
        (Cut.of(HIDDEN, LATENT, 4), None),
        (Cut(248, 520, 2, 32), FP32),  # a thread has three fragments of a latent row
        (Cut(96, 40, 10, 32), BF16),  # more ranks than are read at once
    ],
)
def test_sums_and_norm(built: Callable[..., Any], cut: Cut, norm: torch.dtype | None) -> None:
    ranks = Ranks(built(cut), cut, rows=9, blocks=4)
    gain = None if norm is None else (torch.rand(cut.latent_size) + 0.5).to(norm)
    for rows in (1, 9, 2):
        routed = randoms(cut.world_size, rows, cut.latent_size, rows)
        shared = randoms(cut.world_size, rows, cut.hidden_size, 100 + rows)
        outs = call_all(ranks, routed, shared, gain)
        assert ranks.run(seed=rows, skew=4) == 0
        z = dense.rms_norm(dense.sum_ranks(routed), gain, EPS)
        for mine, sums in outs:
            assert torch.equal(sums, dense.sum_ranks(shared))
            assert torch.equal(mine, outs[0][0])
            assert torch.allclose(mine.float(), z, rtol=2**-7, atol=0)
            assert (mine == z.to(BF16)).float().mean() > 0.99  # the sum of squares is made in another order
    assert ranks.completed() == [3] * cut.world_size


@NEEDS_GXX
def test_integers_are_exact(built: Callable[..., Any]) -> None:
    case = reference.integer_case(WORLD, 7, HIDDEN, LATENT, dtype=BF16, seed=1)
    ranks = Ranks(built(CUT), CUT, rows=7, blocks=5)
    outs = call_all(ranks, case.routed, case.shared, case.norm_weight)
    assert ranks.run(skew=3) == 0
    z = reference.rms_norm(case.routed.double().sum(0), case.norm_weight, EPS)
    for mine, sums in outs:
        assert torch.equal(mine, z.to(BF16))
        assert torch.equal(sums.double(), case.shared.double().sum(0))


@NEEDS_GXX
def test_parts_in_place_and_elsewhere_and_strange_strides(built: Callable[..., Any]) -> None:
    """Each part stands in the lane or is copied there, from rows that may lie far apart or badly."""
    ranks = Ranks(built(CUT), CUT, rows=6, blocks=3, lanes=2)
    routed, shared = randoms(WORLD, 5, LATENT, 1), randoms(WORLD, 5, HIDDEN, 2)
    wide = torch.full((WORLD, 5, 2 * HIDDEN + 8), float("nan"), dtype=BF16)
    wide[:, :, 8 : 8 + HIDDEN] = shared
    odd = torch.full((WORLD, 5, LATENT + 1), float("nan"), dtype=BF16)
    odd[:, :, 1:] = routed
    for number, (latent_there, shared_there) in enumerate([(True, True), (True, False), (False, True), (False, False)]):
        outs = []
        for rank, kernel in enumerate(ranks.kernels):
            lane = ranks.lane(rank, number % 2)
            lane.fill_(float("nan"))
            if latent_there:
                lane[:5, :LATENT] = routed[rank]
            if shared_there:
                lane[:5, LATENT:] = shared[rank]
            outs.append(
                kernel(
                    5,
                    None if latent_there else odd[rank, :, 1:],
                    None if shared_there else wide[rank, :, 8 : 8 + HIDDEN],
                    None,
                    device=CPU,
                    lane=number % 2,
                )
            )
        assert ranks.run(seed=number, skew=4) == 0
        assert right(outs, routed, shared)
        for rank in range(WORLD):
            assert torch.equal(ranks.lane(rank, number % 2)[:5], torch.cat((routed[rank], shared[rank]), 1))
            assert ranks.lane(rank, number % 2)[5:].isnan().all()
    assert ranks.completed(0) == ranks.completed(1) == [2] * WORLD


@NEEDS_GXX
def test_special_values_stay_in_their_rows(built: Callable[..., Any]) -> None:
    ranks = Ranks(built(CUT), CUT, rows=6, blocks=4)
    routed, shared = randoms(WORLD, 6, LATENT, 3), randoms(WORLD, 6, HIDDEN, 4)
    gain = torch.ones(LATENT, dtype=BF16)
    plain = call_all(ranks, routed, shared, gain)
    assert ranks.run() == 0
    routed[1, 2, 7], shared[0, 3, 11] = float("nan"), float("inf")
    routed[:, 4], shared[:, 4] = -0.0, -0.0
    routed[:, 5], shared[:, 5] = 2.0**-133, 2.0**-133  # subnormal
    outs = call_all(ranks, routed, shared, gain)
    assert ranks.run() == 0
    for (z, sums), (plain_z, plain_sums) in zip(outs, plain, strict=True):
        assert torch.equal(z[[0, 1, 3]], plain_z[[0, 1, 3]])
        assert torch.equal(sums[:3], plain_sums[:3])
        assert z[2].isnan().all()
        assert sums[3, 11] == float("inf")
        assert torch.equal(sums[3, 12:], plain_sums[3, 12:])
        assert (z[4].signbit() & (z[4] == 0)).all()
        assert (sums[4].signbit() & (sums[4] == 0)).all()
        assert (sums[5] == WORLD * 2.0**-133).all()


@NEEDS_GXX
def test_a_row_has_its_bits_in_any_batch_and_any_grid(built: Callable[..., Any]) -> None:
    routed, shared = randoms(WORLD, 8, LATENT, 5), randoms(WORLD, 8, HIDDEN, 6)
    gain, found = torch.rand(LATENT) + 0.5, []
    for blocks in (1, 5):
        ranks = Ranks(built(CUT), CUT, rows=8, blocks=blocks)
        for first, rows in ((0, 8), (3, 1), (2, 4)):
            part = slice(first, first + rows)
            outs = call_all(ranks, routed[:, part], shared[:, part], gain)
            assert ranks.run(skew=5) == 0
            found += [(part, *out) for out in outs]
    _, z, sums = found[0]
    assert all(torch.equal(z[part], a) and torch.equal(sums[part], b) for part, a, b in found)


def many_calls(ranks: Ranks, seed: int) -> bool:
    """Calls of changing size one after the other, ranks and blocks late by chance; whether all is right."""
    done = []
    for number, rows in enumerate((2, 7, 1, 6, 3)):
        routed, shared = randoms(WORLD, rows, LATENT, 10 * seed + number), randoms(WORLD, rows, HIDDEN, 99 + number)
        done.append((call_all(ranks, routed, shared), routed, shared))
    return ranks.run(seed=seed, skew=3) == 0 and all(right(*one) for one in done)


SLOW_COPY = (
    "store_sys(a.lane + place_of(row, part, column), v[j]);",
    "{ if (threadIdx.x >= 96) for (int i = 0; i < 40; i++) give_way();"
    " store_sys(a.lane + place_of(row, part, column), v[j]); }",
)
"""Makes some threads late where they copy: by the scheduler alone all threads of a block go in step there."""


@NEEDS_GXX
@pytest.mark.parametrize("changes", [(), (SLOW_COPY,)], ids=["as it is", "slow copy"])
def test_ranks_that_are_late_read_nothing_old_and_nothing_new(
    built: Callable[..., Any], changes: tuple[tuple[str, str], ...]
) -> None:
    ranks = Ranks(built(CUT, *changes), CUT, rows=7, blocks=4)
    for seed in range(6):
        assert many_calls(ranks, seed)
    assert ranks.completed() == [30] * WORLD


@NEEDS_GXX
@pytest.mark.parametrize(
    "changes",
    [
        [("    hear(a, call, 2 * call + 1, PHASE_STAGED);\n", "")],
        [SLOW_COPY, ("    __syncthreads();\n    tell(a, 2 * call + 1);", "    tell(a, 2 * call + 1);")],
        [("PHASE_STAGED);\n    __syncthreads();", "PHASE_STAGED);")],
        [("    hear(a, call, 2 * call + 2, PHASE_READ);\n", "")],
        [("    int turn = 0;", "    int turn = 0;\n    tell(a, 2 * call + 2);")],
        [("__fadd_rn(sum[k], x[k]) : x[k]", "__fadd_rn(sum[k], x[k]) : 0.0f")],
    ],
    ids=["start unheard", "told before staged", "heard by some", "end unheard", "told before read", "without rank 0"],
)
def test_a_kernel_that_lacks_a_step_is_found_out(built: Callable[..., Any], changes: Sequence[tuple[str, str]]) -> None:
    """The test above can fail: each step of the protocol is left out once."""
    ranks = Ranks(built(CUT, *changes), CUT, rows=7, blocks=4)
    assert not all(many_calls(ranks, seed) for seed in range(20))


@NEEDS_GXX
def test_a_rank_that_does_not_come_is_named(built: Callable[..., Any]) -> None:
    ranks = Ranks(built(CUT), CUT, rows=2, blocks=4, deadline=0.002)
    for _ in range(2):
        call_all(ranks, randoms(WORLD, 2, LATENT, 1), randoms(WORLD, 2, HIDDEN, 1))
    assert ranks.run(silent=1) == 1
    found = [one for one in (Expired.read(kernel.record) for kernel in ranks.kernels) if one is not None]
    assert found
    for one in found:
        assert (one.operation, one.layer, one.call, one.phase, one.peer) == ("moe_tail", 5, 1, "staged", 1)
        assert str(one.error(WORLD, 2.0)).endswith(
            "nothing from rank 1 within 2 s (settings.poll_deadline); it is late, or gone"
        )
    assert Expired.read(torch.zeros(RECORD_WORDS, dtype=torch.int32)) is None


# Who gets a place


SPEC = LatentMoESpec(hidden_size=HIDDEN, latent_size=LATENT, top_k=3, rms_eps=EPS)
ROWS, OFFSET = 9, 256
proposal = partial(proposal_of, SPEC, world_size=WORLD)


def test_the_footprint() -> None:
    layout, request = lane_layout(proposal()), Plugin.footprint(proposal())
    assert layout is not None
    assert request is not None
    assert (request.block, request.nbytes, request.optional) == (Block.STAGING, layout.nbytes, True)
    read = (WORLD - 1) * 2 * layout.width
    assert layout.rows * read <= ONE_SHOT_BYTES < (layout.rows + 1) * read
    assert layout.lanes == LANES
    assert lane_layout(proposal(settings={"transport": "peer"})) == layout
    for other in (
        proposal(device="cpu"),
        proposal(dtype="float32"),
        proposal(hidden_size=1202),
        proposal(latent_size=20000),
        proposal(hidden_size=8 * ONE_SHOT_BYTES),
        proposal(settings={"transport": "multicast"}),
        proposal(settings={"transport": "host"}),
        proposal(world_size=1),
    ):
        assert Plugin.footprint(other) is None


def test_a_place_only_beside_those_who_need_the_block() -> None:
    blocks = plan_blocks(proposal())
    mine, others = blocks.places[Tier.FUSED_LANE_AR], blocks.places[Tier.PEER_AR]
    assert (mine.block, mine.optional, others.optional) == (Block.STAGING, True, False)
    assert mine.offset >= others.offset + others.nbytes
    assert mine.offset % ALIGNMENT == 0
    assert blocks.nbytes[Block.STAGING] == mine.offset + mine.nbytes
    alone = plan_blocks(proposal(settings={"disabled": {Tier.PEER_AR, Tier.MULTIMEM_AR}}))
    assert Tier.FUSED_LANE_AR not in alone.places
    assert Block.STAGING not in alone.nbytes


# The tier over the emulator, a thread a rank


class ThreadCollectives:
    """What the library does, between threads."""

    def __init__(self, exchange: ThreadExchange) -> None:
        self._exchange = exchange
        self.reduced = 0

    def all_gather(self, x: Tensor) -> Tensor:
        payloads = self._exchange.gather(x.contiguous().flatten().view(torch.uint8).numpy().tobytes())
        return torch.stack([torch.frombuffer(bytearray(one), dtype=x.dtype).view(x.shape) for one in payloads])

    def all_reduce(self, *tensors: Tensor) -> None:
        self.reduced += 1
        for tensor in tensors:
            tensor.copy_(self.all_gather(tensor).double().sum(0))

    def all_reduced(self, *partials: Tensor) -> list[Tensor]:
        sums = [partial.contiguous().clone() for partial in partials]
        self.all_reduce(*sums)
        return sums


class Emulated(Recorded):
    """OneShot whose launches run at once, when all ranks have come."""

    room: Room
    capacities: Sequence[int] = ()
    made: Sequence[dict[str, Any]] = ()

    def __init__(self, cut: Cut, layout: LaneLayout, **given: Any) -> None:
        self._rank = given["rank"]
        type(self).made = (*type(self).made, given)
        super().__init__(cut, layout, **given)
        self.asked: list[tuple[bool, bool]] = []

    def _load(self, device: torch.device) -> int:
        if not self.capacities[self._rank]:
            raise RuntimeError("this GPU can't")
        return self.capacities[self._rank]

    def _run(self, packed: bytes) -> None:
        self.room.launch(self._rank, Kernel(0, self._blocks, self.cut.threads, 0), packed)

    def __call__(self, rows: int, routed: Tensor | None, shared: Tensor | None, *given: Any, **more: Any) -> Any:
        self.asked.append((routed is not None, shared is not None))
        out = super().__call__(rows, routed, shared, *given, **more)
        self.kept.clear()
        return out


class LaneRank(Rank):
    """With the lane that its tier has prepared."""

    @property
    def lane(self) -> SharedLane:
        assert self.tier._shared is not None
        return self.tier._shared

    def check(self) -> Verdict:
        found = self.tier.self_check(self.context)
        self.exchange.gather(b"")
        return found


plan_for = partial(plan_of, Tier.FUSED_LANE_AR)
integers = partial(exact_case, WORLD, HIDDEN, LATENT)
Run = Callable[..., list[Any]]


@pytest.fixture
def on_ranks(built: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Run:
    """on_ranks(fn, capacities=..., **context): what fn returns on each rank with a prepared tier."""
    monkeypatch.setattr(Emulated, "room", Room(lambda kind: built(CUT), WORLD, Arguments), raising=False)
    monkeypatch.setattr(Emulated, "made", ())
    monkeypatch.setattr(fused_lane_ar, "OneShot", Emulated)
    monkeypatch.setattr(fused_lane_ar, "ONE_SHOT_BYTES", (WORLD - 1) * 2 * ROWS * (HIDDEN + LATENT))

    def run(fn: Callable[[LaneRank], Any], capacities: Sequence[int] = (5, 4, 6), **changes: Any) -> list[Any]:
        monkeypatch.setattr(Emulated, "capacities", capacities)
        asked = proposal()
        layout = lane_layout(asked)
        assert layout is not None
        assert layout.rows == ROWS
        memories = mapped(WORLD, OFFSET + layout.nbytes)

        def rank_of(exchange: ThreadExchange) -> Any:
            context = context_of(asked, memories[exchange.rank], offset=OFFSET, **changes)
            tier = Plugin()
            tier.prepare(context)
            tier._collectives = ThreadCollectives(exchange)  # type: ignore[assignment]
            exchange.gather(b"")  # the vote on prepare
            return fn(LaneRank(tier, context, exchange))

        return in_threads(WORLD, rank_of, deadline=100)

    return run


@NEEDS_GXX
def test_it_checks_itself_and_the_least_capacity_is_everyones(on_ranks: Run) -> None:
    def fn(rank: LaneRank) -> Any:
        before = rank.tier.lane(plan_for(1))
        word = rank.check()
        return before, bool(word), rank.lane._kernel._blocks, rank.tier.memory()["lane"]

    layout = lane_layout(proposal())
    assert layout is not None
    assert on_ranks(fn) == [(None, True, 4, attrs.evolve(layout, rows=ROWS).nbytes)] * WORLD
    assert Emulated.room.launched == 2 * LANES  # few rows and all rows, in each lane
    assert all(one["settings"].pdl for one in Emulated.made)


@NEEDS_GXX
def test_ranks_that_share_a_gpu_get_a_share_and_no_pdl(on_ranks: Run) -> None:
    assert on_ranks(lambda rank: (bool(rank.check()), rank.lane._kernel._blocks), device_ranks=2) == [(True, 2)] * WORLD
    assert not any(one["settings"].pdl for one in Emulated.made)


@NEEDS_GXX
@pytest.mark.parametrize("rows", [1, ROWS])
def test_a_call_in_place_copies_nothing(on_ranks: Run, rows: int) -> None:
    case, expected = integers(rows)

    def fn(rank: LaneRank) -> Any:
        rank.check()
        asked = rank.lane._kernel.asked
        asked.clear()
        outs, addresses = [rank.run(case, rows)], set()
        for number in range(LANES):
            lane = rank.tier.lane(plan_for(rows), number)
            assert lane is not None
            assert lane.shape == (rows, LATENT + HIDDEN)
            assert (lane.dtype, lane.is_contiguous()) == (BF16, True)
            addresses.add(lane.data_ptr())
            for both in (True, False):
                lane.fill_(float("nan"))
                lane[:, :LATENT] = case.routed[rank.number]
                given = {"routed": lane[:, :LATENT]}
                if both:
                    lane[:, LATENT:] = case.shared[rank.number]
                    given["shared"] = lane[:, LATENT:]
                outs.append(rank.run(case, rows, lane=number, **given))
        right = all(torch.equal(out, expected) for out in outs)
        return right, asked, len(addresses), rank.tier._collectives.reduced - LANES  # type: ignore[attr-defined]

    copies = [(True, True), *[(False, False), (False, True)] * LANES]
    assert on_ranks(fn) == [(True, copies, LANES, 0)] * WORLD


@NEEDS_GXX
def test_inputs_across_the_lane_are_copied_first(on_ranks: Run) -> None:
    """Parts that stand in the lane, at another place: rows shifted, columns exchanged, the other part's memory."""
    case, _ = integers(4, norm=False)

    def fn(rank: LaneRank) -> Any:
        rank.check()
        right = []
        lane = rank.tier.lane(plan_for(ROWS))
        assert lane is not None
        draw = torch.Generator().manual_seed(rank.number)
        for shape in range(3):
            lane.copy_(torch.randint(-2, 3, lane.shape, generator=draw))
            routed, shared = [
                (lane[2:6, :LATENT], lane[2:6, LATENT:]),
                (lane[:4, HIDDEN:], lane[:4, :HIDDEN]),
                (lane[:4, :LATENT], lane[1:5, :HIDDEN]),
            ][shape]
            every = rank.tier._collectives.all_gather(torch.cat((routed, shared), 1).clone()).double()
            expected = (
                case.residual.double()
                + every[:, :, :LATENT].sum(0) @ case.up_weight.double().t()
                + every[:, :, LATENT:].sum(0)
            )
            out = rank.run(case, 4, routed=routed, shared=shared)
            right.append(torch.allclose(out.double(), expected, rtol=2**-7, atol=2**-7))
        return right

    assert on_ranks(fn) == [[True] * 3] * WORLD


@NEEDS_GXX
def test_where_the_lane_ends_the_library_begins(on_ranks: Run) -> None:
    case, expected = integers(ROWS + 1, 3)

    def fn(rank: LaneRank) -> Any:
        rank.check()
        launched, reduced = len(rank.lane._kernel.asked), rank.tier._collectives.reduced  # type: ignore[attr-defined]
        outs = [rank.run(case, rows) for rows in (ROWS + 1, ROWS)]
        right = all(torch.equal(out, expected[: out.shape[0]]) for out in outs)
        counts = (len(rank.lane._kernel.asked) - launched, rank.tier._collectives.reduced - reduced)  # type: ignore[attr-defined]
        lanes = [rank.tier.lane(plan_for(rows)) is not None for rows in (0, 1, ROWS, ROWS + 1)]
        with pytest.raises(InputError, match="lane: 2 given; accepted are 0 to 1"):
            rank.tier.lane(plan_for(1), 2)
        return right, counts, lanes

    assert on_ranks(fn) == [(True, (1, 1), [False, True, True, False])] * WORLD


@NEEDS_GXX
def test_accuracy_is_no_worse_than_the_class_asks(on_ranks: Run) -> None:
    case = reference.random_case(WORLD, ROWS, HIDDEN, LATENT, dtype=BF16, seed=8)

    def fn(rank: LaneRank) -> Any:
        rank.check()
        return rank.run(case, ROWS)

    outs = on_ranks(fn)
    assert all(torch.equal(out, outs[0]) for out in outs)
    found = reference.measure(outs[0], case.truth(), case.residual)
    assert found.error <= 1.35 * found.ideal_error  # K1's is 1.25 and a ring's 1.5 times (docs/tiers.md), on few rows


@NEEDS_GXX
@pytest.mark.parametrize("capacities", [(5, 0, 5), (0, 0, 0)], ids=["one rank can't", "none can"])
def test_where_one_rank_can_not_none_does(on_ranks: Run, capacities: Sequence[int]) -> None:
    case, expected = integers(2)

    def fn(rank: LaneRank) -> Any:
        word = rank.check()
        return bool(word), rank.tier.lane(plan_for(1)), rank.tier.memory(), torch.equal(rank.run(case, 2), expected)

    assert on_ranks(fn, capacities) == [(True, None, {}, True)] * WORLD
    assert Emulated.room.launched == 0


@NEEDS_GXX
def test_ranks_too_many_for_a_gpu_go_without(on_ranks: Run) -> None:
    """Fewer blocks than ranks on the device: not even one each."""
    assert (
        on_ranks(lambda rank: (bool(rank.check()), rank.tier.lane(plan_for(1))), device_ranks=9)
        == [(True, None)] * WORLD
    )


@NEEDS_GXX
@pytest.mark.parametrize("where", ["start", "sum"])
def test_what_one_rank_finds_late_is_told_to_all(on_ranks: Run, where: str) -> None:
    """A launch that can't be made on one rank, or sums that are wrong there."""
    case, expected = integers(2)

    def fn(rank: LaneRank) -> Any:
        kernel: Any = rank.lane._kernel
        if rank.number == 1 and where == "start":
            kernel.start = lambda blocks: 1 / 0
        if rank.number == 1 and where == "sum":
            reduced = rank.lane.reduced
            rank.lane.reduced = lambda call: (reduced(call)[0], reduced(call)[1] + 1)  # type: ignore[method-assign]
        if rank.number != 1 and where == "sum":
            again = rank.lane.reduced
            rank.lane.reduced = lambda call: (again(call), again(call))[0]  # type: ignore[method-assign]
        word = rank.check()
        return bool(word), rank.tier.lane(plan_for(1)), torch.equal(rank.run(case, 2), expected)

    assert on_ranks(fn) == [(True, None, True)] * WORLD


@NEEDS_GXX
def test_waking_up(on_ranks: Run) -> None:
    """Counters and words start anew; a lane that was there and isn't any more fails the check."""
    case, expected = integers(3)

    def fn(rank: LaneRank) -> Any:
        rank.check()
        first = rank.tier.lane(plan_for(3))
        rank.run(case, 3)
        rank.lane._own.fill_(77)  # memory that was put aside
        rank.exchange.gather(b"")
        rank.tier.rearm()
        rank.exchange.gather(b"")
        word = rank.check()
        again = rank.tier.lane(plan_for(3))
        assert first is not None
        assert again is not None
        good = bool(word), first.data_ptr() == again.data_ptr(), torch.equal(rank.run(case, 3), expected)
        kernel: Any = rank.lane._kernel
        if rank.number == 2:
            kernel.capacity = 0
        bad = bool(rank.check())
        rank.tier.close()
        return good, bad, rank.tier.lane(plan_for(1)), rank.tier.memory()

    assert on_ranks(fn) == [((True, True, True), False, None, {})] * WORLD


@NEEDS_GXX
def test_a_wait_that_expired_is_told_by_the_next_call(on_ranks: Run) -> None:
    case, _ = integers(1)

    def fn(rank: LaneRank) -> Any:
        rank.check()
        assert rank.tier.failure() is None
        words_of(rank.lane._kernel.record, 1, 1, 9 | 1 << LANE_SHIFT, 5, 0, 17, 3, 2, rank.number)
        with pytest.raises(PeerTimeoutError) as caught:
            rank.run(case, 1)
        return caught.value.ranks, str(caught.value), type(rank.tier.failure()) is PeerTimeoutError

    for number, (ranks, text, told) in enumerate(on_ranks(fn)):
        assert ranks == (2,)
        assert text == (
            f"moe_tail on rank {number} of 3: layer 9, call 5 of lane 1, phase read, token 3: nothing from rank 2 "
            "within 30 s (settings.poll_deadline); it is late, or gone"
        )
        assert told


# Negotiated, a process a rank: the tier as on GPUs, with host memory and a stand-in for the kernel


class StandIn(OneShot):
    """The kernel's work by torch, between the group's barriers."""

    unable: Sequence[int] = ()
    copied: Sequence[tuple[bool, bool]] = ()

    def __init__(self, cut: Cut, layout: LaneLayout, **given: Any) -> None:
        self._rank, self._eps = given["rank"], given["eps"]
        super().__init__(cut, layout, **given)
        nbytes = 2 * layout.rows * layout.width
        self._views = [
            [
                torch.frombuffer((ctypes.c_char * nbytes).from_address(start + layout.data(number)),
                                 dtype=BF16).view(layout.rows, layout.width)
                for start in given["blocks"]
            ]
            for number in range(layout.lanes)
        ]  # fmt: skip

    def _load(self, device: torch.device) -> int:
        if self._rank in self.unable:
            raise RuntimeError("no compiler")
        return 7

    def start(self, blocks: int) -> None:
        assert blocks == 7

    def __call__(
        self, rows: int, routed: Tensor | None, shared: Tensor | None, norm_weight: Tensor | None, **given: Any
    ) -> tuple[Tensor, Tensor]:
        type(self).copied = (*type(self).copied, (routed is not None, shared is not None))
        lanes = self._views[given["lane"]]
        latent = self.cut.latent_size
        if routed is not None:
            lanes[self._rank][:rows, :latent] = routed
        if shared is not None:
            lanes[self._rank][:rows, latent:] = shared
        dist.barrier()
        total = dense.sum_ranks(torch.stack([lane[:rows] for lane in lanes]))
        dist.barrier()
        return dense.rms_norm(total[:, :latent], norm_weight, self._eps).to(BF16), total[:, latent:]


def test_a_residual_that_stands_in_the_lane(on_ranks: Run) -> None:
    """It is added as it was given: neither staged over nor summed."""
    case, expected = integers(4)

    def fn(rank: LaneRank) -> bool:
        rank.check()
        lane = rank.tier.lane(plan_for(ROWS))
        assert lane is not None
        residual = lane[:4, LATENT:]
        residual.copy_(case.residual[:4])
        return torch.equal(rank.run(case, 4, residual=residual), expected)

    assert on_ranks(fn) == [True] * WORLD


def negotiated(unable: Sequence[int], fault: Fault | None, **options: Any) -> Any:
    """What the lane is, and is good for, on one rank of a communicator."""
    machine, monkeypatch = FakeMachine(*([] if fault is None else [fault])), pytest.MonkeyPatch()
    monkeypatch.setattr("k3comm.communicator.HostMemory", machine.memory)
    layout_of = lane_layout
    monkeypatch.setattr(fused_lane_ar, "lane_layout", lambda asked: layout_of(attrs.evolve(asked, device="cuda")))
    monkeypatch.setattr(fused_lane_ar, "ONE_SHOT_BYTES", 2 * 40_000)  # of two peers
    monkeypatch.setattr(fused_lane_ar, "OneShot", StandIn)
    monkeypatch.setattr(StandIn, "unable", unable)
    monkeypatch.setattr(StandIn, "copied", ())
    rank, spec = dist.get_rank(), LatentMoESpec(hidden_size=96, latent_size=40, top_k=2, max_tokens=64)
    case = reference.integer_case(dist.get_world_size(), 20, 96, 40, dtype=BF16, seed=1)
    expected = reference.round_once(case.truth(), BF16)
    with Communicator.negotiate(spec, dist.group.WORLD, lanes=2, **options) as comm:
        found: dict[str, Any] = {"agreed": [tier.name for tier in comm.agreement.capacities]}
        found["memory"] = {name: size for name, size in comm.memory().items() if "staging" in name or "lane" in name}
        tail = comm.moe_tail(layer_index=0, norm_weight=case.norm_weight, up_weight=case.up_weight)
        plan = tail.plan(20, tier=Tier.FUSED_LANE_AR)
        lane = tail.lane(plan)
        found["lane"] = None if lane is None else tuple(lane.shape)
        found["large"] = tail.lane(tail.plan(148, tier=Tier.FUSED_LANE_AR))
        found["other tier"] = tail.lane(tail.plan(20, tier=Tier.SEPARATE_REDUCE))
        outs = [tail(case.routed[rank], case.shared[rank], case.residual, plan=plan)]
        if lane is not None:
            with comm.step(lane=1):
                other = tail.lane(plan)
            assert other is not None
            found["lanes apart"] = other.data_ptr() != lane.data_ptr()
            comm.reserve(200)
            comm.suspend()
            comm.resume()
            plan = tail.plan(20, tier=Tier.FUSED_LANE_AR)
            moved = tail.lane(plan)
            assert moved is not None
            found["stays"] = moved.data_ptr() == lane.data_ptr()
            StandIn.copied = ()
            for rows in (20, 3):  # fewer than the plan's too
                lane[:rows, :40], lane[:rows, 40:] = case.routed[rank, :rows], case.shared[rank, :rows]
                outs.append(tail(lane[:rows, :40], lane[:rows, 40:], case.residual[:rows], plan=plan))
            found["copied"] = StandIn.copied
            rows_plan = tail.plan(20, tier=Tier.FUSED_LANE_AR, output="rows")
            own = -(-20 // dist.get_world_size())
            mine = tail(case.routed[rank], case.shared[rank], plan=rows_plan, output="rows")
            bare = reference.round_once(attrs.evolve(case, residual=None).truth(), BF16)
            here = bare[rank * own : (rank + 1) * own]
            found["rows"] = torch.equal(mine[: here.shape[0]], here)
            shard = case.up_weight.chunk(dist.get_world_size())[rank]
            sharded = comm.moe_tail(layer_index=1, norm_weight=case.norm_weight, up_weight=shard)
            outs.append(sharded(case.routed[rank], case.shared[rank], case.residual, plan=plan))
            with pytest.raises(PlanError, match="made by communicator other"):
                tail.lane(attrs.evolve(plan, communicator=("other", 0)))
        found["right"] = [torch.equal(out, expected[: out.shape[0]]) for out in outs]
    monkeypatch.undo()
    return found


def test_negotiated_with_memory() -> None:
    found = assert_identical(run_ranks(negotiated, 3, (), None, deadline=90))
    assert {"PEER_AR", "FUSED_LANE_AR"} <= set(found["agreed"])
    assert found["lane"] == (20, 136)
    assert found["large"] is None  # 147 rows of 272 bytes are the last in 40000
    assert found["other tier"] is None
    assert found["right"] == [True] * 4
    assert found["copied"] == ((False, False), (False, False))
    assert (found["lanes apart"], found["stays"], found["rows"]) == (True, True, True)
    layout = LaneLayout(width=136, rows=40_000 // 272, world_size=3, lanes=2)
    assert found["memory"]["FUSED_LANE_AR: lane"] == layout.nbytes
    assert found["memory"]["PEER_AR: staging"] < 2 * (64 * 272 + 1024)


@pytest.mark.parametrize(
    ("unable", "fault", "options", "off"),
    [
        ((1,), None, {}, set()),
        ((), Fault(rank=1, stage="allocate", nth=2), {}, {"PEER_AR"}),
        ((), Fault(rank=2, stage="map", nth=2), {}, {"PEER_AR"}),
        ((), None, {"settings": Settings(disabled={Tier.PEER_AR})}, {"PEER_AR"}),
    ],
    ids=["one rank has no kernel", "one rank has no memory", "one rank can't map", "nobody needs the block"],
)
def test_negotiated_without(unable: Sequence[int], fault: Fault | None, options: Any, off: set[str]) -> None:
    """The tier is never lost, and the lane is nowhere, on all ranks alike."""
    found = assert_identical(run_ranks(negotiated, 3, unable, fault, deadline=90, **options))
    assert "FUSED_LANE_AR" in found["agreed"]
    assert "TAIL_FUSION" in found["agreed"]
    assert not off & set(found["agreed"])
    assert found["lane"] is None
    assert "FUSED_LANE_AR: lane" not in found["memory"]
    assert found["right"] == [True]
