"""The fault matrix: what goes wrong x where x on which rank. Every rank ends, soon, alike, and nothing is left.

A place is a row of PLACES; a new one, a kernel's or a GPU memory's too, needs nothing else. `make test` runs SAMPLE, in
which every place and every kind comes up, with three ranks; all of it, with 2, 4 and 8, is slow.

Nothing here depends on who is how fast: a late rank is late until its peers have given up, and a stopped one stays so
until they have left the group.
"""

from __future__ import annotations

import errno
import functools
import gc
import itertools
import os
import pkgutil
import re
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from buffer_groups import descriptors, mappings

import k3comm
from k3comm import Communicator, LatentMoESpec, MoETailOp, ParallelLayout, Settings, Tier
from k3comm.negotiate.decide import name_ranks
from k3comm.negotiate.rounds import ANSWER
from k3comm.operations import AttentionReduceOp
from k3comm.settings import UNIFORM_VARIABLES
from k3comm.testing import FakeMachine, RanksFailed, assert_identical, current_rank, fault_at, run_ranks
from k3comm.tiers import plugins

MARGIN = 2 * ANSWER + 6
"""Seconds past the deadline in which a rank ends: ranks take a while to find out who is missing, on a busy machine."""
HELD = 40.0
"""Seconds that a rank is late where its peers wait for it instead of ending: past all that is accepted."""
LIBRARY = ("SEQUENCE_PARALLEL", "COLUMN_PARALLEL", "FUSED_LANE_AR", "SEPARATE_REDUCE")

OFF = "the tier is off everywhere"
ALIKE = "every rank raises the same"
LEAVES = "the faulty rank raises its own error, the others the same"


@attrs.frozen(kw_only=True)
class Place:
    """Where something goes wrong, and what comes of a rank that raises there.

    Attributes:
        name: in the test's name.
        stage: inside the first stage of a round with this in its name; or
        call: before the first call of this function, by its dotted name.
        phase: of PHASES.
        raised: OFF, ALIKE or LEAVES.
        tier: that is off, or that runs; "" where it does not matter.
    """

    name: str
    stage: str = ""
    call: str = ""
    phase: str = "negotiate"
    raised: str = LEAVES
    tier: str = ""


def before(call: str, name: str, **more: Any) -> Place:
    return Place(name=name, call=f"k3comm.{call}", **more)


def inside(stage: str, name: str, **more: Any) -> Place:
    return Place(name=name, stage=stage, **more)


def mid_forward(tier: str, call: str) -> Place:
    """Between two hops or collectives of the tier, or where it has only one, before that."""
    return before(call, f"forward-{tier}", phase="forward", tier=tier)


PLACES = (
    before("negotiate.agree.probe", "facts", raised=ALIKE),
    before("buffers.host.HostMemory.allocate", "allocation", raised=OFF, tier="TAIL_FUSION"),
    inside("the vote", "vote"),
    before("buffers.host.HostMemory.export", "export", raised=OFF, tier="TAIL_FUSION"),
    inside("exchange of", "exchange"),
    before("buffers.host.HostMemory.import_", "import", raised=OFF, tier="TAIL_FUSION"),
    before("buffers.host.HostMemory.map", "map", raised=OFF, tier="TAIL_FUSION"),
    *(
        before(f"tiers.{tier.lower()}.Plugin.prepare", f"prepare-{tier}", raised=OFF, tier=tier)
        for tier in ("PEER_AR", "COLUMN_PARALLEL")
    ),
    inside("the vote on prepare", "prepare-vote"),
    before("tiers.tail_fusion.Plugin.self_check", "selfcheck-TAIL_FUSION", raised=OFF, tier="TAIL_FUSION"),
    before("tiers.peer_ar.Plugin.self_check", "selfcheck-PEER_AR", raised=OFF, tier="PEER_AR"),
    # Peers wait in a collective of the group, which is out of step then.
    *(before(f"tiers.{tier.lower()}.Plugin.self_check", f"selfcheck-{tier}", raised=ALIKE) for tier in LIBRARY),
    inside("the confirming vote", "confirming-vote"),
    inside("the commit", "commit"),
    mid_forward("TAIL_FUSION", "kernels.dense.split_norm"),
    mid_forward("PEER_AR", "buffers.staging.StagingPool.peers"),
    mid_forward("SEQUENCE_PARALLEL", "tiers.library.Collectives.all_gather"),
    mid_forward("COLUMN_PARALLEL", "tiers.library.Collectives.all_gather"),
    mid_forward("FUSED_LANE_AR", "tiers.library.Collectives.all_reduce"),
    mid_forward("SEPARATE_REDUCE", "tiers.library.Collectives.all_reduce"),
    inside("the number of rows", "reserve-rows", phase="reserve"),
    before("buffers.host.HostMemory.allocate", "reserve-allocation", phase="reserve", raised=ALIKE),
    inside("exchange of the larger block", "reserve-exchange", phase="reserve"),
    inside("the commit", "reserve-commit", phase="reserve"),
    before("tiers.tail_fusion.Plugin.rearm", "resume-refill", phase="resume", raised=ALIKE),
    inside("the commit", "resume-commit", phase="resume"),
)

