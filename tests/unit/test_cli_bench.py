"""The bench: what it measures, and that it finds every arm that is wrong or does not run what it says.

Nothing here depends on a time. The ranks patch modules of their own process, which ends with the test.
"""

from __future__ import annotations

import json
import runpy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from k3comm import LatentMoESpec, cli
from k3comm.cli import _bench, _bench_plot, _console, _timing, bench
from k3comm.cli._arms import Arm, Inputs, Rivals
from k3comm.cli._bench import Options, measure
from k3comm.cli._results import Results, parse_results
from k3comm.cli._timing import HostPass, Ranks
from k3comm.errors import InputError
from k3comm.testing import run_ranks
from k3comm.tiers import Tier

SPEC = LatentMoESpec(hidden_size=64, latent_size=32, top_k=2, max_tokens=80)
OPTIONS = Options(spec=SPEC, rows=(1, 80), layers=2, repeats=2, replays=2)
RIVALS = ("separate", "joined", "folded")
LEFT_OUT = ("one-shot joined", "flashinfer overlapped", "flashinfer folded")


def run(**changes: Any) -> Results:
    """The bench on this rank, without megabytes to write between calls."""
    _timing.HOST_CACHE_BYTES = 1 << 12
    world = dist.group.WORLD
    assert world is not None
    return measure(attrs.evolve(OPTIONS, **changes), world)


# A run that is well


def _well() -> tuple[dict[str, Any], list[str]]:
    order: list[str] = []
    sample = HostPass.sample

    def noted(self: HostPass, replays: int) -> float:
        if replays > 1:
            order.append(f"{self.step.args[0].name} {self.residual.shape[0]}")  # type: ignore[attr-defined]
        return sample(self, replays)

    HostPass.sample = noted  # type: ignore[method-assign]
    return run(census=True).to_dict(), order


def test_a_run() -> None:
    (first, order), (other, _) = run_ranks(_well, 2)
    results = parse_results(json.loads(json.dumps(first)), "first")
    assert results.failures == ()
    assert (results.family, results.world_size, results.graph, results.short) == ("host", 2, False, True)
    assert set(LEFT_OUT) <= set(results.left_out)
    tiers = [arm for arm in results.arms if arm in Tier.__members__]
    assert {"TAIL_FUSION", "SEPARATE_REDUCE"} <= set(tiers)
    assert [arm for arm in results.arms if arm not in tiers] == list(RIVALS)
    for one in results.measurements:
        # A warm pass, a census, two repetitions of two passes each chained and isolated; two layers.
        assert one.engaged == one.calls == (1 + 1 + 2 * 2 * 2) * 2
        assert len(one.chained_us) == len(one.isolated_us) == 2
        assert 0 < one.error < 0.03
        assert one.census
    assert results.at("joined", 1).census["c10d::allreduce_"] == 2  # type: ignore[union-attr]
    assert results.at("separate", 1).census["c10d::allreduce_"] == 4  # type: ignore[union-attr]
    # TAIL_FUSION takes few rows: it is left out of the rest, and that is said.
    assert results.at("TAIL_FUSION", 80) is None
    assert "TAIL_FUSION from 65 rows" in results.left_out
    assert results.selected == {1: Tier.TAIL_FUSION, 80: Tier.PEER_AR}
    for key in ("date", "selected", "left_out", "failures"):
        assert first[key] == other[key]
    figures = ("arm", "rows", "chained_us", "isolated_us", "error", "engaged")
    assert [[one[key] for key in figures] for one in first["measurements"]] == [
        [one[key] for key in figures] for one in other["measurements"]
    ], "figures are the slowest rank's, on every rank"
    at_80 = [name.removesuffix(" 80") for name in order if name.endswith(" 80")]
    names = [arm for arm in results.arms if arm != "TAIL_FUSION"]
    twice = [name for name in names for _ in ("chained", "isolated")]
    assert at_80 == twice + twice[::-1], "the arms' order alternates"


def _chosen() -> tuple[tuple[str, ...], str]:
    results = run(rows=(2,), tiers=(Tier.PEER_AR,), rivals=False, spec=attrs.evolve(SPEC, max_tokens=2))
    try:
        run(tiers=(Tier.MNNVL_CUTEDSL,))
    except InputError as error:
        return results.arms, str(error)
    return results.arms, ""


