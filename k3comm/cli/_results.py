"""What a bench found, as a value and as the JSON file that `bench --json` writes and `tune` reads. Pure: no torch.

{"schema": 1, "date": ..., "command": ..., "family": "sm90", "world_size": 2, "device": ..., "versions": {...},
 "hidden": 7168, "latent": 3584, "dtype": "bfloat16", "graph": true, "layers": 8, "repeats": 5, "replays": 200,
 "measurements": [{"arm": ..., "tier": ..., "numerics": ..., "rows": 1, "chained_us": [...], "isolated_us": [...],
                   "error": 2.1e-3, "engaged": 4800, "calls": 4800, "census": {...}, "replays": null,
                   "extra_bytes": null, "over_rival": {"chained": 0.9, "isolated": 0.9}}, ...],
 "selected": {"1": "TAIL_FUSION", ...}, "left_out": {arm: why}, "failures": [...], "shared_bytes": {arm: bytes}}

"over_rival" is computed from the rest and not read back; "replays", "extra_bytes" and "shared_bytes" may be absent.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from k3comm.errors import InputError
from k3comm.tiers import Numerics, Tier

SCHEMA = 1
ENOUGH_REPEATS, ENOUGH_REPLAYS, ENOUGH_LAYERS = 5, 200, 8
"""What a figure that is quoted rests on; less is a short run, and is marked as one."""


@attrs.frozen(kw_only=True)
class Measurement:
    """One arm at one number of rows.

    Attributes:
        arm: its name; a tier's is the tier's own.
        tier, numerics: None for a rival.
        rows: m.
        chained_us: microseconds of a call in a chain of layers, one figure a repetition: the median of its replays on
            the slowest rank.
        isolated_us: the same of a call that comes after an ordinary kernel, with nothing of its own in the caches.
        error: rms(out - x) / rms(x - residual), x in float64, of the rows that were checked before anything was timed.
        engaged, calls: how often what the arm is named after really ran, and how often it was called.
        census: what ran on the device in one pass through the layers, by name, where it was asked for.
        replays: the passes in each repetition, where a limit of time made them fewer than the run's; None elsewhere.
        extra_bytes: what a call takes from torch's allocator at most, beside its inputs and its result, on the rank
            that takes most; None where it was not asked for, and on CPU, where no allocator tells.
    """

    arm: str
    tier: Tier | None = None
    numerics: Numerics | None = None
    rows: int
    chained_us: tuple[float, ...]
    isolated_us: tuple[float, ...]
    error: float
    engaged: int
    calls: int
    census: Mapping[str, int] = attrs.field(factory=dict)
    replays: int | None = None
    extra_bytes: int | None = None

    @property
    def chained(self) -> float:
        """The median of `chained_us`."""
        return statistics.median(self.chained_us)

    @property
    def isolated(self) -> float:
        """The median of `isolated_us`."""
        return statistics.median(self.isolated_us)

    @property
    def spread(self) -> float:
        """The range of `chained_us`: what one run says about its own noise."""
        return max(self.chained_us) - min(self.chained_us)


@attrs.frozen(kw_only=True)
class Results:
    """One run of the bench; the attributes are the file's keys (module docstring).

    Attributes:
        shared_bytes: of the memory that ranks share for an arm as long as it can run, on each rank, by arm; None where
            it can't be told; empty where it was not asked for.
    """

    date: str
    command: str
    family: str
    world_size: int
    device: str
    versions: Mapping[str, str]
    hidden: int
    latent: int
    dtype: str
    graph: bool
    layers: int
    repeats: int
    replays: int
    measurements: tuple[Measurement, ...]
    selected: Mapping[int, Tier] = attrs.field(factory=dict)
    left_out: Mapping[str, str] = attrs.field(factory=dict)
    failures: tuple[str, ...] = ()
    shared_bytes: Mapping[str, int | None] = attrs.field(factory=dict)

    @property
    def short(self) -> bool:
        """Whether too little was measured for some figure that is quoted."""
        return self._short or any(map(self.rests_on_few, self.measurements))

    @property
    def _short(self) -> bool:
        return self.repeats < ENOUGH_REPEATS or self.replays < ENOUGH_REPLAYS or self.layers < ENOUGH_LAYERS

    def passes(self, one: Measurement) -> int:
        """Passes through the layers in each repetition of a measurement."""
        return self.replays if one.replays is None else one.replays

    def rests_on_few(self, one: Measurement) -> bool:
        """Whether too little was measured for this one to be quoted."""
        return self._short or self.passes(one) < ENOUGH_REPLAYS

    def over_rival(self, one: Measurement, figure: str = "chained") -> float | None:
        """Its time over that of the fastest rival at that number of rows: below 1 it is faster; None without rivals.

        Args:
            figure: "chained" or "isolated".
        """
        rivals = [
            getattr(other, figure) for other in self.measurements if other.tier is None and other.rows == one.rows
        ]
        return float(getattr(one, figure) / min(rivals)) if rivals else None

    @property
    def rows(self) -> tuple[int, ...]:
        """The measured numbers of rows, ascending."""
        return tuple(sorted({one.rows for one in self.measurements}))

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms, in the order in which they were measured."""
        return tuple(dict.fromkeys(one.arm for one in self.measurements))

    def at(self, arm: str, rows: int) -> Measurement | None:
        """What was measured of an arm at a size."""
        return next((one for one in self.measurements if (one.arm, one.rows) == (arm, rows)), None)

    def origin(self) -> str:
        """In one line, where the figures come from."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        how = "CUDA graph replay" if self.graph else "wall clock"
        least = min(map(self.passes, self.measurements), default=self.replays)
        passes = str(self.replays) if least == self.replays else f"{least} to {self.replays}"
        return (
            f"{self.date}, {self.world_size} x {self.device}, H {self.hidden}, L {self.latent}, {self.dtype}, {how}, "
            f"{self.repeats} x {passes} passes through {self.layers} layers"
            f"{' (a short run)' if self.short else ''}; {versions}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The file's content."""
        found = {field.name: getattr(self, field.name) for field in attrs.fields(Results)}
        found["measurements"] = [
            {
                **_measurement_dict(one),
                "over_rival": {figure: self.over_rival(one, figure) for figure in ("chained", "isolated")},
            }
            for one in self.measurements
        ]
        found["selected"] = {str(rows): tier.name for rows, tier in self.selected.items()}
        return {"schema": SCHEMA, **found, "short": self.short}


