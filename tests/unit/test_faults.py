"""Ranks that are late, gone or failing while others talk: bounded, and never wrong data."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import k3comm
from k3comm import Communicator, LatentMoESpec, Settings, Tier
from k3comm.testing import RanksFailed, run_ranks
from k3comm.tiers.waiting import plain

SPEC = LatentMoESpec(hidden_size=8, latent_size=8, top_k=1, dtype="float32")
LIBRARY = ("SEPARATE_REDUCE", "FUSED_LANE_AR", "SEQUENCE_PARALLEL", "COLUMN_PARALLEL")


def attempt(call) -> str:
    """The outcome of a call, as text."""
    try:
        out = call()
    except k3comm.K3CommError as error:
        return f"{type(error).__name__}: {error}"
    return f"{out.flatten()[0].item():g}" if isinstance(out, torch.Tensor) else "done"


def late_in_a_call(name: str, deadline: float, late: float) -> list[str]:
    rank = dist.get_rank()
    comm = Communicator.negotiate(SPEC, dist.group.WORLD, settings=Settings(poll_deadline=deadline))
    tail = comm.moe_tail(layer_index=0, up_weight=torch.zeros(8, 8))
    outcomes = []
    for number in range(2):
        if rank == 1 and number == 0:
            time.sleep(late)
        value = torch.full((3, 8), 100.0 * (number + 1) + rank)
        plan = tail.plan(3, tier=Tier[name]) if not comm.broken else None
        outcomes.append(attempt(lambda value=value, plan=plan: tail(value * 0, value, None, plan=plan)))
    return outcomes


@pytest.mark.parametrize("name", LIBRARY)
def test_after_a_time_out_nothing_is_paired_with_stale_collectives(name: str) -> None:
    """Rank 0 gives up on a late peer and goes on; the peer must get right data, or an error, never a later call's."""
    early, late = run_ranks(late_in_a_call, 2, name, 1.0, 3.0, deadline=60)
    assert early[0].startswith("PeerTimeoutError: "), early
    assert "within 1 s (settings.poll_deadline), or a peer is gone; rank 1 can't be reached: late, or gone" in early[0]
    assert early[1].startswith("ClosedError: "), early
    assert "can't go on: a call failed between its collectives" in early[1]
    assert late[0] == "201" or late[0].startswith(("CommunicationTimeoutError: ", "ClosedError: ")), late
    assert late[1].startswith(("CommunicationTimeoutError: ", "PeerTimeoutError: ", "ClosedError: ")), late


def absent_in_the_vote(deadline: float, late: float) -> tuple[str, float]:
    if dist.get_rank() == 1:
        time.sleep(late)
    start = time.monotonic()
    settings = Settings(vote_deadline=deadline, transport="peer")
    text = attempt(lambda: Communicator.negotiate(SPEC, dist.group.WORLD, settings=settings))
    return text, time.monotonic() - start


def test_a_vote_is_bounded() -> None:
    (text, seconds), _ = run_ranks(absent_in_the_vote, 2, 1.0, 2.5, deadline=60)
    assert text == (
        "CommunicationTimeoutError: negotiation of 2 ranks: rank 1 did not come to the vote (stage 1) within 1 s "
        "(settings.vote_deadline)"
    )
    assert 0.5 < seconds < 2.4


def failing_with_a_short_deadline(late: float) -> tuple[str, float]:
    """A rank whose own part fails still waits no longer than its settings say."""
    if dist.get_rank() == 1:
        time.sleep(late)
    start = time.monotonic()
    settings = Settings(vote_deadline=1.0)
    text = attempt(lambda: Communicator.negotiate(None, dist.group.WORLD, settings=settings))  # type: ignore[arg-type]
    return text, time.monotonic() - start


def test_a_rank_that_fails_keeps_its_deadline() -> None:
    (text, seconds), _ = run_ranks(failing_with_a_short_deadline, 2, 2.5, deadline=60)
    assert text.startswith("CommunicationTimeoutError: ")
    assert seconds < 2.4


def killed_in_a_call(name: str) -> str:
    comm = Communicator.negotiate(SPEC, dist.group.WORLD, settings=Settings(poll_deadline=20.0))
    tail = comm.moe_tail(layer_index=0, up_weight=torch.zeros(8, 8))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    ones = torch.ones(3, 8)
    return attempt(lambda: tail(ones, ones, None, plan=tail.plan(3, tier=Tier[name])))


