"""The life of a communicator: closing, leaving without closing, sleeping and waking up, one order of streams."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from buffer_groups import descriptors, mappings, over_gloo

import k3comm
from k3comm import Communicator, LatentMoESpec, Settings, Tier, session
from k3comm.facts import Reason, Verdict
from k3comm.kernels import reference
from k3comm.negotiate import farewell
from k3comm.streams import StreamOrder
from k3comm.testing import assert_identical, current_rank, run_ranks
from k3comm.tiers.peer_ar import Plugin as PeerAr
from k3comm.tiers.tail_fusion import Plugin as TailFusion

BF16 = torch.bfloat16
OVER_MEMORY = (Tier.TAIL_FUSION, Tier.PEER_AR)


def spec_for(world_size: int, **options: Any) -> LatentMoESpec:
    return LatentMoESpec(hidden_size=16 * world_size, latent_size=24, top_k=2, max_tokens=1024, **options)


class Counting:
    """A group's exchange that counts its collectives, with a store or without."""

    def __init__(self, store: object = None) -> None:
        self._inner = over_gloo()
        self.rank, self.size = self._inner.rank, self._inner.size
        self.collectives = 0
        self.store = store

    def min(self, values: Sequence[int]) -> list[int]:
        self.collectives += 1
        return self._inner.min(values)

    def gather(self, payload: bytes) -> list[bytes]:
        self.collectives += 1
        return self._inner.gather(payload)


def with_a_store() -> Counting:
    """The exchange of a launch, with a store."""
    me = current_rank()
    return Counting(dist.FileStore(me.rendezvous, me.world_size))


def negotiated(exchange: object = None, group: dist.ProcessGroup | None = None, **options: Any) -> Communicator:
    group = group or dist.group.WORLD
    return Communicator.negotiate(spec_for(dist.get_world_size(group)), group, exchange=exchange, **options)


def right(comm: Communicator, *tiers: Tier, seed: int = 0, rows: int = 5) -> bool:
    """Whether agreed tiers, by default all, give the reference's bits."""
    spec, world_size = comm.spec, comm.world_size
    case = reference.integer_case(
        world_size, rows, spec.hidden_size, spec.latent_size, dtype=comm.dtype, seed=seed, norm=False
    )
    tail = comm.moe_tail(layer_index=max(comm.handles, default=-1) + 1, up_weight=case.up_weight)
    expected = reference.round_once(case.truth(), comm.dtype)
    return all(
        torch.equal(
            tail(case.routed[comm.rank], case.shared[comm.rank], case.residual, plan=tail.plan(rows, tier=tier)),
            expected,
        )
        for tier in tiers or comm.agreement.capacities
    )


def outcome(call: Callable[[], object]) -> str:
    try:
        call()
    except k3comm.K3CommError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def mark(name: str) -> None:
    """A note to the other ranks."""
    Path(current_rank().rendezvous).with_name(name).touch()


def marked(name: str) -> bool:
    return Path(current_rank().rendezvous).with_name(name).exists()


def wait_for(name: str) -> None:
    while not marked(name):
        time.sleep(0.002)


# Closing


def closing_waits_for_the_last(own_exchange: bool) -> list[bool]:
    farewell.LIMIT = 60.0
    exchange = with_a_store()
    found = []
    for name in ("one closes", "and one more of the same group"):
        comm = negotiated(exchange if own_exchange else None)
        before = exchange.collectives
        if comm.rank == 1:
            time.sleep(0.2)
            mark(name)
        comm.close()
        found += [marked(name), exchange.collectives == before]
        comm.close()
    return found


@pytest.mark.parametrize("own_exchange", [False, True])
def test_nobody_lets_go_before_all_close(own_exchange: bool) -> None:
    assert run_ranks(closing_waits_for_the_last, 3, own_exchange) == [[True] * 4] * 3


def closing_beside_a_peer_that_does_not() -> tuple[bool, bool]:
    farewell.LIMIT = 0.2
    comm = negotiated(with_a_store())
    if comm.rank:
        wait_for("rank 0 has closed")
        return True, right_after(comm)
    comm.close()
    mark("rank 0 has closed")
    return comm.closed, mappings() == 0


def right_after(comm: Communicator) -> bool:
    """The memory of a rank that has let go is still there for the others."""
    block = comm._memories[0].block(0)
    block.fill_(1)
    comm.close()
    return bool(block.all())


