"""What each machine agrees on, tier by tier, as a readable table under data/golden.

A table has two parts: the tiers as this version has them, and what the words on peer access and multicast make of the
tiers over device memory, pairs included. After a change that is meant, write the tables anew and read the difference:

    python tests/unit/test_golden.py
"""

from __future__ import annotations

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path

import attrs
import pytest

from k3comm.facts import Facts, Reason, Verdict
from k3comm.negotiate.ballot import ballot, not_allocated
from k3comm.negotiate.blocks import plan_blocks
from k3comm.negotiate.decide import Ballot, Decision, decide, places
from k3comm.negotiate.pairs import pair_verdict, pair_vote
from k3comm.negotiate.report import rows_text
from k3comm.operations import Proposal
from k3comm.settings import Settings
from k3comm.spec import LatentMoESpec, ParallelLayout
from k3comm.testing import MACHINES, machine_facts
from k3comm.tiers import Tier, choose_windows
from k3comm.tiers.device import either, multicast_verdict, peer_verdict

GOLDEN = Path(__file__).parent / "data" / "golden"
DEVICE_TIERS = (Tier.TAIL_FUSION, Tier.MULTIMEM_AR, Tier.PEER_AR)
STAGED, MAILBOX = 256, 64
"""Rows that a staging buffer holds, and a mailbox."""


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
    """The ballots of the tiers as they are; a block that exceeds the free memory could not be had."""
    asked = proposal(ranks)
    blocks = plan_blocks(asked)
    found = []
    for facts in ranks:
        short = {
            tier: not_allocated(blocks.nbytes[place.block], errno.ENOMEM)
            for tier, place in blocks.places.items()
            if facts.device == "cpu" and isinstance(facts.free_memory, int)
            if facts.free_memory < blocks.nbytes[place.block]
        }
        found.append(ballot(facts, asked, choose_windows(facts.family, len(ranks)).windows, short))
    return found


def device_words(facts: Facts, world_size: int) -> Mapping[Tier, tuple[Verdict, Verdict]]:
    """What tiers over device memory say of a rank: the fused tail over either transport, the others over theirs."""
    asked, block = proposal([facts] * world_size), 64 << 20
    return {
        Tier.TAIL_FUSION: either(
            multicast_verdict(facts, asked, MAILBOX, nbytes=block), peer_verdict(facts, asked, MAILBOX, nbytes=block)
        ),
        Tier.MULTIMEM_AR: multicast_verdict(facts, asked, STAGED, nbytes=block),
        Tier.PEER_AR: peer_verdict(facts, asked, STAGED, nbytes=block),
    }


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
    """The decision of every rank after the pair vote of the device tiers."""
    matrix = reduced(ballots)
    decision = decide(matrix, len(ranks))
    tiers = [tier for tier in DEVICE_TIERS if tier in decision.capacities] if len(ranks) > 1 else []
    spoken = [Spoken(rank, len(ranks)) for rank in range(len(ranks))]
    for one, facts in zip(spoken, ranks, strict=True):
        pair_vote(one, matrix, decision, facts, tiers)
    width = len(spoken[0].said) // 16
    rows = {one.rank: one.said[one.rank * width : (one.rank + 1) * width] for one in spoken}
    return [pair_vote(Recorded(rank, rows, width), matrix, decision, ranks[rank], tiers) for rank in range(len(ranks))]


def lines(decision: Decision, tiers: Sequence[Tier]) -> list[str]:
    shown = []
    for tier in tiers:
        rows = decision.capacities.get(tier)
        shown.append(f"{tier.name:<18}{rows_text(rows) if rows else 'no: ' + decision.refusal(tier)}")
    return shown


def table(name: str) -> str:
    ranks = machine_facts(name)
    ballots = votes(ranks)
    present = decide(reduced(ballots), len(ranks))
    words = [
        attrs.evolve(one, verdicts={**one.verdicts, **(device_words(facts, len(ranks)) if len(ranks) > 1 else {})})
        for one, facts in zip(ballots, ranks, strict=True)
    ]
    device = after_pairs(ranks, words)
    assert all(one == device[0] for one in device), "the ranks decide differently"
    hosts = len(set(present.hosts))
    head = f"{name}: {len(ranks)} rank{'s' if len(ranks) > 1 else ''}, {hosts} host{'s' if hosts > 1 else ''}"
    parts = [head, "", "this version", *lines(present, list(Tier)), "", "over device memory"]
    return "\n".join([*parts, *lines(device[0], DEVICE_TIERS)]) + "\n"


@pytest.mark.parametrize("name", MACHINES)
def test_the_decision_of_a_machine(name: str) -> None:
    assert table(name) == (GOLDEN / f"{name}.txt").read_text(encoding="utf-8")


def test_every_table_is_of_a_machine() -> None:
    assert sorted(path.stem for path in GOLDEN.glob("*.txt")) == sorted(MACHINES)


def test_confidential_computing_and_missing_multicast_cost_multicast_only() -> None:
    """C3: working peer access keeps the peer tiers, whatever becomes of multicast."""
    for name in ("confidential", "h200x8_no_multicast", "h200x8_vetoed"):
        for facts in machine_facts(name):
            words = device_words(facts, 8)
            assert words[Tier.PEER_AR][0]
            assert words[Tier.TAIL_FUSION][0]
            assert not words[Tier.MULTIMEM_AR][0]


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
