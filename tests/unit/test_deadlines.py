"""A rank that is late, stopped, killed or raising in a round: every rank ends, soon, alike, with the rank's name."""

import ctypes
import gc
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta

import attrs
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import k3comm
from k3comm import Communicator, LatentMoESpec, Settings
from k3comm.buffers.symmetric import Limit
from k3comm.errors import CommunicationTimeoutError, NegotiationError
from k3comm.negotiate import clerk, rounds
from k3comm.negotiate.exchange import GroupExchange, Late
from k3comm.negotiate.rounds import COMMIT
from k3comm.negotiate.watch import WatchedExchange
from k3comm.testing import RanksFailed, assert_identical, fault_at, run_ranks

SPEC = LatentMoESpec(hidden_size=48, latent_size=16, top_k=1)
W = 3
LIMIT = 0.7
"""Seconds of the deadlines that are meant to pass."""
LATE = 1.6
"""Seconds that a late rank is late: more than LIMIT and the time in which ranks find out, less than a hang."""

STAGES = {
    "the vote": "settings.vote_deadline",
    "exchange of the decode and staging blocks": "settings.rendezvous_deadline",
    "self-check of TAIL_FUSION": "settings.poll_deadline",
    "self-check of COLUMN_PARALLEL": "settings.poll_deadline",
    "the confirming vote": "settings.vote_deadline",
    "the commit": "settings.vote_deadline",
}


def short(seconds: float = LIMIT) -> Settings:
    return Settings(vote_deadline=seconds, rendezvous_deadline=seconds, poll_deadline=seconds)


def outcome(call: Callable[[], object]) -> str:
    """How a call ended, as text."""
    try:
        call()
    except (k3comm.K3CommError, ArithmeticError, KeyboardInterrupt) as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def kill(number: int) -> None:
    os.kill(os.getpid(), number)


def negotiated(group: dist.ProcessGroup, limits: Settings, **arguments: object) -> str:
    return outcome(lambda: Communicator.negotiate(SPEC, group, settings=limits, **arguments).close())


def late_at(stages: Sequence[str], who: int, late: float) -> list[str]:
    """One negotiation a stage, each on a group of its own, in which `who` is late there."""
    outcomes = []
    for stage in stages:
        group = dist.new_group(list(range(dist.get_world_size())))
        act = fault_at(stage, lambda: time.sleep(late)) if dist.get_rank() == who else nullcontext()
        dist.barrier()
        start = time.monotonic()
        with act:
            outcomes.append(negotiated(group, short()))
        seconds = time.monotonic() - start
        outcomes.append("in time" if seconds < LATE + LIMIT + 2 * rounds.ANSWER else f"took {seconds:.1f} s")
    return outcomes


@pytest.mark.parametrize("who", [0, 1])
def test_a_late_rank_is_named_by_all(who: int) -> None:
    """Also by itself: it raises as it comes, or after its own collective succeeded."""
    stages = list(STAGES)[who::2]
    outcomes = assert_identical(run_ranks(late_at, W, stages, who, LATE, deadline=100))
    for stage, text, seconds in zip(stages, outcomes[::2], outcomes[1::2], strict=True):
        assert text.startswith(
            f"CommunicationTimeoutError: negotiation of 3 ranks: rank {who} did not come to {stage} (stage "
        ), text
        assert f" within {LIMIT} s ({STAGES[stage]})" in text
        assert seconds == "in time"


def test_late_by_less_than_the_deadline_is_nothing() -> None:
    limits = Settings(vote_deadline=30)
    assert run_ranks(late_everywhere, W, limits, deadline=60) == [["done"]] * W


def late_everywhere(limits: Settings) -> list[str]:
    stages = ["the vote", "import", "self-check of FUSED_LANE_AR", "the commit"]
    with fault_at(stages[dist.get_rank()], lambda: time.sleep(0.3)):
        return [negotiated(dist.group.WORLD, limits)]


def killed_at(stage: str, when: str, who: int, limits: Settings) -> tuple[str, float]:
    act = fault_at(stage, lambda: kill(signal.SIGKILL), when=when) if dist.get_rank() == who else nullcontext()
    start = time.monotonic()
    with act:
        return negotiated(dist.group.WORLD, limits), time.monotonic() - start


