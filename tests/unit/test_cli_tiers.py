"""The map m -> tier: exact for any table and agreement, and shown as the selector has it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from strategies import Row, agreements, document, tables

from k3comm.cli import _choice, _console, main
from k3comm.cli.tier_map import KINDS, Span, in_step, tier_map
from k3comm.cli.tiers import map_table
from k3comm.tiers import (
    UNLIMITED,
    Agreement,
    Axes,
    Tier,
    TokenRange,
    choose_windows,
    parse_windows,
    plugins,
    select_tier,
)

DEFAULT = choose_windows("default", 8).windows
ALL = Agreement.of(Tier)
LAST = max(Tier)


def found(spans: tuple[Span, ...], num_tokens: int) -> Tier:
    (tier,) = [span.tier for span in spans if span.tokens.holds(num_tokens)]
    return tier


@given(tables(), agreements())
def test_the_map_is_the_selector(table: dict[Tier, Row], agreement: Agreement[Tier]) -> None:
    windows = parse_windows(document(table), Tier)
    spans = tier_map(agreement, windows)
    ends = {end for rows in agreement.capacities.values() for end in (rows, rows + 1) if end <= UNLIMITED}
    for kind in KINDS:
        for num_tokens in {*range(1, 45), *ends}:
            axes = Axes(num_tokens=num_tokens, graph=kind.graph, decode=kind.decode)
            assert found(spans[kind], num_tokens) is select_tier(axes=axes, agreement=agreement, windows=windows)


@given(tables(), agreements())
def test_spans_are_whole(table: dict[Tier, Row], agreement: Agreement[Tier]) -> None:
    spans = tier_map(agreement, parse_windows(document(table), Tier))
    assert tuple(spans) == KINDS
    for row in spans.values():
        assert row[0].tokens.first == 1
        assert row[-1].tokens.last is None
        for before, after in pairwise(row):
            assert before.tokens.last == after.tokens.first - 1
            assert before.tier is not after.tier
    for tokens, tiers in in_step(spans):
        ends = (tokens.first, tokens.first if tokens.last is None else tokens.last)
        assert all(tiers == tuple(found(row, end) for row in spans.values()) for end in ends)


def test_the_default_map() -> None:
    agreement = Agreement.of(Tier, {Tier.MULTIMEM_AR: 4096})
    assert [
        (str(tokens), [tier.name for tier in tiers]) for tokens, tiers in in_step(tier_map(agreement, DEFAULT))
    ] == [
        ("1..16", ["MNNVL_CUTEDSL", "FUSED_LANE_AR", "FUSED_LANE_AR", "TAIL_FUSION"]),
        ("17..255", ["FUSED_LANE_AR"] * 4),
        ("256..4096", ["FUSED_LANE_AR", "FUSED_LANE_AR", "MULTIMEM_AR", "MULTIMEM_AR"]),
        ("4097..", ["FUSED_LANE_AR"] * 4),
    ]


def test_the_map_of_the_last_tier_alone() -> None:
    spans = tier_map(Agreement.of([LAST]), DEFAULT)
    assert set(spans.values()) == {(Span(TokenRange(1), LAST),)}


def test_kinds_that_agree_share_a_column() -> None:
    table = map_table(tier_map(ALL, choose_windows("host", 4).windows))
    assert table.columns == [">m", "any forward"]
    assert [[str(cell) for cell in row] for row in table.rows] == [
        ["1..16", "TAIL_FUSION"],
        ["17..255", "PEER_AR"],
        ["256..", "SEQUENCE_PARALLEL"],
    ]
    table = map_table(tier_map(ALL, DEFAULT))
    assert table.columns == [">m", "decode, graph", "decode, eager", "prefill, eager", "prefill, graph"]


# --agreed


@pytest.mark.parametrize(
    ("text", "capacities"),
    [
        ("TAIL_FUSION", {"TAIL_FUSION": UNLIMITED}),
        (" tail_fusion:4 , Multimem_AR ", {"TAIL_FUSION": 4, "MULTIMEM_AR": UNLIMITED}),
        ("SEPARATE_REDUCE", {}),
        (f"PEER_AR:{UNLIMITED}", {"PEER_AR": UNLIMITED}),
    ],
)
def test_agreed(text: str, capacities: dict[str, int]) -> None:
    agreement = _choice.agreement(text)
    assert {tier.name: rows for tier, rows in agreement.capacities.items()} == capacities | {LAST.name: UNLIMITED}
    assert _choice.agreement(_choice.show_agreement(agreement)) == agreement


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "no tier is called ''"),
        ("TAIL_FUSION,", "no tier is called ''"),
        ("TAIL_FUSIN", "no tier is called 'TAIL_FUSIN'; accepted are MNNVL_CUTEDSL"),
        ("TAIL_FUSION:0", "'0' given; accepted are whole numbers from 1"),
        ("TAIL_FUSION:", "'' given; accepted are whole numbers from 1"),
        ("TAIL_FUSION:-1", "'-1' given"),
        ("TAIL_FUSION:1e3", "'1e3' given"),
        ("TAIL_FUSION:1:2", "'1:2' given"),
        (f"TAIL_FUSION:{UNLIMITED + 1}", f"{UNLIMITED + 1}' given"),
        ("TAIL_FUSION:" + "9" * 5000, "given; accepted are whole numbers"),
        ("TAIL_FUSION,tail_fusion:3", "TAIL_FUSION is given twice"),
        ("SEPARATE_REDUCE:16", "SEPARATE_REDUCE takes any number of rows"),
    ],
)
def test_agreed_that_is_not_accepted(text: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["tiers", "--agreed", text])
    assert caught.value.code == 2
    assert error in capsys.readouterr().err


# The command


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["tiers", "--json", *arguments]) == 0
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return value


def test_this_machine(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    shown = run_json(capsys)
    assert shown["windows"]["family"] == "host"
    assert set(shown["agreed"]) <= {tier.name for tier in plugins()}
    assert {LAST.name, "FUSED_LANE_AR"} <= set(shown["agreed"])
    assert set(shown["agreed"]) | set(shown["why_not"]) == set(Tier.__members__)
    absent = {tier.name for tier in Tier if tier not in plugins()}
    assert {name for name, why in shown["why_not"].items() if why == "not part of this version"} == absent


def test_this_machine_heeds_shapes_and_settings(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("K3COMM_DISABLE", "FUSED_LANE_AR")
    monkeypatch.setenv("K3COMM_FORCE", "SEPARATE_REDUCE")
    shown = run_json(capsys, "--ranks", "3")
    assert shown["why_not"]["COLUMN_PARALLEL"] == "hidden_size is not a multiple of 3"
    assert "K3COMM_DISABLE" in shown["why_not"]["FUSED_LANE_AR"]
    assert "force (K3COMM_FORCE): a communicator uses SEPARATE_REDUCE for every m" in shown["notes"]
    assert list(run_json(capsys, "--ranks", "1")["agreed"]) == [LAST.name]


def test_a_forced_tier_that_is_not_agreed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("K3COMM_FORCE", "MULTIMEM_AR")
    assert main(["tiers"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("k3comm: force (K3COMM_FORCE): MULTIMEM_AR is asked for by name and not agreed; ")
    for agreed, said in (
        ("FUSED_LANE_AR", "MULTIMEM_AR is not agreed, so a communicator raises"),
        ("MULTIMEM_AR:64", "a communicator uses MULTIMEM_AR for m <= 64, and raises beyond"),
    ):
        assert f"force (K3COMM_FORCE): {said}" in run_json(capsys, "--agreed", agreed)["notes"]


@pytest.mark.parametrize("by_variable", [False, True])
def test_the_settings_of_a_windows_file(
    by_variable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    path = tmp_path / "mine.toml"
    if by_variable:
        monkeypatch.setenv("K3COMM_WINDOWS", str(path))
    arguments = [] if by_variable else ["--windows", str(path)]
    rows = 'schema = 1\n[tiers.SEQUENCE_PARALLEL]\ntokens = ["1.."]\n[tiers.SEPARATE_REDUCE]\ntokens = ["0.."]\n'

    path.write_text(rows)
    assert {span["tier"] for span in run_json(capsys, *arguments)["map"][0]["spans"]} == {"SEQUENCE_PARALLEL"}
    path.write_text(f'{rows}[settings]\ndisabled = ["SEQUENCE_PARALLEL"]\n')
    shown = run_json(capsys, *arguments)
    assert {span["tier"] for span in shown["map"][0]["spans"]} == {LAST.name}
    assert "SEQUENCE_PARALLEL" not in shown["agreed"]
    given = run_json(capsys, *arguments, "--agreed", "SEQUENCE_PARALLEL")
    assert f"agreed as given, though disabled ({path}): SEQUENCE_PARALLEL" in given["notes"]
    monkeypatch.setenv("K3COMM_DISABLE", "FUSED_LANE_AR")
    assert "SEQUENCE_PARALLEL" in run_json(capsys, *arguments)["agreed"], "the environment wins"

    path.write_text(f'{rows}[settings]\nforce = "MULTIMEM_AR"\n')
    assert main(["tiers", *arguments]) == 2
    assert f"force ({path}): MULTIMEM_AR is asked for by name" in capsys.readouterr().err
    for line, error in (
        ("bogus = 3", "[settings] bogus: not a setting of a windows file"),
        ("pdl = 3", f"{path} (pdl): "),
    ):
        path.write_text(f"{rows}[settings]\n{line}\n")
        for extra in ([], ["--agreed", "SEQUENCE_PARALLEL"]):
            assert main(["tiers", *arguments, *extra]) == 2
            captured = capsys.readouterr()
            assert captured.out == ""
            assert error in captured.err


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    shown = run_json(capsys, "--agreed", "TAIL_FUSION:8,FUSED_LANE_AR")
    assert shown["windows"]["source"] == "default.toml"
    assert shown["windows"]["rows"]["TAIL_FUSION"] == "1..16, graph only"
    assert shown["agreed"] == {"TAIL_FUSION": 8, "FUSED_LANE_AR": None, "SEPARATE_REDUCE": None}
    assert [(kind["decode"], kind["graph"]) for kind in shown["map"]] == [
        (True, True), (True, False), (False, False), (False, True),
    ]  # fmt: skip
    assert shown["map"][0]["spans"] == [
        {"first": 1, "last": 8, "tier": "TAIL_FUSION"},
        {"first": 9, "last": None, "tier": "FUSED_LANE_AR"},
    ]
    assert shown["notes"] == ["SEPARATE_REDUCE is always agreed, also if --agreed does not name it"]


def test_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_console, "import_failure", lambda *modules: ImportError())
    assert main(["tiers", "--agreed", "TAIL_FUSION,PEER_AR,FUSED_LANE_AR"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "windows: default.toml (family default, any number of ranks)" in lines
    assert "agreed: TAIL_FUSION,PEER_AR,FUSED_LANE_AR,SEPARATE_REDUCE" in lines
    assert "m decode, graph decode, eager prefill, eager prefill, graph" in lines
    assert "1..16 TAIL_FUSION FUSED_LANE_AR FUSED_LANE_AR TAIL_FUSION" in lines
    assert "17.. FUSED_LANE_AR FUSED_LANE_AR FUSED_LANE_AR FUSED_LANE_AR" in lines
    assert "PEER_AR any m none never chosen: only by force" in lines
    assert "SEPARATE_REDUCE any m 0.. never chosen: a better tier holds wherever it does" in lines
    assert "MULTIMEM_AR no 256..8192, decode never not agreed" in lines


def test_a_sharded_projection_takes_tiers_away(capsys: pytest.CaptureFixture[str]) -> None:
    tiers = "SEQUENCE_PARALLEL,COLUMN_PARALLEL,FUSED_LANE_AR"
    whole, sharded = (run_json(capsys, "--family", "host", "--agreed", tiers, *extra) for extra in ((), ("--sharded",)))
    assert [span["tier"] for span in whole["map"][0]["spans"]] == ["FUSED_LANE_AR", "SEQUENCE_PARALLEL"]
    assert [span["tier"] for span in sharded["map"][0]["spans"]] == ["FUSED_LANE_AR", "COLUMN_PARALLEL"]
    assert "sharded" in sharded["why_not"]["SEQUENCE_PARALLEL"]


# Which windows


def write_windows(path: Path, family: str = "mine", tokens: str = "1..3") -> Path:
    path.write_text(
        f'schema = 1\nfamily = "{family}"\nworld_size = 2\n[tiers.TAIL_FUSION]\ntokens = ["{tokens}"]\n'
        '[tiers.SEPARATE_REDUCE]\ntokens = ["0.."]\n'
    )
    return path


def test_windows_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = write_windows(tmp_path / "mine.toml")
    given = run_json(capsys, "--agreed", "TAIL_FUSION", "--windows", str(mine))
    assert given["windows"]["source"] == str(mine)
    assert given["map"][0]["spans"][0]["last"] == 3
    other = write_windows(tmp_path / "other.toml", tokens="1..5")
    monkeypatch.setenv("K3COMM_WINDOWS", str(other))
    by_variable = run_json(capsys, "--agreed", "TAIL_FUSION")
    assert by_variable["map"][0]["spans"][0]["last"] == 5
    assert "windows file from K3COMM_WINDOWS" in by_variable["notes"]
    for arguments, last in ((["--windows", str(mine)], 3), (["--family", "default"], 16)):
        shown = run_json(capsys, "--agreed", "TAIL_FUSION", *arguments)
        assert shown["map"][0]["spans"][0]["last"] == last, "an argument wins over the environment"


def test_windows_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = run_json(capsys, "--agreed", "TAIL_FUSION", "--family", "sm1")
    assert shown["windows"]["family"] == "default"
    assert any("sm1" in note for note in shown["notes"])
    assert main(["tiers", "--windows", str(tmp_path / "none.toml"), "--agreed", "TAIL_FUSION"]) == 2
    assert "none.toml: can't be read" in capsys.readouterr().err
    bad = write_windows(tmp_path / "bad.toml", tokens="3..1")
    assert main(["tiers", "--windows", str(bad), "--agreed", "TAIL_FUSION"]) == 2
    assert "bad.toml: [tiers.TAIL_FUSION]" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main(["tiers", "--windows", str(bad), "--family", "host"])
    assert caught.value.code == 2


@pytest.mark.parametrize("family", ["default", "host"])
@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot(family: str, suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"map.{suffix}"
    tiers = "MNNVL_CUTEDSL:3,TAIL_FUSION,MULTIMEM_AR:300,FUSED_LANE_AR:1000000"
    assert main(["tiers", "--family", family, "--agreed", tiers, "--plot", str(path)]) == 0
    assert f"drawn in {path}" in capsys.readouterr().out
    start = path.read_bytes()[:8]
    assert start == b"\x89PNG\r\n\x1a\n" if suffix == "png" else b"<?xml" in start
    if suffix == "svg":
        drawn = path.read_text()
        assert "<!-- TAIL_FUSION -->" in drawn
        assert ("<!-- MULTIMEM_AR -->" in drawn) == (family == "default")
        assert "<!-- PEER_AR -->" not in drawn