def test_chosen_tiers_alone() -> None:
    for arms, error in run_ranks(_chosen, 2):
        assert arms == ("PEER_AR",)
        assert error.startswith("--tiers: MNNVL_CUTEDSL is not agreed: ")


def _float32() -> tuple[str, ...]:
    results = run(spec=attrs.evolve(SPEC, dtype="float32"), rows=(3,))
    assert max(one.error for one in results.measurements) < 1e-5
    return results.failures


def test_float32() -> None:
    assert run_ranks(_float32, 2) == [(), ()]


# Limits of time, and memory


def _limited(seconds: float) -> dict[str, Any]:
    return run(rows=(2,), replays=5, seconds=seconds).to_dict()


@pytest.mark.parametrize(("seconds", "passes"), [(1e-9, _bench.LEAST_PASSES), (1e9, 5)])
def test_passes_are_as_many_as_fit(seconds: float, passes: int) -> None:
    """And the same on every rank; what the trial ran is counted with the rest."""
    found = [parse_results(json.loads(json.dumps(one)), "it") for one in run_ranks(_limited, 2, seconds)]
    assert found[0].measurements == found[1].measurements
    assert found[0].failures == ()
    for one in found[0].measurements:
        assert found[0].passes(one) == passes
        assert one.replays == (None if passes == 5 else passes)
        # A warm pass; the trial, and two repetitions, each chained and isolated; two layers.
        assert one.engaged == one.calls == (1 + 2 * _bench.TRIAL_PASSES + 2 * 2 * passes) * 2
    assert (f"2 x {passes} to 5 passes" in found[0].origin()) is (passes < 5)


def _uneven() -> list[int]:
    """A rank whose clock says that its trials took long."""
    if dist.get_rank() == 1:
        clock = _bench.time.perf_counter
        starts = iter(range(10**9))
        _bench.time = type("Slow", (), {"perf_counter": lambda: clock() + 100.0 * next(starts)})  # type: ignore[assignment]
    results = run(rows=(2,), replays=5, seconds=60.0, rivals=False)
    return [results.passes(one) for one in results.measurements]


def test_the_slowest_rank_decides_how_many_passes_fit() -> None:
    for passes in run_ranks(_uneven, 2):
        assert passes
        assert set(passes) == {_bench.LEAST_PASSES}


def _with_memory(reserve: bool) -> dict[str, Any]:
    return run(rows=(1, 300), spec=attrs.evolve(SPEC, max_tokens=300), memory=True, reserve=reserve).to_dict()


@pytest.mark.parametrize("reserve", [False, True])
def test_memory_and_room_for_the_largest_size(reserve: bool) -> None:
    for given in run_ranks(_with_memory, 2, reserve):
        results = parse_results(json.loads(json.dumps(given)), "it")
        assert results.failures == ()
        # On CPU staging starts with 256 rows of 64 + 32 elements, which are kept when more are reserved.
        assert (results.at("PEER_AR", 300) is not None) is reserve
        assert ("PEER_AR from 257 rows" in results.left_out) is not reserve
        room = (300 + 256 if reserve else 256) * (64 + 32) * 2
        assert 0 <= (results.shared_bytes["PEER_AR"] or 0) - room < 1024
        assert results.shared_bytes["TAIL_FUSION"]
        assert {results.shared_bytes[arm] for arm in (*RIVALS, "SEPARATE_REDUCE")} == {0}
        assert all(one.extra_bytes is None for one in results.measurements), "on CPU no allocator tells"


def _of_a_prefill() -> dict[int, Tier]:
    return dict(run(decode_rows=0, tiers=(Tier.SEPARATE_REDUCE,), rivals=False).selected)


def test_the_tier_of_a_prefill_at_every_size() -> None:
    assert run_ranks(_of_a_prefill, 2) == [{1: Tier.TAIL_FUSION, 80: Tier.PEER_AR}] * 2  # the host's are of any phase


# Runs that are not