@pytest.mark.parametrize(
    ("stage", "when", "who"),
    [
        ("the vote", "before", 1),
        ("the vote", "inside", 0),
        ("import of", "inside", 2),
        ("self-check of TAIL_FUSION", "before", 1),
        ("self-check of SEQUENCE_PARALLEL", "inside", 1),
        ("the commit", "inside", 0),
    ],
)
def test_a_killed_rank_is_named(stage: str, when: str, who: int) -> None:
    """A connection's end is noticed at once, a mailbox that stays empty or an open commit by the deadline."""
    limits = Settings(vote_deadline=40 if stage != "the commit" else 1, poll_deadline=2)
    with pytest.raises(RanksFailed) as failed:
        run_ranks(killed_at, W, stage, when, who, limits, deadline=60, grace=30)
    assert list(failed.value.failures) == [who]
    assert "SIGKILL" in failed.value.failures[who]
    texts = assert_identical([text for text, _ in failed.value.values.values()])
    verb = "came" if when == "inside" else "did not come"
    assert f"negotiation of 3 ranks: rank {who} {verb} to {stage}" in texts
    assert all(seconds < 20 for _, seconds in failed.value.values.values())


def stopped(who: int) -> list[str]:
    """`who` stops itself in the vote; a peer lets it go on afterwards."""
    rank, peer = dist.get_rank(), (who + 1) % W
    group = dist.new_group(list(range(W)))
    pids: list[int] = [0] * W
    dist.all_gather_object(pids, os.getpid())
    act = fault_at("the vote", lambda: kill(signal.SIGSTOP), when="inside") if rank == who else nullcontext()
    with act:
        outcomes = [negotiated(group, short())]
    if rank == peer:
        os.kill(pids[who], signal.SIGCONT)
    return [*outcomes, negotiated(group, short())]


@pytest.mark.parametrize("who", [0, 2])
def test_a_stopped_rank_is_named_and_takes_the_verdict_when_it_goes_on(who: int) -> None:
    text, again = assert_identical(run_ranks(stopped, W, who, deadline=60))
    assert text == (
        f"CommunicationTimeoutError: negotiation of 3 ranks: rank {who} came to the vote (stage 1) and does not "
        f"answer: killed or stopped; the limit was {LIMIT} s (settings.vote_deadline)"
    )
    # No second attempt on a group whose collectives no longer pair.
    reason = text.removeprefix("CommunicationTimeoutError: ")
    assert f": negotiation on a group whose ranks are out of step ({reason}); " in again
    assert "make a new group" in again


def leaving(what: str) -> tuple[str, str]:
    def leave() -> None:
        raise KeyboardInterrupt if what == "KeyboardInterrupt" else ZeroDivisionError("by zero")

    act = fault_at("map of", leave) if dist.get_rank() == 1 else nullcontext()
    start = time.monotonic()
    with act:
        text = negotiated(dist.group.WORLD, Settings())
    assert time.monotonic() - start < 20
    return text, negotiated(dist.group.WORLD, Settings())


@pytest.mark.parametrize("what", ["KeyboardInterrupt", "ZeroDivisionError"])
def test_a_rank_that_leaves_takes_all_along_at_once(what: str) -> None:
    first, guilty, last = run_ranks(leaving, W, what, deadline=60)
    assert_identical([first, last])
    assert guilty[0].startswith(what)
    assert first[0].startswith("CommunicationTimeoutError: negotiation of 3 ranks: rank 1 left it in ")
    assert what in first[0]
    assert guilty[1] == first[1]


class OwnExchange(GroupExchange):
    """An engine's own control plane; on one rank its collective may fail though it succeeds on the others."""

    fails_on = -1

    def within(self, *arguments: object) -> GroupExchange:
        raise NotImplementedError

    def min(self, values: Sequence[int]) -> list[int]:
        least = super().min(values)
        if self.rank == self.fails_on:
            raise TimeoutError("no answer")
        return least


class Plain:
    """The same for those who know of no ProcessGroup."""

    def __init__(self, inner: OwnExchange, store: dist.Store | None) -> None:
        self._inner, self.rank, self.size, self.store = inner, inner.rank, inner.size, store

    def min(self, values: Sequence[int]) -> list[int]:
        return self._inner.min(values)

    def gather(self, payload: bytes) -> list[bytes]:
        return self._inner.gather(payload)