KINDS = ("raise", "sleep", "kill", "stop")


@attrs.frozen(kw_only=True)
class Case:
    """One launch."""

    kind: str
    place: Place
    who: int
    world_size: int

    def __str__(self) -> str:
        return f"{self.kind}-{self.place.name}-rank{self.who}-W{self.world_size}"

    @property
    def limit(self) -> float:
        """Seconds of all deadlines; for more ranks than there may be cores, more."""
        return max(1.0, 0.4 * self.world_size)


# What a rank does.


def seen(name: str) -> Path:
    """A note to the other ranks, once it is touched."""
    return Path(current_rank().rendezvous).with_name(name)


def wait_for(what: str, ranks: Iterable[int]) -> None:
    """Until all of them have said it; HELD at most."""
    limit = time.monotonic() + HELD
    for note in [seen(f"{what}-{rank}") for rank in ranks]:
        while not note.exists() and time.monotonic() < limit:
            time.sleep(0.01)


def go_wrong(case: Case) -> None:
    seen("gone wrong").touch()
    if case.kind == "raise":
        raise OSError(errno.ENOMEM, "made to fail")
    if case.kind == "sleep":
        wait_for("ended", (rank for rank in range(case.world_size) if rank != case.who))
    else:
        os.kill(os.getpid(), signal.SIGKILL if case.kind == "kill" else signal.SIGSTOP)


