"""TAIL_FUSION on a GPU without one: its plug-in over a fake of torch's memory, its kernels' own source on the emulator.

Ranks are threads. Each launch waits for all of them, then the emulator runs the kernel of every rank at once.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import tail_emulator
import torch
from buffer_groups import in_threads
from tail_emulator import Recorded, Step
from tier_stand_ins import (
    LANES,
    NEEDS_GXX,
    Machine,
    Rank,
    Room,
    call_of,
    context_of,
    exact_case,
    proposal_of,
    weights_of,
)
from torch import Tensor

from k3comm import Communicator, LatentMoESpec, PeerTimeoutError, Tier
from k3comm.buffers import cuda
from k3comm.buffers.cuda import CudaMemory
from k3comm.buffers.mailbox import EMPTY, MailboxLayout, mailbox_bytes
from k3comm.buffers.symmetric import Block, establish
from k3comm.facts import Facts, Reason, Verdict
from k3comm.kernels import reference
from k3comm.kernels.compile import ARCHITECTURES
from k3comm.kernels.expiry import LANE_SHIFT, RECORD_WORDS, Watch
from k3comm.kernels.finalize import Deferred, finalize
from k3comm.kernels.tail_fusion import Arguments, Form, LaneAddresses
from k3comm.kernels.tail_geometry import MAX_ROWS, Geometry
from k3comm.operations import TailArguments
from k3comm.session import Session
from k3comm.testing import ThreadExchange, machine_facts
from k3comm.tiers import _tail_device, plugin
from k3comm.tiers._tail_device import WEIGHT_DTYPES, DeviceTail, transport_of
from k3comm.tiers.interface import TailCall, TierContext
from k3comm.tiers.self_check import check_sums
from k3comm.tiers.tail_fusion import CHECKED_ROWS, Plugin

BF16 = torch.bfloat16
HIDDEN, LATENT, WORLD = 96, 40, 3
SPEC = LatentMoESpec(hidden_size=HIDDEN, latent_size=LATENT, top_k=3, rms_eps=1e-5)
ROOM = ("sm_90a", 4)
"""The architecture, and the blocks that are resident at once."""
GPU = machine_facts("h200x8")[0]
OFFSET = 256
proposal = partial(proposal_of, SPEC, world_size=WORLD)
integers = partial(exact_case, WORLD, HIDDEN, LATENT)


# Before the vote


def test_the_word_of_a_gpu() -> None:
    yes = Verdict.yes(MAX_ROWS)
    assert Plugin.verdict(GPU, proposal()) == (yes, Verdict.no(Reason.NO_CLUSTER))
    # Without multicast it goes over peers; a transport that is asked for is the only one, and gives its own reason.
    without = attrs.evolve(GPU, multicast=False)
    assert Plugin.verdict(without, proposal())[0] == yes
    assert Plugin.verdict(without, proposal(settings={"transport": "peer"}))[0] == yes
    assert Plugin.verdict(without, proposal(settings={"transport": "multicast"}))[0].reason is Reason.NO_MULTICAST
    assert Plugin.verdict(GPU, proposal(settings={"transport": "multicast"}))[0] == yes
    assert Plugin.verdict(GPU, proposal(settings={"transport": "host"}))[0].reason is Reason.TRANSPORT
    assert Plugin.verdict(attrs.evolve(GPU, nvlinks=0), proposal())[0].reason is Reason.NO_NVLINK


def test_what_the_kernels_do_not_take() -> None:
    for changes, reason, detail in (
        ({"hidden_size": 100}, Reason.HIDDEN_MULTIPLE, 24),
        ({"latent_size": 44}, Reason.LATENT_MULTIPLE, 8),
        ({"dtype": "float32"}, Reason.BFLOAT16, 0),
    ):
        for word in Plugin.verdict(GPU, proposal(**changes)):
            assert (bool(word), word.reason, word.detail) == (False, reason, detail)
    for capability in ((8, 9), (9, 0), (10, 0), (11, 0), (12, 0), (12, 1)):
        word = Plugin.verdict(attrs.evolve(GPU, compute_capability=capability), proposal())[0]
        assert bool(word) == (capability in ARCHITECTURES)
    assert str(word) == "its kernels are not made for compute capability 12.1"
    assert str(Plugin.verdict(attrs.evolve(GPU, compute_capability=(8, 9)), proposal())[0]).endswith("is below 9.0")


def test_the_footprint_is_the_host_s() -> None:
    asked = proposal()
    request = Plugin.footprint(asked)
    assert request is not None
    assert (request.block, request.nbytes) == (Block.DECODE, mailbox_bytes(SPEC, WORLD, MAX_ROWS, LANES))
    assert request == Plugin.footprint(attrs.evolve(asked, device="cpu"))
    assert Plugin.footprint(proposal(dtype="float32")) is None
    assert Plugin.refusal(TailArguments(output="rows"), asked) == 'it finishes columns, not rows (output="rows")'
    assert Plugin.refusal(TailArguments(sharded=True, precise=True, next_norm=True), asked) is None


# Preparing, with kernels that only note how they are made


class Noted:
    """In the place of TailKernels."""

    made: Sequence[dict[str, Any]] = ()
    filled = 0

    def __init__(self, geometry: Geometry, **given: Any) -> None:
        type(self).made = (*type(self).made, {"geometry": geometry, **given})
        self.record = torch.zeros(RECORD_WORDS, dtype=torch.int32)
        self.calls: list[dict[str, Any]] = []

    def fill(self) -> None:
        type(self).filled += 1

    def __call__(self, **given: Any) -> Tensor:
        self.calls.append(given)
        return torch.zeros(given["shared"].shape, dtype=BF16)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> type[Noted]:
    monkeypatch.setattr(Noted, "made", ())
    monkeypatch.setattr(Noted, "filled", 0)
    monkeypatch.setattr(_tail_device, "TailKernels", Noted)
    monkeypatch.setattr(_tail_device, "room_of", lambda device, ranks: (ROOM[0], ROOM[1] // ranks))
    return Noted


class Mapped(CudaMemory):
    """Memory that is one rank's view of W blocks of this process."""

    def __init__(self, blocks: Sequence[Tensor], rank: int, multicast: int = 0) -> None:
        super().__init__(rank, len(blocks), group_name="7", device=torch.device("cpu"))
        self._blocks = list(blocks)
        self.pointers = tuple(block.data_ptr() for block in blocks)
        self.multicast_ptr = multicast