def over_its_own_exchange(with_store: bool, as_argument: bool) -> list[str]:
    # Peers wait so long in the next collective, longer than rank 2 takes to say how it ended.
    inner = OwnExchange(dist.new_group([0, 1, 2]), 2.5)
    store = dist.PrefixStore("engine", dist.group.WORLD.get_group_store()) if with_store else None
    exchange = Plain(inner, None if as_argument else store)
    arguments = {"exchange": exchange, "store": store if as_argument else None}
    outcomes = [negotiated(dist.new_group([0, 1, 2]), Settings(vote_deadline=5), **arguments)]
    inner.fails_on = 2
    return [*outcomes, negotiated(dist.new_group([0, 1, 2]), Settings(vote_deadline=5), **arguments)]


@pytest.mark.parametrize("as_argument", [False, True])
def test_a_collective_that_succeeded_is_not_believed(as_argument: bool) -> None:
    """On ranks 0 and 1 the vote returned, and everything in it was right."""
    good, bad = assert_identical(run_ranks(over_its_own_exchange, W, True, as_argument, deadline=60))
    assert good == "done"
    assert bad.startswith(
        "CommunicationTimeoutError: negotiation of 3 ranks: the vote (stage 1) did not finish within the exchange's "
        "own deadline, though all ranks came to it; on rank 2: TimeoutError: no answer"
    )


def without_a_store() -> list[str]:
    """Only the exchange's own deadlines are there: every rank ends, in its own words."""
    exchange = Plain(OwnExchange(dist.new_group([0, 1, 2]), LIMIT), None)
    outcomes = [negotiated(dist.group.WORLD, Settings(transport="peer"), exchange=exchange)]
    act = fault_at("the vote", lambda: time.sleep(LATE), when="inside") if dist.get_rank() == 1 else nullcontext()
    with act:
        try:
            Communicator.negotiate(SPEC, dist.group.WORLD, exchange=exchange)
        except Exception as error:
            outcomes.append(type(error).__name__)
    return outcomes


def test_without_a_store_each_rank_still_ends() -> None:
    for good, bad in run_ranks(without_a_store, W, deadline=60):
        assert good == "done"
        assert bad in ("CommunicationTimeoutError", "WaitEnded")


def in_a_subgroup(over_cpu_group: bool) -> list[str]:
    """Ranks 1 and 3 of 4; the others know nothing of it."""
    group, cpu_group = dist.new_group([1, 3]), dist.new_group([1, 3])
    if dist.get_rank() not in (1, 3):
        return []
    arguments = {"cpu_group": cpu_group} if over_cpu_group else {}
    outcomes = [negotiated(group, short(20), **arguments)]
    act = fault_at("the confirming vote", lambda: time.sleep(LATE)) if dist.get_rank() == 3 else nullcontext()
    with act:
        outcomes.append(negotiated(group, short(), **arguments))
    return [*outcomes, negotiated(dist.new_group([1, 3], use_local_synchronization=True), short(20))]


@pytest.mark.parametrize("over_cpu_group", [False, True])
def test_subgroups_watch_over_themselves(over_cpu_group: bool) -> None:
    outcomes = run_ranks(in_a_subgroup, 4, over_cpu_group, deadline=60)
    assert outcomes[0] == outcomes[2] == []
    good, late, anew = assert_identical(outcomes[1::2])
    assert (good, anew) == ("done", "done")
    assert "negotiation of 2 ranks: rank 1 did not come to the confirming vote" in late


def with_a_stopped_host(who: int) -> str:
    """The store's host is one of the ranks, and stops: a client would wait for it for ever."""
    clerk.STORE_ANSWER = 1.5
    rank = dist.get_rank()
    pids: list[int] = [0] * W
    dist.all_gather_object(pids, os.getpid())
    port = [0]
    if rank == who:
        store = dist.TCPStore("127.0.0.1", 0, W, is_master=True, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port, src=who)
    if rank != who:
        store = dist.TCPStore("127.0.0.1", port[0], W, is_master=False, wait_for_workers=False)
    dist.barrier()
    act = fault_at("the vote", lambda: kill(signal.SIGSTOP), when="inside") if rank == who else nullcontext()
    with act:
        text = negotiated(dist.new_group([0, 1, 2]), short(), store=store)
    if rank == (who + 1) % W:
        time.sleep(3)  # the other peer has found out too
        os.kill(pids[who], signal.SIGCONT)
    return text