def _with(name: str, change: Callable[[Arm], Arm], **changes: Any) -> Results:
    """A run in which one arm was changed."""
    originals = _bench.tier_arms, Rivals.arms

    def changed(arms: list[Arm]) -> list[Arm]:
        return [change(arm) if arm.name == name else arm for arm in arms]

    _bench.tier_arms = lambda *given, **named: changed(originals[0](*given, **named))
    Rivals.arms = lambda self: changed(originals[1](self))  # type: ignore[method-assign]
    try:
        return run(**changes)
    finally:
        _bench.tier_arms, Rivals.arms = originals  # type: ignore[method-assign]


def _spoiled(arm: Arm, spoil: Callable[[Tensor, int], None], ranks: tuple[int, ...] = (0, 1)) -> Arm:
    """The arm, with its result changed on some ranks."""
    run, calls = arm.run, Counter[str]()

    def spoiled(inputs: Inputs, residual: Tensor, layer: int) -> Tensor:
        out = run(inputs, residual, layer)
        calls["all"] += 1
        if dist.get_rank() in ranks:
            spoil(out, calls["all"])
        return out

    return attrs.evolve(arm, run=spoiled)


def _silent(arm: Arm) -> Arm:
    """Right, but by something else than it says."""

    def silent(inputs: Inputs, residual: Tensor, layer: int) -> Tensor:
        lane = torch.cat((inputs.routed, inputs.shared), dim=1)
        dist.all_reduce(lane)
        rivals: Rivals = arm.run.__self__  # type: ignore[attr-defined]
        return rivals._finish_lane(lane, residual, layer)

    return attrs.evolve(arm, run=silent)


def _tired(arm: Arm) -> Arm:
    """Runs for the check and the warm pass, and then hands out what it had."""
    run, had = arm.run, []

    def tired(inputs: Inputs, residual: Tensor, layer: int) -> Tensor:
        if len(had) < 4:
            had.append(run(inputs, residual, layer))
        return had[-1]

    return attrs.evolve(arm, run=tired)


def _one_element(out: Tensor, call: int) -> None:
    out[1, 1] += 1  # of 80 rows this one is not checked against float64


def _failing(case: str) -> tuple[tuple[str, ...], tuple[str, ...], list[bool]]:
    few: dict[str, Any] = {"rows": (2,)}
    if case == "wrong":
        results = _with("joined", lambda arm: _spoiled(arm, lambda out, call: out.mul_(2)), **few)
    elif case == "wrong on one rank":
        results = _with("folded", lambda arm: _spoiled(arm, lambda out, call: out.mul_(2), (1,)), **few)
    elif case == "nan":
        results = _with("joined", lambda arm: _spoiled(arm, lambda out, call: out[-1].fill_(float("nan"))), **few)
    elif case == "ranks differ":
        results = _with("PEER_AR", lambda arm: _spoiled(arm, _one_element, (1,)), rows=(80,))
    elif case == "silent":
        results = _with("joined", _silent, **few)
    elif case == "tired":
        results = _with("joined", _tired, **few)
    else:
        arms: list[Arm] = []

        def last(arm: Arm) -> Arm:
            return attrs.evolve(arm, run=lambda *given: arms[0].run(*given))

        makers = _bench.tier_arms

        def made(*given: Any, **named: Any) -> list[Arm]:
            found = makers(*given, **named)
            arms[:] = [found[-1]]
            return found

        _bench.tier_arms = made
        try:
            results = _with("PEER_AR", last, **few)
        finally:
            _bench.tier_arms = makers
    return results.failures, results.arms, [bool(one.engaged == one.calls) for one in results.measurements]


