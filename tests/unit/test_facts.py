"""What a rank's facts make it say, and what the pairs make of it."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3comm.errors import InputError
from k3comm.facts import (
    ASKED,
    OVERLAP,
    VETOES,
    ErrorClass,
    Fabric,
    FabricState,
    Facts,
    Imex,
    PeerAccess,
    Reason,
    Unknown,
    Verdict,
    driver_error,
)
from k3comm.negotiate.ballot import ballot, not_allocated
from k3comm.negotiate.decide import Ballot, decide, disagreement, places
from k3comm.negotiate.pairs import pair_verdict, peer_tiers
from k3comm.operations import Proposal
from k3comm.settings import UNIFORM_VARIABLES, Settings
from k3comm.spec import LatentMoESpec, ParallelLayout
from k3comm.testing import h200_facts, laptop_facts, machine_facts
from k3comm.tiers import Axes, Tier, choose_windows, plugins, select_tier
from k3comm.tiers.device import either, multicast_verdict, peer_verdict
from k3comm.tiers.host import host_verdict

SPEC = LatentMoESpec.kimi_k3()
GPU = h200_facts(device_uuid="GPU-1", world_size=2)
CROSSING = attrs.evolve(
    GPU, fabric=Fabric(state=FabricState.COMPLETED, cluster="c1" * 16), imex=Imex.READY, fabric_allocation=0
)


def proposal(settings: Settings | None = None, world_size: int = 2, **spec: Any) -> Proposal:
    return Proposal(
        spec=attrs.evolve(SPEC, **spec),
        layout=ParallelLayout(tp=world_size),
        settings=settings or Settings(),
        world_size=world_size,
    )


def reduced(ballots: Sequence[Ballot]) -> list[int]:
    return [min(cells) for cells in zip(*(one.matrix(rank) for rank, one in enumerate(ballots)), strict=True)]


def voted(ranks: Sequence[Facts]) -> list[Ballot]:
    return [
        ballot(
            facts,
            proposal(world_size=len(ranks)),
            choose_windows(facts.family, len(ranks)).windows,
        )
        for facts in ranks
    ]


def test_a_healthy_gpu_says_yes() -> None:
    assert [str(word) for word in peer_verdict(GPU, proposal(), 5)] == [
        "up to 5 rows",
        "it can't cross hosts: the NVLink fabric ends at this one",
    ]
    assert multicast_verdict(GPU, proposal(), 5)[0] == Verdict.yes(5)
    assert peer_verdict(CROSSING, proposal(), 5) == multicast_verdict(CROSSING, proposal(), 5) == (Verdict.yes(5),) * 2


NO_FABRIC_MANAGER = Fabric(state=FabricState.NOT_STARTED)


@pytest.mark.parametrize(
    ("changes", "peer", "multicast"),
    [
        ({"device": "cpu"}, "it needs a GPU", "it needs a GPU"),
        ({"mig": True}, "(MIG), which can't", "(MIG), which can't"),
        ({"device_uuid": "MIG-1"}, "(MIG), which can't", "(MIG), which can't"),
        ({"confidential": True}, "", "confidential computing is on"),
        ({"nvlinks": 0}, "no NVLink is up", "no NVLink is up"),
        ({"multicast": False}, "", "the GPU has no multicast"),
        ({"fabric": NO_FABRIC_MANAGER}, "is the Fabric Manager running?", "is the Fabric Manager running?"),
        ({"fabric": Fabric(state=FabricState.NOT_SUPPORTED)}, "", "not in an NVLink fabric (not supported)"),
        ({"fabric": Fabric(state=FabricState.COMPLETED, status=1)}, "registration with", "registration with"),
        ({"operators": frozenset()}, "no two_shot_all_reduce_ for CUDA", "no two_shot_all_reduce_ for CUDA"),
        ({"operators": frozenset({"two_shot_all_reduce_"})}, "", "no multimem_all_reduce_ for CUDA"),
        ({"compute_capability": (8, 0)}, "compute capability is below 9.0", "compute capability is below 9.0"),
        ({"free_memory": 1}, "no memory for its block of 3 MiB", "no memory for its block of 3 MiB"),
        ({"environment": {"NCCL_P2P_DISABLE": "1"}}, "NCCL_P2P_DISABLE in the env", "NCCL_P2P_DISABLE in the env"),
        ({"environment": {"NCCL_P2P_DISABLE": "0"}}, "", ""),
        ({"environment": {"NCCL_P2P_LEVEL": "loc"}}, "NCCL_P2P_LEVEL in the env", "NCCL_P2P_LEVEL in the env"),
        ({"environment": {"NCCL_P2P_LEVEL": "NVL"}}, "", ""),
        ({"environment": {"NCCL_NVLS_ENABLE": "0"}}, "", "NCCL_NVLS_ENABLE in the env"),
        ({"environment": {"NCCL_NVLS_ENABLE": "2"}}, "", ""),
        ({"environment": {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}}, "", "TORCH_SYMM_MEM_DISABLE_MULTICAST in the env"),
        ({"environment": {"NVSHMEM_DISABLE_NVLS": "true"}}, "", "NVSHMEM_DISABLE_NVLS in the env"),
        ({"environment": {OVERLAP: "1"}}, "", f"{OVERLAP} in the env"),
    ],
)
def test_what_stands_in_the_way(changes: dict[str, Any], peer: str, multicast: str) -> None:
    facts = attrs.evolve(GPU, **changes)
    for verdict, why in ((peer_verdict, peer), (multicast_verdict, multicast)):
        said = verdict(facts, proposal(), nbytes=3 << 20)[0]
        assert bool(said) == (not why)
        assert why in str(said)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"fabric_handles": False}, "the GPU has no fabric handles"),
        ({"imex": Imex.NO_MAJOR}, "load an NVIDIA driver that serves IMEX"),
        ({"imex": Imex.NO_CHANNEL}, "start nvidia-imex"),
        ({"imex": Imex.NO_PERMISSION}, "change its mode or owner"),
        ({"fabric_allocation": 800}, "CUDA_ERROR_NOT_PERMITTED (800), not permitted"),
        ({"fabric_allocation": 12345}, "CUDA error 12345, unknown"),
        ({"fabric": Fabric(state=FabricState.COMPLETED)}, "the NVLink fabric ends at this one"),
    ],
)
def test_what_keeps_it_on_one_host(changes: dict[str, Any], why: str) -> None:
    """B3, B4: refused before anything is exchanged, and by what is missing."""
    facts = attrs.evolve(CROSSING, **changes)
    for verdict in (peer_verdict, multicast_verdict):
        here, across = verdict(facts, proposal())
        assert here
        assert not across
        assert str(across).startswith("it can't cross hosts: ")
        assert why in str(across)


@pytest.mark.parametrize("name", ASKED)
def test_an_unknown_fact_is_a_no_that_names_it(name: str) -> None:
    """C4, for every fact that is asked for, in one of the four words at least; and nothing gets better by it."""
    facts = attrs.evolve(CROSSING, **{name: Unknown("a shim")})
    said = [
        *peer_verdict(facts, proposal(), nbytes=1),
        *multicast_verdict(facts, proposal(), nbytes=1),
    ]
    assert ASKED[name] + " unknown" in [str(one) for one in said]


def test_settings_and_dtype() -> None:
    only = proposal(Settings(transport="peer"))
    assert peer_verdict(GPU, only)[0]
    assert multicast_verdict(GPU, only)[0].reason is Reason.TRANSPORT
    assert peer_verdict(GPU, proposal(dtype="float32"))[0].reason is Reason.BFLOAT16


def test_either_transport() -> None:
    no = attrs.evolve(GPU, multicast=False, nvlinks=0)
    assert either(multicast_verdict(GPU, proposal(), 3), peer_verdict(GPU, proposal(), 4))[0] == Verdict.yes(3)
    only_peer = attrs.evolve(GPU, multicast=False)
    assert either(multicast_verdict(only_peer, proposal(), 3), peer_verdict(only_peer, proposal(), 4))[0].capacity == 4
    said = either(multicast_verdict(no, proposal()), peer_verdict(no, proposal()))[0]
    assert said.reason is Reason.NO_NVLINK


@given(st.sampled_from(list(Reason)), st.integers(0, 2**32 - 1))
def test_every_reason_has_words_for_any_number(reason: Reason, detail: int) -> None:
    assert "{" not in reason.text(detail)


@pytest.mark.parametrize("value", [True, 1.0, float("nan"), -1, 2**32, "1", None])
def test_votes_are_integers(value: Any) -> None:
    """H7: a MIN over floats takes a NaN for nothing."""
    with pytest.raises(InputError, match="accepted are integers from 0"):
        Verdict(value)
    with pytest.raises(InputError, match="accepted are integers from 0"):
        Verdict(0, Reason.NONE, value)


@pytest.mark.parametrize("value", [1, 0, 2, float("nan"), "yes"])
def test_a_yes_is_true_and_nothing_else(value: Any) -> None:
    for name in ("multicast", "mig", "confidential", "fabric_handles", "host_memory"):
        with pytest.raises(InputError, match=f"{name}: .* accepted are True, False, None and Unknown"):
            attrs.evolve(GPU, **{name: value})


def test_driver_errors_have_a_class_and_a_text() -> None:
    assert driver_error(1)[0] is driver_error(401)[0] is ErrorClass.PERMANENT
    assert driver_error(2)[0] is driver_error(802)[0] is ErrorClass.TRANSIENT
    assert driver_error(800)[0] is ErrorClass.NOT_PERMITTED
    assert driver_error(999)[0] is driver_error(4711)[0] is ErrorClass.UNKNOWN
    assert "Fabric Manager" in driver_error(802)[1]


@pytest.mark.parametrize(
    ("version", "races"),
    [
        ("2.27.7", False),
        ("2.28.0", True),
        ("2.28.9", True),
        ("2.30.6", True),
        ("2.30.7", False),
        ("", True),
        ("x", True),
    ],
)
def test_nccl_that_races_in_captured_graphs(version: str, races: bool) -> None:
    """I2: a fact only."""
    assert bool(attrs.evolve(GPU, versions={"nccl": version}).nccl_capture_race) == races


def test_out_of_files_is_told_as_such() -> None:
    """Neither another host nor a host that can't share memory: this process has too many files open."""
    full = Unknown("OSError: [Errno 24] Too many open files", errno.EMFILE)
    said = host_verdict(laptop_facts(host_memory=full), SPEC, 4)
    assert str(said) == "this host's processes can't share memory (EMFILE, too many open files in this process)"
    assert str(Verdict.no(Reason.HOST_MEMORY)) == "this host's processes can't share memory"
    ranks = [laptop_facts(world_size=3)] * 3
    ranks[1] = attrs.evolve(ranks[1], host=full)
    decision = decide(reduced(voted(ranks)), 3)
    assert decision.refusal(Tier.PEER_AR) == (
        "rank 1: which host it is on could not be found out (EMFILE, too many open files in this process); "
        "host_identity (K3COMM_HOST_IDENTITY) says it"
    )
    assert {Tier.FUSED_LANE_AR, Tier.SEPARATE_REDUCE} <= set(decision.capacities)
    assert decision.hosts == (0, 1, 0)


