"""Tiers that can't be prepared, or whose self-check is wrong or raises: off everywhere, and their memory released."""

from collections.abc import Callable

import pytest
import torch.distributed as dist

import k3comm
from k3comm import Communicator, LatentMoESpec, NegotiationError, Settings, Tier
from k3comm.facts import Reason, Verdict
from k3comm.testing import FakeMachine, Fault, assert_identical, run_ranks
from k3comm.tiers import plugins
from k3comm.tiers.interface import TailTier, TierContext

SPEC = LatentMoESpec(hidden_size=48, latent_size=16, top_k=1)
W = 3
ALL = {tier for tier, plugin in plugins().items() if plugin.transports & {"host", "library"}}
"""Those that a machine without a GPU has."""
Check = Callable[[TailTier, TierContext], Verdict]


def wrong(check: Check) -> Check:
    """The tier works, and the bits differ."""
    return lambda tier, context: (check(tier, context), Verdict.no(Reason.SELF_CHECK))[1]


def raising_after(check: Check) -> Check:
    """Something of this rank's own, after the tier's last collective."""
    return lambda tier, context: (check(tier, context), 1 / 0)[1]


def raising_before(check: Check) -> Check:
    """Peers wait in the tier's first collective."""
    return lambda tier, context: 1 / 0


def armed_with(
    name: str, fault: Callable[[Check], Check], ranks: tuple[int, ...], poll_deadline: float
) -> tuple[str, dict[str, str], list[int]]:
    """The outcome where `name` checks itself badly on `ranks`, why tiers are off, and what is left of the memory."""
    machine, monkeypatch = FakeMachine(), pytest.MonkeyPatch()
    monkeypatch.setattr("k3comm.communicator.HostMemory", machine.memory)
    closed = []
    plugin = plugins()[Tier[name]]
    close = plugin.close
    monkeypatch.setattr(plugin, "close", lambda tier: (closed.append(1), close(tier)))
    if dist.get_rank() in ranks:
        monkeypatch.setattr(plugin, "self_check", fault(plugin.self_check))
    try:
        settings = Settings(poll_deadline=poll_deadline)
        comm = Communicator.negotiate(SPEC, dist.group.WORLD, settings=settings)
    except k3comm.K3CommError as error:
        return f"{type(error).__name__}: {error}", {}, [machine.live, machine.mapped, len(closed)]
    finally:
        monkeypatch.undo()
    found = [machine.live, machine.mapped, len(closed)]
    why = {tier.name: comm.report.decision.refusal(tier) for tier in ALL - set(comm.agreement.capacities)}
    comm.close()
    return "armed", why, [*found, machine.live]


WRONG = "rank 1: self-check: its self-check gave wrong numbers"
RAISED = "ranks 0 and 2: self-check: ZeroDivisionError: division by zero"


@pytest.mark.parametrize(
    ("name", "blocks", "fault", "who", "said"),
    [
        ("TAIL_FUSION", 1, wrong, (1,), WRONG),
        ("PEER_AR", 1, wrong, (1,), WRONG),
        ("FUSED_LANE_AR", 2, wrong, (1,), WRONG),
        ("TAIL_FUSION", 1, raising_after, (0, 2), RAISED),
        ("SEQUENCE_PARALLEL", 2, raising_after, (0, 2), RAISED),
    ],
)
def test_a_failed_self_check_takes_the_tier_off_everywhere(
    name: str, blocks: int, fault: Callable[[Check], Check], who: tuple[int, ...], said: str
) -> None:
    outcome, why, memory = assert_identical(run_ranks(armed_with, W, name, fault, who, 30.0, deadline=60))
    assert outcome == "armed"
    assert set(why) == {name}
    assert said in why[name]
    assert memory == [blocks, blocks, 1, 0]


def test_raising_with_peers_inside_a_tier_of_its_own_memory() -> None:
    """They see in the mailbox that it did not come, and in the store that it raised: nothing else is out of step."""
    values = run_ranks(armed_with, W, "TAIL_FUSION", raising_before, (1,), 1.0, deadline=60)
    outcome, why, memory = assert_identical(values)
    assert outcome == "armed"
    assert set(why) == {"TAIL_FUSION"}
    assert "rank 1: self-check: ZeroDivisionError: division by zero" in why["TAIL_FUSION"]
    assert memory == [1, 1, 1, 0]


def test_raising_with_peers_inside_a_collective_of_the_group_ends_the_negotiation() -> None:
    """The group's collectives no longer pair, so nothing can follow; but all know who it was, and why."""
    values = run_ranks(armed_with, W, "SEQUENCE_PARALLEL", raising_before, (1,), 1.0, deadline=60)
    text, _, memory = assert_identical(values)
    assert text.startswith("CommunicationTimeoutError: negotiation of 3 ranks: self-check of SEQUENCE_PARALLEL (stage ")
    assert "; rank 1 had raised there: ZeroDivisionError: division by zero" in text
    assert memory[:2] == [0, 0]


