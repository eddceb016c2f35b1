"""Replays: the selector is asked for every forward, and the sums add up."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import attrs
import pytest

from k3comm.cli import _console, main
from k3comm.cli import replay as command
from k3comm.cli._plots import _edges
from k3comm.cli.replay import Tally, replay
from k3comm.cli.schedule import StepCost, rows_of, schedule
from k3comm.cli.trace import CITATION, Request, Trace, packaged_trace
from k3comm.tiers import Agreement, Axes, Tier, choose_windows, select_tier

DEFAULT = choose_windows("default", 8).windows
AGREED = Agreement.of([Tier.TAIL_FUSION, Tier.MULTIMEM_AR, Tier.FUSED_LANE_AR, Tier.SEPARATE_REDUCE])

SMALL = "\n".join(
    [
        "TIMESTAMP,ContextTokens,GeneratedTokens",
        "2023-11-16 18:17:00.000000,300,3",
        "2023-11-16 18:17:00.000001,20,2",
        "2023-11-16 18:17:09.000000,5,4",
    ]
)
"""Forwards at 10 + m us: 300 prompt tokens; 20 and one decode row; one of two decode rows; later 5; three of one."""


@pytest.fixture
def small(tmp_path: Path) -> str:
    path = tmp_path / "small.csv"
    path.write_text(SMALL)
    return str(path)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["replay", "--json", *arguments]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    value: dict[str, Any] = json.loads(captured.out)
    return value


def test_a_small_trace(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = run_json(capsys, small, "--step-us", "10,1", "--layers", "7")
    assert {name: tier["forwards_by_tokens"] for name, tier in shown["tiers"].items()} == {
        "TAIL_FUSION": {"1": 3, "2": 1},
        "MULTIMEM_AR": {"300": 1},
        "FUSED_LANE_AR": {"5": 1, "21": 1},
    }
    assert shown["tiers"]["TAIL_FUSION"] == {
        "forwards": 4, "decode_forwards": 4, "tokens": 5, "layers": 28, "busy_seconds": 45e-6,
        "forwards_by_tokens": {"1": 3, "2": 1},
    }  # fmt: skip
    assert shown["tiers"]["FUSED_LANE_AR"]["decode_forwards"] == 0
    assert shown["total"]["forwards"] == 7
    assert shown["total"]["tokens"] == 300 + 20 + 5 + 2 + 1 + 3
    assert shown["total"]["layers"] == 49
    assert shown["total"]["most_decode_rows"] == 2
    assert shown["total"]["seconds"] == pytest.approx(9 + 48e-6)
    assert shown["trace"] == {"source": small, "citation": None, "requests": 3, "seconds": 9.0}
    assert shown["notes"] == [
        "agreed but never chosen here: SEPARATE_REDUCE",
    ]


def test_the_text(small: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_console, "import_failure", lambda *modules: ImportError())
    assert main(["replay", small, "--step-us", "10,1"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    lines = [" ".join(line.split()) for line in captured.out.splitlines()]
    assert f"trace: {small}, 3 requests in 9.00 s" in lines
    assert "windows: default.toml (family default, any number of ranks)" in lines
    assert "agreed: TAIL_FUSION,MULTIMEM_AR,FUSED_LANE_AR,SEPARATE_REDUCE" in lines
    assert "TAIL_FUSION 4 57.1 % 5 1.5 % 368 11.2 % 1 / 1 / 2" in lines
    assert "total 7 331 644 1 / 2 / 300" in lines
    assert "1 3 0 " + "#" * 40 in lines
    assert "257..512 0 1 " + "#" * 14 in lines
    assert CITATION not in captured.out


def test_the_excerpt_is_the_default_and_is_cited(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay"]) == 0
    assert CITATION in capsys.readouterr().out
    shown = run_json(capsys)
    requests = packaged_trace().requests
    assert shown["trace"]["citation"] == CITATION
    assert shown["trace"]["requests"] == len(requests)
    assert shown["layers"] == 92
    assert shown["schedule"] == {"max_batch": 256, "prefill_chunk": 2048, "step_us": [12000, 50], "rate": 1.0}
    assert shown["agreed"] == "TAIL_FUSION,MULTIMEM_AR,FUSED_LANE_AR,SEPARATE_REDUCE"
    assert shown["total"]["tokens"] == rows_of(requests)
    tiers = shown["tiers"].values()
    for total in ("forwards", "tokens", "layers"):
        assert sum(tier[total] for tier in tiers) == shown["total"][total]
    for tier in tiers:
        assert tier["layers"] == 92 * tier["forwards"]
        assert tier["tokens"] == sum(int(m) * count for m, count in tier["forwards_by_tokens"].items())
        assert tier["forwards"] == sum(tier["forwards_by_tokens"].values())
    assert shown["total"]["most_decode_rows"] < 256, "the help says that the default never binds"


def test_every_forward_is_the_selectors() -> None:
    requests = packaged_trace().requests[:200]
    tally = replay(Trace(requests=requests, source="t"), AGREED, DEFAULT)
    expected: dict[tuple[Tier, bool, int], int] = {}
    for forward in schedule(requests, max_batch=256, prefill_chunk=2048, cost=StepCost(12000, 50)):
        axes = Axes(num_tokens=forward.num_tokens, graph=forward.decode, decode=forward.decode)
        key = (select_tier(axes=axes, agreement=AGREED, windows=DEFAULT), forward.decode, forward.num_tokens)
        expected[key] = expected.get(key, 0) + 1
    assert dict(tally.counts) == expected


def test_agreement_and_windows_matter(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    shown = run_json(capsys, small, "--agreed", "TAIL_FUSION:1")
    assert set(shown["tiers"]) == {"TAIL_FUSION", "SEPARATE_REDUCE"}
    assert shown["tiers"]["TAIL_FUSION"]["forwards_by_tokens"] == {"1": 3}
    shown = run_json(capsys, small, "--family", "host", "--agreed", "PEER_AR,SEQUENCE_PARALLEL")
    assert shown["windows"]["source"] == "host.toml"
    assert set(shown["tiers"]) == {"PEER_AR", "SEQUENCE_PARALLEL", "SEPARATE_REDUCE"}


def test_rate_brings_requests_closer(capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = run_json(capsys), run_json(capsys, "--rate", "3")
    assert slow["total"]["tokens"] == fast["total"]["tokens"]
    assert fast["total"]["seconds"] < slow["total"]["seconds"] / 2
    assert fast["total"]["forwards"] < slow["total"]["forwards"]


def test_lines_out_of_order_are_told(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    header, *lines = SMALL.split("\n")
    Path(small).write_text("\n".join([header, *reversed(lines)]))
    assert run_json(capsys, small)["notes"][0].startswith("2 lines of the trace stood before an earlier request")


def test_a_bad_trace_is_one_line(small: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(small).write_text(SMALL.replace("300", "-300"))
    assert main(["replay", small]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        f"k3comm: {small}: line 2: ContextTokens: '-300' given; accepted are whole numbers from 1 to 10000000\n"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--max-batch", "0"], ["--prefill-chunk", "-1"], ["--layers", "x"], ["--ranks", "0"], ["--rate", "0"],
        ["--rate", "nan"], ["--rate", "x"], ["--step-us", "1"], ["--step-us", "1,2,3"], ["--step-us", "1,-1"],
        ["--step-us", "inf,1"], ["--step-us", "a,b"], ["--agreed", "X"], ["one.csv", "two.csv"],
    ],
    ids=" ".join,
)  # fmt: skip
def test_arguments_that_are_not_accepted(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["replay", *arguments])
    assert caught.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--step-us", "1e308,1e308"], "'1e308,1e308' given; accepted are two numbers from 0 to 1000000000"),
        (["--step-us", "1,1000000001"], "accepted are two numbers from 0 to 1000000000"),
        (["--rate", "1e-320"], "'1e-320' given; accepted are numbers from 0.000001 to 1000000"),
        (["--rate", "1000001"], "accepted are numbers from 0.000001 to 1000000"),
    ],
)
def test_arguments_beyond_what_can_be_added_up(
    arguments: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["replay", *arguments])
    assert caught.value.code == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("rate", ["0.000001", "1000000"])
def test_the_bounds_are_accepted(small: str, rate: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(small).write_text(f"{SMALL}\n9999-12-31 00:00:00,10000000,5")
    for cost in ("0,0", "1000000000,1000000000"):
        assert run_json(capsys, small, "--rate", rate, "--step-us", cost)["total"]["forwards"] > 7
        assert main(["replay", small, "--rate", rate, "--step-us", cost]) == 0
        capsys.readouterr()


def test_plot(small: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    for name, arguments in (("excerpt.png", []), ("small.svg", [small])):
        assert main(["replay", *arguments, "--plot", str(tmp_path / name)]) == 0
        assert f"drawn in {tmp_path / name}" in capsys.readouterr().out
    assert (tmp_path / "excerpt.png").read_bytes().startswith(b"\x89PNG")
    drawn = (tmp_path / "small.svg").read_text()
    assert all(f"<!-- {name} -->" in drawn for name in ("TAIL_FUSION", "MULTIMEM_AR", "FUSED_LANE_AR", "tokens"))


def test_bars_of_the_plot() -> None:
    assert _edges(1) == [0.5, 1.5, 2.5]
    assert _edges(16) == [0.5, 1.5, 2.5, 3.5, 4.5, 6.5, 8.5, 12.5, 16.5]
    assert _edges(17)[-2:] == [24.5, 32.5]


def test_an_hour_of_traffic_takes_a_moment() -> None:
    """Five times the excerpt, which is more than the whole trace that it is from."""
    trace = packaged_trace()
    span = trace.span + 10**6
    requests = [
        attrs.evolve(request, arrival=request.arrival + turn * span) for turn in range(5) for request in trace.requests
    ]
    started = time.process_time()
    tally = replay(Trace(requests=tuple(requests), source="t"), AGREED, DEFAULT)
    assert tally.tokens() == rows_of(requests)
    assert time.process_time() - started < 10


def test_tally() -> None:
    tally = Tally(StepCost(10, 1))
    tally.counts.update(
        {(Tier.TAIL_FUSION, True, 1): 2, (Tier.TAIL_FUSION, True, 3): 1, (Tier.FUSED_LANE_AR, False, 3): 4}
    )
    assert tally.tiers() == [Tier.TAIL_FUSION, Tier.FUSED_LANE_AR]
    assert (tally.forwards(), tally.forwards(Tier.TAIL_FUSION), tally.forwards(decode=False)) == (7, 3, 4)
    assert tally.forwards(first=2, last=3) == 5
    assert (tally.tokens(), tally.tokens(Tier.TAIL_FUSION)) == (17, 5)
    assert (tally.time(), tally.time(Tier.FUSED_LANE_AR)) == (87, 52)
    assert tally.sizes() == {1: 2, 3: 5}


@pytest.mark.parametrize(
    ("sizes", "median"), [({3: 1}, 3), ({1: 2, 3: 1}, 1), ({1: 1, 3: 1}, 1), ({1: 1, 2: 1, 9: 1}, 2), ({1: 1, 5: 9}, 5)]
)
def test_median(sizes: dict[int, int], median: int) -> None:
    assert command._median(sizes) == median


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (0, "0.00 s"),
        (1_500_000, "1.50 s"),
        (59_994_000, "59.99 s"),
        (119_700_000, "2 min 00 s"),
        (3.6e9, "60 min 00 s"),
    ],
)
def test_duration(microseconds: float, text: str) -> None:
    assert command._duration(microseconds) == text


def test_the_request_rows_are_those_of_the_schedule() -> None:
    assert rows_of([Request(0, 3, 0), Request(0, 4, 1), Request(0, 5, 3)]) == 14