def test_a_store_whose_host_is_stopped_holds_nobody() -> None:
    texts = run_ranks(with_a_stopped_host, W, 0, deadline=60)
    lost = assert_identical(texts[1:])
    assert lost.startswith(
        "CommunicationTimeoutError: negotiation of 3 ranks: the store that watches over it is lost: the process that "
        "hosts it"
    )


def ending() -> float:
    """Seconds that the end of the group takes after a peer did not come."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=60))
    seconds = 0.0
    if dist.get_rank() == 0:
        assert "rank 1 did not come to the vote" in negotiated(group, short(0.5))
        start = time.monotonic()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        seconds = time.monotonic() - start
    return seconds


def test_nothing_holds_a_process_once_it_gave_up() -> None:
    """Gloo waits for its operations when a group ends, by the group's time-out unless an operation has its own."""
    assert run_ranks(ending, 2, deadline=40)[0] < 15


def reserving(who: int) -> list[str]:
    """A larger block comes about, then a rank is late for another."""
    comm = Communicator.negotiate(SPEC, dist.group.WORLD, settings=short(20))
    comm.reserve(1000)
    outcomes = [str(comm.agreement.capacities[k3comm.Tier.PEER_AR])]
    if dist.get_rank() == who:
        outcomes.append(outcome(lambda: comm.reserve(10**6)))
    else:
        with fault_at("import of the larger block", lambda: 1 / 0) if dist.get_rank() == 2 else nullcontext():
            outcomes.append(outcome(lambda: comm.reserve(10**6)))
    return [*outcomes, comm.broken]


def test_reserve_ends_alike_too() -> None:
    values = run_ranks(reserving, W, 0, deadline=60)
    assert {one[0] for one in values} == {"1000"}
    assert values[2][1].startswith("ZeroDivisionError")
    text = assert_identical([values[0][1], values[1][1]])
    assert text.startswith("CommunicationTimeoutError: reserve of 3 ranks: rank 2 left it in ")
    assert all(one[2] for one in values)


# The arbitration by itself.


class Turns:
    """A store whose operations happen in a given order of ranks, and freely once that is used up."""

    def __init__(self, order: Sequence[int]) -> None:
        self._store = dist.HashStore()
        self._order, self._left = list(order), threading.Condition()
        self._gone: set[int] = set()

    def at(self, rank: int) -> "Place":
        return Place(self, rank)

    def take(self, rank: int, operation: Callable[[], object]) -> object:
        with self._left:
            self._left.wait_for(lambda: not self._order or self._order[0] == rank, timeout=0.05)
            if rank in self._order:
                self._order.remove(rank)
            self._left.notify_all()
            return operation()

    def gone(self, rank: int) -> None:
        with self._left:
            self._order = [one for one in self._order if one != rank]
            self._left.notify_all()


class Place:
    """One rank's side of `Turns`."""

    def __init__(self, turns: Turns, rank: int) -> None:
        self._turns, self._rank = turns, rank

    def __getattr__(self, name: str) -> Callable[..., object]:
        operation = getattr(self._turns._store, name)
        return lambda *arguments: self._turns.take(self._rank, lambda: operation(*arguments))


class Alone:
    """The exchange of a rank whose collectives always succeed."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.store = rank, size, None

    def min(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def gather(self, payload: bytes) -> list[bytes]:
        return [payload] * self.size


def ends(order: Sequence[int], plans: Sequence[str]) -> list[str]:
    """How a round ends on each rank that does what its plan says, the store's operations being in that order."""
    turns, outcomes = Turns(order), [""] * len(plans)

    def rank_main(rank: int) -> None:
        limit = Limit(5 if plans[rank] == "commits" else 0.001, "settings.vote_deadline")
        exchange = WatchedExchange(Alone(rank, len(plans)), turns.at(rank), limit=limit)

        def body() -> None:
            with exchange.together("round"):
                exchange.min([1])
                if plans[rank] == "gives up":
                    exchange.run(lambda: (_ for _ in ()).throw(Late("too late")))
                if plans[rank] == "differs":
                    raise NegotiationError("all differ")

        try:
            body()
            outcomes[rank] = COMMIT
        except NegotiationError:
            outcomes[rank] = COMMIT
        except CommunicationTimeoutError as error:
            outcomes[rank] = str(error)
        finally:
            turns.gone(rank)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(len(plans))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return outcomes


