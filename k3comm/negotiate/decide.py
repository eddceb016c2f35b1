"""The vote's matrix, and what follows from it. Pure: every rank holds the same matrix and decides the same.

A vote is one MIN all-reduce that is a gather: a matrix of 16 rows by 64 int64 cells; each rank writes its own row and
INT64_MAX everywhere else. Both sizes are fixed whatever the version and the number of tiers, since a backend may
abort the process when lengths differ.

    cell 0   MAGIC            cell 4       the host: a hash of its identity, past UNKNOWN_HOSTS
    cell 1   FORMAT           cell 5       hash of the device's UUID, 0 without one
    cell 2   the rank         cells 6..13  a hash of each of GROUPS
    cell 3   1 if it failed   cell 14      hash of the NVLink domain, 0 without one
                              cell 15      1 + the number by which its process knows the device, 0 without one
                              cells 16..   four a tier: capacity and reason on one host, the same across hosts
                              cell 63      how many communicators its process has made
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import attrs

from k3comm.facts import Reason, Verdict
from k3comm.tiers.select import Agreement
from k3comm.tiers.tier import Tier
from k3comm.tiers.windows import by_key

MAGIC = 0x6B33636F6D6D  # "k3comm"
FORMAT = 2
"""The layout of the cells. A change of it is a new number, and ranks that differ say so."""
MAX_RANKS = 16
"""The largest W."""
EMPTY = 2**63 - 1
UNKNOWN_HOSTS = 4096
"""A host cell below this is an unknown host, and the errno for which it is; 0 without one."""
COLUMNS = 64
GROUPS = ("version", "sources", "spec", "layout", "settings", "operations", "windows", "environment")
"""What must be equal on all ranks; each is a table of fields, compared by hash."""
_FIRST_GROUP, _FIRST_TIER, _CELLS_A_TIER, _SERIAL = 6, 16, 4, 63
_REASON_SHIFT = 2**32

TEXT_BYTES = 16384
"""Bytes of one rank's text in the gather that follows a mismatch or a failure."""
VALUE_CHARACTERS = 300
"""Characters of one field's value there."""

Fields = Mapping[str, Mapping[str, str]]
"""Group -> field -> value, as text."""


def digest(text: str) -> int:
    """A hash that is the same in every process: 62 bits of SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big") >> 2


@attrs.frozen(kw_only=True)
class Ballot:
    """What one rank brings to the vote.

    Attributes:
        fields: what must be equal on all ranks.
        host, device_uuid: where it is; "" where that is unknown, or where there is no device to be shared.
        host_code: where the host is unknown, the errno for which it is.
        domain: the NVLink domain that the device is in; "" without one.
        ordinal: the number by which the process knows its device; None without one.
        verdicts: its word on each tier, on one host and across hosts.
        failure: why it can't take part; "" if it can.
        serial: how many communicators its process has made.
    """

    fields: Fields = attrs.field(factory=dict)
    host: str = ""
    host_code: int = 0
    device_uuid: str = ""
    domain: str = ""
    ordinal: int | None = None
    verdicts: Mapping[Tier, tuple[Verdict, Verdict]] = attrs.field(factory=dict)
    failure: str = ""
    serial: int = 0

    def matrix(self, rank: int) -> list[int]:
        """The cells to be MIN-reduced, row by row."""
        cells = [EMPTY] * (MAX_RANKS * COLUMNS)
        row = [0] * COLUMNS
        row[0:4] = MAGIC, FORMAT, rank, int(bool(self.failure))
        row[4] = UNKNOWN_HOSTS + digest(self.host) if self.host else self.host_code % UNKNOWN_HOSTS
        row[5] = digest(self.device_uuid) if self.device_uuid else 0
        for column, group in enumerate(GROUPS, _FIRST_GROUP):
            row[column] = digest(json.dumps(dict(self.fields.get(group, {})), sort_keys=True))
        row[14] = digest(self.domain) if self.domain else 0
        row[15] = 0 if self.ordinal is None else self.ordinal + 1
        for index, tier in enumerate(Tier):
            if tier in self.verdicts:
                at = _FIRST_TIER + index * _CELLS_A_TIER
                row[at : at + _CELLS_A_TIER] = [
                    n for verdict in self.verdicts[tier] for n in (verdict.capacity, pack_reason(verdict))
                ]
        row[_SERIAL] = self.serial
        cells[rank * COLUMNS : (rank + 1) * COLUMNS] = row
        return cells

    def text(self, groups: Sequence[str]) -> bytes:
        """TEXT_BYTES of JSON for the gather: the failure, or the values of `groups`, cut to fit."""
        # A character takes up to 12 bytes in JSON, so what fits is found by trying.
        for limit in (VALUE_CHARACTERS, VALUE_CHARACTERS // 4, VALUE_CHARACTERS // 16):
            shown: dict[str, object] = {"failure": self.failure[: 8 * limit]}
            for group in groups:
                values = self.fields.get(group, {})
                shown[group] = {name: _cut(value, limit) for name, value in values.items()}
            payload = json.dumps(shown).encode()
            if len(payload) <= TEXT_BYTES:
                return payload.ljust(TEXT_BYTES, b" ")
        return json.dumps({"failure": self.failure[:VALUE_CHARACTERS]}).encode().ljust(TEXT_BYTES, b" ")


@attrs.frozen(kw_only=True)
class Place:
    """Where a rank is, as hashes; 0 is unknown, or none."""

    host: int
    device_uuid: int
    domain: int
    ordinal: int


def places(matrix: Sequence[int], world_size: int) -> list[Place]:
    """Every rank's place, from the reduced matrix."""
    rows = [matrix[rank * COLUMNS : (rank + 1) * COLUMNS] for rank in range(world_size)]
    return [
        Place(host=row[4] if _host_known(row) else 0, device_uuid=row[5], domain=row[14], ordinal=row[15])
        for row in rows
    ]


