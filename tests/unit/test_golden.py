"""What each machine agrees on, tier by tier and after the pair vote, as a readable table under data/golden.

After a change that is meant, write the tables anew and read the difference:

    python tests/unit/test_golden.py
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from k3comm.facts import Facts, Reason
from k3comm.negotiate.ballot import ballot, not_allocated
from k3comm.negotiate.blocks import plan_blocks
from k3comm.negotiate.decide import Ballot, Decision, decide, places
from k3comm.negotiate.pairs import pair_verdict, pair_vote, peer_tiers
from k3comm.negotiate.report import rows_text
from k3comm.operations import Proposal
from k3comm.settings import Settings
from k3comm.spec import LatentMoESpec, ParallelLayout
from k3comm.testing import MACHINES, machine_facts
from k3comm.tiers import Tier, choose_windows, plugin, plugins

GOLDEN = Path(__file__).parent / "data" / "golden"


def proposal(ranks: Sequence[Facts]) -> Proposal:
    world_size = len(ranks)
    return Proposal(
        spec=LatentMoESpec.kimi_k3(),
        layout=ParallelLayout(tp=world_size),
        settings=Settings(),
        world_size=world_size,
        device=ranks[0].device,
        windows=choose_windows(ranks[0].family, world_size).windows,
    )


def votes(ranks: Sequence[Facts]) -> list[Ballot]:
    """The ranks' ballots; a block that exceeds the free memory could not be had."""
    asked = proposal(ranks)
    blocks = plan_blocks(asked)
    found = []
    for facts in ranks:
        short = {
            tier: not_allocated(blocks.nbytes[place.block], errno.ENOMEM)
            for tier, place in blocks.places.items()
            if not place.optional
            if isinstance(facts.free_memory, int)
            if facts.free_memory < blocks.nbytes[place.block]
        }
        found.append(ballot(facts, asked, choose_windows(facts.family, len(ranks)).windows, short))
    return found


def reduced(ballots: Sequence[Ballot]) -> list[int]:
    return [min(cells) for cells in zip(*(one.matrix(rank) for rank, one in enumerate(ballots)), strict=True)]


class Recorded:
    """An exchange for one rank whose MIN takes in what the others say: the same as its own verdict would be there."""

    store = None

    def __init__(self, rank: int, rows: Mapping[int, Sequence[int]], width: int) -> None:
        self.rank, self.size, self._rows, self._width = rank, len(rows), rows, width

    def min(self, values: Sequence[int]) -> list[int]:
        result = list(values)
        for rank, row in self._rows.items():
            result[rank * self._width : (rank + 1) * self._width] = row
        return result

    def gather(self, payload: bytes) -> list[bytes]:
        raise AssertionError("a pair vote gathers nothing")


class Spoken:
    """Keeps what a rank brings to the pair vote."""

    store = None

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.said: list[int] = []

    def min(self, values: Sequence[int]) -> list[int]:
        self.said = list(values)
        return [0] * len(values)

    def gather(self, payload: bytes) -> list[bytes]:
        raise AssertionError("a pair vote gathers nothing")


def after_pairs(ranks: Sequence[Facts], ballots: Sequence[Ballot]) -> list[Decision]:
    """The decision of every rank after the pair vote, where there is one."""
    matrix = reduced(ballots)
    decision = decide(matrix, len(ranks))
    tiers = peer_tiers(decision, ranks[0].device, plugins())
    if not tiers:
        return [decision]
    spoken = [Spoken(rank, len(ranks)) for rank in range(len(ranks))]
    for one, facts in zip(spoken, ranks, strict=True):
        pair_vote(one, matrix, decision, facts, tiers)
    width = len(spoken[0].said) // 16
    rows = {one.rank: one.said[one.rank * width : (one.rank + 1) * width] for one in spoken}
    return [pair_vote(Recorded(rank, rows, width), matrix, decision, ranks[rank], tiers) for rank in range(len(ranks))]


def lines(decision: Decision) -> list[str]:
    shown = []
    for tier in Tier:
        rows = decision.capacities.get(tier)
        shown.append(f"{tier.name:<18}{rows_text(rows) if rows else 'no: ' + decision.refusal(tier)}")
    return shown


def table(name: str) -> str:
    ranks = machine_facts(name)
    decisions = after_pairs(ranks, votes(ranks))
    assert all(one == decisions[0] for one in decisions), "the ranks decide differently"
    hosts = len(set(decisions[0].hosts))
    head = f"{name}: {len(ranks)} rank{'s' if len(ranks) > 1 else ''}, {hosts} host{'s' if hosts > 1 else ''}"
    return "\n".join([head, "", *lines(decisions[0])]) + "\n"


@pytest.mark.parametrize("name", MACHINES)
def test_the_decision_of_a_machine(name: str) -> None:
    assert table(name) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_every_table_is_of_a_machine() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == sorted(MACHINES)


def test_confidential_computing_and_missing_multicast_cost_multicast_only() -> None:
    """C3: working peer access keeps the peer tiers, whatever becomes of multicast."""
    for name in ("confidential", "h200x8_no_multicast", "h200x8_vetoed"):
        for facts in machine_facts(name):
            said = {}
            for tier in (Tier.PEER_AR, Tier.TAIL_FUSION, Tier.MULTIMEM_AR):
                found = plugin(tier)
                assert found is not None
                said[tier] = bool(found.verdict(facts, proposal([facts] * 8))[0])
            assert said == {Tier.PEER_AR: True, Tier.TAIL_FUSION: True, Tier.MULTIMEM_AR: False}


def test_equal_numbers_of_different_gpus_are_fine_for_libraries() -> None:
    ranks = machine_facts("masked")
    decision = decide(reduced(votes(ranks)), len(ranks))
    assert decision.shared_devices == ()
    assert {Tier.FUSED_LANE_AR, Tier.SEPARATE_REDUCE} <= set(decision.capacities)
    said = pair_verdict(ranks[0], 0, places(reduced(votes(ranks)), 4))
    assert (said.reason, said.detail) == (Reason.PAIR_ORDINAL, 1)


if __name__ == "__main__":
    for machine in MACHINES:
        (GOLDEN / f"{machine}.txt").write_text(table(machine), encoding="utf-8")
