"""The operator's settings: each one's variable, default, values, refusals and precedence."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import k3comm.settings
from k3comm.errors import SettingsError
from k3comm.settings import PREFIX, Settings, user_cache_folder
from k3comm.tiers import Tier

TIERS = (
    "MNNVL_CUTEDSL, TAIL_FUSION, MULTIMEM_AR, PEER_AR, SEQUENCE_PARALLEL, COLUMN_PARALLEL, FUSED_LANE_AR, "
    "SEPARATE_REDUCE"
)
FLAGS = "accepted are on, off, 1, 0, true, false, yes, no"
SECONDS = "accepted are seconds from 0.001 to 86400"
TEXT = "accepted is a text that is not empty"
SMS = "accepted are whole numbers from 1 to 32"
YES = ("1", "on", "true", "yes", "On", "TRUE", " yes ")
NO = ("0", "off", "false", "no", "Off", "FALSE", " no ")


@attrs.frozen(kw_only=True)
class Case:
    """What one setting is to do, written down by hand.

    Attributes:
        env: its variable.
        default: what it is when nobody gives it.
        texts: values by the text of a variable.
        arguments: pairs of an argument, of other kinds than text, and the value.
        bad: refusals by the text of a variable.
        bad_arguments: pairs of an argument and its refusal.
        shown: its default in a report.
        uniform: all ranks must have the same.
    """

    env: str
    default: Any
    shown: str
    texts: Mapping[str, Any]
    arguments: tuple[tuple[Any, Any], ...] = ()
    bad: Mapping[str, str]
    bad_arguments: tuple[tuple[Any, str], ...] = ()
    uniform: bool = True


def flag(env: str, default: bool) -> Case:
    return Case(
        env=env,
        default=default,
        shown="on" if default else "off",
        texts=dict.fromkeys(YES, True) | dict.fromkeys(NO, False),
        arguments=((True, True), (False, False), (1, True), (0, False)),
        bad={text: f"{text!r} given; {FLAGS}" for text in ("2", "enabled", "nope", "-1", " ", "t")},
        bad_arguments=((2, f"2 given; {FLAGS}"), (1.0, f"1.0 given; {FLAGS}"), ([], f"[] given; {FLAGS}")),
    )


def seconds(env: str, default: float) -> Case:
    wrong: tuple[Any, ...] = (0, -1, True, False, float("nan"), float("inf"), 86401, [], 1j, b"")
    bad = ("0", "-1", "nan", "inf", "-inf", "1e999", "86400.5", "1s", "1,5", "abc", " ", "0x10", "1e-400", "1e-9")
    return Case(
        env=env,
        default=default,
        shown=str(default),
        texts={"5": 5.0, "0.25": 0.25, " 7 ": 7.0, "1e2": 100.0, "86400": 86400.0},
        arguments=((5, 5.0), (0.25, 0.25)),
        bad={text: f"{text!r} given; {SECONDS}" for text in bad},
        bad_arguments=tuple((value, f"{value!r} given; {SECONDS}") for value in wrong),
    )


def path(env: str, shown: str) -> Case:
    return Case(
        env=env,
        default=None,
        shown=shown,
        texts={"run.txt": "run.txt", "/a b/c": "/a b/c", shown: None, f" {shown.upper()} ": None},
        arguments=((Path("a") / "b", "a/b"),),
        bad={" ": f"' ' given; {TEXT}", "\t\n": f"'\\t\\n' given; {TEXT}"},
        bad_arguments=tuple((value, f"{value!r} given; {TEXT}") for value in ("", 5, True, b"bytes", ["list"])),
        uniform=False,
    )


CASES = {
    "disabled": Case(
        env="K3COMM_DISABLE",
        default=frozenset(),
        shown="none",
        texts={
            "TAIL_FUSION": {Tier.TAIL_FUSION},
            "tail_fusion": {Tier.TAIL_FUSION},
            "PEER_AR,MULTIMEM_AR": {Tier.PEER_AR, Tier.MULTIMEM_AR},
            " PEER_AR , multimem_ar\tPEER_AR\n,,": {Tier.PEER_AR, Tier.MULTIMEM_AR},
            " ": set(),
            ",": set(),
        },
        arguments=(
            ({Tier.PEER_AR}, {Tier.PEER_AR}),
            (["peer_ar", Tier.MULTIMEM_AR], {Tier.PEER_AR, Tier.MULTIMEM_AR}),
            ((), set()),
            (frozenset(), set()),
        ),
        bad={
            "SEPARATE_REDUCE": "SEPARATE_REDUCE can't be disabled: it takes what no other tier does",
            "peer_ar, separate_reduce": "SEPARATE_REDUCE can't be disabled: it takes what no other tier does",
            "multimem": f"no tier is called 'multimem'; accepted are {TIERS}",
            "PEER_AR;MULTIMEM_AR": f"no tier is called 'PEER_AR;MULTIMEM_AR'; accepted are {TIERS}",
            "40": f"no tier is called '40'; accepted are {TIERS}",
            "auto": f"no tier is called 'auto'; accepted are {TIERS}",
        },
        bad_arguments=(
            ({Tier.SEPARATE_REDUCE}, "SEPARATE_REDUCE can't be disabled: it takes what no other tier does"),
            ([40], f"no tier is called '40'; accepted are {TIERS}"),
            ([None], f"no tier is called 'None'; accepted are {TIERS}"),
        ),
    ),
    "enabled": Case(
        env="K3COMM_ENABLE",
        default=frozenset(),
        shown="none",
        texts={"mnnvl_cutedsl": {Tier.MNNVL_CUTEDSL}, "MNNVL_CUTEDSL PEER_AR": {Tier.MNNVL_CUTEDSL, Tier.PEER_AR}},
        arguments=(([Tier.MNNVL_CUTEDSL], {Tier.MNNVL_CUTEDSL}),),
        bad={"all": f"no tier is called 'all'; accepted are {TIERS}"},
        bad_arguments=(([" "], f"no tier is called ''; accepted are {TIERS}"),),
    ),
    "force": Case(
        env="K3COMM_FORCE",
        default=None,
        shown="auto",
        texts={"auto": None, " AUTO ": None, "peer_ar": Tier.PEER_AR, "SEPARATE_REDUCE": Tier.SEPARATE_REDUCE},
        arguments=((Tier.PEER_AR, Tier.PEER_AR),),
        bad={
            "none": f"no tier is called 'none'; accepted are {TIERS}",
            " ": f"no tier is called ''; accepted are {TIERS}",
            "PEER_AR,TAIL_FUSION": f"no tier is called 'PEER_AR,TAIL_FUSION'; accepted are {TIERS}",
        },
        bad_arguments=((40, f"no tier is called '40'; accepted are {TIERS}"),),
    ),
    "transport": Case(
        env="K3COMM_TRANSPORT",
        default="auto",
        shown="auto",
        texts={"auto": "auto", "multicast": "multicast", "Peer": "peer", " host ": "host"},
        bad={text: f"{text!r} given; accepted are auto, multicast, peer, host" for text in ("nvls", " ", "peer,host")},
        bad_arguments=((True, "True given; accepted are auto, multicast, peer, host"),),
    ),
    "windows": path("K3COMM_WINDOWS", "packaged"),
    "pdl": flag("K3COMM_PDL", True),
    "vote_deadline": seconds("K3COMM_VOTE_DEADLINE", 60.0),
    "rendezvous_deadline": seconds("K3COMM_RENDEZVOUS_DEADLINE", 600.0),
    "poll_deadline": seconds("K3COMM_POLL_DEADLINE", 30.0),
    "overlap_sms": Case(
        env="K3COMM_OVERLAP_SMS",
        default=None,
        shown="off",
        texts={"4": 4, "off": None, " OFF ": None, "1": 1, "32": 32, " 08 ": 8},
        arguments=((1, 1), (32, 32)),
        bad={
            text: f"{text!r} given; {SMS}"
            for text in ("0", "33", "-1", "4.0", "1e1", "four", " ", "none", "9" * 5000, "\u0664")
        },
        bad_arguments=tuple((value, f"{value!r} given; {SMS}") for value in (0, 33, -1, True, False, 4.0, [], b"4")),
    ),
    "check_uniform": flag("K3COMM_CHECK_UNIFORM", False),
    "allow_shared_device": flag("K3COMM_ALLOW_SHARED_DEVICE", False),
    "record": path("K3COMM_RECORD", "off"),
    "host_identity": path("K3COMM_HOST_IDENTITY", "detected"),
    "cache_dir": path("K3COMM_CACHE_DIR", "default"),
}

EACH = pytest.mark.parametrize("name", list(CASES))
IN_A_FILE = [name for name in CASES if name not in ("windows", "host_identity")]
"""A windows file names neither another one nor a single machine."""


def pairs(attribute: str, names: Iterable[str] = CASES) -> pytest.MarkDecorator:
    """A test for each setting and each of its listed values, with what is expected of it."""
    rows = []
    for name in names:
        listed = getattr(CASES[name], attribute)
        listed = tuple(listed.items()) if isinstance(listed, Mapping) else listed
        rows += [pytest.param(name, *pair, id=f"{name}-{n}") for n, pair in enumerate(listed)]
    assert rows
    return pytest.mark.parametrize(("name", "given", "expected"), rows)


def text_of(name: str) -> str:
    """A text that is accepted and differs from the default."""
    return next(text for text, value in CASES[name].texts.items() if value != CASES[name].default)


def value_of(name: str) -> Any:
    return CASES[name].texts[text_of(name)]


def with_arguments(**given: Any) -> Settings:
    return Settings(**given)


def refusal(**arguments: Any) -> str:
    with pytest.raises(SettingsError) as error:
        with_arguments(**arguments)
    return str(error.value)


def refused(environ: Mapping[str, str]) -> str:
    with pytest.raises(SettingsError) as error:
        Settings.from_env(environ=environ)
    return str(error.value)


# The table


def test_the_table_is_whole() -> None:
    names = [field.name for field in attrs.fields(Settings) if field.name != "sources"]
    assert names == list(CASES)
    assert len({case.env for case in CASES.values()}) == len(CASES)
    assert all(case.env.startswith(PREFIX) for case in CASES.values())
    # The documentation of the class names each setting with its variable.
    text = " ".join((Settings.__doc__ or "").split())
    for name, case in CASES.items():
        assert f" {name}: " in text
        assert f"({case.env}" in text


@EACH
def test_default(name: str) -> None:
    for settings in (Settings(), Settings.from_env(environ={}), Settings.from_env(Settings(), {})):
        assert getattr(settings, name) == CASES[name].default
        assert type(getattr(settings, name)) is type(CASES[name].default)
        assert settings.sources[name] == "default"
        assert settings.describe()[name] == CASES[name].shown


@pairs("texts")
def test_variable(name: str, given: str, expected: Any) -> None:
    settings = Settings.from_env(environ={CASES[name].env: given})
    assert getattr(settings, name) == expected
    assert settings.sources == {n: CASES[n].env if n == name else "default" for n in CASES}
    for other in CASES.keys() - {name}:
        assert getattr(settings, other) == CASES[other].default


@pairs("texts")
def test_text_as_an_argument(name: str, given: str, expected: Any) -> None:
    settings = with_arguments(**{name: given})
    assert getattr(settings, name) == expected
    assert settings.sources[name] == "argument"


@pairs("arguments")
def test_argument(name: str, given: Any, expected: Any) -> None:
    settings = with_arguments(**{name: given})
    assert getattr(settings, name) == expected
    assert settings.sources[name] == "argument"


@pairs("bad")
def test_malformed_variable(name: str, given: str, expected: str) -> None:
    assert refused({CASES[name].env: given}) == f"{CASES[name].env} ({name}): {expected}"


@pairs("bad")
def test_malformed_text_as_an_argument(name: str, given: str, expected: str) -> None:
    assert refusal(**{name: given}) == f"{name}: {expected}"


@pairs("bad_arguments")
def test_malformed_argument(name: str, given: Any, expected: str) -> None:
    assert refusal(**{name: given}) == f"{name}: {expected}"


@pairs("bad", IN_A_FILE)
def test_malformed_value_of_a_file(name: str, given: str, expected: str) -> None:
    with pytest.raises(SettingsError) as error:
        Settings().with_file({name: given}, "mine.toml")
    assert str(error.value) == f"mine.toml ({name}): {expected}"


@pytest.mark.parametrize("name", ["disabled", "enabled"])
@pytest.mark.parametrize("value", [Tier.PEER_AR, 41, 1.5, True])
def test_tiers_are_a_set(name: str, value: Any) -> None:
    assert refusal(**{name: value}).startswith(f"{name}: {value!r} given")


@pytest.mark.parametrize("name", ["vote_deadline", "rendezvous_deadline", "poll_deadline"])
def test_deadlines_refuse_a_number_that_is_no_float(name: str) -> None:
    assert refusal(**{name: 10**400}) == f"{name}: {10**400} given; {SECONDS}"


def test_arguments_are_given_by_name() -> None:
    with pytest.raises(TypeError, match="positional"):
        Settings({Tier.PEER_AR})  # type: ignore[call-arg]


# Precedence, setting by setting


PLACES = [
    pytest.param(name, argument, variable, file, id=f"{name}-{argument:d}{variable:d}{file:d}")
    for name in CASES
    for argument, variable, file in itertools.product((False, True), repeat=3)
    if name in IN_A_FILE or not file
]


@pytest.mark.parametrize(("name", "argument", "variable", "file"), PLACES)
def test_precedence(name: str, argument: bool, variable: bool, file: bool) -> None:
    """What a variable says differs from what argument and file say; those are told apart by the source."""
    case = CASES[name]
    one = next(iter(case.texts))
    other = next(text for text, value in case.texts.items() if value != case.texts[one])
    settings = with_arguments(**{name: one} if argument else {})
    settings = Settings.from_env(settings, {case.env: other} if variable else {})
    settings = settings.with_file({name: one} if file else {}, "mine.toml")
    value, source = case.default, "default"
    if file:
        value, source = case.texts[one], "mine.toml"
    if variable:
        value, source = case.texts[other], case.env
    if argument:
        value, source = case.texts[one], "argument"
    assert getattr(settings, name) == value
    assert settings.sources == dict.fromkeys(CASES, "default") | {name: source}


def test_each_setting_has_its_own_source() -> None:
    settings = Settings.from_env(Settings(force=Tier.PEER_AR), {"K3COMM_PDL": "off", "K3COMM_FORCE": "TAIL_FUSION"})
    settings = settings.with_file({"pdl": True, "poll_deadline": 5, "force": "auto"}, "mine.toml")
    assert (settings.force, settings.pdl, settings.poll_deadline, settings.vote_deadline) == (
        Tier.PEER_AR,
        False,
        5.0,
        60.0,
    )
    given = {"force": "argument", "pdl": "K3COMM_PDL", "poll_deadline": "mine.toml"}
    assert settings.sources == dict.fromkeys(CASES, "default") | given


@pytest.mark.parametrize(
    ("argument", "variable"),
    [({"force": "auto"}, {"K3COMM_FORCE": "PEER_AR"}), ({"windows": "packaged"}, {"K3COMM_WINDOWS": "mine.toml"})],
    ids=["force", "windows"],
)
def test_the_default_by_its_name_is_given(argument: dict[str, Any], variable: dict[str, str]) -> None:
    """An argument can say the default aloud, and then wins over a variable."""
    (name,) = argument
    settings = Settings.from_env(with_arguments(**argument), variable)
    assert getattr(settings, name) is None
    assert settings.sources[name] == "argument"


def test_none_is_not_given() -> None:
    settings = Settings.from_env(Settings(force=None, pdl=None, windows=None), {"K3COMM_PDL": "off"})  # type: ignore[arg-type]
    assert settings.pdl is False
    assert settings.sources["pdl"] == "K3COMM_PDL"
    assert settings.sources["force"] == "default"


def test_filling_twice_changes_nothing() -> None:
    environ = {CASES[name].env: text_of(name) for name in CASES}
    once = Settings.from_env(environ=environ)
    twice = Settings.from_env(once, {case.env: next(iter(case.texts)) for case in CASES.values()})
    assert twice == once
    assert twice.sources == once.sources
    assert {name: getattr(once, name) for name in CASES} == {name: value_of(name) for name in CASES}


@pytest.mark.parametrize("file", [False, True], ids=["variable", "file"])
def test_a_copy_with_a_change_keeps_the_change(file: bool) -> None:
    settings = attrs.evolve(Settings(), poll_deadline=5)
    if file:
        settings = settings.with_file({"poll_deadline": 7}, "mine.toml")
    else:
        settings = Settings.from_env(settings, {"K3COMM_POLL_DEADLINE": "7"})
    assert settings.poll_deadline == 5.0
    assert settings.sources["poll_deadline"] == "argument"


# The environment


@EACH
def test_an_empty_variable_is_not_set(name: str) -> None:
    settings = Settings.from_env(environ={CASES[name].env: ""})
    assert settings == Settings()
    assert settings.sources[name] == "default"


@pytest.mark.parametrize(
    ("variable", "hint"),
    [
        ("K3COMM_DISABLED", "did you mean K3COMM_DISABLE?"),
        ("K3COMM_TRANSPORTS", "did you mean K3COMM_TRANSPORT?"),
        ("K3COMM_HOST_ID", "did you mean K3COMM_HOST_IDENTITY?"),
        ("K3COMM_force", "did you mean K3COMM_FORCE?"),
        ("K3COMM_", None),
        ("K3COMM_SOMETHING_ELSE_ENTIRELY", None),
    ],
)
@pytest.mark.parametrize("value", ["", "1"])
def test_unknown_variable(variable: str, hint: str | None, value: str) -> None:
    names = ", ".join(case.env for case in CASES.values())
    expected = f"{variable}: there is no such variable; {hint or f'accepted are {names}'}"
    assert refused({variable: value}) == expected


def test_the_hint_of_a_variable_that_resembles_another() -> None:
    """Whatever is suggested does exist."""
    for case in CASES.values():
        text = refused({case.env + "S": "1"})
        assert text == f"{case.env}S: there is no such variable; did you mean {case.env}?"


def test_other_variables_are_nobodys_business() -> None:
    others = {
        "K3COM_FORCE": "x",
        "k3comm_force": "x",
        "XK3COMM_FORCE": "x",
        "K3COMM": "x",
        "NCCL_DEBUG": "INFO",
        "": "",
    }
    assert Settings.from_env(environ=others) == Settings()


def test_arguments_alone_read_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3COMM_FORCE", "PEER_AR")
    assert Settings().force is None
    assert Settings().with_file({}, "mine.toml").force is None
    settings = Settings.from_env()
    assert settings.force is Tier.PEER_AR
    assert settings.sources["force"] == "K3COMM_FORCE"


def test_the_environment_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K3COMM_POLL_DEADLINE", "5")
    settings = Settings.from_env()
    monkeypatch.setenv("K3COMM_POLL_DEADLINE", "7")
    assert settings.poll_deadline == 5.0
    assert settings.with_file({}, "mine.toml").poll_deadline == 5.0


def test_reading_leaves_the_environment_alone() -> None:
    environ = {"K3COMM_FORCE": "peer_ar", "PATH": "/bin"}
    before = dict(environ)
    Settings.from_env(environ=environ)
    assert environ == before


# Windows files


@pytest.mark.parametrize("name", ["windows", "host_identity", "sources", "vote_dead_line", "K3COMM_FORCE", ""])
def test_unknown_setting_of_a_file(name: str) -> None:
    with pytest.raises(SettingsError) as error:
        Settings().with_file({name: "1"}, "mine.toml")
    text = str(error.value)
    assert text == f"mine.toml: [settings] {name}: not a setting of a windows file; accepted are {', '.join(IN_A_FILE)}"


def test_what_toml_knows() -> None:
    given = {"disabled": ["PEER_AR"], "pdl": False, "vote_deadline": 5, "poll_deadline": 0.5, "force": "TAIL_FUSION"}
    settings = Settings().with_file(given, "mine.toml")
    assert settings.disabled == {Tier.PEER_AR}
    assert (settings.pdl, settings.vote_deadline, settings.poll_deadline) == (False, 5.0, 0.5)
    assert settings.force is Tier.TAIL_FUSION
    assert {settings.sources[name] for name in given} == {"mine.toml"}


@pytest.mark.parametrize("value", [5, True, 1.5])
def test_a_refusal_names_the_file(value: Any) -> None:
    with pytest.raises(SettingsError) as error:
        Settings().with_file({"disabled": value}, "mine.toml")
    assert "mine.toml" in str(error.value)
    assert repr(value) in str(error.value)


def test_every_setting_is_consumed() -> None:
    """Each is read somewhere else in the package: none is ignored."""
    package = Path(k3comm.settings.__file__).parent
    read = set()
    for file in package.rglob("*.py"):
        if file.name == "settings.py":
            continue
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
                if owner.lstrip("_") == "settings":
                    read.add(node.attr)
    assert read >= CASES.keys()


# Values


@EACH
def test_shown(name: str) -> None:
    shown = {
        "disabled": "TAIL_FUSION",
        "enabled": "MNNVL_CUTEDSL",
        "force": "PEER_AR",
        "transport": "multicast",
        "windows": "run.txt",
        "pdl": "off",
        "vote_deadline": "5.0",
        "rendezvous_deadline": "5.0",
        "poll_deadline": "5.0",
        "overlap_sms": "4",
        "check_uniform": "on",
        "allow_shared_device": "on",
        "record": "run.txt",
        "host_identity": "run.txt",
        "cache_dir": "run.txt",
    }
    assert with_arguments(**{name: text_of(name)}).describe() == Settings().describe() | {name: shown[name]}


def test_shown_sets_are_in_priority_order() -> None:
    settings = Settings(disabled={Tier.FUSED_LANE_AR, Tier.MNNVL_CUTEDSL, Tier.PEER_AR})
    assert settings.describe()["disabled"] == "MNNVL_CUTEDSL, PEER_AR, FUSED_LANE_AR"


def test_what_all_ranks_must_have_alike() -> None:
    uniform = Settings().describe(uniform_only=True)
    assert list(uniform) == [name for name, case in CASES.items() if case.uniform]
    assert list(Settings().describe()) == list(CASES)


@EACH
def test_values_that_differ_are_described_differently(name: str) -> None:
    """The description of a uniform setting is what the ranks compare."""
    settings = [with_arguments(**{name: text}) for text in CASES[name].texts]
    for one in settings:
        for other in settings:
            assert (one.describe()[name] == other.describe()[name]) == (getattr(one, name) == getattr(other, name))


def test_settings_are_a_value() -> None:
    settings = Settings(disabled={"PEER_AR"}, vote_deadline=5)
    assert settings == Settings.from_env(environ={"K3COMM_DISABLE": "peer_ar", "K3COMM_VOTE_DEADLINE": "5"})
    assert hash(settings) == hash(Settings(disabled={Tier.PEER_AR}, vote_deadline="5"))  # type: ignore[arg-type]
    assert settings != Settings(disabled={"PEER_AR"})
    assert isinstance(settings.disabled, frozenset)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        settings.force = Tier.PEER_AR  # type: ignore[misc]
    with pytest.raises(TypeError):
        settings.sources["force"] = "argument"  # type: ignore[index]


# Any environment at all

values = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["auto", "on", "0", "1e9", "nan", "-0.0", "PEER_AR", "separate_reduce", "packaged", "\udc80", "1" * 5000]
    ),
    st.floats().map(str),
    st.integers().map(str),
    st.lists(st.sampled_from(list(Tier.__members__))).map(",".join),
)


@given(
    st.dictionaries(
        st.one_of(
            st.sampled_from([case.env for case in CASES.values()]),
            st.text(max_size=8).map("K3COMM_".__add__),
            st.text(max_size=8),
        ),
        values,
        max_size=4,
    )
)
@example({"K3COMM_VOTE_DEADLINE": "1_000"})
@example({"K3COMM_FORCE": "\u0130"})
def test_any_environment_is_read_or_refused(environ: dict[str, str]) -> None:
    result: Settings | str
    try:
        result = Settings.from_env(environ=environ)
    except SettingsError as error:
        result = str(error)
    ours = {variable for variable in environ if variable.startswith(PREFIX)}
    if isinstance(result, str):
        assert result.startswith(tuple(ours))
    else:
        assert ours <= {case.env for case in CASES.values()}
        for name, case in CASES.items():
            assert result.sources[name] == (case.env if environ.get(case.env) else "default")
        assert Settings.from_env(result, environ) == result


@given(
    st.sampled_from(list(CASES)),
    st.one_of(
        values,
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.binary(),
        st.lists(st.one_of(st.integers(), st.text(), st.none()), max_size=3),
        st.dates(),
    ),
)
@example("vote_deadline", 10**400)
def test_any_argument_is_taken_or_refused(name: str, value: Any) -> None:
    result: Settings | str
    try:
        result = with_arguments(**{name: value})
    except SettingsError as error:
        result = str(error)
    if isinstance(result, str):
        assert result.startswith(f"{name}: ")
    else:
        assert result.sources[name] == ("default" if value is None else "argument")
        assert result.describe()[name]


def test_settings_and_other_values_survive_a_pickle_and_a_copy() -> None:
    """They are values: a spawned rank gets them, and a test returns them."""
    import copy
    import pickle

    from k3comm.testing import laptop_facts
    from k3comm.tiers import Agreement, packaged_windows

    settings = Settings.from_env(Settings(pdl=False), {"K3COMM_FORCE": "peer_ar"})
    values = (settings, laptop_facts(), packaged_windows()[0], Agreement.of([Tier.SEPARATE_REDUCE]))
    for value in values:
        for again in (pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
            assert again == value
    assert pickle.loads(pickle.dumps(settings)).sources == settings.sources
    with pytest.raises(TypeError, match="read-only"):
        settings.sources["pdl"] = "mine"  # type: ignore[index]


@pytest.mark.parametrize(
    ("environ", "folder"),
    [
        ({"XDG_CACHE_HOME": "/x"}, "/x/k3comm"),
        ({"XDG_CACHE_HOME": ""}, "/home/me/.cache/k3comm"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/me/.cache/k3comm"),
        ({}, "/home/me/.cache/k3comm"),
    ],
)
def test_the_users_cache_folder(environ: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert user_cache_folder(environ) == folder


def test_a_user_without_a_home_has_no_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert user_cache_folder({}) is None
