"""The vote's matrix and what follows from it, without any process but this one."""

import itertools
import threading
from collections.abc import Callable, Sequence

import attrs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import k3comm
from k3comm.facts import Facts, Reason, Unknown, Verdict
from k3comm.negotiate import decide as module
from k3comm.negotiate.agree import Local, agree
from k3comm.negotiate.ballot import ballot, sources
from k3comm.negotiate.decide import (
    COLUMNS,
    EMPTY,
    GROUPS,
    MAX_RANKS,
    TEXT_BYTES,
    Ballot,
    decide,
    digest,
    disagreement,
    name_ranks,
)
from k3comm.operations import Proposal
from k3comm.settings import Settings
from k3comm.spec import LatentMoESpec, ParallelLayout
from k3comm.testing import h200_facts, laptop_facts, machine_facts
from k3comm.tiers import UNLIMITED, Tier, WindowsChoice, choose_windows, plugins
from k3comm.tiers.device import peer_verdict

SPEC = LatentMoESpec.kimi_k3()
YES = (Verdict.yes(), Verdict.yes())


def reduced(ballots: Sequence[Ballot]) -> list[int]:
    """What a MIN all-reduce makes of the ranks' matrices."""
    return [min(cells) for cells in zip(*(one.matrix(rank) for rank, one in enumerate(ballots)), strict=True)]


def healthy(**changes: object) -> Ballot:
    same = Ballot(fields={group: {"a": "1"} for group in GROUPS}, host="h", verdicts=dict.fromkeys(Tier, YES))
    return attrs.evolve(same, **changes)