def test_a_peer_that_does_not_close_is_waited_for_a_short_time_only() -> None:
    assert run_ranks(closing_beside_a_peer_that_does_not, 2) == [(True, True)] * 2


class Gone:
    def add(self, key: str, value: int) -> int:
        raise dist.DistNetworkError("the host of the store is gone")


class Frozen:
    def __init__(self) -> None:
        self.released = threading.Event()

    def add(self, key: str, value: int) -> int:
        self.released.wait(60)
        return value


def test_a_store_that_is_gone_or_frozen_holds_nobody_up() -> None:
    assert not farewell.part(Gone(), "key", 2, 60)
    frozen = Frozen()
    assert not farewell.part(frozen, "key", 2, 0.05)
    frozen.released.set()
    store = dist.HashStore()
    assert not farewell.part(store, "alone", 2, 0.05)
    with ThreadPoolExecutor(3) as ranks:
        assert list(ranks.map(lambda _: farewell.part(store, "together", 3, 60), range(3))) == [True] * 3


def waits(call: Callable[[], object]) -> int:
    """How often a call waits for the other ranks to close."""
    calls = []
    original, session.part = session.part, lambda *args: calls.append(args)
    try:
        call()
    finally:
        session.part = original
    return len(calls)


def closing_without_a_group() -> tuple[int, int, bool, int]:
    exchange = with_a_store()
    comm = negotiated(exchange)
    works = right(comm)
    before = exchange.collectives
    dist.destroy_process_group()
    return waits(comm.close), exchange.collectives - before, works, mappings()


def test_a_group_that_is_destroyed_first_makes_closing_local() -> None:
    assert run_ranks(closing_without_a_group, 2) == [(0, 0, True, 0)] * 2


def closing_after_a_time_out() -> tuple[str, int, int]:
    comm = negotiated(with_a_store(), settings=Settings(poll_deadline=0.2))
    other = negotiated(with_a_store())
    tail = comm.moe_tail(layer_index=0, up_weight=torch.zeros(32, 24, dtype=BF16))
    text = ""
    if comm.rank == 0:
        zeros = torch.zeros(1, 24, dtype=BF16), torch.zeros(1, 32, dtype=BF16)
        text = outcome(lambda: tail(*zeros, plan=tail.plan(1, tier=Tier.TAIL_FUSION)))
        mark("gave up")
    else:
        wait_for("gave up")
    return text.split(":")[0], waits(comm.close), waits(other.close)


def test_a_communicator_that_is_broken_closes_by_itself() -> None:
    assert run_ranks(closing_after_a_time_out, 2) == [("PeerTimeoutError", 0, 1), ("", 1, 1)]


def collected_on_one_rank() -> tuple[int, str, bool]:
    farewell.LIMIT = 0.1
    exchange = with_a_store()
    comm: Communicator | None = negotiated(exchange)
    assert comm is not None
    assert right(comm)
    name, before = comm.name, exchange.collectives
    if exchange.rank == 0:
        del comm
        with pytest.warns(ResourceWarning, match=f"Communicator {name}, rank 0 of 2.* was never closed"):
            gc.collect()
        mark("collected")
    else:
        wait_for("collected")
        comm.close()
    return exchange.collectives - before, outcome(lambda: session.open_session(name)).split(":")[0], mappings() == 0


def test_collection_on_one_rank_starts_no_collective() -> None:
    assert run_ranks(collected_on_one_rank, 2) == [(0, "ClosedError", True)] * 2


EXITING = """
import sys, time, torch, torch.distributed as dist
from k3comm import Communicator, LatentMoESpec
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
comm = Communicator.negotiate(LatentMoESpec(hidden_size=32, latent_size=24, top_k=2), dist.group.WORLD)
tail = comm.moe_tail(layer_index=0, up_weight=torch.zeros(32, 24, dtype=torch.bfloat16))
zeros = torch.zeros(3, 24, dtype=torch.bfloat16), torch.zeros(3, 32, dtype=torch.bfloat16)
for tier in comm.agreement.capacities:
    tail(*zeros, plan=tail.plan(3, tier=tier))
print("works", flush=True)
if rank == 0:
    sys.stdin.read()  # the other one goes first
"""


