"""Windows files: what ships, which one is chosen, and the text of everything that is refused."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from enum import IntEnum
from importlib import resources
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies import Row, document, rows, tables

from k3comm.errors import WindowsError
from k3comm.tiers import (
    Axes,
    Phase,
    Tier,
    TokenRange,
    Window,
    Windows,
    choose_windows,
    load_windows,
    packaged_windows,
    parse_windows,
)

TIERS = (
    "MNNVL_CUTEDSL, TAIL_FUSION, MULTIMEM_AR, PEER_AR, SEQUENCE_PARALLEL, COLUMN_PARALLEL, FUSED_LANE_AR, "
    "SEPARATE_REDUCE"
)
LAST = {"SEPARATE_REDUCE": {"tokens": ["0.."]}}


def table(family: str, world_size: int, source: str = "") -> Windows[Tier]:
    """A valid table that differs from others in its origin only."""
    given = {"schema": 1, "family": family, "world_size": world_size, "tiers": LAST}
    return parse_windows(given, Tier, source or f"{family}_{world_size}.toml")


def refusal(given: Mapping[str, Any], source: str = "mine.toml") -> str:
    with pytest.raises(WindowsError) as error:
        parse_windows(given, Tier, source)
    return str(error.value)


def refused_row(row: Any) -> str:
    """The refusal of a row of TAIL_FUSION, less the file and the place, which it must name."""
    text = refusal({"schema": 1, "tiers": {"TAIL_FUSION": row, **LAST}})
    place = "mine.toml: [tiers.TAIL_FUSION]: "
    assert text.startswith(place)
    return text.removeprefix(place)


# What ships


def test_packaged_files() -> None:
    names = [windows.source for windows in packaged_windows()]
    assert names == sorted(names)
    assert {"default.toml", "host.toml"} <= set(names)
    folder = resources.files("k3comm.tiers") / "windows"
    assert set(names) == {file.name for file in folder.iterdir()}


def test_default_windows() -> None:
    windows = choose_windows("default", 8).windows
    assert windows.source == "default.toml"
    assert windows.world_size == 0
    assert windows.describe() == {
        "MNNVL_CUTEDSL": "1..16, graph only, decode only",
        "TAIL_FUSION": "1..16, graph only",
        "MULTIMEM_AR": "256..8192, decode never",
        "PEER_AR": "none",
        "SEQUENCE_PARALLEL": "none",
        "COLUMN_PARALLEL": "none",
        "FUSED_LANE_AR": "0..",
        "SEPARATE_REDUCE": "0..",
    }


def test_host_windows() -> None:
    windows = choose_windows("host", 2).windows
    assert windows.source == "host.toml"
    assert windows.world_size == 0
    assert windows.describe() == {
        "TAIL_FUSION": "1..16",
        "PEER_AR": "17..255",
        "SEQUENCE_PARALLEL": "256..",
        "COLUMN_PARALLEL": "256..",
        "FUSED_LANE_AR": "0..",
        "SEPARATE_REDUCE": "0..",
    }


@pytest.mark.parametrize("windows", packaged_windows(), ids=lambda windows: windows.source)
def test_packaged_file(windows: Windows[Tier]) -> None:
    assert windows.provenance, "says where its numbers come from"
    assert windows.family in ("default", "host") or re.fullmatch(r"sm\d{2,3}", windows.family)
    # A file that ships must not set what the operator did not ask for.
    assert not windows.settings
    again = parse_windows(as_document(windows), Tier, windows.source)
    assert again == windows
    assert again.describe() == windows.describe()


def test_packaged_files_are_one_a_machine() -> None:
    machines = [(windows.family, windows.world_size) for windows in packaged_windows()]
    assert len(machines) == len(set(machines))


def as_document(windows: Windows[Tier]) -> dict[str, Any]:
    """A table, written down again from its values."""
    return {
        "schema": 1,
        "family": windows.family,
        "world_size": windows.world_size,
        "provenance": windows.provenance,
        "settings": dict(windows.settings),
        "tiers": {
            tier.name: {
                "tokens": [str(tokens) for tokens in window.tokens],
                "graph": window.graph.value,
                "decode": window.decode.value,
            }
            for tier, window in windows.rows.items()
        },
        "measured": dict(windows.measured),
        "timings": {
            tier.name: {"tokens": list(times.tokens), "us": list(times.us)} for tier, times in windows.timings.items()
        },
    }


# Reading


def test_a_file_of_your_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(
        """
        schema = 1
        family = "sm100"
        world_size = 4
        provenance = "measured"

        [settings]
        vote_deadline = 10
        disabled = ["MULTIMEM_AR"]

        [tiers.TAIL_FUSION]
        tokens = ["1..2", "4..8", "32.."]
        graph = "only"
        decode = "never"

        [tiers.MULTIMEM_AR]

        [tiers.SEPARATE_REDUCE]
        tokens = ["0.."]
        """,
        encoding="utf-8",
    )
    windows: Windows[Tier] = load_windows(file)
    assert windows.rows == {
        Tier.TAIL_FUSION: Window(
            tokens=(TokenRange(1, 2), TokenRange(4, 8), TokenRange(32)), graph=Phase.ONLY, decode=Phase.NEVER
        ),
        Tier.MULTIMEM_AR: Window(),
        Tier.SEPARATE_REDUCE: Window(tokens=(TokenRange(0),)),
    }
    assert (windows.family, windows.world_size, windows.provenance) == ("sm100", 4, "measured")
    assert windows.settings == {"vote_deadline": 10, "disabled": ["MULTIMEM_AR"]}
    assert windows.source == str(file)
    assert load_windows(str(file)) == windows
    assert windows.describe() == {
        "TAIL_FUSION": "1..2 4..8 32.., graph only, decode never",
        "MULTIMEM_AR": "none",
        "SEPARATE_REDUCE": "0..",
    }


def test_what_may_be_left_out() -> None:
    windows = parse_windows({"schema": 1, "tiers": LAST}, Tier)
    assert (windows.family, windows.world_size, windows.provenance, windows.source) == ("default", 0, "", "")
    assert windows.settings == {}
    assert list(windows.rows) == [Tier.SEPARATE_REDUCE]


def test_a_file_for_another_enum(tmp_path: Path) -> None:
    class PackTier(IntEnum):
        ONE_LAUNCH = 1
        LIBRARY = 2

    file = tmp_path / "pack.toml"
    file.write_text('schema = 1\n[tiers.LIBRARY]\ntokens = ["0.."]\n', encoding="utf-8")
    assert load_windows(file, PackTier).rows == {PackTier.LIBRARY: Window(tokens=(TokenRange(0),))}
    file.write_text('schema = 1\n[tiers.SEPARATE_REDUCE]\ntokens = ["0.."]\n', encoding="utf-8")
    with pytest.raises(WindowsError) as error:
        load_windows(file, PackTier)
    assert str(error.value) == (f"{file}: [tiers.SEPARATE_REDUCE]: no such tier; accepted are ONE_LAUNCH, LIBRARY")


@settings(max_examples=50)
@given(tables())
def test_round_trip(table: dict[Tier, Row]) -> None:
    windows = parse_windows(document(table), Tier)
    assert list(windows.rows) == sorted(table)
    for tier, (ranges, graph, decode) in table.items():
        window = windows.rows[tier]
        assert [(tokens.first, tokens.last) for tokens in window.tokens] == ranges
        assert (window.graph, window.decode) == (Phase(graph), Phase(decode))
    assert parse_windows(as_document(windows), Tier) == windows


@settings(max_examples=50)
@given(tables(), st.sampled_from(list(Tier)[:-1]), st.one_of(st.none(), rows()))
def test_tables_that_differ_are_described_differently(table: dict[Tier, Row], tier: Tier, row: Row | None) -> None:
    """The description is what the ranks compare: it must tell tables apart, and only tables."""
    other = {name: given for name, given in table.items() if name is not tier} | ({} if row is None else {tier: row})
    first = parse_windows(document(table, provenance="here"), Tier, "here.toml")
    second = parse_windows(document(other, provenance="there"), Tier, "there.toml")
    assert (first.describe() == second.describe()) == (table == other)


def test_a_table_is_a_value() -> None:
    rows = {Tier.SEPARATE_REDUCE: Window(tokens=(TokenRange(0),))}
    windows = Windows(tiers=Tier, rows=rows)
    rows[Tier.PEER_AR] = Window()
    assert Tier.PEER_AR not in windows.rows
    with pytest.raises(TypeError):
        windows.rows[Tier.PEER_AR] = Window()  # type: ignore[index]
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        windows.family = "host"  # type: ignore[misc]


# Windows, ranges and phases


@pytest.mark.parametrize(
    ("rule", "on", "off"), [(Phase.ANY, True, True), (Phase.ONLY, True, False), (Phase.NEVER, False, True)]
)
def test_phases(rule: Phase, on: bool, off: bool) -> None:
    assert (rule.holds(True), rule.holds(False)) == (on, off)
    for name in ("graph", "decode"):
        window = Window(tokens=(TokenRange(0),), **{name: rule})
        assert (window.obstacle(Axes(num_tokens=1, **{name: True})) is None) == on
        assert (window.obstacle(Axes(num_tokens=1, **{name: False})) is None) == off


@given(st.integers(0, 50), st.integers(0, 50), st.integers(0, 120))
def test_ranges_include_both_ends(first: int, length: int, num_tokens: int) -> None:
    closed, endless = TokenRange(first, first + length), TokenRange(first)
    assert closed.holds(num_tokens) == (num_tokens in range(first, first + length + 1))
    assert endless.holds(num_tokens) == (num_tokens >= first)
    assert TokenRange.parse(str(closed)) == closed
    assert TokenRange.parse(str(endless)) == endless


@pytest.mark.parametrize("ends", [(-1, 3), (3, 2), (-2, None)])
def test_ranges_refuse_bad_ends(ends: tuple[int, int | None]) -> None:
    text = f"{ends[0]}..{'' if ends[1] is None else ends[1]}"
    with pytest.raises(WindowsError) as error:
        TokenRange(*ends)
    assert str(error.value) == f"range {text}: accepted are FIRST..LAST with 0 <= FIRST <= LAST, and FIRST.."


def test_tokens_come_before_phases() -> None:
    window = Window(tokens=(TokenRange(1, 16),), graph=Phase.ONLY, decode=Phase.ONLY)
    assert window.obstacle(Axes(num_tokens=17)) == "17 tokens are outside its window 1..16"
    assert window.obstacle(Axes(num_tokens=16)) == "its window is graph only, this forward has graph=False"
    assert window.obstacle(Axes(num_tokens=16, graph=True)) == (
        "its window is decode only, this forward has decode=False"
    )
    assert window.obstacle(Axes(num_tokens=16, graph=True, decode=True)) is None


# Which file


def test_exact_match_without_a_warning() -> None:
    tables = [table("sm90", 2), table("sm90", 4), table("default", 0)]
    choice = choose_windows("sm90", 4, tables)
    assert choice.windows is tables[1]
    assert choice.warning == ""


@pytest.mark.parametrize("order", [1, -1])
def test_exact_match_beats_any_world_size(order: int) -> None:
    tables = [table("sm90", 0), table("sm90", 4), table("default", 0)][::order]
    assert choose_windows("sm90", 4, tables).windows.world_size == 4
    choice = choose_windows("sm90", 3, tables)
    assert choice.windows.world_size == 0
    assert choice.warning == ""


@pytest.mark.parametrize("world_size", range(1, 17))
def test_host_serves_every_world_size(world_size: int) -> None:
    choice = choose_windows("host", world_size)
    assert choice.windows.source == "host.toml"
    assert choice.warning == ""


@pytest.mark.parametrize(("world_size", "nearest"), [(1, 2), (3, 2), (4, 2), (5, 6), (7, 6), (16, 6)])
def test_nearest_world_size_with_a_warning(world_size: int, nearest: int) -> None:
    for measured in ([table("sm90", 2), table("sm90", 6)], [table("sm90", 6), table("sm90", 2)]):
        choice = choose_windows("sm90", world_size, [*measured, table("default", 0), table("sm100", world_size)])
        assert (choice.windows.family, choice.windows.world_size) == ("sm90", nearest)
        assert choice.warning == (
            f"no windows were measured for sm90 with {world_size} ranks; "
            f"using those for {nearest} ranks (sm90_{nearest}.toml)"
        )


@pytest.mark.parametrize("family", ["sm75", "unknown", ""])
def test_default_for_a_family_that_was_never_measured(family: str) -> None:
    choice = choose_windows(family, 8)
    assert choice.windows.source == "default.toml"
    assert choice.warning == ""


def test_a_choice_needs_a_default() -> None:
    with pytest.raises(WindowsError) as error:
        choose_windows("sm75", 8, [table("sm90", 8)])
    assert str(error.value) == 'no table is for sm75, and none is of the family "default"'


# What is refused: the file, the place, what stands there, what is accepted


def test_unknown_key() -> None:
    accepted = "accepted are family, measured, provenance, schema, settings, tiers, timings, world_size"
    assert refusal({"schema": 1, "worldsize": 2}) == f"mine.toml: worldsize: no such key; {accepted}"


def test_unknown_key_of_a_row() -> None:
    expected = "token: no such key; accepted are decode, graph, tokens"
    assert refused_row({"token": ["1..16"]}) == expected


def test_unknown_tier() -> None:
    text = refusal({"schema": 1, "tiers": {"tail_fusion": {}, **LAST}})
    assert text == f"mine.toml: [tiers.tail_fusion]: no such tier; accepted are {TIERS}"


@pytest.mark.parametrize("schema", [0, 2, "1", 1.0, True, None, [1]])
def test_wrong_schema(schema: Any) -> None:
    assert refusal({"schema": schema}) == f"mine.toml: schema: {schema!r} given; this version reads 1"


def test_no_schema() -> None:
    assert refusal({"tiers": LAST}) == "mine.toml: schema: None given; this version reads 1"


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("family", 90, "a string"),
        ("provenance", ["here"], "a string"),
        ("world_size", "2", "a whole number"),
        ("world_size", 2.0, "a whole number"),
        ("world_size", True, "a whole number"),
        ("settings", 1, "a table"),
        ("settings", ["pdl"], "a table"),
        ("tiers", ["TAIL_FUSION"], "a table"),
    ],
)
def test_wrong_type(name: str, value: Any, accepted: str) -> None:
    expected = f"mine.toml: {name}: {value!r} given; accepted is {accepted}"
    assert refusal({"schema": 1, "tiers": LAST, name: value}) == expected


def test_negative_world_size() -> None:
    text = refusal({"schema": 1, "world_size": -1, "tiers": LAST})
    assert text == "mine.toml: world_size: -1 given; accepted are whole numbers from 0 (any)"


@pytest.mark.parametrize("row", ["1..16", ["1..16"], 16, True])
def test_a_row_that_is_no_table(row: Any) -> None:
    assert refused_row(row) == f"{row!r} given; accepted is a table"


@pytest.mark.parametrize("tokens", ["1..16", 16, {"first": 1}])
def test_tokens_that_are_no_array(tokens: Any) -> None:
    assert refused_row({"tokens": tokens}) == f"tokens: {tokens!r} given; accepted is an array"


@pytest.mark.parametrize(
    "text",
    [
        "", "1", "..", "..16", "1...16", "1..16..32", "1-16", "-1..16", "1..-16", "+1..16", "1.5..16", "1 .. 16",
        " 1..16", "1..16\n", "1_0..16", "0x1..16", "1..inf", "\u0661..\u0669", "1" * 5000 + "..", "1.." + "9" * 19,
    ],
)  # fmt: skip
def test_a_text_that_is_no_range(text: str) -> None:
    expected = f'tokens: {text!r} is not a token range; accepted are "1..16" and "256.."'
    assert refused_row({"tokens": ["0..0", text]}) == expected


@pytest.mark.parametrize("value", [16, 1.5, True, ["1..16"], {"first": 1}])
def test_a_range_that_is_no_text(value: Any) -> None:
    expected = f'tokens: {repr(value)!r} is not a token range; accepted are "1..16" and "256.."'
    assert refused_row({"tokens": [value]}) == expected


def test_a_range_that_ends_before_it_begins() -> None:
    expected = "tokens: range 16..1: accepted are FIRST..LAST with 0 <= FIRST <= LAST, and FIRST.."
    assert refused_row({"tokens": ["16..1"]}) == expected


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("1..16", "16..32"),
        ("1..16", "8..9"),
        ("17..32", "1..16"),
        ("1..16", "1..16"),
        ("256..", "512.."),
        ("0..", "0.."),
    ],
)
def test_ranges_that_meet_or_descend(before: str, after: str) -> None:
    expected = f"tokens: ranges {before} and {after}: ranges must ascend and not overlap"
    assert refused_row({"tokens": [before, after]}) == expected


def test_ranges_that_touch_are_accepted() -> None:
    rows = {"TAIL_FUSION": {"tokens": ["1..16", "17..32", "33.."]}, **LAST}
    assert str(parse_windows({"schema": 1, "tiers": rows}, Tier).rows[Tier.TAIL_FUSION]) == "1..16 17..32 33.."


@pytest.mark.parametrize("name", ["graph", "decode"])
@pytest.mark.parametrize("rule", ["ONLY", "", "yes", True, 1, ["only"], {"only": True}])
def test_a_rule_that_does_not_exist(name: str, rule: Any) -> None:
    expected = f"{name}: {rule!r} given; accepted are any, only, never"
    assert refused_row({"tokens": ["1..16"], name: rule}) == expected


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        (None, "no row"),
        ({}, "none"),
        ({"tokens": ["1.."]}, "1.."),
        ({"tokens": ["0..8192"]}, "0..8192"),
        ({"tokens": ["0..7", "8.."]}, "0..7 8.."),
        ({"tokens": ["0.."], "graph": "only"}, "0.., graph only"),
        ({"tokens": ["0.."], "decode": "never"}, "0.., decode never"),
    ],
)
def test_the_last_tier_takes_everything(row: dict[str, Any] | None, shown: str) -> None:
    rows = {} if row is None else {"SEPARATE_REDUCE": row}
    assert refusal({"schema": 1, "tiers": rows}) == (
        f'mine.toml: [tiers.SEPARATE_REDUCE]: {shown}; accepted is tokens = ["0.."] without rules, '
        "since this tier takes what no other does"
    )


def test_a_refusal_without_a_file() -> None:
    assert refusal({"schema": 2}, source="") == "windows: schema: 2 given; this version reads 1"


# Files that can't be read


def unreadable(file: Path, what: str = " as TOML") -> str:
    """The refusal of a file, less the start, which must name it."""
    with pytest.raises(WindowsError) as error:
        load_windows(file)
    text, place = str(error.value), f"{file}: can't be read{what}: "
    assert text.startswith(place)
    return text.removeprefix(place)


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    assert unreadable(tmp_path / "missing.toml", "") == "No such file or directory"


def test_a_folder(tmp_path: Path) -> None:
    assert unreadable(tmp_path, "") == "Is a directory"


def test_a_path_that_cannot_be() -> None:
    assert unreadable(Path("nul\0.toml")) == "embedded null byte"


def test_a_file_that_is_not_toml(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"schema": 1}', encoding="utf-8")
    assert "line 1, column 1" in unreadable(file)


def test_a_key_given_twice(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("schema = 1\nschema = 1\n", encoding="utf-8")
    assert "line 2, column 11" in unreadable(file)


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"\x7fELF\x02\x01\x01\x00", b"schema = 1 # \xe9\n"])
def test_a_file_that_is_binary(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "mine.toml"
    file.write_bytes(content)
    assert unreadable(file)


@pytest.mark.parametrize(
    "content", ["schema = " + "[" * 100_000, "schema = " + "9" * 10_000], ids=["brackets", "digits"]
)
def test_a_file_that_is_hostile(tmp_path: Path, content: str) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(content, encoding="utf-8")
    assert unreadable(file)


def test_an_invalid_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text("schema = 2\n", encoding="utf-8")
    with pytest.raises(WindowsError) as error:
        load_windows(file)
    assert str(error.value) == f"{file}: schema: 2 given; this version reads 1"


def test_an_empty_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.touch()
    with pytest.raises(WindowsError) as error:
        load_windows(file)
    assert str(error.value) == f"{file}: schema: None given; this version reads 1"


# Anything at all

toml_values = st.recursive(
    st.one_of(
        st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(), st.dates(), st.from_regex(r"\d+\.\.\d*")
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.sampled_from(["tokens", "graph", "decode", *Tier.__members__, "x"]), inner, max_size=3),
    ),
    max_leaves=8,
)
documents = st.fixed_dictionaries(
    {
        "schema": st.just(1),
        "tiers": st.one_of(toml_values, st.dictionaries(st.sampled_from(list(Tier.__members__)), toml_values)),
    },
    optional={"family": toml_values, "world_size": toml_values, "settings": toml_values, "provenance": toml_values},
)


def read_or_refused(given: dict[str, Any]) -> Windows[Tier] | str:
    """The table or the text of the refusal. Every other exception is a fault."""
    try:
        return parse_windows(given, Tier, "mine.toml")
    except WindowsError as error:
        return str(error)


@given(documents)
@example({"schema": 1, "tiers": {"TAIL_FUSION": {"tokens": ["9" * 5000 + ".."]}, **LAST}})
def test_any_document_is_read_or_refused(given: dict[str, Any]) -> None:
    result = read_or_refused(given)
    if isinstance(result, str):
        assert result.startswith("mine.toml: ")
    else:
        assert Tier.SEPARATE_REDUCE in result.rows


@given(st.one_of(st.text(), st.from_regex(r'(\[[a-z.]*\]|[a-z_]{1,6} = (1|"\d\.\.")|\n){1,6}', fullmatch=True)))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        given = tomllib.loads(text)
    except ValueError:
        return
    assert read_or_refused(given)