@pytest.fixture
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "ANSWER", 0.02)


@pytest.mark.usefixtures("_quick")
def test_two_ranks_end_alike_in_any_order() -> None:
    """Rank 1 has a deadline that is over at once, so it tries to end the round whenever it looks."""
    seen = set()
    for runs in itertools.product((0, 7, 9, 60), (0, 1, 5, 8, 9, 10), (0, 1, 2)):
        order = [1] * runs[0] + [0] * runs[1] + [1] * runs[2]
        first, second = ends(order, ["commits", "hurries"])
        assert first == second != "", runs
        seen.add(first == COMMIT)
    assert seen == {False, True}


PLANS = st.lists(st.sampled_from(["commits", "hurries", "differs", "gives up"]), min_size=2, max_size=3)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12)), max_size=8), PLANS)
@settings(max_examples=60, deadline=None)
def test_ranks_end_alike_in_any_order(runs: list[tuple[int, int]], plans: list[str]) -> None:
    """`runs`: so many operations of a rank after one another."""
    before, rounds.ANSWER = rounds.ANSWER, 0.02
    try:
        outcomes = ends([rank for rank, count in runs for _ in range(count) if rank < len(plans)], plans)
    finally:
        rounds.ANSWER = before
    assert len(set(outcomes)) == 1, outcomes
    assert outcomes[0] != ""
    if "gives up" in plans:
        assert outcomes[0] != COMMIT