@attrs.frozen
class Refusal:
    """A rank that says no to a tier."""

    tier: Tier
    rank: int
    verdict: Verdict

    def __str__(self) -> str:
        return f"rank {self.rank}: {self.verdict}"


@attrs.frozen(kw_only=True)
class Decision:
    """What the matrix says; equal on every rank.

    Attributes:
        world_size: ranks W.
        hosts: for each rank, the first rank on its host; a rank whose host is unknown is on one of its own.
        mismatched: the members of GROUPS that differ.
        failed: ranks that can't take part.
        shared_devices: for each GPU that several ranks are on, those ranks.
        capacities: rows by tier, of the tiers that all can do.
        refusals: who said no to what, in tier and rank order.
        failures: agreed tiers that could not be armed, and why; the same text on every rank.
        serial: the communicator's number: of all ranks' counts the largest, so no rank has used it before.
    """

    world_size: int
    hosts: tuple[int, ...]
    mismatched: tuple[str, ...]
    failed: tuple[int, ...]
    shared_devices: tuple[tuple[int, ...], ...]
    capacities: Mapping[Tier, int] = attrs.field(converter=by_key)
    refusals: tuple[Refusal, ...]
    failures: Mapping[Tier, str] = attrs.field(factory=dict, converter=by_key)
    serial: int = 0

    @property
    def one_host(self) -> bool:
        """Whether all ranks are on one machine."""
        return len(set(self.hosts)) == 1

    def agreement(self) -> Agreement[Tier]:
        """The agreed tiers."""
        return Agreement(self.capacities)

    def armed(self, failures: Mapping[Tier, str]) -> Decision:
        """The decision less the tiers that could not be armed."""
        kept = {tier: rows for tier, rows in self.capacities.items() if tier not in failures}
        return attrs.evolve(self, capacities=kept, failures=failures)

    def refused(self, refusals: Sequence[Refusal]) -> Decision:
        """The decision less the tiers that somebody refused afterwards."""
        gone = {one.tier for one in refusals}
        return attrs.evolve(
            self,
            capacities={tier: rows for tier, rows in self.capacities.items() if tier not in gone},
            refusals=tuple(sorted([*self.refusals, *refusals], key=lambda one: (one.tier, one.rank))),
        )

    def refusal(self, tier: Tier) -> str:
        """Who said no to a tier and why, ranks of the same reason together; "" if nobody did."""
        if tier in self.failures:
            return self.failures[tier]
        ranks: dict[str, list[int]] = {}
        for one in self.refusals:
            if one.tier is tier:
                ranks.setdefault(str(one.verdict), []).append(one.rank)
        if list(ranks.values()) == [list(range(self.world_size))]:
            why = next(iter(ranks))
            return f"{why} ({self.spread})" if why == Reason.ACROSS_HOSTS.text(0) else why
        return "; ".join(f"{name_ranks(who)}: {why}" for why, who in ranks.items())

    @property
    def spread(self) -> str:
        """Which ranks share a host, for people."""
        together = [
            [rank for rank, host in enumerate(self.hosts) if host == first] for first in sorted(set(self.hosts))
        ]
        if len(together) == self.world_size:
            return "every rank is on a host of its own"
        return "; ".join(f"{name_ranks(ranks)} on one host" for ranks in together)