def on_gpu(memory: CudaMemory, facts: Facts = GPU, **changes: Any) -> TierContext:
    """The context of a rank whose GPU is what `facts` say."""
    asked = proposal(settings=changes.pop("settings", None))
    return context_of(asked, memory, offset=OFFSET, facts=facts, **changes)


def mapped(multicast: int = 0) -> Mapped:
    nbytes = OFFSET + mailbox_bytes(SPEC, WORLD, MAX_ROWS, LANES) + 64
    return Mapped([torch.full((nbytes,), 7, dtype=torch.uint8) for _ in range(WORLD)], 1, multicast)


def prepared(memory: Mapped, **changes: Any) -> Plugin:
    tier = Plugin()
    tier.prepare(on_gpu(memory, **changes))
    return tier


def test_how_the_kernels_are_made(noted: type[Noted]) -> None:
    memory = mapped()
    tier = prepared(memory, settings={"poll_deadline": 3.0})
    (made,) = noted.made
    assert made["geometry"] == Geometry.choose(HIDDEN, LATENT, WORLD, arch=ROOM[0], capacity=ROOM[1])
    assert (made["rank"], made["eps"], made["capacity"], made["transport"]) == (1, 1e-5, ROOM[1], "peer")
    assert (made["forms"], set(made["deferred"])) == ((Form.SPLIT,), set(WEIGHT_DTYPES))
    assert (made["settings"].pdl, made["settings"].poll_deadline) == (True, 3.0)
    layout = MailboxLayout.of(SPEC, world_size=WORLD, max_rows=MAX_ROWS, lanes=LANES)
    for number, lane in enumerate(made["lanes"]):
        assert lane == LaneAddresses.of(
            rank=1,
            blocks=[pointer + OFFSET for pointer in memory.pointers],
            latent=layout.latent(number, 0),
            shared=layout.shared(number, 0),
            gather=layout.gather(number),
            counters=layout.counters(number),
            region_bytes=layout.latent_bytes + layout.shared_bytes,
            gather_bytes=layout.gather(number, 1) - layout.gather(number),
            latent_size=LATENT,
            columns=HIDDEN // WORLD,
        )
    workspace = made["geometry"].workspace_bytes()
    assert tier.memory() == {"mailboxes": layout.nbytes, "workspace": LANES * workspace}
    assert tier.takes_deferred()