def test_rounds_of_one_group_meet_no_keys_of_another() -> None:
    """The same store and the same names, one round after the other: also after one that ended badly."""
    store = dist.HashStore()
    limit = Limit(1, "settings.vote_deadline")
    one = WatchedExchange(Alone(0, 2), store, limit=limit)
    with pytest.raises(CommunicationTimeoutError, match="rank 1 did not come to the commit"), one.together("round"):
        one.min([1])
    two = WatchedExchange(Alone(1, 2), store, limit=limit)
    with pytest.raises(CommunicationTimeoutError, match="rank 1 did not come to the commit"), two.together("round"):
        two.min([1])
    outcomes = []

    def again(exchange: WatchedExchange) -> None:
        with suppress(CommunicationTimeoutError), exchange.together("round"):
            exchange.min([1])
            outcomes.append("in")
        outcomes.append(outcome(lambda: exchange._round.begin("x")))

    threads = [threading.Thread(target=again, args=(exchange,)) for exchange in (one, two)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(outcomes) == ["done", "done", "in", "in"]


def test_a_store_is_checked() -> None:
    torch.manual_seed(0)
    with pytest.raises(k3comm.InputError, match=r"store: 5 given; accepted is a torch\.distributed\.Store, or None"):
        Communicator.negotiate(SPEC, store=5)  # type: ignore[arg-type]


# Ranks that are in different rounds, or talk over different groups or stores.


def in_different_rounds(mine: Sequence[str]) -> list[str]:
    comm = Communicator.negotiate(SPEC, dist.group.WORLD, settings=short(20))
    what = mine[dist.get_rank()]
    if what == "resume":
        comm.suspend()
    start = time.monotonic()
    found = outcome(
        {
            "reserve": lambda: comm.reserve(500),
            "resume": comm.resume,
            "negotiation": lambda: Communicator.negotiate(SPEC, dist.group.WORLD, settings=short(20)),
        }[what]
    )
    assert time.monotonic() - start < 15
    # Nothing is out of step.
    return [found, negotiated(dist.group.WORLD, short(20))]


@pytest.mark.parametrize(
    ("mine", "text"),
    [
        (
            ("reserve", "resume", "reserve"),
            "ranks 0 and 2 are in reserve of k3comm-0, rank 1 is in resume of k3comm-0",
        ),
        (
            ("negotiation", "reserve", "negotiation"),
            "ranks 0 and 2 are in negotiation, rank 1 is in reserve of k3comm-0",
        ),
        (
            ("negotiation", "resume", "reserve"),
            "rank 0 is in negotiation, rank 1 is in resume of k3comm-0, rank 2 is in reserve of k3comm-0",
        ),
    ],
)
def test_ranks_in_different_rounds_raise_alike_and_stay_in_step(mine: Sequence[str], text: str) -> None:
    found, after = assert_identical(run_ranks(in_different_rounds, W, mine, deadline=60))
    assert found == f"NegotiationError: the 3 ranks differ: {text}; accepted is one operation on every rank"
    assert after == "done"


def in_check_uniform(mine: Sequence[str], limit: float, with_store: bool) -> tuple[str, float, str, str]:
    """How what each rank does ends, and when; then a call that all make, and a negotiation."""
    limits = attrs.evolve(short(limit), check_uniform=True)
    store = dist.PrefixStore("engine", dist.group.WORLD.get_group_store()) if with_store else None
    comm = Communicator.negotiate(SPEC, dist.group.WORLD, settings=limits, store=store)
    tail = comm.moe_tail(layer_index=0, up_weight=torch.zeros(48, 16, dtype=torch.bfloat16))
    what = mine[dist.get_rank()]

    def call(rows: int = 2) -> None:
        tail(torch.zeros(rows, 16, dtype=torch.bfloat16), torch.zeros(rows, 48, dtype=torch.bfloat16), None)

    start = time.monotonic()
    found = outcome(
        {
            "call": call,
            "other call": lambda: call(3),
            "reserve": lambda: comm.reserve(500),
            "resume": comm.resume,
            "negotiation": lambda: Communicator.negotiate(SPEC, dist.group.WORLD, settings=limits, store=store),
        }[what]
    )
    seconds = time.monotonic() - start
    return found, seconds, outcome(call), negotiated(dist.group.WORLD, short(20))


@pytest.mark.parametrize("with_store", [False, True])
@pytest.mark.parametrize(
    ("mine", "text"),
    [
        (
            ("reserve", "call", "reserve"),
            "ranks 0 and 2 are in reserve of k3comm-0, rank 1 is in call 0 of k3comm-0 (check_uniform)",
        ),
        (
            ("call", "negotiation", "other call"),
            "ranks 0 and 2 are in call 0 of k3comm-0 (check_uniform), rank 1 is in negotiation",
        ),
        (
            ("resume", "reserve", "call"),
            "rank 0 is in resume of k3comm-0, rank 1 is in reserve of k3comm-0, "
            "rank 2 is in call 0 of k3comm-0 (check_uniform)",
        ),
    ],
)
def test_a_rank_in_check_uniform_and_those_in_a_round_are_told_the_same(
    mine: Sequence[str], text: str, with_store: bool
) -> None:
    """At once, and nothing is out of step: they have met in a collective of equal length, and go on from there."""
    values = run_ranks(in_check_uniform, W, mine, 40, with_store, deadline=60)
    for what, (found, seconds, call, after) in zip(mine, values, strict=True):
        kind = "DivergenceError" if "call" in what else "NegotiationError"
        assert found == f"{kind}: the 3 ranks differ: {text}; accepted is one operation on every rank"
        assert seconds < 10
        assert (call, after) == ("done", "done")


def killed_as_it_finds_out() -> tuple[str, float]:
    comm = Communicator.negotiate(SPEC, dist.group.WORLD, settings=attrs.evolve(short(40), check_uniform=True))
    tail = comm.moe_tail(layer_index=0, up_weight=torch.zeros(48, 16, dtype=torch.bfloat16))
    partials = torch.zeros(2, 16, dtype=torch.bfloat16), torch.zeros(2, 48, dtype=torch.bfloat16)
    start = time.monotonic()
    if dist.get_rank() == 1:
        comm._exchange._round.meet_round = lambda *arguments: kill(signal.SIGKILL)
    text = outcome((lambda: comm.reserve(500)) if dist.get_rank() == 2 else (lambda: tail(*partials, None)))
    return text, time.monotonic() - start


def test_a_rank_that_is_killed_in_check_uniform_meanwhile_is_told_from_those_in_a_round() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(killed_as_it_finds_out, W, deadline=60, grace=30)
    assert list(failed.value.failures) == [1]
    (one, seconds), (two, others) = failed.value.values.values()
    text = (
        "the 3 ranks differ: rank 0 is in call 0 of k3comm-0 (check_uniform), rank 2 is in reserve of k3comm-0; "
        "accepted is one operation on every rank; rank 1 is in a collective outside of these, or gone"
    )
    assert two == f"CommunicationTimeoutError: {text}"
    assert one == two
    assert max(seconds, others) < 10


def over_different_things(argument: str) -> list[str]:
    rank, group, cpu_group = dist.get_rank(), dist.new_group([0, 1, 2]), dist.new_group([0, 1, 2])
    sub = dist.new_group([0, 1])
    start = time.monotonic()
    given: dict[str, object] = {}
    if argument == "store" and rank == 1:
        given["store"] = dist.PrefixStore("other", dist.group.WORLD.get_group_store())
    elif argument == "cpu_group" and rank == 1:
        given["cpu_group"] = cpu_group
    elif argument == "bad cpu_group":
        given["cpu_group"] = sub if rank == 1 else cpu_group
    text = negotiated(group, short(30), **given)
    assert time.monotonic() - start < 15
    return [text, cpu_group.group_name]


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ("store", "store: none on ranks 0 and 2, one of the caller's on rank 1"),
        ("cpu_group", "cpu_group: none that votes on ranks 0 and 2, group {} on rank 1"),
        ("bad cpu_group", "cpu_group: group {} on ranks 0 and 2, none that votes on rank 1"),
    ],
)
def test_other_groups_or_stores_are_one_text(argument: str, text: str) -> None:
    """Votes over different groups never meet: that is seen in the group's own store."""
    found, name = assert_identical(run_ranks(over_different_things, W, argument, deadline=60))
    assert f"{text.format(name)}; accepted is the same on every rank" in found, found