def test_a_block_that_could_not_be_had_says_why() -> None:
    assert str(not_allocated(5 << 20, errno.ENOSPC)) == "no memory for its block of 5 MiB"
    said = str(not_allocated(5 << 20, errno.EMFILE))
    assert said == "its shared memory could not be allocated (EMFILE, too many open files in this process)"


def test_an_unknown_host_is_nobodys_neighbour() -> None:
    """Two ranks that don't know their host are not on one, whatever they have in common."""
    ranks = [laptop_facts(world_size=2, host=Unknown("no /proc"))] * 2
    decision = decide(reduced(voted(ranks)), 2)
    assert not decision.one_host
    assert Tier.PEER_AR not in decision.capacities
    assert "which host it is on could not be found out;" in decision.refusal(Tier.PEER_AR)


def test_several_hosts_are_named_by_their_ranks() -> None:
    ranks = [laptop_facts(world_size=3, host=host) for host in ("a", "b", "a")]
    decision = decide(reduced(voted(ranks)), 3)
    assert decision.refusal(Tier.PEER_AR) == "it can't cross hosts (ranks 0 and 2 on one host; rank 1 on one host)"
    ranks = [laptop_facts(world_size=2, host=host) for host in ("a", "b")]
    refusal = decide(reduced(voted(ranks)), 2).refusal(Tier.PEER_AR)
    assert refusal == "it can't cross hosts (every rank is on a host of its own)"


