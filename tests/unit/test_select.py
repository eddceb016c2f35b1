"""The selector: the truth table, and what must hold for any table, any agreement and any forward."""

from __future__ import annotations

import ast
import csv
import inspect
import itertools
import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import EDGES, Row, agreements, axes, document, tables

from k3comm.errors import InputError
from k3comm.tiers import (
    UNLIMITED,
    Agreement,
    Axes,
    Tier,
    Windows,
    choose_windows,
    obstacle,
    packaged_windows,
    parse_windows,
    select_tier,
)

TRUTH_TABLE = Path(__file__).parent / "data" / "tier_truth_table.csv"
TRUTHS = 71
"""Rows of the table. A file that lost some would otherwise pass."""

ALL = Agreement.of(Tier)
DEFAULT = choose_windows("default", 8).windows
HOST = choose_windows("host", 2).windows


class AttentionTier(IntEnum):
    """Another operation's tiers: selection knows nothing of the tail's."""

    ONE_SHOT = 1
    TWO_SHOT = 2
    LIBRARY = 3


def truths() -> list[dict[str, str]]:
    with TRUTH_TABLE.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def select(table: dict[Any, Row], agreement: Agreement[Any], forward: Axes, tiers: type[Any] = Tier) -> Any:
    return select_tier(axes=forward, agreement=agreement, windows=parse_windows(document(table), tiers))


def worth(row: Row, forward: Axes) -> bool:
    """Whether a window holds, from the plain values it was written from."""
    ranges, graph, decode = row
    inside = any(first <= forward.num_tokens and (last is None or forward.num_tokens <= last) for first, last in ranges)
    allowed = {"any": (True, False), "only": (True,), "never": (False,)}
    return inside and forward.graph in allowed[graph] and forward.decode in allowed[decode]


# The truth table


def test_the_truth_table_is_whole() -> None:
    rows = truths()
    assert len(rows) == TRUTHS
    assert {row["expected"] for row in rows} == {
        "MNNVL_CUTEDSL",
        "TAIL_FUSION",
        "MULTIMEM_AR",
        "FUSED_LANE_AR",
        "SEPARATE_REDUCE",
    }
    assert all(value is not None for row in rows for value in row.values())


@pytest.mark.parametrize("row", [pytest.param(row, id=f"row{n}") for n, row in enumerate(truths(), 1)])
def test_truth_table(row: dict[str, str]) -> None:
    limits = dict(pair.split(":") for pair in row["capacities"].split(";") if pair)
    agreement = Agreement.of(
        [Tier[name] for name in row["agreed"].split("+")], {Tier[name]: int(rows) for name, rows in limits.items()}
    )
    forward = Axes(num_tokens=int(row["num_tokens"]), graph=row["graph"] == "1", decode=row["decode"] == "1")
    assert select_tier(axes=forward, agreement=agreement, windows=DEFAULT) is Tier[row["expected"]]


# The packaged tables, with every tier agreed


@pytest.mark.parametrize(
    ("num_tokens", "whole", "sharded"),
    [
        (0, Tier.FUSED_LANE_AR, Tier.FUSED_LANE_AR),
        (1, Tier.TAIL_FUSION, Tier.TAIL_FUSION),
        (16, Tier.TAIL_FUSION, Tier.TAIL_FUSION),
        (17, Tier.PEER_AR, Tier.PEER_AR),
        (255, Tier.PEER_AR, Tier.PEER_AR),
        (256, Tier.SEQUENCE_PARALLEL, Tier.COLUMN_PARALLEL),
        (8193, Tier.SEQUENCE_PARALLEL, Tier.COLUMN_PARALLEL),
        (10**9, Tier.SEQUENCE_PARALLEL, Tier.COLUMN_PARALLEL),
    ],
)
@pytest.mark.parametrize(("graph", "decode"), list(itertools.product([False, True], repeat=2)))
def test_host_windows_hold_in_any_phase(num_tokens: int, whole: Tier, sharded: Tier, graph: bool, decode: bool) -> None:
    forward = Axes(num_tokens=num_tokens, graph=graph, decode=decode)
    assert select_tier(axes=forward, agreement=ALL, windows=HOST) is whole
    # A sharded W_up narrows the agreement: SEQUENCE_PARALLEL needs the whole of it.
    narrowed = ALL.without([Tier.SEQUENCE_PARALLEL])
    assert select_tier(axes=forward, agreement=narrowed, windows=HOST) is sharded