@pytest.mark.parametrize(
    ("case", "arm", "why"),
    [
        ("wrong", "joined", "wrong: its error is "),
        ("wrong on one rank", "folded", "wrong: its error is "),
        ("nan", "joined", "wrong: its error is 1e+09 (rank 0)"),
        ("ranks differ", "PEER_AR", "the ranks' results differ"),
        ("silent", "joined", "one call engaged {}, not {'all_reduce': 1} (rank 0)"),
        ("tired", "joined", "18 calls engaged {'all_reduce': 3} (rank 0)"),
        ("another tier", "PEER_AR", "one call engaged {'SEPARATE_REDUCE': 1}, not {'PEER_AR': 1} (rank 0)"),
    ],
)
def test_an_arm_that_is_wrong_or_runs_something_else(case: str, arm: str, why: str) -> None:
    for failures, arms, engaged in run_ranks(_failing, 2, case):
        assert len(failures) == 1
        assert failures[0].startswith(f"{arm} at ")
        assert why in failures[0]
        if "one rank" in case:
            assert failures[0].endswith("(rank 1)")
        assert arm not in arms, "it is not timed"
        assert {"SEPARATE_REDUCE", "separate"} <= set(arms), "the others are"
        assert all(engaged)


# Graphs, whose replays are played by eager calls


class PlayedGraph:
    """What `GraphPass` is to the bench, without a GPU."""

    calls = _timing.GraphPass.calls
    stale = False

    def __init__(self, step: Any, residual: Tensor, layers: int, between: Any = None) -> None:
        self._play = lambda: _timing._run(step, residual, layers, between)
        for _ in range(self.calls):
            self.out = self._play()
        self.passes, self._empty = 0, step is None

    def replay(self) -> Tensor | None:
        self.passes += 1
        if self.out is not None and not self.stale:
            before = dict(_engaged[0])
            played = self._play()
            assert played is not None
            self.out.copy_(played)
            _engaged[0].clear()
            _engaged[0].update(before)  # a replay runs no Python
        return self.out

    def sample(self, replays: int) -> float:
        for _ in range(replays):
            self.replay()
        return 5.0 if self._empty else 12.0


_engaged: list[Counter[str]] = []


def _played(stale: bool, **changes: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    _bench.uses_graphs = lambda comm: True
    _bench.GraphPass = PlayedGraph  # type: ignore[assignment,misc]
    PlayedGraph.stale = stale
    torch.cuda.nccl.version = lambda: (2, 28, 3)  # type: ignore[assignment]
    makers = _bench.tier_arms

    def made(*given: Any, **named: Any) -> list[Arm]:
        _engaged[:] = [named["engaged"]]
        return [attrs.evolve(arm, kernels=()) for arm in makers(*given, **named)]

    _bench.tier_arms = made
    results = run(rows=(2,), **changes)
    return results.to_dict(), results.failures


def _played_with_memory() -> tuple[dict[str, Any], tuple[str, ...]]:
    """On an allocator that says that a call takes its result, and 1000 bytes more on rank 0, 7000 on rank 1."""
    result = 2 * SPEC.hidden_size * 2
    for name, value in (
        ("synchronize", None),
        ("reset_peak_memory_stats", None),
        ("memory_allocated", 10**6),
        ("max_memory_allocated", 10**6 + result + (1000, 7000)[dist.get_rank()]),
    ):
        setattr(torch.cuda, name, lambda value=value: value)
    return _played(False, memory=True)


def test_what_a_call_takes_is_the_largest_rank_s() -> None:
    for found, failures in run_ranks(_played_with_memory, 2):
        assert failures == ()
        assert {one["extra_bytes"] for one in found["measurements"]} == {7000}
        assert {one["engaged"] for one in found["measurements"]} == {16}, "the call for it is none of the timed ones"


def test_graphs() -> None:
    for found, failures in run_ranks(_played, 2, False):
        assert failures == ()
        assert found["graph"] is True
        assert found["versions"]["nccl"] == "2.28.3"
        for one in found["measurements"]:
            assert one["engaged"] == one["calls"] == 2 * 2 * 2 * 2
            assert one["chained_us"] == (12.0, 12.0)
            assert one["isolated_us"] == (7.0, 7.0), "less what comes between"


def test_a_graph_that_does_nothing() -> None:
    for found, failures in run_ranks(_played, 2, True):
        assert found["measurements"] == []
        failed = {failure.partition(" at ")[0] for failure in failures}
        assert {"TAIL_FUSION", "SEPARATE_REDUCE", *RIVALS} <= failed
        assert all("a replayed graph does not give what the calls gave (rank 0)" in failure for failure in failures)


# What the ranks tell each other


def _told() -> list[Any]:
    world = dist.group.WORLD
    assert world is not None
    ranks = Ranks(world)
    mine = ranks.rank
    return [
        ranks.slowest([1.5 + mine, 3.25, -1.0]),
        ranks.first_bad([False, mine == 2, mine > 0, True]),
        ranks.alike(2**61 + 7),
        ranks.alike(mine),
        ranks.from_first(f"grüße von {mine}" if mine == 0 else "x" * 100),
        ranks.from_first(""),
    ]


def test_what_the_ranks_tell_each_other() -> None:
    told = [(3.5, 3.25, _timing.LEAST_US), [-1, 2, 1, 0], True, False, "grüße von 0", ""]
    assert run_ranks(_told, 3) == [told, told, told]


@pytest.mark.parametrize(
    ("counted", "found"),
    [
        ({"a": 6, "b": 3}, (3, {})),
        ({"a": 6}, (0, {"a": 6})),
        ({"a": 7, "b": 3}, (3, {"a": 1})),
        ({"a": 2, "b": 1, "c": 1}, (1, {"c": 1})),
        ({}, (0, {})),
    ],
)
def test_engagement(counted: dict[str, int], found: tuple[int, dict[str, int]]) -> None:
    arm = Arm(name="x", engages={"a": 2, "b": 1}, run=lambda inputs, residual, layer: residual)
    assert arm.engagement(counted) == found


# The command line


def sample(**changes: Any) -> Results:
    from test_cli_tune import results

    return results(**changes)


def test_one_process_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "k3comm: started as one process; accepted are two or more, for example "
        "torchrun --standalone --nproc-per-node 2 -m k3comm bench\n"
    )