def over_unshared(sides: Sequence[str]) -> list[str]:
    """`sides`: a rank's own HashStore, or under what it looks into the group's store. Then one that all share."""
    job, side = dist.group.WORLD.get_group_store(), sides[dist.get_rank()]
    stores = [dist.HashStore() if side == "own" else dist.PrefixStore(side, job), dist.PrefixStore("one", job)]
    found = []
    for store in stores:
        start = time.monotonic()
        found.append(negotiated(dist.group.WORLD, short(40), store=store))
        assert time.monotonic() - start < 15
    return found


@pytest.mark.parametrize(
    ("sides", "text"),
    [
        (("own", "own"), "one on rank 0, another on rank 1"),
        (("own", "own", "own"), "one on rank 0, another on rank 1, another on rank 2"),
        (("a", "own", "a"), "one on ranks 0 and 2, another on rank 1"),
        (("a", "b", "b"), "one on rank 0, another on ranks 1 and 2"),
    ],
)
def test_stores_that_the_ranks_do_not_share_are_told_from_missing_ranks(sides: Sequence[str], text: str) -> None:
    """All ranks have come, so nothing is out of step."""
    found, after = assert_identical(run_ranks(over_unshared, len(sides), sides, deadline=60))
    assert found == (
        f"NegotiationError: negotiation of {len(sides)} ranks: store= is not shared by the ranks: {text}; accepted is "
        "one in which every rank sees what the others write"
    )
    assert after == "done"


def over_other_exchanges(who: Sequence[int], same_group: bool, with_store: bool) -> tuple[str, float]:
    """Ranks `who` give an exchange of their own, the others none."""
    rank, group = dist.get_rank(), dist.new_group([0, 1, 2])
    inner = OwnExchange(group if same_group else dist.new_group([0, 1, 2]), 40)
    store = dist.PrefixStore("engine", dist.group.WORLD.get_group_store()) if with_store else None
    start = time.monotonic()
    given = {"exchange": Plain(inner, store)} if rank in who else {}
    return negotiated(group, short(40), **given), time.monotonic() - start


