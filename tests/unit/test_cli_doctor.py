"""`k3comm doctor`: facts as text, what tiers lack, pairs that lie, exit codes, alone and as a job."""

import argparse
import contextlib
import io
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import attrs
import pytest
import torch

from k3comm import LatentMoESpec, ParallelLayout, Settings, SettingsError, Tier, cli
from k3comm.buffers.host import HostMemory
from k3comm.buffers.symmetric import SymmetricMemory
from k3comm.cli import _console, doctor
from k3comm.cli._checkup import (
    FACTS_BYTES,
    Checkup,
    Pair,
    PairCheck,
    TierState,
    check_pairs,
    facts_of,
    facts_text,
    gather_facts,
    pattern,
    plain,
    remedy,
    shares_memory,
    shown,
    tiers_alone,
    timed_votes,
)
from k3comm.facts import Facts, Imex, Reason, Unknown
from k3comm.negotiate.decide import Decision
from k3comm.operations import Proposal
from k3comm.settings import launched, meeting_place
from k3comm.testing import (
    FakeMachine,
    Fault,
    assert_identical,
    current_rank,
    h200_facts,
    laptop_facts,
    run_ranks,
    thread_exchanges,
)
from k3comm.tiers import UNLIMITED

KIMI = LatentMoESpec.kimi_k3()
JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True)
def _nothing_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("K3COMM_") or name in JOB:
            monkeypatch.delenv(name)


# Facts


@attrs.frozen
class Nested:
    state: str = "completed"
    links: tuple[int, ...] = (1, 2)


def test_any_fact_becomes_plain() -> None:
    assert plain(Unknown("no driver")) == {"unknown": "no driver"}
    assert plain({"b": (1, None), 2: frozenset({"y", "x"})}) == {"b": [1, None], "2": ["x", "y"]}
    assert plain(Nested()) == {"state": "completed", "links": [1, 2]}
    assert plain(Reason.DEVICE) == "DEVICE"
    assert plain(object).startswith("<class")


@pytest.mark.parametrize("facts", [laptop_facts(), h200_facts(), Facts(host="bare", device="cuda")])
def test_every_fact_is_there_and_fits_json(facts: Facts) -> None:
    found = facts_of(facts)
    assert set(found) == {*attrs.fields_dict(Facts), "family"}
    assert json.loads(json.dumps(found)) == found
    assert all(isinstance(text, str) and text for text in shown(found).values())


def test_facts_for_people() -> None:
    facts = {
        "free_memory": 8 << 30, "host_memory": True, "mig": False, "driver": {"unknown": "no NVIDIA driver here"},
        "versions": {"torch": "2.13.0"}, "compute_capability": [9, 0], "ordinal": None, "peers": {}, "uuid": "",
    }  # fmt: skip
    assert shown(facts) == {
        "free_memory": "8 GiB", "host_memory": "yes", "mig": "no", "driver": "unknown: no NVIDIA driver here",
        "versions.torch": "2.13.0", "compute_capability": "9, 0", "peers": "none", "uuid": "none",
    }  # fmt: skip


def test_a_remedy_stands_where_something_is_wrong() -> None:
    assert "memfd_create" in remedy("host_memory", "no")
    assert "memfd_create" in remedy("host_memory", "unknown: PermissionError")
    assert "nvidia-smi -mig 0" in remedy("mig", "yes")
    assert [remedy(*fact) for fact in (("host_memory", "yes"), ("mig", "no"), ("host", "no"))] == ["", "", ""]


def test_an_imex_channel_that_is_missing_comes_with_its_remedy() -> None:
    texts = [shown(facts_of(h200_facts(imex=finding)))["imex"] for finding in Imex]
    assert len(set(texts)) == len(Imex)
    assert "load an NVIDIA driver" in texts[Imex.NO_MAJOR]
    assert "nvidia-modprobe" in texts[Imex.NO_CHANNEL]
    assert "mode or owner" in texts[Imex.NO_PERMISSION]


def test_remedies_are_for_facts_that_exist() -> None:
    from k3comm.cli._checkup import REMEDIES

    assert set(REMEDIES) <= set(attrs.fields_dict(Facts))