def decide(matrix: Sequence[int], world_size: int) -> Decision:
    """What follows from the reduced matrix (MAX_RANKS * COLUMNS cells)."""
    rows = [matrix[rank * COLUMNS : (rank + 1) * COLUMNS] for rank in range(world_size)]
    hosts = tuple(
        next(i for i in range(world_size) if rows[i][4] == row[4]) if _host_known(row) else rank
        for rank, row in enumerate(rows)
    )
    mismatched = tuple(
        group for column, group in enumerate(GROUPS, _FIRST_GROUP) if len({row[column] for row in rows}) > 1
    )
    if any(list(row[:3]) != [MAGIC, FORMAT, rank] for rank, row in enumerate(rows)):
        mismatched = ("version",)
    failed = tuple(rank for rank, row in enumerate(rows) if row[3])
    on_device: dict[tuple[int, int], list[int]] = {}
    for rank, row in enumerate(rows):
        if row[5]:
            on_device.setdefault((row[4], row[5]), []).append(rank)
    one_host = len(set(hosts)) == 1
    maybe_one_host = not one_host and len({row[4] for row in rows if _host_known(row)}) <= 1
    capacities, refusals = {}, []
    if not failed and not mismatched:
        for index, tier in enumerate(Tier):
            at = _FIRST_TIER + index * _CELLS_A_TIER
            here, across = ([unpack_reason(row[n + 1], row[n]) for row in rows] for n in (at, at + 2))
            verdicts = here if one_host else across
            if all(verdicts):
                capacities[tier] = min(verdict.capacity for verdict in verdicts)
            elif maybe_one_host:
                # That nobody knows the span is the fault of the ranks that don't know their host, and of no other.
                verdicts = [
                    Verdict.no(Reason.HOST_UNKNOWN, row[4]) if one and not _host_known(row) else one
                    for one, row in zip(here, rows, strict=True)
                ]
            refusals += [Refusal(tier, rank, verdict) for rank, verdict in enumerate(verdicts) if not verdict]
    return Decision(
        world_size=world_size,
        hosts=hosts,
        mismatched=mismatched,
        failed=failed,
        shared_devices=tuple(tuple(ranks) for ranks in on_device.values() if len(ranks) > 1),
        capacities=capacities,
        refusals=tuple(refusals),
        serial=max(row[_SERIAL] for row in rows),
    )


def disagreement(decision: Decision, texts: Sequence[bytes]) -> str:
    """The one text that every rank raises, from every rank's `Ballot.text`.

    A failure names its ranks; a mismatch names group, field, each value, and the ranks that have it.
    """
    shown = [json.loads(text) for text in texts]
    lines = []
    failures: dict[str, list[int]] = {}
    for rank in decision.failed:
        failures.setdefault(shown[rank]["failure"], []).append(rank)
    lines += [f"{name_ranks(ranks)} can't take part: {printable(why, keep=chr(10))}" for why, ranks in failures.items()]
    healthy = [rank for rank in range(decision.world_size) if rank not in decision.failed]
    for group in decision.mismatched if not decision.failed else ():
        before = len(lines)
        tables = {rank: shown[rank].get(group, {}) for rank in healthy}
        for name in sorted({name for table in tables.values() for name in table}):
            values: dict[str, list[int]] = {}
            for rank, table in tables.items():
                values.setdefault(table.get(name, "absent"), []).append(rank)
            if len(values) > 1:
                sides = "; ".join(f"{printable(value)} on {name_ranks(ranks)}" for value, ranks in values.items())
                lines.append(f"{group}.{printable(name)} differs: {sides}")
        if len(lines) == before:
            lines.append(f"{group} differs between ranks, in values too long to show")
    return "\n".join(["the ranks can't agree", *lines])


def printable(text: str, keep: str = "") -> str:
    """The text with what can't be shown in one line, or in no encoding (lone surrogates), as an escape.

    Also what a terminal would obey. For what comes from outside: names of hosts, devices and files, versions, errors.
    """
    return "".join(
        one if one.isprintable() or one in keep else one.encode("unicode_escape").decode("ascii") for one in text
    )


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks for people: rank 1; ranks 0, 2 and 3."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _host_known(row: Sequence[int]) -> bool:
    return row[4] >= UNKNOWN_HOSTS


def pack_reason(verdict: Verdict) -> int:
    """A verdict's reason and number as one cell; 0 for a yes."""
    return verdict.reason * _REASON_SHIFT + verdict.detail


def unpack_reason(cell: int, capacity: int = 0) -> Verdict:
    """The verdict of a cell made by `pack_reason`."""
    return Verdict(capacity, Reason(cell // _REASON_SHIFT), cell % _REASON_SHIFT)


def _cut(value: str, limit: int) -> str:
    if len(value) <= limit:
        return value
    return f"{value[:limit]}... ({len(value)} characters, SHA-256 {digest(value):x})"