@pytest.mark.parametrize("variable", UNIFORM_VARIABLES)
def test_an_environment_that_differs_is_an_error(variable: str) -> None:
    """F6: variable, values and ranks."""
    ranks = [laptop_facts(world_size=3, environment={variable: value} if value else {}) for value in ("", "1", "")]
    ballots = voted(ranks)
    decision = decide(reduced(ballots), 3)
    assert decision.mismatched == ("environment",)
    text = disagreement(decision, [one.text(decision.mismatched) for one in ballots])
    assert text == f"the ranks can't agree\nenvironment.{variable} differs: absent on ranks 0 and 2; 1 on rank 1"


def test_vetoes_are_read_and_are_uniform() -> None:
    assert set(VETOES) <= set(UNIFORM_VARIABLES)


# Pairs


def pairs_of(ranks: Sequence[Facts]) -> list[Verdict]:
    everyone = places(reduced(voted(ranks)), len(ranks))
    return [pair_verdict(facts, rank, everyone) for rank, facts in enumerate(ranks)]


def test_pairs_that_reach_each_other() -> None:
    for name in ("h200x8", "two_hosts_fabric"):
        assert all(pairs_of(machine_facts(name)))


def test_a_peer_that_was_never_seen_is_out_of_reach() -> None:
    first, *others = machine_facts("h200x8")
    said = pairs_of([attrs.evolve(first, peers={}), *others])
    assert [bool(one) for one in said] == [False, *[True] * 7]
    assert str(said[0]) == "no peer access to rank 1's GPU (unknown)"