def load_results(path: str) -> Results:
    """Reads a file of `bench --json`.

    Raises:
        InputError: it can't be read or is not such a file; names the file, the place in it and what is accepted.
    """
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: can't be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: can't be read as JSON: {error}") from None
    try:
        return parse_results(document, path)
    except (OverflowError, ValueError) as error:  # numbers that Python itself refuses
        raise error if isinstance(error, InputError) else InputError(f"{path}: {error}") from None


def parse_results(document: Any, source: str) -> Results:
    """Validates what `Results.to_dict` gave; see `load_results`."""
    reader = _Reader(source)
    reader.kind("the file", document, dict)
    if document.get("schema") != SCHEMA:
        raise InputError(f"{source}: schema: {document.get('schema')!r} given; this version reads {SCHEMA}")
    texts: dict[str, Any] = {
        name: reader.get(document, name, str) for name in ("date", "command", "family", "device", "dtype")
    }
    names = ("world_size", "hidden", "latent", "layers", "repeats", "replays")
    numbers: dict[str, Any] = {name: reader.count(document, name) for name in names}
    measurements = []
    for place, one in enumerate(reader.get(document, "measurements", list)):
        measurements.append(_measurement(reader.within(f"measurements[{place}]"), one))
    if len({(one.arm, one.rows) for one in measurements}) < len(measurements):
        raise InputError(f"{source}: measurements: an arm is there twice at one number of rows")
    for one in measurements:
        if len(one.chained_us) != numbers["repeats"] or len(one.isolated_us) != numbers["repeats"]:
            raise InputError(f"{source}: {one.arm} at {one.rows} rows: accepted are {numbers['repeats']} repetitions")
    selected = {}
    for rows, name in reader.get(document, "selected", dict).items():
        if not (rows.isascii() and rows.isdigit()):
            raise InputError(f"{source}: selected: {rows!r} given; accepted are numbers of rows")
        selected[int(rows)] = reader.member("selected", name, Tier.__members__)
    return Results(
        **texts,
        **numbers,
        versions=reader.texts(document, "versions"),
        graph=reader.get(document, "graph", bool),
        measurements=tuple(measurements),
        selected=selected,
        left_out=reader.texts(document, "left_out"),
        failures=tuple(reader.kind("failures", one, str) for one in reader.get(document, "failures", list)),
        shared_bytes={
            arm: None if nbytes is None else reader.nbytes(f"shared_bytes.{arm}", nbytes)
            for arm, nbytes in reader.kind("shared_bytes", document.get("shared_bytes", {}), dict).items()
        },
    )