@contextmanager
def fault(case: Case) -> Iterator[None]:
    """Goes wrong once, at the case's place."""
    place, pending = case.place, [lambda: go_wrong(case)]
    if place.stage:
        with fault_at(place.stage, pending.pop(), when="inside"):
            yield
        return
    function = pkgutil.resolve_name(place.call)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if pending:
            pending.pop()()
        return function(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(place.call, wrapped)
        yield


class Work:
    """What a rank does with one communicator, phase by phase; each says what came of it, equal on all ranks."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.comm: Communicator | None = None

    def negotiate(self) -> str:
        W, seconds = self._case.world_size, self._case.limit
        spec = LatentMoESpec(hidden_size=16 * W, latent_size=16, top_k=1)
        limits = Settings(vote_deadline=seconds, rendezvous_deadline=seconds, poll_deadline=seconds)
        self.comm = Communicator.negotiate(spec, dist.group.WORLD, settings=limits)
        self.tail = self.comm.moe_tail(layer_index=0, up_weight=torch.ones(16 * W, 16).bfloat16())
        why = {tier.name: self.comm.report.decision.refusal(tier) for tier in plugins()}
        # What all ranks refuse for one reason, which then names none, this machine is not made for.
        off = [f"{name}: {text}" for name, text in why.items() if re.search(r"ranks? \d", text)]
        return "\n".join(off or ["all"])

    def forward(self) -> str:
        return self._runs(Tier[self._case.place.tier])

    def reserve(self) -> str:
        assert self.comm is not None
        self.comm.reserve(300)
        return str(self.comm.agreement.capacities[Tier.PEER_AR])

    def resume(self) -> str:
        assert self.comm is not None
        self.comm.suspend()
        self.comm.resume()
        return "awake"

    def works(self) -> str:
        """Whether every agreed tier gives what is right; "" without a communicator that could."""
        if self.comm is None or self.comm.broken or self.comm.suspended:
            return ""
        return ", ".join({self._runs(tier) for tier in self.comm.agreement.capacities})

    def close(self) -> None:
        if self.comm is not None:
            self.comm.close()
        self.__dict__.clear()  # nothing here may keep memory mapped

    def _runs(self, tier: Tier) -> str:
        W = self._case.world_size
        routed, shared = torch.ones(3, 16).bfloat16(), torch.full((3, 16 * W), 1.0 + dist.get_rank()).bfloat16()
        out = self.tail(routed, shared, None, plan=self.tail.plan(3, tier=tier))
        expected = 16 * W + W * (W + 1) // 2
        return "right" if bool((out == expected).all()) and expected <= 256 else f"wrong: {out.flatten()[:4].tolist()}"


PHASES: Mapping[str, Callable[[Work], str]] = {
    "negotiate": Work.negotiate,
    "forward": Work.forward,
    "reserve": Work.reserve,
    "resume": Work.resume,
}


@attrs.frozen(kw_only=True)
class Ended:
    """How one rank ended.

    Attributes:
        outcome, said: what came of the phase, without this rank's own number, and in full.
        seconds: until then.
        again: the outcome of a second try without a fault.
        works: what tiers give afterwards; nothing where none can be called.
        blocks, left: memory that is still there according to the machine, and to the kernel.
        ending: seconds that the end of the group took. at: when the rank returned. pids: of all ranks.
    """

    outcome: str
    said: str
    seconds: float
    again: str
    works: set[str]
    blocks: int
    left: list[str]
    ending: float
    at: float
    pids: list[int]


def attempt(call: Callable[[], str]) -> tuple[str, str]:
    """What came of a call, less what differs between ranks, and all of it."""
    try:
        found = call()
    except k3comm.PeerTimeoutError as error:
        return f"PeerTimeoutError: {name_ranks(error.ranks)}", f"PeerTimeoutError: {error}"
    except (k3comm.K3CommError, OSError) as error:
        found = f"{type(error).__name__}: {error}"
    return found, found


def rank_main(case: Case) -> Ended:
    """One rank: comes to the phase, tries it, tries it again, and cleans up."""
    rank, phase = dist.get_rank(), PHASES[case.place.phase]
    pids: list[int] = [0] * case.world_size
    dist.all_gather_object(pids, os.getpid())
    machine, patch, work = FakeMachine(), pytest.MonkeyPatch(), Work(case)
    patch.setattr("k3comm.communicator.HostMemory", machine.memory)
    plugins()
    if case.place.phase != "negotiate":
        assert work.negotiate() == "all"
    dist.barrier()

    start = time.monotonic()
    with fault(case) if rank == case.who else nullcontext():
        outcome, said = attempt(lambda: phase(work))
    seconds = time.monotonic() - start
    second = Work(case) if case.place.phase == "negotiate" else work
    again, _ = attempt(lambda: phase(second))
    both = list(dict.fromkeys((work, second)))
    works = {one.works() for one in both} - {""}

    others = [other for other in range(case.world_size) if case.kind == "raise" or other != case.who]
    seen(f"ended-{rank}").touch()
    wait_for("ended", others)
    for one in both:
        one.close()
    start = time.monotonic()
    dist.destroy_process_group()
    gc.collect()
    ending = time.monotonic() - start
    seen(f"left-{rank}").touch()
    if case.kind == "stop" and rank == others[0]:
        wait_for("left", others)
        os.kill(pids[case.who], signal.SIGCONT)
    patch.undo()
    return Ended(
        outcome=outcome,
        said=said,
        seconds=seconds,
        again=again,
        works=works,
        blocks=machine.live + machine.mapped,
        left=[*[name for name in descriptors() if "memfd:k3comm" in name], *["a mapping"] * mappings()],
        ending=ending,
        at=time.monotonic(),
        pids=pids,
    )


# What is asserted.


def launch(case: Case) -> dict[int, Ended]:
    """How each rank ended, but a killed one."""
    try:
        ended = dict(enumerate(run_ranks(rank_main, case.world_size, case, deadline=2 * HELD, grace=HELD)))
    except RanksFailed as failed:
        if case.kind != "kill" or list(failed.failures) != [case.who] or "SIGKILL" not in failed.failures[case.who]:
            raise
        ended = failed.values
    assert len(ended) == case.world_size - (case.kind == "kill"), "the fault did not happen"
    return ended


def names(case: Case, text: str) -> bool:
    """Whether a text names the faulty rank, and no other but those that say so.

    These are "on rank 1: ", "of rank 1 of 3", and in the reasons of a tier "rank 1: self-check: PeerTimeoutError".
    """
    ranks = r"(?<!on )ranks? (\d++(?:, \d++)*+(?: and \d++)?+)(?! of \d|: self-check: PeerTimeoutError)"
    return {int(number) for found in re.findall(ranks, text) for number in re.findall(r"\d+", found)} == {case.who}


def closed(text: str) -> str:
    """A ClosedError without its reason: that is what this rank met in a forward, and says which rank it is."""
    return text.partition(":")[0] if text.startswith("ClosedError: ") else text


def check(case: Case) -> None:
    ended = launch(case)
    gone = time.monotonic() - max(one.at for one in ended.values())
    place, raised = case.place, case.place.raised if case.kind == "raise" else ""
    others = {rank: one for rank, one in ended.items() if rank != case.who}

    outcome = assert_identical([one.outcome for one in others.values()])
    again = assert_identical([closed(one.again) for one in others.values()])
    goes_on = raised == OFF or outcome.startswith("NegotiationError: ")
    assert all(names(case, one.said) for one in others.values()), [one.said for one in others.values()]
    if raised == OFF:
        assert outcome.startswith(f"{place.tier}: "), outcome
        assert "\n" not in outcome, outcome
    elif place.phase == "forward":
        assert outcome.startswith("PeerTimeoutError: "), outcome
    elif not goes_on or raised == LEAVES:
        assert outcome.startswith("CommunicationTimeoutError: "), outcome
    if case.who in ended and place.phase != "forward":
        guilty = ended[case.who].outcome
        assert guilty.startswith("OSError: ") if raised == LEAVES else guilty == outcome, guilty
    elif raised:
        assert ended[case.who].outcome.startswith("OSError: ")
    if goes_on:
        assert not again.startswith(("CommunicationTimeoutError", "ClosedError")), again
        assert [one.works for one in ended.values()] == [{"right"}] * len(ended)
    else:
        assert again.startswith(("ClosedError", "CommunicationTimeoutError: negotiation on a group whose ranks")), again
        assert not any(one.works for one in others.values())
    # A rank that is late, or stopped and goes on, may get right data, and never wrong ones.
    assert not any("wrong" in " ".join((one.outcome, one.again, *one.works)) for one in ended.values())

    assert max(one.seconds for one in others.values()) < case.limit + MARGIN
    assert max(one.ending for one in ended.values()) < MARGIN
    assert gone < MARGIN
    assert {one.blocks for one in ended.values()} == {0}
    assert [one.left for one in ended.values()] == [[]] * len(ended)
    pids = next(iter(ended.values())).pids
    limit = time.monotonic() + MARGIN
    while alive := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < limit, alive
        time.sleep(0.01)


def test_every_tier_is_in_the_matrix() -> None:
    here = [tier.name for tier, plugin in plugins().items() if plugin.transports & {"library", "host"}]
    assert len(here) >= 6
    for what in ("selfcheck", "forward"):
        assert {f"{what}-{name}" for name in here} <= {place.name for place in PLACES}


# The neighbours of a killed rank hear of it at once, the others by the deadline; meanwhile the former take the latter,
# which still wait in the same collective, for missing too, and name them.
def cases(world_size: int) -> Iterator[Any]:
    for place, kind, who in itertools.product(PLACES, KINDS, (0, 1 if world_size < 4 else world_size - 2)):
        case = Case(kind=kind, place=place, who=who, world_size=world_size)
        yield pytest.param(case, id=str(case))


SAMPLE = [
    Case(kind=KINDS[number % 4], place=place, who=number // 4 % 2, world_size=3) for number, place in enumerate(PLACES)
]


@pytest.mark.parametrize("case", SAMPLE, ids=str)
def test_a_fault_ends_alike_everywhere(case: Case) -> None:
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for world_size in (2, 4, 8) for case in cases(world_size)])
def test_any_fault_ends_alike_everywhere(case: Case) -> None:
    check(case)


# Ranks that differ.


def own_windows() -> dict[str, Any]:
    path = seen("mine.toml")
    path.write_text('schema = 1\n[tiers.SEPARATE_REDUCE]\ntokens = ["0.."]\n')
    return {"settings": Settings(windows=path)}


def faked(variable: str, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """As if the rank had found the variable: it is never set, nor unset, since a GPU might be looking."""
    probe = pkgutil.resolve_name("k3comm.negotiate.agree.probe")

    def probed(*args: Any, **kwargs: Any) -> Any:
        facts = probe(*args, **kwargs)
        return attrs.evolve(facts, environment={**facts.environment, variable: "odd"})

    patch.setattr("k3comm.negotiate.agree.probe", probed)
    return {}


def patched(target: str, value: object, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setattr(target, value)
    return {}


def variable(name: str, value: str, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setenv(name, value)
    return {}


def more_operations(patch: pytest.MonkeyPatch) -> dict[str, Any]:
    """As a later version would, which serves more."""
    patch.setattr("k3comm.negotiate.agree.SERVED", (MoETailOp, AttentionReduceOp))
    return {"operations": [MoETailOp(), AttentionReduceOp(hidden=8)]}


SPEC = LatentMoESpec(hidden_size=48, latent_size=16, top_k=1)
# By what the text says: the field that differs, or, with a colon, why that rank can't take part.
DIVERGENCES: Mapping[str, Callable[[pytest.MonkeyPatch], dict[str, Any]]] = {
    "settings.disabled": lambda patch: variable("K3COMM_DISABLE", "PEER_AR", patch),
    "settings.poll_deadline": lambda patch: variable("K3COMM_POLL_DEADLINE", "7", patch),
    "K3COMM_FORCE (force): no tier is called 'fastest'": lambda patch: variable("K3COMM_FORCE", "fastest", patch),
    **{f"environment.{name}": functools.partial(faked, name) for name in UNIFORM_VARIABLES},
    "spec.rms_eps": lambda patch: {"spec": attrs.evolve(SPEC, rms_eps=1e-6)},
    "spec: None given": lambda patch: {"spec": None},
    "layout.attention_dp": lambda patch: {"layout": ParallelLayout(tp=dist.get_world_size(), attention_dp=2)},
    "layout.lanes": lambda patch: {"lanes": 2},
    "windows.PEER_AR": lambda patch: own_windows(),
    "nowhere.toml: can't be read": lambda patch: {"settings": Settings(windows="nowhere.toml")},
    "version.k3comm": lambda patch: patched("k3comm.__version__", "0.0.1", patch),
    "sources.sha256": lambda patch: patched("k3comm.negotiate.ballot.sources", lambda: "ab" * 32, patch),
    "operations.AttentionReduceOp": more_operations,
    "operations: (": lambda patch: {"operations": (AttentionReduceOp(hidden=8),)},
}


def negotiated(spec: LatentMoESpec, **arguments: Any) -> str:
    with Communicator.negotiate(spec, dist.group.WORLD, **arguments):
        return "agreed"


def diverging(who: int) -> dict[str, str]:
    """The outcome of a negotiation by what differs on one rank, and of one in which nothing does."""
    found = {}
    for name, differ in DIVERGENCES.items():
        with pytest.MonkeyPatch.context() as patch:
            odd = differ(patch) if dist.get_rank() == who else {}
            found[name], _ = attempt(functools.partial(negotiated, **{"spec": SPEC, **odd}))
    return {**found, "nothing": negotiated(SPEC), "left": str(mappings())}


@pytest.mark.parametrize("world_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4, 8))])
@pytest.mark.parametrize("who", [0, 1])
def test_ranks_that_differ_hear_the_same(world_size: int, who: int) -> None:
    """Nothing is out of step afterwards: all of it happens in one launch, over one group."""
    found = assert_identical(run_ranks(diverging, world_size, who, deadline=100))
    assert (found.pop("nothing"), found.pop("left")) == ("agreed", "0")
    others = name_ranks([rank for rank in range(world_size) if rank != who])
    for name, text in found.items():
        first, found_out = text.split("\n", 1)
        assert first == "NegotiationError: the ranks can't agree"
        if ":" not in name:
            assert f"{name} differs: " in found_out, text
            assert re.search(rf" on {others}(;|$)", found_out, re.MULTILINE), text
            assert re.search(rf" on rank {who}(;|$)", found_out, re.MULTILINE), text
        else:
            assert found_out.startswith(f"rank {who} can't take part: "), text
            assert name in found_out, text