@pytest.mark.parametrize("access", [access for access in PeerAccess if access is not PeerAccess.OK])
def test_a_peer_out_of_reach_is_named(access: PeerAccess) -> None:
    ranks = list(machine_facts("h200x8"))
    peer = str(ranks[5].device_uuid)
    ranks[2] = attrs.evolve(ranks[2], peers={**ranks[2].peers, peer: access})
    said = pairs_of(ranks)
    assert [rank for rank, one in enumerate(said) if not one] == [2]
    assert str(said[2]).startswith("no peer access to rank 5's GPU (")


def test_one_gpu_for_two_ranks_needs_torchs_consent() -> None:
    """F3: before any rendezvous, naming the variable."""
    ranks = [attrs.evolve(facts, device_uuid="GPU-1", ordinal=0) for facts in machine_facts("h200x8")[:2]]
    assert [str(one) for one in pairs_of(ranks)] == [
        f"it shares its GPU with rank {peer}, which torch's memory allows with {OVERLAP}=1 only" for peer in (1, 0)
    ]
    assert all(pairs_of([attrs.evolve(facts, environment={OVERLAP: "1"}) for facts in ranks]))


def test_equal_numbers_on_different_hosts_are_fine() -> None:
    ranks = machine_facts("two_hosts_fabric")
    assert ranks[0].ordinal == ranks[4].ordinal
    assert all(pairs_of(ranks))


def test_masked_gpus_need_torchs_consent_too() -> None:
    masked = machine_facts("masked")
    assert [one.reason for one in pairs_of(masked)] == [Reason.PAIR_ORDINAL] * 4
    assert all(pairs_of([attrs.evolve(facts, environment={OVERLAP: "1"}) for facts in masked]))


def test_no_pair_vote_on_a_cpu() -> None:
    decision = decide(reduced(voted([laptop_facts(world_size=2)] * 2)), 2)
    assert decision.capacities
    assert peer_tiers(decision, "cpu", plugins()) == []


# The decision and what it must not depend on


host_facts = st.fixed_dictionaries(
    {
        "device_name": st.sampled_from(["x86_64", "aarch64", "AMD EPYC", "Intel Xeon"]),
        "free_memory": st.integers(1 << 34, 1 << 45),
        "driver": st.sampled_from(["550.1", "580.2", Unknown("no driver")]),
        "versions": st.dictionaries(st.sampled_from(["torch", "nccl", "cuda-core"]), st.text(max_size=4)),
        "visible_devices": st.sampled_from([None, (), ("0",), ("3", "1")]),
        "expandable_segments": st.booleans(),
        "pci_address": st.text(max_size=6),
    }
)


@settings(max_examples=30)
@given(st.lists(host_facts, min_size=2, max_size=8), st.booleans(), st.integers(0, 10_000), st.booleans())
def test_the_choice_depends_on_no_fact_of_the_host(
    machines: list[dict[str, Any]], on_gpu: bool, num_tokens: int, graph: bool
) -> None:
    """A5: mixed processors, drivers and memory give the plan of equal ones, on every rank."""
    size = len(machines)
    plain = [h200_facts(device_uuid=f"GPU-{n}") if on_gpu else laptop_facts() for n in range(size)]
    plain = [attrs.evolve(facts, world_size=size) for facts in plain]
    mixed = [attrs.evolve(facts, **changes) for facts, changes in zip(plain, machines, strict=True)]
    expected, found = (decide(reduced(voted(ranks)), size) for ranks in (plain, mixed))
    assert found == expected
    axes = Axes(num_tokens=num_tokens, graph=graph, decode=graph)
    chosen = {
        select_tier(axes=axes, agreement=found.agreement(), windows=choose_windows(facts.family, size).windows)
        for facts in mixed
    }
    assert len(chosen) == 1