def test_facts_that_are_too_many_are_cut() -> None:
    facts = {"host": "h" * 100_000, "versions": {str(n): "v" * 300 for n in range(200)}}
    text = facts_text(facts)
    assert len(text) == FACTS_BYTES
    assert json.loads(text)["host"] == "h" * 100 + "..."
    hopeless = facts_text({str(n): "v" * 300 for n in range(2000)})
    assert len(hopeless) == FACTS_BYTES
    assert "too many" in json.loads(hopeless)["host"]["unknown"]


# Tiers


def test_what_tiers_lack_on_a_machine_without_a_gpu() -> None:
    proposal = Proposal(
        spec=KIMI, layout=ParallelLayout(tp=8), settings=Settings(disabled={Tier.FUSED_LANE_AR}), world_size=8
    )
    found = {state.tier: state for state in tiers_alone(laptop_facts(world_size=8), proposal)}
    assert list(found) == list(Tier), "also those that are not there"
    assert found[Tier.MNNVL_CUTEDSL].why_not == "not part of this version"
    assert found[Tier.TAIL_FUSION].capacity > 0
    assert found[Tier.TAIL_FUSION].across_hosts is not None
    assert found[Tier.TAIL_FUSION].across_hosts[0] == 0
    assert "hosts" in found[Tier.TAIL_FUSION].across_hosts[1]
    assert found[Tier.FUSED_LANE_AR].why_not.startswith("disabled in the settings")
    assert found[Tier.SEPARATE_REDUCE].capacity == UNLIMITED


def decision(*tiers: Tier) -> Decision:
    return Decision(
        world_size=2, hosts=(0, 0), mismatched=(), failed=(), shared_devices=(), refusals=(),
        capacities=dict.fromkeys((*tiers, Tier.SEPARATE_REDUCE), UNLIMITED),
    )  # fmt: skip


def test_pairs_are_tried_where_an_agreed_tier_shares_memory() -> None:
    assert shares_memory(decision(Tier.PEER_AR))
    assert not shares_memory(decision(Tier.FUSED_LANE_AR))


# Pairs


class LyingMemory(HostMemory):
    """Between two ranks writes vanish, or reads are stale, though every stage succeeds."""

    def __init__(
        self, rank: int, world_size: int, *, lost: tuple[int, int] | None = None, raises: bool = False
    ) -> None:
        super().__init__(rank, world_size)
        self.lost, self.raises = lost, raises

    def block(self, rank: int) -> torch.Tensor:
        if self.raises and rank != self.rank:
            raise OSError("the mapping is gone")
        found = super().block(rank)
        return found.clone() if self.lost == (self.rank, rank) else found


def over_threads(world_size: int, memory: Callable[[int, int], SymmetricMemory], nbytes: int = 5000) -> PairCheck:
    exchanges = thread_exchanges(world_size)
    with ThreadPoolExecutor(world_size) as pool:
        found = list(
            pool.map(lambda rank: check_pairs(memory(rank, world_size), exchanges[rank], nbytes), range(world_size))
        )
    return assert_identical(found)


def test_all_pairs_are_written_and_read() -> None:
    found = over_threads(3, HostMemory)
    assert [(pair.rank, pair.peer, pair.kind) for pair in found.pairs] == [
        (one, peer, kind) for kind in ("write", "read") for one in range(3) for peer in range(3) if one != peer
    ]
    assert all(pair.good and pair.right == 5000 for pair in found.pairs)
    assert found.problems == ()


def test_writes_that_vanish_are_found_and_named() -> None:
    found = over_threads(3, lambda rank, size: LyingMemory(rank, size, lost=(2, 0)))
    assert found.problems == ("rank 2 writes to rank 0: FAILED, 0 of 5000 bytes right",)
    assert sum(pair.good for pair in found.pairs) == 11


def test_bytes_that_are_wrong_are_counted() -> None:
    class Corrupting(HostMemory):
        def block(self, rank: int) -> torch.Tensor:
            found = super().block(rank)
            return torch.cat([found[:-10], found[-10:] ^ 255]) if (self.rank, rank) == (0, 1) else found

    found = over_threads(2, Corrupting)
    assert "rank 0 reads from rank 1: FAILED, 4990 of 5000 bytes right" in found.problems