def test_the_prefill_script_names_itself_then(capsys: pytest.CaptureFixture[str]) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "prefill.py"
    main = runpy.run_path(str(script))["main"]
    assert main([]) == 2
    assert capsys.readouterr().err == (
        "prefill.py: started as one process; accepted are two or more, for example "
        "torchrun --standalone --nproc-per-node 2 benchmarks/prefill.py\n"
    )


def _alone() -> str:
    try:
        run()
    except InputError as error:
        return str(error)
    return ""


def test_a_group_of_one_is_refused() -> None:
    assert run_ranks(_alone, 1) == [
        "bench: a group of 1 rank given; accepted are 2 or more, since one has nobody to talk to"
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--rows", "0"],
        ["--rows", "1,,2"],
        ["--tiers", "TEER"],
        ["--repeats", "0"],
        ["--seconds", "0"],
        ["--seconds", "nan"],
        ["--seconds", "3601"],
        ["--seconds", "soon"],
        ["--device", "tpu"],
        ["--preset", "x"],
    ],
)
def test_arguments_that_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", *arguments])
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_files_that_could_not_be_written_are_refused_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--json", "/nowhere/b.json"]) == 2
    assert "--json: '/nowhere/b.json' given; there is no folder '/nowhere'" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    assert cli.main(["bench", "--plot", "/nowhere/b.png"]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_the_tables(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_console, "import_failure", lambda *modules: ImportError())
    bench.show(sample())
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "TAIL_FUSION *9.00 (0.36) 156 (6.24)" in lines
    assert "joined 9.00 (0.36) -" in lines
    assert any("in brackets max - min of the repetitions" in line for line in lines)
    assert "TAIL_FUSION K0 0.002 80 80" in lines
    assert "joined rival 0.002 40 40" in lines
    assert "left out: one-shot joined: needs GPUs" in lines
    assert "census of TAIL_FUSION at 1 rows, 8 calls: 8 x a kernel" in lines
    assert not any("SHORT RUN" in line for line in lines)
    assert lines[-1] == "360 timed calls, each of which ran what it is named after"


def test_ratios_passes_and_memory_in_the_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(_console, "import_failure", lambda *modules: ImportError())
    given = sample()
    measurements = [
        attrs.evolve(one, extra_bytes=2_500_000, replays=7 if one.rows == 300 else None) for one in given.measurements
    ]
    shared: dict[str, int | None] = dict.fromkeys(given.arms, 0) | {"PEER_AR": 1_230_000, "joined": None}
    few = attrs.evolve(given, measurements=tuple(measurements), shared_bytes=shared)
    bench.show(few, beside_rivals=True)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "5 x 7 to 200 passes" in lines[0]
    assert lines[1] == (
        "SHORT RUN in part, marked ~: fewer than 5 x 200 passes through 8 layers; no figure with ~ to quote"
    )
    assert "chained, us - SHORT RUN" in lines
    assert "PEER_AR 20.00 (2.22) ~346 (-)" in lines, "joined took 9 us; at 300 rows there is no rival"
    assert "TAIL_FUSION *9.00 (1.00) ~156 (-)" in lines
    assert any("~: few passes. us a call; in brackets the time over the fastest rival's" in line for line in lines)
    assert lines[lines.index("Passes in each of 5 repetitions, as many as fit into the time; 200 at most") + 3] == (
        "TAIL_FUSION 200 7"
    )
    assert "PEER_AR 1.2 2.5 2.5" in lines
    assert "joined - 2.5 -" in lines
    again = parse_results(json.loads(json.dumps(few.to_dict())), "it")
    assert again == few
    assert few.to_dict()["measurements"][1]["over_rival"]["chained"] == pytest.approx(20 / 9)
    assert few.to_dict()["measurements"][-2]["over_rival"] == {"chained": None, "isolated": None}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda it: it["measurements"][0].update(replays=0), r"replays: 0 given; accepted are whole numbers from 1"),
        (lambda it: it["measurements"][0].update(extra_bytes=-1), r"extra_bytes: -1 given; accepted are whole numbers"),
        (lambda it: it.update(shared_bytes={"joined": 1.5}), r"shared_bytes.joined: 1.5 given; accepted are whole num"),
        (lambda it: it.update(shared_bytes=[]), r"shared_bytes: \[\] given; accepted are values of the kind dict"),
    ],
)
def test_files_that_are_refused(change: Callable[[dict[str, Any]], None], error: str) -> None:
    given = json.loads(json.dumps(sample().to_dict()))
    change(given)
    with pytest.raises(InputError, match=error):
        parse_results(given, "bench.json")