@pytest.mark.parametrize("name", LIBRARY)
def test_a_killed_peer_is_an_error_at_once(name: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(killed_in_a_call, 2, name, deadline=60, grace=30)
    assert list(failed.value.failures) == [1]
    assert "SIGKILL" in failed.value.failures[1]
    assert failed.value.values[0].startswith("PeerTimeoutError: ")
    assert "a peer is gone; rank 1 can't be reached: late, or gone" in failed.value.values[0]
    assert " failed before its 20 s (settings.poll_deadline)" in failed.value.values[0]
    assert "typically" not in failed.value.values[0]


def raising_projection() -> list[str]:
    rank = dist.get_rank()
    comm = Communicator.negotiate(SPEC, dist.group.WORLD, settings=Settings(poll_deadline=2.0))

    def project(z: torch.Tensor) -> torch.Tensor:
        if rank == 1:
            raise ValueError("out of luck")
        return torch.zeros(z.shape[0], 8)

    tail = comm.moe_tail(layer_index=0, project=project)
    ones = torch.ones(3, 8)
    plan = tail.plan(3, tier=Tier.SEQUENCE_PARALLEL)
    outcomes = []
    for _ in range(2):
        try:
            outcomes.append(attempt(lambda: tail(ones, ones, None, plan=plan)))
        except ValueError as error:
            outcomes.append(f"ValueError: {error}")
    return outcomes


def test_a_projection_that_raises_ends_the_communicator() -> None:
    peer, guilty = run_ranks(raising_projection, 2, deadline=60)
    assert guilty[0] == "ValueError: out of luck"
    assert "ValueError: out of luck" in guilty[1]
    assert guilty[1].startswith("ClosedError: ")
    assert peer[0].startswith("PeerTimeoutError: ")
    assert peer[1].startswith("ClosedError: ")


def surroundings(precise: bool) -> dict[str, bool]:
    """Every tier under what engines set globally gives the bits that it gives without."""
    spec = LatentMoESpec(hidden_size=32, latent_size=16, top_k=1)
    comm = Communicator.negotiate(spec, dist.group.WORLD)
    draw = torch.Generator().manual_seed(dist.get_rank())
    routed, shared = (torch.randn(5, n, generator=draw).bfloat16() for n in (16, 32))
    weight = torch.randn(32, 16, generator=torch.Generator().manual_seed(9)).bfloat16()
    gain = torch.ones(16).bfloat16()
    tail = comm.moe_tail(layer_index=0, norm_weight=gain, up_weight=weight, precise=precise)
    found = {}
    for tier in comm.agreement.capacities:
        try:
            plan = tail.plan(5, tier=tier)
        except k3comm.TierUnavailableError:
            continue
        expected = tail(routed, shared, None, plan=plan)
        for dtype in (torch.bfloat16, torch.float64):
            torch.set_default_dtype(dtype)
            found[f"{tier.name} {dtype}"] = torch.equal(tail(routed, shared, None, plan=plan), expected)
        torch.set_default_dtype(torch.float32)
        with torch.device("meta"):
            out = tail(routed, shared, None, plan=plan)
        found[f"{tier.name} meta"] = out.device.type == "cpu" and torch.equal(out, expected)
        torch.set_float32_matmul_precision("medium")
        found[f"{tier.name} medium"] = torch.equal(tail(routed, shared, None, plan=plan), expected)
        torch.set_float32_matmul_precision("highest")
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype=dtype):
                found[f"{tier.name} autocast {dtype}"] = torch.equal(tail(routed, shared, None, plan=plan), expected)
    return found


@pytest.mark.parametrize("precise", [False, True])
def test_what_engines_set_globally_changes_no_bit(precise: bool) -> None:
    for found in run_ranks(surroundings, 2, precise, deadline=60):
        assert len(found) >= 6 * (4 if precise else 6)
        assert [what for what, right in found.items() if not right] == []


def test_errors_of_gloo_are_told_plainly() -> None:
    error = RuntimeError(
        "[/build/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:41108: Connection reset by peer. This is "
        "typically caused by a remote worker hanging or bugs in the application. Good luck! \U0001f3d6"
    )
    assert plain(error) == "Read error [127.0.0.1]:41108: Connection reset by peer."
    assert plain(RuntimeError("out of luck")) == "out of luck"