def test_without_the_last_tier_there_is_no_communicator() -> None:
    values = run_ranks(armed_with, W, "SEPARATE_REDUCE", wrong, (2,), 30.0, deadline=60)
    text, _, memory = assert_identical(values)
    assert text.startswith("NegotiationError: SEPARATE_REDUCE can't be armed: rank 2: self-check: ")
    assert memory == [0, 0, 1]


def unprepared(name: str, who: int) -> tuple[dict[str, str], int]:
    machine, monkeypatch = FakeMachine(), pytest.MonkeyPatch()
    monkeypatch.setattr("k3comm.communicator.HostMemory", machine.memory)
    if dist.get_rank() == who:
        monkeypatch.setattr(plugins()[Tier[name]], "prepare", lambda tier, context: 1 / 0)
    with Communicator.negotiate(SPEC, dist.group.WORLD) as comm:
        monkeypatch.undo()
        off = ALL - set(comm.agreement.capacities)
        return {tier.name: comm.report.decision.refusal(tier) for tier in off}, machine.live


@pytest.mark.parametrize(("name", "who", "blocks"), [("PEER_AR", 0, 1), ("COLUMN_PARALLEL", 2, 2)])
def test_a_failed_preparation_takes_the_tier_off_everywhere(name: str, who: int, blocks: int) -> None:
    why, live = assert_identical(run_ranks(unprepared, W, name, who, deadline=60))
    assert why == {name: f"rank {who}: prepare: ZeroDivisionError: division by zero"}
    assert live == blocks


def late_in_a_memory_stage(stage: str, who: int) -> tuple[str, int]:
    """`rendezvous_deadline` bounds the stages in which memory is made, each by itself."""
    fault = Fault(rank=who, stage=stage, delay=2.5, error=None)
    machine, monkeypatch = FakeMachine(fault), pytest.MonkeyPatch()
    monkeypatch.setattr("k3comm.communicator.HostMemory", machine.memory)
    settings = Settings(rendezvous_deadline=0.7)
    with pytest.raises(k3comm.CommunicationTimeoutError) as caught:
        Communicator.negotiate(SPEC, dist.group.WORLD, settings=settings)
    monkeypatch.undo()
    return str(caught.value), machine.live


@pytest.mark.parametrize(("stage", "who"), [("export", 1), ("import", 0)])
def test_a_rendezvous_is_bounded(stage: str, who: int) -> None:
    text, live = assert_identical(run_ranks(late_in_a_memory_stage, W, stage, who, deadline=60))
    assert text.startswith(
        f"negotiation of 3 ranks: rank {who} did not come to {stage} of the decode and staging blocks ("
    )
    assert text.endswith("within 0.7 s (settings.rendezvous_deadline)")
    assert live == 0


def at_real_widths() -> dict[str, str]:
    with Communicator.negotiate(LatentMoESpec.kimi_k3(), dist.group.WORLD) as comm:
        return {tier.name: comm.report.decision.refusal(tier) for tier in ALL - set(comm.agreement.capacities)}


@pytest.mark.parametrize("world_size", [1, 2, 5, 8])
def test_every_tier_passes_its_own_check(world_size: int) -> None:
    off = assert_identical(run_ranks(at_real_widths, world_size, deadline=60))
    assert {name for name, why in off.items() if "self-check" in why} == set()


def broken_sums(name: str) -> str:
    """A tier that leaves a rank out, or adds in another order."""
    monkeypatch = pytest.MonkeyPatch()
    orders = {
        "leaves rank 0 out": lambda p: p[1:].float().sum(0),
        "adds backwards": lambda p: p.float().flip(0).cumsum(0)[-1],
    }
    monkeypatch.setattr("k3comm.kernels.dense.sum_ranks", orders[name])
    with Communicator.negotiate(SPEC, dist.group.WORLD) as comm:
        monkeypatch.undo()
        return comm.report.decision.refusal(Tier.TAIL_FUSION)


@pytest.mark.parametrize("name", ["leaves rank 0 out", "adds backwards"])
def test_the_check_of_the_fused_tail_sees_the_order_of_its_sums(name: str) -> None:
    assert "ranks 0, 1 and 2: self-check: " in assert_identical(run_ranks(broken_sums, W, name, deadline=60))


def test_one_rank_checks_itself_too(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = plugins()[max(Tier)]
    monkeypatch.setattr(plugin, "self_check", lambda tier, context: Verdict.no(Reason.SELF_CHECK))
    with pytest.raises(NegotiationError, match="SEPARATE_REDUCE can't be armed: rank 0: self-check"):
        Communicator.negotiate(SPEC)