# Any table, any agreement, any forward


@given(tables(), agreements(), axes)
def test_the_first_agreed_match_wins(table: dict[Tier, Row], agreement: Agreement[Tier], forward: Axes) -> None:
    windows = parse_windows(document(table), Tier)
    winner = select_tier(axes=forward, agreement=agreement, windows=windows)
    assert winner in agreement
    assert obstacle(winner, forward, agreement, windows) is None
    assert all(obstacle(tier, forward, agreement, windows) is not None for tier in Tier if tier < winner)


@given(tables(), agreements(), axes)
def test_the_winner_by_brute_force(table: dict[Tier, Row], agreement: Agreement[Tier], forward: Axes) -> None:
    """The same from the plain values, without the library's ranges, phases and order."""
    able = [
        tier
        for tier, rows in agreement.capacities.items()
        if tier in table and worth(table[tier], forward) and (rows == UNLIMITED or forward.num_tokens <= rows)
    ]
    assert select(table, agreement, forward) is min(able)


@pytest.mark.parametrize("windows", packaged_windows(), ids=lambda windows: windows.source)
@given(st.one_of(st.sampled_from(EDGES), st.integers(0, 10**9)), st.booleans(), st.booleans(), agreements())
def test_every_count_has_a_tier(
    windows: Windows[Tier], num_tokens: int, graph: bool, decode: bool, agreement: Agreement[Tier]
) -> None:
    forward = Axes(num_tokens=num_tokens, graph=graph, decode=decode)
    assert select_tier(axes=forward, agreement=agreement, windows=windows) in agreement


@given(st.integers(0, 2**80), axes)
def test_the_last_tier_alone_takes_everything(num_tokens: int, forward: Axes) -> None:
    forward = attrs.evolve(forward, num_tokens=num_tokens)
    assert select_tier(axes=forward, agreement=Agreement.of([max(Tier)]), windows=DEFAULT) is max(Tier)


@given(tables(), agreements(), axes, st.sampled_from(Tier), st.integers(1, UNLIMITED))
def test_one_more_tier_never_makes_it_worse(
    table: dict[Tier, Row], agreement: Agreement[Tier], forward: Axes, tier: Tier, rows: int
) -> None:
    before = select(table, agreement, forward)
    more: Agreement[Tier] = Agreement({tier: rows, **agreement.capacities})
    assert select(table, more, forward) <= before
    fewer = agreement.without({tier} - {max(Tier)})
    assert select(table, fewer, forward) >= before


@given(tables(), agreements(), axes, st.data())
def test_more_capacity_never_makes_it_worse(
    table: dict[Tier, Row], agreement: Agreement[Tier], forward: Axes, data: st.DataObject
) -> None:
    tier = data.draw(st.sampled_from(list(agreement.capacities)))
    rows = data.draw(st.integers(agreement.capacities[tier], UNLIMITED))
    raised: Agreement[Tier] = Agreement({**agreement.capacities, tier: rows})
    assert select(table, raised, forward) <= select(table, agreement, forward)


@settings(max_examples=50)
@given(tables(), agreements(), axes, st.data())
def test_what_is_not_agreed_changes_nothing(
    table: dict[Tier, Row], agreement: Agreement[Tier], forward: Axes, data: st.DataObject
) -> None:
    agreed_rows = {tier: row for tier, row in table.items() if tier in agreement}
    assert select(agreed_rows, agreement, forward) is select(table, agreement, forward)


# Nothing else decides


