"""Windows: for which token counts and phases a tier is worth choosing. Data, measured, one TOML file a machine kind.

A file looks like this; every row is optional, but SEPARATE_REDUCE (the enum's last member) must accept everything:

    schema = 1
    family = "sm90"          # device family; "default" and "host" are the packaged ones
    world_size = 2           # 0: any
    provenance = "where the numbers come from"

    [tiers.TAIL_FUSION]
    tokens = ["1..16"]       # inclusive ranges, ascending and apart; "256.." has no end; [] is never chosen
    graph = "only"           # "only", "never" or "any" (default)
    decode = "any"

    [settings]               # suggestions; arguments and the environment win
    poll_deadline = 10

    [measured]               # what `k3comm tune` says about the run that the ranges come from; texts, for readers
    date = "2026-01-31T12:00:00+00:00"

    [timings.TAIL_FUSION]    # microseconds of one call by number of tokens, of that run and earlier ones; no choice
    tokens = [1, 16]
    us = [8.2, 10.1]

Admission and preference are apart: whether a tier *can* run is voted on (`k3comm.negotiate`), whether it is *worth* it
is written here. A tier without a row is never chosen, only forced.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import tomllib
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from enum import Enum, IntEnum, unique
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import attrs

from k3comm.errors import WindowsError
from k3comm.tiers.axes import Axes
from k3comm.tiers.tier import Tier

SCHEMA = 1
"""The version of the file format that this loader reads."""

T = TypeVar("T", bound=IntEnum)


class ReadOnly(dict[Any, Any]):
    """A table that does not change: unlike a mapping proxy it can be pickled and copied, as values are."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("this table is read-only")

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> ReadOnly:
        return type(self)(copy.deepcopy(dict(self), memo))