class Together:
    """An exchange between threads of this process."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=10)
        self._given: list[object] = [None] * size

    def at(self, rank: int) -> "Place":
        return Place(self, rank)

    def all_gather(self, rank: int, value: object) -> list[object]:
        self._given[rank] = value
        self._barrier.wait()
        every = list(self._given)
        self._barrier.wait()
        return every


class Place:
    def __init__(self, together: Together, rank: int) -> None:
        self._together, self.rank, self.size = together, rank, together.size

    def min(self, values: Sequence[int]) -> list[int]:
        assert all(type(value) is int for value in values)
        return [min(cells) for cells in zip(*self._together.all_gather(self.rank, list(values)), strict=True)]

    def gather(self, payload: bytes) -> list[bytes]:
        return self._together.all_gather(self.rank, payload)


def negotiated(prepares: Sequence[Callable[[], Local]]) -> list[object]:
    """The outcome of every rank: (local, decision), or the exception."""
    together, outcomes = Together(len(prepares)), [None] * len(prepares)

    def rank_main(rank: int) -> None:
        try:
            outcomes[rank] = agree(
                prepares[rank],
                lambda deadline: together.at(rank),
                rank=rank,
                world_size=len(prepares),
                fallback_deadline=60.0,
            )
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(len(prepares))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert None not in outcomes
    return outcomes


def local(facts: Facts, settings: Settings | None = None, layout: ParallelLayout | None = None) -> Local:
    proposal = Proposal(
        spec=SPEC,
        layout=layout or ParallelLayout(tp=facts.world_size),
        settings=settings or Settings(),
        world_size=facts.world_size,
    )
    choice: WindowsChoice = choose_windows(facts.family, facts.world_size)
    return Local(
        facts=facts,
        device=torch.device(facts.device),
        proposal=proposal,
        choice=choice,
        ballot=ballot(facts, proposal, choice.windows),
    )


def test_the_matrix_has_one_size_and_one_row_a_rank() -> None:
    for rank in range(MAX_RANKS):
        cells = healthy().matrix(rank)
        assert len(cells) == MAX_RANKS * COLUMNS == 1024
        filled = [at for at, cell in enumerate(cells) if cell != EMPTY]
        assert filled == list(range(rank * COLUMNS, (rank + 1) * COLUMNS))
        assert all(0 <= cells[at] < EMPTY for at in filled)
    assert len(Tier) * 4 + 16 <= COLUMNS


def test_all_yes_is_agreed() -> None:
    decision = decide(reduced([healthy()] * 3), 3)
    assert decision.capacities == dict.fromkeys(Tier, UNLIMITED)
    assert (decision.hosts, decision.one_host, decision.refusals) == ((0, 0, 0), True, ())
    assert (decision.mismatched, decision.failed, decision.shared_devices) == ((), (), ())


verdicts = st.one_of(
    st.integers(1, UNLIMITED).map(Verdict.yes),
    st.builds(Verdict.no, st.sampled_from([r for r in Reason if r is not Reason.NONE]), st.integers(0, 2**31 - 1)),
)
ballots = st.builds(
    healthy,
    host=st.sampled_from(["h", "i"]),
    device_uuid=st.sampled_from(["", "GPU-1", "GPU-2"]),
    verdicts=st.fixed_dictionaries(dict.fromkeys(Tier, st.tuples(verdicts, verdicts))),
)


@given(st.lists(ballots, min_size=1, max_size=MAX_RANKS))
def test_the_decision_is_what_the_ballots_say(ranks: list[Ballot]) -> None:
    """Verdicts survive the matrix: the tier is agreed if all say yes for the span, with the least capacity."""
    decision = decide(reduced(ranks), len(ranks))
    span = 0 if len({one.host for one in ranks}) == 1 else 1
    assert decision.one_host == (span == 0)
    for tier in Tier:
        said = [one.verdicts[tier][span] for one in ranks]
        expected = min(v.capacity for v in said) if all(said) else None
        assert decision.capacities.get(tier) == expected
        assert [(r.rank, r.verdict) for r in decision.refusals if r.tier is tier] == [
            (rank, verdict) for rank, verdict in enumerate(said) if not verdict
        ]
    places: dict[tuple[str, str], list[int]] = {}
    for rank, one in enumerate(ranks):
        if one.device_uuid:
            places.setdefault((one.host, one.device_uuid), []).append(rank)
    assert decision.shared_devices == tuple(tuple(who) for who in places.values() if len(who) > 1)


@given(st.lists(ballots, min_size=2, max_size=6), st.randoms())
def test_the_order_of_ranks_changes_no_agreement(ranks: list[Ballot], random) -> None:
    shuffled = list(ranks)
    random.shuffle(shuffled)
    before, after = decide(reduced(ranks), len(ranks)), decide(reduced(shuffled), len(ranks))
    assert before.capacities == after.capacities
    assert before.one_host == after.one_host


@pytest.mark.parametrize("group", GROUPS)
def test_a_mismatch_is_found_and_shown(group: str) -> None:
    fields = {name: {"a": "1", "b": "2"} for name in GROUPS}
    odd = {**fields, group: {"a": "1", "b": "3", "c": "new"}}
    ranks = [healthy(fields=fields), healthy(fields=odd), healthy(fields=fields)]
    decision = decide(reduced(ranks), 3)
    assert decision.mismatched == (group,)
    assert decision.capacities == {}
    text = disagreement(decision, [one.text(decision.mismatched) for one in ranks])
    assert text == (
        "the ranks can't agree\n"
        f"{group}.b differs: 2 on ranks 0 and 2; 3 on rank 1\n"
        f"{group}.c differs: absent on ranks 0 and 2; new on rank 1"
    )


def test_failures_of_several_ranks_are_told_once_each() -> None:
    ranks = [healthy(failure="E: x"), healthy(), healthy(failure="E: y"), healthy(failure="E: x")]
    decision = decide(reduced(ranks), 4)
    assert decision.failed == (0, 2, 3)
    text = disagreement(decision, [one.text(decision.mismatched) for one in ranks])
    assert text == "the ranks can't agree\nranks 0 and 3 can't take part: E: x\nrank 2 can't take part: E: y"


def test_another_format_is_a_version_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    new = healthy().matrix(0)
    monkeypatch.setattr(module, "FORMAT", module.FORMAT + 1)
    old = healthy().matrix(1)
    assert decide([min(pair) for pair in zip(new, old, strict=True)], 2).mismatched == ("version",)


@pytest.mark.parametrize("length", [200, 299, 301, 10_000])
def test_long_values_are_cut_but_told_apart(length: int) -> None:
    ranks = [healthy(fields={**healthy().fields, "spec": {"a": "x" * length + end}}) for end in "pq"]
    decision = decide(reduced(ranks), 2)
    payloads = [one.text(decision.mismatched) for one in ranks]
    assert [len(payload) for payload in payloads] == [TEXT_BYTES] * 2
    lines = disagreement(decision, payloads).splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("spec.a differs: xxx")
    assert "on rank 0; xxx" in lines[1]


def test_far_too_many_values_still_fit_and_name_the_group() -> None:
    fields = {**healthy().fields, "spec": {f"field {n}": "x" * 300 for n in range(100)}}
    ranks = [healthy(), healthy(fields=fields, failure="")]
    decision = decide(reduced(ranks), 2)
    payloads = [one.text(decision.mismatched) for one in ranks]
    assert [len(payload) for payload in payloads] == [TEXT_BYTES] * 2
    assert "spec" in disagreement(decision, payloads)


def test_values_that_can_not_be_shown_are_escaped() -> None:
    values = ("one\ntwo\x1b[31m", "a" + chr(0xDCFF))
    ranks = [healthy(fields={**healthy().fields, "spec": {"a": value}}) for value in values]
    decision = decide(reduced(ranks), 2)
    text = disagreement(decision, [one.text(decision.mismatched) for one in ranks])
    assert text.splitlines()[1:] == ["spec.a differs: one\\ntwo\\x1b[31m on rank 0; a\\udcff on rank 1"]
    text.encode()
    ranks = [healthy(failure="first\nsecond " + chr(0xD800)), healthy()]
    text = disagreement(decide(reduced(ranks), 2), [one.text(()) for one in ranks])
    assert text.endswith("rank 0 can't take part: first\nsecond \\ud800")


def test_a_long_or_strange_failure_fits() -> None:
    for failure in ("x" * 100_000, "\N{GREEK SMALL LETTER PI}" * 50_000, "\x00\n" * 9_000):
        ranks = [healthy(failure=failure), healthy()]
        decision = decide(reduced(ranks), 2)
        payloads = [one.text(decision.mismatched) for one in ranks]
        assert [len(payload) for payload in payloads] == [TEXT_BYTES] * 2
        assert "rank 0 can't take part" in disagreement(decision, payloads)


def test_ranks_are_named_as_people_do() -> None:
    assert [name_ranks(r) for r in ([3], [0, 2], [0, 1, 5])] == ["rank 3", "ranks 0 and 2", "ranks 0, 1 and 5"]


def test_hashes_are_the_same_in_every_process_and_leave_room() -> None:
    assert digest("k3comm") == 0x22F48A1B4A8E8AE5 or 0 <= digest("k3comm") < 2**62
    assert digest("a") != digest("b")
    assert len(sources()) == 64


# Whole negotiations between threads.


def test_laptops_agree_on_what_is_there() -> None:
    outcomes = negotiated([lambda: local(laptop_facts(world_size=4))] * 4)
    assert all(outcome[1] == outcomes[0][1] for outcome in outcomes)
    here = [tier for tier, kind in plugins().items() if kind.transports & {"host", "library"}]
    assert list(outcomes[0][1].capacities) == here


@pytest.mark.parametrize("world_size", [2, 3, 8, 16])
def test_an_odd_rank_anywhere_gives_one_text(world_size: int) -> None:
    for odd in (0, world_size - 1):
        prepares = [lambda: local(laptop_facts(world_size=world_size))] * world_size
        prepares[odd] = lambda: local(laptop_facts(world_size=world_size), Settings(poll_deadline=7))
        outcomes = negotiated(prepares)
        assert {type(outcome) for outcome in outcomes} == {k3comm.NegotiationError}
        assert len({str(outcome) for outcome in outcomes}) == 1
        assert f"settings.poll_deadline differs: {'7.0' if odd == 0 else '30.0'} on rank" in str(outcomes[0])


def test_one_gpu_for_two_ranks_is_refused_unless_meant() -> None:
    def prepares(settings: Settings) -> list[Callable[[], Local]]:
        uuids = ("GPU-a", "GPU-b", "GPU-a")
        return [lambda uuid=uuid: local(h200_facts(world_size=3, device_uuid=uuid), settings) for uuid in uuids]

    outcomes = negotiated(prepares(Settings()))
    assert {str(outcome) for outcome in outcomes} == {
        "ranks 0 and 2 are on the same GPU (equal host and device UUID); give each rank its own, or set "
        "allow_shared_device (K3COMM_ALLOW_SHARED_DEVICE=1) if that is meant"
    }
    outcomes = negotiated(prepares(Settings(allow_shared_device=True)))
    assert outcomes[0][1].shared_devices == ((0, 2),)


def test_the_same_ordinal_on_other_hosts_or_of_other_gpus_is_fine() -> None:
    facts = [h200_facts(world_size=2, host=f"host {n}", device_uuid="GPU-a") for n in range(2)]
    outcomes = negotiated([lambda one=one: local(one) for one in facts])
    assert outcomes[0][1].shared_devices == ()
    assert outcomes[0][1].hosts == (0, 1)


def test_a_pair_out_of_reach_is_found_before_any_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tier over device memory the pairs vote, and only then is it agreed; the others stay."""
    tier = plugins()[Tier.PEER_AR]
    monkeypatch.setattr(tier, "transports", frozenset({"peer"}))
    monkeypatch.setattr(tier, "verdict", classmethod(lambda cls, facts, proposal: peer_verdict(facts, proposal, 256)))
    ranks = machine_facts("h200x8_one_pair_apart")
    outcomes = negotiated([lambda one=one: local(one) for one in ranks])
    assert all(outcome[1] == outcomes[0][1] for outcome in outcomes)
    decision = outcomes[0][1]
    assert decision.refusal(Tier.PEER_AR) == "rank 3: no peer access to rank 5's GPU (chipset not supported)"
    assert Tier.FUSED_LANE_AR in decision.capacities
    outcomes = negotiated([lambda one=one: local(one) for one in machine_facts("h200x8")])
    assert outcomes[0][1].capacities[Tier.PEER_AR] == 256
    forced = negotiated([lambda one=one: local(one, Settings(force=Tier.PEER_AR)) for one in ranks])
    assert {str(outcome) for outcome in forced} == {
        "force: PEER_AR is asked for by name and not agreed; "
        "rank 3: no peer access to rank 5's GPU (chipset not supported)"
    }