def test_leaving_without_closing_is_quick_and_quiet(tmp_path: Path) -> None:
    """No wait for a peer, no message, no error, in the first to leave and in the last; nothing had a name."""
    store = str(tmp_path / "store")
    before = set(Path("/dev/shm").iterdir())
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", EXITING, str(rank), store],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [ranks[1].communicate(timeout=60), ranks[0].communicate(timeout=60)]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert said == [("works\n", "")] * 2
    assert [process.returncode for process in ranks] == [0, 0]
    assert set(Path("/dev/shm").iterdir()) <= before


# Many of them


def made_again_and_again() -> tuple[set[int], int, int]:
    counts = set()
    for number in range(5):
        comm = negotiated(lanes=2)
        comm.reserve(600)  # a retired block too
        assert right(comm, seed=number)
        held = mappings()
        comm.close()
        del comm
        if number:  # the first one may open what stays
            counts.add(len(descriptors()))
    return counts, held, mappings()


def test_five_in_a_row_leave_nothing() -> None:
    for counts, held, left in run_ranks(made_again_and_again, 2):
        assert len(counts) == 1
        assert held > 0
        assert left == 0


def an_engine(seed: int) -> bool:
    with negotiated() as comm:
        return all(right(comm, *OVER_MEMORY, seed=seed + number, rows=1 + number) for number in range(20))


def test_two_engines_on_one_machine() -> None:
    with ThreadPoolExecutor(2) as engines:
        assert list(engines.map(lambda seed: run_ranks(an_engine, 2, seed), (0, 100))) == [[True, True]] * 2


def closing_one_of_two() -> list[bool]:
    """Equal widths: whatever one held under the other would show now."""
    base, draft = negotiated(), negotiated()
    found = [right(one, seed=seed) for seed in range(2) for one in (base, draft)]
    addresses = [{memory.block(base.rank).data_ptr() for memory in one._memories} for one in (base, draft)]
    base.close()
    found += [right(draft, *OVER_MEMORY, seed=seed) for seed in range(3)]
    third = negotiated()
    found += [right(one, seed=7) for one in (third, draft, third)]
    draft.close()
    third.close()
    return [*found, addresses[0].isdisjoint(addresses[1])]


def test_closing_one_leaves_the_other_as_it_was() -> None:
    for found in run_ranks(closing_one_of_two, 2):
        assert all(found)


def groups_in_both_orders() -> list[bool]:
    small, other, whole = [0, 1], [1, 2], [0, 1, 2]
    found = []
    for order in ((small, whole), (whole, small), (small, small), (small, other)):
        comms = []
        for ranks in order:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                comms.append(negotiated(group=group))
        found += [right(comm, *tiers, seed=seed) for seed in range(2) for tiers in ((), OVER_MEMORY) for comm in comms]
        for comm in comms:
            comm.close()
    return found


def test_groups_of_one_job_do_not_mix() -> None:
    """A subgroup before the whole and after it; twice the same members; equal sizes and other members, interleaved."""
    for found in run_ranks(groups_in_both_orders, 3):
        assert all(found)


# Sleeping


def addresses(comm: Communicator) -> list[int]:
    lanes, staging = comm._tiers[Tier.TAIL_FUSION]._pool.lanes, comm._tiers[Tier.PEER_AR]._pool
    return [lane.counters.ctypes.data for lane in lanes] + [view.data_ptr() for view in staging.peers("partials", 1)]


def states(comm: Communicator) -> list[object]:
    """Where the protocols are."""
    lanes, pads = comm._tiers[Tier.TAIL_FUSION]._pool.lanes, comm._tiers[Tier.PEER_AR]._pool._pads
    return [(lane.calls, lane.region_number, lane.previous_rows) for lane in lanes] + [pad._count for pad in pads]