def write_atomically(path: str, text: str) -> None:
    """A reader sees the old file or the whole new one, also after a crash.

    Raises:
        InputError: it can't be written.
    """
    target = Path(path)
    # Beside the target, since a rename is atomic within one file system only; named by the process, since others write.
    scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        scratch.replace(target)
    except OSError as error:
        raise InputError(f"{path}: can't be written: {error.strerror or error}") from None
    finally:
        if scratch.exists():
            scratch.unlink()


def _measurement_dict(one: Measurement) -> dict[str, Any]:
    found = attrs.asdict(one)
    found["tier"] = None if one.tier is None else one.tier.name
    found["numerics"] = None if one.numerics is None else one.numerics.name
    return found


def _measurement(reader: _Reader, one: Any) -> Measurement:
    reader.kind("it", one, dict)
    tier, numerics = one.get("tier"), one.get("numerics")
    if (tier is None) != (numerics is None):
        raise reader.error("numerics", numerics, "a class for a tier, and none for a rival")
    error = reader.get(one, "error", float)
    if not 0 <= error < math.inf:
        raise reader.error("error", error, "finite numbers from 0")
    return Measurement(
        arm=reader.get(one, "arm", str),
        tier=None if tier is None else reader.member("tier", tier, Tier.__members__),
        numerics=None if numerics is None else reader.member("numerics", numerics, Numerics.__members__),
        rows=reader.count(one, "rows"),
        chained_us=reader.times(one, "chained_us"),
        isolated_us=reader.times(one, "isolated_us"),
        error=error,
        engaged=reader.count(one, "engaged"),
        calls=reader.count(one, "calls"),
        census={name: reader.count(one["census"], name) for name in reader.get(one, "census", dict)},
        replays=None if one.get("replays") is None else reader.count(one, "replays"),
        extra_bytes=None if one.get("extra_bytes") is None else reader.nbytes("extra_bytes", one["extra_bytes"]),
    )


@attrs.frozen
class _Reader:
    """Checks values and names their place."""

    source: str

    def within(self, place: str) -> _Reader:
        return _Reader(f"{self.source}: {place}")

    def error(self, name: str, value: object, accepted: str) -> InputError:
        return InputError(f"{self.source}: {name}: {value!r} given; accepted are {accepted}")

    def kind(self, name: str, value: Any, kind: type) -> Any:
        if type(value) is not kind:
            raise self.error(name, value, f"values of the kind {kind.__name__}")
        return value

    def get(self, table: Mapping[str, Any], name: str, kind: type) -> Any:
        return self.kind(name, table.get(name), kind)

    def count(self, table: Mapping[str, Any], name: str) -> int:
        value: int = self.get(table, name, int)
        if value < 1:
            raise self.error(name, value, "whole numbers from 1")
        return value

    def nbytes(self, name: str, value: Any) -> int:
        if type(value) is not int or value < 0:
            raise self.error(name, value, "whole numbers of bytes from 0")
        return value

    def texts(self, table: Mapping[str, Any], name: str) -> dict[str, str]:
        return {key: self.kind(f"{name}.{key}", value, str) for key, value in self.get(table, name, dict).items()}

    def times(self, table: Mapping[str, Any], name: str) -> tuple[float, ...]:
        values = self.get(table, name, list)
        for value in values:
            if type(value) not in (int, float) or not 0 < value < math.inf:
                raise self.error(name, value, "finite microseconds above 0")
        return tuple(map(float, values))

    def member(self, name: str, value: Any, members: Mapping[str, Any]) -> Any:
        if not isinstance(value, str) or value not in members:
            raise self.error(name, value, ", ".join(members))
        return members[value]