@settings(max_examples=50)
@given(tables(), agreements(), axes, st.data())
def test_order_and_origin_change_nothing(
    table: dict[Tier, Row], agreement: Agreement[Tier], forward: Axes, data: st.DataObject
) -> None:
    rows = dict(data.draw(st.permutations(list(table.items()))))
    shuffled: Agreement[Tier] = Agreement(dict(data.draw(st.permutations(list(agreement.capacities.items())))))
    assert shuffled == agreement
    assert list(shuffled.capacities) == sorted(shuffled.capacities)
    origin = {"family": "sm90", "world_size": 3, "provenance": "elsewhere", "settings": {"pdl": False}}
    windows = parse_windows(document(rows, **origin), Tier, "elsewhere.toml")
    expected = select(table, agreement, forward)
    for _ in range(2):
        assert select_tier(axes=forward, agreement=shuffled, windows=windows) is expected


def test_a_selection_depends_on_three_things() -> None:
    parameters = inspect.signature(select_tier).parameters
    assert list(parameters) == ["axes", "agreement", "windows"]
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.KEYWORD_ONLY}
    # The axes are equal on all ranks by construction. No host, device, rank or time is among them.
    assert [field.name for field in attrs.fields(Axes)] == ["num_tokens", "graph", "decode"]
    assert [field.name for field in attrs.fields(Agreement)] == ["capacities"]