def asleep_and_awake() -> list[object]:
    exchange = Counting()
    comm = negotiated(exchange, lanes=2, name="sleeper")
    fresh = states(comm)
    comm.reserve(600)
    assert right(comm)
    assert states(comm) != fresh
    tail = comm.moe_tail(layer_index=50, up_weight=torch.ones(32, 24, dtype=BF16))
    plan, where = tail.plan(2, tier=Tier.TAIL_FUSION), addresses(comm)
    tail.plan(2)
    ones = torch.ones(2, 24, dtype=BF16), torch.zeros(2, 32, dtype=BF16)
    expected = tail(*ones, plan=plan)
    before = exchange.collectives
    comm.suspend()
    comm.suspend()
    uses: list[Callable[[], object]] = [
        lambda: tail(*ones),
        lambda: tail(*ones, plan=plan),
        lambda: tail(*(part[:0] for part in ones)),
        lambda: tail.plan(2),
        lambda: tail.explain(2),
        lambda: tail.reduce_routed(ones[0]),
        lambda: comm.explain(2),
        lambda: comm.reserve(700),
        comm.memory,
        lambda: comm.step().__enter__(),
        lambda: comm.moe_tail(layer_index=99, up_weight=torch.ones(32, 24, dtype=BF16)),
        lambda: torch.ops.k3comm.moe_tail(
            *ones, None, None, torch.ones(32, 24, dtype=BF16), None, "full", 50, "sleeper"
        ),
    ]
    found: list[object] = [outcome(use) for use in uses]
    found += [exchange.collectives - before, repr(comm).split(": ")[1].split(",")[0]]
    dist.barrier()
    for memory in comm._memories:  # what is in it need not survive
        memory.block(comm.rank).random_(0, 255)
    dist.barrier()
    comm.resume()
    found += [exchange.collectives - before, addresses(comm) == where]
    found += [states(comm) == fresh]
    found += [torch.equal(tail(*ones, plan=plan), expected)]
    with comm.step(lane=1):
        found += [right(comm, seed=3)]
    found += [right(comm, Tier.PEER_AR, seed=4, rows=300), comm.memory() != {}]
    comm.suspend()
    comm.close()
    comm.close()
    found += [outcome(comm.resume), outcome(comm.suspend)]
    return found


def test_sleeping_refuses_every_use_and_waking_starts_anew_where_it_was() -> None:
    found = assert_identical(run_ranks(asleep_and_awake, 2))
    uses, (asked, state), rest = found[:12], found[12:14], found[14:]
    assert uses == ["ClosedError: communicator sleeper is suspended; resume() on every rank makes it usable again"] * 12
    assert (asked, state) == (0, "suspended")
    votes, same_place, same_state, *works = rest
    assert votes == 3  # all are there; all have refilled; all have checked themselves
    assert same_place
    assert same_state  # after a self-check, as after negotiate
    assert works[:4] == [True] * 4
    assert works[4:] == ["ClosedError: communicator sleeper is closed"] * 2


def waking_goes_wrong(what: str) -> list[object]:
    comm = negotiated()
    odd = comm.rank == 1
    found: list[object] = []
    original = TailFusion.rearm, PeerAr.self_check
    if not (odd and what == "is awake"):
        comm.suspend()
    if odd and what == "can't refill":
        TailFusion.rearm = lambda self: 1 / 0
    if odd and what == "is wrong":
        PeerAr.self_check = lambda self, context: original[1](self, context) and Verdict.no(Reason.SELF_CHECK)
    if odd and what == "raises after its part":
        PeerAr.self_check = lambda self, context: original[1](self, context) and 1 / 0
    found += [outcome(comm.resume), comm.suspended or (odd and what == "is awake"), comm.broken]
    TailFusion.rearm, PeerAr.self_check = original
    comm.suspend()
    comm.resume()
    found += [right(comm), comm.suspended]
    comm.close()
    return found


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("is awake", "is not suspended; accepted is resume() after suspend() on every rank"),
        ("can't refill", "TAIL_FUSION: refill: ZeroDivisionError: division by zero"),
        ("is wrong", f"PEER_AR: self-check: {Reason.SELF_CHECK.text(0)}"),
        ("raises after its part", "PEER_AR: self-check: ZeroDivisionError: division by zero"),
    ],
)
def test_one_rank_that_can_not_wake_keeps_all_asleep(what: str, text: str) -> None:
    found = assert_identical(run_ranks(waking_goes_wrong, 3, what))
    assert found == [f"NegotiationError: resume: rank 1: {text}", True, "", True, False]


def waking_alone() -> list[str]:
    comm = negotiated(settings=Settings(vote_deadline=0.5))
    comm.suspend()
    if comm.rank:
        wait_for("gave up")
        return []
    found = [outcome(comm.resume).split(":")[0], outcome(comm.resume).split(" (")[0]]
    mark("gave up")
    comm.close()
    return found


def test_waking_alone_is_bounded_and_ends_the_communicator() -> None:
    found = run_ranks(waking_alone, 2)[0]
    assert found[0] == "CommunicationTimeoutError"
    assert found[1].startswith("ClosedError: communicator k3comm-0 can't go on")


# Streams