def test_a_rank_that_fails_in_it_does_not_leave_its_peers() -> None:
    found = over_threads(2, lambda rank, size: LyingMemory(rank, size, raises=rank == 1))
    assert "rank 1 writes to rank 0: FAILED, 0 of 5000 bytes right" in found.problems
    assert "rank 1 reads from rank 0: FAILED, 0 of 5000 bytes right" in found.problems
    assert "rank 1 writes to rank 0: OSError: the mapping is gone" in found.errors[0]
    assert "rank 0 writes to rank 1: FAILED" not in " ".join(found.problems)


@pytest.mark.parametrize("stage", ["allocate", "export", "import", "map"])
def test_memory_that_can_not_be_shared_is_a_failure_that_names_rank_and_stage(stage: str) -> None:
    machine = FakeMachine(Fault(rank=1, stage=stage))
    found = over_threads(2, machine.memory)
    assert found.failed
    assert found.problems[0].startswith(f"the memory could not be shared: rank 1: {stage}: OSError")
    assert machine.live == 0


def test_patterns_tell_pairs_apart() -> None:
    texts = {bytes(pattern(one, two, 64).tolist()) for one in range(16) for two in range(16)}
    assert len(texts) == 256
    assert not any(0 in text for text in texts), "untouched memory is no pattern"


def test_votes_are_timed_and_facts_gathered_on_all_ranks() -> None:
    exchanges = thread_exchanges(2)

    def one(rank: int) -> tuple[list[int], list[dict[str, object]]]:
        facts = laptop_facts(device_name=f"cpu {rank}")
        return timed_votes(exchanges[rank], 3), gather_facts(facts, exchanges[rank])

    with ThreadPoolExecutor(2) as pool:
        times, facts = assert_identical(list(pool.map(one, range(2))))
    assert len(times) == 2
    assert all(time > 0 for time in times)
    assert [entry["device_name"] for entry in facts] == ["cpu 0", "cpu 1"]
    assert exchanges[0].collectives == 4 + 1 + 1


# The whole


def checkup(**changes: object) -> Checkup:
    pairs = [
        Pair(rank=a, peer=b, kind=kind, nbytes=8, right=0 if (a, b, kind) == (1, 0, "write") else 8)
        for kind in ("write", "read")
        for a, b in ((0, 1), (1, 0))
    ]
    fields: dict[str, object] = {
        "ranks": 2,
        "job": True,
        "facts": [facts_of(laptop_facts(free_memory=n << 33)) for n in (1, 2)],
        "tiers": [
            TierState(tier=Tier.TAIL_FUSION, capacity=64, why_not=""),
            TierState(tier=Tier.PEER_AR, capacity=0, why_not="rank 1: no memory for its block of 5 MiB"),
        ],
        "windows": "host.toml (host)",
        "pairs": PairCheck(pairs=tuple(pairs)),
        "vote_us": (70, 90),
    }
    return Checkup(**{**fields, **changes})  # type: ignore[arg-type]


GOOD_PAIRS = PairCheck(pairs=(Pair(rank=0, peer=1, kind="write", nbytes=8, right=8),))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"pairs": GOOD_PAIRS}, 0),
        ({"pairs": PairCheck(why_not="not tried: one rank has no pair")}, 0),
        ({"pairs": GOOD_PAIRS, "required": (Tier.TAIL_FUSION,)}, 0),
        ({"pairs": GOOD_PAIRS, "required": (Tier.TAIL_FUSION, Tier.PEER_AR)}, 1),
        ({"required": (Tier.PEER_AR,)}, 3),
        ({"pairs": PairCheck(why_not="it could not be shared", failed=True)}, 3),
        ({"pairs": GOOD_PAIRS, "error": "the ranks can't agree"}, 3),
    ],
)
def test_exit_codes(changes: dict[str, object], code: int) -> None:
    found = checkup(**changes)
    assert found.exit_code == code
    assert found.to_dict()["exit_code"] == code
    assert str(code) in (doctor.__doc__ or "").partition("Exit codes:")[2]


HOSTILE = "H200\x1b[2J\r\nall is well\x00\x9b1m"
ESCAPED = r"H200\x1b[2J\r\nall is well\x00\x9b1m"