def test_the_selector_sees_neither_machine_nor_time() -> None:
    folder = Path(inspect.getfile(select_tier)).parent
    imported: set[str] = set()
    for name in ("select.py", "axes.py"):
        for node in ast.walk(ast.parse((folder / name).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported.update(alias.name for alias in node.names)
            if isinstance(node, ast.ImportFrom):
                imported.add(node.module or ".")
    assert imported <= {
        "__future__", "attrs", "collections.abc", "enum", "types", "typing",
        "k3comm.errors", "k3comm.tiers.axes", "k3comm.tiers.windows",
    }  # fmt: skip


def test_the_same_choice_in_another_process() -> None:
    """Another hash seed, another environment, another folder: the choices of the whole default table are the same."""
    program = """
import itertools
from k3comm.tiers import *
table = choose_windows("default", 8).windows
edges = (0, 1, 16, 17, 255, 256, 8192, 8193)
print([
    select_tier(axes=Axes(num_tokens=m, graph=g, decode=d), agreement=Agreement.of(set(Tier)), windows=table).name
    for m, g, d in itertools.product(edges, (False, True), (False, True))
])
"""
    root = str(Path(__file__).parents[2])
    runs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONPATH": root, "PYTHONHASHSEED": seed, "K3COMM_FORCE": "SEPARATE_REDUCE"},
            cwd="/",
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(runs) == 1
    assert "MNNVL_CUTEDSL" in runs.pop()


def test_arguments_are_given_by_name() -> None:
    with pytest.raises(TypeError, match="positional"):
        select_tier(Axes(num_tokens=1), ALL, DEFAULT)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        Axes(1)  # type: ignore[call-arg]


# Another enum


ATTENTION = {
    "schema": 1,
    "tiers": {
        "ONE_SHOT": {"tokens": ["1..4"], "graph": "only"},
        "TWO_SHOT": {"tokens": ["1..2", "5..16"]},
        "LIBRARY": {"tokens": ["0.."]},
    },
}


@pytest.mark.parametrize(
    ("num_tokens", "graph", "expected"),
    [
        (0, True, AttentionTier.LIBRARY),
        (1, True, AttentionTier.ONE_SHOT),
        (4, True, AttentionTier.ONE_SHOT),
        (1, False, AttentionTier.TWO_SHOT),
        (3, False, AttentionTier.LIBRARY),
        (5, True, AttentionTier.TWO_SHOT),
        (16, False, AttentionTier.TWO_SHOT),
        (17, True, AttentionTier.LIBRARY),
    ],
)
def test_another_operations_tiers(num_tokens: int, graph: bool, expected: AttentionTier) -> None:
    windows = parse_windows(ATTENTION, AttentionTier)
    forward = Axes(num_tokens=num_tokens, graph=graph, decode=True)
    chosen = select_tier(axes=forward, agreement=Agreement.of(AttentionTier), windows=windows)
    assert chosen is expected


@given(tables(AttentionTier), agreements(AttentionTier), axes)
def test_the_first_match_wins_in_another_enum(
    table: dict[AttentionTier, Row], agreement: Agreement[AttentionTier], forward: Axes
) -> None:
    winner = select(table, agreement, forward, AttentionTier)
    assert type(winner) is AttentionTier
    able = [
        tier
        for tier, rows in agreement.capacities.items()
        if tier in table and worth(table[tier], forward) and (rows == UNLIMITED or forward.num_tokens <= rows)
    ]
    assert winner is min(able)


# Obstacles, in words


@pytest.mark.parametrize(
    ("tier", "forward", "expected"),
    [
        (Tier.TAIL_FUSION, Axes(num_tokens=8, graph=True), None),
        (Tier.TAIL_FUSION, Axes(num_tokens=0, graph=True), "0 tokens are outside its window 1..16"),
        (Tier.TAIL_FUSION, Axes(num_tokens=17, graph=True), "17 tokens are outside its window 1..16"),
        (Tier.TAIL_FUSION, Axes(num_tokens=8), "its window is graph only, this forward has graph=False"),
        (Tier.MNNVL_CUTEDSL, Axes(num_tokens=8), "its window is graph only, this forward has graph=False"),
        (
            Tier.MNNVL_CUTEDSL,
            Axes(num_tokens=8, graph=True),
            "its window is decode only, this forward has decode=False",
        ),
        (
            Tier.MULTIMEM_AR,
            Axes(num_tokens=256, decode=True),
            "its window is decode never, this forward has decode=True",
        ),
        (Tier.PEER_AR, Axes(num_tokens=64), "its window is empty (not measured)"),
        (Tier.SEPARATE_REDUCE, Axes(num_tokens=64), None),
    ],
)
def test_obstacle_of_a_window(tier: Tier, forward: Axes, expected: str | None) -> None:
    assert obstacle(tier, forward, ALL, DEFAULT) == expected


def test_obstacle_lists_every_range() -> None:
    windows = parse_windows(ATTENTION, AttentionTier)
    forward = Axes(num_tokens=3)
    everything = Agreement.of(AttentionTier)
    assert obstacle(AttentionTier.TWO_SHOT, forward, everything, windows) == (
        "3 tokens are outside its window 1..2, 5..16"
    )


def test_obstacle_not_agreed() -> None:
    agreement = ALL.without([Tier.TAIL_FUSION])
    assert obstacle(Tier.TAIL_FUSION, Axes(num_tokens=8, graph=True), agreement, DEFAULT) == "not agreed"


def test_obstacle_without_a_row_names_the_file() -> None:
    agreement = Agreement.of(AttentionTier)
    rows = {"LIBRARY": {"tokens": ["0.."]}}
    named = parse_windows({"schema": 1, "tiers": rows}, AttentionTier, "mine.toml")
    nameless = parse_windows({"schema": 1, "family": "sm90", "tiers": rows}, AttentionTier)
    tier, forward = AttentionTier.ONE_SHOT, Axes(num_tokens=1)
    assert obstacle(tier, forward, agreement, named) == "no row in the windows (mine.toml): only by force"
    assert obstacle(tier, forward, agreement, nameless) == "no row in the windows (sm90): only by force"


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [(4096, None), (4097, "4097 tokens exceed the 4096 that all ranks can take")],
)
def test_obstacle_of_a_capacity(num_tokens: int, expected: str | None) -> None:
    agreement = Agreement.of(Tier, {Tier.MULTIMEM_AR: 4096})
    assert obstacle(Tier.MULTIMEM_AR, Axes(num_tokens=num_tokens), agreement, DEFAULT) == expected


def test_the_window_tops_a_larger_capacity() -> None:
    agreement = Agreement.of(Tier, {Tier.TAIL_FUSION: 64})
    assert obstacle(Tier.TAIL_FUSION, Axes(num_tokens=32, graph=True), agreement, DEFAULT) == (
        "32 tokens are outside its window 1..16"
    )


# Axes and agreements that are not accepted


@pytest.mark.parametrize("value", [-1, True, 1.0, "1", None, float("nan")])
def test_axes_refuse_what_is_no_count(value: Any) -> None:
    with pytest.raises(InputError) as error:
        Axes(num_tokens=value)
    assert str(error.value) == f"num_tokens: {value!r} given; accepted are whole numbers from 0"


@pytest.mark.parametrize("name", ["graph", "decode"])
@pytest.mark.parametrize("value", [0, 1, None, "true"])
def test_axes_refuse_what_is_no_boolean(name: str, value: Any) -> None:
    with pytest.raises(InputError) as error:
        Axes(num_tokens=1, **{name: value})
    assert str(error.value) == f"{name}: {value!r} given; accepted are True and False"


def test_axes_default_to_an_eager_prefill() -> None:
    assert Axes(num_tokens=3) == Axes(num_tokens=3, graph=False, decode=False)


@pytest.mark.parametrize("rows", [0, -1, UNLIMITED + 1, True, 1.0, "16", None])
def test_agreement_refuses_bad_capacities(rows: Any) -> None:
    with pytest.raises(InputError) as error:
        Agreement({Tier.TAIL_FUSION: rows, Tier.SEPARATE_REDUCE: UNLIMITED})
    assert str(error.value) == f"agreement: TAIL_FUSION: {rows!r} rows given; accepted are 1 to {UNLIMITED}"


@pytest.mark.parametrize(
    "capacities",
    [{Tier.TAIL_FUSION: 16}, {Tier.SEPARATE_REDUCE: 8192}, {Tier.TAIL_FUSION: 16, Tier.SEPARATE_REDUCE: 1}],
)
def test_agreement_needs_the_last_tier_without_limit(capacities: dict[Tier, int]) -> None:
    with pytest.raises(InputError) as error:
        Agreement(capacities)
    assert str(error.value) == ("agreement: SEPARATE_REDUCE is missing or limited; it takes what no other tier does")


def test_agreement_needs_a_tier() -> None:
    with pytest.raises(InputError) as error:
        Agreement({})
    assert str(error.value) == "agreement: no tier given; accepted are sets that hold the enum's last member"


@pytest.mark.parametrize(
    "capacities",
    [
        {"TAIL_FUSION": UNLIMITED},
        {80: UNLIMITED},
        {AttentionTier.LIBRARY: UNLIMITED, Tier.SEPARATE_REDUCE: UNLIMITED},
        {AttentionTier.ONE_SHOT: 1, Tier.SEPARATE_REDUCE: UNLIMITED},
    ],
)
def test_agreement_is_on_one_enum(capacities: dict[Any, int]) -> None:
    with pytest.raises(InputError, match=r"^agreement: \[.*\] given; accepted are members of one enum of tiers$"):
        Agreement(capacities)


def test_agreement_cannot_lose_the_last_tier() -> None:
    with pytest.raises(InputError, match=r"^agreement: SEPARATE_REDUCE is missing"):
        ALL.without([Tier.SEPARATE_REDUCE])


def test_agreement_is_a_value() -> None:
    limited = Agreement.of(Tier, {Tier.TAIL_FUSION: 16})
    assert limited.capacities[Tier.TAIL_FUSION] == 16
    assert {rows for tier, rows in limited.capacities.items() if tier is not Tier.TAIL_FUSION} == {UNLIMITED}
    assert list(limited.capacities) == list(Tier)
    assert Tier.TAIL_FUSION in limited
    assert Tier.TAIL_FUSION not in limited.without([Tier.TAIL_FUSION])
    assert limited.without([]) == limited
    rows = {Tier.SEPARATE_REDUCE: UNLIMITED}
    agreement: Agreement[Tier] = Agreement(rows)
    rows[Tier.TAIL_FUSION] = 16
    assert Tier.TAIL_FUSION not in agreement
    with pytest.raises(TypeError):
        agreement.capacities[Tier.TAIL_FUSION] = 16  # type: ignore[index]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        agreement.capacities = rows  # type: ignore[misc]