def test_a_file_of_before_there_were_limits_and_memory() -> None:
    old = json.loads(json.dumps(sample().to_dict()))
    del old["shared_bytes"]
    for one in old["measurements"]:
        del one["replays"], one["extra_bytes"], one["over_rival"]
    assert parse_results(old, "bench.json") == sample()


def test_a_short_run_and_failures_are_seen(capsys: pytest.CaptureFixture[str]) -> None:
    bench.show(sample(replays=3, failures=("joined at 2 rows: wrong",)))
    shown = capsys.readouterr().out
    assert "SHORT RUN: fewer than 5 x 200 passes through 8 layers; no figure to quote" in shown
    assert "chained, us - SHORT RUN" in shown
    assert "FAILED joined at 2 rows: wrong" in shown
    assert "FAILED: 1; " in shown


def test_the_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "bench.svg"
    _bench_plot.draw(sample(replays=3), str(path))
    drawn = path.read_text()
    for text in ("TAIL_FUSION", "SEPARATE_REDUCE", "joined", "The MoE tail on 2 x a machine - SHORT RUN"):
        assert f"<!-- {text} -->" in drawn


def test_no_arm_needs_multicast() -> None:
    """Where torch would make a multicast object of its own, the rivals over its symmetric memory are left out."""

    class Facts:
        pass

    answers = {True: "torch would make a multicast object; set TORCH_SYMM_MEM_DISABLE_MULTICAST=1", False: ""}
    from torch._C._distributed_c10d import _SymmetricMemory

    comm: Any = Facts()
    comm.device = torch.device("cuda", 0)
    comm.report = Facts()
    comm.report.decision = Facts()
    comm.report.decision.shared_devices = ()
    for answer, why in answers.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_SymmetricMemory, "has_multicast_support", staticmethod(lambda *given, a=answer: a))
            rivals = Rivals(comm, Any, Any, Counter(), lambda mine: mine, 1)  # type: ignore[arg-type]
            assert rivals._no_symmetric_memory() == why