def test_ranks_of_other_families_have_other_windows() -> None:
    outcomes = negotiated([lambda: local(laptop_facts(world_size=2)), lambda: local(h200_facts(world_size=2))])
    assert "windows.TAIL_FUSION differs: 1..16 on rank 0; 1..64, graph only on rank 1" in str(outcomes[0])
    assert str(outcomes[0]) == str(outcomes[1])


def test_an_unknown_fact_is_no_yes() -> None:
    assert not Unknown("no driver")
    facts = h200_facts(device_uuid=Unknown("no driver"), compute_capability=Unknown("no driver"))
    assert facts.family == "unknown"
    assert local(facts).ballot.device_uuid == ""


@pytest.mark.parametrize(("hidden", "world_size"), list(itertools.product((96, 97, 7168), (1, 2, 3, 4, 7, 16))))
def test_columns_need_a_divisible_width(hidden: int, world_size: int) -> None:
    spec = attrs.evolve(SPEC, hidden_size=hidden)
    said = plugins()[Tier.COLUMN_PARALLEL].verdict(
        laptop_facts(world_size=world_size),
        Proposal(spec=spec, layout=ParallelLayout(), settings=Settings(), world_size=world_size),
    )
    assert bool(said[0]) == bool(said[1]) == (hidden % world_size == 0)
    if hidden % world_size:
        assert str(said[0]) == f"hidden_size is not a multiple of {world_size}"