@pytest.mark.parametrize("with_store", [False, True])
@pytest.mark.parametrize("same_group", [False, True])
@pytest.mark.parametrize(
    ("who", "text"),
    [
        ([1], "none on ranks 0 and 2, one of the caller's on rank 1"),
        ([0, 2], "one of the caller's on ranks 0 and 2, none on rank 1"),
    ],
)
def test_an_exchange_that_some_give_is_one_text(
    who: Sequence[int], text: str, same_group: bool, with_store: bool
) -> None:
    """Over one group their first collectives would have other lengths, and gloo would end a process."""
    values = run_ranks(over_other_exchanges, W, who, same_group, with_store, deadline=60)
    found = assert_identical([text for text, _ in values])
    assert found.startswith("CommunicationTimeoutError: negotiation of 3 ranks: "), found
    assert f"exchange: {text}; accepted is the same on every rank" in found, found
    assert all(seconds < 10 for _, seconds in values)


def in_other_methods_over_an_exchange() -> list[str]:
    exchange = Plain(OwnExchange(dist.new_group([0, 1, 2]), 40), None)
    comm = Communicator.negotiate(SPEC, dist.group.WORLD, settings=short(40), exchange=exchange)
    found = outcome((lambda: comm.reserve(500)) if dist.get_rank() == 1 else comm.resume)
    return [found, outcome(lambda: comm.reserve(500)), outcome(comm.close)]


def test_over_an_exchange_ranks_in_different_rounds_raise_alike_too() -> None:
    found, *after = assert_identical(run_ranks(in_other_methods_over_an_exchange, W, deadline=60))
    assert found == (
        "NegotiationError: the 3 ranks differ: ranks 0 and 2 are in resume of k3comm-0, rank 1 is in reserve of "
        "k3comm-0; accepted is one operation on every rank"
    )
    assert after == ["done", "done"]


def over_destroyed(argument: str) -> str:
    gone = dist.new_group([0, 1])
    dist.barrier()  # or one closes while the other still connects
    dist.destroy_process_group(gone)
    if argument == "group":
        return negotiated(gone, short(20))
    return negotiated(dist.group.WORLD, short(20), cpu_group=gone)


@pytest.mark.parametrize("argument", ["group", "cpu_group"])
def test_a_destroyed_group_is_refused(argument: str) -> None:
    for text in run_ranks(over_destroyed, 2, argument, deadline=60):
        if argument == "group":
            assert text.startswith("InputError: group: it is destroyed; accepted are ")
        else:
            assert text.startswith("NegotiationError: ")
            assert "InputError: cpu_group: " in text


def test_who_ends_a_round_stays_until_the_others_have_read_why() -> None:
    """It may host the store."""
    store, limit, left = dist.HashStore(), Limit(5, "settings.vote_deadline"), threading.Event()
    one, two = (WatchedExchange(Alone(rank, 2), store, limit=limit) for rank in range(2))
    outcomes: list[object] = []

    def leave() -> None:
        with suppress(ZeroDivisionError), one.together("round"):
            raise ZeroDivisionError
        left.set()

    def work() -> None:
        with two.together("round"):
            time.sleep(0.3)
            outcomes.append(left.is_set())
            two.min([1])

    thread = threading.Thread(target=leave)
    thread.start()
    with pytest.raises(CommunicationTimeoutError, match="rank 0 left it in its start: ZeroDivisionError"):
        work()
    thread.join(10)
    assert outcomes == [False]
    assert left.is_set()


@pytest.mark.parametrize("seconds", [0.8, 1.8])
def test_a_process_that_was_stopped_waits_on(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit has passed when it goes on, once or three times over, though the host never was the reason."""
    monkeypatch.setattr(clerk, "STORE_ANSWER", 0.5)
    one = clerk.Clerk(dist.HashStore())

    def held_up(store: dist.Store) -> str:
        for _ in range(2):
            ctypes.PyDLL(None).usleep(int(seconds / 2 * 1e6))  # with the interpreter's lock: no thread runs
        time.sleep(0.1)
        return "here"

    start = time.monotonic()
    assert one.ask(held_up) == "here"
    assert time.monotonic() - start > seconds
    with pytest.raises(clerk.StoreLostError):
        one.ask(lambda store: time.sleep(0.7))
    one.dismiss()


def test_a_stores_own_time_out_is_no_reason_to_wait() -> None:
    def refuse(store: dist.Store) -> None:
        raise TimeoutError("its own")

    one = clerk.Clerk(dist.HashStore())
    start = time.monotonic()
    with pytest.raises(clerk.StoreLostError, match="its own"):
        one.ask(refuse)
    assert time.monotonic() - start < clerk.STORE_ANSWER
    one.dismiss()