def by_key(table: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """A read-only copy of a table in the order of its keys; a converter of attrs fields."""
    return ReadOnly({key: table[key] for key in sorted(table)})


@unique
class Phase(Enum):
    """A rule on one boolean axis."""

    ANY = "any"
    ONLY = "only"
    NEVER = "never"

    def holds(self, value: bool) -> bool:
        """Whether the axis' value is allowed."""
        return self is Phase.ANY or (self is Phase.ONLY) == value


@attrs.frozen
class TokenRange:
    """Token counts `first` to `last`, both included; `last` None has no end."""

    first: int
    last: int | None = None

    def __attrs_post_init__(self) -> None:
        if self.first < 0 or (self.last is not None and self.last < self.first):
            raise WindowsError(f"range {self}: accepted are FIRST..LAST with 0 <= FIRST <= LAST, and FIRST..")

    def holds(self, num_tokens: int) -> bool:
        """Whether `num_tokens` lies in the range."""
        return self.first <= num_tokens and (self.last is None or num_tokens <= self.last)

    def __str__(self) -> str:
        return f"{self.first}..{'' if self.last is None else self.last}"

    @classmethod
    def parse(cls, text: str) -> TokenRange:
        """Reads "1..16" or "256.."; WindowsError otherwise."""
        match = re.fullmatch(r"([0-9]{1,18})\.\.([0-9]{1,18})?", text)
        if match is None:
            raise WindowsError(f'{text!r} is not a token range; accepted are "1..16" and "256.."')
        return cls(int(match[1]), None if match[2] is None else int(match[2]))


@attrs.frozen(kw_only=True)
class Window:
    """One row: the token ranges and the rules on the two boolean axes within which a tier is worth choosing."""

    tokens: tuple[TokenRange, ...] = ()
    graph: Phase = Phase.ANY
    decode: Phase = Phase.ANY

    def __attrs_post_init__(self) -> None:
        for before, after in zip(self.tokens, self.tokens[1:], strict=False):
            if before.last is None or after.first <= before.last:
                raise WindowsError(f"ranges {before} and {after}: ranges must ascend and not overlap")

    def obstacle(self, axes: Axes) -> str | None:
        """The first condition that `axes` do not meet, in words; None if all hold."""
        if not any(r.holds(axes.num_tokens) for r in self.tokens):
            if not self.tokens:
                return "its window is empty (not measured)"
            return f"{axes.num_tokens} tokens are outside its window {', '.join(map(str, self.tokens))}"
        for name, rule, value in (("graph", self.graph, axes.graph), ("decode", self.decode, axes.decode)):
            if not rule.holds(value):
                return f"its window is {name} {rule.value}, this forward has {name}={value}"
        return None

    def __str__(self) -> str:
        rules = [f"{n} {r.value}" for n, r in (("graph", self.graph), ("decode", self.decode)) if r is not Phase.ANY]
        return ", ".join([" ".join(map(str, self.tokens)) or "none", *rules])


@attrs.frozen(kw_only=True)
class Timings:
    """Measured times of one tier: `us[i]` microseconds for one call of `tokens[i]` rows, ascending."""

    tokens: tuple[int, ...]
    us: tuple[float, ...]

    def __attrs_post_init__(self) -> None:
        if not self.tokens or len(self.tokens) != len(self.us):
            raise WindowsError(f"{len(self.tokens)} tokens and {len(self.us)} us given; accepted are as many, from 1")
        for before, after in zip((0, *self.tokens), self.tokens, strict=False):
            if after <= before:
                raise WindowsError(f"tokens {list(self.tokens)}: accepted are ascending whole numbers from 1")
        for us in self.us:
            if not 0 < us < math.inf:
                raise WindowsError(f"us {us!r}: accepted are finite numbers above 0")

    def estimate(self, num_tokens: int) -> float:
        """Microseconds of a call: on the straight line between two measured sizes.

        Below the smallest one its time, beyond the largest its time per row.
        """
        place = bisect_left(self.tokens, num_tokens)
        if place == len(self.tokens):
            return self.us[-1] * num_tokens / self.tokens[-1]
        if place == 0:
            return self.us[0]
        (before, after), (low, high) = self.tokens[place - 1 : place + 1], self.us[place - 1 : place + 1]
        return low + (high - low) * (num_tokens - before) / (after - before)

    def covers(self, num_tokens: int) -> bool:
        """Whether `num_tokens` lies between the smallest and the largest measured size."""
        return self.tokens[0] <= num_tokens <= self.tokens[-1]


@attrs.frozen(kw_only=True)
class Windows(Generic[T]):
    """A table of windows for the members of one tier enum.

    Attributes:
        tiers: the enum; its last member is the fallback, whose row accepts everything.
        rows: the windows by tier. Tiers that have none are never chosen.
        family: the device family the table was measured on, or "default", "host".
        world_size: the number of ranks it was measured with; 0 for any.
        provenance: where the numbers come from.
        settings: settings that the file suggests (`k3comm.Settings.with_file` validates them).
        measured: texts about the run that the rows come from, by key.
        timings: times that were measured, by tier. They choose nothing and are not voted on.
        source: the file, for reports.
    """

    tiers: type[T]
    rows: Mapping[T, Window] = attrs.field(converter=by_key)
    family: str = "default"
    world_size: int = 0
    provenance: str = ""
    settings: Mapping[str, Any] = attrs.field(factory=dict, converter=by_key, hash=False)
    measured: Mapping[str, str] = attrs.field(factory=dict, converter=by_key, hash=False)
    timings: Mapping[T, Timings] = attrs.field(factory=dict, converter=by_key, hash=False)
    source: str = ""

    def __attrs_post_init__(self) -> None:
        last = max(self.tiers)
        if self.rows.get(last) != Window(tokens=(TokenRange(0),)):
            raise WindowsError(
                f'[tiers.{last.name}]: {self.rows.get(last, "no row")}; accepted is tokens = ["0.."] without rules, '
                "since this tier takes what no other does"
            )

    def describe(self) -> dict[str, str]:
        """One line a tier, as voted on: what is compared between ranks is the content, not the path."""
        return {tier.name: str(window) for tier, window in self.rows.items()}


def parse_windows(document: Mapping[str, Any], tiers: type[T], source: str = "") -> Windows[T]:
    """Validates a parsed TOML document.

    Args:
        document: what `tomllib` returned.
        tiers: the enum whose members the rows name.
        source: the file's name, for errors.

    Raises:
        WindowsError: naming the file, the place in it, what stands there and what is accepted.
    """
    at = source or "windows"
    accepted = {"schema", "family", "world_size", "provenance", "settings", "measured", "timings", "tiers"}
    _known(document, accepted, at)
    if type(document.get("schema")) is not int or document["schema"] != SCHEMA:
        raise WindowsError(f"{at}: schema: {document.get('schema')!r} given; this version reads {SCHEMA}")
    family = _typed(document, "family", str, "default", at)
    provenance = _typed(document, "provenance", str, "", at)
    world_size = _typed(document, "world_size", int, 0, at)
    settings = _typed(document, "settings", dict, {}, at)
    if world_size < 0:
        raise WindowsError(f"{at}: world_size: {world_size} given; accepted are whole numbers from 0 (any)")
    measured = _typed(document, "measured", dict, {}, at)
    for name in measured:
        _typed(measured, name, str, "", f"{at}: [measured]")
    rows: dict[T, Window] = {}
    for name, place, row in _tables(document, "tiers", tiers, at):
        rows[tiers[name]] = _window(row, place)
    timings: dict[T, Timings] = {}
    for name, place, row in _tables(document, "timings", tiers, at):
        timings[tiers[name]] = _timings(row, place)
    try:
        return Windows(
            tiers=tiers,
            rows=rows,
            family=family,
            world_size=world_size,
            provenance=provenance,
            settings=settings,
            measured=measured,
            timings=timings,
            source=source,
        )
    except WindowsError as error:
        raise WindowsError(f"{at}: {error}") from None


def load_windows(path: str | os.PathLike[str], tiers: type[T] | None = None) -> Windows[T]:
    """Reads a windows file of your own.

    Raises:
        WindowsError: the file can't be read, is not TOML, or is not valid; names the file and the place in it.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise WindowsError(f"{path}: can't be read: {error.strerror or error}") from None
    # TOMLDecodeError and UnicodeDecodeError are ValueErrors; brackets in brackets without end make tomllib recurse.
    except (ValueError, RecursionError) as error:
        raise WindowsError(f"{path}: can't be read as TOML: {error}") from None
    return parse_windows(document, tiers or Tier, str(path))  # type: ignore[arg-type]


def windows_toml(windows: Windows[Any]) -> str:
    """The file that holds a table: `parse_windows` of it gives the table again, but for `source`."""
    lines = [f"schema = {SCHEMA}", f"family = {_toml(windows.family)}", f"world_size = {windows.world_size}"]
    lines.append(f"provenance = {_toml(windows.provenance)}")
    for title, texts in (("settings", windows.settings), ("measured", windows.measured)):
        if texts:
            lines += ["", f"[{title}]", *(f"{_key(name)} = {_toml(value)}" for name, value in texts.items())]
    for tier, row in windows.rows.items():
        lines += ["", f"[tiers.{tier.name}]", f"tokens = {_toml([str(tokens) for tokens in row.tokens])}"]
        for name, rule in (("graph", row.graph), ("decode", row.decode)):
            if rule is not Phase.ANY:
                lines.append(f"{name} = {_toml(rule.value)}")
    for tier, times in windows.timings.items():
        lines += ["", f"[timings.{tier.name}]", f"tokens = {_toml(times.tokens)}", f"us = {_toml(times.us)}"]
    return "\n".join([*lines, ""])


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _toml(name)


def _toml(value: Any) -> str:
    """A value as TOML. Its strings are JSON's, but that JSON leaves DEL as it is; its floats are Python's."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    if type(value) is float:
        return repr(value)
    if type(value) not in (str, bool, int):
        raise WindowsError(f"{value!r} given; accepted are texts, numbers, booleans and arrays of them")
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


@cache
def packaged_windows() -> tuple[Windows[Tier], ...]:
    """The tables that ship with k3comm, in file name order."""
    folder = Path(__file__).with_name("windows")
    return tuple(
        parse_windows(tomllib.loads(file.read_text(encoding="utf-8")), Tier, file.name)
        for file in sorted(folder.glob("*.toml"))
    )


@attrs.frozen
class WindowsChoice:
    """The table for a machine, and why if it is not an exact match (`warning` is "" otherwise)."""

    windows: Windows[Tier]
    warning: str = ""


def choose_windows(family: str, world_size: int, tables: Iterable[Windows[Tier]] | None = None) -> WindowsChoice:
    """The table for a device family and a number of ranks.

    The exact (family, world size) wins, or the family's table for any world size; else the same family with the
    nearest world size (the smaller one of two), with a warning; else the packaged "default".
    """
    tables = tuple(packaged_windows() if tables is None else tables)
    of_family = [t for t in tables if t.family == family]
    for measured_with in (world_size, 0):
        for table in of_family:
            if table.world_size == measured_with:
                return WindowsChoice(table)
    if of_family:
        nearest = min(of_family, key=lambda t: (abs(t.world_size - world_size), t.world_size))
        return WindowsChoice(
            nearest,
            f"no windows were measured for {family} with {world_size} ranks; "
            f"using those for {nearest.world_size} ranks ({nearest.source})",
        )
    default = next((t for t in tables if t.family == "default"), None)
    if default is None:
        raise WindowsError(f'no table is for {family}, and none is of the family "default"')
    return WindowsChoice(default)


def _window(row: Mapping[str, Any], place: str) -> Window:
    _known(row, {"tokens", "graph", "decode"}, place)
    texts = _typed(row, "tokens", list, [], place)
    rules = {}
    for name in ("graph", "decode"):
        try:
            rules[name] = Phase(row.get(name, "any"))
        except ValueError:
            raise WindowsError(
                f"{place}: {name}: {row[name]!r} given; accepted are {', '.join(p.value for p in Phase)}"
            ) from None
    try:
        ranges = tuple(TokenRange.parse(text if isinstance(text, str) else repr(text)) for text in texts)
        return Window(tokens=ranges, **rules)
    except WindowsError as error:
        raise WindowsError(f"{place}: tokens: {error}") from None


def _tables(
    document: Mapping[str, Any], key: str, tiers: type[T], at: str
) -> Iterable[tuple[str, str, Mapping[str, Any]]]:
    """The tables under `key`, each with the tier's name and its place in the file."""
    for name, row in _typed(document, key, dict, {}, at).items():
        place = f"{at}: [{key}.{name}]"
        if name not in tiers.__members__:
            raise WindowsError(f"{place}: no such tier; accepted are {', '.join(tiers.__members__)}")
        if not isinstance(row, dict):
            raise WindowsError(f"{place}: {row!r} given; accepted is a table")
        yield name, place, row


def _timings(row: Mapping[str, Any], place: str) -> Timings:
    _known(row, {"tokens", "us"}, place)
    tokens, us = _typed(row, "tokens", list, [], place), _typed(row, "us", list, [], place)
    for one in tokens:
        if type(one) is not int:
            raise WindowsError(f"{place}: tokens: {one!r} given; accepted are whole numbers")
    for number in us:
        if type(number) not in (int, float):
            raise WindowsError(f"{place}: us: {number!r} given; accepted are numbers")
    try:
        return Timings(tokens=tuple(tokens), us=tuple(map(float, us)))
    except (WindowsError, OverflowError) as error:
        raise WindowsError(f"{place}: {error}") from None


def _known(table: Mapping[str, Any], accepted: set[str], place: str) -> None:
    for name in table:
        if name not in accepted:
            raise WindowsError(f"{place}: {name}: no such key; accepted are {', '.join(sorted(accepted))}")


_KINDS = {str: "a string", int: "a whole number", list: "an array", dict: "a table"}


def _typed(table: Mapping[str, Any], name: str, kind: type, default: Any, place: str) -> Any:
    value = table.get(name, default)
    if type(value) is not kind:
        raise WindowsError(f"{place}: {name}: {value!r} given; accepted is {_KINDS[kind]}")
    return value
