"""The demo: small layers from end to end, and what it makes of measurements that are not as they should be."""

from __future__ import annotations

import functools
import hashlib
import re

import attrs
import pytest
import torch

from k3comm.cli import _console, _measure, main
from k3comm.cli._measure import CALLS, Call, Finding, Measured, Variant, few_calls, judge
from k3comm.cli.tier_map import tier_map
from k3comm.errors import InputError
from k3comm.kernels import reference
from k3comm.kernels.reference import AccuracyMeter
from k3comm.spec import LatentMoESpec
from k3comm.testing import RanksFailed
from k3comm.tiers import Agreement, Numerics, Tier, choose_windows, plugins

SMALL = ("--hidden", "64", "--latent", "32")
SPEC = LatentMoESpec(hidden_size=64, latent_size=32, top_k=16)
FLOAT32 = attrs.evolve(SPEC, dtype="float32")
LAST = Variant(max(Tier), False, Numerics.K2)
PRECISE = Variant(max(Tier), True, Numerics.K0)
LANE = Variant(Tier.FUSED_LANE_AR, False, Numerics.K2)
ROWS = Variant(Tier.SEQUENCE_PARALLEL, False, Numerics.K1)


@pytest.mark.parametrize(
    ("arguments", "ranks", "agreed"),
    [
        ((), 2, set(plugins()) - {Tier.MULTIMEM_AR}),
        (("--dtype", "float32", "--seed", "5"), 3, {Tier.SEQUENCE_PARALLEL, Tier.FUSED_LANE_AR, max(Tier)}),
        ((), 1, {max(Tier)}),
    ],
    ids=["bfloat16, 2 ranks", "float32, 3 ranks", "1 rank"],
)
def test_small_layers(
    arguments: tuple[str, ...],
    ranks: int,
    agreed: set[Tier],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(_console, "import_failure", lambda *modules: ImportError())
    code = main(["demo", *SMALL, "--ranks", str(ranks), *arguments])
    shown = capfd.readouterr().out
    assert code == 0, shown
    assert f"{ranks} rank" in shown.splitlines()[0]
    assert re.search(r"^ *m  any forward$", shown, re.MULTILINE), "the map is there"
    table = shown.partition("Accuracy against float64")[2]
    measured = {line.split()[0] for line in table.splitlines() if " alike " in line}
    assert {tier.name for tier in agreed} <= measured
    assert "differ " not in table
    assert "MISSED" not in shown
    assert "all bounds kept, and all ranks hold the same bits" in shown


def test_arguments_that_are_not_accepted(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--ranks", "0"], ["--ranks", "17"], ["--hidden", "x"], ["--dtype", "int8"], ["--seed", "-1"]):
        with pytest.raises(SystemExit) as caught:
            main(["demo", *arguments])
        assert caught.value.code == 2
    assert "accepted are whole numbers from 1 to 16" in capsys.readouterr().err


# Judging


@functools.cache
def meter(error: float, rows: int = 1000, spec: LatentMoESpec = SPEC, seed: int = 0) -> AccuracyMeter:
    """The accuracy of a result that is off by a share of `error` on average, in half of its elements."""
    draw = torch.Generator().manual_seed(seed)
    truth, off = (torch.randn(rows, spec.hidden_size, generator=draw, dtype=torch.float64) for _ in range(2))
    out = reference.round_once(truth + error * off * (off > 0), getattr(torch, spec.dtype))
    found = AccuracyMeter()
    found.add(out, truth, torch.zeros_like(out))
    return found


def measured(errors: dict[Variant, float], spec: LatentMoESpec = SPEC, calls: int = len(CALLS)) -> Measured:
    """One of two ranks; its share of each call is half of the rows."""
    model = 0.02
    return Measured(
        report="the report",
        spans=tier_map(Agreement.of([LANE.tier, LAST.tier]), choose_windows("host", 2).windows),
        calls={
            variant: [
                Call(hashlib.sha256(f"{variant} {call}".encode()).hexdigest(), meter(error, rows // 2 + 1, spec, call))
                for call, rows in enumerate(CALLS[:calls])
            ]
            for variant, error in errors.items()
        },
        models={numerics: [meter(model, 2000)] for numerics in (Numerics.K1, Numerics.K2)}
        if spec.dtype == "bfloat16"
        else {},
    )


def judged(errors: dict[Variant, float], spec: LatentMoESpec = SPEC, calls: int = len(CALLS)) -> dict[Variant, Finding]:
    one = measured(errors, spec, calls)
    return {finding.variant: finding for finding in judge([one, one], spec)}


def test_what_is_as_good_as_its_bounds() -> None:
    found = judged({ROWS: 0.02, LANE: 0.02, LAST: 0.02, PRECISE: 0.0})
    assert [finding.good for finding in found.values()] == [True] * 4
    assert all(finding.complaints() == [] for finding in found.values())
    assert found[LANE].accuracy.rows >= reference.POOL_ROWS
    assert {limit.bound.quantity for limit in found[PRECISE].limits} == {
        "misrounded",
        "paired_bias",
        "error_over_ideal",
    }


@pytest.mark.parametrize(
    ("errors", "missed", "quantity"),
    [
        ({LAST: 0.03}, LAST, "error"),
        ({LANE: 0.021, LAST: 0.02}, LANE, "error"),
        ({ROWS: 0.03, LAST: 0.02}, ROWS, "error"),
        ({PRECISE: 0.02, LAST: 0.02}, PRECISE, "misrounded"),
    ],
)
def test_what_misses_a_bound(errors: dict[Variant, float], missed: Variant, quantity: str) -> None:
    found = judged(errors)
    assert [variant for variant, finding in found.items() if not finding.good] == [missed]
    assert any(line.startswith(f"{quantity} is ") for line in found[missed].complaints())


def test_float32_has_one_bound() -> None:
    assert judged({LANE: 1e-6, LAST: 1e-6}, FLOAT32)[LANE].good
    found = judged({LANE: 1e-4, LAST: 1e-6}, FLOAT32)
    assert [finding.good for finding in found.values()] == [False, True]


def test_a_nan_is_never_good() -> None:
    for variant in (LAST, LANE, ROWS, PRECISE):
        errors = {LAST: 0.02, variant: float("nan")}
        assert not judged(errors)[variant].good


def test_one_biased_call_is_enough_for_a_precise_one() -> None:
    """One call is stretched and the next one shrunk by as much: pooled there would be nothing to see."""
    spec = attrs.evolve(SPEC, hidden_size=2048)
    one = measured({LAST: 0.02, PRECISE: 0.0}, spec, few_calls(spec))
    for call, by in ((3, 2**-7), (4, -(2**-7))):
        truth = torch.ones(64, 2048, dtype=torch.float64)
        out = truth.bfloat16()
        out[0, :60] += by
        changed = AccuracyMeter()
        changed.add(out, truth, torch.zeros_like(out))
        one.calls[PRECISE][call] = attrs.evolve(one.calls[PRECISE][call], meter=changed)
    (finding,) = [finding for finding in judge([one], spec) if finding.variant == PRECISE]
    assert abs(finding.accuracy.paired_bias) < 1e-8
    assert "paired_bias is 3.576e-06, allowed is |paired_bias| < 2e-06 (absolute)" in finding.complaints()


def test_too_few_rows_are_said_and_not_judged() -> None:
    found = judged({LANE: 0.05, LAST: 0.02}, calls=4)
    (limit,) = found[LANE].limits
    assert limit.holds is None
    assert found[LANE].good


def test_ranks_that_differ() -> None:
    one = measured({LAST: 0.02})
    other = attrs.evolve(one, calls={LAST: [*one.calls[LAST]]})
    other.calls[LAST][2] = attrs.evolve(other.calls[LAST][2], digest="different")
    (finding,) = judge([one, one, other], SPEC)
    assert finding.differing == (CALLS[2],)
    assert finding.complaints() == ["the ranks' results differ, in calls of 16 rows"]
    assert not finding.good


def test_how_many_calls_are_few() -> None:
    assert sum(CALLS) == reference.POOL_ROWS
    assert few_calls(LatentMoESpec.kimi_k3()) == 5
    assert few_calls(attrs.evolve(SPEC, hidden_size=10**6)) == 1
    assert few_calls(SPEC) == len(CALLS)


def test_data_are_the_same_for_whoever_draws_them() -> None:
    data = _measure._Data(SPEC, 3, 1)
    for call, rows in enumerate(CALLS):
        assert sum(data.share(call, rank) for rank in range(3)) == rows
    for rank in range(3):
        inputs = _measure._Inputs.of(data, 4, rank, torch.ones(32), torch.ones(64, 32))
        assert torch.equal(inputs.routed[inputs.judged], inputs.case.routed[rank])
        assert torch.equal(inputs.shared[inputs.judged], inputs.case.shared[rank])
        assert inputs.case.residual is not None
        assert torch.equal(inputs.residual[inputs.judged], inputs.case.residual)
        peer = _measure._Inputs.of(data, 4, (rank + 1) % 3, torch.ones(32), torch.ones(64, 32))
        assert torch.equal(peer.routed[inputs.judged], inputs.case.routed[(rank + 1) % 3])
        assert torch.equal(peer.residual, inputs.residual)
        assert not torch.equal(peer.routed, inputs.routed)
    other = _measure._Inputs.of(_measure._Data(SPEC, 3, 2), 4, 0, torch.ones(32), torch.ones(64, 32))
    assert not torch.equal(other.residual, inputs.residual)


# Exit codes


def run_with(monkeypatch: pytest.MonkeyPatch, result: list[Measured] | Exception) -> int:
    """The demo as if its ranks had brought back `result`."""

    def run_ranks(*arguments: object, **keywords: object) -> list[Measured]:
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr("k3comm.testing.run_ranks", run_ranks, raising=False)
    return main(["demo", *SMALL, "--ranks", "2"])


def test_a_missed_bound_is_told_and_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = measured({LANE: 0.02, LAST: 0.02, PRECISE: 0.0})
    assert run_with(monkeypatch, [good, good]) == 0
    assert "the report" in capsys.readouterr().out
    bad = measured({LANE: 0.03, LAST: 0.02, PRECISE: 0.0})
    assert run_with(monkeypatch, [bad, bad]) == 1
    shown = capsys.readouterr().out
    assert "MISSED FUSED_LANE_AR: error is " in shown
    assert "(1.02 x SEPARATE_REDUCE)" in shown
    assert "MISSED: 1; 2 processes" in shown
    few = measured({LANE: 0.02, LAST: 0.02}, calls=4)
    assert run_with(monkeypatch, [few, few]) == 0
    assert "not judged: FUSED_LANE_AR: error <= " in capsys.readouterr().out


def test_the_librarys_errors_are_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    failed = Measured(error="spec.top_k differs:\n8 on rank 0")
    assert run_with(monkeypatch, [failed, failed]) == 2
    assert capsys.readouterr().err == "k3comm: spec.top_k differs: 8 on rank 0\n"
    assert run_with(monkeypatch, InputError("deadline: 0 given")) == 2
    assert capsys.readouterr().err == "k3comm: deadline: 0 given\n"


def test_a_rank_that_dies_is_told_whole(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_with(monkeypatch, RanksFailed({1: "was killed by SIGKILL"}, {})) == 1
    error = capsys.readouterr().err
    assert error.startswith("k3comm: 1 of 1 ranks failed")
    assert "rank 1 was killed by SIGKILL" in error