def test_what_comes_from_outside_is_shown_escaped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No line more than without, and nothing that a terminal obeys; only an error may have several lines."""
    monkeypatch.setattr(_console, "import_failure", lambda *modules: ModuleNotFoundError("No module named 'rich'"))

    def lines(text: str) -> list[str]:
        facts = laptop_facts(host=text, device_name=text, driver=Unknown(text), versions={"torch": text, text: "1"})
        tiers = [TierState(tier=Tier.PEER_AR, capacity=0, why_not=text)]
        entry = {"value": text, "source": text, "given": text}
        changes = {"windows": text, "notes": [text], "settings": {"record": entry}, "required": (Tier.PEER_AR,)}
        pairs = PairCheck(errors=(f"rank 1 writes to rank 0: {text}",))
        error = f"the ranks can't agree\nspec.top_k differs: {text.split()[0]}"
        doctor._show(checkup(facts=[facts_of(facts)] * 2, tiers=tiers, pairs=pairs, error=error, **changes), False)
        return capsys.readouterr().out.split("\n")

    plain, found = lines("H200"), lines(HOSTILE)
    assert len(found) == len(plain)
    assert all(line.isprintable() for line in found)
    assert [line for line in found if line.startswith("all is well")] == []
    assert f"windows: {ESCAPED}" in found
    assert f"note: {ESCAPED}" in found
    assert f"MISSING PEER_AR is required: {ESCAPED}" in found
    assert f"FAILED rank 1 writes to rank 0: {ESCAPED}" in found
    assert [line.split("  ")[-1].strip() for line in found if line.startswith("device_name ")] == [ESCAPED]
    assert r"spec.top_k differs: H200\x1b[2J" in found, "an error's lines stay lines"


def test_a_rank_that_gives_up_says_it_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "GRACE", 0.0)
    doctor._end(f"RuntimeError: {HOSTILE}", argparse.Namespace(json=False), 1, 2)
    assert capsys.readouterr().err == "k3comm: rank 1: RuntimeError: H200\\x1b[2J all is well\\x00\\x9b1m\n"


def test_the_picture_for_people(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    absent = ModuleNotFoundError("No module named 'rich'")
    monkeypatch.setattr(_console, "import_failure", lambda *modules: absent)
    doctor._show(checkup(required=(Tier.PEER_AR,)), False)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == "k3comm doctor: 2 ranks on 1 host"
    assert "free_memory 8 GiB (rank 0)" in lines
    assert "free_memory 16 GiB (rank 1)" in lines
    assert "TAIL_FUSION m <= 64" in lines
    assert "PEER_AR no rank 1: no memory for its block of 5 MiB" in lines
    assert "rank 0 - ok" in lines
    assert "rank 1 write -" in lines
    assert "a vote takes 90 us (median, slowest rank: 1)" in lines
    assert lines[-3:] == [
        "FAILED rank 1 writes to rank 0: FAILED, 0 of 8 bytes right",
        "MISSING PEER_AR is required: rank 1: no memory for its block of 5 MiB",
        "not well: exit code 3",
    ]


KEYS = [
    "k3comm", "schema", "job", "ranks", "hosts", "exit_code", "failures", "missing", "absent_ranks", "notes",
    "settings", "windows", "tiers", "pairs", "vote_us", "facts",
]  # fmt: skip


def test_alone(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3COMM_POLL_DEADLINE", "9")
    assert cli.main(["doctor", "--json", "--device", "cpu", "--require", "separate_reduce"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == KEYS
    assert (found["schema"], found["job"], found["ranks"], found["exit_code"]) == (1, False, 8, 0)
    assert set(found["tiers"]) == set(Tier.__members__)
    assert found["tiers"]["SEPARATE_REDUCE"] == {
        "can": True, "rows": None, "why_not": "", "across_hosts": {"can": True, "rows": None, "why_not": ""}
    }  # fmt: skip
    assert found["pairs"] == {"checked": False, "why_not": "", "results": []}
    assert found["settings"]["poll_deadline"]["source"] == "K3COMM_POLL_DEADLINE"
    assert found["facts"][0]["device"] == "cpu"
    assert cli.main(["doctor", "--device", "cpu", "--require", "MULTIMEM_AR"]) == 1
    out = capsys.readouterr().out
    assert "MISSING MULTIMEM_AR is required: it needs a GPU" in out
    assert out.endswith("not well: exit code 1\n")


def test_every_key_is_documented() -> None:
    from pathlib import Path

    page = (Path(cli.__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    assert [key for key in KEYS if f"`{key}`" not in page] == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--require", "TAIL_FUSIN"], "no tier is called 'TAIL_FUSIN'"),
        (["--ranks", "17"], "accepted are whole numbers from 1 to 16"),
        (["--deadline", "0"], "accepted are seconds from 1 to 86400"),
        (["--deadline", "soon"], "accepted are seconds from 1 to 86400"),
    ],
)
def test_wrong_arguments(arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor", *arguments])
    assert caught.value.code == 2
    assert error in capsys.readouterr().err


def test_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["doctor", "--device", "cuda"]) == 2
    assert "torch finds no GPU here" in capsys.readouterr().err


# A job


def test_what_a_launcher_says() -> None:
    assert launched({}) is None
    assert launched({"LOCAL_RANK": "1"}) is None
    assert launched({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}) == (3, 8, 1)
    assert launched({"RANK": "0", "WORLD_SIZE": "1"}) == (0, 1, 0)
    for environ, named in (
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "x"}, "LOCAL_RANK"),
    ):
        with pytest.raises(SettingsError, match=f"^{named}: "):
            launched(environ)


def test_where_ranks_meet() -> None:
    good = {"MASTER_ADDR": "host", "MASTER_PORT": "29500"}
    assert meeting_place(good) == ("host", 29500, False)
    assert meeting_place({**good, "TORCHELASTIC_USE_AGENT_STORE": "True"}) == ("host", 29500, True)
    for name, text in (
        ("MASTER_ADDR", ""), ("MASTER_ADDR", " "), ("MASTER_PORT", ""), ("MASTER_PORT", "x"), ("MASTER_PORT", "0"),
        ("MASTER_PORT", "65536"), ("MASTER_PORT", "²"), ("MASTER_PORT", "9" * 5000),
    ):  # fmt: skip
        with pytest.raises(SettingsError, match=f"^{name}: "):
            meeting_place({**good, name: text})


def test_a_meeting_place_that_is_missing_is_told_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("RANK", "0"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")):
        monkeypatch.setenv(name, text)
    assert cli.main(["doctor", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == ("k3comm: MASTER_PORT: '' given; accepted are whole numbers from 1 to 65535\n")


def test_places_in_torch_are_left_out_of_errors() -> None:
    text = (
        "timed out\nException raised from doWait at /x/TCPStore.cpp:1 (most recent call first):\nframe #0: c10::Error\n"
    )
    assert doctor._line(text) == "timed out"
    assert doctor._without_frames("the ranks can't agree\nspec.x differs") == "the ranks can't agree\nspec.x differs"


def test_names_stay_whole_in_a_narrow_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("rich")
    monkeypatch.setattr(_console, "WIDTH", 60)
    name = "versions.nvidia-cuda-runtime"
    table = _console.Table(title="t", columns=["fact", "value", "help"], rows=[[name, "v" * 90, "words " * 20]])
    _console.show(table)
    assert name in capsys.readouterr().out


def test_too_many_ranks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "17")
    assert cli.main(["doctor"]) == 2
    assert "WORLD_SIZE: 17 given; accepted are 1 to 16 ranks" in capsys.readouterr().err


def as_a_job(
    port: int, arguments: list[str], variables: dict[int, dict[str, str]], present: int, joining: int
) -> tuple[object, ...]:
    """`k3comm doctor` as a launcher would start it on this rank: exit code, standard output and error.

    Ranks from `present` on do nothing, but for those before `joining`: they come into the group and stay.
    """
    me = current_rank()
    os.environ |= {
        "RANK": str(me.rank), "WORLD_SIZE": str(me.world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        **variables.get(me.rank, {}),
    }  # fmt: skip
    if me.rank >= present:
        if me.rank < joining:
            store, _ = doctor._meet(("127.0.0.1", port, False), me.rank, me.world_size, 30)
            torch.distributed.init_process_group("gloo", store=store, rank=me.rank, world_size=me.world_size)
        return (None, "", "")
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(["doctor", "--device", "cpu", *arguments])
    return code, out.getvalue(), err.getvalue()


def launch(
    arguments: list[str], variables: dict[int, dict[str, str]] | None = None, present: int = 3, joining: int = 0
) -> list[object]:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return run_ranks(as_a_job, 3, port, arguments, variables or {}, present, joining, init=False, deadline=60)


def test_a_job_speaks_with_one_voice() -> None:
    found = launch(["--json", "--require", "PEER_AR"])
    assert [code for code, _, _ in found] == [0, 0, 0]
    assert [(out, err) for _, out, err in found[1:]] == [("", "")] * 2
    document = json.loads(found[0][1])
    assert list(document) == KEYS
    assert (document["job"], document["ranks"], document["hosts"]) == (True, 3, 1)
    assert document["tiers"]["PEER_AR"]["can"]
    assert "not a multiple" in document["tiers"]["COLUMN_PARALLEL"]["why_not"]
    assert len(document["pairs"]["results"]) == 12
    assert all(pair["ok"] and pair["right"] == pair["nbytes"] == 65536 for pair in document["pairs"]["results"])
    assert len(document["vote_us"]["by_rank"]) == 3
    assert document["vote_us"]["slowest"] == max(document["vote_us"]["by_rank"]) > 0
    assert len(document["facts"]) == 3
    sources = {name: entry["source"] for name, entry in document["settings"].items()}
    assert {name for name, source in sources.items() if source == "doctor"} == {
        "vote_deadline", "rendezvous_deadline", "poll_deadline", "record",
    }  # fmt: skip


def test_ranks_that_disagree_are_exit_code_3() -> None:
    found = launch([], {1: {"K3COMM_DISABLE": "PEER_AR"}})
    assert [code for code, _, _ in found] == [3, 3, 3]
    assert "settings.disabled differs: none on ranks 0 and 2; PEER_AR on rank 1" in found[0][1]
    assert [said for _, *said in found[1:]] == [["", ""]] * 2, "what all ranks hold is said once"


def test_a_rank_that_does_not_come_is_exit_code_3() -> None:
    found = launch(["--deadline", "1"], present=2)
    assert [code for code, _, _ in found] == [3, 3, None]
    assert "FAILED not all 3 ranks came together within 1 s: rank 2 did not come\n" in found[0][1]
    assert "MISSING rank 2 did not come\n" in found[0][1]
    assert found[1][2] == "k3comm: rank 1: not all 3 ranks came together within 1 s: rank 2 did not come\n"


def test_who_did_not_come_is_there_for_machines() -> None:
    found = launch(["--deadline", "1", "--json"], present=1)
    document = json.loads(found[0][1])
    assert (document["exit_code"], document["absent_ranks"]) == (3, [1, 2])
    assert document["missing"] == ["rank 1 did not come", "rank 2 did not come"]
    assert document["failures"] == ["not all 3 ranks came together within 1 s: ranks 1 and 2 did not come"]


def test_a_first_rank_that_does_not_come_is_told_without_torchs_own_log() -> None:
    import socket
    import subprocess
    import sys

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    job = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    program = [sys.executable, "-m", "k3comm", "doctor", "--device", "cpu", "--deadline", "1"]
    found = subprocess.run(program, env=os.environ | job, capture_output=True, text=True, timeout=60)
    assert (found.returncode, found.stdout) == (3, "")
    (line,) = found.stderr.splitlines()
    assert line.startswith(
        "k3comm: rank 1: not all 2 ranks came together within 1 s: rank 0 did not come, or its store "
    )


def test_a_rank_that_joins_and_stops_is_named() -> None:
    found = launch(["--deadline", "1"], present=2, joining=3)
    assert [code for code, _, _ in found] == [3, 3, None]
    assert "FAILED CommunicationTimeoutError: negotiation of 3 ranks: rank 2 " in found[0][1]
    assert found[1][2].startswith("k3comm: rank 1: CommunicationTimeoutError: negotiation of 3 ranks: rank 2 ")