texts = st.text(st.characters(), max_size=40).flatmap(lambda text: st.integers(1, 400).map(lambda n: text * n))


@given(texts, st.dictionaries(st.text(max_size=20), texts, max_size=60))
def test_any_text_fits_the_gather_and_the_matrix(failure: str, values: dict[str, str]) -> None:
    """Emoji take 12 bytes in JSON, and a lone surrogate has no UTF-8: neither may end a rank, or a peer."""
    one = healthy(failure=failure, host=failure, device_uuid=failure, fields={**healthy().fields, "spec": values})
    assert len(one.matrix(0)) == MAX_RANKS * COLUMNS
    for groups in ((), ("spec",), GROUPS):
        assert len(one.text(groups)) == TEXT_BYTES


def test_emoji_and_surrogates() -> None:
    for failure in ("\U0001f600" * 2400, "\udcff" * 5000, "h\udcff"):
        assert len(healthy(failure=failure).text(())) == TEXT_BYTES
        assert healthy(host=failure).matrix(0)[4] != healthy(host="h").matrix(0)[4]


def test_a_shape_without_fragments_is_refused_by_its_own_reason() -> None:
    spec = attrs.evolve(SPEC, hidden_size=8)
    proposal = Proposal(spec=spec, layout=ParallelLayout(), settings=Settings(), world_size=3)
    said = plugins()[Tier.TAIL_FUSION].verdict(laptop_facts(world_size=3), proposal)
    assert str(said[0]) == "hidden_size is not a multiple of 24"
    assert plugins()[Tier.TAIL_FUSION].footprint(proposal) is None