class FakeStream:
    """A stream: what was put on it, and what it waits for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.waits: list[str] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waits.append(other.name)

    def __str__(self) -> str:
        return f"<stream {self.name}>"


class FakeDevice:
    """The stream that work is issued to, and whether a capture is going on."""

    def __init__(self) -> None:
        self.main, self.side = FakeStream("main"), FakeStream("side")
        self.now, self.capturing = self.main, False
        self.order = StreamOrder(lambda: self.now, lambda: self.capturing)


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


def test_a_call_from_a_second_stream_names_both(device: FakeDevice) -> None:
    """At the communicator itself, where no call of the wrong stream may get as far as a tier."""
    with Communicator.negotiate(spec_for(1)) as comm:
        comm.streams = device.order
        tail = comm.moe_tail(layer_index=0, up_weight=torch.ones(16, 24, dtype=BF16))
        ones = torch.ones(2, 24, dtype=BF16), torch.ones(2, 16, dtype=BF16)
        expected = tail(*ones)
        device.now = device.side
        text = "stream: a call from <stream side>, after calls from <stream main>; accepted is one stream, or another"
        for call in (lambda: tail(*ones), lambda: tail.reduce_routed(ones[0])):
            with pytest.raises(k3comm.InputError, match=text):
                call()
        assert not comm.broken
        comm.use_stream(device.side)
        assert torch.equal(tail(*ones), expected)
        assert (device.side.waits, device.main.waits) == (["main"], [])
        comm.use_stream(device.side)  # nothing to wait for
        assert device.side.waits == ["main"]
        device.now = device.main
        with pytest.raises(k3comm.InputError, match="a call from <stream main>, after calls from <stream side>"):
            tail(*ones)
        comm.use_stream(device.main)
        assert torch.equal(tail(*ones), expected)
        assert device.main.waits == ["side"]


def test_the_first_call_chooses_unless_something_was_named(device: FakeDevice) -> None:
    device.now = device.side
    device.order.check()
    assert device.order.stream is device.side
    named = FakeDevice()
    named.order.use(named.side)
    with pytest.raises(k3comm.InputError, match="from <stream main>, after calls from <stream side>"):
        named.order.check()
    assert named.side.waits == []


def test_a_capture_is_noted_and_changes_nothing(device: FakeDevice) -> None:
    device.capturing, device.now = True, device.side
    device.order.check()
    assert device.order.stream is None
    device.capturing, device.now = False, device.main
    device.order.check()
    device.capturing, device.now = True, device.side
    device.order.check()
    device.now = device.main
    device.order.check()
    assert device.order.captured == {"<stream side>": 2}
    with pytest.raises(k3comm.CaptureError, match="use_stream: a CUDA graph is being captured"):
        device.order.use(device.side)
    device.capturing, device.now = False, device.side
    with pytest.raises(k3comm.InputError, match="from <stream side>, after calls from <stream main>"):
        device.order.check()


def test_on_cpu_there_are_no_streams(device: FakeDevice) -> None:
    with Communicator.negotiate(spec_for(1)) as comm:
        assert comm.streams is None
        with pytest.raises(k3comm.InputError, match="accepted is none, since cpu has no streams"):
            comm.use_stream(device.main)
    with pytest.raises(k3comm.InputError, match=r"stream: 5 given; accepted is a torch\.cuda\.Stream"):
        device.order.use(5)


def names_of_pairs() -> dict[str, list[str]]:
    found = {}
    for pair in ((0, 1), (0, 2), (1, 2)):
        group = dist.new_group(list(pair))
        if dist.get_rank() in pair:
            comms = [Communicator.negotiate(spec_for(2), group) for _ in range(2)]
            found[str(pair)] = [comm.name for comm in comms]
            for comm in comms:
                comm.close()
    return found


def test_default_names_are_the_same_on_all_ranks_of_a_group() -> None:
    """Though each rank is in other groups before."""
    by_rank = run_ranks(names_of_pairs, 3, deadline=60)
    names: dict[str, list[str]] = {}
    for found in by_rank:
        for pair, mine in found.items():
            assert names.setdefault(pair, mine) == mine
    assert len({name for mine in names.values() for name in mine}) == 6


def named_after_others(path: str) -> tuple[str, str]:
    """Rank 0 has made a communicator by itself before there was a group."""
    rank = current_rank().rank
    if rank == 0:
        Communicator.negotiate(spec_for(1)).close()
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    with Communicator.negotiate(spec_for(2), dist.group.WORLD) as comm:
        comm.reserve(comm.spec.max_tokens)
        comm.suspend()
        comm.resume()
        with Communicator.negotiate(spec_for(2), dist.group.WORLD) as other:
            assert other.name != comm.name
        return comm.name, comm._farewell


def test_ranks_that_have_made_other_communicators_before_agree_on_a_name(tmp_path: Path) -> None:
    one, two = run_ranks(named_after_others, 2, str(tmp_path / "store"), init=False, deadline=60)
    assert one == two


def beside_explicit_names(path: str, names: tuple[str, str]) -> list[object]:
    """Each rank has one open that was given its name, before there was a group."""
    rank = current_rank().rank
    given = Communicator.negotiate(spec_for(1), name=names[rank])
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    found: list[object] = []
    for _ in range(2):
        try:
            comm = Communicator.negotiate(spec_for(2), dist.group.WORLD)
        except k3comm.NegotiationError as error:
            found.append(str(error))
            given.close()  # which frees the name
        else:
            others = given.closed or session.open_session(given.name) is given
            found += [comm.name, session.open_session(comm.name) is comm, others]
            comm.close()
    return found


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (("k3comm-1", "mine"), ["k3comm-2", "k3comm-3"]),
        (("k3comm-7", "k3comm-5"), ["k3comm-8", "k3comm-9"]),
        (("k3comm-01", "k3comm-x-9"), ["k3comm-1", "k3comm-2"]),
        (("k3comm-\u0669", "k3comm-"), ["k3comm-1", "k3comm-2"]),
    ],
)
def test_a_default_name_is_no_open_communicators(names: tuple[str, str], expected: list[str], tmp_path: Path) -> None:
    """Also one that a single rank has given: a compiled layer there would find the other communicator."""
    found = assert_identical(run_ranks(beside_explicit_names, 2, str(tmp_path / "store"), names, init=False))
    assert found == [expected[0], True, True, expected[1], True, True]


@pytest.mark.parametrize("number", ["9" * 18, "1" + "0" * 18, "9" * 5000], ids=["last", "too long", "no int"])
def test_a_name_after_which_there_is_no_number_is_named(number: str, tmp_path: Path) -> None:
    names = ("mine", f"k3comm-{number}")
    error, *after = assert_identical(run_ranks(beside_explicit_names, 2, str(tmp_path / "store"), names, init=False))
    assert f"rank 1 can't take part: InputError: name: none given while '{names[1][:60]}" in error
    assert after == ["k3comm-2", True, True]


def with_a_bad_log_filter() -> str:
    def fail(record: logging.LogRecord) -> bool:
        raise ValueError("a filter of the engine's")

    logger = logging.getLogger("k3comm")
    logger.setLevel("INFO")
    logger.addFilter(fail)
    with Communicator.negotiate(spec_for(2), dist.group.WORLD) as comm:
        return comm.name


def test_a_log_filter_that_raises_takes_no_communicator_away() -> None:
    assert run_ranks(with_a_bad_log_filter, 2, deadline=60) == ["k3comm-0"] * 2


def closed_in_a_child() -> int:
    """How many ranks are said to have closed after a forked child has."""
    comm = Communicator.negotiate(spec_for(2), dist.group.WORLD)
    if dist.get_rank() == 1:
        child = os.fork()
        if child == 0:
            try:
                comm.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    dist.barrier()
    said = comm._exchange.store.add(comm._farewell, 0)
    dist.barrier()
    comm.close()
    return said


def test_a_forked_child_closes_for_itself_alone() -> None:
    assert run_ranks(closed_in_a_child, 2, deadline=60) == [0, 0]


def test_a_process_gives_its_threads_a_moment_at_its_end(tmp_path: Path) -> None:
    """A daemon that comes back from a store while the interpreter ends would abort it."""
    script = """
import sys, time
from pathlib import Path
from k3comm.negotiate.threads import start_thread

asked = []
def work():
    while not asked:
        time.sleep(0.01)
    time.sleep(0.2)
    Path(sys.argv[1]).touch()
start_thread("at work", work, lambda: asked.append(1))
start_thread("stuck", lambda: time.sleep(60))
"""
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "ended")], check=True, timeout=60)
    assert (tmp_path / "ended").exists()
    assert time.monotonic() - start < 30