def test_ranks_that_share_a_gpu_get_a_share_and_no_pdl(noted: type[Noted]) -> None:
    tier = prepared(mapped(), device_ranks=2)
    (made,) = noted.made
    assert made["capacity"] == ROOM[1] // 2 == 2
    assert made["geometry"].blocks == 1
    assert made["settings"].pdl is False
    assert made["forms"] == (device_of(tier).form,) == (Form.WHOLE,)


def test_mailboxes_are_emptied_and_nothing_else(noted: type[Noted]) -> None:
    memory = mapped()
    tier = prepared(memory)
    layout = MailboxLayout.of(SPEC, world_size=WORLD, max_rows=MAX_ROWS, lanes=LANES)
    for times in (1, 2):
        assert noted.filled == times  # the kernels' own memory with the mailboxes
        own = memory.block(1)
        assert (own[:OFFSET] == 7).all()
        assert (own[OFFSET + layout.nbytes :] == 7).all()
        mine = own[OFFSET : OFFSET + layout.nbytes]
        for lane in range(LANES):
            words = mine[layout.counters(lane) :][: layout.lane_bytes].view(torch.int32)
            data = layout.latent(lane, 0) - layout.counters(lane)
            assert not words[: data // 4].any()
            assert (words[data // 4 :] == EMPTY - 2**32).all()
        assert all((memory.block(peer) == 7).all() for peer in (0, 2))
        mine.fill_(1)  # as after some calls, or in memory that was put aside
        tier.rearm()


@pytest.mark.parametrize(
    ("address", "facts", "asked", "chosen"),
    [
        (0, {}, "auto", "peer"),
        (0x7000_0000, {}, "auto", "multicast"),
        (0x7000_0000, {}, "multicast", "multicast"),
        (0x7000_0000, {}, "peer", "peer"),
        (0x7000_0000, {"environment": {"NCCL_NVLS_ENABLE": "0"}}, "auto", "peer"),
        (0x7000_0000, {"environment": {"NVSHMEM_DISABLE_NVLS": "1"}}, "auto", "peer"),
        (0x7000_0000, {"confidential": True}, "auto", "peer"),
        (0, {}, "multicast", None),
    ],
)
def test_which_transport(address: int, facts: dict[str, Any], asked: str, chosen: str | None) -> None:
    """Multicast where torch has the address and nothing speaks against it, also what was said to NCCL alone."""
    memory = mapped(address)
    context = on_gpu(memory, attrs.evolve(GPU, **facts), settings={"transport": asked})
    if chosen is None:
        with pytest.raises(LookupError, match="torch gave the decode block no multicast address"):
            transport_of(context, memory)
    else:
        assert transport_of(context, memory) == chosen


def test_the_multicast_address_goes_to_the_kernels(noted: type[Noted]) -> None:
    memory = mapped(0x7000_0000)
    prepared(memory)
    (made,) = noted.made
    assert made["transport"] == "multicast"
    layout = MailboxLayout.of(SPEC, world_size=WORLD, max_rows=MAX_ROWS, lanes=LANES)
    for number, lane in enumerate(made["lanes"]):
        assert lane.latent_all == 0x7000_0000 + OFFSET + layout.latent(number, 0) + 2 * LATENT
        assert lane.gather_all == 0x7000_0000 + OFFSET + layout.gather(number) + 2 * HIDDEN // WORLD


# Calls, and their end


def zeros(rows: int, **changes: Any) -> TailCall:
    """A call in which every number is zero."""
    given: dict[str, Any] = {
        "routed": torch.zeros(rows, LATENT, dtype=BF16),
        "shared": torch.zeros(rows, HIDDEN, dtype=BF16),
        "weights": weights_of(up_weight=torch.zeros(HIDDEN, LATENT, dtype=BF16)),
    }
    return call_of(Tier.TAIL_FUSION, rows, **(given | changes))


def expire(tier: Plugin, *, layer: int, lane: int, peer: int = 2) -> None:
    """What the kernel writes before it traps: phase latent, token 3, call 5."""
    record = device_of(tier)._kernels.record
    record[:9] = torch.tensor([1, 1, layer | lane << LANE_SHIFT, 5, 0, 2, 3, peer, 1])


def device_of(tier: Plugin) -> DeviceTail:
    assert tier._device is not None
    return tier._device


def test_a_call_goes_to_the_kernels_as_it_is(noted: type[Noted]) -> None:
    tier = prepared(mapped())
    deferred = Deferred(torch.zeros(4, LATENT, dtype=BF16), torch.ones(6), torch.zeros(6, dtype=torch.int32), 2)
    call = zeros(2, lane=1, layer=(1 << LANE_SHIFT) + 9, deferred=deferred)
    tier.run(call)
    (given,) = device_of(tier)._kernels.calls  # type: ignore[attr-defined]
    assert given["routed"].weights is deferred.weights
    assert given["routed"].rows.data_ptr() == deferred.rows.data_ptr()
    assert given["shared"] is call.shared
    assert (given["form"], given["lane"], given["layer"]) == (Form.SPLIT, 1, 9 | 1 << LANE_SHIFT)
    assert ctypes.c_int32(7 << LANE_SHIFT | (1 << LANE_SHIFT) - 1).value > 0  # as the kernels take it
    with pytest.raises(LookupError, match="without up_weight"):
        tier.run(zeros(2, weights=weights_of()))


def test_a_wait_that_expired_is_told_by_the_next_call(noted: type[Noted]) -> None:
    tier = prepared(mapped(), settings={"poll_deadline": 0.5})
    assert tier.failure() is None
    expire(tier, layer=7, lane=1)
    with pytest.raises(PeerTimeoutError) as caught:
        tier.run(zeros(1))
    assert caught.value.ranks == (2,)
    assert str(caught.value) == (
        "moe_tail on rank 1 of 3: layer 7, call 5 of lane 1, phase latent, token 3: nothing from rank 2 within 0.5 s "
        "(settings.poll_deadline); it is late, or gone"
    )
    assert not device_of(tier)._kernels.calls  # type: ignore[attr-defined]
    tier.rearm()
    assert tier.failure() is None
    tier.run(zeros(1))


@pytest.mark.parametrize(
    ("device", "entered"), [("cuda:1", ["cuda:1"]), ("cuda:0", []), ("cuda", []), ("cpu", [])], ids=str
)
def test_kernels_find_their_device_current(device: str, entered: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made so only where it isn't: a call that changes it costs the host time."""
    seen: list[str] = []

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        seen.append(str(device))
        yield
        seen.append("left")

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", current)
    watch = Watch(torch.zeros(RECORD_WORDS, dtype=torch.int32), torch.device(device), WORLD, 1.0)
    assert watch.launch(lambda call: (call, list(seen)), "call") == ("call", entered)
    assert seen == [*entered, "left"][: 2 * len(entered)]


def test_an_error_of_the_device_is_told_by_its_cause(noted: type[Noted]) -> None:
    """Whichever tier or synchronisation runs into a context that has ended, the rank that is missing is named."""
    tier = prepared(mapped())

    @attrs.define
    class Some:
        device: torch.device
        _tiers: dict[Tier, Plugin]

    session: Any = Some(torch.device("cuda", 0), {Tier.TAIL_FUSION: tier})
    broken = RuntimeError("CUDA error: unspecified launch failure")
    assert Session._failure_behind(session, broken) is None
    expire(tier, layer=0, lane=0)
    assert isinstance(Session._failure_behind(session, broken), PeerTimeoutError)
    assert Session._failure_behind(session, KeyboardInterrupt()) is None
    assert Session._failure_behind(session, tier.failure() or broken) is None  # it is the cause


def test_a_self_check_that_finds_nobody_names_the_rank(noted: type[Noted], monkeypatch: pytest.MonkeyPatch) -> None:
    tier = prepared(mapped())
    context = on_gpu(mapped())

    def fail(*args: object, **options: object) -> Verdict:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr("k3comm.tiers.tail_fusion.check_sums", fail)
    with pytest.raises(RuntimeError, match="unspecified"):
        tier.self_check(context)
    expire(tier, layer=0, lane=0)
    with pytest.raises(PeerTimeoutError, match="nothing from rank 2"):
        tier.self_check(context)


def test_a_self_check_goes_on_after_a_wrong_number(noted: type[Noted], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that left early would leave its peers in a kernel."""
    tier, asked = prepared(mapped()), []

    def wrong(tier: Plugin, context: TierContext, rows: int, **kind: Any) -> Verdict:
        asked.append((rows, kind["deferred"], kind["next_norm"]))
        return Verdict.no(Reason.SELF_CHECK) if len(asked) == 2 else Verdict.yes()

    monkeypatch.setattr("k3comm.tiers.tail_fusion.check_sums", wrong)
    assert tier.self_check(on_gpu(mapped())) == Verdict.no(Reason.SELF_CHECK)
    kinds = [(None, True), *((dtype, False) for dtype in WEIGHT_DTYPES)]
    assert asked == [(rows, *kind) for rows in CHECKED_ROWS for kind in kinds]


def test_a_tier_that_takes_it_is_given_what_is_not_finalised(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[TailCall] = []
    rows, factors = torch.randn(5, LATENT).to(BF16), torch.ones(4)
    index, shared = torch.tensor([0, 2, -1, 4], dtype=torch.int32), torch.ones(2, HIDDEN, dtype=BF16)
    finished = finalize(Deferred(rows, factors, index, 2), LATENT)

    def run(call: TailCall) -> Tensor:
        calls.append(call)
        return call.shared.clone()

    with Communicator.negotiate(SPEC) as comm:
        tail = comm.moe_tail(layer_index=0, up_weight=torch.zeros(HIDDEN, LATENT, dtype=BF16))
        tier = comm._tiers[Tier.SEPARATE_REDUCE]
        monkeypatch.setattr(tier, "run", run)
        for takes in (False, True):
            monkeypatch.setattr(tier, "takes_deferred", lambda takes=takes: takes)
            tail.deferred(rows, factors, index, shared, num_tokens=2)
        empty = tail.deferred(rows, factors[:0], index[:0], shared[:0], num_tokens=0)
    assert empty.shape == (0, HIDDEN)
    plain, late = calls
    assert plain.deferred is None
    assert torch.equal(plain.routed, finished)
    assert late.deferred is not None
    assert (late.deferred.rows is rows, late.deferred.permuted_index is index, late.deferred.num_tokens) == (
        True,
        True,
        2,
    )
    assert late.routed.shape == (2, 0)


def test_memory_of_a_context_that_has_ended_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would abort the process when it frees it; whoever closes after a time-out wants to read the error."""
    machine = Machine(1)
    for works in (True, False):
        memory = machine.memory(0)
        memory.allocate(64)
        machine.offered[0].clear()
        seen = weakref.ref(memory._own)
        monkeypatch.setattr(cuda, "_works", lambda device, works=works: works)
        memory.release()
        assert memory.nbytes == 0
        assert (seen() is None) == works


# On the emulator


class Emulated(Recorded):
    """TailKernels whose launches run at once, on the emulator."""

    room: Room

    def __init__(self, geometry: Geometry, *, lanes: Sequence[LaneAddresses], eps: float, **given: Any) -> None:
        rank, deadline = given["rank"], given["settings"].poll_deadline
        super().__init__(geometry, rank, lanes, deadline, geometry.tokens[-1])
        self._arguments = [
            self._lane_arguments(lane, workspace, eps, deadline, 0)
            for lane, workspace in zip(lanes, self._workspaces, strict=True)
        ]
        self._kind: torch.dtype | None = None
        self.steps = _Now(lambda step: self.room.launch(rank, step.kernel, step.arguments, self._kind))

    def __call__(self, **given: Any) -> Tensor:
        routed = given["routed"]
        self._kind = routed.weights.dtype if isinstance(routed, Deferred) else None
        out = super().__call__(**given)
        self.kept.clear()
        return out


class _Now(list[Step]):
    """A list that does with a step what it would else keep it for."""

    def __init__(self, act: Callable[[Step], None]) -> None:
        super().__init__()
        self.append = act  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[torch.dtype | None], Any]:
    geometry = Geometry.choose(HIDDEN, LATENT, WORLD, arch=ROOM[0], capacity=ROOM[1])
    folder = tmp_path_factory.mktemp("emulated tail")

    @cache
    def build(kind: torch.dtype | None) -> Any:
        return tail_emulator.build(folder / str(kind), geometry, geometry.tokens[-1], kind)

    return build


@pytest.fixture
def room(library: Callable[[torch.dtype | None], Any], monkeypatch: pytest.MonkeyPatch) -> Room:
    made = Room(library, WORLD, Arguments)
    monkeypatch.setattr(Emulated, "room", made, raising=False)
    monkeypatch.setattr(_tail_device, "TailKernels", Emulated)
    monkeypatch.setattr(_tail_device, "room_of", lambda device, ranks: ROOM)
    return made


def on_ranks(fn: Callable[[Rank], Any]) -> list[Any]:
    """What fn returns on each of WORLD ranks, over memory that they have mapped together."""
    machine = Machine(WORLD)

    def rank_of(exchange: ThreadExchange) -> Any:
        memory = machine.memory(exchange.rank)
        assert establish(memory, OFFSET + mailbox_bytes(SPEC, WORLD, MAX_ROWS, LANES), exchange) is None
        context = on_gpu(memory)
        tier = Plugin()
        tier.prepare(context)
        exchange.gather(b"")  # the vote on prepare
        return fn(Rank(tier, context, exchange))

    return in_threads(WORLD, rank_of, deadline=100)


@NEEDS_GXX
def test_it_checks_itself_and_finds_a_wrong_sum_and_a_wrong_norm(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    def rank_of(rank: Rank) -> tuple[bool, int, bool, bool]:
        found = bool(rank.tier.self_check(rank.context))
        rank.exchange.gather(b"")
        launched = room.launched
        rank.exchange.gather(b"")
        # A check that can't fail is none: one rank sends another number; the norm is off by two hundredths.
        run = rank.tier.run
        if rank.exchange.rank == 1:
            rank.tier.run = lambda call: run(attrs.evolve(call, shared=call.shared + 1))  # type: ignore[method-assign]
        wrong_sum = bool(check_sums(rank.tier, rank.context, 3, ordered=True))
        rank.tier.run = lambda call: run(call) if call.weights.norm_weight is None else run(call) * 1.02  # type: ignore[method-assign]
        wrong_norm = bool(check_sums(rank.tier, rank.context, 3, ordered=True, latent_norm=True))
        return found, launched, wrong_sum, wrong_norm

    kinds = len(CHECKED_ROWS) * (1 + len(WEIGHT_DTYPES))
    launched = LANES * (2 * kinds + 3 * len(CHECKED_ROWS))  # and the next norms, and calls for the latent one
    assert on_ranks(rank_of) == [(True, launched, False, False)] * WORLD


@NEEDS_GXX
def test_it_finds_squares_of_the_call_before(room: Room, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums alone don't show them, nor does a norm of the same rows."""
    change = "if (FLAGGED || lane == 0) put_square(", "if (!a.norm && lane == 0) put_square("
    tail_emulator.mutate(change, tmp_path)
    monkeypatch.setattr(tail_emulator, "FOLDER", tmp_path)
    geometry = Geometry.choose(HIDDEN, LATENT, WORLD, arch=ROOM[0], capacity=ROOM[1])
    wrong = tail_emulator.build(tmp_path / "built", geometry, geometry.tokens[-1])
    monkeypatch.setattr(Emulated, "room", Room(lambda kind: wrong, WORLD, Arguments))

    def rank_of(rank: Rank) -> list[bool]:
        return [
            bool(check_sums(rank.tier, rank.context, 4, ordered=True, latent_norm=normed)) for normed in (False, True)
        ]

    assert on_ranks(rank_of) == [[True, False]] * WORLD


@NEEDS_GXX
def test_calls_of_every_kind_are_exact(room: Room) -> None:
    """Lanes in turn, changing m, whole and sharded W_up, with and without each part, strange layouts, the next norm."""

    def rank_of(rank: Rank) -> bool:
        right, number = True, rank.exchange.rank
        for seed, (rows, kind) in enumerate(
            [
                (5, {"bias": True, "routed_scale": 0.5}),
                (1, {"norm": False}),
                (17, {"residual": False}),
                (2, {"norm": False, "residual": False}),
                (9, {"bias": True}),
            ]
        ):
            case, expected = integers(rows, seed, **kind)
            shard = case.up_weight.chunk(WORLD)[number]
            wide = torch.full((rows, 2 * HIDDEN + 1), float("nan"), dtype=BF16)
            wide[:, 1::2] = case.shared[number]
            for lane, changes in (
                (0, {}),
                (1, {"weights": weights_of(case, up_weight=shard, sharded=True)}),
                (seed % LANES, {"shared": wide[:, 1::2], "routed": case.routed[number].t().contiguous().t()}),
            ):
                right &= torch.equal(rank.run(case, rows, lane=lane, **changes), expected)
            gain, normed = torch.rand(HIDDEN) + 0.5, torch.empty(rows, HIDDEN, dtype=BF16)
            right &= torch.equal(rank.run(case, rows, next_norm_weight=gain, normed=normed), expected)
            truth = reference.rms_norm(expected, gain, SPEC.rms_eps)
            right &= torch.allclose(normed.double(), truth, rtol=2**-7, atol=1e-6)
        return right

    assert on_ranks(rank_of) == [True] * WORLD


@NEEDS_GXX
@pytest.mark.parametrize("dtype", WEIGHT_DTYPES, ids=["bf16", "fp32"])
def test_deferred_calls_have_the_bits_of_finished_sums(room: Room, dtype: torch.dtype) -> None:
    def rank_of(rank: Rank) -> bool:
        right, number = True, rank.exchange.rank
        for rows, k, count in ((5, 3, 7), (2, 9, 4), (3, 2, 0)):
            draw = torch.Generator().manual_seed(10 * rows + number)
            case = reference.random_case(WORLD, rows, HIDDEN, LATENT, dtype=BF16, seed=rows)
            index = torch.randint(-1, max(count, 1), (rows * k,), generator=draw, dtype=torch.int32)
            index = index if count else index.fill_(-1)
            given = Deferred(
                torch.randn(count, LATENT + 3, generator=draw).to(BF16),  # rows that don't begin at 16 bytes
                torch.rand(rows * k, generator=draw).to(dtype),
                index,
                rows,
            )
            finished = rank.run(case, rows, routed=finalize(given, LATENT))
            nothing = case.shared.new_empty(rows, 0)
            right &= torch.equal(rank.run(case, rows, routed=nothing, deferred=given), finished)
        return right

    assert on_ranks(rank_of) == [True] * WORLD


@NEEDS_GXX
def test_a_row_has_its_bits_in_any_batch_and_on_every_rank(room: Room) -> None:
    case = reference.random_case(WORLD, 33, HIDDEN, LATENT, dtype=BF16, seed=3)

    def rank_of(rank: Rank) -> list[Tensor]:
        return [rank.run(case, rows, lane=rows % LANES) for rows in (33, 1, 8, 16, 9)]

    every = on_ranks(rank_of)
    whole = every[0][0]
    assert all(torch.equal(out, whole[: out.shape[0]]) for outs in every for out in outs)
    accuracy = reference.measure(whole, case.truth(), case.residual)
    assert accuracy.error <= reference.K0_ERROR_OVER_IDEAL * accuracy.ideal_error


@NEEDS_GXX
def test_it_wakes_up_with_empty_mailboxes(room: Room) -> None:
    case, expected = integers(4, 1)

    def rank_of(rank: Rank) -> bool:
        before = torch.equal(rank.run(case, 4), expected)
        rank.exchange.gather(b"")
        memory = rank.context.memory
        assert memory is not None
        memory.block(rank.exchange.rank)[OFFSET:] = 0x5A  # put aside, and not brought back
        rank.tier.rearm()
        rank.exchange.gather(b"")
        return before and all(torch.equal(rank.run(case, 4, lane=lane), expected) for lane in (0, 1, 0))

    assert on_ranks(rank_of) == [True] * WORLD


def test_it_is_the_tier_s_plug_in() -> None:
    assert plugin(Tier.TAIL_FUSION) is Plugin
